"""Columns of the data may have any name, those of the program's own columns too: such a run trains to the bits of one
without them, and compute_score finds in extra_info what the data say."""

import json
import pathlib
import re
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, state  # noqa: E402

SRC = pathlib.Path(__file__).resolve().parents[2] / "src"
SOURCE = "日" * 2000  # names from outside have no length: validation makes metrics of it
# raw_prompt and num_turns are put into extra_info by verl's agent loop, whatever the data have there.
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    i = extra_info["index"]
    for name in extra_info["names"]:
        if name not in ("raw_prompt", "num_turns"):
            assert extra_info[name] == f"{name} of {i}", (name, extra_info[name])
    assert data_source == extra_info["source"], data_source
    return {"score": sum(c.isdigit() for c in solution_str) + i / 16, "responses": f"row {i}", "uid": i}
'''


def own_columns():
    """Every column that src adds to a batch."""
    text = "".join(f.read_text() for folder in ("data", "run", "train", "ranks", "reward_model", "ppo")
                   for f in sorted((SRC / folder).rglob("*.c")))
    return sorted(set(re.findall(r'(?:batch_add|ppo_add_\w+|log_prob_column|add_json)\([^;"]*"(\w+)"', text)))


def keys(s, name, train, **more):
    return s.ppo(name, **{"algorithm__adv_estimator": "gae", "critic__model__path": s.dir / "model",
                          "critic__ppo_micro_batch_size_per_gpu": 4,
                          "algorithm__rollout_correction__rollout_is": "token", "actor_rollout_ref__rollout__top_k": 40,
                          "reward__custom_reward_function__path": s.dir / "own.py", "data__train_files": s.dir / train,
                          "data__val_files": s.dir / train, "trainer__test_freq": 2, "trainer__total_training_steps": 2,
                          "trainer__rollout_data_dir": s.dir / f"{name}_dump", **more})


def main():
    test = Tests()
    names = own_columns()
    known = {"prompts", "responses", "uid", "score", "group", "text", "finish", "seconds", "advantages", "returns", "values", "row",
             "old_log_probs", "ref_log_prob", "token_level_scores", "teacher_logprobs", "sampling_log_probs", "data_source"}
    test("the program's own columns are found in its source", known <= set(names), sorted(known - set(names)))
    with Scratch(n_train=8) as s:
        (s.dir / "own.py").write_text(REWARD)
        plain = []
        for i in range(8):
            row = s.row(i) | {"data_source": SOURCE}
            row["extra_info"] |= {n: f"{n} of {i}" for n in names} | {"names": names, "source": SOURCE}
            plain.append(row)
        s.write("plain.jsonl", plain)
        odd = ["another text", 7, [1, {"a": None}], {"x": 2.5}, None, True]
        s.write("named.jsonl", [{n: odd[(i + k) % len(odd)] for k, n in enumerate(names) if (i + k) % 5} | r
                                for i, r in enumerate(plain)])
        # the data source in a column of the program's name, where data_source has something else
        s.write("moved.jsonl", [r | {"responses": SOURCE, "data_source": {"of": "another kind"}} for r in plain])
        p = run(*keys(s, "plain", "plain.jsonl"), check=False)
        test("a run without such columns", p.returncode == 0, p.stderr[-600:])
        want = state(s.dir / "plain", 2, ("actor", "critic")) if p.returncode == 0 else None
        for name, more in (("named", {}), ("moved", {"data__reward_fn_key": "responses"})):
            p = run(*keys(s, name, f"{name}.jsonl", **more), check=False)
            test(f"{name}: two steps with columns of the program's names", p.returncode == 0, p.stderr[-600:])
            test(f"{name}: the bits of the run without them",
                 p.returncode == 0 and state(s.dir / name, 2, ("actor", "critic")) == want)
            dump = s.dir / f"{name}_dump/2.jsonl"
            rows = [json.loads(x) for x in dump.read_text().splitlines()] if dump.exists() else []
            words = len(rows) == 8 and all(r["responses"] == f"row {r['uid']}" for r in rows)
            test(f"{name}: a dump has the scorer's words", words)
            db = sqlite3.connect(s.dir / name / "run.db")
            got = db.execute("SELECT count(*) FROM samples WHERE json_extract(extra, '$.responses') = 'row ' || uid "
                             "AND data_source = ?", (SOURCE,)).fetchone()[0]
            test(f"{name}: run.db has every sample, with the scorer's words", got == 8 * 2 + 8, got)
            metric = db.execute("SELECT count(*) FROM metrics WHERE name = ?", (f"val-core/{SOURCE}/reward/mean@1",)).fetchone()[0]
            test(f"{name}: validation names the whole data source", metric == 1, metric)
    test.end()


main()
