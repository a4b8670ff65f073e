"""Makes tests/fixtures/train/segments.json: responses of several segments, of the policy and of an environment, and what verl
0.9.1's estimators make of them (response_mask with interior zeros), in float64.

  oracle_segments.py [--verl DIR]     DIR: an unpacked wheel. Needs torch, omegaconf and verl 0.9.1.
"""
import argparse
import json
import random
from pathlib import Path

import numpy as np
import oracle_verl
import torch

OUT = Path(__file__).resolve().parent.parent / "tests/fixtures/train/segments.json"
SEGMENTS = [[[3, 0], [2, 1], [4, 0]], [[1, 0], [3, 1], [2, 0], [1, 1], [2, 0]], [[5, 0]],  # [tokens, kind], kind 1: environment
            [[2, 0], [1, 1], [1, 1], [3, 0]], [[4, 0], [2, 1]], [[2, 0], [4, 1], [5, 0]]]
UID = [0, 0, 0, 1, 1, 1]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--verl")
    oracle_verl.load(p.parse_args().verl)
    from verl.trainer.config.algorithm import AlgoConfig
    from verl.trainer.ppo import core_algos
    oracle_verl.precision(torch.float64)
    rng, wide = random.Random(3), max(sum(n for n, _ in s) for s in SEGMENTS)
    draw = lambda lo, hi: round(rng.uniform(lo, hi) * 4096) / 4096  # noqa: E731
    lens = [sum(n for n, _ in s) for s in SEGMENTS]
    rows = {k: [[draw(*v) for _ in range(n)] for n in lens] for k, v in
            {"values": (-1, 1), "old_log_probs": (-3, -0.1), "sum_pi_squared": (0, 1), "ref_log_prob": (-3, -0.1)}.items()}
    scores, baselines = [draw(-1, 1) for _ in lens], [draw(-1, 1) for _ in lens]
    padded = lambda x: torch.tensor([list(r) + [0] * (wide - len(r)) for r in x])  # noqa: E731
    mask = padded([[float(kind == 0) for n, kind in s for _ in range(n)] for s in SEGMENTS])
    args = dict(token_level_rewards=padded([[0.0] * (n - 1) + [s] for n, s in zip(lens, scores)]), response_mask=mask,
                index=np.array(UID, dtype=object), values=padded(rows["values"]), old_log_probs=padded(rows["old_log_probs"]),
                sum_pi_squared=padded(rows["sum_pi_squared"]), reward_baselines=torch.tensor(baselines), gamma=0.9, lam=0.8,
                config=AlgoConfig(gamma=0.9, lam=0.8))
    want = {}
    for name in ("gae", "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
                 "rloo", "rloo_vectorized", "remax", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"):
        fn = core_algos.get_adv_estimator_fn(name)
        took = fn.__code__.co_varnames[:fn.__code__.co_argcount]
        adv, ret = fn(**{k: v for k, v in args.items() if k in took})
        want[name] = dict(advantages=[r[:n] for r, n in zip(adv.tolist(), lens)],
                          returns=[r[:n] for r, n in zip(ret.tolist(), lens)])
    samples = [dict(segments=s, uid=u, score=x, reward_baseline=y, **{k: v[i] for k, v in rows.items()})
               for i, (s, u, x, y) in enumerate(zip(SEGMENTS, UID, scores, baselines))]
    OUT.write_text(json.dumps(dict(samples=samples, gamma=0.9, lam=0.8, want=want), indent=None) + "\n")
    print(f"wrote {OUT}: {len(want)} estimators")


if __name__ == "__main__":
    main()
