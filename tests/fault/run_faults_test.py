"""What goes wrong while a run is under way: a full disk, numbers that are not finite,
damaged checkpoints, reward functions and templates that fail. The run ends or goes
on as the configuration says, with one clear line, and what was saved stays whole."""

import hashlib
import json
import os
import pathlib
import shutil
import sqlite3
import struct
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, run, save_tensors, state, tensors  # noqa: E402

OTHER, USAGE, DATA, RESOURCES, NUMERICAL, DEADLINE = 1, 2, 3, 4, 5, 6


def tree(d):
    """Every file under d with its hash."""
    d = pathlib.Path(d)
    return {str(f.relative_to(d)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(d.rglob("*")) if f.is_file()}


def saved(run_dir):
    return sorted(f.name for f in pathlib.Path(run_dir).glob("global_step_*"))


def checkpoints(run_dir):
    """The files of all complete checkpoints."""
    return {f: h for f, h in tree(run_dir).items() if f.startswith("global_step_") and ".tmp" not in f.split("/")[0]}


# ---- the output directory ----

def check_output(s, test):
    (s.dir / "file").write_text("in the way\n")
    p = run(*s.ppo("file/run"), check=False)
    test.refused("output directory below a file", p, RESOURCES, "trainer.default_local_dir", "Not a directory")
    test("output directory below a file: it is untouched", (s.dir / "file").read_text() == "in the way\n")
    p = run(*s.ppo("x", trainer__default_local_dir="/proc/verlc"), check=False)
    test.refused("output directory that cannot be made", p, RESOURCES, "trainer.default_local_dir", "/proc/verlc")

    for key in ("trainer.rollout_data_dir", "trainer.validation_data_dir"):
        p = run(*s.ppo("x", **{key: s.dir / "file/dump"}), check=False)
        test.refused(f"{key} that cannot be made, said before the run", p, RESOURCES, key, "Not a directory")
    away = reward_file(s, "away", f"import shutil\nshutil.rmtree({str(s.dir / 'dump')!r}, ignore_errors=True)\n"
                       f"open({str(s.dir / 'dump')!r}, 'w').close()\nreturn 1.0")
    p = run(*s.ppo("dumping", trainer__rollout_data_dir=s.dir / "dump", trainer__total_training_steps=2,
                   **{"reward.custom_reward_function.path": away, "reward.num_workers": 1}), check=False)
    test("rollout_data_dir lost in mid-run: one warning, the run goes on", p.returncode == 0 and
         p.stderr.count("were not written") == 1 and saved(s.dir / "dumping") == ["global_step_1", "global_step_2"],
         p.stderr[-400:])

    # Two steps are saved, then no file may grow past half of the weights: every save fails.
    run(*s.ppo("full", trainer__total_training_steps=2))
    before = checkpoints(s.dir / "full")
    limit = (s.dir / "full/global_step_2/actor/model.safetensors").stat().st_size // 2048  # KiB
    words = subprocess.list2cmdline([VERLC, *map(str, s.ppo("full"))])
    p = subprocess.run(["bash", "-c", f"ulimit -f {limit}; exec {words}"], capture_output=True, text=True, env=ENV, timeout=120)
    test.refused("file size limit during a save", p, RESOURCES, "checkpoint of step 3 was not saved", "File too large", "step 2")
    test("file size limit: older checkpoints are untouched", checkpoints(s.dir / "full") == before)
    test("file size limit: nothing half-written", saved(s.dir / "full") == ["global_step_1", "global_step_2"],
         str(saved(s.dir / "full")))
    run(*s.ppo("full"))
    run(*s.ppo("whole"))
    test("after a full disk: resumed to the bits of an unbroken run", state(s.dir / "full", 6) == state(s.dir / "whole", 6))
    check_tmpfs(s, test)


def check_tmpfs(s, test):
    """The same on a file system with room for two checkpoints and a part of a third."""
    one = sum(f.stat().st_size for f in (s.dir / "whole/global_step_6").rglob("*") if f.is_file()) >> 10
    at = s.dir / "small"
    at.mkdir()
    words = subprocess.list2cmdline([VERLC, *map(str, s.ppo("small/run", trainer__logger="[console]"))])
    script = (f"mount -t tmpfs -o size={one * 5 // 2 + 1024}k none {at} || exit 77; {words}; rc=$?; ls {at}/run; "
              f"for d in {at}/run/global_step_*; do {VERLC} model info --model $d/actor >/dev/null && echo whole; done; exit $rc")
    p = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, env=ENV, timeout=120)
    if p.returncode == 77 or "unshare" in p.stderr:
        print("skipped: a small file system (no right to mount)")
        return
    test.refused("disk full during a save", p, RESOURCES, "was not saved", "No space left", "older checkpoints are untouched")
    test("disk full: two whole checkpoints and nothing half-written", p.stdout.count("whole") == 2 and ".tmp" not in p.stdout,
         p.stdout[-400:])


def custom_function(s, test):
    """A user's C function is compiled into the run's directory: where that cannot be written, or is full at whatever
    moment, one line says so."""
    source = s.dir / "mine.c"
    source.write_text('#include "verlc_algo.h"\nint f(const struct verlc_adv *a, double *x, double *y) {\n'
                      "    for (long i = 0; i < a->off[a->n]; i++) x[i] = y[i] = 1;\n    return 0;\n}\n")
    adv = {"algorithm.adv_estimator": f"{source}:f", "actor_rollout_ref.rollout.temperature": 0}  # the next fault
    (s.dir / "file").write_text("")
    for where in (s.dir / "file/run", pathlib.Path("/proc/run")):
        p = run(*s.ppo("x", **{**adv, "trainer.default_local_dir": where}), check=False)
        test.refused(f"a C function, and {where.parent.name}/run cannot be made", p, RESOURCES, "trainer.default_local_dir",
                     str(where))
    p = subprocess.run([VERLC, *map(str, s.ppo("x", **{**adv, "trainer.default_local_dir": "-x"}))], cwd=s.dir,
                       capture_output=True, text=True, env=ENV, timeout=60)
    test("a C function, and a directory whose name begins as an option", "temperature" in p.stderr and
         sorted(f.name for f in (s.dir / "-x/custom").iterdir()) == ["f.so", "verlc_algo.h"], p.stderr[-400:])
    at, full = s.dir / "narrow", 0
    at.mkdir()
    words = subprocess.list2cmdline([VERLC, *map(str, s.ppo("narrow/run", **adv))])
    for kib in range(4, 200, 4):
        script = f"mount -t tmpfs -o size={kib}k none {at} || exit 77; exec {words}"
        p = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, env=ENV, timeout=60)
        if p.returncode == 77 or "unshare" in p.stderr:
            print("skipped: a small file system (no right to mount)")
            return
        if "temperature" in p.stderr:  # it was compiled
            break
        full += 1
        test.refused(f"a C function on a disk of {kib} KiB", p, RESOURCES, "algorithm.adv_estimator", "No space left")
    test("with more room it compiles", full > 1 and "temperature" in p.stderr, p.stderr)


# ---- numbers ----

def reward_file(s, name, body):
    path = s.dir / f"{name}.py"
    path.write_text("import os, time, math\n\n"
                    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):\n" +
                    "".join(f"    {line}\n" for line in body.splitlines()))
    return path


def check_numbers(s, test):
    bad = reward_file(s, "huge", "return 3e38 if len(solution_str) % 2 else -3e38")
    keys = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor_rollout_ref.actor.loss_scale_factor": 1e-200,
            "reward.custom_reward_function.path": bad, "algorithm.norm_adv_by_std_in_grpo": False, "trainer.max_bad_steps": 2,
            "trainer.save_freq": 10, "actor_rollout_ref.rollout.n": 4, "data.train_batch_size": 4, "reward.num_workers": 1}
    d = s.dir / "huge"
    p = run(*s.ppo("huge", **keys), check=False)
    test.refused("loss not finite: stops after trainer.max_bad_steps", p, NUMERICAL, "step 2", "not finite", "2 steps in a row",
                 "trainer.max_bad_steps", "bad_batches")
    test("loss not finite: each step is reported", p.stderr.count("nothing was changed") == 2, p.stderr[-400:])
    lines = [json.loads(x) for x in (d / "bad_batches/1.jsonl").read_text().splitlines()]
    test("loss not finite: the batch is saved with all that its update read",
         lines and all(len(x["response_ids"]) == len(x["old_log_probs"]) == len(x["advantages"]) and x["prompt_ids"]
                       for x in lines))
    weights = (d / "global_step_1/actor/model.safetensors").read_bytes()
    test("loss not finite: the last good state is saved, the weights as they began",
         saved(d) == ["global_step_1"] and weights == (s.dir / "model/model.safetensors").read_bytes(), str(saved(d)))
    keys["trainer.max_bad_steps"] = 100
    p = run(*s.ppo("huge2", trainer__total_training_steps=3, **keys), check=False)
    test("loss not finite: below the limit the run goes on", p.stdout.count("actor/skipped_steps:1") == 3, p.stderr[-400:])
    test.refused("but a run that has skipped all its updates is not done", p, NUMERICAL, "none of the 3 steps", "changed the model",
                 "bad_batches", "step 3 is in")
    first = reward_file(s, "first", "sign = 1 if len(solution_str) % 2 else -1\n"
                        "return sign * (3e38 if extra_info['index'] < 4 else 1)")
    once = {**keys, "reward.custom_reward_function.path": first, "data.shuffle": False,
            "actor_rollout_ref.actor.loss_scale_factor": 1e-6}
    p = run(*s.ppo("huge3", trainer__total_training_steps=3, **once), check=False)
    test("one that has skipped some is", p.returncode == 0 and p.stdout.count("actor/skipped_steps:1") == 1, p.stderr[-400:])

    # Finite in the loss, too large in the backward pass: a tensor of the model is named.
    keys.update({"actor_rollout_ref.actor.loss_scale_factor": 0.3, "trainer.max_bad_steps": 1})
    p = run(*s.ppo("large", **keys), check=False)
    test.refused("gradient not finite: the tensor is named", p, NUMERICAL, "step 1", "the gradient of", ".weight is not finite")
    test("gradient not finite in the first step: nothing is saved",
         saved(s.dir / "large") == [] and "no step was saved" in p.stderr)

    # Rates that throw the weights away, a factor of a million each step: soon a rollout has no finite log-prob.
    p = run(*s.ppo("thrown", trainer__save_freq=1, trainer__total_training_steps=4,
                   **{"actor_rollout_ref.actor.optim.lr": 1e3, "actor_rollout_ref.actor.optim.weight_decay": 1e3}), check=False)
    test.refused("weights thrown to infinity", p, NUMERICAL)
    for name in saved(s.dir / "thrown"):
        run("model", "info", "--model", s.dir / "thrown" / name / "actor")
    test("weights thrown to infinity: no such state is published",
         all((s.dir / "thrown" / n / "manifest.json").exists() for n in saved(s.dir / "thrown")))

    # A weight that no token reads overflows in the first step: only the save can see it.
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * (i + 1)}]} for i in range(8)]
    s.write("sft.jsonl", rows)
    config = json.loads((s.dir / "model/config.json").read_text()) | {"tie_word_embeddings": False}
    (s.dir / "untied.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / "untied.json", "--tokenizer", s.dir / "model", "--out", s.dir / "untied", "--dtype",
        "fp32")
    weights = tensors(s.dir / "untied/model.safetensors")
    dtype, shape, data = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = (dtype, shape, data[:-4] + struct.pack("f", 1e38))
    save_tensors(s.dir / "untied/model.safetensors", weights)
    p = run("sft", f"data.train_files={s.dir / 'sft.jsonl'}", "data.train_batch_size=4", "data.max_length=64",
            "data.max_token_len_per_gpu=512", f"model.path={s.dir / 'untied'}", "engine.dtype=float32", "optim.lr=1e3",
            "optim.weight_decay=1e3", "trainer.total_training_steps=20", "trainer.save_freq=1",
            f"trainer.default_local_dir={s.dir / 'sft'}", "trainer.logger=[console]", check=False)
    test.refused("SFT with weights thrown away: the tensor is named, nothing of it is saved", p, NUMERICAL, "was not saved",
                 "tensor model.", "NaN or Inf")
    test("SFT with weights thrown away: no checkpoint of them", saved(s.dir / "sft") == [], str(saved(s.dir / "sft")))


# ---- checkpoints ----

def flip(path, at=0.5):
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 4
    path.write_bytes(raw)


def check_checkpoints(s, test):
    whole = s.dir / "whole"  # six steps, from check_output
    want = state(whole, 6)
    damages = {
        "a flipped bit in the weights": lambda d: flip(d / "actor/model.safetensors"),
        "a flipped bit in the optimizer": lambda d: flip(d / "optim/actor.safetensors", 0.9),
        "truncated weights": lambda d: os.truncate(d / "actor/model.safetensors", 1000),
        "a missing file": lambda d: (d / "trainer.json").unlink(),
        "a missing manifest": lambda d: (d / "manifest.json").unlink(),
        "an empty manifest": lambda d: (d / "manifest.json").write_text(""),
        "a manifest that names a path outside": lambda d: (d / "manifest.json").write_text(
            '{"files": {"../../model/config.json": {"bytes": 1, "xxh3_128": "00"}}}'),
    }
    for name, damage in damages.items():
        d = s.dir / "damaged"
        shutil.rmtree(d, ignore_errors=True)
        shutil.copytree(whole, d)
        for n in (1, 2, 3):
            shutil.rmtree(d / f"global_step_{n}")
        damage(d / "global_step_6")
        p = run(*s.ppo("damaged"), check=False)
        test(f"newest checkpoint has {name}: falls back, says so, ends in the same bits",
             p.returncode == 0 and "global_step_6 is not usable" in p.stderr and "resumed from" in p.stderr and
             "global_step_5" in p.stderr and state(d, 6) == want, p.stderr[-600:])
    d = s.dir / "damaged"
    flip(d / "global_step_5/optim/actor.safetensors")
    p = run(*s.ppo("damaged", trainer__resume_mode="resume_path", trainer__resume_from_path=d / "global_step_5"), check=False)
    test.refused("a damaged checkpoint named by resume_from_path", p, DATA, "global_step_5", "optim/actor.safetensors", "checksum")
    p = run(*s.ppo("damaged", trainer__resume_mode="resume_path", trainer__resume_from_path=d / "global_step_77"), check=False)
    test.refused("a missing checkpoint named by resume_from_path", p, DATA, "global_step_77")
    p = run(*s.ppo("damaged", trainer__resume_mode="resume_path"), check=False)
    test.refused("resume_path without a path", p, USAGE, "trainer.resume_from_path")
    p = run(*s.ppo("damaged", trainer__resume_mode="sometimes"), check=False)
    test.refused("unknown resume_mode", p, USAGE, "trainer.resume_mode", "sometimes")
    p = run(*s.ppo("damaged", data__train_files=s.dir / "test.jsonl"), check=False)
    test.refused("a checkpoint of a run on other data", p, DATA, "rows")


def check_foreign(s, test):
    """A checkpoint of another program in the run's directory: never resumed, moved, deleted, counted or written over."""
    def verls(name, step, tracker=None):
        d = s.dir / name
        (d / f"global_step_{step}/actor").mkdir(parents=True)
        (d / f"global_step_{step}/actor/model_world_size_1_rank_0.pt").write_bytes(b"verl's weights")
        (d / f"global_step_{step}/data.pt").write_bytes(b"verl's cursor")
        if tracker:
            (d / "latest_checkpointed_iteration.txt").write_text(tracker)
        return d, lambda: sorted(p.name for p in (d / f"global_step_{step}").rglob("*") if p.is_file()) == [
            "data.pt", "model_world_size_1_rank_0.pt"]

    once = {"trainer__max_actor_ckpt_to_keep": 1, "trainer__total_training_steps": 3}
    for tracker in (None, "7"):
        name = f"foreign{tracker}"
        d, whole = verls(name, 7, tracker)
        p = run(*s.ppo(name, **once), check=False)
        test.refused("resuming over verl's checkpoint", p, DATA, "global_step_7", "not written by verlc",
                     "trainer.default_local_dir", "trainer.resume_mode=disable")
        test("and nothing is written", saved(d) == ["global_step_7"] and whole(), str(saved(d)))
        p = run(*s.ppo(name, trainer__resume_mode="disable", **once))
        test("resume_mode=disable writes beside it; retention does not count it",
             saved(d) == ["global_step_3", "global_step_7"] and whole() and "global_step_7 was not written by verlc" in p.stderr,
             f"{saved(d)} {p.stderr[-400:]}")
        latest = (d / "latest_checkpointed_iteration.txt").read_text()
        test("verl's tracker file stays verl's", latest == (tracker or "3"), latest)
        further = {**once, "trainer__total_training_steps": 5}
        if tracker:
            test.refused("and names verl's for the next run too", run(*s.ppo(name, **further), check=False), DATA, "global_step_7")
            further |= {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": d / "global_step_3"}
        p = run(*s.ppo(name, **further))
        test("the run beside it is resumed", "resumed from" in p.stderr and saved(d) == ["global_step_5", "global_step_7"] and
             whole(), f"{saved(d)} {p.stderr[-400:]}")
        p = run(*s.ppo(name, **{**further, "trainer__total_training_steps": 8, "trainer__resume_mode": "resume_path",
                                "trainer__resume_from_path": d / "global_step_5"}), check=False)
        test.refused("a run that would come to it does not start", p, DATA, "global_step_7", "never written over")
        test("and leaves everything", saved(d) == ["global_step_5", "global_step_7"] and whole())
    p = run(*s.ppo("foreign7", trainer__resume_mode="resume_path", trainer__resume_from_path=d / "global_step_7"), check=False)
    test.refused("resume_from_path=verl's checkpoint", p, DATA, "trainer.resume_from_path", "not written by verlc")
    sft = s.write("beside.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4)
    d, whole = verls("foreign-sft", 2)
    p = run("sft", f"data.train_files={sft}", "data.train_batch_size=4", "data.max_length=64", "data.max_token_len_per_gpu=512",
            f"model.path={s.dir / 'model'}", "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.resume_mode=disable",
            f"trainer.default_local_dir={d}", "trainer.logger=[console]", check=False)
    test.refused("SFT that would come to it does not start", p, DATA, "global_step_2", "never written over")
    test("SFT leaves it", saved(d) == ["global_step_2"] and whole())


# ---- rewards ----

def check_rewards(s, test):
    # Of two samples a prompt, the one with an odd sum of its characters fails.
    odd = "if sum(map(ord, solution_str)) % 2 == 0: return 1.0\n"
    kinds = {
        "raises": (odd + "raise ValueError('cannot grade this')", "crash", "cannot grade this"),
        "dies": (odd + "os._exit(9)", "crash", ""),
        "hangs": (odd + "time.sleep(1000)", "timeout", ""),
        "returns garbage": (odd + "return {'no score': 1}", "unparsed", ""),
        "returns NaN": (odd + "return math.nan", "unparsed", ""),
        "returns text": (odd + "return 'very good'", "unparsed", ""),
    }
    for name, (body, status, words) in kinds.items():
        path = reward_file(s, name.replace(" ", "_"), body)
        timeout = 0.5 if name == "hangs" else 20
        keys = {"reward.custom_reward_function.path": path, "reward.timeout": timeout, "reward.num_workers": 2,
                "trainer.total_training_steps": 1, "trainer.save_freq": -1, "reward.trial_call": False}
        for policy in ("drop_sample", "drop_group", "stop"):
            d = s.dir / f"reward-{policy}"
            shutil.rmtree(d, ignore_errors=True)
            keys["trainer.rollout_data_dir"] = d / "dump"
            began = time.time()
            p = run(*s.ppo(f"reward-{policy}", reward__on_error=policy, **keys), check=False, timeout=120)
            label = f"reward function {name}, on_error={policy}"
            test(f"{label}: reported with its kind", f"ended as {status}" in p.stderr and words in p.stderr, p.stderr[-500:])
            if policy == "stop":
                test.refused(label, p, OTHER, "reward.on_error=stop")
                continue
            dump = d / "dump/1.jsonl"
            if p.returncode != 0:  # drop_group: every group had a failure
                test.refused(label, p, OTHER, "none of the")
                continue
            rows = [json.loads(x) for x in dump.read_text().splitlines()]
            test(f"{label}: only scored samples are trained on, none as 0", 0 < len(rows) < 8 and
                 all(r["score"] == 1.0 for r in rows) and
                 (policy != "drop_group" or len(rows) % 2 == 0), str([r["score"] for r in rows]))
            test(f"{label}: the failures are counted",
                 f"reward/num_errors:{p.stderr.split('reward: ')[1].split(' of ')[0]}" in p.stdout, p.stdout[-300:])
            test(f"{label}: in time", time.time() - began < 60)
    p = run(*s.ppo("r", **{"reward.custom_reward_function.path": s.dir / "gone.py"}), check=False)
    test.refused("reward file missing", p, DATA, "gone.py")
    (s.dir / "syntax.py").write_text("def compute_score(:\n")
    p = run(*s.ppo("r", **{"reward.custom_reward_function.path": s.dir / "syntax.py"}), check=False)
    test("reward file with a syntax error", p.returncode in (OTHER, DATA) and "syntax.py" in p.stderr,
         f"{p.returncode} {p.stderr[-400:]}")
    (s.dir / "named.py").write_text("x = 1\n")
    p = run(*s.ppo("r", **{"reward.custom_reward_function.path": s.dir / "named.py"}), check=False)
    test("reward file without the function", p.returncode in (OTHER, DATA) and "compute_score" in p.stderr,
         f"{p.returncode} {p.stderr[-400:]}")
    rows = [dict(s.row(i), data_source="nobody/knows") for i in range(8)]
    s.write("unknown.jsonl", rows)
    p = run(*s.ppo("r", data__train_files=s.dir / "unknown.jsonl"), check=False)
    test.refused("no grader for the data source", p, DATA, "nobody/knows", "reward.grader=NAME")
    rows = [{**s.row(i), "reward_model": {"ground_truth": i}} for i in range(8)]
    p = run(*s.ppo("r", data__train_files=s.write("numbers.jsonl", rows)), check=False)
    test.refused("a ground truth that no grader reads: no sample has a score", p, OTHER, "none of the")
    test("and it is said", "ground_truth of data_source 'openai/gsm8k' is of another type" in p.stderr, p.stderr[-300:])


# ---- helpers and the machine ----

def check_helpers(s, test):
    m = pathlib.Path(shutil.copytree(s.dir / "model", s.dir / "endless"))
    config = json.loads((m / "tokenizer_config.json").read_text())
    config["chat_template"] = "".join(f"{{% for {i} in range(99999) %}}" for i in "ijk") + "{% endfor %}" * 3
    (m / "tokenizer_config.json").write_text(json.dumps(config))
    began = time.time()
    p = run(*s.ppo("endless-run", **{"actor_rollout_ref.model.path": m}), check=False, timeout=200)
    test("chat template without an end: killed, reported", p.returncode in (OTHER, DATA, DEADLINE) and "template" in p.stderr and
         p.stderr.count("error: ") == 1, f"exit {p.returncode} after {time.time() - began:.0f} s: {p.stderr[-400:]}")
    path = reward_file(s, "stuck", "time.sleep(1000)")
    began = time.time()
    p = run(*s.ppo("stuck", trainer__deadline=12, **{"reward.custom_reward_function.path": path, "reward.num_workers": 1}),
            check=False, timeout=100)
    test.refused("a stage without progress: the watchdog ends the run and names it", p, DEADLINE, "stage 'gen'", "trainer.deadline")
    test("a stage without progress: within its deadline", time.time() - began < 60)
    p = run(*s.ppo("no-python"), check=False, env={"VERLC_PYTHON": "/no/such/python"})
    test("no Python for the templates: says what to do", p.returncode == OTHER and p.stderr.count("error: ") == 1 and
         "/no/such/python" in p.stderr, f"{p.returncode} {p.stderr[-300:]}")
    p = run(*s.ppo("dead-python"), check=False, env={"VERLC_PYTHON": "/bin/false"})
    test("a helper that dies at its start: reported", p.returncode == OTHER and p.stderr.count("error: ") == 1 and
         "chat_template" in p.stderr, f"{p.returncode} {p.stderr[-300:]}")


def check_trackers(s, test):
    """A tracker that cannot write is dropped; the run goes on."""
    p = run(*s.ppo("tracked", trainer__total_training_steps=2), check=False, env={"VERL_FILE_LOGGER_PATH": "/dev/full"})
    test("a tracker on a full disk is dropped, the run goes on", p.returncode == 0 and
         p.stderr.count("tracker file stopped") == 1 and
         saved(s.dir / "tracked") == ["global_step_1", "global_step_2"], p.stderr[-400:])
    db = sqlite3.connect(s.dir / "tracked/run.db")
    test("the other trackers have every step", db.execute("select count(distinct step) from metrics").fetchone()[0] == 2)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        for check in (check_output, custom_function, check_numbers, check_checkpoints, check_foreign, check_rewards, check_helpers,
                      check_trackers):
            if len(sys.argv) < 2 or check.__name__ in sys.argv[1:] + ["check_output"]:
                check(s, test)
    test.end()


main()
