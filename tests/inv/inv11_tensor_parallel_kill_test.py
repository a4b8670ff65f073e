"""Invariant 11, ranks that generate together: one that dies (kill -9) or hangs (SIGSTOP) at any moment, in each stage, ends all
processes of the run within 10 s, by name, and leaves none; the run goes on, with the same ranks or others, to the bits of an
unbroken one on one rank. The moments are random, the seed is printed (SEED=N repeats it).

  inv11_tensor_parallel_kill_test.py [--kills N] [--report FILE]     N moments (2), and until each stage has had one where N > 9;
                                                                     what came of them as figures (tools/figures.py)"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from subprocess import DEVNULL, Popen, TimeoutExpired

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ranks import below  # noqa: E402
from verlc_test import ENV, VERLC, Scratch, Tests, on_gpus, reached, run, state  # noqa: E402

A = "actor_rollout_ref."
STEPS, WITHIN = 4, 10.0
# what a rank's error says it was in
STAGES = {"generation": ("generate", "generate_begin", "generate_end"), "log-probs": ("forward",), "update": ("update",)}
SIZES = ((2, 2), (3, 3), (4, 2), (2, 1), (1, 1))  # ranks, and how many generate together


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def line(s, name, ranks, together):
    keys = {"trainer.total_training_steps": STEPS, "trainer.save_freq": 1, "trainer.device": "cpu", "trainer.ranks": ranks,
            "trainer.layout": "sharded", A + "rollout.tensor_model_parallel_size": together, "trainer.force_old_log_prob": True,
            A + "actor.ppo_mini_batch_size": 4, A + "actor.ppo_micro_batch_size_per_gpu": 1}
    return s.ppo(name, **{k.replace(".", "__"): v for k, v in keys.items()})


def strike(args, moment, how, rng):
    """One rank is struck so many seconds after the start: (seconds until all were gone, exit status, errors, who is left). A
    number: the run was over after so many seconds. None: it had no rank, or was not hurt any more."""
    with tempfile.TemporaryFile("w+") as err:  # a pipe that nobody reads would stop the run
        start = time.time()
        p = Popen([VERLC, *map(str, on_gpus(args))], env=ENV, stdout=DEVNULL, stderr=err, text=True)
        try:
            if p.wait(moment) == 0:
                return time.time() - start
        except TimeoutExpired:
            pass
        there = below(p.pid)
        ranks = [pid for pid, command in there.items() if command.endswith(" worker")]
        ended = p.poll() is not None  # by itself
        hit = not ended and ranks and reached(rng.choice(ranks), how)
        begin = time.time()
        try:
            p.wait(60)
        except TimeoutExpired:
            p.kill()
            p.wait()
        while any(map(alive, there)) and time.time() < begin + WITHIN + 5:
            time.sleep(0.02)
        took = time.time() - begin
        err.seek(0)
        said = err.read()
    if p.returncode == 0 or (not hit and not ended):
        return None
    return took, p.returncode, said, [f"{pid} {command}" for pid, command in there.items() if alive(pid)]


def stage_of(said):
    call = re.search(r"error: rank \d+ \(host .*?\), in (\w+) for", said)
    return next((k for k, names in STAGES.items() if call and call[1] in names), "opening or saving" if call else "between calls")


def figures(path, struck, different, slowest, left, resumed):
    row = {"unit": "", "lower": True, "bar": 0, "bar_ratio": None, "peers": [], "work": None, "note": ""}
    what = f"kill -9 and SIGSTOP of a tensor parallel rank at {sum(struck.values())} random moments: "
    rows = [{"id": "tensor_parallel/other_bits", "what": what + "resumed runs whose weights have other bits", "ours": different,
             "note": ", ".join(f"{k}: {v}" for k, v in sorted(struck.items()))},
            {"id": "tensor_parallel/left", "what": "the same: processes left", "ours": left, "note": ""},
            {"id": "tensor_parallel/gone", "what": "the same: until all processes of the run were gone, the slowest", "unit": "s",
             "ours": round(slowest, 2), "bar": WITHIN, "note": f"{resumed} had a checkpoint to go on from"}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": {}, "rows": [row | r for r in rows]}, indent=1) + "\n")


def main():
    test = Tests()
    option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    n = int(option.get("--kills", 2))
    rng = random.Random(seed := int(os.environ.get("SEED", time.time())))
    print(f"SEED={seed}")
    struck, slowest, different, left, resumed, i = {}, 0.0, 0, 0, 0, 0
    with Scratch(small=True) as s:
        run(*line(s, "whole", 1, 1))
        whole = state(s.dir / "whole", STEPS)
        took = {}
        while (i < 20 * n and sum(struck.values()) < n) or (n > 9 and i < 2 * n and set(STAGES) - set(struck)):
            d, (ranks, together), i = f"struck_{i}", SIZES[0 if n < 10 else i % 3], i + 1
            if ranks not in took:
                begin = time.time()
                run(*line(s, f"unbroken_{ranks}", ranks, together))
                took[ranks] = time.time() - begin
                same = state(s.dir / f"unbroken_{ranks}", STEPS) == whole
                test(f"{together} of {ranks} ranks together: the bits of one rank", same)
            how = (signal.SIGKILL, signal.SIGSTOP)[sum(struck.values()) % 2]
            moment = rng.uniform(0.6 if n < 10 else 0.2, 1) * took[ranks]
            got = strike(line(s, d, ranks, together), moment, how, rng)
            if isinstance(got, float):  # the machine has less to do than when the unbroken run was timed
                took[ranks] = min(took[ranks], got)
            elif got:
                seconds, code, said, remain = got
                where = stage_of(said)
                struck[where] = struck.get(where, 0) + 1
                name = f"{together} of {ranks} ranks together, {how.name} of one after {moment:.2f} s ({where})"
                test(f"{name}: all are gone, in {seconds:.1f} s", seconds < WITHIN and not remain, f"{remain} {said[-600:]}")
                test(f"{name}: the rank is named", code == 1 and "error: rank " in said, f"{code} {said[-600:]}")
                slowest, left = max(slowest, seconds), left + len(remain)
                resumed += any((s.dir / d).glob("global_step_*"))
                then = rng.choice(SIZES)
                run(*line(s, d, *then))
                same = state(s.dir / d, STEPS) == whole
                different += not same
                test(f"{name}: goes on with {then[1]} of {then[0]}, to the bits of one rank", same)
            shutil.rmtree(s.dir / d, ignore_errors=True)
        print(f"{sum(struck.values())} moments ({struck}), {resumed} with a checkpoint; slowest {slowest:.1f} s; {left} processes "
              f"left, {different} runs of other bits")
        test(f"{n} moments met a run that was under way", sum(struck.values()) >= n, struck)
        if n > 9:
            test("each stage had one", not set(STAGES) - set(struck), struck)
    if "--report" in option:
        figures(pathlib.Path(option["--report"]), struck, different, slowest, left, resumed)
    test.end()


main()
