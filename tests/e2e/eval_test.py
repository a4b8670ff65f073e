"""verlc generate and verlc eval with verl's keys: responses into a file, scores out of
it. The numbers of eval are checked against means and bootstraps made here from the
same rows; generate against the JSONL form and against itself in other batches."""

import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402


def rows_of(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def generate(s, out, **keys):
    args = {"model.path": s.dir / "model", "data.path": s.dir / "test.jsonl", "data.output_path": s.dir / out, "data.n_samples": 3,
            "rollout.prompt_length": 64, "rollout.response_length": 12, "rollout.top_p": 1.0, "rollout.top_k": -1,
            "trainer.seed": 5}
    args.update({k.replace("__", "."): v for k, v in keys.items()})
    return run("generate", *[f"{k}={v}" for k, v in args.items()], check=False)


def check_generate(s, test):
    p = generate(s, "out/a.jsonl")
    source = rows_of(s.dir / "test.jsonl")
    rows = rows_of(s.dir / "out/a.jsonl") if p.returncode == 0 else []
    test("generate: every row with three responses beside its columns", p.returncode == 0 and len(rows) == len(source) and all(
        len(r["responses"]) == 3 and {k: v for k, v in r.items() if k != "responses"} == q for r, q in zip(rows, source)),
         p.stderr[-400:])
    texts = [t for r in rows for t in r["responses"]]
    test("generate: samples differ", len(set(texts)) > len(texts) // 2)
    generate(s, "b.jsonl", data__batch_size=3, rollout__max_num_seqs=2)
    test("generate: batch-invariant", rows_of(s.dir / "b.jsonl") == rows)
    generate(s, "c.jsonl", trainer__seed=6)
    test("generate: another seed gives others", rows_of(s.dir / "c.jsonl") != rows)
    p = generate(s, "greedy.parquet", rollout__temperature=0, data__n_samples=1, rollout__dtype="float32")
    requests = "".join(json.dumps({"messages": q["prompt"], "temperature": 0, "max_tokens": 12}) + "\n" for q in source)
    lines = run("generate", "--model", s.dir / "model", "--dtype", "fp32", input=requests).stdout.splitlines()
    import pyarrow.parquet as pq
    greedy = [r["responses"][0] for r in pq.read_table(s.dir / "greedy.parquet").to_pylist()]
    test("generate: greedy, parquet, float32: what the JSONL form gives", greedy == [json.loads(x)["text"] for x in lines])
    test.refused("generate: a prompt over the limit", generate(s, "x.jsonl", rollout__prompt_length=4), 3, "row 1",
                 "rollout.prompt_length=4")
    test.refused("generate: an output of unknown kind", generate(s, "x.csv"), 2, "data.output_path", ".parquet or .jsonl")
    test.refused("generate: no such column", generate(s, "x.jsonl", data__prompt_key="question"), 3, "question")
    p = generate(s, "x.jsonl", rollout__tempurature=1)
    test("generate: a key with a slip is refused with the nearest name", p.returncode == 2 and "temperature" in p.stderr,
         p.stderr[-300:])


def check_server_keys(s, test):
    """main_generation_server of verl 0.9.1: a ppo command line, of which it reads prompts, model and rollout."""
    def server(out, *more, files=f"{s.dir}/test.jsonl"):
        return run("generate", f"actor_rollout_ref.model.path={s.dir}/model", f"data.train_files={files}", "trainer.seed=5",
                   f"+data.output_path={s.dir}/{out}", "actor_rollout_ref.rollout.n=3",
                   "actor_rollout_ref.rollout.prompt_length=64", "actor_rollout_ref.rollout.response_length=12", *more,
                   check=False)
    generate(s, "older.jsonl")
    p = server("server.jsonl")
    same = p.returncode == 0 and rows_of(s.dir / "server.jsonl") == rows_of(s.dir / "older.jsonl")
    test("generate: main_generation_server's keys give what main_generation's do", same, p.stderr[-400:])
    source = s.dir / "test.jsonl"
    p = server("two.jsonl", files=f"[{source},{source}]")
    rows = rows_of(s.dir / "two.jsonl") if p.returncode == 0 else []
    test("generate: train_files may be several", len(rows) == 2 * len(rows_of(source)), p.stderr[-400:])
    p = server("short.jsonl", "actor_rollout_ref.rollout.temperature=0.5", "data.max_response_length=4",
               "actor_rollout_ref.rollout.response_length=5", "algorithm.adv_estimator=grpo", "trainer.total_epochs=2")
    lone = [t for r in rows_of(s.dir / "short.jsonl") for t in r["responses"]] if p.returncode == 0 else []
    test("generate: a key of training is accepted and said", p.returncode == 0 and len(lone) == 3 * len(rows_of(source)) and
         "algorithm.adv_estimator" in p.stderr and "generation does not read it" in p.stderr, p.stderr[-400:])
    test.refused("generate: keys of both programs", server("x.jsonl", "rollout.temperature=1"), 2, "rollout.temperature=1",
                 "actor_rollout_ref.model.path")
    p = run("generate", f"data.train_files={source}", f"data.path={source}", check=False)
    test.refused("generate: prompts named twice", p, 2, "data.train_files", "data.path")
    p = generate(s, "x.jsonl", actor__optim__lr=1)
    test.refused("generate: main_generation has no such key", p, 2, "actor.optim.lr")
    test.refused("generate: no output_path", run("generate", f"data.train_files={source}", check=False), 2, "data.output_path")
    test.refused("generate: greedy samples would be alike", server("x.jsonl", "actor_rollout_ref.rollout.temperature=0"), 2,
                 "actor_rollout_ref.rollout.n=3")
    p = server("x.jsonl", "actor_rollout_ref.rollout.prompt_length=4")
    test.refused("generate: a prompt over the limit names the key", p, 3, "actor_rollout_ref.rollout.prompt_length=4")


def evaluate(s, rows, *more):
    path = s.write("scored.jsonl", rows)
    return run("eval", f"data.path={path}", *more, check=False)


def check_eval(s, test):
    def row(source, truth, *responses):
        return {"data_source": source, "prompt": [], "reward_model": {"ground_truth": truth}, "responses": list(responses)}
    g, m = "openai/gsm8k", "math_dapo"
    rows = [row(g, "3", "#### 3", "#### 4"), row(g, "5", "#### 5", "#### 5"), row(g, "6", "no", "#### 7"),
            row(m, "1", "Answer: 1", "Answer: 2")]
    p = evaluate(s, rows)
    got = json.loads(p.stdout) if p.returncode == 0 else {}
    test("eval: the mean over prompts of means, by source", got.get(f"test_score/{g}") == 0.5 and got.get(f"test_score/{m}") == 0,
         p.stdout + p.stderr)
    test("eval: validation statistics beside it", got.get(f"val-core/{g}/acc/mean@2",
                                                          got.get(f"val-core/{g}/reward/mean@2")) == 0.5 and
         any(k.startswith(f"val-core/{m}/acc/maj@2") for k in got), sorted(got))
    # of n = 2 responses the three prompts have 1, 2 and 0 right: pass@2 is 1, 1 and 0
    core = f"val-core/{g}/reward" if f"val-core/{g}/reward/mean@2" in got else f"val-core/{g}/acc"
    test("eval: pass@k without a bootstrap, beside best@k", abs(got.get(f"{core}/pass@2", 9) - 2 / 3) < 1e-15
         and f"{core}/best@2/mean" in got and got.get(f"val-core/{m}/acc/pass@2") == 1, sorted(got))
    test("eval: stdout is one line", len(p.stdout.splitlines()) == 1)
    own = s.dir / "own.py"
    own.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):\n"
                   "    if solution_str == 'no':\n        raise ValueError('no answer')\n    return scale * len(solution_str)\n")
    p = evaluate(s, rows, f"custom_reward_function.path={own}", "+custom_reward_function.reward_kwargs.scale=2")
    got = json.loads(p.stdout) if p.returncode == 0 else {}
    test("eval: a user-defined scorer; what it refuses is counted, not a number", got.get("errors") == 1 and
         got.get(f"test_score/{g}") == 12 and "1 of 8 responses have no score" in p.stderr, p.stdout + p.stderr[-300:])
    # names from outside have no length: 0.1.0 crashed where source and key passed 253 bytes
    own.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                   "    return {'score': 1, 'k' * 300 + 'é': 2, 'acc': 1}\n")
    long = "日" * 5000 + "\x1f\n"
    p = evaluate(s, [row(long, "1", "x", "y")], f"custom_reward_function.path={own}")
    got = json.loads(p.stdout) if p.returncode == 0 else {}
    test("eval: a data source of 15,000 bytes and a key of 302", got.get(f"val-core/{long}/acc/mean@2") == 1 and
         got.get(f"val-aux/{long}/{'k' * 300}é/best@2/mean") == 2 and got.get(f"test_score/{long}") == 1,
         f"{p.returncode} {p.stdout[:200]} {p.stderr[-300:]}")
    # slow scorers: a line after two seconds
    own.write_text("import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                   "    time.sleep(0.7)\n    return 1.0\n")
    p = evaluate(s, [row(g, "1", *("abcd"))], f"custom_reward_function.path={own}", "reward.num_workers=1")
    test("eval: what takes longer says how far it is", re.search(r"^[123] of 4 responses scored$", p.stderr, re.M), p.stderr)
    test.refused("eval: a data source with NUL", evaluate(s, [row("a\0b", "1", "x")]), 3, "row 1", "NUL")
    test.refused("eval: no ground truth", evaluate(s, [{**rows[0], "reward_model": {}}]), 3, "row 1", "ground_truth")
    test.refused("eval: no responses", evaluate(s, [{**rows[0], "responses": []}]), 3, "row 1", "no responses")
    test.refused("eval: a response that is no text", evaluate(s, [{**rows[0], "responses": [1]}]), 3, "response 1 is not text")
    test.refused("eval: nobody can score", evaluate(s, [row("openai/gsm8k", 1, "x")]), 1, "none of the 1 responses")
    test.refused("eval: no grader", evaluate(s, [row("unheard/of", "1", "x")]), 3, "unheard/of", "reward.grader=NAME")
    test.refused("eval: no file", run("eval", f"data.path={s.dir}/none.parquet", check=False), 3, "none.parquet")


def main():
    test = Tests()
    with Scratch() as s:
        check_generate(s, test)
        check_server_keys(s, test)
        check_eval(s, test)
    test.end()


main()
