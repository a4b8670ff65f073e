"""`verlc serve` beside the real `openai` and `anthropic` clients: whole answers and streams, tools, log-probs, n, stop, seeds,
errors, retries. The model is a tiny one that `verlc sft` has taught to call a tool, so that calls are real. Log-probs and ids are
compared with those of `verlc generate` to the last bit.

  python tools/oracle_serve.py VERLC     needs openai and anthropic
"""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import anthropic
import openai

TEMPLATE = """{#- <tool_call> -#}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
    {%- for c in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CALL = 'I look.\n<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a + b",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
GREEDY = {"temperature": 0}
failed = []


def check(name, ok, detail=""):
    print(("ok      " if ok else "FAILED  ") + name + ("" if ok else f": {detail}"), flush=True)
    if not ok:
        failed.append(name)


def verlc(*args, **kw):
    p = subprocess.run(
        [sys.argv[1], *map(str, args)], capture_output=True, text=True, env={**os.environ, "VERLC_THREADS": "2"}, **kw
    )
    if p.returncode:
        raise SystemExit(f"verlc {args[0]}: {p.stderr[-800:]}")
    return p.stdout


def taught(d):
    """A model that calls `add` when it is asked for a sum, and counts when it is asked to."""
    verlc("model", "init", "--preset", "tiny", "--out", d / "base", "--seed", "1")
    f = d / "base/tokenizer_config.json"
    f.write_text(json.dumps({**json.loads(f.read_text()), "chat_template": TEMPLATE}))
    rows = []
    for a in range(5):
        for b in range(5):
            rows.append([{"role": "user", "content": f"sum {a} {b}"}, {"role": "assistant", "content": CALL % (a, b)}])
            rows.append(
                [{"role": "user", "content": f"count {a} {b}"}, {"role": "assistant", "content": "1 2 3 4 5 6 7 8 9 äöü done"}]
            )
    (d / "rows.jsonl").write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
    verlc(
        "sft",
        f"data.train_files={d / 'rows.jsonl'}",
        "data.train_batch_size=25",
        "data.max_length=128",
        f"model.path={d / 'base'}",
        "data.max_token_len_per_gpu=2048",
        "engine.dtype=float32",
        "optim.lr=4e-3",
        "trainer.total_training_steps=100",
        "trainer.test_freq=-1",
        "trainer.save_freq=100",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={d / 'run'}",
    )
    return d / "run/global_step_100"


class Server:
    every = []

    def __init__(self, model, *args, env=None):
        Server.every.append(self)
        self.process = subprocess.Popen(
            [sys.argv[1], "serve", model, "--port", "0", "--dtype", "fp32", "--threads", "1", *args],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.at = json.loads(self.process.stdout.readline())

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def user(text):
    return [{"role": "user", "content": text}]


def chats(c, model):
    r = c.chat.completions.create(model="m", messages=user("count 1 2"), temperature=0, max_tokens=40)
    m = r.choices[0]
    check(
        "a chat",
        m.message.content == "1 2 3 4 5 6 7 8 9 äöü done" and m.finish_reason == "stop" and m.message.role == "assistant",
        str(r),
    )
    check(
        "its usage", r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens and r.usage.completion_tokens > 9
    )
    check("models", [x.id for x in c.models.list()] == [str(model)] and c.models.list().data[0].max_model_len == 4096)
    r = c.chat.completions.create(model="m", messages=user("count 1 2"), temperature=0, stop=[" 5", "zzz"], max_tokens=40)
    check("stop", r.choices[0].message.content == "1 2 3 4" and r.choices[0].finish_reason == "stop", str(r))
    r = c.chat.completions.create(model="m", messages=user("count 1 2"), temperature=0, max_completion_tokens=3)
    check("length", r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 3)
    a, b = (
        c.chat.completions.create(model="m", messages=user("x"), temperature=1.5, seed=5, n=3, max_tokens=8) for _ in range(2)
    )
    check(
        "n and seed",
        len(a.choices) == 3
        and [x.message.content for x in a.choices] == [x.message.content for x in b.choices]
        and len({x.message.content for x in a.choices}) > 1
        and [x.index for x in a.choices] == [0, 1, 2],
    )
    a, b = (c.chat.completions.create(model="m", messages=user("x"), temperature=1.5, max_tokens=8) for _ in range(2))
    check("without a seed two answers differ", a.choices[0].message.content != b.choices[0].message.content)
    parts = [{"type": "text", "text": "count"}, {"type": "text", "text": "1 2"}]
    r = c.chat.completions.create(
        model="m",
        messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}],
        temperature=0,
        max_tokens=4,
    )
    check("developer, and content in parts", r.choices[0].message.content is not None)


def streams(c):
    whole = c.chat.completions.create(model="m", messages=user("count 1 2"), temperature=0, max_tokens=40)
    got = list(
        c.chat.completions.create(
            model="m",
            messages=user("count 1 2"),
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(x.choices[0].delta.content or "" for x in got if x.choices)
    check(
        "a stream's pieces are the whole",
        text == whole.choices[0].message.content
        and len(got) > 8
        and got[0].choices[0].delta.role == "assistant"
        and [x.choices[0].finish_reason for x in got if x.choices][-1] == "stop"
        and got[-1].choices == []
        and got[-1].usage.completion_tokens == whole.usage.completion_tokens,
        str(got[-2:]),
    )
    extra = {"include_usage": True, "continuous_usage_stats": True}
    each = list(
        c.chat.completions.create(model="m", messages=user("count 1 2"), extra_body=GREEDY, stream=True, stream_options=extra)
    )
    counts = [x.usage.completion_tokens for x in each]
    check("usage with each piece", counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens, str(counts))
    begun = [*user("count 1 2"), {"role": "assistant", "content": "1 2 3"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, **GREEDY}
    r = c.chat.completions.create(model="m", messages=begun, max_tokens=40, extra_body=more)
    check("an answer goes on", r.choices[0].message.content == " 4 5 6 7 8 9 äöü done", str(r))
    check("one id", len({x.id for x in got}) == 1 and len({x.created for x in got}) == 1)
    got = list(
        c.chat.completions.create(model="m", messages=user("count 1 2"), temperature=0, stop=" 5 6", max_tokens=40, stream=True)
    )
    check("no part of a stop string is streamed", "".join(x.choices[0].delta.content or "" for x in got) == "1 2 3 4")
    got = list(
        c.chat.completions.create(model="m", messages=user("x"), temperature=1.5, seed=5, n=3, max_tokens=8, stream=True)
    )
    want = c.chat.completions.create(model="m", messages=user("x"), temperature=1.5, seed=5, n=3, max_tokens=8)
    check(
        "n in a stream",
        ["".join(x.choices[0].delta.content or "" for x in got if x.choices[0].index == i) for i in range(3)]
        == [x.message.content for x in want.choices],
    )
    with c.chat.completions.create(
        model="m", messages=user("x"), temperature=1, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    ) as s:
        next(iter(s))
    check("a stream that is closed early", c.chat.completions.create(model="m", messages=user("x"), max_tokens=2).choices)


def tools(c):
    r = c.chat.completions.create(model="m", messages=user("sum 3 4"), tools=TOOLS, temperature=0, max_tokens=80)
    m = r.choices[0]
    call = (m.message.tool_calls or [None])[0]
    check(
        "a call",
        call
        and call.function.name == "add"
        and set(json.loads(call.function.arguments)) == {"a", "b"}
        and call.id
        and m.finish_reason == "tool_calls"
        and m.message.content == "I look.",
        str(r),
    )
    got = list(
        c.chat.completions.create(model="m", messages=user("sum 3 4"), tools=TOOLS, temperature=0, max_tokens=80, stream=True)
    )
    text = "".join(x.choices[0].delta.content or "" for x in got)
    calls = [t for x in got for t in x.choices[0].delta.tool_calls or []]
    check(
        "a call in a stream",
        text == "I look."
        and len(calls) == 1
        and calls[0].index == 0
        and calls[0].function.arguments == call.function.arguments
        and got[-1].choices[0].finish_reason == "tool_calls",
        str(got),
    )
    with c.chat.completions.stream(model="m", messages=user("sum 2 1"), tools=TOOLS, temperature=0, max_tokens=80) as s:
        final = s.get_final_completion()
    check("the client's own accumulation", final.choices[0].message.tool_calls[0].function.name == "add", str(final))
    again = [
        *user("sum 3 4"),
        m.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "7"},
    ]
    r = c.chat.completions.create(model="m", messages=again, tools=TOOLS, temperature=0, max_tokens=8)
    check("a turn after a tool's result", r.usage.prompt_tokens > 40)
    first, r = r.usage, c.chat.completions.create(model="m", messages=again, tools=TOOLS, temperature=0, max_tokens=8)
    check(
        "its prompt is in the prefix cache",
        r.usage.prompt_tokens_details.cached_tokens >= first.prompt_tokens // 16 * 16 - 16,
        str(r.usage),
    )
    r = c.chat.completions.create(
        model="m", messages=user("sum 3 4"), tools=TOOLS, tool_choice="none", temperature=0, max_tokens=80
    )
    check("tool_choice none", "<tool_call>" in r.choices[0].message.content and not r.choices[0].message.tool_calls)
    r = c.chat.completions.create(model="m", messages=user("sum 3 4"), tools=TOOLS, temperature=0, max_tokens=30)
    check(
        "a call that is cut is text",
        r.choices[0].finish_reason == "length"
        and not r.choices[0].message.tool_calls
        and "<tool_call>" in r.choices[0].message.content,
        str(r),
    )


def logprobs(c, model):
    r = c.chat.completions.create(
        model="m",
        messages=user("x"),
        temperature=0.7,
        seed=3,
        max_tokens=12,
        logprobs=True,
        top_logprobs=5,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    ids, lp = r.choices[0].token_ids, [t.logprob for t in r.choices[0].logprobs.content]
    request = {"ids": r.prompt_token_ids, "temperature": 0.7, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    out = json.loads(verlc("generate", "--model", model, "--dtype", "fp32", input=json.dumps(request) + "\n"))
    check("ids and log-probs are generate's", out["ids"] == ids and out["logp"] == lp, f"{out['logp']} {lp}")
    tops = [[t.logprob for t in x.top_logprobs] for x in r.choices[0].logprobs.content]
    check("top_logprobs", all(len(t) == 5 and t == sorted(t, reverse=True) for t in tops))
    check(
        "the drawn token among them has its log-prob",
        all(
            t.logprob == x.logprob
            for x in r.choices[0].logprobs.content
            for t in x.top_logprobs
            if t.bytes == x.bytes and t.bytes
        ),
    )
    got = list(
        c.chat.completions.create(
            model="m",
            messages=user("x"),
            temperature=0.7,
            seed=3,
            max_tokens=12,
            logprobs=True,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    check(
        "and in a stream",
        [t.logprob for x in got for t in (x.choices[0].logprobs.content if x.choices[0].logprobs else [])] == lp,
    )
    r = c.completions.create(model="m", prompt=["1 2", "count"], max_tokens=6, temperature=0, logprobs=3)
    p = r.choices[0].logprobs
    check(
        "completions",
        len(r.choices) == 2 and len(p.tokens) == len(p.token_logprobs) == len(p.text_offset) == len(p.top_logprobs),
    )
    zero = c.completions.create(model="m", prompt="1 2", max_tokens=2, logprobs=0).choices[0].logprobs
    check("logprobs=0", [len(t) for t in zero.top_logprobs] == [1, 1], str(zero))
    check("a greedy token is the most probable", all(max(t.values()) == x for t, x in zip(p.top_logprobs, p.token_logprobs)))
    got = "".join(
        x.choices[0].text for x in c.completions.create(model="m", prompt="1 2", max_tokens=6, temperature=0, stream=True)
    )
    check("a completion's stream", got == r.choices[0].text)
    r = c.completions.create(model="m", prompt=[5, 9, 11], max_tokens=2, extra_body={"return_token_ids": True})
    check("a prompt of ids", r.choices[0].prompt_token_ids == [5, 9, 11] and r.usage.prompt_tokens == 3)


def errors(c):
    one = user("x")
    bad = [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": 100000}, "context length"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n:"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"stop": [""]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "image_url"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role"),
    ]
    for more, word in bad:
        try:
            c.chat.completions.create(**{"model": "m", "messages": one, "max_tokens": 2, **more})
            check(f"refused: {word}", False, "it was answered")
        except openai.BadRequestError as e:
            check(f"refused: {word}", word in e.body["message"] and e.body["type"] == "invalid_request_error", str(e.body))
    try:
        c.models.retrieve("nothing")
        check("another model", False)
    except openai.NotFoundError:
        check("another model", True)


async def many(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as c:
        got = await asyncio.gather(
            *(
                c.chat.completions.create(model="m", messages=user(f"count {i % 5} 2"), temperature=0, max_tokens=40)
                for i in range(60)
            )
        )
    check("60 at a time, each as alone", {x.choices[0].message.content for x in got} == {"1 2 3 4 5 6 7 8 9 äöü done"})


def messages(c):
    r = c.messages.create(model="m", max_tokens=40, messages=user("count 1 2"), extra_body=GREEDY)
    check(
        "a message",
        r.content[0].text == "1 2 3 4 5 6 7 8 9 äöü done" and r.stop_reason == "end_turn" and r.usage.output_tokens > 9,
        str(r),
    )
    tool = [{"name": "add", "description": "a + b", "input_schema": TOOLS[0]["function"]["parameters"]}]
    r = c.messages.create(model="m", max_tokens=80, messages=user("sum 3 4"), extra_body=GREEDY, tools=tool)
    check(
        "a tool_use",
        r.stop_reason == "tool_use"
        and r.content[0].text == "I look."
        and r.content[1].name == "add"
        and set(r.content[1].input) == {"a", "b"},
        str(r),
    )
    with c.messages.stream(model="m", max_tokens=80, messages=user("sum 3 4"), extra_body=GREEDY, tools=tool) as s:
        kinds = [e.type for e in s]
        final = s.get_final_message()
    check(
        "the same as a stream",
        [b.model_dump(exclude={"id"}) for b in final.content] == [b.model_dump(exclude={"id"}) for b in r.content]
        and final.stop_reason == "tool_use"
        and "input_json" in kinds
        and "text" in kinds,
        f"{kinds} {final}",
    )
    turn = [
        *user("sum 3 4"),
        {"role": "assistant", "content": [b.model_dump() for b in r.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": r.content[1].id, "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    r = c.messages.create(
        model="m", max_tokens=4, system=[{"type": "text", "text": "be"}], messages=turn, tools=tool, metadata={"user_id": "u"}
    )
    check("a turn after a tool's result", r.stop_reason in ("max_tokens", "end_turn"))
    n = c.messages.count_tokens(model="m", messages=turn, tools=tool, system="be").input_tokens
    check("count_tokens", n == r.usage.input_tokens + (r.usage.cache_read_input_tokens or 0), f"{n} {r.usage}")
    r = c.messages.create(model="m", max_tokens=40, messages=user("count 1 2"), extra_body=GREEDY, stop_sequences=[" 5"])
    check(
        "a stop sequence",
        r.stop_reason == "stop_sequence" and r.stop_sequence == " 5" and r.content[0].text == "1 2 3 4",
        str(r),
    )
    try:
        c.messages.create(model="m", max_tokens=4, messages=user("x"), tool_choice={"type": "any"}, tools=tool)
        check("a forced call is refused", False)
    except anthropic.BadRequestError as e:
        check(
            "a forced call is refused", "tool_choice" in e.body["error"]["message"] and e.body["type"] == "error", str(e.body)
        )


def access(model):
    s = Server(model, "--token", env={"VERLC_API_KEY": "secret-key"})
    url = s.at["url"]
    check("the key is in the line", s.at["api_key"] == "secret-key")
    r = openai.OpenAI(base_url=url, api_key="secret-key").chat.completions.create(model="m", messages=user("x"), max_tokens=1)
    check("openai's key", r.choices)
    for make in (
        lambda k: anthropic.Anthropic(base_url=url[:-3], api_key=k),
        lambda k: anthropic.Anthropic(base_url=url[:-3], auth_token=k),
    ):
        check("anthropic's key", make("secret-key").messages.create(model="m", messages=user("x"), max_tokens=1).content)
    try:
        openai.OpenAI(base_url=url, api_key="other").models.list()
        check("a wrong key", False)
    except openai.AuthenticationError:
        check("a wrong key", True)
    try:
        anthropic.Anthropic(base_url=url[:-3], api_key="other").messages.create(model="m", messages=user("x"), max_tokens=1)
        check("a wrong key of anthropic's", False)
    except anthropic.AuthenticationError:
        check("a wrong key of anthropic's", True)
    check("it ends at SIGTERM", s.end() == 0)


def full(model):
    """With room for one sample a second request gets 429, and the client's retry is answered."""
    s = Server(model, "--max-num-seqs", "1", "--max-queue", "0")

    async def go():
        async with openai.AsyncOpenAI(base_url=s.at["url"], api_key="x", max_retries=0) as c, openai.AsyncOpenAI(
            base_url=s.at["url"], api_key="x", max_retries=9
        ) as patient:
            long = await c.chat.completions.create(
                model="m", messages=user("x"), max_tokens=600, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(aiter(long))
            try:
                await c.chat.completions.create(model="m", messages=user("x"), max_tokens=1)
                check("429 when full", False)
            except openai.RateLimitError as e:
                check("429 when full", e.response.headers["retry-after"] == "1")
            later = asyncio.create_task(patient.chat.completions.create(model="m", messages=user("x"), max_tokens=1))
            async for _ in long:
                pass
            check("a retry is answered", (await later).choices)

    asyncio.run(go())
    s.end()


def main():
    with tempfile.TemporaryDirectory() as d:
        model = taught(pathlib.Path(d))
        s = Server(model)
        c = openai.OpenAI(base_url=s.at["url"], api_key="x", max_retries=0)
        chats(c, model)
        streams(c)
        tools(c)
        logprobs(c, model / "actor")
        errors(c)
        asyncio.run(many(s.at["url"]))
        messages(anthropic.Anthropic(base_url=s.at["url"][:-3], api_key="x", max_retries=0))
        check("it ends", s.end() == 0)
        access(model)
        full(model)
    print(f"{len(failed)} failed")
    sys.exit(1 if failed else 0)


try:
    main()
finally:
    for server in Server.every:
        server.process.kill()
