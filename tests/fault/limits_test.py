"""Numbers, nesting and files beyond what there can be, through the program: refused at once, in one line that names them.
Every number of every command is walked in one process by unit/test_cmd_limits; these are samples."""

import os
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import VERLC, Scratch, Tests, run  # noqa: E402

USAGE, DATA, RESOURCES = 2, 3, 4
ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."


def numbers(s, test):
    for key, value in (("data.max_prompt_length", 2**63 - 1), (ACTOR + "ppo_max_token_len_per_gpu", 2**62),
                       (ROLLOUT + "val_kwargs.n", 1000000), (ROLLOUT + "top_k", 2**32 + 1), ("trainer.threads", 2**32 + 1),
                       ("reward.num_workers", 2**31), (ACTOR + "entropy_coeff", "nan"), (ACTOR + "kl_loss_coef", "inf"),
                       ("algorithm.kl_ctrl.kl_coef", "-inf"), (ACTOR + "policy_loss.clip_cov_lb", "nan")):
        p = run(*("plan", *s.ppo("run", **{key: value})[1:]), check=False, timeout=60)
        test.refused(f"plan: {key}={value}", p, USAGE, f"{key}=", "expected")
    p = run("plan", *s.ppo("run", data__max_response_length=2**24, **{ROLLOUT + "val_kwargs.n": 2**16})[1:], check=False)
    test("plan: the samples of a validation are in it", p.returncode == RESOURCES and "val_kwargs.n=65536" in p.stdout,
         p.stdout[-400:])
    p = run("plan", "--gpu", "80GB", *s.ppo("run", data__max_response_length=2**20, data__train_batch_size=2**20,
                                            **{ACTOR + "use_dynamic_bsz": True})[1:], check=False, timeout=60)
    test("plan of a GPU: the samples of a step are the host's", p.returncode == RESOURCES and
         "data.train_batch_size=1048576" in p.stdout and "host memory" in p.stdout, p.stdout[-400:])
    p = run(*s.ppo("run", data__val_files=s.dir / "train.jsonl", data__max_response_length=2**13, trainer__val_before_train=True,
                   trainer__device_memory_limit="12GiB", **{ROLLOUT + "val_kwargs.n": 2**15}), check=False, timeout=60)
    test.refused("ppo: a validation that its data's rows make too large", p, RESOURCES, "val_kwargs.n=32768")
    generate = ("generate", f"model.path={s.dir}/model", f"data.path={s.dir}/test.jsonl", f"data.output_path={s.dir}/o.jsonl")
    p = run(*generate, "rollout.response_length=9223372036854775807", check=False, timeout=60)
    test.refused("generate: rollout.response_length=2^63-1", p, USAGE, "rollout.response_length=", "expected")


def nesting(s, test):
    conf = s.dir / "conf"
    conf.mkdir()
    refused = [
        ("# @package with 200,000 parts", "# @package " + "a." * 200000 + "b\nc: 1\n", "over 32 parts"),
        ("a group with 400 parts", "defaults:\n  - x@" + "a." * 400 + "b: y\n", "over 32 parts"),  # YAML's keys are short
        ("a file at 200,000 parts", "defaults:\n  - x/y@" + "a." * 200000 + "b\n", "over 32 parts"),
        ("a file that includes itself 100 times", "defaults:\n" + "  - c\n" * 100, "include each other"),
        ("a mapping of 190,000 keys", "x:\n" + "".join(f"  k{i}: 1\n" for i in range(190000)), "over 4096 keys"),
        ("100,000 lists in each other", "x: " + "[" * 100000 + "]" * 100000 + "\n", "c.yaml"),
    ]
    (conf / "x").mkdir()
    (conf / "x/y.yaml").write_text("k: 1\n")
    for name, text, word in refused:
        (conf / "c.yaml").write_text(text)
        p = run("ppo", f"--config-path={conf}", "--config-name=c", check=False, timeout=60)
        test.refused("configuration: " + name, p, USAGE, word)
    for name, arg in (("a key of 200,000 parts", "+a" + ".a" * 60000 + "=1"), ("200,000 brackets", "+a=" + "[" * 100000)):
        p = run("ppo", arg, check=False, timeout=60)
        test("override: " + name, p.returncode == USAGE and p.stderr.startswith("error: "), p.stderr[:300])


def make(path, kind):
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return path


def files(s, test):
    conf = s.dir / "kinds"
    conf.mkdir()
    for kind in ("FIFO", "directory", "device"):
        make(conf / f"{kind}.yaml", kind)
        p = run("ppo", f"--config-path={conf}", f"--config-name={kind}", check=False, timeout=60)
        test.refused(f"a {kind} as configuration", p, USAGE, f"{kind}.yaml", kind)
        for ext in ("jsonl", "json", "parquet"):
            p = run(*s.ppo("run", data__train_files=make(s.dir / f"{kind}.{ext}", kind)), check=False, timeout=120)
            test.refused(f"a {kind} as {ext} data", p, DATA, f"{kind}.{ext}", kind)
        p = run(*s.ppo("run", reward__custom_reward_function__path=make(s.dir / f"{kind}.py", kind)), check=False, timeout=120)
        test.refused(f"a {kind} as a reward function", p, DATA, f"{kind}.py", kind)
        p = run(*s.ppo("run", algorithm__adv_estimator=f"{make(s.dir / f'{kind}.c', kind)}:f"), check=False, timeout=120)
        test.refused(f"a {kind} as an estimator", p, DATA, f"{kind}.c", kind)
        for name in ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json"):
            shutil.rmtree(s.dir / "m", ignore_errors=True)
            shutil.copytree(s.dir / "model", s.dir / "m")
            make(s.dir / "m" / name, kind)
            p = run("generate", "--model", s.dir / "m", check=False, input='{"prompt": "a", "max_tokens": 2}\n', timeout=60)
            test.refused(f"a {kind} as {name}", p, DATA, name)
    text = f"{VERLC} tokenize --model {s.dir / 'model'} --bench <(printf 'one line\\n')"
    p = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60)
    test("what the shell hands over as <(...) is read", p.returncode == 0 and "1 lines" in p.stdout, p.stderr)
    fifo = make(s.dir / "in", "FIFO")
    text = f"printf '{{\"ids\": [5], \"max_tokens\": 1}}\\n' > {fifo} & {VERLC} generate --model {s.dir / 'model'} < {fifo}"
    p = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60)
    test("standard input may be a FIFO", p.returncode == 0 and p.stdout.count("\n") == 1, p.stderr)


def main():
    test = Tests()
    with Scratch() as s:
        numbers(s, test)
        nesting(s, test)
        files(s, test)
    test.end()


main()
