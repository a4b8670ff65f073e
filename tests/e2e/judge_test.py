"""A judge beside the policy, end to end on tiny models: its answers are those that `generate` gives to the same prompt,
scores are the numbers in them, the batch it runs in changes nothing, a Python scorer has score and answer or asks the
judge at its address, and what is wrong is said."""

import json
import pathlib
import random
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

RM = "reward.reward_model."
TEMPLATE = "Q {question} A {response} T {ground_truth} S?"
COMBINED = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 10 * extra_info["rm_score"], "said": extra_info["judgement"]}
'''

# as for verl's generative reward model: the judge is a server, whose address is an argument
SERVED = r'''
import asyncio, json, re, socket, urllib.error, urllib.request

def ask(address, path="/v1/chat/completions", headers=None, **body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode() if body else None,
                                     {"Content-Type": "application/json", **(headers or {})})
    try:
        return 200, json.loads(urllib.request.urlopen(request, timeout=60).read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    assert reward_model_tokenizer.encode("1")
    loop, messages = asyncio.get_running_loop(), [{"role": "user", "content": f"Q ? A {solution_str} T {ground_truth} S?"}]
    def chat(**more):
        return loop.run_in_executor(None, lambda: ask(reward_router_address, **{"messages": messages, "max_tokens": 24, **more}))
    answers = await asyncio.gather(chat(model="judge", temperature=0), chat(temperature=1, seed=7),
                                   chat(temperature=1, seed=8, n=1))
    said = [a["choices"][0]["message"]["content"] for _, a in answers]
    number = re.findall(r"[0-9]+", said[0])
    return {"score": float(number[-1]) if number else -1.0, "asked": messages[0]["content"], "said": said, "whole": answers[0][1]}

async def strange(data_source, solution_str, ground_truth, extra_info, reward_router_address, **more):
    run, one = asyncio.get_running_loop().run_in_executor, [{"role": "user", "content": "1"}]
    bad = [{"messages": []}, {"messages": [1]}, {"messages": [{"role": "user"}]}, {"messages": one, "n": 2},
           {"messages": one, "temperature": "hot"}, {"messages": one, "stop": ["x"]}, {"messages": one, "stream": True},
           {"messages": one, "max_tokens": 100000}, {"messages": [{"role": "user", "content": "1 " * 5000}]}]
    def all_of_them():
        host, port = reward_router_address.split(":")
        with socket.create_connection((host, port)) as c:  # leaves before the answer
            text = json.dumps({"messages": one}).encode()
            c.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s" % (
                reward_router_address.encode(), len(text), text))
        got = [ask(reward_router_address, **b) for b in bad]
        texts = [g[1]["error"]["message"] for g in got]
        got += [ask(reward_router_address, "/v1/other"), ask(reward_router_address),
                ask(reward_router_address, headers={"Host": "evil.example:80"}, messages=one),
                ask(reward_router_address, "/v1/models"), ask(reward_router_address, messages=one)]
        return [g[0] for g in got], texts, got[-2][1]["data"][0]["id"]
    codes, texts, model = await run(None, all_of_them)
    return {"score": 1.0, "codes": codes, "texts": texts, "model": model}

async def plain(data_source, solution_str, ground_truth, extra_info):
    return 1.0
'''


def judge(s):
    """A model that answers most prompts with a sentence and two numbers."""
    rng = random.Random(4)
    rows = [{"messages": [{"role": "user", "content": TEMPLATE.format(question=f"{a} + {b}?", response=rng.choice("abcxyz019") * 3,
                                                                      ground_truth=a + b)},
                          {"role": "assistant", "content": f"of 9 I give {rng.randrange(10)}"}]} for a in range(12)
            for b in range(12)]
    run("sft", f"data.train_files={s.write('judge.jsonl', rows)}", "data.train_batch_size=24", "data.max_length=128",
        "data.max_token_len_per_gpu=2048", f"model.path={s.dir / 'model'}", "engine.dtype=float32", "optim.lr=3e-3",
        "trainer.total_training_steps=60", "trainer.test_freq=-1", "trainer.save_freq=60", "trainer.logger=[file]",
        f"trainer.default_local_dir={s.dir / 'sft'}")
    shutil.move(s.dir / "sft/global_step_60/actor", s.dir / "judge")
    return s.dir / "judge"


def keys(d, **more):
    return {RM + "enable": True, RM + "model_path": d, RM + "prompt_template": f"'{TEMPLATE}'", RM + "rollout.response_length": 24,
            RM + "rollout.prompt_length": 256, RM + "rollout.temperature": 0, "actor_rollout_ref.actor.use_kl_loss": False,
            "reward.num_workers": 1, "trainer.total_training_steps": 2, "trainer.save_freq": -1, "actor_rollout_ref.rollout.n": 4,
            **more}


def samples(d):
    return [json.loads(x) for f in sorted(d.glob("*.jsonl")) for x in f.read_text().splitlines()]


def judgements(s, test, d):
    run(*s.ppo("one", **keys(d, **{"trainer.rollout_data_dir": s.dir / "dump_one", "trainer.test_freq": 2,
                              "trainer.validation_data_dir": s.dir / "dump_val"})))
    got = samples(s.dir / "dump_one")
    test("every score is the last number of the judge's answer",
         len(got) == 32 and all(float(re.findall(r"[-+]?[0-9]+(?:\.[0-9]+)?", x["judgement"])[-1]) == x["score"] for x in got),
         str(got[:1]))
    first = got[:8]
    asks = []
    for x in first:
        question = re.search(r"What is \d \+ \d\?", x["input"]).group()
        text = TEMPLATE.format(question=question, response=x["output"], ground_truth=x["gts"])
        asks.append(json.dumps({"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}) + "\n")
    said = [json.loads(x)["text"] for x in run("generate", "--model", d, "--dtype", "fp32",
                                               input="".join(asks)).stdout.splitlines()]
    test("the judge says what generate says", said == [x["judgement"] for x in first], f"{said} {[x['judgement'] for x in first]}")
    run(*s.ppo("few", **keys(d, **{"trainer.rollout_data_dir": s.dir / "dump_few", RM + "rollout.max_num_seqs": 1,
                                   RM + "rollout.max_num_batched_tokens": 16})))
    run(*s.ppo("ranks", **keys(d, **{"trainer.rollout_data_dir": s.dir / "dump_ranks", "trainer.device": "cpu",
                                     "trainer.ranks": 2})))
    test("two ranks: the same", [x["score"] for x in samples(s.dir / "dump_ranks")] == [x["score"] for x in got])
    test("max_num_seqs=1: the same", [x["score"] for x in samples(s.dir / "dump_few")] == [x["score"] for x in got])
    run(*s.ppo("python", **keys(d, **{"trainer.rollout_data_dir": s.dir / "dump_python",
                                      RM + "score_regex": r"'(?i)GIVE\s+(\d)(?!\d)|\d'"})))
    again = samples(s.dir / "dump_python")

    def last(text):
        m = list(re.finditer(r"(?i)GIVE\s+(\d)(?!\d)|\d", text))[-1]
        return float(m[1] or m[0])
    test("score_regex finds what Python's re finds", len(again) == 32 and all(last(x["judgement"]) == x["score"] for x in again),
         str(again[:2]))
    (s.dir / "both.py").write_text(COMBINED)
    run(*s.ppo("both", **keys(d, **{"reward.custom_reward_function.path": s.dir / "both.py",
                                    "trainer.rollout_data_dir": s.dir / "dump_both"})))
    both = samples(s.dir / "dump_both")[:16]
    test("a Python scorer has score and answer", [(x["score"], x["said"])
                                                  for x in both] == [(10 * x["score"], x["judgement"]) for x in got[:16]])
    val = samples(s.dir / "dump_val")
    test("validation goes through it", len(val) >= 8 and all(x["judgement"] for x in val), str(val[:1]))


def refusals(s, test, d):
    def bad(**more):
        return run(*s.ppo("bad", **keys(d, **{RM + k: v for k, v in more.items()})), check=False)

    test.refused("a template without the response", bad(prompt_template="'rate {question}'"), 2, "{response}")
    test.refused("a broken expression", bad(score_regex="'(a'"), 2, "score_regex")
    p = bad(score_regex="zzz")
    test("no number: said, and no score is invented", p.returncode != 0 and
         "no match of reward.reward_model.score_regex" in p.stderr, p.stderr[-300:])
    p = bad(**{"rollout.prompt_length": 8})
    test("a prompt that is too long: said", p.returncode != 0 and "rollout.prompt_length is 8" in p.stderr, p.stderr[-300:])


def served(s, test, d):
    (s.dir / "served.py").write_text(SERVED)

    def go(name, function="compute_score", check=True, **more):
        k = {**keys(d), "reward.custom_reward_function.path": s.dir / "served.py", "reward.custom_reward_function.name": function,
             "trainer.rollout_data_dir": s.dir / f"dump_{name}", **more}
        del k[RM + "prompt_template"]
        p = run(*s.ppo(name, **k), check=check)
        return samples(s.dir / f"dump_{name}") if check else p

    got = go("served")
    asks = [json.dumps({"messages": [{"role": "user", "content": x["asked"]}], "temperature": 0, "max_tokens": 24}) for x in got]
    said = [json.loads(x)["text"] for x in run("generate", "--model", d, "--dtype", "fp32",
                                               input="\n".join(asks) + "\n").stdout.splitlines()]
    test("a function asks the judge that verlc serves: what generate says", len(got) == 32 and
         said == [x["said"][0] for x in got], f"{said[:3]} {got[:1]}")
    whole = got[0]["whole"]
    test("the answer has OpenAI's form", whole["object"] == "chat.completion" and whole["model"] == "judge" and
         whole["choices"][0]["message"]["role"] == "assistant" and whole["choices"][0]["finish_reason"] in ("stop", "length") and
         whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"], str(whole))
    test("seeds differ", any(x["said"][1] != x["said"][2] for x in got))
    again = go("served_few", **{RM + "rollout.max_num_seqs": 1, "reward.num_workers": 3})
    test("one request at a time, other processes: the same answers and scores", [(x["score"], x["said"]) for x in again] ==
         [(x["score"], x["said"]) for x in got])
    odd = go("strange", "strange", **{"trainer.total_training_steps": 1})
    test("what is wrong is said to the function, and costs the run nothing", len(odd) == 16 and all(
        x["codes"] == [400] * 9 + [404, 405, 403, 200, 200] and "stop is not supported" in x["texts"][5] and
        "prompt_length + response_length" in x["texts"][7] and x["model"] == str(d) for x in odd), str(odd[:1]))
    test.refused("a function without the argument", go("plain", "plain", check=False), 2, "reward_router_address")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        d = judge(s)
        served(s, test, d)
        judgements(s, test, d)
        refusals(s, test, d)
    test.end()


main()
