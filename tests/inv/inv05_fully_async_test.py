"""Fully asynchronous training with partial rollouts: samples that an exchange of weights interrupts go on with the new ones, and
run.db has the version of each token. Two runs, and one that was killed and resumed, have the same bits; a replay of a record
has its weights, bit for bit. The bound on versions holds, and what is older is dropped and counted."""

import pathlib
import signal
import sqlite3
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, Scratch, Tests, run, series, start, state  # noqa: E402

FULLY = "--config-name=fully_async_ppo_trainer"
N = 2  # samples of a prompt


def fully(s, name, **keys):
    """Two updates of 2 prompts a step, 8 prompts begun; the responses' lengths differ."""
    keys = {"actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.hybrid_engine": False, "data.train_batch_size": 0,
            "async_training.trigger_parameter_sync_step": 2, "async_training.staleness_threshold": 1,
            "rollout.total_rollout_steps": 24, "data.max_response_length": 24, "reward.num_workers": 1,
            "reward.custom_reward_function.path": s.dir / "digits.py", "actor_rollout_ref.actor.optim.lr": 1e-3, **keys}
    args = [a for a in s.ppo(name, **keys) if not a.startswith("trainer.total_training_steps")]
    return [args[0], FULLY, *args[1:]]


def samples(run_dir, columns):
    with sqlite3.connect(run_dir / "run.db") as db:
        return db.execute(f"SELECT {columns} FROM samples WHERE validation = 0 ORDER BY step, place, sample").fetchall()


def runs(blob):
    v = struct.unpack(f"{len(blob) // 4}i", blob)
    return list(zip(v[::2], v[1::2]))


def record(s, test):
    run(*fully(s, "a"))
    run(*fully(s, "b"))
    test("two runs: the same bits, checkpoints' held-over samples included",
         all(state(s.dir / "a", k) == state(s.dir / "b", k) for k in (1, 3, 6)))
    rows = samples(s.dir / "a", "step, place, sample, versions, ids, logp, prompt_number")
    test("a step trains its prompts, all samples of each", [r[:3] for r in rows] ==
         [(k, p, i) for k in range(1, 7) for p in range(4) for i in range(N)])
    spans = [(r[0], runs(r[3])) for r in rows]
    test("every token has its version", all(sum(n for n, _ in v) == len(r[4]) // 4 for r, (_, v) in zip(rows, spans)))
    test("versions of a sample grow, and are of before the step", all(v == sorted(v) and v[-1] < step
         for step, r in spans for v in [[version for _, version in r]]))
    partial = [sum(1 for step, r in spans if step == k and len(r) > 1) for k in range(1, 7)]
    test("samples have tokens of several versions", sum(partial) > 4 and partial[0] == 0, spans)
    test("the metrics count them", partial == series(s.dir / "a", "fully_async/partial/total_partial_num"))
    test("prompts are begun in the order of the data, up to 8 at once",
         max(r[6] for r in rows) < 24 + 4 and len({r[6] for r in rows}) == 24)
    by_hand = [min(1, sum(1 for step, r in spans if step <= k and r[-1][1] < step - 1)) for k in range(1, 7)]
    stale = series(s.dir / "a", "fully_async/count/stale_trajectory_processed")
    test("stale samples are counted",
         stale == sorted(stale) and stale[0] == 0 and by_hand == [min(1, int(v)) for v in stale], stale)
    test("the lag in versions", series(s.dir / "a", "training/version_lag/max")[0] == 0 and
         max(series(s.dir / "a", "training/version_lag/max")) >= 1)
    shown(s, test)


def shown(s, test):
    step, uid, sample, versions = next(r for r in samples(s.dir / "a", "step, uid, sample, versions") if len(runs(r[3])) > 1)
    text = run("show", s.dir / "a", "--step", step, "--sample", f"{uid}.{sample}").stdout
    told = ", ".join(f"{v} ({n})" for n, v in runs(versions))
    test("verlc show has the versions of a sample's tokens", f"versions of the weights (tokens): {told}" in text, text)


def still(s, test):
    """With a learning rate of 0 all versions are one, so interruptions leave no trace."""
    keys = {"actor_rollout_ref.actor.optim.lr": 0, "trainer.save_freq": 0}
    run(*fully(s, "still", **keys))
    run(*s.ppo("sync_still", **{**keys, "actor_rollout_ref.actor.use_kl_loss": False, "data.max_response_length": 24}))
    what = "uid, sample, ids, logp, finish"
    partial = series(s.dir / "still", "fully_async/partial/total_partial_num")
    test("weights that stay: interrupted samples are those of verlc ppo, log-probs and all", sum(partial) > 4 and
         sorted(samples(s.dir / "still", what)) == sorted(samples(s.dir / "sync_still", what)), partial)


def replayed(s, test):
    run(*fully(s, "r", **{"async_training.replay": s.dir / "a/run.db", "trainer.save_freq": 3}))
    weights = lambda d, k: {f: b for f, b in state(s.dir / d, k).items() if f != "trainer.json"}  # noqa: E731
    test("a replay has the record's weights and optimizer state", all(weights("a", k) == weights("r", k) for k in (3, 6)))
    what = "step, place, sample, versions, ids, logp, score"
    test("and its samples, tokens, log-probs and versions", samples(s.dir / "a", what) == samples(s.dir / "r", what))
    # a schedule that no run of this machine makes: every prompt one by one, in the order in which it was interrupted there
    args = fully(s, "narrow", **{"actor_rollout_ref.rollout.max_num_seqs": 3, "rollout.total_rollout_steps": 12})
    run(*args)
    run(*fully(s, "wide", **{"rollout.total_rollout_steps": 12, "async_training.replay": s.dir / "narrow"}))
    run(*fully(s, "own", **{"rollout.total_rollout_steps": 12}))
    test("a record of other limits: its weights, not those of one's own schedule", weights("wide", 3) == weights("narrow", 3) and
         weights("own", 3) != weights("narrow", 3))
    p = run(*fully(s, "r2", **{"async_training.replay": s.dir / "narrow/run.db"}), check=False)
    test.refused("a record that ends before the run does", p, 3, "ends with step 3")
    p = run(*fully(s, "r3", **{"async_training.replay": s.dir / "a/run.db", "trainer.seed": 5}), check=False)
    test.refused("a record of another seed", p, 3, "does not come out as recorded")
    p = run(*fully(s, "r4", **{"async_training.replay": s.dir / "none.db"}), check=False)
    test.refused("no record", p, 3, "none.db")


def on_ranks(s, test):
    """What two ranks drew depends on time; the record of it gives the same bits on any number."""
    keys = {"trainer.device": "cpu", "trainer.save_freq": 3}
    run(*fully(s, "two", **keys, **{"trainer.ranks": 2}))
    for n in (1, 3):
        run(*fully(s, f"two_on_{n}", **keys, **{"trainer.ranks": n, "async_training.replay": s.dir / "two/run.db"}))
        same = state(s.dir / "two", 6) == state(s.dir / f"two_on_{n}", 6)
        test(f"a record of two ranks, replayed on {n}: the same weights", same)


def killed(s, test):
    args = fully(s, "k", **{"trainer.async_save": False})
    for step in (1, 4):
        p = start(args)
        while not (s.dir / "k" / f"global_step_{step}").exists() and p.poll() is None:
            time.sleep(0.002)
        p.send_signal(signal.SIGKILL)
        p.communicate()
    run(*args)
    test("kill -9 after steps 1 and 4, resumed: the same bits", all(state(s.dir / "k", k) == state(s.dir / "a", k) for k in (5, 6)))


def bounds(s, test):
    ahead = {"async_training.staleness_threshold": 3, "async_training.partial_rollout": False}
    run(*fully(s, "far", **ahead))
    test("prompts begun far ahead wait their turn", series(s.dir / "far", "training/version_lag/max") == [0, 1, 2, 3, 3, 3])
    run(*fully(s, "lag", **{**ahead, "async_training.max_version_lag": 1}))
    lag = series(s.dir / "lag", "training/version_lag/max")
    dropped = series(s.dir / "lag", "fully_async/count/dropped_stale_samples")
    test("no token is older than max_version_lag", lag == [0, 1, 1, 1, 0, 1], lag)
    test("older prompts are dropped and counted", dropped == [0, 0, 8, 8, 16, 16], dropped)
    run(*fully(s, "none", **{"async_training.max_version_lag": 0}))
    test("max_version_lag=0: no sample goes on", set(series(s.dir / "none", "fully_async/partial/total_partial_num")) == {0} and
         series(s.dir / "none", "fully_async/count/dropped_stale_samples")[-1] > 0)
    run(*fully(s, "zero", **{"async_training.staleness_threshold": 0}))
    run(*s.ppo("sync", **{"trainer.total_training_steps": 1, "actor_rollout_ref.actor.use_kl_loss": False,
                          "data.max_response_length": 24, "trainer.save_freq": 0}))
    test("staleness_threshold=0: nothing is begun ahead", set(series(s.dir / "zero", "training/version_lag/max")) == {0} and
         set(series(s.dir / "zero", "fully_async/count/staleness_samples")) == {0})
    ids = lambda d: sorted(samples(s.dir / d, "step, uid, sample, ids"))  # noqa: E731
    test("then its first step has the samples of verlc ppo",
         [r for r in ids("zero") if r[0] == 1] == [r for r in ids("sync") if r[0] == 1])
    run(*fully(s, "whole", **{"async_training.partial_rollout": False}))
    test("partial_rollout=False: samples of one version, some left over from the version before",
         set(series(s.dir / "whole", "fully_async/partial/total_partial_num")) == {0} and
         max(series(s.dir / "whole", "training/version_lag/max")) == 1)
    run(*fully(s, "prox", **{"async_training.compute_prox_log_prob": True}))
    kl = series(s.dir / "prox", "rollout_corr/kl")
    test("old log-probs anew, by the weights of the last exchange: 0 apart where all tokens are of these",
         kl[0] == 0 and any(kl[1:]), kl)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "digits.py").write_text(DIGITS_REWARD)
        record(s, test)
        still(s, test)
        replayed(s, test)
        on_ranks(s, test)
        killed(s, test)
        bounds(s, test)
    test.end()


main()
