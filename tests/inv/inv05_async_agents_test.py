"""Episodes with tools and an interaction in fully asynchronous training. With partial_rollout=False a run has the bits of any other
whenever tools answer, on any ranks, killed and resumed. With partial rollouts an episode goes on under newer weights where it was
interrupted: in a turn, or while its tools are out. run.db has the version of each token, and a replay has the record's bits."""

import json
import pathlib
import random
import signal
import sqlite3
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series, start, state  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
MT = ROLLOUT + "multi_turn."
STEPS = 3
# answers come in any order
TOOLS = """
import asyncio, os, random
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.interactions.base import BaseInteraction

async def late(what, turn):
    with open(os.environ["CALLS"], "a") as f:
        f.write(f"{what} {turn}\\n")
    await asyncio.sleep(random.random() * float(os.environ["LATE"]))

class Add(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        await late(agent_data.request_id, agent_data.user_turns + agent_data.assistant_turns + 1)
        agent_data.extra_fields["seen"] = agent_data.extra_fields.get("seen", 0) + 1
        return ToolResponse(text=str(parameters["x"] + 1)), 0.5, {}

class Again(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        await late(instance_id, len(messages))
        return len(messages) > 7, "again", 0.25, {}
"""
INTERACTIONS = """
interaction:
  - name: again
    class_name: late_tools.Again
    config: {}
"""
YAML = """
tools:
  - class_name: late_tools.Add
    config: {type: native}
    tool_schema:
      type: function
      function: {name: add, description: adds one,
                 parameters: {type: object, properties: {x: {type: integer, description: a number}}, required: [x]}}
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    x = extra_info
    assert x.get("seen", 0) == len(x["tool_rewards"]), x
    return sum(c.isdigit() for c in solution_str) / len(solution_str) - 0.01 * x["num_turns"] + sum(x["turn_scores"])
"""


def agents(s):
    return {"actor_rollout_ref.model.path": s.dir / "calls", ROLLOUT + "agent.default_agent_loop": "tool_agent",
            MT + "enable": True, MT + "tool_config_path": s.dir / "tools.yaml",
            "+" + MT + "interaction_config_path": s.dir / "again.yaml", MT + "max_assistant_turns": 6,
            "data.max_response_length": 100, "actor_rollout_ref.actor.use_kl_loss": False, "reward.num_workers": 1,
            "reward.custom_reward_function.path": s.dir / "reward.py", "trainer.device": "cpu", "trainer.async_save": False,
            "actor_rollout_ref.actor.optim.lr": 1e-3}


def fully(s, name, **keys):
    args = s.ppo(name, **{**agents(s), "actor_rollout_ref.hybrid_engine": False, "data.train_batch_size": 0,
                          "async_training.trigger_parameter_sync_step": 2, "async_training.staleness_threshold": 1,
                          "rollout.total_rollout_steps": 4 * STEPS, **keys})
    return [args[0], "--config-name=fully_async_ppo_trainer", *[a for a in args[1:] if "total_training_steps" not in a]]


def env(s, name, late=0.02):
    return {"PYTHONPATH": str(s.dir), "CALLS": str(s.dir / f"{name}.calls"), "LATE": str(late)}


def samples(s, name, columns="step, place, sample, ids, logp, versions, segments, score, advantages, prompt_number"):
    with sqlite3.connect(s.dir / name / "run.db") as db:
        return db.execute(f"SELECT {columns} FROM samples WHERE validation = 0 ORDER BY step, place, sample").fetchall()


def weights(s, name, step=STEPS):
    return {k: v for k, v in state(s.dir / name, step).items() if k != "trainer.json"}


def same(s, a, b):
    return weights(s, a) == weights(s, b) and samples(s, a) == samples(s, b)


def ints(blob):
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pairs(blob):
    return list(zip(ints(blob)[::2], ints(blob)[1::2]))


def recorded(run_dir):
    """Episode and turn of each answer that the journal has."""
    found = set()
    for f in run_dir.glob("tool_journal/*.jsonl"):
        for line in f.read_bytes().split(b"\n"):
            try:
                found.add(" ".join(json.loads(line)["key"].split("/")[:2]))
            except ValueError:
                continue  # half written
    return found


def calls(s, name):
    path = s.dir / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def killed(s, name, args, moments, seconds):
    """The run, killed at these parts of its time and resumed; calls that were made though their answer was on disk."""
    again = []
    for part in [*moments, None]:
        had, before = recorded(s.dir / name), len(calls(s, name))
        p = start(args, env=env(s, name))
        if part is not None:
            time.sleep(part * seconds)
            p.send_signal(signal.SIGKILL)
        p.communicate(timeout=120)
        again += [c for c in calls(s, name)[before:] if c in had]
    return again


def interrupted(rows):
    """How often between two turns, and within one."""
    between = within = 0
    for r in rows:
        edges = {sum(n for n, _ in pairs(r[6])[:k]) for k in range(len(pairs(r[6])) + 1)}
        changes = [sum(n for n, _ in pairs(r[5])[:k]) for k in range(1, len(pairs(r[5])))]
        assert max(edges) == len(r[3]) // 4 == sum(n for n, _ in pairs(r[5])), "segments and versions cover the response"
        between, within = between + sum(c in edges for c in changes), within + sum(c not in edges for c in changes)
    return between, within


def whole(s, test, rng):
    keys = {"async_training.partial_rollout": False}
    begun = time.time()
    run(*fully(s, "whole", **keys), env=env(s, "whole"))
    seconds = time.time() - begun
    rows = samples(s, "whole")
    test("a step trains its prompts, all samples of each", [r[:3] for r in rows] ==
         [(k, p, i) for k in range(1, STEPS + 1) for p in range(4) for i in range(2)])
    test("episodes of several turns, each drawn by one version, some by the one before",
         max(series(s.dir / "whole", "num_turns/max")) > 6 and all(len(pairs(r[5])) == 1 for r in rows) and
         max(series(s.dir / "whole", "training/version_lag/max")) == 1)
    run(*fully(s, "soon", **keys, **{"trainer.ranks": 2}), env=env(s, "soon", 0))
    test("partial_rollout=False: when tools answer, and how many ranks there are, changes no bit", same(s, "whole", "soon"))
    again = killed(s, "k", fully(s, "k", **keys), [rng.uniform(0.2, 0.9)], seconds)
    test("kill -9 and resume: the same bits", same(s, "whole", "k"))
    test("no recorded call is made again", not again, again)


def partial(s, test, rng):
    args = {ROLLOUT + "max_num_seqs": 6}
    begun = time.time()
    run(*fully(s, "p", **args), env=env(s, "p", 0.2))
    seconds = time.time() - begun
    rows = samples(s, "p")
    spans = [pairs(r[5]) for r in rows]
    test("episodes have tokens of several versions", sum(len(v) > 1 for v in spans) > 2 and
         all([x for _, x in v] == sorted({x for _, x in v}) for v in spans), spans)
    test("interrupted while tools are out", interrupted(rows)[0] > 0, spans)
    logps = [(struct.unpack(f"<{len(r[4]) // 4}f", r[4]), pairs(r[6])) for r in rows]
    test("an environment's tokens have log-prob 0, the policy's have theirs", all(
        (x == 0) == kind for logp, segments in logps
        for x, kind in zip(logp, [k == 1 for n, k in segments for _ in range(n)])))
    replay = {"async_training.replay": s.dir / "p"}
    run(*fully(s, "r2", **replay, **{"trainer.ranks": 2}), env=env(s, "r2"))
    test("a replay has the record's bits, on two ranks", same(s, "p", "r2"))
    again = killed(s, "rk", fully(s, "rk", **replay), [rng.uniform(0.2, 0.9)], seconds)
    test("a replay that was killed and resumed has them", same(s, "p", "rk"))
    test("no recorded call is made again", not again, again)


def still(s, test, rng):
    """With a learning rate of 0 all versions are one, so interruptions leave no trace, wherever they are: a record of whole
    episodes, in which each is cut within a turn."""
    keys = {"actor_rollout_ref.actor.optim.lr": 0, "trainer.save_freq": 0}
    run(*fully(s, "still", **keys, **{"async_training.partial_rollout": False}), env=env(s, "still", 0))
    cuts = []
    for step, place, sample, segments, n in samples(s, "still", "step, place, sample, segments, length(ids) / 4"):
        at, inside = 0, []
        for k, kind in pairs(segments):
            inside += range(at + 1, at + k) if kind == 0 else []
            at += k
        cut = rng.choice(inside)
        if step > 1:
            cuts.append((struct.pack("<4i", cut, step - 2, n - cut, step - 1), step, place, sample))
    with sqlite3.connect(s.dir / "still/run.db") as db:
        db.executemany("UPDATE samples SET versions = ? WHERE step = ? AND place = ? AND sample = ? AND validation = 0", cuts)
    run(*fully(s, "cut", **keys, **{"async_training.replay": s.dir / "still"}), env=env(s, "cut", 0))
    test("interrupted within turns, each where the record says", interrupted(samples(s, "cut"))[1] == len(cuts) > 0)
    test("weights that stay: the episodes are those of a run without interruption, log-probs and all",
         samples(s, "cut") == samples(s, "still"))


def warned(s, test):
    p = run(*fully(s, "quiet", **{MT + "enable": False, "rollout.total_rollout_steps": 4, "trainer.save_freq": 0,
                                  ROLLOUT + "agent.default_agent_loop": "single_turn_agent"}), env=env(s, "quiet"))
    test("multi_turn.enable=False, verl's way to turn tools off: it is said", "enable=False" in p.stderr, p.stderr[-800:])


def main():
    rng = random.Random(seed := time.time_ns() % 10**6)
    print(f"seed {seed}")
    test = Tests()
    with Scratch(small=True) as s:
        calling_model(s.dir / "model", s.dir / "calls", 5.5, 4.5)
        for name, text in (("late_tools.py", TOOLS), ("tools.yaml", YAML), ("again.yaml", INTERACTIONS), ("reward.py", REWARD)):
            (s.dir / name).write_text(text)
        rows = [s.row(i) for i in range(24)]
        for row in rows:
            row["extra_info"]["interaction_kwargs"] = {"name": "again"}
        s.write("train.jsonl", rows[:16])
        s.write("test.jsonl", rows[16:])
        whole(s, test, rng)
        partial(s, test, rng)
        still(s, test, rng)
        warned(s, test)
    test.end()


main()
