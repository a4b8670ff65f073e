"""Invariant 11 with tools and an interaction: a run that is killed at any moment and goes on calls nothing again whose answer it
had recorded, and ends in the bits of a run that was not killed. The moments are random, the seed is printed.

  inv11_tool_journal_test.py [--kills N] [--report FILE]     N kills (4); what came of them as figures (tools/figures.py)"""

import json
import pathlib
import random
import shutil
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
# a turn without a call is answered here; with one call a turn, messages are turns
INTERACTION = """
import json, os, time
from verl.interactions.base import BaseInteraction

class Again(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        with open(os.environ["CALLS"], "a") as f:
            f.write(json.dumps([instance_id, len(messages)]) + "\\n")
        time.sleep(0.003)
        return len(messages) > 7, "again", 0.25, {}
"""
INTERACTIONS = """
interaction:
  - name: again
    class_name: counting.Again
    config: {}
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
    assert x.get("seen", 0) == len(x["tool_rewards"]), x
    return sum(c.isdigit() for c in solution_str) / len(solution_str) - 0.01 * x["num_turns"] + sum(x["turn_scores"])
"""


def args_of(s, name):
    return s.ppo(name, **{
        "actor_rollout_ref.model.path": s.dir / "calls", ROLLOUT + "agent.default_agent_loop": "tool_agent",
        MT + "tool_config_path": s.dir / "tools.yaml", "+" + MT + "interaction_config_path": s.dir / "again.yaml",
        MT + "max_assistant_turns": 6, "data.max_response_length": 100,
        "data.train_batch_size": 4, ROLLOUT + "n": 2, "trainer.total_training_steps": STEPS, "trainer.test_freq": 1,
        "actor_rollout_ref.actor.use_kl_loss": False, "trainer.device": "cpu", "trainer.save_freq": 1,
        "reward.custom_reward_function.path": s.dir / "reward.py", "reward.num_workers": 1})


def recorded(run_dir):
    """Episode and turn of each answer that the journal has, and of those of the interaction."""
    found, interaction = set(), set()
    for f in run_dir.glob("tool_journal/*.jsonl"):
        for line in f.read_bytes().split(b"\n"):
            try:
                episode, turn, _, name = json.loads(line)["key"].split("/")[:4]
            except ValueError:
                continue  # half written
            found.add((episode, int(turn)))
            if name == "interaction":
                interaction.add((episode, int(turn)))
    return found, interaction


def calls(path):
    return [tuple(json.loads(x)) for x in path.read_text().splitlines()] if path.exists() else []


def samples(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        rows = db.execute("SELECT step, validation, uid, sample, ids, logp, segments, score, advantages, episode FROM samples "
                          "ORDER BY step, validation, uid, sample").fetchall()
    return [(*r[:-1], [{k: v for k, v in c.items() if k != "seconds"} for c in json.loads(r[-1])["calls"]]) for r in rows]


def main():
    rng = random.Random(seed := time.time_ns() % 10**6)
    option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    n = int(option.get("--kills", 4))
    print(f"seed {seed}")
    test = Tests()
    with Scratch(small=True) as s:
        calling_model(s.dir / "model", s.dir / "calls", 12, 11)
        for name, text in (("counting.py", TOOL + INTERACTION), ("tools.yaml", YAML), ("again.yaml", INTERACTIONS),
                           ("reward.py", REWARD)):
            (s.dir / name).write_text(text)
        rows = [s.row(i) for i in range(24)]
        for row in rows:
            row["extra_info"]["interaction_kwargs"] = {"name": "again"}
        s.write("train.jsonl", rows[:16])
        s.write("test.jsonl", rows[16:])
        env = {"PYTHONPATH": str(s.dir), "CALLS": str(s.dir / "whole.calls")}
        begun = time.time()
        run(*args_of(s, "whole"), env=env)
        seconds, whole = time.time() - begun, samples(s.dir / "whole")
        test("tools are called in several turns", max(t for _, t in calls(s.dir / "whole.calls")) >= 6)
        test("a run that has ended keeps no journal", not (s.dir / "whole/tool_journal").exists())
        again, resumed, runs, k, different, found, asked, unknown = [], 0, 0, 0, 0, 0, 0, set()
        while k < n:
            d, log = s.dir / f"killed{runs}", s.dir / f"killed{runs}.calls"
            runs += 1
            over = False
            while not over:
                (had, interaction), before = recorded(d), len(calls(log))
                p = start(args_of(s, d.name), env=env | {"CALLS": str(log)})
                if k < n:
                    time.sleep(rng.uniform(0.1, 1.1) * seconds)
                    p.send_signal(signal.SIGKILL)
                p.communicate(timeout=120)
                k += p.returncode == -signal.SIGKILL
                over = p.returncode != -signal.SIGKILL
                resumed += bool(had)
                found, asked = found + len(had), asked + len(interaction)
                unknown |= had - set(calls(log))
                again += [c for c in calls(log)[before:] if c in had]
                if over and p.returncode:
                    test(f"exit {p.returncode}", False)
            same = samples(d) == whole and state(d, STEPS) == state(s.dir / "whole", STEPS)
            different += not same
            test(f"run {runs}: the bits of a run that was not killed", same)
            shutil.rmtree(d)
        print(f"{k} kills of {runs} runs, {resumed} in a step with answers: {found} answers were recorded, {asked} of them of the "
              f"interaction; {len(again)} calls made again, {different} runs of other bits")
        test("what is recorded was called", not unknown, unknown)
        test("no recorded call is made again", not again, again[:3])
        if "--report" in option:
            what = f"kill -9 at {k} random moments of a run with tools and an interaction: "
            row = {"unit": "", "lower": True, "bar": 0, "bar_ratio": None, "peers": [], "work": None, "note": ""}
            rows = [{"id": "agents/calls_again", "what": what + "calls made again whose answer was on disk", "ours": len(again),
                     "note": f"{found} answers were on disk, in {resumed} of the moments"},
                    {"id": "agents/other_bits", "what": "the same: resumed runs whose samples or weights have other bits",
                     "ours": different, "note": f"{runs} runs, killed until they ended"}]
            report = pathlib.Path(option["--report"])
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(json.dumps({"machine": {}, "rows": [row | r for r in rows]}, indent=1) + "\n")
    test.end()


main()
