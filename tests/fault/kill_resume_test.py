"""Invariant 5: kill -9 at random moments, resumed to the end, and the weights, the
optimizer and the trainer's state are the bits of an unbroken run: of GRPO, and of PPO
with a critic and dynamic sampling.

The number of kills is KILLS (50), or the first argument; with the critic a third of it.
Moments are drawn over the whole life of a run: start, rollout, update, save."""

import os
import pathlib
import random
import shutil
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, start, state  # noqa: E402

STEPS = 6

ODD = '''
import hashlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for half of all answers: dynamic sampling replaces the groups that agree."""
    return hashlib.sha256(solution_str.encode()).digest()[0] % 2
'''


def killed(test, s, what, wanted, rng, keys):
    """Runs that are killed `wanted` times in all and resumed to their end."""
    parts = ("actor", "critic") if "critic.model.path" in keys else ("actor",)
    unbroken, broken = f"{what}-unbroken", f"{what}-broken"
    began = time.time()
    run(*s.ppo(unbroken, **keys))
    whole = time.time() - began
    want = state(s.dir / unbroken, STEPS, parts)
    kills, rounds, same, where = 0, 0, 0, {}
    while kills < wanted:
        rounds += 1
        shutil.rmtree(s.dir / broken, ignore_errors=True)
        while True:
            p = start(s.ppo(broken, **keys))
            try:
                # most of a resumed run is its start: draw from all of it
                p.wait(rng.uniform(0.02, whole) if kills < wanted else 300)
            except Exception:
                p.kill()
                p.wait()
                kills += 1
                if kills % 50 == 0 and wanted > 50:
                    print(f"{what}: {kills} of {wanted} kills, {same} of {rounds - 1} runs the same", flush=True)
                done = len(list((s.dir / broken).glob("global_step_*[0-9]")))
                half = bool(list((s.dir / broken).glob("*.tmp")))
                where[(done, half)] = where.get((done, half), 0) + 1
                continue
            if p.returncode != 0:
                test(f"{what}: round {rounds} ends", False, p.stderr.read()[-800:])
                test.end()
            break
        same += state(s.dir / broken, STEPS, parts) == want
    print(f"{what}: {kills} kills in {rounds} runs; (steps saved, save under way): {sorted(where.items())}")
    test(f"{what}: {rounds} runs killed {kills} times end in the same bits", same == rounds, f"{same} of {rounds}")


def main():
    wanted = int(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KILLS", "50"))
    rng = random.Random(7)
    test = Tests()
    with Scratch(small=True) as s:
        killed(test, s, "GRPO", wanted, rng, {})
        (s.dir / "odd.py").write_text(ODD)
        killed(test, s, "PPO", (wanted + 2) // 3, rng,
               {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4,
                "critic.optim.lr": 1e-3, "algorithm.filter_groups.enable": True, "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.type": "adaptive", "actor_rollout_ref.actor.use_kl_loss": False,
                "reward.custom_reward_function.path": s.dir / "odd.py", "reward.num_workers": 1})
    test.end()


main()
