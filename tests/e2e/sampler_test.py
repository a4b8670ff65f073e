"""data.sampler and reward.source_weights in a run: which rows a step takes, that their
rewards are weighed, and that a run in any order resumes to the bits of an unbroken one."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, series, state  # noqa: E402

CONSTANT = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def main():
    test = Tests()
    with Scratch(n_train=24, small=True) as s:
        rows = [json.loads(x) for x in (s.dir / "train.jsonl").read_text().splitlines()]
        for i, r in enumerate(rows):
            r["data_source"] = ["openai/gsm8k", "own/easy", "own/never"][i % 3]
            r["extra_info"]["level"] = i % 4
        s.write("train.jsonl", rows)
        (s.dir / "one.py").write_text(CONSTANT)
        base = {"reward__custom_reward_function__path": s.dir / "one.py", "trainer__total_training_steps": 4,
                "trainer__rollout_data_dir": s.dir / "dump"}

        def taken(step):
            return [json.loads(x) for x in (s.dir / f"dump/{step}.jsonl").read_text().splitlines()]

        orders = {"weighted": {"data__sampler__name": "weighted", "data__sampler__weights": "{own/never: 0, own/easy: 3}"},
                  "curriculum": {"data__sampler__name": "curriculum", "data__sampler__column": "extra_info.level"},
                  "sequential": {"data__sampler__name": "sequential"}}
        renamed = s.write("renamed.jsonl", [{"src" if k == "data_source" else k: v for k, v in r.items()} for r in rows])
        run(*s.ppo("renamed", **{**base, "trainer__total_training_steps": 2}, data__train_files=renamed, data__reward_fn_key="src",
                   data__sampler__name="sequential", reward__source_weights="{own/easy: 0.5}"))
        test("rewards are weighed by the source of another column", min(series(s.dir / "renamed", "critic/score/min")) == 0.5)
        for name, keys in orders.items():
            p = run(*s.ppo(name, **base, **keys, reward__source_weights="{own/easy: 0.5}"), check=False)
            test(f"{name}: a run", p.returncode == 0, p.stderr[-400:])
            seen = [x for step in range(1, 5) for x in taken(step)] if p.returncode == 0 else []
            test(f"{name}: every step has four prompts of two samples", len(seen) == 32 and
                 all(len({x["input"] for x in taken(k)}) <= 4 for k in range(1, 5)))
            want = {"openai/gsm8k": 1.0, "own/never": 1.0, "own/easy": 0.5}
            metrics = [json.loads(x)["data"] for x in (s.dir / name / "metrics.jsonl").read_text().splitlines()]
            test(f"{name}: rewards are weighed by source",
                 all(set(want.values()) >= {m["critic/score/max"], m["critic/score/min"]} for m in metrics)
                 and any(m["critic/score/min"] == 0.5 for m in metrics), [m["critic/score/min"] for m in metrics])
            asked = [[next(r for r in rows if r["prompt"][0]["content"] in x["input"]) for x in taken(k)] for k in range(1, 5)]
            flat = [r for step in asked for r in step]
            if name == "weighted":
                test("weighted: a source of weight 0 is never asked", all(r["data_source"] != "own/never" for r in flat))
            elif name == "curriculum":
                levels = [r["extra_info"]["level"] for r in flat]
                test("curriculum: levels rise", levels == sorted(levels) and levels[0] == 0 and levels[-1] == 2, levels)
            else:
                test("sequential: file order", [r["extra_info"]["index"] for r in flat[::2]] == list(range(16)))
            for step in (3, 4):
                shutil.rmtree(s.dir / name / f"global_step_{step}", ignore_errors=True)
            before = state(s.dir / name, 2)
            (s.dir / name / "latest_checkpointed_iteration.txt").write_text("2")
            run(*s.ppo(name, **base, **keys, reward__source_weights="{own/easy: 0.5}"))
            run(*s.ppo(name + "2", **base, **keys, reward__source_weights="{own/easy: 0.5}"))
            test(f"{name}: resumed after step 2 to the bits of an unbroken run",
                 state(s.dir / name, 4) == state(s.dir / (name + "2"), 4) and
                 state(s.dir / name, 2) == before)
        p = run(*s.ppo("curriculum", **base, **orders["sequential"]), check=False)
        test.refused("another order is refused on resume", p, 3, "data.sampler.name=curriculum")
        p = run(*s.ppo("x", **base, data__sampler__name="curriculum", data__sampler__column="extra_info.split"), check=False)
        test.refused("a column that is no number", p, 3, "train.jsonl row 1", "extra_info.split")
        p = run(*s.ppo("x", **base, data__sampler__name="weighted"), check=False)
        test.refused("weighted without weights", p, 2, "data.sampler.weights")
    test.end()


main()
