"""verlc generate and verlc eval with agent loops: a row's episode is what the trainer's own validation makes of it, and so is its
score; on two ranks the same file; loops of the user and programs; what fails costs itself alone."""

import json
import pathlib
import signal
import sys
import time

import pyarrow.parquet as pq

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import TOOLS, calling_model  # noqa: E402
from verlc_test import Scratch, Tests, run, series, start  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
MT = ROLLOUT + "multi_turn."
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str.count("tool_call")), "turns": extra_info["num_turns"],
            "rewards": len(extra_info["tool_rewards"]), "index": extra_info["index"]}
"""
LOOPS = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Twice(AgentLoopBase):
    """Asks twice and scores itself; the row of index 2 fails."""

    async def run(self, sampling_params, **kwargs):
        if kwargs["index"] == 2:
            raise ValueError("no episode")
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        first = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 4})
        ids = first.token_ids + prompt[-2:]
        second = await self.server_manager.generate("r", prompt_ids=prompt + ids, sampling_params=sampling_params)
        mask = [1] * len(first.token_ids) + [0, 0] + [1] * len(second.token_ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids + second.token_ids, response_mask=mask, num_turns=4,
                               reward_score=0.5, metrics={})
'''


def rows_of(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def keys(s, **more):
    """Of both programs."""
    return {"actor_rollout_ref.model.path": s.dir / "calls", MT + "function_tool_path": s.dir / "tools.py",
            MT + "max_assistant_turns": 3, "data.max_prompt_length": 64, "data.max_response_length": 48,
            ROLLOUT + "temperature": 1.0, "trainer.device": "cpu", "trainer.seed": 3, **more}


def generate(s, rows, out, check=True, **more):
    args = keys(s, **{"data.train_files": s.write("rows.jsonl", rows), "+data.output_path": s.dir / out, ROLLOUT + "n": 2,
                      ROLLOUT + "agent.default_agent_loop": "tool_agent", **more})
    return run("generate", *[f"{k}={v}" for k, v in args.items()], check=check)


def evaluate(s, path, *more):
    p = run("eval", f"data.path={s.dir / path}", f"custom_reward_function.path={s.dir / 'score.py'}", *more)
    return json.loads(p.stdout)


def validate(s, rows, name, **more):
    """The trainer's: the dumped samples, and its metrics."""
    s.write("val.jsonl", rows)
    run(*s.ppo(name, **keys(s, **{
        "data.val_files": s.dir / "val.jsonl", "data.train_batch_size": 4, "actor_rollout_ref.actor.use_kl_loss": False,
        ROLLOUT + "agent.default_agent_loop": "tool_agent", "trainer.val_before_train": True, "trainer.val_only": True,
        "trainer.validation_data_dir": s.dir / f"{name}-val", "reward.custom_reward_function.path": s.dir / "score.py",
        "reward.num_workers": 1, "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16", **more})))
    return rows_of(s.dir / f"{name}-val/0.jsonl")


def timeless(episode):
    return {**episode, "calls": [{**c, "seconds": 0} for c in episode["calls"]]}


def as_validation(s, test):
    rows = [s.row(i) for i in range(5)]
    rows[4]["agent_name"] = "single_turn_agent"
    rows[3]["prompt"] = "What is 1 + 1?"
    greedy = {ROLLOUT + "temperature": 0, ROLLOUT + "n": 1}
    generate(s, rows, "greedy.jsonl", **greedy)
    val = validate(s, rows, "run", **{ROLLOUT + "val_kwargs.do_sample": False, ROLLOUT + "val_kwargs.n": 1})
    got = rows_of(s.dir / "greedy.jsonl")
    test("greedy: the text of the trainer's validation, row by row", len(got) == 5 and
         [r["responses"] for r in got] == [[v["output"]] for v in val], (got[0]["responses"], val[0]["output"]))
    first, last = got[0]["episodes"][0], got[4]["episodes"][0]
    said = first["messages"]
    test("an episode has its turns and calls", first["turns"] > 2 and first["calls"] and
         [m["role"] for m in said[:2]] == ["assistant", "tool"] and said[1]["content"] == first["calls"][0]["result"] and
         not any("<|im_end|>" in m["content"] for r in got for e in r["episodes"] for m in e["messages"]) and
         first["extra_info"]["num_turns"] == first["turns"], first)
    test("a turn that a limit ended is a message too", all(
        sum(m["role"] == "assistant" for m in e["messages"]) * 2 == e["turns"] for r in got for e in r["episodes"]), got)
    test("a row of one turn among them", last["turns"] == 2 and last["calls"] == [] and
         [(m["role"], m["content"]) for m in last["messages"]] == [("assistant", got[4]["responses"][0])], last)
    test("columns of the rows are as they were", all(
        {k: v for k, v in r.items() if k not in ("responses", "episodes")} == q for r, q in zip(got, rows)))
    scores = evaluate(s, "greedy.jsonl")
    names = [n for n in scores if n.startswith("val-") and "success" not in n]
    with_run = {n: series(s.dir / "run", n) for n in names}
    test("eval: the trainer's own metrics of it, num_turns for the scorer too", len(names) > 6 and
         all(v == [scores[n]] for n, v in with_run.items()), (scores, with_run))

    # sampled: the trainer's again, since seed, rows and samples are
    rows[3]["prompt"] = [{"role": "user", "content": rows[3]["prompt"]}]  # of Parquet: a column has one type
    p = generate(s, rows, "sampled.jsonl", **{"+data.episode_tokens": True})
    val = validate(s, rows, "run2", **{ROLLOUT + "val_kwargs.do_sample": True, ROLLOUT + "val_kwargs.n": 2,
                                       ROLLOUT + "val_kwargs.temperature": 1.0, ROLLOUT + "val_kwargs.top_p": 1.0})
    got = rows_of(s.dir / "sampled.jsonl")
    test("sampled: the trainer's validation again", [t for r in got for t in r["responses"]] == [v["output"] for v in val] and
         len({r["responses"][0] == r["responses"][1] for r in got[:4]}) > 0, p.stderr[-400:])
    tokens = [e for r in got for e in r["episodes"]]
    test("tokens where they are asked for, and which of them were drawn", all(
        len(e["ids"]) == len(e["mask"]) > 0 and (0 in e["mask"]) == bool(e["calls"]) for e in tokens), tokens[0])
    scores = json.loads(run("eval", f"data.path={s.dir / 'sampled.jsonl'}").stdout)
    test("eval: pass@k with tools", "val-aux/num_turns/mean" in scores and any("/pass@2" in n for n in scores), scores)
    test("eval: how the episodes went", scores["agent_loop/tool_errors/mean"] == 0 and scores["agent_loop/turns_at_limit/mean"] ==
         sum(e["end"] == "max_assistant_turns" for e in tokens) / len(tokens) > 0, scores)
    generate(s, rows, "two.parquet", **{"+data.episode_tokens": True, "trainer.ranks": 2})
    two = pq.read_table(s.dir / "two.parquet").to_pylist()
    test("two ranks, Parquet: the same episodes", [r["responses"] for r in two] == [r["responses"] for r in got] and
         [[timeless(json.loads(e)) for e in r["episodes"]] for r in two] == [[timeless(e) for e in r["episodes"]] for r in got])
    test("eval of Parquet says the same", json.loads(run("eval", f"data.path={s.dir / 'two.parquet'}").stdout) == scores)


def own_loops(s, test):
    rows = [{**s.row(i), "agent_name": "twice"} for i in range(4)]
    (s.dir / "loops.py").write_text(LOOPS)
    (s.dir / "loops.yaml").write_text("- name: twice\n  _target_: loops.Twice\n")
    args = keys(s, **{"data.train_files": s.write("own.jsonl", rows), "+data.output_path": s.dir / "own.out.jsonl",
                      ROLLOUT + "agent.agent_loop_config_path": s.dir / "loops.yaml"})
    p = run("generate", *[f"{k}={v}" for k, v in args.items()], env={"PYTHONPATH": str(s.dir)}, check=False)
    got = [r["episodes"][0] for r in rows_of(s.dir / "own.out.jsonl")] if p.returncode == 0 else []
    fine = got[:2] + got[3:]
    test("a loop of the user: roles by who wrote the tokens", len(got) == 4 and all(
        [m["role"] for m in e["messages"]] == ["assistant", "environment", "assistant"] for e in fine), p.stderr[-800:])
    test("one that raises is a failure of its own row", len(got) == 4 and "no episode" in got[2]["failure"] and
         not any("failure" in e for e in fine) and "1 of 4 episodes have failed" in p.stderr, p.stderr[-400:])
    scores = evaluate(s, "own.out.jsonl")
    test("eval: their own scores, and no number for the failure", scores["errors"] == 1 and
         scores["val-core/openai/gsm8k/reward/mean@1"] == 0.5, scores)


def programs(s, test):
    rows = [s.row(i) for i in range(3)]
    for r in rows:
        del r["reward_model"]
    (s.dir / "agent.py").write_text('''
import json, os, sys, urllib.request
row = json.loads(os.environ["VERLC_ROW"])
if row["extra_info"]["index"] == 1: sys.exit("no tool here")
ask = {"model": os.environ["VERLC_MODEL"], "messages": row["prompt"], "max_tokens": 6}
r = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(ask).encode(),
                           {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
json.load(urllib.request.urlopen(r))
print(json.dumps({"reward": 1.0, "acc": 1.0}))
''')
    args = keys(s, **{"data.train_files": s.write("p.jsonl", rows), "+data.output_path": s.dir / "p.out.jsonl",
                      "+" + ROLLOUT + "agent.command": f"{sys.executable} {s.dir / 'agent.py'}"})
    p = run("generate", *[f"{k}={v}" for k, v in args.items()], check=False)
    got = [r["episodes"][0] for r in rows_of(s.dir / "p.out.jsonl")] if p.returncode == 0 else []
    test("agent.command: its reward, and one that fails", len(got) == 3 and got[0].get("score") == 1 and
         got[0]["score_info"] == {"acc": 1.0} and "no tool here" in got[1]["failure"] and "score" not in got[1],
         (got, p.stderr[-600:]))
    scores = json.loads(run("eval", f"data.path={s.dir / 'p.out.jsonl'}").stdout)
    test("eval: rows without ground truth, since their programs have scored them", scores["errors"] == 1 and
         scores["val-core/openai/gsm8k/acc/mean@1"] == 1, scores)


def faults(s, test):
    rows = [s.row(i) for i in range(2)]
    test.refused("a row's loop that there is not", generate(s, [{**rows[0], "agent_name": "my_loop"}], "x.jsonl", check=False), 3,
                 "row 1", "my_loop", "tool_agent")
    p = run("generate", f"data.path={s.dir}/rows.jsonl", "rollout.agent.default_agent_loop=tool_agent", check=False)
    test.refused("the keys of main_generation have no agent loops", p, 2, "rollout.agent.default_agent_loop", "actor_rollout_ref")
    called = s.dir / "called"
    (s.dir / "slow.py").write_text(TOOLS.replace("return str(x + 1)", f"import time; open('{called}', 'w'); time.sleep(600)"))
    args = keys(s, **{"data.train_files": s.write("slow.jsonl", rows), "+data.output_path": s.dir / "slow.out.jsonl",
                      ROLLOUT + "agent.default_agent_loop": "tool_agent", MT + "function_tool_path": s.dir / "slow.py"})
    command = ["generate", *[f"{k}={v}" for k, v in args.items()]]
    run(*command, f"+{MT}tool_timeout=0.5", f"{MT}max_assistant_turns=2")
    got = [c for r in rows_of(s.dir / "slow.out.jsonl") for e in r["episodes"] for c in e["calls"]]
    test("a tool that hangs: a deadline, and the episode goes on", got and all(c["status"] == "timeout" for c in got), got)
    (s.dir / "slow.out.jsonl").unlink()
    called.unlink()
    p = start(command)
    until = time.time() + 60
    while not called.exists() and p.poll() is None and time.time() < until:
        time.sleep(0.02)
    p.send_signal(signal.SIGINT)
    began = time.time()
    _, err = p.communicate(timeout=30)
    test("Ctrl-C while a tool runs: the end at once, and no file", p.returncode == 130 and time.time() - began < 10 and
         not (s.dir / "slow.out.jsonl").exists() and "stopped by SIGINT" in err, (p.returncode, err[-400:]))
    row = {**rows[0], "responses": ["a"]}
    for name, episodes, word in (("no list", 1, "no list of 1"), ("too few", [], "no list of 1"), ("no JSON", ["{"], "episode"),
                                 ("no turns", [{}], "'turns'"), ("text, no object", [{"turns": 2, "extra_info": ""}], "extra")):
        path = s.write("bad.jsonl", [{**row, "episodes": episodes}])
        test.refused(f"eval: episodes: {name}", run("eval", f"data.path={path}", check=False), 3, "row 1", word, "episodes")
    p = run("eval", f"data.path={path}", "data.episodes_key=null", check=False)
    test("eval: a column of that name that is another's", p.returncode == 0, p.stderr[-300:])


def main():
    test = Tests()
    with Scratch() as s:
        calling_model(s.dir / "model", s.dir / "calls", 12, 9)
        (s.dir / "tools.py").write_text(TOOLS)
        (s.dir / "score.py").write_text(SCORE)
        as_validation(s, test)
        own_loops(s, test)
        programs(s, test)
        faults(s, test)
    test.end()


main()
