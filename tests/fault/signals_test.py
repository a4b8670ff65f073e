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
from verlc_test import ENV, VERLC, Scratch, Tests, run, state  # noqa: E402

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
    """Signals spread over the whole length of a run, so that each phase gets some."""
    keys = {"trainer.save_freq": -1, "trainer.test_freq": 2, "trainer.val_before_train": True}
    began = time.time()
    run(*s.ppo("unbroken", **{**keys, "trainer.save_freq": STEPS}))
    whole = time.time() - began
    want = state(s.dir / "unbroken", STEPS)
    names = {signal.SIGINT: ("SIGINT", 130), signal.SIGTERM: ("SIGTERM", 143)}
    stopped_at = {}
    for i in range(14):
        sig = (signal.SIGINT, signal.SIGTERM)[i % 2]
        d = s.dir / "stopped"
        shutil.rmtree(d, ignore_errors=True)
        p = subprocess.Popen([VERLC, *map(str, s.ppo("stopped", **keys))], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, env=ENV)
        time.sleep(whole * (i + 3) / 18)
        p.send_signal(sig)
        out, err = p.communicate(timeout=120)
        name, status = names[sig]
        if p.returncode == 0 or p.returncode == -sig:  # it had ended, or had not yet begun
            continue
        steps = saved(d)
        done = sum(line.startswith("step:") and not line.startswith("step:0 ") for line in out.splitlines())
        stopped_at[done] = stopped_at.get(done, 0) + 1
        test(f"{name} after {done} steps: exit {status}, one line, no step lost",
             p.returncode == status and err.count("error: ") == 1 and f"stopped by {name}" in err and
             steps == ([done] if done else []), f"exit {p.returncode}, steps {steps}, {err[-500:]}")
        run(*s.ppo("stopped", **{**keys, "trainer.save_freq": STEPS}))
        test(f"{name} after {done} steps: resumed to the same bits", state(d, STEPS) == want)
    test("signals met a run that was under way", sum(stopped_at.values()) >= 3, str(stopped_at))


def at_call(args, calls, n, *sigs):
    """Starts a run and sends the signals when its reward function was called n times."""
    calls.unlink(missing_ok=True)
    p = subprocess.Popen([VERLC, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV)
    while p.poll() is None and (not calls.exists() or calls.stat().st_size < n):
        time.sleep(0.01)
    for sig in sigs:
        p.send_signal(sig)
        time.sleep(0.2)  # two that come together are one
    _, err = p.communicate(timeout=120)
    return p.returncode, err


def check_phases(s, test):
    """A slow reward holds the run in a rollout or a validation; its calls say where it is:
    8 a step, then 8 a validation."""
    slow, calls = s.dir / "slow.py", s.dir / "calls"
    body = ("import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            f"    open({str(calls)!r}, 'a').write('.')\n    time.sleep(WAIT)\n    return float(len(solution_str) % 2)\n")
    slow.write_text(body.replace("WAIT", "0.3"))
    keys = {"reward.custom_reward_function.path": slow, "reward.num_workers": 1, "trainer.save_freq": -1, "trainer.test_freq": 2}
    code, err = at_call(s.ppo("rollout", **keys), calls, 11, signal.SIGINT)
    test("SIGINT in the rollout of step 2: exit 130, step 1 is saved", code == 130 and saved(s.dir / "rollout") == [1] and
         "step 1" in err, f"{code} {saved(s.dir / 'rollout')} {err[-400:]}")
    code, err = at_call(s.ppo("validation", **keys), calls, 18, signal.SIGTERM)
    test("SIGTERM in the validation after step 2: exit 143, step 2 is saved", code == 143 and saved(s.dir / "validation") == [2],
         f"{code} {saved(s.dir / 'validation')} {err[-400:]}")
    slow.write_text(body.replace("WAIT", "60"))
    began = time.time()
    code, err = at_call(s.ppo("twice", **keys), calls, 1, signal.SIGTERM, signal.SIGTERM)
    test("a second signal ends at once", code == -signal.SIGTERM and time.time() - began < 50,
         f"{code} after {time.time() - began:.1f} s: {err[-300:]}")


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
        took, code, err = stopped_at(s.ppo(broken, **keys), f"step 2/3 update_actor {done}/32".encode())
        test(f"SIGTERM {what}: exit 143, step {step} is saved", code == 143 and saved(s.dir / broken) == [step] and words in err,
             f"exit {code} {saved(s.dir / broken)} after {took:.1f} s: {err[-500:]}")
        test(f"SIGTERM {what}: within 10 s", took < 10, f"{took:.1f} s")
        run(*s.ppo(broken, **keys))
        test(f"SIGTERM {what}: resumed to the same bits", state(s.dir / broken, 3) == state(s.dir / whole, 3))


def check_second_update(s, test):
    """The policy's update, when the critic has changed in this step: on ranks too it goes on to its end."""
    keys = {"trainer.save_freq": -1, "trainer.total_training_steps": 60, "data.train_batch_size": 8, "trainer.device": "cpu",
            "actor_rollout_ref.rollout.n": 32, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.model.path": s.dir / "slow",
            "actor_rollout_ref.actor.use_kl_loss": False, "algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model",
            "critic.ppo_mini_batch_size": 2, "critic.ppo_micro_batch_size_per_gpu": 64}
    for name, ranks in (("turns", {"trainer.ranks": 2}), ("pool", {"trainer.ranks": 2, "critic.ranks": 1})):
        d, early = f"second-{name}", "step ([0-9]+)/60 update_actor 1?[0-9]?[0-9]/256"  # a bar is shown now and then
        _, code, err = stopped_at(s.ppo(d, **keys, **ranks), early.encode())
        met = re.search(early, err)
        test(f"SIGTERM in the policy's update, after the critic's, {ranks}: the step is saved",
             met and code == 143 and saved(s.dir / d) == [int(met[1])], f"exit {code} {saved(s.dir / d)} {met}: {err[-500:]}")


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
