"""Makes the fixtures of tests/unit/test_ppo_validation.c from verl 0.9.1's own functions:
process_validation_metrics with its numpy bootstrap and the choice between val-core and
val-aux; compute_data_metrics, compute_timing_metrics, compute_throughout_metrics,
compute_variance_proxy_metrics and log_seqlen_unbalance on ragged batches.  The functions
are taken out of the wheel's source by name, so that verl's dependencies need not be
there, and run in float64 (where verl casts to fp32, the cast is lifted).

  python tools/oracle_train.py [--verl DIR] [--batches N] [OUT_DIR]    N batches of each; without: the fixtures' few
"""

import argparse
import ast
import collections
import functools
import importlib.util
import json
import logging
import math
import pathlib
import random
import textwrap
import time
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
    masked = functions(verl / "utils/torch_functional.py", ["masked_sum", "masked_mean"], {"torch": torch})
    masked["masked_mean"].__globals__.update(masked)
    space["verl_F"] = types.SimpleNamespace(**masked)
    functions(verl / "trainer/ppo/metric_utils.py",
              ["bootstrap_metric", "calc_maj_val", "process_validation_metrics", "_compute_response_info", "compute_data_metrics",
               "compute_timing_metrics", "compute_throughout_metrics", "compute_variance_proxy_metrics"], space)
    functions(verl / "utils/seqlen_balancing.py", ["log_seqlen_unbalance"], space)
    functions(verl / "trainer/ppo/ray_trainer.py", ["_val_metrics_update"], space)
    return space


# ---- validation ----


def val_case(space, name, rows):
    """rows: (data_source, uid, reward, extra); extras that a row lacks are None, as verl fills them."""
    keys = list(dict.fromkeys(k for r in rows for k in r[3]))
    infos = {"reward": [r[2] for r in rows], **{k: [r[3].get(k) for r in rows] for k in keys}}
    metrics = space["_val_metrics_update"](None, [r[0] for r in rows], [str(r[1]) for r in rows], infos, [])
    return {"name": name, "rows": [{"data_source": r[0], "uid": r[1], "reward": r[2], "extra": r[3]} for r in rows],
            "metrics": {k: float(v) for k, v in metrics.items()}}


def val_cases(space):
    rng = np.random.default_rng(5)
    for n in (1, 2, 3, 5, 8):
        yield val_case(space, f"{n} a prompt", [("openai/gsm8k", u, float(rng.integers(0, 2)), {}) for u in range(4)
                                                for _ in range(n)])
    rows = []
    for u in range(3):
        for _ in range(5):
            pred = str(rng.integers(0, 3))
            rows.append(("math_dapo", u, float(rng.normal()),
                         {"acc": bool(pred == "1"), "pred": pred, "score": float(rng.normal())}))
    yield val_case(space, "acc and pred, ties in the vote", rows)
    rows = [("a", u, float(rng.normal()), {"note": "text", "length": int(rng.integers(1, 9))}) for u in range(2) for _ in range(2)]
    rows += [("b/c", u, float(rng.normal()), {"acc": float(rng.integers(0, 2))}) for u in range(10, 13) for _ in range(8)]
    yield val_case(space, "two sources, other counts and variables", rows)
    rows = [("a", 0, float(i), {"extra": float(i)} if i % 2 else {}) for i in range(6)]
    rows += [("a", 1, 1.0, {"pred": "x"}), ("a", 1, 0.0, {})]
    yield val_case(space, "values that some samples lack", rows)


def random_val_case(space, k):
    """One or two prompts of 1 to 9 samples: votes with ties, missing values, several sources."""
    r = random.Random(f"val/{k}")
    rows = []
    for u in range(r.choice([1, 1, 1, 2, 3])):
        source = r.choice(["openai/gsm8k", "math_dapo", "a"])
        kinds = r.choice([[], [], ["acc"], ["acc", "pred"], ["pred"], ["score", "note"], ["format"]])
        lacks, scores = r.choice([0, 0, 0, 0.4]), r.choice([[0.0, 1.0], [0.5], None])
        for _ in range(r.choice([1, 1, 2, 3, 3, 4, 5, 9])):
            values = {"acc": r.random() < 0.5, "pred": r.choice("abc"), "score": r.gauss(0, 1), "note": "text",
                      "format": r.randint(0, 3)}
            extra = {x: values[x] for x in kinds if r.random() >= lacks}
            rows.append((source, u, r.choice(scores) if scores else r.gauss(0, 1), extra))
    return val_case(space, f"random {k}", rows)


# ---- data metrics ----


def data_case(space, k):
    """A ragged batch, and the padded one that verl measures."""
    r = random.Random(f"data/{k}")
    width_p, width_r, n = r.randint(1, 8), r.randint(2, 9), r.randint(1, 8)
    critic, proxy, weights = r.random() < 0.5, r.random() < 0.5, r.random() < 0.5
    scale = r.choice([1.0, 1.0, 1e-3, 1e4])
    columns = ["token_level_scores", "token_level_rewards", "advantages", "returns"] + ["values"] * critic
    columns += ["old_log_probs", "sum_pi_squared"] * proxy + ["rollout_is_weights"] * (proxy and weights)
    names = {"old_log_probs": (-3, 0), "sum_pi_squared": (0.05, 0.9)}
    rows, t = [], {c: torch.zeros(n, width_r, dtype=torch.float64) for c in columns}
    attention, mask = torch.zeros(n, width_p + width_r, dtype=torch.int64), torch.zeros(n, width_r, dtype=torch.int64)
    holes = r.choice([0, 0, 0.4])
    for i in range(n):
        p, length = r.randint(1, width_p), r.randint(2 if i == 0 else 1, width_r)
        attention[i, width_p - p:width_p + length] = 1
        # two tokens are valid at least: one alone has no variance
        row = {"prompt": p, "response_mask": [int(i == 0 and t < 2 or r.random() >= holes) for t in range(length)]}
        mask[i, :length] = torch.tensor(row["response_mask"])
        for c in columns:
            lo, hi = names.get(c, (-scale, scale))
            row[c] = [r.choice([0.0, 0.5, r.uniform(0, 2)] if c == "rollout_is_weights" else [r.uniform(lo, hi)])
                      for _ in range(length)]
            t[c][i, :length] = torch.tensor(row[c], dtype=torch.float64)
        rows.append(row)
    batch = {**t, "prompts": torch.zeros(n, width_p), "responses": torch.zeros(n, width_r), "attention_mask": attention,
             "response_mask": mask}
    lens = attention.sum(-1).tolist()
    data = types.SimpleNamespace(batch=batch, non_tensor_batch={"__num_turns__": np.array([2] * n)},
                                 meta_info={"global_token_num": lens})
    timing = {s: r.uniform(0.01, 9) for s in ("gen", "ref", "values", "adv", "update_critic", "update_actor") if r.random() < 0.8}
    timing["step"] = sum(timing.values())
    norm = r.uniform(0, 3)
    metrics = space["compute_data_metrics"](data, use_critic=critic)
    metrics |= space["compute_timing_metrics"](data, timing)
    if timing["step"]:
        metrics |= space["compute_throughout_metrics"](data, timing, 1)
    metrics |= space["compute_variance_proxy_metrics"](data, norm)
    metrics |= space["log_seqlen_unbalance"](lens, [list(range(n))], "global_seqlen")
    return {"max_prompt_length": width_p, "max_response_length": width_r, "grad_norm": norm, "timing_s": timing, "rows": rows,
            "metrics": {k: float(v) for k, v in sorted(metrics.items()) if math.isfinite(float(v))}}


def many(what, n, make):
    """make(0) ... make(n - 1), with a line now and then."""
    out, said = [], time.time()
    for k in range(n):
        out.append(make(k))
        if time.time() - said > 2:
            print(f"{what}: {k + 1} of {n}", flush=True)
            said = time.time()
    return out


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--verl", type=pathlib.Path)
    a.add_argument("--batches", type=int, default=0)
    a.add_argument("out", nargs="?", type=pathlib.Path, default=ROOT / "tests/fixtures/train")
    a = a.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    space = load(a.verl or pathlib.Path(importlib.util.find_spec("verl").submodule_search_locations[0]))
    a.out.mkdir(parents=True, exist_ok=True)
    val = list(val_cases(space)) + many("validation metrics", a.batches, lambda k: random_val_case(space, k))
    data = many("data metrics", a.batches or 12, lambda k: data_case(space, k))
    for name, value in (("val_metrics.json", val), ("data_metrics.json", data)):
        text = ",\n".join(json.dumps(v) for v in value)
        (a.out / name).write_text(f"[\n{text}\n]\n")
        print(f"wrote {a.out / name}: {len(value)} batches")


if __name__ == "__main__":
    main()
