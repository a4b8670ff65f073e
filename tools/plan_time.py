"""The time plan beside what a run takes: `verlc plan --probe` of a recipe, then `verlc ppo` with the same keys for some more
steps, phase by phase.  Random weights; every response has the full length.

  python3 tools/plan_time.py [recipe1] [recipe2] [cpu1] [cpu2]
      recipe1, recipe2: those of docs/performance.md, on a GPU (some 2 and 7 minutes on an H200)
      cpu1, cpu2: the same keys scaled to a CPU (default; a minute each on two cores)

STEPS=N: steps of the run.  ROUNDS=N: so often both in turns, judged by their means (where other programs are busy, a machine's
speed changes by more than 10 % from minute to minute).  SHARED_DATA=DIR holds GSM8K and the real tokenizers; without it the data
are arithmetic problems.
VERLC_THREADS and taskset hold for both.  Exit status 1: a predicted step is more than 10 % off the measured one."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

VERLC = os.environ.get("VERLC", "build/release/verlc")
DATA = pathlib.Path(os.environ.get("SHARED_DATA", "../shared/data"))
BAR = 0.10


class Recipe:
    """What a recipe's command has; shape: prompts, samples of each, mini-batch and micro-batch."""

    def __init__(self, arch, device, shape, response, steps, test_freq, val, save_freq):
        self.arch, self.device, self.shape, self.response, self.steps = arch, device, shape, response, steps
        self.test_freq, self.val, self.save_freq = test_freq, val, save_freq


RECIPES = {
    "recipe1": Recipe("qwen2.5-0.5b", "cuda", (16, 5, 16, 4), 1024, 16, 5, 320, 8),
    "recipe2": Recipe("qwen3-1.7b", "cuda", (240, 3, 80, 20), 1024, 5, 5, 240, 0),
    "cpu1": Recipe("tiny", "cpu", (16, 5, 16, 4), 128, 12, 5, 64, 6),
    "cpu2": Recipe("tiny", "cpu", (48, 3, 16, 4), 128, 8, 5, 64, 0),
}


def call(*args):
    p = subprocess.run([VERLC, *map(str, args)], stdout=subprocess.PIPE, text=True)
    if p.returncode:
        sys.exit(f"verlc {args[0]}: exit {p.returncode}")
    return p.stdout


def make_inputs(r, d):
    """A model and data in d."""
    packed = DATA / "tokenizers" / ("qwen3" if r.arch.startswith("qwen3") else "qwen2_5")
    extra = []
    if r.device == "cuda" and packed.is_dir():
        (d / "tokenizer").mkdir()
        for f in packed.glob("*.xz"):
            (d / "tokenizer" / f.stem).write_bytes(subprocess.run(["xz", "-dc", f], stdout=subprocess.PIPE, check=True).stdout)
        extra = ["--tokenizer", d / "tokenizer"]
    shape = ["--preset", "tiny"] if r.arch == "tiny" else ["--arch", r.arch]
    call("model", "init", *shape, "--out", d / "model", "--seed", 1, *extra)
    if r.device == "cuda" and (DATA / "gsm8k").is_dir():
        call("data", "gsm8k", "--local_dataset_path", DATA / "gsm8k", "--local_save_dir", d / "data")
        return "parquet"
    call("data", "arith", "--out", d / "data", "--n-train", 2000, "--n-test", 400, "--format", "jsonl")
    return "jsonl"


def keys(r, d, kind, steps):
    a, o = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    batch, n, mini, micro = r.shape
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={d}/data/train.{kind}", f"data.val_files={d}/data/test.{kind}",
        f"data.train_batch_size={batch}", f"data.val_max_samples={r.val}", "data.max_prompt_length=512",
        f"data.max_response_length={r.response}", "data.filter_overlong_prompts=True", f"actor_rollout_ref.model.path={d}/model",
        f"{a}optim.lr=1e-6", f"{a}ppo_mini_batch_size={mini}", f"{a}ppo_micro_batch_size_per_gpu={micro}", f"{a}use_kl_loss=True",
        f"{a}kl_loss_coef=0.001", f"{a}kl_loss_type=low_var_kl", "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{o}name=vllm", f"{o}n={n}", f"{o}ignore_eos=True", f"{o}log_prob_micro_batch_size_per_gpu={2 * micro}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={2 * micro}", f"{o}gpu_memory_utilization=0.7",
        f"trainer.total_training_steps={steps}", "trainer.val_before_train=False", f"trainer.test_freq={r.test_freq}",
        f"trainer.save_freq={r.save_freq}", "trainer.max_actor_ckpt_to_keep=1", "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={d}/run", "trainer.logger=[file]", f"trainer.device={r.device}"]


def compare(name, r):
    """Prints a round; the predicted step and the measured one, seconds."""
    steps = int(os.environ.get("STEPS", r.steps))
    with tempfile.TemporaryDirectory(dir=os.environ.get("OUT_DIR")) as tmp:
        d = pathlib.Path(tmp)
        args = keys(r, d, make_inputs(r, d), steps)
        plan = json.loads(call("plan", "--probe", "--json", *args))
        start = time.time()
        call("ppo", *args)
        wall = time.time() - start
        lines = [json.loads(x)["data"] for x in (d / "run/metrics.jsonl").read_text().splitlines()]
    print(f"{name}: {plan['device']}; probe of 3 steps, run of {steps}")
    print(f"  {'':<28} {'predicted':>10} {'measured':>10}")

    def line(what, predicted, measured):
        print(f"  {what:<28} {predicted:>8.3g} s {measured:>8.3g} s {(predicted / measured - 1) * 100 if measured else 0:>+7.1f} %")

    def mean(metric):
        found = [x[metric] for x in lines[1:] if metric in x]
        return sum(found) / len(found) if found else 0

    for phase in ("gen", "ref", "update_actor"):
        line(phase, plan["phases"][phase]["mean"], mean(f"timing_s/{phase}"))
    line("step", plan["step"] - plan["phases"]["between phases"]["mean"], mean("timing_s/step"))
    spread = [x["timing_s/step"] for x in lines[1:]]
    probed, made = (" ".join(f"{x:.3g}" for x in of) for of in (plan["steps"][1:], spread))
    print(f"  steps but the first: probe {probed}; run {made}")
    line("first step", plan["steps"][0], lines[0]["timing_s/step"])
    if plan["validation"]["seconds"]:
        line("validation pass", plan["validation"]["seconds"], mean("timing_s/testing"))
    if plan["checkpoint"]["seconds"]:
        line("checkpoint, wait", plan["checkpoint"]["waits"], mean("timing_s/save_checkpoint"))
    line("the whole run", plan["run"]["seconds"], wall)
    return plan["step"] - plan["phases"]["between phases"]["mean"], mean("timing_s/step")


def judge(name):
    rounds = [compare(name, RECIPES[name]) for _ in range(int(os.environ.get("ROUNDS", 1)))]
    predicted, measured = (sum(x) / len(rounds) for x in zip(*rounds))
    off = predicted / measured - 1
    print(f"{name}: a step of {predicted:.3g} s predicted, {measured:.3g} s measured, {off * 100:+.1f} %: "
          f"{'within' if abs(off) <= BAR else 'NOT within'} {BAR * 100:.0f} %", flush=True)
    return abs(off) <= BAR


def main():
    names = sys.argv[1:] or ["cpu1", "cpu2"]
    unknown = [n for n in names if n not in RECIPES]
    if unknown:
        sys.exit(f"{unknown[0]}: no such recipe; there are {', '.join(RECIPES)}")
    sys.exit(0 if all([judge(n) for n in names]) else 1)


main()
