"""Invariant 11, with sharded weights: a run whose reference is sharded over its ranks gives the tokens, weights and files of one
rank, and goes on from a checkpoint of another layout. Small runs on CPU ranks."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import first_difference
from verlc_test import Scratch, Tests, run

STEPS = 3
ACTOR = "actor_rollout_ref."


def main():
    test = Tests()
    with Scratch() as s:
        critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 1,
                  "algorithm.use_kl_in_reward": True}
        # five prompts and micro-batches of two sequences: ranks have different numbers of passes
        odd = {"data.train_batch_size": 5, ACTOR + "actor.ppo_mini_batch_size": 5,
               ACTOR + "ref.log_prob_micro_batch_size_per_gpu": 2, "trainer.force_old_log_prob": True}
        cases = {"a reference": {}, "a critic": critic, "passes that differ": odd}

        def start(name, n, layout, keys, steps=STEPS, d=None):
            d = d or s.dir / re.sub(r"\W+", "_", name)
            keys = {"trainer.total_training_steps": steps, "trainer.save_freq": steps, "trainer.device": "cpu",
                    ACTOR + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.layout": layout, "trainer.ranks": n, **keys}
            p = run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)
            test(f"{name}", p.returncode == 0, p.stderr[-1500:])
            return d, p

        for name, keys in cases.items():
            one, _ = start(f"{name}, one rank", 1, "auto", keys)
            for n, layout in ((2, "ref"), (3, "ref")):
                d, p = start(f"{name}, {layout} on {n}", n, layout, keys)
                why = first_difference(one, d, STEPS) or ("" if f"layout {layout}: " in p.stdout + p.stderr else p.stdout[-1500:])
                test(f"{name}, {layout} on {n} ranks: as one rank", not why, why)
            d = None
            for step, (n, layout) in enumerate(((2, "whole"), (3, "ref"), (2, "ref")), 1):
                d, _ = start(f"{name}, on with {layout} on {n}", n, layout, {**keys, "trainer.save_freq": 1}, step, d)
            why = first_difference(one, d, STEPS)
            test(f"{name}, another layout after each step: as one rank", not why, why)
    test.end()


main()
