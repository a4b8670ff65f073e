"""Attacks resumes: short runs of ppo and sft on a tiny model go on with random changes of their keys, written in the ways that
users write them. Each key that has changed must be told, once, with both values; nothing else may be; a resume without a change
must have the bits of an unbroken run; another model or adapter must be refused; nothing may crash.

  python3 tools/attack/resume.py [--seed N] [--cases N]      (VERLC: the program, else build/release/verlc)"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import sqlite3
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
os.environ.setdefault("VERLC", str(TOP / "build/release/verlc"))
os.environ.setdefault("SOURCE_DIR", str(TOP))
sys.path.insert(0, str(TOP / "tests"))
from verlc_test import Scratch, Tests, run, state  # noqa: E402

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
STEPS = "trainer.total_training_steps"

# key -> values that a resume takes, as they are typed; "+": absent by default
PPO = {
    A + "optim.lr": ["1e-4", "5e-5", "0.001"], A + "optim.weight_decay": ["0.0", "0.1"],
    A + "optim.betas": ["[0.9,0.95]", "[0.8,0.99]"],
    A + "optim.lr_scheduler_type": ["cosine", "constant"], A + "optim.lr_warmup_steps": ["1", "2"],
    A + "optim.min_lr_ratio": ["0.1"],
    A + "grad_clip": ["0.5", "2", "inf"], A + "clip_ratio": ["0.1", "0.3"], A + "clip_ratio_low": ["0.1"],
    A + "clip_ratio_high": ["0.28"],
    A + "clip_ratio_c": ["10"],
    A + "entropy_coeff": ["0.001", "0.01"], A + "kl_loss_coef": ["0.01", "0.1"],
    A + "kl_loss_type": ["mse", "kl", "'low_var_kl+'"], A + "loss_agg_mode": ["seq-mean-token-sum", "seq-mean-token-mean"],
    A + "ppo_epochs": ["2"], A + "shuffle": ["True"], A + "ppo_mini_batch_size": ["4"],
    A + "policy_loss.loss_mode": ["gspo", "cispo"],
    "algorithm.gamma": ["0.99"], "algorithm.norm_adv_by_std_in_grpo": ["False"], "algorithm.adv_estimator": ["rloo"],
    "+algorithm.filter_groups.metric": ["acc"], "algorithm.kl_ctrl.kl_coef": ["0.01"],
    R + "n": ["4", "6"], R + "temperature": ["0.7", "1.1"], R + "top_p": ["0.9"], R + "top_k": ["50"], R + "max_num_seqs": ["4"],
    R + "val_kwargs.temperature": ["0.5"], R + "val_kwargs.n": ["2"], "+" + R + "min_p": ["0.05"],
    "+" + R + "repetition_penalty": ["1.1"],
    "data.max_response_length": ["4", "8"], "data.max_prompt_length": ["48"], "data.truncation": ["left"],
    "data.val_batch_size": ["1"],
    "+data.apply_chat_template_kwargs.enable_thinking": ["True", "False"],
    "reward.num_workers": ["1", "2"], "reward.on_error": ["drop_group"], "reward.timeout": ["20"],
    "+reward.source_weights.other": ["2"],
    "trainer.experiment_name": ["second", "'a b'", "\"7\""], "trainer.project_name": ["p2"], "trainer.seed": [],
    "trainer.threads": ["1", "2"], "trainer.save_freq": ["2"], "trainer.test_freq": ["2"], "trainer.deadline": ["600"],
    "trainer.max_actor_ckpt_to_keep": ["3"], "trainer.max_bad_steps": ["5"], "trainer.early_warnings": ["False"],
    "trainer.async_save": ["False", "True"], "trainer.logger": ["[file]", "[console]"], "trainer.recompute": ["layer", "none"],
    "trainer.critic_warmup": [], "+" + A + "grad_chunk": ["2"], "trainer.profile_steps": ["[3]"],
}
SFT = {
    "optim.lr": ["1e-4", "5e-5"], "optim.weight_decay": ["0.1"], "optim.betas": ["[0.9,0.99]"], "optim.clip_grad": ["0.5"],
    "optim.lr_scheduler_type": ["cosine"], "data.max_token_len_per_gpu": ["2048"], "data.max_length": ["48"],
    "trainer.threads": ["2"], "trainer.test_freq": ["2"], "trainer.max_bad_steps": ["4"], "trainer.experiment_name": ["again"],
    "+data.grad_chunk": ["2"], "trainer.max_ckpt_to_keep": ["3"], "trainer.logger": ["[file]"],
    "model.enable_gradient_checkpointing": ["False"],
}
# what changes nothing: noted and unknown keys, which are not told
NOISE = {"ppo": [A + "use_torch_compile=False", "+my.note=x", R + "mode=async", A + "strategy=fsdp2", R + "enforce_eager=True",
                 "data.dataloader_num_workers=3", "+trainer.colour=red", "trainer.resume_mode=auto",
                 "ray_kwargs.ray_init.num_cpus=4"],
         "sft": ["engine.use_torch_compile=False", "+my.note=x", "engine.strategy=fsdp", "trainer.resume_mode=auto"]}
# a key typed by an older name is told as the key that takes its value
OLDER = {"reward.num_workers": "reward_model.num_workers", "data.max_length": None}


def bare(key):
    return key.lstrip("+")


def told(text):
    return [(k, a, b) for _, k, a, b in re.findall(r"^changed since step (\d+): (\S+) (.*) -> (.*)$", text, re.M)]


class Program:
    """One of the two, with its keys before and at a resume."""

    def __init__(self, s, name, rows):
        self.s, self.name = s, name
        self.keys = PPO if name == "ppo" else SFT
        self.rows = rows

    def line(self, where, keys, extra=()):
        if self.name == "ppo":
            base = self.s.ppo(where, **{"data.max_response_length": 6, "trainer.save_freq": 1, "trainer.logger": "[console,file]"})
        else:
            base = ["sft", f"model.path={self.s.dir / 'model'}", f"data.train_files={self.rows}", f"data.val_files={self.rows}",
                    "data.train_batch_size=4", "trainer.save_freq=1", "trainer.test_freq=-1", "engine.dtype=float32",
                    f"trainer.default_local_dir={self.s.dir / where}"]
        given = {bare(k) for k in keys}
        kept = [a for a in base if a.split("=")[0] not in given]
        return [*kept, *(f"{k}={v}" for k, v in keys.items()), *extra]

    def values(self, args):
        """Every key of the resolved configuration, as --cfg job prints it."""
        import yaml
        tree = yaml.safe_load(run(*args, "--cfg", "job").stdout)
        flat = {}

        def walk(at, v):
            if isinstance(v, dict) and v:
                for k, x in v.items():
                    walk(f"{at}.{k}" if at else str(k), x)
            else:
                flat[at] = v
        walk("", tree)
        return flat


def pick(r, keys, n):
    names = r.sample([k for k in keys if keys[k]], n)
    return {k: r.choice(keys[k]) for k in names}


def typed(r, keys):
    """The same keys, some by an older name."""
    return {OLDER[k] if OLDER.get(k) and r.random() < 0.5 else k: v for k, v in keys.items()}


def same(a, b):
    """Whether two typed values mean the same."""
    def plain(x):
        x = x.strip("'\"")
        try:
            return float(x)
        except ValueError:
            return x.lower().replace(" ", "")
    return plain(a) == plain(b)


def changed_case(r, test, p, number):
    """Random keys before; random ones changed, added and left out at the resume; the lines against what was typed."""
    where = f"{p.name}_{number}"
    before = pick(r, p.keys, r.randrange(0, 5))
    after = dict(before)
    for k in r.sample(sorted(before), r.randrange(0, len(before) + 1)):
        if r.random() < 0.5:
            del after[k]
        else:
            after[k] = r.choice(p.keys[k])
    after.update(pick(r, p.keys, r.randrange(0, 6)))
    noise = r.sample(NOISE[p.name], r.randrange(0, 4))
    first = run(*p.line(where, {**typed(r, before), STEPS: 1}), check=False)
    if first.returncode != 0:
        return test(f"{where}: the first run", False, f"{before}: {first.stderr[-800:]}")
    again = run(*p.line(where, {**typed(r, after), STEPS: 2}, noise), check=False)
    lines = told(again.stderr)
    want = {bare(k) for k in {*before, *after} if not (k in before and k in after and same(before[k], after[k]))} | {STEPS}
    defaults = [k for k in want if is_default(p, k, before, after)]
    want -= set(defaults)
    keys = [k for k, _, _ in lines]
    ok = again.returncode == 0 and sorted(keys) == sorted(want) and all(a != b for _, a, b in lines)
    test(f"{where}: {len(want)} keys told", ok, f"before {before}\nafter {after} {noise}\nwant {sorted(want)}\ntold {lines}\n"
         f"exit {again.returncode} {again.stderr[-600:] if again.returncode else ''}")
    with sqlite3.connect(p.s.dir / where / "run.db") as db:
        events = [m for m, in db.execute("SELECT message FROM events WHERE kind='changed'")]
    if events != re.findall(r"^changed since step .*$", again.stderr, re.M):
        test(f"{where}: run.db has the lines", False, events)
    shutil.rmtree(p.s.dir / where)
    return None


DEFAULTS = {}


def is_default(p, key, before, after):
    """Whether a key that was set on one side only has there the value that it has without."""
    if not DEFAULTS.get(p.name):
        DEFAULTS[p.name] = p.values(p.line("none", {}))
    own = [d[k] for d in (before, after) for k in d if bare(k) == key]
    if key not in DEFAULTS[p.name] or len(own) != 1:
        return False
    v = DEFAULTS[p.name][key]
    text = str(v).replace("None", "null")
    return same(own[0], text)


def unchanged_case(r, test, p, number):
    """Broken off after step 1, gone on with the same keys in another order and spelling: the bits of an unbroken run, no line."""
    where = f"{p.name}_same_{number}"
    keys = {**pick(r, p.keys, r.randrange(0, 6)), "trainer.save_freq": 1, STEPS: 3}
    whole = run(*p.line(where, keys), check=False)
    if whole.returncode != 0:
        return test(f"{where}: the whole run", False, f"{keys}: {whole.stderr[-800:]}")
    d = p.s.dir / where
    bits = state(d, 3)
    for step in (2, 3):
        shutil.rmtree(d / f"global_step_{step}", ignore_errors=True)
    (d / "latest_checkpointed_iteration.txt").write_text("1")
    items = list(keys.items())
    r.shuffle(items)
    again = run(*p.line(where, typed(r, dict(items)), r.sample(NOISE[p.name], r.randrange(0, 4))), check=False)
    test(f"{where}: no line, the same bits", again.returncode == 0 and not told(again.stderr) and
         "continuing from step 1" in again.stderr and state(d, 3) == bits, f"{keys} {told(again.stderr)} {again.stderr[-600:]}")
    shutil.rmtree(d)
    return None


def forbidden_case(r, test, p, number):
    """What a resume refuses: another model, an adapter of another kind."""
    where, model = f"{p.name}_no_{number}", M if p.name == "ppo" else "model."
    lora = {model + "lora_rank": r.choice([2, 4]), model + "lora_alpha": 8}
    other = p.s.dir / f"other_{number}"
    run("model", "init", "--preset", "tiny", "--out", other, "--seed", str(r.randrange(2, 99)))
    kinds = [({}, {model + "path": other}, "not the model"), ({}, lora, "all weights"), (lora, {}, "all weights"),
             (lora, {**lora, model + "lora_rank": 8}, "rank"), (lora, {**lora, model + "lora_alpha": 16}, "alpha"),
             (lora, {**lora, model + "target_modules": "[q_proj]"}, "modules")]
    before, after, word = r.choice(kinds)
    run(*p.line(where, {**before, STEPS: 1}))
    files = state(p.s.dir / where, 1)
    again = run(*p.line(where, {**after, STEPS: 2}), check=False)
    test.refused(f"{where}: {word}", again, 3, word)
    test(f"{where}: the checkpoint is as it was", state(p.s.dir / where, 1) == files and
         not (p.s.dir / where / "global_step_2").exists())
    shutil.rmtree(p.s.dir / where)


def damaged_case(r, test, p, number):
    """A config.yaml or trainer.json of another make, with checksums that hold: told or said, never a crash."""
    where = f"{p.name}_odd_{number}"
    run(*p.line(where, {STEPS: 1}))
    d = p.s.dir / where / "global_step_1"
    text = r.choice(["", "[]", "a: {b: 1}\n", "actor_rollout_ref: 7\ntrainer: []\n", "x: ${y}\n",
                     "data: {max_response_length: ${a}}\n", "optim: {lr: [1]}\n", "trainer: {seed: .nan, threads: 'x'}\n",
                     "a: &x [*x]\n", "\x00", "reward: {num_workers: null}"])
    (d / "config.yaml").write_text(text)
    trainer = json.loads((d / "trainer.json").read_text())
    trainer["models"] = r.choice([None, [], {"model.path": 3}, {}, "x", {M + "path": ""}, trainer["models"]])
    trainer["config_name"] = r.choice([None, "sft_trainer", "nothing", trainer["config_name"]])
    (d / "trainer.json").write_text(json.dumps(trainer))
    seal(d, "config.yaml", "trainer.json")
    again = run(*p.line(where, {STEPS: 2}), check=False)
    test(f"{where}: {text!r}", again.returncode in (0, 3) and (again.returncode == 0 or "not the model" in again.stderr or
                                                             "expected" in again.stderr),
         f"exit {again.returncode} {again.stderr[-800:]}")
    shutil.rmtree(p.s.dir / where)


def seal(d, *names):
    """The manifest with these files' sums, by the library that the program has too."""
    import ctypes

    class Sum(ctypes.Structure):
        _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]
    xxh = ctypes.CDLL("libxxhash.so.0").XXH3_128bits
    xxh.argtypes, xxh.restype = [ctypes.c_char_p, ctypes.c_size_t], Sum
    manifest = json.loads((d / "manifest.json").read_text())
    for name in names:
        data = (d / name).read_bytes()
        h = xxh(data, len(data))
        manifest["files"][name] = {"bytes": len(data), "xxh3_128": f"{h.high:016x}{h.low:016x}"}
    (d / "manifest.json").write_text(json.dumps(manifest))


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--seed", type=int, default=int(time.time()))
    a.add_argument("--cases", type=int, default=60)
    a = a.parse_args()
    test, r = Tests(), random.Random(a.seed)
    print(f"seed {a.seed}")
    with Scratch(n_train=16, n_test=2) as s:
        rows = s.write("sums.jsonl", [{"messages": [{"role": "user", "content": f"{i} + 1?"},
                                                    {"role": "assistant", "content": str(i + 1)}]} for i in range(16)])
        programs = [Program(s, "ppo", rows), Program(s, "ppo", rows), Program(s, "sft", rows)]
        for i in range(a.cases):
            case = r.choices([changed_case, unchanged_case, forbidden_case, damaged_case], [6, 2, 1, 1])[0]
            case(r, test, r.choice(programs), i)
    test.end()


main()
