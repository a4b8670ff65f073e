"""Loops and programs of the user in fully asynchronous training: episodes of both, some of which give several samples or fail. With
partial_rollout=False they are waited for, and a run has the bits of any other, on two ranks, killed and resumed. With partial
rollouts they stay open over an exchange of weights, what they ask meanwhile waits, and a turn goes on where it was interrupted."""

import json
import pathlib
import random
import signal
import sqlite3
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from agent_program import AGENT, CLIENT  # noqa: E402
from verlc_test import Scratch, Tests, run, series, start, state  # noqa: E402

STEPS = 3
LOOPS = """
import asyncio, os
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Two(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)
        prompt = list(prompt["input_ids"]) if hasattr(prompt, "keys") else list(prompt)
        said, ids, mask = self.tokenizer.encode(" and 2 ", add_special_tokens=False), [], []
        for most in (int(os.environ["MOST"]), int(os.environ["MOST"]) + 2):
            out = await self.server_manager.generate("r", prompt_ids=prompt + ids, sampling_params={"max_tokens": most})
            ids, mask = ids + out.token_ids + said, mask + [1] * len(out.token_ids) + [0] * len(said)
            while row["extra_info"]["index"] == 0 and not os.path.exists(os.environ["UNTIL"]):
                await asyncio.sleep(0.01)
        if row["extra_info"]["index"] == 2 and row["session_id"]:
            raise ValueError("no luck")
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask, num_turns=4, metrics={}, extra_fields={})
"""
PROGRAM = CLIENT + """
with open(os.environ["STARTS"] + "_validation" * int(os.environ["VERLC_VALIDATION"]), "a") as f:
    f.write(f"{ROW['extra_info']['index']} {os.environ['VERLC_SAMPLE']} {os.environ['VERLC_RESTARTED']}\\n")
talk = list(ROW["prompt"])
for turn in range(2):
    talk += [ask(talk, max_tokens=int(os.environ["MOST"])), {"role": "user", "content": "More?"}]
    while ROW["extra_info"]["index"] == 1 and not os.path.exists(os.environ["UNTIL"]):
        time.sleep(0.01)
ask([{"role": "system", "content": "Count."}, talk[-1]], max_tokens=int(os.environ["MOST"]), stop=["qq"])  # a sample of its own
reward(reward=len(talk[1]["content"] or "") / 100)
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / 100
"""


def fully(s, name, **keys):
    args = s.ppo(name, **{
        "data.max_response_length": 64, AGENT + "agent_loop_config_path": s.dir / "loops.yaml",
        AGENT + "command": f"{sys.executable} {s.dir / 'agent.py'}", "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.hybrid_engine": False, "data.train_batch_size": 0,
        "reward.custom_reward_function.path": s.dir / "reward.py", "reward.num_workers": 1, "reward.on_error": "drop_sample",
        "trainer.device": "cpu", "data.shuffle": False, "trainer.async_save": False, "actor_rollout_ref.actor.optim.lr": 1e-3,
        "async_training.trigger_parameter_sync_step": 2, "async_training.staleness_threshold": 0.5,
        "rollout.total_rollout_steps": 4 * STEPS, "async_training.partial_rollout": False, **keys})
    return [args[0], "--config-name=fully_async_ppo_trainer", *[a for a in args[1:] if "total_training_steps" not in a]]


def env(s, name, until="reward.py", most=10):
    """until: a file before which the episodes of rows 0 and 1 do not go on after their first turn; most: tokens of a turn."""
    return {"PYTHONPATH": str(s.dir), "STARTS": str(s.dir / f"{name}.starts"), "UNTIL": str(s.dir / until), "MOST": str(most)}


def samples(s, name):
    with sqlite3.connect(s.dir / name / "run.db") as db:
        rows = db.execute("SELECT step, place, sample, ids, logp, versions, segments, score, advantages, reward_status, "
                          "prompt_ids, episode FROM samples WHERE validation = 0 ORDER BY id").fetchall()
    return [(*r[:-1], json.loads(r[-1]).get("output"), json.loads(r[-1]).get("reason")) for r in rows]


def same(s, a, b):
    x, y = ({k: v for k, v in state(s.dir / d, STEPS).items() if k != "trainer.json"} for d in (a, b))
    return x == y and samples(s, a) == samples(s, b)


def pairs(blob):
    v = struct.unpack(f"<{len(blob or b'') // 4}i", blob or b"")  # none: no token
    return list(zip(v[::2], v[1::2]))


def whole(s, test, rng):
    begun = time.time()
    run(*fully(s, "whole"), env=env(s, "whole"))
    seconds = time.time() - begun
    rows = samples(s, "whole")
    test("loops' episodes give a sample, programs' two", {k: sorted({r[-2] for r in rows if r[2] == 0 and bool(r[-2] is None) == k})
         for k in (True, False)} == {True: [None], False: [0, 1]}, [r[-2] for r in rows])
    test("a loop that fails costs its own sample", {r[9] for r in rows} == {"score", "crash"} and
         all("no luck" in r[-1] for r in rows if r[9] == "crash"))
    test("every token has its version; an episode is of one", all(
        sum(n for n, _ in pairs(r[5])) == len(r[3]) // 4 and len(pairs(r[5])) == (r[9] == "score") for r in rows))
    test("some are trained a step after they were drawn", max(series(s.dir / "whole", "training/version_lag/max")) == 1)
    run(*fully(s, "ranks", **{"trainer.ranks": 2}), env=env(s, "ranks"))
    test("two ranks: the same bits", same(s, "whole", "ranks"))
    run(*fully(s, "r", **{"async_training.replay": s.dir / "whole"}), env=env(s, "r"))
    test("a replay has the record's bits", same(s, "whole", "r"))
    args = fully(s, "k")
    for part in (rng.uniform(0.3, 0.9), None):
        p = start(args, env=env(s, "k"))
        if part is not None:
            time.sleep(part * seconds)
            p.send_signal(signal.SIGKILL)
        p.communicate(timeout=120)
    test("kill -9 and resume: the same bits", same(s, "whole", "k"))


PARTIAL = {"async_training.partial_rollout": True, "async_training.staleness_threshold": 1}


def partial(s, test):
    """With a learning rate of 0 all versions are one, so interruptions leave no trace. Turns are long, and two are drawn at a time,
    so that some are interrupted."""
    still = {**PARTIAL, "actor_rollout_ref.actor.optim.lr": 0, "actor_rollout_ref.rollout.max_num_seqs": 2,
             "data.max_prompt_length": 300, "data.max_response_length": 260}
    run(*fully(s, "p", **still, **{"trainer.test_freq": 1}), env=env(s, "p", "p/global_step_1", 80))
    rows = [r for r in samples(s, "p") if r[9] == "score"]
    spans = [pairs(r[5]) for r in rows]
    test("every token has its version", all(sum(n for n, _ in v) == len(r[3]) // 4 and
                                            [x for _, x in v] == sorted({x for _, x in v}) for r, v in zip(rows, spans)), spans)
    wide = {r[-2] is None for r, v in zip(rows, spans) if len(v) > 1}
    test("a loop and a program went on under newer weights", wide == {True, False}, spans)
    test("no program was started twice", len(starts := (s.dir / "p.starts").read_text().split("\n")) == len(set(starts)))
    run(*fully(s, "known", **{**still, "async_training.partial_rollout": False}), env=env(s, "known", most=80))
    what = [sorted((r[10], r[2], r[-2] or 0, r[3], r[4], r[6]) for r in samples(s, d)) for d in ("p", "known")]
    test("the samples are those of a run without interruption, log-probs and all", what[0] == what[1])


def restarted(s, test):
    """Killed while two prompts' episodes are open; what runs is not in the checkpoint, that it ran is."""
    args, early = fully(s, "q", **PARTIAL), env(s, "q", "go")
    p = start(args, env=early)
    while not (s.dir / "q/global_step_1").exists() and p.poll() is None:
        time.sleep(0.002)
    p.send_signal(signal.SIGKILL)
    p.communicate()
    (s.dir / "go").touch()
    run(*args, env=early)
    starts = [x for x in (s.dir / "q.starts").read_text().split("\n") if x.startswith("1 ")]
    test("a program that ran is started again, and told so", sorted(starts) == ["1 0 0", "1 0 1", "1 1 0", "1 1 1"], starts)
    test("the run trains all of its prompts", {r[:3] for r in samples(s, "q")} ==
         {(k, p, i) for k in range(1, STEPS + 1) for p in range(4) for i in range(2)})
    p = run(*fully(s, "z", **PARTIAL, **{"async_training.replay": s.dir / "p"}), env=env(s, "z"), check=False)
    test.refused("a replay with partial rollouts", p, 3, "partial_rollout=False alone")


def main():
    rng = random.Random(seed := time.time_ns() % 10**6)
    print(f"seed {seed}")
    test = Tests()
    with Scratch(small=True) as s:
        rows = [s.row(i) for i in range(16)]
        for i, row in enumerate(rows):
            row["agent_name"] = "program_agent" if i % 2 else "two"
        s.write("train.jsonl", rows)
        for name, text in (("two_loop.py", LOOPS), ("agent.py", PROGRAM), ("reward.py", REWARD),
                           ("loops.yaml", "- name: two\n  _target_: two_loop.Two\n")):
            (s.dir / name).write_text(text)
        whole(s, test, rng)
        partial(s, test)
        restarted(s, test)
    test.end()


main()
