"""What the tests that drive the program share: a scratch directory with a tiny
model and data, the ppo command line, and a closing line. Run a test by hand with
VERLC=build/release/verlc python3 tests/fault/NAME_test.py. VERLC_TEST_DEVICE=cuda runs the tests of ranks (inv/inv11_*) on GPUs."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

VERLC = os.path.abspath(os.environ.get("VERLC", "build/release/verlc"))
ENV = {**os.environ, "VERLC_THREADS": os.environ.get("VERLC_THREADS", "1")}
ON_GPUS = os.environ.get("VERLC_TEST_DEVICE") == "cuda"


class Scratch:
    """A directory that is removed at the end, with model/ and data in it. small: an eleventh of the tiny model's parameters, a
    third of a run's CPU time, where a test needs no more of the model than that it is one."""

    def __init__(self, n_train=64, n_test=8, small=False):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="verlc-test-"))
        tiny = self.dir / ("tiny" if small else "model")
        run("model", "init", "--preset", "tiny", "--out", tiny, "--seed", "1")
        if small:
            shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            config = self.dir / "small.json"
            config.write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | shape))
            run("model", "init", "--arch", config, "--out", self.dir / "model", "--tokenizer", tiny, "--seed", "1")
        rows = [self.row(i) for i in range(n_train + n_test)]
        self.write("train.jsonl", rows[:n_train])
        self.write("test.jsonl", rows[n_train:])

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.check_metrics_explained()
            shutil.rmtree(self.dir, ignore_errors=True)
        else:
            print(f"left for inspection: {self.dir}", file=sys.stderr)

    def check_metrics_explained(self):
        """`verlc explain` knows every metric that a run of the test reported."""
        names = set()
        for f in self.dir.glob("**/metrics.jsonl"):
            lines = f.read_text().splitlines()
            names |= {n for line in lines[:1] + lines[-1:] if line.endswith("}") for n in json.loads(line)["data"]}
        if names:
            run("explain", *sorted(names))

    @staticmethod
    def row(i):
        a, b = i % 7, i % 5 + 1
        return {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
                "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": i, "split": "train"}}

    def write(self, name, rows):
        path = self.dir / name
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    def ppo(self, run_dir, **keys):
        """The arguments of a small GRPO run; keys with __ for dots override or add."""
        args = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": self.dir / "train.jsonl", "data.val_files": self.dir / "test.jsonl",
            "data.train_batch_size": 4, "data.max_prompt_length": 64, "data.max_response_length": 16,
            "actor_rollout_ref.model.path": self.dir / "model",
            "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
            "actor_rollout_ref.actor.optim.lr": 1e-4, "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1 if ON_GPUS else 4,
            "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.rollout.name": "verlc", "actor_rollout_ref.rollout.n": 2,
            "trainer.total_training_steps": 6, "trainer.save_freq": 1, "trainer.test_freq": -1,
            "trainer.val_before_train": False, "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1,
            "trainer.default_local_dir": self.dir / run_dir, "trainer.logger": "[console,file]",
        }
        args.update({k.replace("__", "."): v for k, v in keys.items()})
        return ["ppo"] + [f"{k}={v}" for k, v in args.items()]


def on_gpus(args):
    """With VERLC_TEST_DEVICE=cuda a command of CPU ranks takes GPUs, which ranks share where there are more of them."""
    return ["trainer.device=cuda" if ON_GPUS and str(a) == "trainer.device=cpu" else a for a in args]


def run(*args, check=True, timeout=300, env=None, **kw):
    """Runs the program to its end."""
    args = on_gpus(args)
    p = subprocess.run([VERLC, *map(str, args)], capture_output=True, text=True, timeout=timeout, env={**ENV, **(env or {})}, **kw)
    if check and p.returncode != 0:
        raise AssertionError(f"verlc {' '.join(map(str, args))}: exit {p.returncode}\n{p.stderr}")
    return p


def start(args, env=None, **kw):
    """Under way."""
    return subprocess.Popen([VERLC, *map(str, on_gpus(args))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            env={**ENV, **(env or {})}, **kw)


def waited(what, seconds=120):
    """Whether it came true; no deadline of the program, so one that a busy machine keeps."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return bool(what())
        time.sleep(0.005)
    return True


def patience(seconds):
    """A limit of the program: itself on a machine that has no more to do than `make test` gives it, at most three processes a core
    (mean of a minute); longer where others compute too."""
    return seconds * max(1, os.getloadavg()[0] / (3 * os.cpu_count()))


def met(attempt, tries=30):
    """attempt(i), until it gives something else than None: a moment of a run that came too late is tried again. What never
    comes because of a bug is None at last."""
    return next((got for got in map(attempt, range(tries)) if got is not None), None)


def is_pending(p, sig):
    """Two that come together are one."""
    try:
        masks = re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)$", pathlib.Path(f"/proc/{p.pid}/status").read_text(), re.M)
    except OSError:
        return False
    return any(int(m, 16) >> (sig - 1) & 1 for m in masks)


def reached(pid, sig):
    """Sends it; False: the process has ended, as one that starts another does."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return False
    return True


def had_ended(p, err, sig=signal.SIGTERM):
    """A run that was asked to stop when it had come to its end: it says so, or the signal met the default action."""
    return p.returncode == 0 or p.returncode == -sig and "\ndone: " in err


def has_gpu(model):
    """Whether `--device cuda` opens; trainer.device=cuda would go on without one."""
    p = run("generate", "--model", model, "--device", "cuda", check=False, input='{"ids": [5, 9], "max_tokens": 1}\n')
    return p.returncode == 0


class Tests:
    """Named checks in order; the first failure does not hide the others."""

    def __init__(self):
        self.passed, self.failed = 0, 0

    def __call__(self, name, ok, detail=""):
        print(("ok      " if ok else "FAILED  ") + name + ("" if ok or not detail else f": {detail}"), flush=True)
        if ok:
            self.passed += 1
        else:
            self.failed += 1

    def refused(self, name, p, status, *words):
        """The command ended with this status and one error line that has these words."""
        lines = [line for line in p.stderr.splitlines() if line.startswith("error: ")]
        self(name, p.returncode == status and len(lines) == 1 and all(w in lines[0] for w in words),
             f"exit {p.returncode}, wanted {status} and {words}: {p.stderr[-600:]}")

    def end(self):
        print(f"{self.passed} passed, {self.failed} failed")
        sys.exit(1 if self.failed or not self.passed else 0)


def at_once(*checks, threads=4):
    """check(test) of each, some at a time, for those that mostly wait and share nothing that they change: the sum."""
    test, parts = Tests(), [Tests() for _ in checks]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(check, part) for check, part in zip(checks, parts)]:
            done.result()
    test.passed, test.failed = sum(p.passed for p in parts), sum(p.failed for p in parts)
    return test


def undated(path):
    """A file's bytes, of trainer.json without the day on which the run began: two runs may have midnight between them."""
    data = path.read_bytes()
    return re.sub(rb'"template_date": *[0-9]+', b"", data) if path.name == "trainer.json" else data


def state(run_dir, step, parts=("actor",)):
    """The bytes that make up a run's state at a step."""
    d = pathlib.Path(run_dir) / f"global_step_{step}"
    weights = [f for p in parts for f in sorted((d / p).glob("*.safetensors"))]
    files = [*weights, *(d / f"optim/{p}.safetensors" for p in parts)]
    names = {f.name for f in weights}  # loaders read every such file of a directory without an index
    assert len(weights) >= len(parts) and all(n.startswith(("model", "adapter_model")) for n in names), files
    return {str(f.relative_to(d)): undated(f) for f in [*files, d / "trainer.json"]}


DIGITS_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the answer."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
'''


def series(run_dir, name):
    """A metric's values, step by step, from a run with the logger `file`."""
    lines = (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [d["data"][name] for d in map(json.loads, lines) if name in d["data"]]


def tensors(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:8 + n])
    return {k: (v["dtype"], v["shape"], raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]) for k, v in head.items()
            if k != "__metadata__"}


def save_tensors(path, parts):
    head, at = {}, 0
    for k, (dtype, shape, data) in parts.items():
        head[k] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(d for _, _, d in parts.values()))


def reward_dir(s, name, seed=5, model=None):
    """A random body, or that of a model in f32, with a random head, as ForSequenceClassification."""
    d = s.dir / name
    if model:
        shutil.copytree(model, d)
    else:
        run("model", "init", "--preset", "tiny", "--out", d, "--seed", str(seed), "--dtype", "fp32")
    config = json.loads((d / "config.json").read_text())
    head = config["architectures"][0].replace("CausalLM", "SequenceClassification")
    config |= {"architectures": [head], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (d / "config.json").write_text(json.dumps(config))
    parts = tensors(d / "model.safetensors")
    h = config["hidden_size"]
    parts["score.weight"] = ("F32", [1, h], struct.pack(f"{h}f", *(((i * 7919) % 101 - 50) / 25 for i in range(h))))
    save_tensors(d / "model.safetensors", parts)
    return d


def big_model(s):
    """The scratch's model at eight layers of 512: one whose memory can be told from the program's own."""
    config = json.loads((s.dir / "model/config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
               "num_key_value_heads": 2}
    config.pop("head_dim", None)
    (s.dir / "big.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / "big.json", "--out", s.dir / "big", "--tokenizer", s.dir / "model")
    return s.dir / "big"


def sft_refusals(s, test, model, device, tokens):
    """SFT keeps to trainer.device_memory_limit, refuses before it reads a weight, and names a change that does fit.
    tokens: of a micro-batch whose activations are a good part of the whole."""
    rows = s.write("one_sum.jsonl", [{"messages": [{"role": "user", "content": "1 + 1?"},
                                                   {"role": "assistant", "content": "2"}]}] * 8)
    unread = s.dir / "no_weights"
    shutil.copytree(model, unread, ignore=shutil.ignore_patterns("*.safetensors"))
    n_runs = iter(range(99))

    def sft(limit, **more):
        keys = {"model.path": model, "data.train_files": rows, "data.val_files": "[]", "data.train_batch_size": 4,
                "data.max_length": 128, "data.max_token_len_per_gpu": tokens, "trainer.total_training_steps": 1,
                "trainer.device_memory_limit": limit, "trainer.device": device, "trainer.logger": "[file]",
                "trainer.default_local_dir": s.dir / f"sft_{device}_{next(n_runs)}", **more}
        return run("sft", *[f"{k}={v}" for k, v in keys.items()], check=False)

    test.refused(f"sft on {device} keeps to trainer.device_memory_limit, before it reads the weights",
                 sft("1MiB", **{"model.path": unread}), 4, "GiB", "no smaller micro-batch fits", "lora_rank")
    keep = {"model.enable_gradient_checkpointing": False}
    least, most = (float(re.search(r"needs ([0-9.]+) GiB", sft("1MiB", **more).stderr)[1]) for more in ({}, keep))
    limit = f"{(least + most) / 2 * 1024:.0f}MiB"
    test.refused("sft: recomputing is the first change", sft(limit, **keep), 4, "model.enable_gradient_checkpointing=True", "fits")
    p = sft(limit)
    test("and it fits", p.returncode == 0, p.stderr[-600:])
    limit = f"{least * 0.9 * 1024:.0f}MiB"
    p = sft(limit)
    test.refused("sft: a smaller micro-batch is the next", p, 4, "data.max_token_len_per_gpu=", "fits")
    change = re.search(r"data.max_token_len_per_gpu=[0-9]+", p.stderr)[0].split("=")
    p = sft(limit, **{change[0]: change[1]})
    test("and that fits too", p.returncode == 0, p.stderr[-600:])
    p = sft(limit, **{"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 4, "data.max_length": 64,
                      "model.lora_rank": 4})
    test("an adapter fits", p.returncode == 0, p.stderr[-600:])


__all__ = ["DIGITS_REWARD", "Scratch", "Tests", "at_once", "had_ended", "has_gpu", "is_pending", "met", "patience", "reached",
           "reward_dir", "run", "save_tensors", "series", "sft_refusals", "start", "state", "signal", "tensors", "waited", "json",
           "VERLC"]
