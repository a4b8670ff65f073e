"""Continuous tokens beside verl 0.9.1's own builders: model directories and conversations with what verl makes of them, for
tests/golden/test_agent_continuous_verl.c.

  oracle_continuous.py fixtures --out DIR        a small tokenizer, small templates of every family (tests/fixtures/agent)
  oracle_continuous.py many --out DIR            the real tokenizers of --data with their own templates and TRL's, and as many
                                                 conversations of each as --cases says

Needs verl 0.9.1, transformers, trl (its chat_templates alone), or --verl DIR, --trl DIR: unpacked wheels.
"""
import argparse
import importlib.util
import json
import logging
import lzma
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAMILY_TOKENS = [
    "<|im_start|>", "<|im_end|>", "[e~[", "]~b]", "<|observation|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool_response>",
    "<tool_response|>", "<|tool_call>", "<tool_call|>", "<turn|>", "<|turn>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
    "<|call|>", "<|return|>", "<|constrain|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"]
SMALL = {  # templates of the families, as short as shows their rules
    "chatml": ("qwen2", (
        "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{%- for m in messages %}"
        "{%- if m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
        "{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{%- else %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
        "{% endfor %}<|im_end|>\n{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{%- endif %}")),
    "chatml_user": ("qwen3_5", (
        "{%- set ns = namespace(user=false) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.user = true %}{%- endif %}{%- endfor %}{%- if not ns.user %}{{ raise_exception('no user') }}"
        "{%- endif %}\n{%- for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")),
    "minimax": ("minimax_m2", (
        "{%- for m in messages %}]~b]{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% endfor %}[e~[\n{% endfor %}{%- if add_generation_prompt %}]~b]ai\n{% endif %}")),
    "glm": ("glm4_moe", (
        "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}{{ '\n' }}"
        "<tool_response>\n{{ m.content }}\n</tool_response>{%- else %}<|{{ m.role }}|>\n{{ m.content }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}")),
    "gemma4": ("gemma4", (
        "{%- for m in messages %}{%- if m.role == 'tool' %}response:{{ m.name }}{value:{{ m.content }}}<tool_response|>"
        "{%- else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "{%- for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}"
        "{%- if m.tool_calls %}<|tool_response>{% else %}<turn|>\n{% endif %}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|turn>model\n{% endif %}")),
    "gpt_oss": ("gpt_oss", (
        "{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% endfor %}<|end|>{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant"
        "{% endif %}")),
    "deepseek": ("deepseek_v3", (
        "<｜begin▁of▁sentence｜>{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{%- if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}<｜tool▁output▁begin｜>"
        "{{ m.content }}<｜tool▁output▁end｜>{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
        "<｜tool▁outputs▁end｜>{% endif %}{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}<｜end▁of▁sentence｜>"
        "{%- else %}{{ '<｜User｜>' if m.role == 'user' }}{{ m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}")),
    "deepseek_v4": ("deepseek_v4", (
        "{{ raise_exception('not used') }}")),
    "json_one_call": ("llama", (
        "{%- for m in messages %}{%- if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at a time') }}{%- endif %}<|start|>"
        "{{ 'ipython' if m.role == 'tool' else m.role }}<|message|>\n"
        "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|end|>{%- endfor %}"
        "{%- if add_generation_prompt %}<|start|>assistant<|message|>\n{% endif %}")),
    "rewriting": ("mistral", (
        "{%- for m in messages %}{%- if loop.last and m.role == 'user' %}[INST]{{ messages[0].content }}{% endif %}"
        "{{ m.content }}{%- endfor %}")),
    "plain": ("opt", (
        "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{%- if add_generation_prompt %}assistant: "
        "{% endif %}")),
}
WORDS = ["4", "", " ", "the answer", "7 apples\n", "{\"a\": 1}", "é日本", "<tool_response>", "</think>", "<|im_end|>", "a\"b\\c",
         "\n", "<think>x</think>", "  two  ", "<turn|>\n", "<|end|>", "<｜end▁of▁sentence｜>", "null", "😀", 
         "tab\there", "<|observation|>", "long " * 9, "[1, 2.5]"]
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "é"}, "b": {"type": "number", "enum": [1.5, 1e-7]}},
    "required": ["a"]}}}
LOOK = {"type": "function", "function": {"name": "look_up", "description": "Looks\n\"up\".",
                                         "parameters": {"type": "object", "properties": {}, "required": []}}}


# ---- model directories ---------------------------------------------------------------

def small_tokenizer():
    """Bytes, a few merges, the tokens of all families."""
    from tokenizers.pre_tokenizers import ByteLevel
    chars = sorted(ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(chars)}
    merges = []
    for a, b in map(str.split, ("t o", "to o", "too l", "u s", "e r", "us er", "> Ċ", "Ċ Ċ", "a d", "ad d")):
        merges.append([a, b])
        vocab[a + b] = len(vocab)
    return {"version": "1.0", "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges}}


def add_tokens(tokenizer, names):
    known = {t["content"] for t in tokenizer["added_tokens"]}
    at = max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]) + 1
    for name in names:
        if name in known or name in tokenizer["model"]["vocab"]:
            continue
        tokenizer["added_tokens"].append({"id": at, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                                          "normalized": False, "special": not name.startswith(("<think", "</think"))})
        at += 1


def write_model(path, tokenizer_text, config, template):
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer_text)
    (path / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)


# ---- conversations -------------------------------------------------------------------

def text(rng):
    return rng.choice(WORDS) if rng.random() < 0.6 else "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))


def content(rng):
    x = rng.random()
    if x < 0.9:
        return text(rng)
    return None if x < 0.92 else [{"type": "text", "text": text(rng)} for _ in range(rng.randint(1, 2))]


def assistant(rng, calls, ids):
    m = {"role": "assistant", "content": content(rng)}
    if rng.random() < 0.2:
        m["reasoning_content"] = text(rng)
    if calls:
        m["tool_calls"] = []
        for i in range(calls):
            arguments = rng.choice([{}, {"a": 2}, {"a": "x\"y", "b": [1.5, None]}])
            call = {"type": "function", "function": {"name": rng.choice(["add", "look_up"]), "arguments":
                                                     json.dumps(arguments) if rng.random() < 0.2 else arguments}}
            if ids:
                call["id"] = f"functions.add:{i}" if ids == 1 else f"call{i:05}"
            m["tool_calls"].append(call)
    return m


def tool(rng, i, ids):
    m = {"role": "tool", "content": content(rng)}
    if ids:
        m["tool_call_id"] = f"functions.add:{i}" if ids == 1 else f"call{i:05}"
    if rng.random() < 0.15:
        m["name"] = rng.choice(["add", "look_up"])
    return m


def conversation(rng):
    """(old messages, appended ones)."""
    old = [{"role": "system", "content": text(rng)}] if rng.random() < 0.4 else []
    old.append({"role": "user", "content": content(rng)})
    ids = rng.choice([0, 0, 1, 2])
    for _ in range(rng.choice([0, 0, 1, 2])):
        n = rng.choice([0, 1, 1, 2])
        old.append(assistant(rng, n, ids))
        old += [tool(rng, i, ids) for i in range(n)] or [{"role": "user", "content": content(rng)}]
    n = rng.choice([0, 1, 1, 1, 2, 2, 3])
    if rng.random() < 0.95:
        old.append(assistant(rng, n, ids))
    new = [tool(rng, i, ids) for i in range(n if rng.random() < 0.95 else n + 1)]
    while not new or rng.random() < 0.2:
        role = rng.choice(["user", "user", "user", "system", "assistant", "tool"] + (["developer"] if rng.random() < 0.1 else []))
        new.append(assistant(rng, rng.choice([0, 0, 1]), ids) if role == "assistant" else tool(rng, 0, ids) if role == "tool"
                   else {"role": role, "content": content(rng)})
    if rng.random() < 0.02:
        new = []
    if len(old) == 2 and rng.random() < 0.1:
        old = old[:1]
    return old, new


def plain_content(messages):
    """Without empty and parted contents, which many templates refuse."""
    return [{**m, "content": m["content"] if isinstance(m["content"], str) else "plain"} for m in messages]


def stream(rng, builder, tok, old, tools):
    """What the conversation's ids may end with."""
    try:
        ids = builder._render_tokens(old, add_generation_prompt=False, tools=tools)[-6:]
    except Exception:
        ids = [1, 2]
    ends = [tok.convert_tokens_to_ids(t) for t in ("<|im_end|>", "[e~[", "<|observation|>", "<|user|>", "<|tool_response>",
                                                  "<｜end▁of▁sentence｜>", "<｜tool▁outputs▁end｜>")]
    ends = [e for e in ends if e is not None and e != tok.unk_token_id]
    x = rng.random()
    if x < 0.4 and ends:
        ids = ids[:-1] + [rng.choice(ends)]
    elif x < 0.5:
        ids = ids[:-1]
    return [] if rng.random() < 0.02 else ids


def verl_says(builder, old, new, tools, ids):
    try:
        merged = builder.merge_context_tokens(old, old + new, ids, tools=tools)
    except Exception as error:
        return {"refused": type(error).__name__ + ": " + str(error)[:200]}
    removed = merged.removed_prefix_token_count
    keep = len(ids) - removed
    assert merged.token_ids[:keep] == ids[:keep]
    return {"removed": removed, "added": merged.token_ids[keep:]}


def first_prompt(builder, messages, tools):
    try:
        return {"ids": builder.build_initial_tokens(messages, tools=tools)}
    except Exception as error:
        return {"refused": type(error).__name__ + ": " + str(error)[:200]}


def rows_of(path, model_type, kwargs, n, rng):
    from transformers import AutoTokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
    row = {"model": path.name, "model_type": model_type, "kwargs": kwargs}
    tok = AutoTokenizer.from_pretrained(path)
    try:
        builder = create_continuous_token_builder(tok, hf_model_type=model_type, chat_template_kwargs=kwargs)
    except Exception as error:
        return [{**row, "op": "create", "want": {"refused": str(error)[:200]}}]
    cases = []
    for i in range(n):
        old, new = conversation(rng)
        if rng.random() < 0.7:
            old, new = plain_content(old), plain_content(new)
        tools = rng.choice([None, None, [ADD], [ADD, LOOK], [LOOK], []])
        if i % 5 == 0:
            messages = old + new[:1]
            cases.append({"op": "begin", "messages": messages, "tools": tools, "want": first_prompt(builder, messages, tools)})
            continue
        ids = stream(rng, builder, tok, old, tools)
        cases.append({"op": "append", "messages": old + new, "n_old": len(old), "tools": tools, "stream": ids,
                      "want": verl_says(builder, old, new, tools, ids)})
    return [{**row, "op": "model", "cases": cases}]


def make_fixtures(out, n):
    rng, rows = random.Random(28), []
    small = small_tokenizer()
    add_tokens(small, FAMILY_TOKENS)
    for name, (model_type, template) in SMALL.items():
        write_model(out / name, json.dumps(small, ensure_ascii=False, separators=(",", ":")),
                    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}, template)
        kwargs = {"chatml": {"enable_thinking": False}, "deepseek_v4": {"enable_thinking": True}}.get(name, {})
        rows += rows_of(out / name, model_type, kwargs, n, rng)
    kwargs = {"thinking": True, "drop_thinking": False, "reasoning_effort": "max"}
    return rows + rows_of(out / "deepseek_v4", "deepseek_v4", kwargs, n // 2, rng)


# ---- the real ones -------------------------------------------------------------------

TYPES = [("qwen3_5", "qwen3_5"), ("qwen3_6", "qwen3_5"), ("qwen3_8", "qwen3_5"), ("qwen3", "qwen3"), ("qwen2_5", "qwen2"),
         ("gemma4", "gemma4"), ("diffusion_gemma", "gemma4"), ("glm4moe", "glm4_moe"), ("gptoss", "gpt_oss"),
         ("deepseek", "deepseek_v3"), ("llama", "llama"), ("gemma", "gemma3")]
KWARGS = [{}, {}, {"enable_thinking": False}, {"enable_thinking": True}, {"date_string": "1 Jan 2026"}]


def type_of(name):
    return next((t for prefix, t in TYPES if name.startswith(prefix)), "other")


def trl_templates(directory):
    if not directory:
        spec = importlib.util.find_spec("trl")
        directory = spec and spec.submodule_search_locations[0]
    found = sorted(Path(directory or "/nonexistent").glob("**/chat_templates/*.jinja"))
    if not found:
        sys.exit("no chat templates of trl; pip install --no-deps trl==1.16.0")
    return [(p.stem, p.read_text()) for p in found]


def real_tokenizer(path):
    read = lambda name: json.loads(lzma.open(path / name).read())  # noqa: E731
    return read("tokenizer.json.xz"), read("tokenizer_config.json.xz")


def make_many(out, data, trl, n):
    """Each real tokenizer with its own template, and each of TRL's templates on one or two of them."""
    rng, rows, real = random.Random(5), [], {}
    for path in sorted((data / "tokenizers").iterdir()):
        tokenizer, config = real_tokenizer(path)
        own = config.pop("chat_template", None)
        config.pop("added_tokens_decoder", None)
        config.pop("extra_special_tokens", None)
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        plain = json.dumps(tokenizer, ensure_ascii=False)
        add_tokens(tokenizer, FAMILY_TOKENS)
        real[path.name] = json.dumps(tokenizer, ensure_ascii=False), config
        if isinstance(own, str):
            write_model(out / path.name, plain, config, own)
            model_type = {"qwen2_5": "qwen2", "qwen3": "qwen3", "llama3_1": "llama"}.get(path.name, "mistral")
            for kwargs in ({}, {"enable_thinking": False}):
                rows += rows_of(out / path.name, model_type, kwargs, 4 * n, rng)
            rows += rows_of(out / path.name, "gpt_oss" if model_type != "llama" else "qwen2", {}, n // 4, rng)
    templates = [(name, type_of(name), t) for name, t in trl_templates(trl)]
    templates += [("small_" + k, m, t) for k, (m, t) in SMALL.items()]
    for i, (name, model_type, template) in enumerate(templates):
        for k in range(2):
            base = name if name in real and k == 0 else sorted(real)[(i + 3 * k) % len(real)]
            path = out / f"{name}-{base}"
            write_model(path, *real[base], template)
            other = rng.choice([t for _, t in TYPES] + ["minimax"]) if k == 1 and rng.random() < 0.3 else model_type
            rows += rows_of(path, other, rng.choice(KWARGS), n, rng)
    return rows


def worked_examples(out):
    """Rows whose answers are numbers that were worked out by hand from real ids: tool `add`, result 4."""
    call = lambda n: {"role": "assistant", "content": "", "tool_calls": [  # noqa: E731
        {"type": "function", "function": {"name": "add", "arguments": {"a": i, "b": 2}}} for i in range(n)]}
    result = lambda x: {"role": "tool", "content": x}  # noqa: E731
    old, sure = [{"role": "user", "content": "2 + 2?"}], {"role": "user", "content": "Sure?"}
    turn, one, two = [198, 151645], old + [call(1), result("4")], old + [call(2), result("4"), result("5")]
    end = [151645, 198, 151644, 77091, 198]
    qwen2_5 = [151644, 872, 198, 27, 14172, 9655, 397, 19, 198, 522, 14172, 9655, 29]
    qwen3 = [151644, 872, 198, 151665, 198, 19, 198, 151666]
    llama = [128006, 23799, 4690, 128007, 271, 1, 19, 1, 128009, 128006, 78191, 128007, 271]
    rows = []
    for model, model_type, kwargs, messages, n_old, stream, want in [
            ("qwen2_5", "qwen2", {}, one, 2, turn, [198, *qwen2_5, *end]),
            ("qwen2_5", "qwen2", {}, two, 2, turn,
             [198, *qwen2_5[:-1], 397, 27, 14172, 9655, 397, 20, 198, 522, 14172, 9655, 29, *end]),
            ("qwen2_5", "qwen2", {}, old + [{"role": "assistant", "content": "4"}, sure], 2, turn,
             [198, 151644, 872, 198, 39814, 30, *end]),
            ("qwen2_5", "qwen2", {}, one, 2, [198], [*qwen2_5, *end]),
            ("qwen3", "qwen3", {}, one, 2, turn, [198, *qwen3, *end]),
            ("qwen3", "qwen3", {"enable_thinking": False}, one, 2, turn, [198, *qwen3, *end, 151667, 271, 151668, 271]),
            ("llama3_1-llama3_1", "llama", {}, one, 2, [128009], llama),
            ("llama3_1-llama3_1", "llama", {}, two, 2, [128009], None)]:
        want = {"removed": 0, "added": want} if want else {"refused": "one call at a time"}
        case = {"op": "append", "messages": messages, "n_old": n_old, "tools": [ADD], "stream": stream, "want": want}
        rows.append({"model": model, "model_type": model_type, "kwargs": kwargs, "op": "model", "cases": [case]})
    return [r for r in rows if (out / r["model"]).is_dir()]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["fixtures", "many"])
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--data", type=Path, default=Path(os.environ.get("SHARED_DATA", ROOT / "../shared/data")))
    p.add_argument("--cases", type=int, default=40)
    p.add_argument("--verl")
    p.add_argument("--trl")
    args = p.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import oracle_verl
    oracle_verl.load(args.verl)
    logging.disable(logging.WARNING)
    rows = make_fixtures(args.out, 8) if args.what == "fixtures" else make_many(args.out, args.data, args.trl, args.cases)
    if args.what == "many":
        rows += worked_examples(args.out)
    (args.out / "cases.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    n = sum(len(r.get("cases", [1])) for r in rows)
    refused = sum("refused" in c["want"] for r in rows for c in r.get("cases", [r]))
    print(f"{len(rows)} models, {n} conversations, {refused} of them refused by verl")


if __name__ == "__main__":
    main()
