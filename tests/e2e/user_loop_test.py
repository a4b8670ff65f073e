"""Agent loops that are the user's Python classes, in a run: two turns with text between them, log-probs of training are the
rollout's; loops that fail cost their own samples alone."""

import json
import pathlib
import sqlite3
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, series  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
LOOPS = """
import asyncio
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class TwoTurns(AgentLoopBase):
    def __init__(self, *args, hint=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.hint = hint

    async def run(self, sampling_params, **row):
        prompt = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)
        prompt = list(prompt["input_ids"]) if hasattr(prompt, "keys") else list(prompt)
        first = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 5})
        said = self.tokenizer.encode(self.hint, add_special_tokens=False)
        second = await self.server_manager.generate("r", prompt_ids=prompt + first.token_ids + said,
                                                    sampling_params={**sampling_params, "max_tokens": 6})
        ids = first.token_ids + said + second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(said) + [1] * len(second.token_ids)
        kind = row["extra_info"]["kind"]
        if kind == "several":  # what it said first is context of the second, which begins at another prompt
            outputs = [AgentLoopOutput(prompt_ids=prompt, response_ids=first.token_ids, response_mask=[1] * len(first.token_ids),
                                       num_turns=2, metrics={}, extra_fields={}),
                       AgentLoopOutput(prompt_ids=prompt + first.token_ids + said, response_ids=second.token_ids,
                                       response_mask=[1] * len(second.token_ids), num_turns=4, metrics={},
                                       extra_fields={"n_said": len(said)})]
            return outputs if row["session_id"] else outputs[1:]
        if kind == "raises":
            raise ValueError("no luck")
        if kind == "hangs":
            await asyncio.sleep(600)
        if kind == "claims":
            mask = [1] * len(ids)
        if kind == "other":
            await self.server_manager.generate("r", prompt_ids=prompt, sampling_params={"temperature": 0.123})
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask, num_turns=4, metrics={},
                               extra_fields={"n_said": len(said)}, reward_score=0.25 if kind == "scored" else None)
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["num_turns"] == 4 and extra_info["n_said"] > 0, extra_info
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
KINDS = ["good", "scored", "good", "good"], ["raises", "claims", "hangs", "other", "good", "good"]


def samples(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return db.execute("SELECT step, uid, sample, ids, logp, segments, score, reward_status, reward_message, episode "
                          "FROM samples ORDER BY step, uid, sample, id").fetchall()


def args_of(s, name, kinds, **keys):
    rows = [s.row(i) for i in range(len(kinds))]
    for row, kind in zip(rows, kinds):
        row["agent_name"] = "two_turns"
        row["extra_info"]["kind"] = kind
    return s.ppo(name, **{
        "data.train_files": s.write(f"{name}.jsonl", rows), "data.val_files": "null", "data.max_response_length": 40,
        "data.train_batch_size": len(kinds), ROLLOUT + "n": 2, "trainer.total_training_steps": 2, "trainer.device": "cpu",
        ROLLOUT + "agent.agent_loop_config_path": s.dir / "loops.yaml", "trainer.force_old_log_prob": True,
        ROLLOUT + "calculate_log_probs": True, "reward.custom_reward_function.path": s.dir / "reward.py",
        "reward.num_workers": 1, "reward.on_error": "drop_sample", **keys})


def good(s, test):
    run(*args_of(s, "good", KINDS[0]))
    d = s.dir / "good"
    test("the log-probs of training are the rollout's", series(d, "training/rollout_probs_diff_max") == [0, 0])
    test("turns are the loop's", series(d, "num_turns/mean") == [4, 4], series(d, "num_turns/mean"))
    rows = samples(d)
    pairs = [list(struct.unpack(f"<{len(r[5]) // 4}i", r[5])) for r in rows]
    test("policy, environment, policy", all(p[1::2] == [0, 1, 0] for p in pairs), pairs[:2])
    logp = [struct.unpack(f"<{len(r[4]) // 4}f", r[4]) for r in rows]
    test("what the loop said has log-prob 0, what was drawn another",
         all([x == 0 for x in q] == [False] * p[0] + [True] * p[2] + [False] * p[4] for p, q in zip(pairs, logp)))
    test("reward_score is the score", sum(r[6] == 0.25 for r in rows) == 4, [r[6] for r in rows])
    run(*args_of(s, "ranks", KINDS[0], **{"trainer.ranks": 2}))
    test("two ranks as one", samples(s.dir / "ranks") == rows)


def several(s, test):
    """Each episode but the first of its prompt gives two samples."""
    keys = {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "reward.custom_reward_function.path": s.dir / "length.py"}
    (s.dir / "length.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                     "    return len(solution_str) / 100\n")
    run(*args_of(s, "several", ["several"] * 4, **keys))
    d, rows = s.dir / "several", samples(s.dir / "several")
    test("log-probs of training are the rollout's", series(d, "training/rollout_probs_diff_max") == [0, 0])
    of = [json.loads(r[9]) for r in rows]
    test("an episode may give several samples", [(e.get("output"), e.get("outputs")) for e in of] ==
         [(None, None), (0, 2), (1, 2)] * 8, of[:3])
    test("the last one's score is that of all", all(a[6] == b[6] for a, b in zip(rows[1::3], rows[2::3])) and
         len({r[6] for r in rows}) > 4, [r[6] for r in rows])
    with sqlite3.connect(d / "run.db") as db:
        advantage = [r[0] for r in db.execute("SELECT advantage FROM samples ORDER BY step, uid, sample, id")]
    test("episodes are compared, not samples", all(b == c and abs(a + b) < 1e-6 for a, b, c in
                                                   zip(advantage[::3], advantage[1::3], advantage[2::3])), advantage[:6])
    test("turns are the sample's", [e["turns"] for e in of] == [4, 2, 4] * 8)
    run(*args_of(s, "several_ranks", ["several"] * 4, **keys, **{"trainer.ranks": 3}))
    test("three ranks as one", samples(s.dir / "several_ranks") == rows)
    shown = run("show", d, "--step", 1, "--sample", f"{rows[0][1]}.1").stdout
    test("a sample says which of its episode it is", "sample 2 of 2 of its episode" in shown, shown[-600:])


def one_step_off(s, test):
    """In turns on one rank, and on a rank of its own beside training."""
    for name, more in (("off", {}), ("off_pool", {"trainer.ranks": 1, "rollout.ranks": 1})):
        args = args_of(s, name, KINDS[0], **{"actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": 1,
                                             "rollout.n_gpus_per_node": 1, "trainer.total_training_steps": 3, **more})
        run(args[0], "--config-name=one_step_off_ppo_trainer", *args[1:])
    rows = samples(s.dir / "off")
    test("one step off: each step has the loop's samples", len(rows) == 3 * 8 and all(r[7] == "score" for r in rows))
    test("one step off: the same on a rank of its own", samples(s.dir / "off_pool") == rows)


def bad(s, test):
    run(*args_of(s, "bad", KINDS[1], **{ROLLOUT + "agent.episode_timeout": 2, "trainer.total_training_steps": 1}))
    rows = samples(s.dir / "bad")
    said = [r[7] for r in rows]
    test("loops that fail cost their own samples alone", said == ["crash"] * 8 + ["score"] * 4, said)
    why = (("a loop that raises", "no luck", "error"), ("tokens that were not drawn", "response_mask is 1 at token", "error"),
           ("a loop that hangs", "2 s", "timeout"), ("another temperature", "rollout.temperature", "error"))
    for k, (what, words, end) in enumerate(why):
        of = rows[2 * k:2 * k + 2]
        test(what, all(words in r[8] and json.loads(r[9])["end"] == end for r in of), of[0][8:])


def refused(s, test):
    test.refused("a loop that there is not", run(*args_of(s, "no", KINDS[0], **{
        ROLLOUT + "agent.agent_loop_config_path": "null"}), check=False), 3, "agent_name 'two_turns'", "agent_loop_config_path")
    (s.dir / "wrong.yaml").write_text("- name: two_turns\n  _target_: loops.Missing\n")
    test.refused("a class that there is not", run(*args_of(s, "no", KINDS[0], **{
        ROLLOUT + "agent.agent_loop_config_path": s.dir / "wrong.yaml"}), check=False), 3, "loops.Missing")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "loops.py").write_text(LOOPS)
        (s.dir / "loops.yaml").write_text('- name: two_turns\n  _target_: loops.TwoTurns\n  hint: " 1 + 1 "\n')
        (s.dir / "reward.py").write_text(REWARD)
        good(s, test)
        several(s, test)
        one_step_off(s, test)
        bad(s, test)
        refused(s, test)
    test.end()


main()
