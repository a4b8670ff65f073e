"""`make bench-ranks`: what several GPUs of one host bring, each figure beside its bar, and that results do not depend on them.

Rows: links, hashes, start, recipe1, recipe2, 7b, update, decode, checkpoint, kills.  `recipe1` and `recipe2` are the recipes of
docs/performance.md on one GPU, on all, and on all with as many times the prompts.  `7b` is Qwen2.5-7B with a reference.  `hashes`
takes three steps of GRPO and PPO at full length on one GPU and on all, in every layout and with pools, and compares
checkpoints, metrics and samples; and a fully asynchronous run with its replay on one GPU.  `kills` ends a rank with SIGKILL at
random moments until each stage was hit, and compares what the resumed runs save.

  python tools/bench_ranks.py [ROW...] [--ranks N] [--one-done] [--model ARCH] [--device cpu]

--one-done: the recipes' runs on one GPU that an earlier call left in OUT_DIR count (a call with --ranks 1 makes these alone).
--ranks: all GPUs; more than there are share them (trainer.ranks), and then only hashes and kills say something.  --model: of
`hashes`, this one only.  --device cpu: a tiny model on CPU ranks, which share the cores: the rates say nothing, hashes and kills
do.
SHARED_DATA=DIR holds GSM8K and the real tokenizers.  Writes build/bench/ranks.json (tools/figures.py), which `make performance
FIGURES=build/bench/ranks.json` takes into docs/performance.md.  Exit status 1: a bar was missed, a run failed or results differ."""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(__file__).resolve().parent.parent / "tests")]
import bench_gpu_peers as one  # noqa: E402
from ranks import below, metrics, samples  # noqa: E402
from verlc_test import DIGITS_REWARD  # noqa: E402

VERLC, OUT, DATA, FIGURES, say = one.VERLC, one.OUT, one.DATA, one.FIGURES, one.say
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
WEAK = {"recipe 1": {2: 95, 4: 92}, "recipe 2": {2: 96, 4: 94}}
STRONG = {2: 20.0, 4: 11.5}
EXACT = {"qwen2.5-0.5b": 5, "qwen3-1.7b": 3, "qwen2.5-7b": 3}
PHASES = ("gen", "old_log_prob", "ref", "update_actor")
# Samples, tokens of a prompt, tokens that are drawn; LARGE: with four GPUs or more alone
DECODE = (("qwen3-1.7b", 80, 128, 256), ("qwen2.5-7b", 80, 128, 64), ("qwen3-30b-a3b", 80, 128, 64), ("qwen2.5-32b", 512, 128, 64))
LARGE = ("qwen2.5-32b",)


def gpus():
    """How many there are."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    return len([line for line in listed.splitlines() if line])


def row(name, what, ours, **more):
    FIGURES.add(f"ranks/{name}", what, ours, **more)
    say(f"{what}: {ours:.4g} {more.get('unit', '')}")


def same(what, differs):
    """A comparison: as a row, how many things differ."""
    say(f"{what}: {differs or 'equal'}")
    return bool(differs)


# ---- runs ----


class Bench:
    def __init__(self, args):
        self.n, self.device, self.one_done, self.failed = args.ranks, args.device, args.one_done, 0
        self.gpus = "CPU ranks" if args.device == "cpu" else f"ranks that share {gpus()} GPU" if args.ranks > gpus() else "GPUs"
        self.archs = [args.model] if args.model else ["qwen2.5-0.5b", "qwen3-1.7b"][:2 if args.device == "cuda" else 1]
        self.data, self.scorer = OUT / "gsm8k", OUT / "digits.py"
        self.scorer.write_text(DIGITS_REWARD)  # random weights earn no other reward, and without one all gradients are 0
        if not (self.data / "train.parquet").exists():
            one.call("data", "gsm8k", "--local_dataset_path", DATA / "gsm8k", "--local_save_dir", self.data)

    def model(self, arch):
        if self.device == "cuda":
            return one.model(arch)
        path = OUT / "tiny"
        if not path.exists():
            one.call("model", "init", "--preset", "tiny", "--out", path, "--seed", 1)
        return path

    def ranks(self, n, pool="trainer"):
        if self.gpus != "GPUs":
            return [f"{pool}.ranks={n}"]
        return [f"{pool}.nnodes=1", f"{pool}.n_gpus_per_node={n}"]

    def command(self, arch, run, shape, n, steps, *more):
        """shape: prompts, samples of each, prompts of a mini-batch, samples of a micro-batch."""
        own = ("trainer.n_gpus_per_node", "trainer.device", "trainer.profile", "actor_rollout_ref.model.path")
        keys = [k for k in one.recipe(self.model(arch).name, self.data, run, *shape, steps) if not k.startswith(own)]
        keys += [f"actor_rollout_ref.model.path={self.model(arch)}", f"trainer.device={self.device}",
                 f"reward.custom_reward_function.path={self.scorer}", *self.ranks(n)]
        if self.device == "cpu":
            keys += ["data.max_response_length=64", f"{R}gpu_memory_utilization=0.1", "reward.num_workers=2"]
        return ["ppo", *keys, *more]

    def run(self, name, command, fresh=True):
        """To its end: the metrics of its steps, the seconds to the end of the first, what it said."""
        run = pathlib.Path(next(k for k in command if k.startswith("trainer.default_local_dir=")).split("=", 1)[1])
        if fresh:
            shutil.rmtree(run, ignore_errors=True)
        first, begun, out = None, time.time(), OUT / f"{run.name}.log"
        with open(out, "w") as log:
            p = subprocess.Popen([VERLC, *map(str, command)], stdout=subprocess.DEVNULL, stderr=log)
            while p.poll() is None:
                if first is None and lines(run):
                    first = time.time() - begun
                time.sleep(0.02)
        if p.returncode:
            say(f"{name}: exit {p.returncode}\n{out.read_text()[-2000:]}")
            self.failed += 1
            return [], 0, ""
        done = [json.loads(x)["data"] for x in lines(run)]
        steps, memory = " ".join(f"{x['timing_s/step']:.2f}" for x in done), max(x["perf/memory_of_plan"] for x in done)
        say(f"  {name}: steps of {steps} s, the last {phases(done[-1])}; command to the first {first or time.time() - begun:.1f} "
            f"s, memory {memory:.1%} of the plan")
        return done, first or time.time() - begun, out.read_text()


def lines(run):
    log = run / "metrics.jsonl"
    return [x for x in log.read_text().split("\n")[:-1] if x] if log.exists() else []


def phases(done):
    return ", ".join(f"{k} {done[f'timing_s/{k}']:.2f}" for k in PHASES if done.get(f"timing_s/{k}", 0) >= 0.005)


def step(done):
    """The median, without the first step."""
    return statistics.median(x["timing_s/step"] for x in done[1:] or done)


# ---- rows ----


def links(b):
    """What an update moves, by every way there is."""
    for way in ("peers", "nccl", "host") if b.device == "cuda" else ("host",):
        p = subprocess.run([VERLC, "netcheck", "--ranks", str(b.n), "--device", b.device, "--json"], capture_output=True,
                           text=True, timeout=120, env={**os.environ, "VERLC_GROUP": way})
        if p.returncode:
            say(f"links by {way}: {p.stderr[-500:]}")
            continue
        for d in (found := json.loads(p.stdout.splitlines()[-1]))["devices"]:
            say(f"  {way}: {json.dumps(d)}")
        if way != "host":
            d = found["devices"][-1]
            row(f"links/{way}", f"fold of {d['bytes'] >> 20} MiB of gradients between {b.n} {b.gpus}, by {way}", 1e3 * d["fold_s"],
                unit="ms", lower=True)


def recipe(b, name, arch, shape, steps, strong_bar=None):
    key, (prompts, n, mini, micro) = name.replace(" ", ""), shape
    alone = [json.loads(x)["data"] for x in lines(OUT / f"{key}_one")] if b.one_done else []
    if len(alone) != steps:
        alone, _, _ = b.run(f"{name} on one", b.command(arch, OUT / f"{key}_one", shape, 1, steps))
    if b.n == 1:
        return
    strong, first, _ = b.run(f"{name} on {b.n}", b.command(arch, OUT / f"{key}_strong", shape, b.n, steps))
    weak, _, _ = b.run(f"{name} on {b.n}, {b.n} times the prompts", b.command(
        arch, OUT / f"{key}_weak", (prompts * b.n, n, mini * b.n, micro), b.n, steps))
    if alone and strong:
        row(f"{key}/strong", f"GRPO step, {name}, {b.n} {b.gpus} ({phases(strong[-1])})", step(strong), unit="s", lower=True,
            bar=strong_bar, peers=[("one GPU", step(alone), True)])
    if alone and weak:
        row(f"{key}/weak", f"{name}, {b.n} times the prompts on {b.n} {b.gpus}, median of {max(len(weak) - 1, 1)} steps "
            f"({phases(weak[-1])}): of one's rate", 100 * step(alone) / step(weak), unit="%", bar=WEAK[name].get(b.n))
        row(f"{key}/plan", f"{name} on {b.n} {b.gpus}: the largest rank's memory beside its plan",
            100 * max(x["perf/memory_of_plan"] for x in weak), unit="%")


def recipe1(b):
    recipe(b, "recipe 1", "qwen2.5-0.5b", (16, 5, 16, 4), 15)


def recipe2(b):
    recipe(b, "recipe 2", "qwen3-1.7b", (240, 3, 80, 20), 3, STRONG.get(b.n))


def seven(b):
    """128 x 8 on four, half on two."""
    prompts = 32 * b.n
    short = ["data.max_prompt_length=128", "data.truncation=left", "trainer.save_freq=3"]
    done, _, _ = b.run("7b", b.command("qwen2.5-7b", OUT / "seven", (prompts, 8, prompts // 2, 8), b.n, 3, *short))
    if done:
        tokens = statistics.median(x["perf/total_num_tokens"] for x in done[1:])
        row("7b", f"Qwen2.5-7B, {prompts} x 8, 128 + 1024, {b.n} {b.gpus}, with KL ({phases(done[-1])}): prompt and response",
            tokens / step(done) / b.n, unit="tokens/s/GPU", bar=6500 if b.n == 4 else None)
        row("7b/save", f"checkpoint of 7B on {b.n} {b.gpus}: what the run waits", done[-1]["timing_s/save_checkpoint"], unit="s",
            lower=True, bar=0.5)


def start(b):
    done, first, _ = b.run("start", b.command("qwen2.5-0.5b", OUT / "start", (16, 5, 16, 4), b.n, 1))
    if done:
        row("start", f"0.5B on {b.n} {b.gpus}: command to the end of the first step", first, unit="s", lower=True, bar=15)


def update(b):
    """What it costs that no result depends on the number of ranks."""
    for arch, bar in EXACT.items():
        path = b.model(arch)
        p = one.call("bench", "update", "--model", path, "--ranks", b.n, "--device", b.device, "--batch", 16 * b.n,
                     "--len", 1024 if b.device == "cuda" else 64, "--micro", 4, "--json")
        found = json.loads(p.stdout.splitlines()[-1])
        say(f"  update, {arch}: {p.stdout.splitlines()[-1][:400]}")
        each, one_exchange = (c["seconds"] for c in found["chunks"])
        row(f"update/{arch}", f"update of {arch} on {b.n} {b.gpus}: what it takes more than one exchange a step",
            100 * (each / one_exchange - 1), unit="%", lower=True, bar=bar)
        if b.device == "cpu":
            return


def decode(b):
    """Ranks that generate together, by each way of their gathers: what of a step is no kernel of the model, and the share of all
    their GPUs' memory bandwidth; those with experts have some of them each."""
    shapes = [("tiny", 4, 8, 32)] if b.device == "cpu" else [s for s in DECODE if b.n >= 4 or s[0] not in LARGE]
    say(f"  {'model, samples, ranks, gathers':60s} {'tokens/s':>9s} {'step ms':>9s} {'kernels':>9s} {'other':>6s} {'roofline':>8s}")
    for arch, batch, prompt, length in shapes:
        path = b.model(arch)
        for n in sorted({1, 2, 4, b.n} if b.device == "cuda" else {1, b.n}):
            for way in ("host",) if b.device == "cpu" or n == 1 else ("", "peers", "nccl"):
                decode_one(b, path, n, way, "--batch", batch, "--prompt", prompt, "--len", length)


def decode_one(b, path, n, way, *sizes):
    """way: of the gathers, "": the one that runs take."""
    args = ("bench", "decode", "--model", path, "--ranks", n, "--device", b.device, *sizes, "--json")
    p = subprocess.run([VERLC, *map(str, args)], capture_output=True, text=True, timeout=900,
                       env={**os.environ, "VERLC_GROUP": way})
    if p.returncode:
        say(f"  {path.name}, {n} ranks, {way}: {p.stderr.strip()[-300:]}")
        return
    d = json.loads(p.stdout.splitlines()[-1])
    step, kernels, share = 1e3 * d["step_seconds"], d["kernel_seconds"], d["roofline_seconds"] / d["step_seconds"]
    other = f"{1e3 * kernels:9.3f} {1 - 1e3 * kernels / step:6.1%}" if kernels else f"{'':16s}"
    say(f"  {f'{path.name}, {sizes[1]}, {n}, ' + d['way']:60s} {d['tokens_per_s']:9.0f} {step:9.3f} {other} {share:8.1%}")
    if way or n > gpus():
        return
    name = f"decode/{path.name}/{n}"
    alone = next((r["ours"] for r in FIGURES.rows if r["id"] == f"ranks/decode/{path.name}/1"), None)
    who = f"{n} {b.gpus} together" if n > 1 else "one GPU"
    row(name, f"decoding of {path.name}, {sizes[1]} samples, {who} ({share:.0%} of the memory bandwidth)",
        d["tokens_per_s"], unit="tokens/s", peers=[("one GPU", alone, True)])
    if path.name in LARGE and n == 4:
        row(f"{name}/roofline", f"decoding of {path.name}, {sizes[1]} samples, {n} {b.gpus}: of their roofline", 100 * share,
            unit="%", bar=60)


def checkpoint(b):
    p = one.call("bench", "checkpoint", "--model", b.model("qwen2.5-0.5b"), "--dir", OUT, "--device", b.device)
    say("  " + p.stdout.strip().replace("\n", "\n  "))


def saved(run, at):
    """Of a checkpoint, the hash of each file that does not name the run."""
    files = json.loads((run / f"global_step_{at}/manifest.json").read_text())["files"]
    return {k: v for k, v in files.items() if not k.endswith("config.yaml")}


def differs(a, b, at):
    if not all(m["actor/grad_norm"] > 0 for m in metrics(a)):
        return "nothing is learned"
    for what, f in (("files", lambda d: saved(d, at)), ("metrics", metrics), ("samples", samples)):
        if not f(a) or f(a) != f(b):
            return f"{what} differ"
    return ""


def replayed(b, arch, keys):
    """Whether a fully asynchronous run, of which one rank generates, has other weights than its replay on one rank."""
    fully = ["--config-name=fully_async_ppo_trainer", "data.train_batch_size=0", "rollout.total_rollout_steps=48",
             "async_training.trigger_parameter_sync_step=2", "async_training.staleness_threshold=0.5",
             "actor_rollout_ref.hybrid_engine=False", f"{A}use_kl_loss=False", *keys]
    record, replay = (OUT / f"hashes_{arch}_fully_async_{x}" for x in ("record", "replay"))
    done = b.run(f"{arch}, fully asynchronous", b.command(arch, record, (16, 5, 8, 2), b.n - 1, 3, *fully,
                                                          *b.ranks(1, "rollout")))[0]
    done = done and b.run(f"{arch}, its replay on one", b.command(arch, replay, (16, 5, 8, 2), 1, 3, *fully,
                                                                  f"async_training.replay={record}"))[0]
    why = "it failed"
    if done:
        weights = [{k: v for k, v in saved(run, 3).items() if k.endswith(".safetensors")} for run in (record, replay)]
        why = "" if weights[0] and weights[0] == weights[1] else "weights differ"
        why = why or ("" if samples(record) == samples(replay) else "samples differ")
        why = why or ("" if all(m["actor/grad_norm"] > 0 for m in metrics(record)) else "nothing is learned")
    for run in (record, replay):
        shutil.rmtree(run, ignore_errors=True)
    return same(f"{arch}, fully asynchronous: beside its replay on one", why)


def hashes(b):
    """Equal on one and all, in every layout, and with pools; of what is asynchronous, its replay on one."""
    wrong = 0
    model_only = [f"{A}optim.lr=1e-4", f"{A}checkpoint.save_contents=[model]", "critic.checkpoint.save_contents=[model]",
                  "trainer.save_freq=3"]
    for arch in b.archs:
        critic = ["algorithm.adv_estimator=gae", f"critic.model.path={b.model(arch)}", "critic.ppo_micro_batch_size_per_gpu=4",
                  f"{A}use_kl_loss=False"]
        one_off = ["--config-name=one_step_off_ppo_trainer"]
        cases = {"grpo": ([], {f"layout {x}": (b.n, [f"trainer.layout={x}"]) for x in ("whole", "ref", "sharded")}),
                 "ppo": (critic, {"all": (b.n, []), "a pool for the critic": (b.n - 1, b.ranks(1, "critic"))}),
                 "one step off": (one_off, {"in turns": (b.n, []), "a pool that generates": (b.n - 1, b.ranks(1, "rollout"))})}
        for name, (keys, ways) in cases.items():
            alone = OUT / f"hashes_{arch}_{name}_one".replace(" ", "_")
            shape = (16, 5, 8, 2)  # two optimizer steps of twenty micro-batches
            if not b.run(f"{arch}, {name}, one", b.command(arch, alone, shape, 1, 3, *model_only, *keys))[0]:
                wrong += 1
                continue
            for way, (n, more) in ways.items():
                if n == 0:  # no pool beside one rank
                    continue
                run = OUT / f"hashes_{arch}_{name}_{way}".replace(" ", "_")
                done = b.run(f"{arch}, {name}, {way}", b.command(arch, run, shape, n, 3, *model_only, *keys, *more))[0]
                wrong += same(f"{arch}, {name}, {way}: beside one", differs(alone, run, 3) if done else "it failed")
                shutil.rmtree(run, ignore_errors=True)
            shutil.rmtree(alone, ignore_errors=True)
        wrong += replayed(b, arch, model_only) if b.n > 1 else 0
    row("hashes", f"runs on {b.n} {b.gpus} whose checkpoint, metrics or samples are not those of one", wrong, unit="", lower=True,
        bar=0)


def seconds_left(pids, limit):
    """Until the last of them is gone."""
    begun = time.time()
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids) and time.time() - begun < limit:
        time.sleep(0.01)
    return time.time() - begun


def spans(done):
    """When a step is in each stage, in seconds from its start; a checkpoint is written beside the start of the next."""
    gen, ref, update = (done.get(f"timing_s/{k}", 0) for k in ("gen", "ref", "update_actor"))
    return {"save": (0, gen / 2), "generate": (0, gen), "forward": (gen, gen + ref), "update": (gen + ref, gen + ref + update)}


def kill_one(command, run, moment):
    """A rank, so many seconds after the start of the third step: seconds until all processes were gone, and the stage that the
    run names."""
    shutil.rmtree(run, ignore_errors=True)
    with open(run.with_suffix(".log"), "w") as log:
        p = subprocess.Popen([VERLC, *map(str, command)], stdout=subprocess.DEVNULL, stderr=log)
    while p.poll() is None and len(lines(run)) < 2:
        time.sleep(0.001)
    time.sleep(moment)
    saving = any(run.glob("global_step_*.tmp"))
    there = below(p.pid)
    os.kill(random.choice([pid for pid, args in there.items() if args.endswith(" worker")]), signal.SIGKILL)
    begun = time.time()
    p.wait(timeout=60)
    took = time.time() - begun + seconds_left(there, 60)
    said = "".join(re.findall(r"^error: .*", run.with_suffix(".log").read_text(), re.M))
    say(f"  all gone after {took:.2f} s{', a checkpoint was being written' if saving else ''}: {said}")
    named = re.search(r"\), in ([a-z_ ]+) for ", said)
    return took, {named[1].split("_")[0] if named else "no stage"} | ({"save"} if saving else set())


def kills(b):
    """A rank is killed until it was hit in each stage; the slowest end, and what the resumed run saves."""
    random.seed(seed := int(os.environ.get("SEED", time.time())))
    say(f"kills: SEED={seed}")
    slowest, wrong, n, left, run = 0, 0, 0, ["save", "forward", "update", "generate"], OUT / "kills"
    whole = b.command("qwen2.5-0.5b", OUT / "kills_whole", (16, 5, 16, 4), b.n, 4, "trainer.save_freq=1",
                      "trainer.max_actor_ckpt_to_keep=2", f"{A}optim.lr=1e-4")
    done, _, _ = b.run("kills, unbroken", whole)
    if not done:
        return
    own = [k for k in whole if not k.startswith(("trainer.default_local_dir", "trainer.resume_mode"))]
    own += [f"trainer.default_local_dir={run}"]
    while left and n < 12:
        took, stages = kill_one(own, run, random.uniform(*spans(done[2])[left[0]]))
        slowest, left, n = max(slowest, took), [s for s in left if s not in stages], n + 1
        b.run(f"resumed after a kill in {' and '.join(sorted(stages))}", own, fresh=False)
        wrong += same("beside the unbroken run", "" if saved(OUT / "kills_whole", 4) == saved(run, 4) else "other files")
    row("kill", f"kill -9 of a rank, {n} times: all processes gone after, the slowest", slowest, unit="s", lower=True, bar=10)
    row("kill/bits", "of these runs, resumed: those that end in other bits", wrong, unit="", lower=True, bar=0)
    row("kill/stages", "stages (generate, forward, update, save) in which none was killed", len(left), unit="", lower=True, bar=0)


ROWS = {"links": links, "hashes": hashes, "start": start, "recipe1": recipe1, "recipe2": recipe2, "7b": seven, "update": update,
        "decode": decode, "checkpoint": checkpoint, "kills": kills}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW")
    p.add_argument("--ranks", type=int)
    p.add_argument("--one-done", action="store_true")
    p.add_argument("--model", metavar="ARCH")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = p.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    one.machine()
    if args.ranks is None:
        args.ranks = args.device == "cuda" and gpus() or 2
    b = Bench(args)
    if "share" in b.gpus and not set(args.rows) <= {"decode", "hashes", "kills"}:
        p.error(f"{args.ranks} {b.gpus}: name decode, hashes or kills, the other rows are rates")
    for name in args.rows or ROWS:
        ROWS[name](b)
        (OUT / "ranks.json").write_text(FIGURES.text())  # a run that is cut short has said something
    sys.exit(1 if FIGURES.show() or b.failed else 0)


if __name__ == "__main__":
    main()
