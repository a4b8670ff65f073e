"""Invariant 5: kill -9 at random moments, resumed to the end, and the weights, the
optimizer and the trainer's state are the bits of an unbroken run.

The number of kills is KILLS (50), or the first argument. Moments are drawn over the
whole life of a run: start, rollout, update, save."""

import os
import pathlib
import random
import shutil
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, start, state  # noqa: E402

STEPS = 6


def main():
    wanted = int(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KILLS", "50"))
    rng = random.Random(7)
    test = Tests()
    with Scratch() as s:
        began = time.time()
        run(*s.ppo("unbroken"))
        whole = time.time() - began
        want = state(s.dir / "unbroken", STEPS)
        kills, rounds, same, where = 0, 0, 0, {}
        while kills < wanted:
            rounds += 1
            shutil.rmtree(s.dir / "broken", ignore_errors=True)
            while True:
                p = start(s.ppo("broken"))
                try:
                    # most of a resumed run is its start: draw from all of it
                    p.wait(rng.uniform(0.02, whole) if kills < wanted else 300)
                except Exception:
                    p.kill()
                    p.wait()
                    kills += 1
                    done = len(list((s.dir / "broken").glob("global_step_*[0-9]")))
                    half = bool(list((s.dir / "broken").glob("*.tmp")))
                    where[(done, half)] = where.get((done, half), 0) + 1
                    continue
                if p.returncode != 0:
                    test(f"round {rounds} ends", False, p.stderr.read()[-800:])
                    test.end()
                break
            same += state(s.dir / "broken", STEPS) == want
        print(f"{kills} kills in {rounds} runs; (steps saved, save under way): {sorted(where.items())}")
        test(f"{rounds} runs killed {kills} times end in the same bits", same == rounds, f"{same} of {rounds}")
    test.end()


main()
