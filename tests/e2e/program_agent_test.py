"""Agents that are programs of the user's, in a run: what a program asks of OpenAI's or Anthropic's interface is trained, and the
log-probs of training are the rollout's in every bit; rewards by three ways; programs that die, hang, flood or lie cost their own
episodes alone."""

import json
import pathlib
import sqlite3
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series  # noqa: E402

AGENT = "actor_rollout_ref.rollout.agent."
ROLLOUT = "actor_rollout_ref.rollout."
CLIENT = '''
import json, os, sys, time, urllib.error, urllib.request
ROW = json.loads(os.environ["VERLC_ROW"])
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def post(url, body, key=KEY, raw=None, headers={}):
    q = urllib.request.Request(url, raw if raw is not None else json.dumps(body).encode(),
                               {"Authorization": "Bearer " + key, "Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(q, timeout=60) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()

def ask(messages, **more):
    status, r = post(BASE + "/chat/completions", {"model": "any", "messages": messages, **more})
    assert status == 200, (status, r)
    return r["choices"][0]["message"]

def reward(**body):
    assert post(os.environ["VERLC_REWARD_URL"], body)[0] == 200
'''
GOOD = CLIENT + '''
kind = ROW["extra_info"]["kind"]
talk = list(ROW["prompt"])
for turn in range(3):
    said = ask(talk, max_tokens=6)
    talk += [said, {"role": "user", "content": f"And {turn}?"}]
if kind == "rest":
    reward(reward=0.25, turns=3)
if kind == "line":
    print("thinking...")
    print(json.dumps({"reward": 0.5, "turns": 3}))
if kind == "own":  # sampling of its own
    ask([{"role": "user", "content": "Shorter?"}], temperature=0.5, top_p=0.9, max_tokens=2, stop=["1"])
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert len(solution_str) < 60 and extra_info["num_turns"] >= 2, (solution_str, extra_info)
    return sum(c.isdigit() for c in solution_str) / 100 + 1
"""


def samples(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return db.execute("SELECT step, uid, sample, ids, logp, segments, score, reward_status, reward_message, episode "
                          "FROM samples ORDER BY step, uid, sample").fetchall()


def args_of(s, name, kinds, program, **keys):
    rows = [s.row(i) for i in range(len(kinds))]
    for row, kind in zip(rows, kinds):
        row["extra_info"]["kind"] = kind
    (s.dir / f"{name}.py").write_text(program)
    return s.ppo(name, **{
        "data.train_files": s.write(f"{name}.jsonl", rows), "data.val_files": "null", "data.max_response_length": 96,
        "data.train_batch_size": len(kinds), ROLLOUT + "n": 2, "trainer.total_training_steps": 2, "trainer.device": "cpu",
        AGENT + "command": f"{sys.executable} {s.dir / f'{name}.py'}", "trainer.force_old_log_prob": True,
        ROLLOUT + "calculate_log_probs": True, "reward.custom_reward_function.path": s.dir / "reward.py",
        "reward.num_workers": 1, "reward.on_error": "drop_sample", **keys})


def without_times(rows):
    return [(*r[:-1], {k: v for k, v in json.loads(r[-1]).items() if k != "requests"}) for r in rows]


def good(s, test):
    kinds = ["fn", "rest", "line", "fn"]
    run(*args_of(s, "good", kinds, GOOD))
    d = s.dir / "good"
    test("the log-probs of training are the rollout's", series(d, "training/rollout_probs_diff_max") == [0, 0])
    test("three turns each", series(d, "num_turns/mean") == [6, 6], series(d, "num_turns/mean"))
    rows = samples(d)
    pairs = [list(struct.unpack(f"<{len(r[5]) // 4}i", r[5])) for r in rows]
    test("policy and environment take turns", all(p[1::2] == [0, 1, 0, 1, 0] for p in pairs), pairs[:2])
    logp = [struct.unpack(f"<{len(r[4]) // 4}f", r[4]) for r in rows]
    test("what the program said has log-prob 0", all(
        [x == 0 for x in q] == [k == 1 for n, k in zip(p[::2], p[1::2]) for _ in range(n)] for p, q in zip(pairs, logp)))
    scores = {k: [r[6] for r, kind in zip(rows, [k for k in kinds for _ in range(2)] * 2) if kind == k] for k in kinds}
    test("rewards by REST, by the last line, by the function",
         scores["rest"] == [0.25] * 4 and scores["line"] == [0.5] * 4 and min(scores["fn"]) >= 1, scores)
    run(*args_of(s, "ranks", kinds, GOOD, **{"trainer.ranks": 2}))
    test("two ranks as one", without_times(samples(s.dir / "ranks")) == without_times(rows))


def main():
    test = Tests()
    with Scratch() as s:
        (s.dir / "reward.py").write_text(REWARD)
        good(s, test)
    test.end()


main()
