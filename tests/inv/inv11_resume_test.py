"""Invariant 11, resumed: a run that is killed at any moment, controller or rank, and goes on with another number of ranks ends in
the bits of a run that was not; and a killed group leaves no process. Steps past the first draw moments and ranks at random; the
seed is printed. --kills N: so many of them (default 6)."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import below
from verlc_test import Scratch, Tests, patience, run, start, state, waited

STEPS = 6


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_one(p, rng):
    """SIGKILL to the controller or a rank: who it was, and all processes of the run."""
    there = below(p.pid)
    ranks = [pid for pid, args in there.items() if args.endswith(" worker")]
    victim = rng.choice([p.pid, *ranks])
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return "nobody", []  # it has ended meanwhile
    return ("the controller" if victim == p.pid else "a rank"), [p.pid, *there]


def end(p, seconds):
    """Whether it ended in time."""
    try:
        p.communicate(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        p.kill()
        p.communicate()
        return False


def main():
    test = Tests()
    kills = int(sys.argv[sys.argv.index("--kills") + 1]) if "--kills" in sys.argv else 6
    seed = int(os.environ.get("SEED", time.time()))
    rng = random.Random(seed)
    print(f"SEED={seed}")
    with Scratch(small=True) as s:
        def line(name, ranks):
            return s.ppo(s.dir / name, trainer__device="cpu", trainer__ranks=ranks, trainer__total_training_steps=STEPS)

        begin = time.time()
        run(*line("whole", 2))
        took = time.time() - begin
        whole = state(s.dir / "whole", STEPS)
        for first, then in ((1, 2), (3, 1), (4, 2)):
            name = f"from_{first}_to_{then}"
            run(*s.ppo(s.dir / name, trainer__device="cpu", trainer__ranks=first, trainer__total_training_steps=3))
            run(*line(name, then))
            test(f"{first} ranks, then {then}: the bits of one run", state(s.dir / name, STEPS) == whole)
        for i in range(kills):
            name = f"killed_{i}"
            n = rng.choice([2, 3])
            p = start(line(name, n))
            wait = time.time() + rng.uniform(0.2, took)
            while time.time() < wait and p.poll() is None:
                time.sleep(0.01)
            who, processes = kill_one(p, rng) if p.poll() is None else ("nobody", [])
            until = time.time() + patience(10)
            in_time = end(p, patience(10))
            waited(lambda: not any(map(alive, processes)), until - time.time())  # noqa: B023
            left = [pid for pid in processes if alive(pid)]
            test(f"{name}: {who} of {n} ranks; all end", in_time and not left, f"left: {left}")
            run(*line(name, rng.choice([1, 2, 3])))
            test(f"{name}: the bits of the unbroken run", state(s.dir / name, STEPS) == whole)
    test.end()


main()
