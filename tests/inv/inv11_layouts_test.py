"""Invariant 11, with sharded weights: a run whose reference, or policy too, is sharded over its ranks gives the tokens, weights and
files of one rank; so it does when it is stopped at any moment, and goes on from the checkpoint of another layout. Small runs on CPU
ranks. The moments of the stops are random; the seed is printed."""

import os
import pathlib
import random
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import family_model, first_difference
from verlc_test import Scratch, Tests, run, start, state

STEPS, LONG = 3, 100  # LONG: so that a signal comes before the end
A = "actor_rollout_ref."


def main():
    test = Tests()
    seed = int(os.environ.get("SEED", time.time()))
    rng = random.Random(seed)
    print(f"SEED={seed}")
    with Scratch(small=True) as s:
        def line(d, n, layout, **keys):
            keys = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.device": "cpu",
                    A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.layout": layout, "trainer.ranks": n, **keys}
            return s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()})

        def go(name, *args, **keys):
            p = run(*line(*args, **keys), check=False)
            test(name, p.returncode == 0, p.stderr[-1500:])
            return p.stdout + p.stderr

        def stopped(d, n, layout, **keys):
            """It is asked to stop after 0.3 to 2 s; whether it ended well."""
            p = start(line(d, n, layout, **keys))
            time.sleep(rng.uniform(0.3, 2))
            p.send_signal(signal.SIGTERM)
            err = p.communicate(timeout=60)[1]
            return p.returncode in (0, 143) or "\ndone: " in err, err  # asked when it had ended: the default action

        critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 1,
                  "algorithm.use_kl_in_reward": True}
        # five prompts, and micro-batches of two sequences in passes: ranks have different numbers of them
        odd = {"data.train_batch_size": 5, A + "actor.ppo_mini_batch_size": 5, A + "ref.log_prob_micro_batch_size_per_gpu": 2,
               A + "rollout.log_prob_micro_batch_size_per_gpu": 2, "trainer.force_old_log_prob": True}
        bf16 = {A + "actor.fsdp_config.dtype": "bfloat16", A + "actor.optim.optimizer": "Muon", A + "actor.use_kl_loss": False,
                "trainer.test_freq": 2, "trainer.val_before_train": True}
        # another model than the policy, with lists of its tokens
        teacher = {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": family_model(s, "glm4"),
                   A + "actor.use_kl_loss": False, "distillation.distillation_loss.loss_mode": "forward_kl_topk",
                   "distillation.distillation_loss.topk": 4}
        cases = {"a reference": ({}, ((2, "ref"), (3, "ref"), (2, "sharded"), (3, "sharded"))),
                 "a critic": (critic, ((2, "ref"), (3, "sharded"))),
                 "a critic elsewhere": ({**critic, "critic.ranks": 1}, ((2, "sharded"),)),
                 "passes that differ": (odd, ((3, "ref"), (3, "sharded"))),
                 "a teacher": (teacher, ((3, "ref"), (2, "sharded"))),
                 "bf16, Muon, validation": (bf16, ((2, "sharded"),))}
        for name, (keys, layouts) in cases.items():
            one = s.dir / f"{name} 1".replace(" ", "_").replace(",", "")
            go(f"{name}: one rank", one, 1, "auto", **{k: v for k, v in keys.items() if k != "critic.ranks"})
            for n, layout in layouts:
                d = pathlib.Path(f"{one}_{layout}_{n}")
                said = go(f"{name}: {layout} on {n} ranks", d, n, layout, **keys)
                why = first_difference(one, d, STEPS) or ("" if f"\n  layout {layout}: " in said else said[-1500:])
                test(f"{name}: {layout} on {n} ranks as one", not why, why)
        d = s.dir / "turns"
        for step, (n, layout) in enumerate(((2, "whole"), (3, "sharded"), (2, "ref")), 1):
            keys = {**critic, "trainer.total_training_steps": step, "trainer.save_freq": 1}
            go(f"step {step}: {layout} on {n}", d, n, layout, **keys)
        why = first_difference(s.dir / "a_critic_1", d, STEPS)
        test("another layout in each step: as one rank", not why, why)
        long = {**odd, "trainer.total_training_steps": LONG, "trainer.save_freq": 1}
        go(f"{LONG} steps on one rank", s.dir / "long", 1, "auto", **long)
        d = s.dir / "stops"
        for n, layout in ((3, "sharded"), (2, "ref"), (2, "sharded")):
            test(f"{layout} on {n}: it stops", *stopped(d, n, layout, **long))
        said = go("and goes on to the end", d, 3, "sharded", **long)
        test("with the bits of one rank", state(s.dir / "long", LONG) == state(d, LONG), said[-600:])
    test.end()


main()
