"""Checkpoints that are written beside the next steps: the same files as in the foreground; killed at any moment, run.db has
the metrics of every step whose checkpoint is published; a copy that does not fit is not made, or refused where it is asked for."""

import pathlib
import random
import re
import shutil
import sqlite3
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, start, state  # noqa: E402

KILLS = 12


def steps_saved(run_dir):
    return sorted(int(d.name.split("_")[-1]) for d in run_dir.glob("global_step_*") if d.name.split("_")[-1].isdigit())


def same_files(test, s):
    for on in (True, False):
        run(*s.ppo(f"async-{on}", trainer__async_save=on, trainer__total_training_steps=4))
    whole = [state(s.dir / f"async-{on}", n) for on in (True, False) for n in (1, 2, 3, 4)]
    test("the files of four steps are those of the foreground", whole[:4] == whole[4:])


def metrics_first(test, s):
    """The log of a step is on disk before its checkpoint is published."""
    rng, missing, published = random.Random(3), [], 0
    keys = {"trainer.total_training_steps": 16}
    begin = time.time()
    run(*s.ppo("whole", **keys))
    whole = time.time() - begin
    for kill in range(KILLS):
        shutil.rmtree(s.dir / "killed", ignore_errors=True)
        p = start(s.ppo("killed", **keys))
        try:
            p.wait(rng.uniform(0.2, 0.95) * whole)
        except Exception:
            p.kill()
            p.wait()
        saved = steps_saved(s.dir / "killed")
        if not saved:
            continue
        published += 1
        with sqlite3.connect(s.dir / "killed/run.db") as db:
            logged = {row[0] for row in db.execute("SELECT DISTINCT step FROM metrics WHERE name = 'training/global_step'")}
        missing += [f"kill {kill}: step {n}" for n in saved if n not in logged]
    print(f"{published} of {KILLS} killed runs had published checkpoints")
    test("metrics of every published step are in run.db", published > KILLS // 3 and not missing, str(missing[:5]))


def room(test, s):
    plan = run(*s.ppo("plan", trainer__total_training_steps=1)).stderr
    need = re.search(r"total +([\d.]+) MiB", plan)
    copy = re.search(r"checkpoint +([\d.]+) MiB", plan)
    test("the plan has the copy", bool(need and copy), plan)
    limit = f"{float(need[1]) - float(copy[1]) + 1:.1f}MiB"
    p = run(*s.ppo("small", trainer__device_memory_limit=limit, trainer__total_training_steps=1))
    without = "checkpoint  " not in p.stderr and steps_saved(s.dir / "small") == [1]
    test("no room for the copy: the run goes without", without, p.stderr)
    p = run(*s.ppo("asked", trainer__device_memory_limit=limit, trainer__async_save=True), check=False)
    test("asked for without room: refused, and the key named", p.returncode == 4 and "trainer.async_save=True needs" in p.stderr,
         f"{p.returncode}: {p.stderr[-300:]}")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        same_files(test, s)
        room(test, s)
        metrics_first(test, s)
    test.end()


main()
