"""What the tests that drive the program share: a scratch directory with a tiny
model and data, the ppo command line, and a closing line. Run a test by hand with
VERLC=build/release/verlc python3 tests/fault/NAME_test.py."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

VERLC = os.environ.get("VERLC", "build/release/verlc")
ENV = {**os.environ, "VERLC_THREADS": os.environ.get("VERLC_THREADS", "1")}


class Scratch:
    """A directory that is removed at the end, with model/ and data in it."""

    def __init__(self, n_train=64, n_test=8):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="verlc-test-"))
        run("model", "init", "--preset", "tiny", "--out", self.dir / "model", "--seed", "1")
        rows = [self.row(i) for i in range(n_train + n_test)]
        self.write("train.jsonl", rows[:n_train])
        self.write("test.jsonl", rows[n_train:])

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            shutil.rmtree(self.dir, ignore_errors=True)
        else:
            print(f"left for inspection: {self.dir}", file=sys.stderr)

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
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.rollout.name": "verlc", "actor_rollout_ref.rollout.n": 2,
            "trainer.total_training_steps": 6, "trainer.save_freq": 1, "trainer.test_freq": -1,
            "trainer.val_before_train": False, "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1,
            "trainer.default_local_dir": self.dir / run_dir, "trainer.logger": "[console,file]",
        }
        args.update({k.replace("__", "."): v for k, v in keys.items()})
        return ["ppo"] + [f"{k}={v}" for k, v in args.items()]


def run(*args, check=True, timeout=300, env=None, **kw):
    """Runs the program to its end."""
    p = subprocess.run([VERLC, *map(str, args)], capture_output=True, text=True, timeout=timeout, env={**ENV, **(env or {})}, **kw)
    if check and p.returncode != 0:
        raise AssertionError(f"verlc {' '.join(map(str, args))}: exit {p.returncode}\n{p.stderr}")
    return p


def start(args, **kw):
    return subprocess.Popen([VERLC, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV, **kw)


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


def state(run_dir, step, parts=("actor",)):
    """The bytes that make up a run's state at a step."""
    d = pathlib.Path(run_dir) / f"global_step_{step}"
    files = [f for p in parts for f in sorted((d / p).glob("*.safetensors"))]
    assert len(files) >= 2 * len(parts), files  # weights or an adapter, and the optimizer's state
    return {str(f.relative_to(d)): f.read_bytes() for f in [*files, d / "trainer.json"]}


DIGITS_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the answer."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
'''


def series(run_dir, name):
    """A metric's values, step by step, from a run with the logger `file`."""
    lines = (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [d["data"][name] for d in map(json.loads, lines) if name in d["data"]]


__all__ = ["DIGITS_REWARD", "Scratch", "Tests", "has_gpu", "run", "series", "start", "state", "signal", "json", "VERLC"]
