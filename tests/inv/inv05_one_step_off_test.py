"""One step off: batch k + 1 is drawn by the weights after step k - 1 and trained in step k + 1. Two runs, and one that was killed
with kill -9 and resumed, have the same bits; a C program that makes the schedule by hand in the calls of verlc.h has them too."""

import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, ENV, VERLC, Scratch, Tests, run, series, start, state  # noqa: E402

ONE_OFF = "--config-name=one_step_off_ppo_trainer"
KL = "actor_rollout_ref.actor.use_kl_loss"
VERL = {"actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 2}  # as verl's scripts have them


def reward(s):
    return {"reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1,
            "actor_rollout_ref.actor.optim.lr": 1e-3}


def one_off(s, name, **keys):
    args = s.ppo(name, **{KL: False, **VERL, **reward(s), **keys})
    return [args[0], ONE_OFF, *args[1:]]


def samples(run_dir, step):
    with sqlite3.connect(run_dir / "run.db") as db:
        return db.execute("SELECT uid, sample, ids, logp FROM samples WHERE step = ? AND validation = 0 ORDER BY id",
                          [step]).fetchall()


def schedule(s, test):
    run(*one_off(s, "a"))
    run(*one_off(s, "b"))
    test("two runs: the same bits, checkpoints' held-over samples included",
         all(state(s.dir / "a", k) == state(s.dir / "b", k) for k in (1, 5, 6)))
    run(*s.ppo("still", **{KL: False, **reward(s), "actor_rollout_ref.actor.optim.lr": 0, "trainer.total_training_steps": 2}))
    run(*s.ppo("sync", **{KL: False, **reward(s), "trainer.total_training_steps": 2}))
    test("batches 1 and 2 are drawn by the weights at the start, with their log-probs",
         all(samples(s.dir / "a", k) == samples(s.dir / "still", k) for k in (1, 2)))
    test("batch 1 trains as in verlc ppo one by one; batch 2 is another there",
         series(s.dir / "a", "actor/grad_norm")[0] == series(s.dir / "sync", "actor/grad_norm")[0] and
         samples(s.dir / "a", 2) != samples(s.dir / "sync", 2))
    test("metrics: the lag in versions", [series(s.dir / "a", f"training/version_lag/{k}") for k in ("min", "max")] ==
         [[0, 1, 1, 1, 1, 1]] * 2, series(s.dir / "a", "training/version_lag/max"))
    test("the loss has ratios to the policy that drew: the rollout differs from the policy from step 2 on",
         [v == 0 for v in series(s.dir / "a", "training/rollout_probs_diff_max")] == [True] + [False] * 5)


def by_hand(s, test):
    exe = pathlib.Path(VERLC).resolve().parent / "examples/one_step_off"
    args = [a for a in one_off(s, "c")[2:] if not a.startswith(("algorithm.adv_estimator", KL))]
    p = subprocess.run([exe, *map(str, args)], capture_output=True, text=True, timeout=300, env=ENV)
    test("the schedule by hand, in calls of verlc.h: the same bits",
         p.returncode == 0 and state(s.dir / "c", 6) == state(s.dir / "a", 6), p.stderr[-500:])


def killed(s, test):
    args = one_off(s, "k", **{"trainer.async_save": False})
    for step in (1, 3):
        p = start(args)
        saved = s.dir / "k" / f"global_step_{step}"
        while not saved.exists() and p.poll() is None:
            time.sleep(0.002)
        p.send_signal(signal.SIGKILL)
        p.communicate()
    run(*args)
    test("kill -9 after steps 1 and 3, resumed: the same bits", state(s.dir / "k", 6) == state(s.dir / "a", 6))
    lines = [samples(s.dir / d, k) for d in ("a", "k") for k in range(1, 7)]
    test("and the same samples in run.db", lines[:6] == lines[6:])


def ranks(s, test):
    """Invariant 11, of this schedule: begun on one rank, it goes on on two."""
    run(*one_off(s, "two", **{"trainer.ranks": 2, "trainer.resume_mode": "resume_path",
                              "trainer.resume_from_path": s.dir / "a/global_step_3"}))
    test("resumed on two ranks: the same bits", state(s.dir / "two", 6) == state(s.dir / "a", 6))


def decoupled(s, test):
    keys = {"algorithm.rollout_correction.bypass_mode": False, "algorithm.rollout_correction.rollout_is": "token"}
    run(*one_off(s, "d", **keys))
    kl = series(s.dir / "d", "rollout_corr/kl")
    test("old log-probs anew: the policy's; how far the rollout is from them is measured",
         kl[0] == 0 and all(v != 0 for v in kl[1:]), kl)
    run(*s.ppo("to_sync", **{KL: False, **reward(s), "trainer.total_training_steps": 4, "trainer.resume_mode": "resume_path",
                             "trainer.resume_from_path": s.dir / "a/global_step_3"}))
    p = run("show", s.dir / "to_sync", check=False)
    test("another schedule goes on from its checkpoint", p.returncode == 0)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "digits.py").write_text(DIGITS_REWARD)
        schedule(s, test)
        by_hand(s, test)
        killed(s, test)
        ranks(s, test)
        decoupled(s, test)
    test.end()


main()
