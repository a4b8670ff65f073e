"""What shows how a device does: the trace of a step, `verlc selftest`, `verlc bench step`, on the CPU."""

import json
import pathlib
import re
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent
TOOLS = TESTS.parent / "tools"
sys.path.insert(0, str(TESTS))
from verlc_test import Scratch, Tests, run  # noqa: E402


def tracks(path):
    """{track: [(name, begin, end)]} of a trace, times in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    out = {name: [] for name in names.values()}
    for e in events:
        if e["ph"] == "X":
            out[names[e["tid"]]].append((e["name"], e["ts"], e["ts"] + e["dur"]))
    return out


def whole_gathers(gathers, size):
    """How many times the gathers, one after the other, make up so many bytes; 0: they do not."""
    times = total = 0
    for _, part, _ in gathers:
        total += part
        if total > size:
            return 0
        if total == size:
            times, total = times + 1, 0
    return times if total == 0 else 0


def check_ranks(s, test, keys):
    """What two ranks exchange: each layer's bucket, the norm's, the head's with the rows of the embedding, and the weights."""
    run(*s.ppo("ranks", trainer__profile_steps="[2]", trainer__device="cpu", trainer__ranks=2,
               actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=1, **keys))
    files = [s.dir / "ranks" / name for name in ("trace_step_2.json", "trace_step_2_rank_1.json")]
    test("each rank writes its trace", sorted(s.dir.glob("ranks/trace_step_*")) == files, list(s.dir.glob("ranks/*")))
    config, kinds = json.loads((s.dir / "model/config.json").read_text()), []
    n_params = json.loads(run("model", "info", "--model", s.dir / "model").stdout)["parameters"]
    for rank, path in enumerate(files):
        t, events = tracks(path), json.loads(path.read_text())["traceEvents"]
        test(f"rank {rank} is a process of its own", {e["pid"] for e in events} == {rank + 1} and
             [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {rank}"], events[:2])
        got = [(e["name"], e["args"]["bytes"], e["args"]["ranks"]) for e in events if e.get("args", {}).get("bytes")]
        kinds.append(got)
        update = next(x for x in t["phases"] if x[0] == "update_actor")
        test(f"rank {rank}: the exchange lies in the update", len(t["exchange"]) == len(got) and
             all(update[1] - 1 <= x[1] <= x[2] <= update[2] + 1 for x in t["exchange"]), (update, t["exchange"]))
        inside = [x for x in t["host"] if x[0].startswith("fold") and any(y[1] <= x[1] and x[2] <= y[2] for y in t["exchange"])]
        test(f"rank {rank}: its own sums are calls in it", inside, t["exchange"])
    test("both saw the same operations", kinds[0] == kinds[1], kinds)
    folds, gathers = ([x for x in kinds[0] if x[0] == name] for name in ("fold", "all_gather"))
    # bf16 weights that are flat; else their masters, a bucket at a time
    steps = max(whole_gathers(gathers, size * n_params) for size in (2, 4))
    test("every optimizer step gathers all weights", steps, gathers)
    buckets = config["num_hidden_layers"] + 2 + (not config["tie_word_embeddings"])
    sizes = sorted(x[1] for x in folds)
    test("every wave folds all buckets", folds and len(folds) % buckets == 0 and len(folds) // buckets >= 2 * steps and
         sizes[0] == 4 * config["hidden_size"] and {x[2] for x in folds} <= {1, 2}, (buckets, folds))


def check_metrics(s, test):
    """verl's metrics of time and MFU, of the run whose second step was traced and whose old log-probs are a pass."""
    steps = [json.loads(line)["data"] for line in (s.dir / "run/metrics.jsonl").read_text().splitlines()]
    train = [m for m in steps if "timing_s/step" in m]
    loop = "timing_s/agent_loop/"
    traced = [[name in m for name in ("timing_s/start_profile", "timing_s/stop_profile")] for m in train]
    test("seconds of the profiler, in its step", traced == [[False] * 2, [True] * 2, [False] * 2], traced)
    test("the old log-probs' pass has its MFU", all(0 < m["perf/mfu/actor_infer"] < 1 for m in train), train[0])
    test("the rollout reads the weights that are trained", all(0 <= m["timing_s/update_weights"] < 0.1 for m in train), train[0])
    for m in train:
        low, mean, high = (m[f"{loop}generate_sequences/{x}"] for x in ("min", "mean", "max"))
        test("seconds of a sample", 0 < low <= mean <= high <= m["timing_s/gen"] + 0.01 and
             low <= m[loop + "slowest/generate_sequences"] <= high and
             m[loop + "num_preempted/max"] == m[loop + "tool_calls/max"] == 0 and
             m["prompt_length/min"] <= m[loop + "slowest/prompt_length"] <= m["prompt_length/max"] and
             m["response_length/min"] <= m[loop + "slowest/response_length"] <= m["response_length/max"], m)
        low, mean, high = (m[f"{loop}compute_score/{x}"] for x in ("min", "mean", "max"))
        test("seconds of its score", 0 <= low <= mean <= high <= m["timing_s/gen"] and
             low <= m[loop + "slowest/compute_score"] <= high, m)


def check_bench_update(s, test):
    args = ("bench", "update", "--model", s.dir / "model", "--device", "cpu", "--batch", 5, "--len", 8, "--steps", 1, "--micro", 1)
    for ranks, more, chunks in ((2, (), [[1, 3], [3, 1]]), (1, (), [[1, 0], [5, 0]]), (2, ("--grad-chunk", 2), [[1, 3], [2, 2]])):
        r = json.loads(run(*args, "--rounds", 2, "--ranks", ranks, *more, "--json").stdout)
        got = [[c["grad_chunk"], c["exchanges"]] for c in r["chunks"]]
        a, b = (c["seconds"] for c in r["chunks"])
        timed = all(len(c["all"]) == 2 and 0 < c["least_seconds"] == min(c["all"]) <= c["seconds"] in c["all"] for c in r["chunks"])
        test(f"bench update, {ranks} ranks {more}", got == chunks and timed and r["tokens"] == 40 and r["micro_batches"] == 5 and
             r["ranks"] == ranks and abs(r["cost"] - (a / b - 1)) < 1e-6, r)
    out = run(*args, "--rounds", 1, "--trace", s.dir / "update.json").stdout
    traces = [tracks(s.dir / name) for name in ("update.json", "update_rank_1.json")]
    folds = [len([x for x in t["exchange"] if x[0] == "fold"]) for t in traces]
    test("bench update: a step's trace of each rank", folds[0] == folds[1] > 0 and folds[0] % 3 == 0, folds)
    rows = re.search(r"^ +1 +3 .*\n +3 +1 .*\n\ngrad_chunk=1 costs -?[\d.]+ % over grad_chunk=3", out, re.M)
    test("bench update: a table", rows, out)
    p = run("bench", "update", "--model", s.dir / "nothing", "--device", "cpu", check=False)
    test.refused("bench update: the first rank's error", p, 3, "rank ", "nothing does not exist")


def check_bench_attention(test):
    for heads in ((), ("--kv-heads", 2, "--dim", 64)):
        out = run("bench", "attention", "--device", "cpu", "--prompts", 2, "--n", 2, "--prompt", 40, "--len", 20, "--tokens", 64,
                  "--sequence", 32, "--heads", 4, "--seconds", 0.01, *heads).stdout
        rows = re.findall(r"^(decode|forward|backward) +2 x (?:2|32) +([\d.]+) us .* ([\d.]+) TFLOP/s$", out, re.M)
        test("bench attention: three cases", [r[0] for r in rows] == ["decode", "forward", "backward"], out)
    test.refused("bench attention: heads", run("bench", "attention", "--heads", 3, "--kv-heads", 2, check=False), 2, "--heads 3")


def check_delta_exactness(s, test, bench):
    """Inexact forms that take half of ours, and a faster one that does not count."""
    (s.dir / "bench.json").write_text(json.dumps(bench))
    half = [{"case": c["case"], "rows": c["rows"], "form": "half", "counted": True, "seconds": c["seconds"] / 2}
            for c in bench["cases"] if c["case"] in ("rule forward", "rule kept", "rule step") and c.get("open", "mean") == "mean"]
    lines = [{"check": "half", "nmse": 0}, *half, *({**x, "form": "none", "counted": False, "seconds": 1e-9} for x in half)]
    (s.dir / "inexact.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    p = subprocess.run([sys.executable, TOOLS / "delta_exactness.py", s.dir / "bench.json", s.dir / "inexact.jsonl"],
                       capture_output=True, text=True, check=True)
    rows = [line.split() for line in p.stdout.splitlines()[1:]]
    test("delta_exactness: prefill, training, decoding", [r[0] for r in rows] == ["prefill", "train", "decode"], p.stdout)
    test("and ratios of the rule; training's has the same backward", rows[0][4] == rows[2][4] == "2.00" and
         1 < float(rows[1][4]) < 2 and all(r[-1] == "half" for r in rows), p.stdout)


def check_bench_delta(s, test):
    args = ("bench", "delta", "--device", "cpu", "--hidden", 32, "--key-heads", 2, "--value-heads", 4, "--dim", 16, "--batch", 2,
            "--len", 70, "--rows", 3, "--seconds", 0.001)
    want = [f"{part} {what}" for part in ("rule", "layer") for what in ("forward", "kept", "backward", "train")
            if (part, what) != ("layer", "backward")] + [f"{part} step" for part in ("rule", "layer") for _ in range(5)]
    j = json.loads(run(*args, "--json").stdout)
    test("bench delta: the cases", [c["case"] for c in j["cases"]] == want, j)
    test("bench delta: each has a time and a least time", all(c["seconds"] > 0 and c["roofline"] > 0 for c in j["cases"]), j)
    steps = {c["open"]: c["bytes"] for c in j["cases"] if c["case"] == "rule step"}
    test("bench delta: steps of a chunk, the last of which writes S", list(steps) == [0, 31, 62, 63, "mean"] and
         steps[63] - steps[62] > 3 * 4 * 16 * 16 * 4 and steps[0] < steps["mean"] < steps[62], steps)
    rows = re.findall(r"^(?:rule|layer) [a-z]+ +(?:140|3) +(?:-|\d+|mean) +[\d.]+ ", run(*args).stdout, re.M)
    test("bench delta: a table", len(rows) == len(want), rows)
    check_delta_exactness(s, test, j)
    test.refused("bench delta: heads", run("bench", "delta", "--dim", 24, check=False), 2, "--dim 24")


def check_bench_decode(s, test):
    args = ("bench", "decode", "--model", s.dir / "model", "--device", "cpu", "--batch", 2, "--prompt", 8, "--len", 16,
            "--steps", 1)
    one, two = (json.loads(run(*args, "--ranks", n, "--json").stdout) for n in (1, 2))
    sums = {k: sum(two[k]) / sum(one[k]) for k in ("weight_bytes", "kv_bytes")}
    test("bench decode: two ranks read what one does", 1 <= sums["weight_bytes"] < 1.05 and sums["kv_bytes"] == 1, sums)
    alone = one["kernel_seconds"] == one["step_seconds"] > 0
    test("bench decode: one rank gathers nothing", alone and one["way"] == "none", one)
    test("bench decode: two gather, and compute less than a step takes",
         0 < two["kernel_seconds"] < two["step_seconds"] and two["way"] == "the host" and two["tokens_per_s"] > 0, two)
    out = run(*args, "--ranks", 2).stdout
    left = re.search(r"  gathers, barriers, gaps +[\d.]+ ms, [\d.]+ %\nroofline: .* % of the step$", out, re.M)
    test("bench decode: a table", left, out)
    p = run(*args, "--ranks", 64, check=False)
    test.refused("bench decode: more ranks than heads", p, 3, "unsupported --ranks 64")
    p = run(*args, "--graph", s.dir / "graph", check=False)
    test.refused("bench decode: a graph where there is none", p, 3, "--graph", "has no CUDA graphs")


def main():
    test = Tests()
    with Scratch(n_train=16) as s:
        keys = {"trainer__total_training_steps": 3, "trainer__save_freq": -1}
        log = run(*s.ppo("run", trainer__profile_steps="[2]", trainer__force_old_log_prob=True, **keys)).stderr
        files = sorted(f.name for f in (s.dir / "run").glob("trace_step_*"))
        test("one step is traced, the one that was named", files == ["trace_step_2.json"], files)
        t = tracks(s.dir / "run/trace_step_2.json")
        phases = [x[0] for x in t["phases"]]
        test("the phases are a track, in order", [p for p in phases if p in ("gen", "ref", "adv", "update_actor")] ==
             ["gen", "ref", "adv", "update_actor"], phases)
        test("phases follow each other", all(a[2] <= b[1] + 1 for a, b in zip(t["phases"], t["phases"][1:])), t["phases"])
        update = next(x for x in t["phases"] if x[0] == "update_actor")
        adamw = [x for x in t["host"] if x[0].startswith("adamw")]
        test("the optimizer's calls lie in the update", adamw and
             all(update[1] - 1 <= x[1] and x[2] <= update[2] + 1 for x in adamw), adamw)
        said = re.search(r"trace: ([0-9.]+) ms, in which the device idles ([0-9.]+) ms", log)
        begin, end, busy = min(x[1] for x in t["phases"]), max(x[2] for x in t["phases"]), 0.0
        at = begin
        for _, lo, hi in sorted(t["device"], key=lambda x: x[1]):
            busy += max(0.0, min(hi, end) - max(lo, at))
            at = max(at, hi)
        test("the log says how long the device waited in it", said and abs(float(said[1]) - (end - begin) / 1e3) < 0.1 and
             abs(float(said[2]) - (end - begin - busy) / 1e3) < 0.1, f"{said}, {begin} {end} {busy}")
        waits = [float(x) for x in re.findall(r"trace:   \S+ [0-9.]+ ms, idle ([0-9.]+) ms", log)]
        test("and in each phase", len(waits) == len(set(phases)) and sum(waits) <= float(said[2]) + 0.1, log[-1500:])
        test("each call of the host is one of the device", len(t["host"]) == len(t["device"]) > 100, len(t["host"]))
        check_metrics(s, test)
        run(*s.ppo("verl", global_profiler__steps="[1,3]", **keys))
        files = sorted(f.name for f in (s.dir / "verl").glob("trace_step_*"))
        test("verl's key does the same", files == ["trace_step_1.json", "trace_step_3.json"], files)
        check_ranks(s, test, keys)
        p = run("bench", "step", "--model", s.dir / "model", "--device", "cpu", "--batch", 4, "--n", 2, "--prompt", 8, "--len", 8,
                "--micro", 2, "--steps", 1)
        r = json.loads(p.stdout.splitlines()[-1])
        p = run("bench", "checkpoint", "--model", s.dir / "model", "--device", "cpu", "--dir", s.dir, "--steps", 1)
        c = json.loads(p.stdout.splitlines()[-1])
        times = [c[k] for k in ("foreground_seconds", "copy_seconds", "write_seconds", "write_cpu_seconds", "delete_seconds")]
        gone = not list(s.dir.glob("verlc-bench-*"))
        test("bench checkpoint times a checkpoint and leaves nothing", min(times) >= 0 and gone, c)
        test("and says what the disk takes, and what writing costs training", c["disk_gb_s"] > 0 and c["async_gb_s"] > 0 and
             c["training_slower"] > -1, c)
        check_bench_update(s, test)
        check_bench_attention(test)
        check_bench_delta(s, test)
        check_bench_decode(s, test)
        peaks = []
        parts = sum(r[f"{k}_seconds"] for k in ("gen", "ref", "update"))
        for how in ("none", "mlp"):
            p = run("bench", "train", "--model", s.dir / "model", "--device", "cpu", "--batch", 2, "--len", 16, "--steps", 1,
                    "--recompute", how)
            peaks.append(json.loads(p.stdout.splitlines()[-1])["peak_bytes"])
        test("bench train keeps less where it recomputes", peaks[0] > peaks[1], peaks)
        p = run("bench", "train", "--model", s.dir / "model", "--recompute", "some", check=False)
        test.refused("bench: an unknown --recompute is refused", p, 2, "none, mlp or layer")
        on = ("selftest", "--device", "cpu", "--model", s.dir / "model")
        p = run(*on, "--batch", 40, "--n", 5, "--prompt", 60, "--len", 40)
        equal = [x for x in p.stdout.splitlines() if "rollout = training, model, " in x and " ok " in x and " 0 of 1" in x]
        test("selftest --model compares rollout and training on it", len(equal) == 3, p.stdout)
        test("also where samples are preempted", "preemptions" in p.stdout, p.stdout)
        p = run(*on, "--batch", 5, "--n", 2, check=False)
        test.refused("selftest: a batch that its prompts do not divide is refused", p, 2, "multiple of --n")
        for what in on, ("bench", "step", *on[1:]), ("bench", "generate", *on[1:]):
            for text, *more in (("2^28", "--batch", 10**18, "--n", 1), ("2^28", "--prompt", 2**63 - 1),
                                ("tokens in all", "--batch", 2**20, "--n", 1, "--prompt", 2**20)):
                p = run(*what, *more, check=False)
                test.refused(f"{' '.join(what[:2])}: {more} is beyond all memory", p, 2, text)
            test.refused(f"{' '.join(what[:2])}: no such dtype", run(*what, "--dtype", "fp8", check=False), 2, "expected bfloat16")
        on = ("bench", "generate", "--device", "cpu", "--model", s.dir / "model", "--prompt", 16, "--len", 8, "--steps", 1)
        drawn = json.loads(run(*on, "--text", "1 + 2 = 3").stdout.splitlines()[-1])
        test("bench generate takes prompts of a text", drawn["tokens_per_s"] > 0, drawn)
        test.refused("bench generate: a text without tokens is refused", run(*on, "--text", "", check=False), 2, "no tokens")
        test.refused("bench generate: no such --draft-mode", run(*on, "--draft-mode", "often", check=False), 2, "measured or never")
        p = run("selftest", "--device", "cpu", "--batch", 8, check=False)
        test.refused("selftest: sizes of a run without a model are refused", p, 2, "--model DIR")
        test("bench step times three phases", r["tokens"] == 64 and abs(parts - r["seconds"]) < 1e-3 and r["seconds"] > 0, r)
    p = run("selftest", "--device", "cpu", check=False, timeout=800)
    lines = p.stdout.splitlines()
    test("selftest finds no difference on the CPU", p.returncode == 0 and " 0 different, 0 not on this device" in lines[-1],
         p.stdout[-2000:])
    test("selftest compares rollout and training", sum("rollout = training" in x and " ok " in x for x in lines) == 12, p.stdout)
    test.end()


main()
