"""Invariant 11 with tools: a run that is killed at any moment and goes on calls no tool again whose answer it had recorded, and
ends in the bits of a run that was not killed. The moments are random, the seed is printed. --kills N: so many (default 4)."""

import json
import pathlib
import random
import signal
import sqlite3
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, start, state  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
MT = ROLLOUT + "multi_turn."
STEPS = 3
# answers differ from call to call, so a run that calls twice has other bits
TOOL = """
import json, os, time
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Add(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        turn = agent_data.user_turns + agent_data.assistant_turns + 1
        with open(os.environ["CALLS"], "a") as f:
            f.write(json.dumps([agent_data.request_id, turn]) + "\\n")
        time.sleep(0.003)
        agent_data.extra_fields["seen"] = agent_data.extra_fields.get("seen", 0) + 1
        return ToolResponse(text=str(parameters["x"] + 1)), 0.5, {}
"""
YAML = """
tools:
  - class_name: counting.Add
    config: {type: native}
    tool_schema:
      type: function
      function: {name: add, description: adds one,
                 parameters: {type: object, properties: {x: {type: integer, description: a number}}, required: [x]}}
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    x = extra_info
    assert x["seen"] == len(x["tool_rewards"]), x
    return sum(c.isdigit() for c in solution_str) / len(solution_str) - 0.01 * x["num_turns"]
"""


def args_of(s, name):
    return s.ppo(name, **{
        "actor_rollout_ref.model.path": s.dir / "calls", ROLLOUT + "agent.default_agent_loop": "tool_agent",
        MT + "tool_config_path": s.dir / "tools.yaml", MT + "max_assistant_turns": 6, "data.max_response_length": 100,
        "data.train_batch_size": 4, ROLLOUT + "n": 2, "trainer.total_training_steps": STEPS, "trainer.test_freq": 1,
        "actor_rollout_ref.actor.use_kl_loss": False, "trainer.device": "cpu", "trainer.save_freq": 1,
        "reward.custom_reward_function.path": s.dir / "reward.py", "reward.num_workers": 1})


def recorded(run_dir):
    """Episode and turn of each answer that the journal has."""
    found = set()
    for f in run_dir.glob("tool_journal/*.jsonl"):
        for line in f.read_bytes().split(b"\n"):
            try:
                episode, turn = json.loads(line)["key"].split("/")[:2]
            except ValueError:
                continue  # half written
            found.add((episode, int(turn)))
    return found


def calls(path):
    return [tuple(json.loads(x)) for x in path.read_text().splitlines()] if path.exists() else []


def samples(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        rows = db.execute("SELECT step, validation, uid, sample, ids, logp, segments, score, advantages, episode FROM samples "
                          "ORDER BY step, validation, uid, sample").fetchall()
    return [(*r[:-1], [{k: v for k, v in c.items() if k != "seconds"} for c in json.loads(r[-1])["calls"]]) for r in rows]


def main():
    rng = random.Random(seed := time.time_ns() % 10**6)
    n = int(sys.argv[sys.argv.index("--kills") + 1]) if "--kills" in sys.argv else 4
    print(f"seed {seed}")
    test = Tests()
    with Scratch() as s:
        calling_model(s.dir / "model", s.dir / "calls", 12, 9)
        for name, text in (("counting.py", TOOL), ("tools.yaml", YAML), ("reward.py", REWARD)):
            (s.dir / name).write_text(text)
        env = {"PYTHONPATH": str(s.dir), "CALLS": str(s.dir / "whole.calls")}
        begun = time.time()
        run(*args_of(s, "whole"), env=env)
        seconds, whole = time.time() - begun, samples(s.dir / "whole")
        test("tools are called in several turns", max(t for _, t in calls(s.dir / "whole.calls")) >= 6)
        test("a run that has ended keeps no journal", not (s.dir / "whole/tool_journal").exists())
        again, resumed, runs, k = [], 0, 0, 0
        while k < n:
            d, log = s.dir / f"killed{runs}", s.dir / f"killed{runs}.calls"
            runs += 1
            over = False
            while not over:
                had, before = recorded(d), len(calls(log))
                p = start(args_of(s, d.name), env=env | {"CALLS": str(log)})
                if k < n:
                    time.sleep(rng.uniform(0.1, 1.1) * seconds)
                    p.send_signal(signal.SIGKILL)
                p.communicate(timeout=120)
                k += p.returncode == -signal.SIGKILL
                over = p.returncode != -signal.SIGKILL
                resumed += bool(had)
                again += [c for c in calls(log)[before:] if c in had]
                if over and p.returncode:
                    test(f"exit {p.returncode}", False)
            test(f"run {runs}: the bits of a run that was not killed", samples(d) == whole and
                 state(d, STEPS) == state(s.dir / "whole", STEPS))
        test(f"{k} kills, {resumed} of them in a step with answers: no recorded call is made again", not again, again[:3])
    test.end()


main()
