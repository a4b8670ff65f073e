"""Agent loops by row: agent_name, tool_selection, tools_kwargs, interactions, and what is refused or warned about."""

import json
import pathlib
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import CALLS, TOOLS, calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
MT = ROLLOUT + "multi_turn."
MORE = '''

@function_tool
def other(y: str) -> str:
    """Says y.

    Args:
        y: anything
    """
    return y
'''
INTERACTIONS = '''
from verl.interactions.base import BaseInteraction

class Again(BaseInteraction):
    """Asks for another number until there are three answers; a fourth message that holds a four raises."""

    async def generate_response(self, instance_id, messages, **kwargs):
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        if len(answers) == kwargs["fail_at"]:
            raise ValueError("no more questions")
        return len(answers) == 3, "again", 0.25 * len(answers), {}
'''


def args_of(s, name, **keys):
    return s.ppo(name, **{
        "actor_rollout_ref.model.path": s.dir / "calls", MT + "function_tool_path": s.dir / "tools.py",
        MT + "max_assistant_turns": 4, "data.max_response_length": 100, "trainer.total_training_steps": 1,
        "trainer.save_freq": 0, "actor_rollout_ref.actor.use_kl_loss": False, "trainer.device": "cpu",
        "data.train_files": s.dir / f"{name}.jsonl", "data.shuffle": False, "data.val_files": "[]", **keys})


def samples(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        rows = db.execute("SELECT prompt, response, length(segments) / 8, reward_status, reward_message, extra, episode "
                          "FROM samples ORDER BY uid, sample").fetchall()
    return [(*r[:-2], json.loads(r[-2]), json.loads(r[-1])) for r in rows]


def by_row(s, test):
    rows = [s.row(i) for i in range(4)]
    rows[0]["agent_name"] = rows[1]["agent_name"] = rows[2]["agent_name"] = "tool_agent"
    rows[1]["extra_info"]["tool_selection"] = ["other", "nothing"]
    rows[2]["extra_info"]["tool_selection"] = ["nothing"]
    s.write("by_row.jsonl", rows)
    p = run(*args_of(s, "by_row", **{"+data.need_tools_kwargs": True}))
    got = samples(s.dir / "by_row")
    first = [[r[0].split("\n")[:2] for r in got[2 * i:2 * i + 2]] for i in range(4)]
    test("a row's prompt has its own tools", [f[0] for f in first] ==
         [["system", "Tools: add other"], ["system", "Tools: other"], ["user", "What is 2 + 3?"], ["user", "What is 3 + 4?"]],
         [f[0] for f in first])
    turns = [r[-1]["turns"] for r in got]
    test("three rows have several turns, the fourth has one", all(max(turns[i:i + 2]) > 2 for i in (0, 2, 4)) and
         turns[6:] == [2, 2] and [r[2] for r in got[6:]] == [1, 1], turns)
    calls = [c for r in got[2:6] for c in r[-1]["calls"]]
    test("a tool that a row does not have is unknown", calls and all(c["status"] == "unknown" and c["reward"] == 0 for c in calls),
         calls[:1])
    test("rows without tools_kwargs are named", "3 rows of a tool_agent have no extra_info.tools_kwargs" in p.stderr)
    every = [c for r in got for c in r[-1]["calls"]]
    test("metrics", series(s.dir / "by_row", "agent_loop/tool_errors/mean") == [len(calls) / len(every)] and
         series(s.dir / "by_row", "num_turns/min") == [2])


def interactions(s, test):
    rows = [s.row(i) for i in range(4)]
    for i, row in enumerate(rows):
        row["extra_info"]["interaction_kwargs"] = {"name": "again", "fail_at": 2 if i == 3 else 99}
    s.write("interactions.jsonl", rows)
    (s.dir / "questions.py").write_text(INTERACTIONS)
    (s.dir / "again.yaml").write_text("interaction:\n  - name: again\n    class_name: questions.Again\n    config: {}\n")
    (s.dir / "scores.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                                     "    return sum(extra_info['turn_scores'])\n")
    keys = {"+" + MT + "interaction_config_path": s.dir / "again.yaml", ROLLOUT + "agent.default_agent_loop": "tool_agent",
            MT + "max_assistant_turns": "null", "actor_rollout_ref.model.path": s.dir / "answers",
            "reward.custom_reward_function.path": s.dir / "scores.py", "reward.num_workers": 1}
    p = run(*args_of(s, "interactions", **keys), env={"PYTHONPATH": str(s.dir)})
    got = samples(s.dir / "interactions")
    with sqlite3.connect(s.dir / "interactions/run.db") as db:
        scores = [r[0] for r in db.execute("SELECT score FROM samples ORDER BY uid, sample")]
    test("an interaction answers each turn, and its last message is kept",
         all(r[1].count("user\nagain") == 3 and r[-1]["turns"] == 7 and r[-1]["end"] == "stop" for r in got[:6]), got[0])
    test("the reward function has the turns' scores", scores[:6] == [1.5] * 6, scores)
    test("one that raises costs its own samples their score", scores[6:] == [None, None] and
         all(r[3] == "crash" and "no more questions" in r[4] and r[-1]["end"] == "error" for r in got[6:]),
         (got[-1], p.stderr[-300:]))
    rows[0]["extra_info"]["interaction_kwargs"] = {"name": "other"}
    s.write("interactions.jsonl", rows)
    test.refused("a row names an interaction that there is not",
                 run(*args_of(s, "interactions", **keys), env={"PYTHONPATH": str(s.dir)}, check=False), 3, "other", "again")


def rendered_again(s, test):
    """tokenization_sanity_check_mode: calls that are drawn without the template's spaces."""
    s.write("again.jsonl", [s.row(i) for i in range(4)])
    name = "agent_loop/rendered_again_differ/mean"
    keys = {ROLLOUT + "agent.default_agent_loop": "tool_agent", MT + "max_assistant_turns": "null"}
    for model, mode, differ in (("calls", "strict", False), ("tight", "strict", True), ("tight", "ignore_strippable", False),
                                ("tight", "disable", None)):
        p = run(*args_of(s, "again", **keys, **{"actor_rollout_ref.model.path": s.dir / model, "trainer.resume_mode": "disable",
                                                MT + "tokenization_sanity_check_mode": mode}))
        got = series(s.dir / "again", name)
        test(f"{model}, {mode}: rendered again, and said where it differs", (got == [] if differ is None else got and
             (got[-1] > 0) == differ) and ("rendered their messages again" in p.stderr) == bool(differ), (got, p.stderr[-300:]))


def refusals(s, test):
    s.write("refused.jsonl", [{**s.row(i), **({"agent_name": "my_agent"} if i == 1 else {})} for i in range(8)])
    test.refused("an agent loop that there is not", run(*args_of(s, "refused"), check=False), 3, "my_agent", "tool_agent", "row 2")
    for key, value, code, words in ((ROLLOUT + "agent.default_agent_loop", "my_agent", 2, ("my_agent", "tool_agent")),
                                    (MT + "format", "xml", 2, ("format=xml", "hermes")),
                                    (ROLLOUT + "agent.agent_loop_config_path", "x.yaml", 3, ("agent_loop_config_path=x.yaml",))):
        test.refused(f"{key}={value}", run(*args_of(s, "refused", **{key: value}), check=False), code, *words)
    s.write("quiet.jsonl", [s.row(i) for i in range(4)])
    p = run(*args_of(s, "quiet", **{MT + "enable": True, MT + "tool_response_truncate_side": "left"}))
    test("tools that no row has: the cure is named", "default_agent_loop=tool_agent" in p.stderr, p.stderr[-800:])
    test("the side that was the other one until 0.7.1 is noted", "0.7.1" in p.stderr)


def main():
    test = Tests()
    with Scratch() as s:
        calling_model(s.dir / "model", s.dir / "calls", 12, 9)
        calling_model(s.dir / "model", s.dir / "answers", 0, 12)
        calling_model(s.dir / "model", s.dir / "tight", 12, 12, [c.replace(": ", ":").replace(", ", ",") for c in CALLS])
        (s.dir / "tools.py").write_text(TOOLS + MORE)
        by_row(s, test)
        interactions(s, test)
        rendered_again(s, test)
        refusals(s, test)
    test.end()


main()
