"""Episodes of twenty turns with a tool: the log-probs of the rollout are those of training in every bit, on 1, 2 and 3 ranks, with
preemption, whenever tools answer, killed and resumed. Earlier turns are found in the KV cache."""

import json
import pathlib
import signal
import sqlite3
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ranks import files, metrics  # noqa: E402
from tool_model import TOOLS, calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series, start, state  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
MT = ROLLOUT + "multi_turn."
TURNS, STEPS = 20, 2
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    x = extra_info
    assert x["num_turns"] == 2 * (1 + len(x["tool_rewards"])), x
    return sum(c.isdigit() for c in solution_str) / len(solution_str) - 0.01 * x["num_turns"]
"""
def args_of(s, name, **keys):
    return s.ppo(name, **{
        "actor_rollout_ref.model.path": s.dir / "calls", ROLLOUT + "agent.default_agent_loop": "tool_agent",
        MT + "function_tool_path": s.dir / "tools.py", MT + "max_assistant_turns": TURNS, "data.max_response_length": 280,
        "data.train_batch_size": 4, ROLLOUT + "n": 4, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "trainer.total_training_steps": STEPS, "trainer.force_old_log_prob": True,
        ROLLOUT + "calculate_log_probs": True, "actor_rollout_ref.actor.use_kl_loss": False, "trainer.device": "cpu",
        "reward.custom_reward_function.path": s.dir / "reward.py", "reward.num_workers": 1, "trainer.async_save": False,
        **keys})


def samples(run_dir):
    """All of a sample but times."""
    with sqlite3.connect(run_dir / "run.db") as db:
        rows = db.execute("SELECT step, validation, uid, length(prompt_ids) / 4, ids, logp, segments, score, advantages, episode "
                          "FROM samples ORDER BY step, validation, uid, sample").fetchall()
    return [(*r[:-1], [{k: v for k, v in c.items() if k != "seconds"} for c in json.loads(r[-1])["calls"]]) for r in rows]


def same(s, a, b):
    x, y = (files(s.dir / d, STEPS) for d in (a, b))
    if x != y:
        return "files: " + ", ".join(k for k in sorted(set(x) | set(y)) if x.get(k) != y.get(k))
    x, y = ([{k: v for k, v in m.items() if "probs_diff" in k or "score" in k or "turns" in k} for m in metrics(s.dir / d)]
            for d in (a, b))
    return "" if samples(s.dir / a) == samples(s.dir / b) and x == y else "samples or metrics"


def base(s, test):
    run(*args_of(s, "a", **{"trainer.test_freq": 2}))
    d = s.dir / "a"
    test("episodes of twenty turns", max(series(d, "num_turns/max")) == 2 * TURNS, series(d, "num_turns/max"))
    test("the log-probs of training are the rollout's", series(d, "training/rollout_probs_diff_max") == [0] * STEPS)
    calls = series(d, "tool_call_counts/mean")
    test("calls are counted", all(c > 2 for c in calls) and series(d, "agent_loop/tool_errors/mean") == [0] * STEPS and
         series(d, "agent_loop/malformed_calls/mean") == [0] * STEPS, calls)
    busy = series(d, "perf/engine_busy")
    test("it is said how long the engine drew", len(busy) == STEPS and all(0 < x <= 1 for x in busy), busy)
    rows = samples(d)
    cached, least = series(d, "rollout/prefix_cached_tokens"), [0] * STEPS
    for r in rows:
        end = r[3]  # of the prompt
        for n, kind in pairs_of(r):
            end += n
            if kind == 0:
                last = end - 1  # the token drawn last is not computed yet
            elif not r[1]:
                least[r[0] - 1] += last
    shared = 8 * 64  # prompts
    test("a turn computes its new tokens alone", all(
        a <= c <= a + shared for a, c in zip(least, cached)), (least, cached))
    test("segments cover the response; an environment's tokens have log-prob 0", all(checked(r) for r in rows))
    test("validation has the same loop", any(r[1] and len(r[-1]) > 2 for r in rows))


def pairs_of(row):
    numbers = struct.unpack(f"<{len(row[6]) // 4}i", row[6])
    return list(zip(numbers[::2], numbers[1::2]))


def checked(row):
    """A row's segments take turns, and its calls are those of the policy's segments, answered by the tool."""
    n, pairs = len(row[4]) // 4, pairs_of(row)
    logp = struct.unpack(f"<{n}f", row[5])
    at, ok = 0, [k for _, k in pairs] == [i % 2 for i in range(len(pairs))]
    for length, kind in pairs:
        ok &= all((x == 0) == (kind == 1) for x in logp[at:at + length])
        at += length
    ok &= [c["segment"] for c in row[-1]] == list(range(0, 2 * len(row[-1]), 2)) and at == n
    return ok and all(int(c["result"]) == json.loads(c["arguments"])["x"] + 1 for c in row[-1])


def variants(s, test):
    for ranks in (2, 3):
        run(*args_of(s, f"ranks{ranks}", **{"trainer.test_freq": 2, "trainer.ranks": ranks}))
        why = same(s, "a", f"ranks{ranks}")
        test(f"{ranks} ranks as 1", not why, why)
    run(*args_of(s, "small", **{"trainer.test_freq": 2, ROLLOUT + "gpu_memory_utilization": 0.0003}))
    why = same(s, "a", "small")
    test("preemption", not why and sum(series(s.dir / "small", "rollout/num_preempted")) > 0,
         (why, series(s.dir / "small", "rollout/num_preempted")))


def kill_after_step_1(run_dir, args):
    p = start(args)
    while not (run_dir / "global_step_1").exists() and p.poll() is None:
        time.sleep(0.002)
    p.send_signal(signal.SIGKILL)
    p.communicate()


def killed(s, test):
    args = args_of(s, "k", **{"trainer.test_freq": 2})
    kill_after_step_1(s.dir / "k", args)
    run(*args)
    test("kill -9 after step 1, resumed: the same bits", state(s.dir / "k", STEPS) == state(s.dir / "a", STEPS))


def one_step_off(s, test):
    for name in ("off", "off_killed"):
        args = args_of(s, name)
        args = [args[0], "--config-name=one_step_off_ppo_trainer", *args[1:], "actor_rollout_ref.hybrid_engine=False",
                "rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
        if name == "off_killed":
            kill_after_step_1(s.dir / name, args)
        run(*args)
    test("one step off: killed and resumed, the same weights", all(
        state(s.dir / "off", STEPS)[k] == v for k, v in state(s.dir / "off_killed", STEPS).items() if k != "trainer.json"))
    test("one step off: turns as in other runs", max(series(s.dir / "off", "num_turns/max")) == 2 * TURNS)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        calling_model(s.dir / "model", s.dir / "calls", 12, 9)
        (s.dir / "tools.py").write_text(TOOLS)
        (s.dir / "reward.py").write_text(REWARD)
        base(s, test)
        variants(s, test)
        killed(s, test)
        one_step_off(s, test)
    test.end()


main()
