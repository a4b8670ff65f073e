"""Agents that are programs of the user's, in a run: what a program asks of OpenAI's or Anthropic's interface is trained, and the
log-probs of training are the rollout's in every bit, on 1 and 2 ranks; rewards by three ways; sampling of its own."""

import json
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from agent_program import AGENT, CLIENT, REWARD, ROLLOUT, args_of, samples, without_restarts  # noqa: E402
from tool_model import calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series  # noqa: E402

GOOD = CLIENT + '''
kind, MODEL = ROW["extra_info"]["kind"], os.environ["VERLC_MODEL"]
talk = list(ROW["prompt"])
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

def by_openai(**more):  # the model calls, and is answered
    for turn in range(3):
        said = ask(talk, max_tokens=12, tools=[{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}], **more)
        talk.append(said)
        assert "stop" not in more or ("add" not in (said["content"] or "") and "tool_calls" not in said), said
        for call in said.get("tool_calls", []):
            x = json.loads(call["function"]["arguments"])["x"]
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": str(x + 1)})
        if "tool_calls" not in said:
            talk.append({"role": "user", "content": "Sure?"})

def by_anthropic():
    key = os.environ["ANTHROPIC_API_KEY"]
    for turn in range(3):
        status, r = post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
                         {"model": "m", "max_tokens": 12, "messages": talk, "tools": [{"name": "add", "input_schema": PARAMETERS}]},
                         key="none", headers={"x-api-key": key, "Authorization": "Basic x"})
        assert status == 200, r
        talk.append({"role": "assistant", "content": r["content"]})
        back = [{"type": "tool_result", "tool_use_id": b["id"], "content": str(b["input"]["x"] + 1)}
                for b in r["content"] if b["type"] == "tool_use"]
        talk.append({"role": "user", "content": back or "Sure?"})

def by_stream():
    for turn in range(3):
        q = urllib.request.Request(BASE + "/chat/completions", json.dumps(
            {"model": "m", "messages": talk, "stream": True, "max_tokens": 12}).encode(), {"Authorization": "Bearer " + KEY})
        text = ""
        with urllib.request.urlopen(q, timeout=60) as r:
            for line in r:
                if line.startswith(b"data: {"):
                    text += "".join(c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"])
        talk.extend([{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}])

if kind == "rest":
    by_anthropic()
    reward(reward=0.25, acc=1)
if kind == "line":
    by_stream()
    print("thinking...")
    print(json.dumps({"reward": 0.5, "acc": 0}))
if kind == "fn":
    by_openai()
if kind == "ids":  # an agent that makes its tokens itself
    ids = [5, 9, 11]
    for turn in range(3):
        status, r = post(BASE + "/completions", {"model": MODEL, "prompt": ids, "max_tokens": 4, "return_token_ids": True})
        assert status == 200, r
        ids = ids + r["choices"][0]["token_ids"] + [7, 8]
    post(BASE + "/completions", {"model": MODEL, "prompt": "Other", "max_tokens": 4})
if kind == "several":  # a sub-agent between two turns, and then the conversation goes on without its beginning
    talk.append(ask(talk, max_tokens=6))
    ask([{"role": "system", "content": "Count."}, {"role": "user", "content": "2"}], max_tokens=6)
    talk.append({"role": "user", "content": "Sure?"})
    talk.append(ask(talk, max_tokens=6))
    ask([talk[0], {"role": "user", "content": "In short?"}], max_tokens=6)
if kind == "own":
    by_openai(temperature=0.5, top_p=0.9, stop=["add"], stop_token_ids=[7])
'''
def good(s, test):
    kinds = ["fn", "rest", "line", "fn"]
    model = {"actor_rollout_ref.model.path": s.dir / "calls"}
    run(*args_of(s, "good", kinds, GOOD, **model))
    d = s.dir / "good"
    test("the log-probs of training are the rollout's", series(d, "training/rollout_probs_diff_max") == [0, 0])
    test("three turns each", series(d, "num_turns/mean") == [6, 6], series(d, "num_turns/mean"))
    rows = samples(d)
    pairs = [list(struct.unpack(f"<{len(r[5]) // 4}i", r[5])) for r in rows]
    test("policy and environment take turns", all(p[1::2] == [0, 1, 0, 1, 0] for p in pairs), pairs[:2])
    logp = [struct.unpack(f"<{len(r[4]) // 4}f", r[4]) for r in rows]
    test("what the program said has log-prob 0", all(
        [x == 0 for x in q] == [k == 1 for n, k in zip(p[::2], p[1::2]) for _ in range(n)] for p, q in zip(pairs, logp)))
    kind_of = [k for k in kinds for _ in range(2)] * 2
    scores = {k: [r[6] for r, kind in zip(rows, kind_of) if kind == k] for k in kinds}
    test("rewards by REST, by the last line, by the function",
         scores["rest"] == [0.25] * 4 and scores["line"] == [0.5] * 4 and min(scores["fn"]) >= 1, scores)
    episodes = [json.loads(r[9]) for r in rows]
    test("a conversation is one sample, by each interface", all(e["samples"] == {"first": 1} for e in episodes), episodes[0])
    calls = sum(len(set(struct.unpack(f"<{len(r[3]) // 4}i", r[3])) & s.calls) for r in rows)
    counted = sum(len(t.get("calls", [])) for e in episodes for t in e["turn_log"])
    test("the model calls a tool", calls > len(rows) and counted > 0, (calls, counted))
    told = [c for r, e in zip(rows, episodes) for c in e["calls"] if c["segment"] < 4]  # but for the last turn's
    test("the record has each call, and what came of it", len(told) > 4 and all(
        c["name"] == "add" and int(c["result"]) == json.loads(c["arguments"])["x"] + 1 and c["seconds"] > 0 and
        c["segment"] % 2 == 0 for c in told), told)
    test("and is counted", sum(series(d, "tool_call_counts/mean")) * len(rows) / 2 == counted)
    run(*args_of(s, "ranks", kinds, GOOD, **model, **{"trainer.ranks": 2}))
    test("two ranks as one", without_restarts(samples(s.dir / "ranks")) == without_restarts(rows))


def by_ids(s, test):
    run(*args_of(s, "ids", ["ids", "fn"], GOOD, **{"trainer.total_training_steps": 1}))
    rows = samples(s.dir / "ids")
    test("of an agent that sends ids: the log-probs of training are the rollout's",
         series(s.dir / "ids", "training/rollout_probs_diff_max") == [0])
    pairs = [list(struct.unpack(f"<{len(r[5]) // 4}i", r[5])) for r in rows if r[1] == 0]
    test("a prompt that begins with a sample's tokens goes on with it", [p[1::2] for p in pairs] == [[0, 1, 0, 1, 0], [0]] * 2 and
         all(p[2::4] == [2, 2] for p in pairs[::2]), [(r[1:3], r[7:]) for r in rows])


def several(s, test):
    run(*args_of(s, "several", ["several", "fn"], GOOD, **{"actor_rollout_ref.actor.ppo_mini_batch_size": 2}))
    d, rows = s.dir / "several", samples(s.dir / "several")
    test("log-probs of training are the rollout's", series(d, "training/rollout_probs_diff_max") == [0, 0])
    episodes = [json.loads(r[9]) for r in rows]
    test("a sub-agent and a rewritten context give samples of their own", [
        (e.get("output", 0), e.get("outputs", 1)) for e in episodes] == [*[(0, 3), (1, 3), (2, 3)] * 2, (0, 1), (0, 1)] * 2,
         episodes[0])
    test("why they began is recorded", episodes[2]["samples"] == {"first": 1, "sub_agent": 1, "compacted": 1}, episodes[2])
    test("all have the score of the last", all(len({r[6] for r in rows[8 * k + 3 * j:8 * k + 3 * j + 3]}) == 1
                                               for k in range(2) for j in range(2)))
    test("the first goes on with the conversation", [len(struct.unpack(f"<{len(r[5]) // 4}i", r[5])) for r in rows[:3]] ==
         [6, 2, 2])


def one_step_off(s, test):
    for name, more in (("off", {}), ("off_pool", {"trainer.ranks": 1, "rollout.ranks": 1})):
        args = args_of(s, name, ["fn", "several"], GOOD, **{
            "actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 1,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2, **more})
        run(args[0], "--config-name=one_step_off_ppo_trainer", *args[1:])
    rows = [without_restarts(samples(s.dir / d)) for d in ("off", "off_pool")]
    test("one step off: in turns as on a rank of its own", rows[0] == rows[1] and len(rows[0]) == 2 * 8, [len(r) for r in rows])


def own_sampling(s, test):
    run(*args_of(s, "own", ["own", "fn"], GOOD, **{
        "actor_rollout_ref.model.path": s.dir / "calls", "trainer.force_old_log_prob": False, "trainer.ranks": 2,
        "trainer.total_training_steps": 1, "trainer.val_before_train": True, "data.val_files": s.dir / "own.jsonl"}))
    every = samples(s.dir / "own")
    rows = [r for r in every if r[0] == 1]
    test("validation has the same programs", [r[7] for r in every if r[0] == 0] == ["score"] * 2, [r[7:9] for r in every])
    logs = [json.loads(r[9])["turn_log"] for r in rows]
    test("sampling of its own is honoured and recorded", all(
        abs(t["temperature"] - 0.5) + abs(t["top_p"] - 0.9) < 1e-6 and t["stop"] == ["add"] and t["max_tokens"] == 12
        and t["stop_token_ids"] == [7]
        for log in logs[:2] for t in log), logs)
    plain = {"tokens", "finish", "max_tokens", "calls"}
    test("the run's is not recorded", all(set(t) <= plain for log in logs[2:] for t in log), logs)
    diff = series(s.dir / "own", "training/rollout_probs_diff_max")
    test("training's log-probs are those of rollout.temperature", diff[0] > 0, diff)


def main():
    test = Tests()
    with Scratch() as s:
        (s.dir / "reward.py").write_text(REWARD)
        calling_model(s.dir / "model", s.dir / "calls", 12, 9)
        tokens = json.loads((s.dir / "calls/tokenizer.json").read_text())["added_tokens"]
        s.calls = {t["id"] for t in tokens if t["content"].startswith("<tool_call>{")}
        good(s, test)
        several(s, test)
        one_step_off(s, test)
        by_ids(s, test)
        own_sampling(s, test)
    test.end()


main()
