"""Makes the fixtures of tests/unit/test_train*.c from verl 0.9.1's own functions:
process_validation_metrics with its numpy bootstrap, the choice between val-core and
val-aux, and compute_data_metrics.  The functions are taken out of the installed
wheel's source by name, so that verl's dependencies need not be there.  Needs numpy,
torch and verl's files (run by `make oracle`).

  python tools/oracle_train.py [--verl DIR] [OUT_DIR]
"""

import argparse
import ast
import collections
import functools
import importlib.util
import json
import logging
import pathlib
import textwrap
import types
import typing

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def functions(path, names, space):
    """The named functions and methods of a source file, defined in `space`."""
    source = path.read_text()
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            exec(compile(textwrap.dedent(ast.get_source_segment(source, node)), str(path), "exec"), space)
            found[node.name] = space[node.name]
    assert set(found) == set(names), set(names) - set(found)
    return found


def load(verl):
    space = {"np": np, "torch": torch, "defaultdict": collections.defaultdict, "partial": functools.partial, "Any": typing.Any,
             "Callable": typing.Callable, "logger": logging.getLogger("verl"), "DataProto": object}
    functions(verl / "trainer/ppo/metric_utils.py",
              ["bootstrap_metric", "calc_maj_val", "process_validation_metrics", "_compute_response_info", "compute_data_metrics"], space)
    functions(verl / "trainer/ppo/ray_trainer.py", ["_val_metrics_update"], space)
    return space


def val_case(space, name, rows):
    """rows: (data_source, uid, reward, extra); extras that a row lacks are None, as verl fills them."""
    keys = list(dict.fromkeys(k for r in rows for k in r[3]))
    infos = {"reward": [r[2] for r in rows], **{k: [r[3].get(k) for r in rows] for k in keys}}
    metrics = space["_val_metrics_update"](None, [r[0] for r in rows], [str(r[1]) for r in rows], infos, [])
    return {"name": name, "rows": [{"data_source": r[0], "uid": r[1], "reward": r[2], "extra": r[3]} for r in rows],
            "metrics": {k: float(v) for k, v in metrics.items()}}


def val_cases(space):
    rng = np.random.default_rng(5)
    cases = []
    for n in (1, 2, 3, 5, 8):
        rows = [("openai/gsm8k", u, float(rng.integers(0, 2)), {}) for u in range(4) for _ in range(n)]
        cases.append(val_case(space, f"{n} a prompt", rows))
    rows = []
    for u in range(3):
        for _ in range(5):
            pred = str(rng.integers(0, 3))
            rows.append(("math_dapo", u, float(rng.normal()), {"acc": bool(pred == "1"), "pred": pred, "score": float(rng.normal())}))
    cases.append(val_case(space, "acc and pred, ties in the vote", rows))
    rows = [("a", u, float(rng.normal()), {"note": "text", "length": int(rng.integers(1, 9))}) for u in range(2) for _ in range(2)]
    rows += [("b/c", u, float(rng.normal()), {"acc": float(rng.integers(0, 2))}) for u in range(10, 13) for _ in range(8)]
    cases.append(val_case(space, "two sources, other counts and variables", rows))
    rows = [("a", 0, float(i), {"extra": float(i)} if i % 2 else {}) for i in range(6)]
    rows += [("a", 1, 1.0, {"pred": "x"}), ("a", 1, 0.0, {})]
    cases.append(val_case(space, "values that some samples lack", rows))
    return cases


def data_case(space):
    """A ragged batch, and the padded one that verl measures."""
    width_p, width_r = 6, 5
    rows = [(3, 5, 1.0), (6, 1, 0.0), (1, 4, -0.5), (2, 5, 1.0)]  # prompt tokens, response tokens, score
    rng = np.random.default_rng(9)
    out, n = [], len(rows)
    t = {k: torch.zeros(n, width_r, dtype=torch.float64) for k in ("token_level_scores", "token_level_rewards", "advantages", "returns")}
    mask = torch.zeros(n, width_p + width_r, dtype=torch.int64)
    for i, (p, r, score) in enumerate(rows):
        mask[i, width_p - p:width_p + r] = 1
        row = {"prompt": p, "token_level_scores": [0.0] * (r - 1) + [score]}
        row["token_level_rewards"] = [x - 0.01 for x in row["token_level_scores"]]
        row["advantages"] = rng.normal(size=r).round(3).tolist()
        row["returns"] = rng.normal(size=r).round(3).tolist()
        for k in t:
            t[k][i, :r] = torch.tensor(row[k], dtype=torch.float64)
        out.append(row)
    batch = {**t, "prompts": torch.zeros(n, width_p), "responses": torch.zeros(n, width_r), "attention_mask": mask,
             "response_mask": mask[:, width_p:]}
    turns = np.array([2] * n)
    metrics = space["compute_data_metrics"](types.SimpleNamespace(batch=batch, non_tensor_batch={"__num_turns__": turns}), use_critic=False)
    return {"max_prompt_length": width_p, "max_response_length": width_r, "rows": out, "metrics": {k: float(v) for k, v in metrics.items()}}


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--verl", type=pathlib.Path)
    a.add_argument("out", nargs="?", type=pathlib.Path, default=ROOT / "tests/fixtures/train")
    a = a.parse_args()
    space = load(a.verl or pathlib.Path(importlib.util.find_spec("verl").submodule_search_locations[0]))
    a.out.mkdir(parents=True, exist_ok=True)
    for name, value in (("val_metrics.json", val_cases(space)), ("data_metrics.json", data_case(space))):
        (a.out / name).write_text(json.dumps(value, indent=1) + "\n")
        print(f"wrote {a.out / name}")


main()
