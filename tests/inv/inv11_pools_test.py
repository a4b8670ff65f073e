"""Invariant 11, pools: ranks of their own that generate, score, or have the critic or the teacher, leave every file, metric and
sample as on one rank. A fully asynchronous run with such ranks draws as time has it; its record replays bitwise without them."""

import json
import os
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ranks import ASK, below, first_difference  # noqa: E402
from verlc_test import (  # noqa: E402
    DIGITS_REWARD, ENV, VERLC, Scratch, Tests, had_ended, met, on_gpus, patience, reward_dir, run, series, start, state, waited)

ONE_OFF, FULLY = "--config-name=one_step_off_ppo_trainer", "--config-name=fully_async_ppo_trainer"


def one_off(s, name, **keys):
    keys = {"actor_rollout_ref.actor.use_kl_loss": True, "reward.num_workers": 1, "actor_rollout_ref.actor.optim.lr": 1e-3,
            "reward.custom_reward_function.path": s.dir / "digits.py", "trainer.total_training_steps": 4, "trainer.save_freq": 2,
            "trainer.test_freq": 2, **keys}
    args = s.ppo(name, **keys)
    return [args[0], ONE_OFF, *args[1:]]


def fully(s, name, **keys):
    keys = {"actor_rollout_ref.actor.use_kl_loss": False, "data.train_batch_size": 0, "data.max_response_length": 24,
            "async_training.trigger_parameter_sync_step": 2, "async_training.staleness_threshold": 1,
            "rollout.total_rollout_steps": 24, "reward.num_workers": 1, "actor_rollout_ref.actor.optim.lr": 1e-3,
            "reward.custom_reward_function.path": s.dir / "digits.py", **keys}
    args = [a for a in s.ppo(name, **keys) if not a.startswith("trainer.total_training_steps")]
    return [args[0], FULLY, *args[1:]]


def schedule(s, test):
    run(*one_off(s, "one"))
    for train, rollout in ((1, 1), (2, 1), (1, 2)):
        name = f"pools{train}{rollout}"
        p = run(*one_off(s, name, **{"trainer.ranks": train, "rollout.ranks": rollout}))
        test(f"one step off, {train} to train and {rollout} to generate: the bits of one rank",
             first_difference(s.dir / "one", s.dir / name, 4) == "", first_difference(s.dir / "one", s.dir / name, 4))
        own = f"rank {train}: rollout" if rollout == 1 else f"ranks {train} to {train + rollout - 1}: rollout"
        test("the log names the pools", own in p.stderr + p.stdout, p.stderr[-500:])
    waits, sends = (series(s.dir / "pools11", f"timing_s/{k}") for k in ("wait_prev_gen", "sync_rollout_weights"))
    test("generation goes on beside the update: what is waited for is timed, and the exchange of weights",
         len(waits) == 3 and len(sends) == 3 and all(v >= 0 for v in waits), (waits, sends))


def by_hand(s, test):
    """The program of examples/ as it is, with ranks to generate."""
    exe = pathlib.Path(VERLC).resolve().parent / "examples/one_step_off"
    keys = {"actor_rollout_ref.actor.use_kl_loss": False}
    run(*one_off(s, "plain", **keys))
    args = [a for a in one_off(s, "hand", **{**keys, "rollout.ranks": 1})[2:] if not a.startswith("algorithm.adv_estimator")]
    p = subprocess.run([exe, *map(str, on_gpus(args))], capture_output=True, text=True, timeout=300, env=ENV)
    test("the schedule by hand, in calls of verlc.h, on pools: the same bits",
         p.returncode == 0 and state(s.dir / "plain", 4) == state(s.dir / "hand", 4), p.stderr[-500:])


def adapter(s, test):
    keys = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.lora_alpha": 8, "trainer.test_freq": -1}
    run(*one_off(s, "lora", **keys))
    run(*one_off(s, "lora11", **keys, **{"rollout.ranks": 1}))
    test("an adapter: what it changes is sent; the bits of one rank", first_difference(s.dir / "lora", s.dir / "lora11", 4) == "",
         first_difference(s.dir / "lora", s.dir / "lora11", 4))


def killed(s, test):
    args = one_off(s, "k", **{"trainer.save_freq": 1, "rollout.ranks": 1, "trainer.async_save": False})
    p = start(args)
    while not (s.dir / "k/global_step_2").exists() and p.poll() is None:
        time.sleep(0.002)
    p.send_signal(signal.SIGKILL)
    p.communicate()
    run(*args)
    test("kill -9, resumed: the same bits", state(s.dir / "k", 4) == state(s.dir / "one", 4))
    run(*one_off(s, "fewer", **{"trainer.resume_mode": "resume_path", "trainer.resume_from_path": s.dir / "pools21/global_step_2"}))
    test("resumed without pools: the same bits", state(s.dir / "fewer", 4) == state(s.dir / "one", 4))


def end_at(run_dir, args, steps, wait=0.0):
    """SIGTERM that long after so many steps: whether the last whole step was saved."""
    p, log = start(args), run_dir / "metrics.jsonl"
    waited(lambda: p.poll() is not None or log.exists() and log.read_text().count("\n") >= steps)
    time.sleep(wait)
    p.send_signal(signal.SIGTERM)
    err = p.communicate(timeout=300)[1]
    if not log.exists():
        print(f"it ended before its first step, exit {p.returncode}: {err[-900:]}")
        return False
    saved = (run_dir / f"global_step_{json.loads(log.read_text().splitlines()[-1])['step']}").exists()
    return saved and (p.returncode == 143 or had_ended(p, err))


def stopped(s, test):
    """SIGTERM at three moments, while one pool updates and the other generates; then to the end."""
    keys = {"trainer.total_training_steps": 40, "trainer.save_freq": 20, "trainer.test_freq": -1}
    run(*one_off(s, "long", **keys))
    args, ends = one_off(s, "stopped", **keys, **{"rollout.ranks": 1}), []
    for steps, wait in ((3, 0), (11, 0.03), (24, 0.06)):
        ends.append(end_at(s.dir / "stopped", args, steps, wait))
    run(*args)
    test("SIGTERM while a generation goes on beside: the last whole step is saved, and the end has the same bits",
         all(ends) and state(s.dir / "stopped", 40) == state(s.dir / "long", 40), ends)
    for name, ranks in (("turns", {}), ("pool", {"rollout.ranks": 1, "trainer.ranks": 2})):
        keys = {"trainer.save_freq": 100000, "rollout.total_rollout_steps": 100000, "trainer.total_epochs": 100000,
                "async_training.trigger_parameter_sync_step": 4, "actor_rollout_ref.actor.use_kl_loss": True}
        ends = [end_at(s.dir / f"async_end_{name}_{i}", fully(s, f"async_end_{name}_{i}", **keys, **ranks), 2, 0.03 * i)
                for i in range(6)]
        test(f"SIGTERM between the updates of a fully asynchronous step, {name}: the last whole step is saved", all(ends), ends)


def filtered(s, test):
    """Dynamic sampling begins further prompts while the policy is updated."""
    keys = {"trainer.total_training_steps": 3, "trainer.save_freq": 3, "trainer.test_freq": -1,
            "algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score",
            "algorithm.filter_groups.max_num_gen_batches": 0}
    run(*one_off(s, "filter", **keys))
    run(*one_off(s, "filter_pools", **keys, **{"rollout.ranks": 1}))
    why = first_difference(s.dir / "filter", s.dir / "filter_pools", 3)
    test("dynamic sampling on a pool: the bits of one rank", why == "", why)


def rank_pid(controller, rank):
    return next(pid for pid, command in below(controller.pid).items() if command.endswith(" worker") and
                f"VERLC_RANK={rank}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def lost(s, test):
    """A rank of each pool is killed or stopped while the others work; and the run goes on by itself."""
    for rank, sig in ((0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)):
        name = f"lost_{rank}_{sig.name}"
        p = start(one_off(s, name, **{"rollout.ranks": 1, "trainer.total_training_steps": 500}))
        while not (s.dir / name / "global_step_2").exists() and p.poll() is None:
            time.sleep(0.01)
        ranks = [rank_pid(p, r) for r in (0, 1)]
        os.kill(ranks[rank], sig)
        begun = time.monotonic()
        err = p.communicate(timeout=300)[1]
        took = time.monotonic() - begun
        test(f"{sig.name} of rank {rank}: the run ends within 10 s by its name",
             p.returncode not in (0, None) and f"error: rank {rank} " in err and took < patience(10) and
             waited(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks), 10), (took, err[-300:]))  # noqa: B023
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 1,
              "critic.ranks": 1, "actor_rollout_ref.actor.ppo_epochs": 20, "trainer.total_training_steps": 500}
    for rank in (0, 1):  # most of a step is the policy's update, beside the critic's
        name = f"lost_critic_{rank}"
        p = start(s.ppo(name, **critic))
        while not (s.dir / name / "global_step_1").exists() and p.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(rank_pid(p, rank), signal.SIGKILL)
        begun = time.monotonic()
        err = p.communicate(timeout=300)[1]
        took = time.monotonic() - begun
        test(f"a rank {rank} that is lost beside the critic's update: the run ends within 10 s by its name",
             p.returncode == 1 and f"error: rank {rank} " in err and took < patience(10), (p.returncode, took, err[-300:]))

    def restarted(_):
        """None: the run had ended before its rank was killed."""
        shutil.rmtree(s.dir / "restarted", ignore_errors=True)
        p = start(one_off(s, "restarted", **{"rollout.ranks": 1, "trainer.max_restarts": 1}))
        waited(lambda: p.poll() is not None or (s.dir / "restarted/global_step_2").exists())
        try:
            os.kill(rank_pid(p, 1), signal.SIGKILL)
        except (StopIteration, OSError):
            pass
        err = p.communicate(timeout=300)[1]
        return None if p.returncode == 0 and "restart 1 of 1" not in err else p.returncode

    test("trainer.max_restarts: the same bits", met(restarted) == 0 and state(s.dir / "restarted", 4) == state(s.dir / "one", 4))


def rewards(s, test):
    """A reward model on ranks of its own, of verlc ppo and beside ranks that generate."""
    rm = "reward.reward_model."
    (s.dir / "ask.py").write_text(ASK)
    pool = {rm + "enable_resource_pool": True, rm + "ranks": 1}
    keys = {"trainer.total_training_steps": 2, "trainer.save_freq": 2, "reward.num_workers": 1}
    cases = {"rm": {rm + "enable": True, rm + "model_path": reward_dir(s, "model_rm")},
             "judge": {rm + "enable": True, rm + "model_path": s.dir / "model", rm + "rollout.response_length": 8,
                       "reward.custom_reward_function.path": s.dir / "ask.py"}}
    for name, own in cases.items():
        run(*s.ppo(name, **{**keys, **own}))
        run(*s.ppo(name + "_pool", **{**keys, **own, **pool, "trainer.ranks": 2}))
        why = first_difference(s.dir / name, s.dir / (name + "_pool"), 2)
        test(f"{name} on a rank of its own, two to train: the bits of one rank", why == "", why)
    own = {"reward.custom_reward_function.path": "null", **cases["rm"]}
    run(*one_off(s, "rm_off", **own))
    run(*one_off(s, "rm_off_pools", **own, **pool, **{"rollout.ranks": 1}))
    why = first_difference(s.dir / "rm_off", s.dir / "rm_off_pools", 4)
    test("one step off with three pools: the bits of one rank", why == "", why)
    run(*one_off(s, "judge_off", **cases["judge"]))
    for name, ranks in (("judge_off_turns", {"trainer.ranks": 2}), ("judge_off_pools", {**pool, "rollout.ranks": 1})):
        p = run(*one_off(s, name, **cases["judge"], **ranks), check=False)
        why = p.stderr[-500:] if p.returncode else first_difference(s.dir / "judge_off", s.dir / name, 4)
        test(f"one step off with a judge, {ranks}: the bits of one rank", why == "", why)


def critics(s, test):
    """A critic and a teacher on ranks of their own; the checkpoint has both models, resumed with other pools."""
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 1,
              "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1, "actor_rollout_ref.actor.optim.lr": 1e-3,
              "critic.optim.lr": 1e-3, "trainer.save_freq": 2, "trainer.total_training_steps": 4, "trainer.critic_warmup": 2}
    run(*s.ppo("critic", **critic))
    for name, ranks in (("critic_pool", {"critic.ranks": 2}), ("critic_sync", {"critic.ranks": 1, "trainer.async_save": False})):
        run(*s.ppo(name, **critic, **ranks))
        why = first_difference(s.dir / "critic", s.dir / name, 4)
        test(f"a critic with {ranks}: the bits of one rank", why == "" and not list((s.dir / name).glob("*.tmp")), why)
        manifest = json.loads((s.dir / name / "global_step_4/manifest.json").read_text())
        test("its manifest has both parts", manifest["parts"] == ["actor", "critic"] and
             {"critic/model.safetensors", "optim/critic.safetensors"} <= set(manifest["files"]), manifest["parts"])
    again = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": s.dir / "critic_pool/global_step_2"}
    run(*s.ppo("critic_resumed", **critic, **again, **{"trainer.ranks": 2}))
    test("resumed on two ranks without pools: the same bits", state(s.dir / "critic_resumed", 4, ("actor", "critic")) ==
         state(s.dir / "critic", 4, ("actor", "critic")))
    lora = {**critic, "actor_rollout_ref.model.lora_rank": 4, "critic.model.lora_rank": 4}
    run(*s.ppo("critic_lora", **lora))
    run(*s.ppo("critic_lora_pool", **lora, **{"critic.ranks": 1}))
    why = first_difference(s.dir / "critic_lora", s.dir / "critic_lora_pool", 4)
    test("adapters on policy and critic: the bits of one rank", why == "", why)
    teacher = {"distillation.enabled": True, "actor_rollout_ref.actor.use_kl_loss": False, "trainer.total_training_steps": 2,
               "distillation.teacher_models.teacher_model.model_path": s.dir / "model"}
    run(*s.ppo("teacher", **teacher))
    run(*s.ppo("teacher_pool", **teacher, **{"distillation.ranks": 2}))
    why = first_difference(s.dir / "teacher", s.dir / "teacher_pool", 2)
    test("a teacher on ranks of its own: the bits of one rank", why == "", why)


def spans(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return db.execute("SELECT step, place, sample, versions, ids, logp, prompt_number FROM samples WHERE validation = 0 "
                          "ORDER BY step, place, sample").fetchall()


def asynchronous(s, test):
    for partial in (True, False):
        name = f"async_{partial}"
        run(*fully(s, name, **{"rollout.ranks": 1, "trainer.ranks": 2, "async_training.partial_rollout": partial}))
        rows = spans(s.dir / name)
        test(f"fully asynchronous on pools, partial_rollout={partial}: each step trains its prompts",
             [r[:3] for r in rows] == [(k, p, i) for k in range(1, 7) for p in range(4) for i in range(2)] and
             len({r[6] for r in rows}) == 24)
        run(*fully(s, name + "_again", **{"async_training.replay": s.dir / name, "async_training.partial_rollout": partial}))
        test("its record, replayed on one rank: the same tokens, log-probs and weights",
             rows == spans(s.dir / (name + "_again")) and
             all(state(s.dir / name, k) == state(s.dir / (name + "_again"), k) for k in (1, 3, 6)))
    run(*fully(s, "async_pools", **{"async_training.replay": s.dir / "async_True", "rollout.ranks": 2}))
    test("and on other pools", state(s.dir / "async_pools", 6) == state(s.dir / "async_True", 6))
    args = fully(s, "async_k", **{"rollout.ranks": 1, "trainer.async_save": False})
    p = start(args)
    while not (s.dir / "async_k/global_step_3").exists() and p.poll() is None:
        time.sleep(0.002)
    p.send_signal(signal.SIGKILL)
    p.communicate()
    run(*args)
    run(*fully(s, "async_k_again", **{"async_training.replay": s.dir / "async_k"}))
    test("kill -9, resumed: the whole record replays", state(s.dir / "async_k_again", 6) == state(s.dir / "async_k", 6))


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "digits.py").write_text(DIGITS_REWARD)
        schedule(s, test)
        by_hand(s, test)
        adapter(s, test)
        killed(s, test)
        stopped(s, test)
        filtered(s, test)
        lost(s, test)
        rewards(s, test)
        critics(s, test)
        asynchronous(s, test)
    test.end()


main()
