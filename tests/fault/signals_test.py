"""SIGINT and SIGTERM: at any moment of a run the state is saved, the status is 130 or
143, and the resumed run ends in the bits of the unbroken one; a second signal ends
at once. Also what a resume and the retention do with what they find on disk."""

import json
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, is_pending, met, patience, run, state, waited  # noqa: E402

STEPS = 6


def saved(run_dir):
    return sorted((int(f.name[len("global_step_"):]) for f in pathlib.Path(run_dir).glob("global_step_*[0-9]")))


def interrupted(args, sig, when):
    """Starts a run and sends sig when `when(line)` is true of a line of its output."""
    p = subprocess.Popen([VERLC, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    err = []
    reader = threading.Thread(target=lambda: err.extend(p.stderr), daemon=True)
    reader.start()
    for line in p.stdout:
        if when(line):
            p.send_signal(sig)
            break
    p.stdout.read()
    p.wait(120)
    reader.join(10)
    return p.returncode, "".join(err)


def check_moments(s, test):
    """Signals spread over a whole run, so that each phase gets some: some time, up to that of a step, after each of its lines."""
    keys = {"trainer.save_freq": -1, "trainer.test_freq": 2, "trainer.val_before_train": True}
    began = time.time()
    run(*s.ppo("unbroken", **{**keys, "trainer.save_freq": STEPS}))
    of_step = (time.time() - began) / STEPS
    want = state(s.dir / "unbroken", STEPS)
    names = {signal.SIGINT: ("SIGINT", 130), signal.SIGTERM: ("SIGTERM", 143)}
    d, stopped_after = s.dir / "stopped", set()

    def one(after, part, sig):
        """None: it had ended, or had not yet begun."""
        shutil.rmtree(d, ignore_errors=True)
        said = [s.dir / "stopped.out", s.dir / "stopped.err"]
        with open(said[0], "w") as out, open(said[1], "w") as err:
            p = subprocess.Popen([VERLC, *map(str, s.ppo("stopped", **keys))], stdout=out, stderr=err, env=ENV)
        waited(lambda: p.poll() is not None or ("data.train_files: " in said[1].read_text() if after < 0 else
                                                said[0].read_text().count("step:") > after))  # the first is step 0, a validation
        time.sleep(of_step * part)
        p.send_signal(sig)
        p.wait(300)
        out, err = (f.read_text() for f in said)
        name, status = names[sig]
        if p.returncode in (0, -sig):
            return None
        done = sum(line.startswith("step:") and not line.startswith("step:0 ") for line in out.splitlines())
        steps = saved(d)
        test(f"{name} after {done} steps: exit {status}, one line, no step lost",
             p.returncode == status and err.count("error: ") == 1 and f"stopped by {name}" in err and
             steps == ([done] if done else []), f"exit {p.returncode}, steps {steps}, {err[-500:]}")
        run(*s.ppo("stopped", **{**keys, "trainer.save_freq": STEPS}))
        test(f"{name} after {done} steps: resumed to the same bits", state(d, STEPS) == want)
        stopped_after.add(done)
        return True

    moments = [(after, (k % 3) / 3, (signal.SIGINT, signal.SIGTERM)[k % 2]) for k, after in enumerate((-1, 0, 1, 2, 3, 0, 1, 2))]
    reached = [met(lambda _, m=m: one(*m)) for m in moments]
    test("signals met a run that was under way", all(reached) and len(stopped_after) >= 3, f"{reached} {stopped_after}")


def at_call(args, calls, n, *sigs):
    """Starts a run and sends the signals when its reward function was called n times; the next one not before the run has seen the
    one before it, for two that come together are one."""
    calls.unlink(missing_ok=True)
    p = subprocess.Popen([VERLC, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV)
    waited(lambda: p.poll() is not None or calls.exists() and calls.stat().st_size >= n)
    for sig in sigs:
        p.send_signal(sig)
        waited(lambda: p.poll() is not None or not is_pending(p, sig))  # noqa: B023
    calls.with_suffix(".go").touch()
    _, err = p.communicate(timeout=300)
    return p.returncode, err


def check_phases(s, test):
    """A reward holds the run in a rollout or a validation until the signal is there; its calls say where it is: 8 a step, then 8
    a validation."""
    held, calls = s.dir / "held.py", s.dir / "calls"
    body = ("import os, time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            f"    open({str(calls)!r}, 'a').write('.')\n"
            f"    while os.path.getsize({str(calls)!r}) >= LIMIT and not os.path.exists({str(calls.with_suffix('.go'))!r}):\n"
            "        time.sleep(0.01)\n    return float(len(solution_str) % 2)\n")
    keys = {"reward.custom_reward_function.path": held, "reward.num_workers": 1, "trainer.save_freq": -1, "trainer.test_freq": 2,
            "reward.trial_call": False}
    for name, where, n, step, sig, status in (("rollout", "rollout of step 2", 11, 1, signal.SIGINT, 130),
                                              ("validation", "validation after step 2", 18, 2, signal.SIGTERM, 143)):
        held.write_text(body.replace("LIMIT", str(n)))
        calls.with_suffix(".go").unlink(missing_ok=True)
        code, err = at_call(s.ppo(name, **keys), calls, n, sig)
        test(f"{sig.name} in the {where}: exit {status}, step {step} is saved", code == status and saved(s.dir / name) == [step] and
             f"step {step}" in err, f"{code} {saved(s.dir / name)} {err[-400:]}")
    held.write_text(body.replace("LIMIT", "1"))

    def twice(_):
        """None: the first signal had ended the run before the second was sent."""
        calls.with_suffix(".go").unlink(missing_ok=True)
        began = time.time()
        args = s.ppo("twice", **{**keys, "reward.trial_call": True})
        code, err = at_call(args, calls, 1, signal.SIGTERM, signal.SIGTERM)
        return None if code == 128 + signal.SIGTERM else (code, time.time() - began, err)

    code, took, err = met(twice) or (0, 0, "never in time")
    test("a second signal ends at once", code == -signal.SIGTERM and took < patience(15),
         f"{code} after {took:.1f} s: {err[-300:]}")


def stopped_at(args, progress):
    """SIGTERM when this shows in the progress bar. Seconds to the end, exit status, what the terminal got."""
    here, there = pty.openpty()
    p = subprocess.Popen([VERLC, *map(str, args)], stdout=there, stderr=there, env=ENV)
    os.close(there)
    text, began = b"", None
    while True:
        try:
            text += os.read(here, 4096)
        except OSError:  # the other end is closed
            break
        if began is None and re.search(progress, text):
            p.send_signal(signal.SIGTERM)
            began = time.time()
    p.wait(120)
    os.close(here)
    return time.time() - (began or 0), p.returncode, text.decode(errors="replace").replace("\r\n", "\n")


def check_update(s, test):
    """SIGTERM in the middle of an update of many micro-batches: before the first optimizer step nothing has changed and
    the step before is saved at once; after it the update goes on to its end."""
    config = json.loads((s.dir / "model/config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
               "num_key_value_heads": 2}
    config.pop("head_dim", None)
    (s.dir / "slow.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / "slow.json", "--out", s.dir / "slow", "--tokenizer", s.dir / "model")
    keys = {"trainer.save_freq": -1, "trainer.total_training_steps": 3, "data.train_batch_size": 8,
            "actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
            "actor_rollout_ref.model.path": s.dir / "slow",
            "actor_rollout_ref.actor.use_kl_loss": False, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    for what, mini, done, step, words in (("before the first optimizer step", 8, "1?[0-9]", 1, "stopped by SIGTERM"),
                                          ("after the first optimizer step", 2, "(9|[12][0-9])", 2, "has changed the weights")):
        keys["actor_rollout_ref.actor.ppo_mini_batch_size"] = mini
        whole, broken = f"update-{mini}", f"update-{mini}-stopped"
        run(*s.ppo(whole, **keys))

        def one(_):
            """None: the signal came after this part of the update."""
            shutil.rmtree(s.dir / broken, ignore_errors=True)
            took, code, err = stopped_at(s.ppo(broken, **keys), f"step 2/3 update_actor {done}/32".encode())  # noqa: B023
            has = saved(s.dir / broken)  # noqa: B023
            late = code in (0, 143) and (has > [step] or has == [step] and words not in err)  # noqa: B023
            return None if late else (took, code, err)

        took, code, err = met(one, 10) or (0, None, "never in time")
        test(f"SIGTERM {what}: exit 143, step {step} is saved", code == 143 and saved(s.dir / broken) == [step] and words in err,
             f"exit {code} {saved(s.dir / broken)} after {took:.1f} s: {err[-500:]}")
        test(f"SIGTERM {what}: within 10 s", took < patience(10), f"{took:.1f} s")
        run(*s.ppo(broken, **keys))
        test(f"SIGTERM {what}: resumed to the same bits", state(s.dir / broken, 3) == state(s.dir / whole, 3))


def check_second_update(s, test):
    """The policy's update, when the critic has changed in this step: on ranks too it goes on to its end."""
    keys = {"trainer.save_freq": -1, "trainer.total_training_steps": 60, "data.train_batch_size": 8, "trainer.device": "cpu",
            "actor_rollout_ref.rollout.n": 12, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.model.path": s.dir / "slow",
            "actor_rollout_ref.actor.use_kl_loss": False, "algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model",
            "critic.ppo_mini_batch_size": 2, "critic.ppo_micro_batch_size_per_gpu": 24}
    early = "step ([0-9]+)/60 update_actor [1-6]?[0-9]/96"  # a bar is shown now and then
    for name, ranks in (("turns", {"trainer.ranks": 2}), ("pool", {"trainer.ranks": 2, "critic.ranks": 1})):
        d = f"second-{name}"

        def one(_):
            """None: the signal came after that step."""
            shutil.rmtree(s.dir / d, ignore_errors=True)  # noqa: B023
            _, code, err = stopped_at(s.ppo(d, **keys, **ranks), early.encode())  # noqa: B023
            shown = re.search(early, err)
            late = code == 143 and shown and saved(s.dir / d) > [int(shown[1])]  # noqa: B023
            return None if late else (code, shown, err)

        code, shown, err = met(one, 10) or (0, None, "never in time")
        test(f"SIGTERM in the policy's update, after the critic's, {ranks}: the step is saved",
             shown and code == 143 and saved(s.dir / d) == [int(shown[1])], f"exit {code} {saved(s.dir / d)} {shown}: {err[-500:]}")


def check_retention(s, test):
    d = s.dir / "kept"
    keep = {"trainer.max_actor_ckpt_to_keep": 2}
    run(*s.ppo("kept", trainer__total_training_steps=3, **keep))
    test("max_actor_ckpt_to_keep=2 keeps the newest two", saved(d) == [2, 3], str(saved(d)))
    (d / "global_step_9.tmp/actor").mkdir(parents=True)
    (d / "global_step_9.tmp/actor/model.safetensors").write_bytes(b"half")
    run(*s.ppo("kept", trainer__total_training_steps=4, **keep))
    test("retention counts what an earlier process left", saved(d) == [3, 4], str(saved(d)))
    test("what a killed save left is removed", not (d / "global_step_9.tmp").exists())
    run(*s.ppo("kept", **{"trainer.total_training_steps": 6, "trainer.max_actor_ckpt_to_keep": 1}))
    test("max_actor_ckpt_to_keep=1 keeps the newest", saved(d) == [6], str(saved(d)))
    test("the tracker file names it", (d / "latest_checkpointed_iteration.txt").read_text() == "6")
    want = state(d, 6)
    run(*s.ppo("kept", trainer__total_training_steps=6))
    test("a finished run that is started again changes nothing", state(d, 6) == want and saved(d) == [6])
    return want


def check_resume(s, test, want):
    d = s.dir / "again"
    run(*s.ppo("again"))
    p = run(*s.ppo("again", trainer__resume_mode="disable", trainer__total_training_steps=2))
    test("resume_mode=disable starts over", "resumed" not in p.stderr and "step:1 " in p.stdout)
    test("a step that exists is replaced by a whole one", saved(d) == [1, 2, 3, 4, 5, 6] and not list(d.glob("*.tmp")),
         str(saved(d)))
    p = run(*s.ppo("again"))
    test("auto goes on from the step saved last, not from a higher one of the run before", "global_step_2" in p.stderr and
         "step:3 " in p.stdout and state(d, 6) == want, p.stderr[-300:])
    p = run(*s.ppo("elsewhere", trainer__resume_mode="resume_path", trainer__resume_from_path=d / "global_step_4"))
    test("resume_path takes the named one, ends in the same bits", "step:5 " in p.stdout and "step:4 " not in p.stdout and
         state(s.dir / "elsewhere", 6) == want and saved(s.dir / "elsewhere") == [5, 6])
    os.unlink(d / "latest_checkpointed_iteration.txt")
    p = run(*s.ppo("again", trainer__total_training_steps=7))
    test("without the tracker file the newest is taken", "global_step_6" in p.stderr and "step:7 " in p.stdout)


def check_sft(s, test):
    rows = [{"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]}
            for i in range(16)]
    s.write("sft.jsonl", rows)

    def args(name, **keys):
        a = {"data.train_files": s.dir / "sft.jsonl", "data.train_batch_size": 4, "data.max_length": 64,
             "data.micro_batch_size_per_gpu": 4,
             "data.use_dynamic_bsz": False, "model.path": s.dir / "model", "trainer.total_training_steps": 200, "optim.lr": 1e-4,
             "trainer.default_local_dir": s.dir / name, "trainer.logger": "[console]", "trainer.save_freq": -1,
             "trainer.test_freq": -1}
        a.update(keys)
        return ["sft"] + [f"{k}={v}" for k, v in a.items()]
    run(*args("sft-whole", **{"trainer.save_freq": 200}))
    code, err = interrupted(args("sft"), signal.SIGINT, lambda line: line.startswith("step:20 "))
    steps = saved(s.dir / "sft")
    test("SIGINT in SFT: exit 130, one checkpoint", code == 130 and len(steps) == 1 and steps[0] >= 20,
         f"{code} {steps} {err[-300:]}")
    run(*args("sft", **{"trainer.save_freq": 200}))
    test("SFT resumed to the same bits", state(s.dir / "sft", 200) == state(s.dir / "sft-whole", 200))


def main():
    test = Tests()
    with Scratch(small=True) as s:
        check_moments(s, test)
        check_phases(s, test)
        check_update(s, test)
        check_second_update(s, test)
        check_resume(s, test, check_retention(s, test))
        check_sft(s, test)
    test.end()


main()
