"""What tests of agents that are programs share: the beginning of such a program, in plain Python, and a run of one."""

import json
import sqlite3
import sys

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
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert len(solution_str) < 80 and extra_info["num_turns"] >= 2, (solution_str, extra_info)
    return sum(c.isdigit() for c in solution_str) / 100 + 1
"""


def samples(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return db.execute("SELECT step, uid, sample, ids, logp, segments, score, reward_status, reward_message, episode "
                          "FROM samples ORDER BY step, uid, sample, id").fetchall()


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


def without_restarts(rows):
    """Nor the times of calls."""
    out = []
    for r in rows:
        e = {k: v for k, v in json.loads(r[-1]).items() if k != "restarted"}
        e["calls"] = [{k: v for k, v in call.items() if k != "seconds"} for call in e["calls"]]
        out.append((*r[:-1], e))
    return out
