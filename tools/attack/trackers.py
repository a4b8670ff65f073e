"""Attacks the way of records to a tracker: rounds of a run whose helpers, whose whole process tree or whose main process gets signals
at random moments, while the client is slow, raises or dies; then `verlc trackers sync`, itself interrupted at random. After each round
every record of the run has to be with the client: once where nothing was killed with SIGKILL and no client failed, else at least once
and in order; the run has to be ended there, and no process may be left.

  python3 tools/attack/trackers.py [--seed N] [--rounds N]      (VERLC: the program, else build/release/verlc)"""

import argparse
import json
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
os.environ.setdefault("VERLC", str(TOP / "build/release/verlc"))
os.environ.setdefault("SOURCE_DIR", str(TOP))
sys.path.insert(0, str(TOP / "tests"))
from ranks import below  # noqa: E402
from verlc_test import ENV, VERLC, Scratch, Tests, start  # noqa: E402

CLIENT = r'''
import json, os, pathlib, random, time, types
HERE = pathlib.Path(__file__).resolve().parent
LOG = os.open(HERE / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def call(what, **kw):
    fault = HERE / "fault"
    if fault.exists():
        delay, p_raise, p_exit = json.loads(fault.read_text())
        time.sleep(random.random() * delay)
        if random.random() < p_raise:
            raise ConnectionError("down")
        if random.random() < p_exit:
            os._exit(3)
    os.write(LOG, (json.dumps({"what": what, **kw}) + "\n").encode())  # one write: whole, whoever dies


class Settings:
    def __init__(self, **kw):
        pass


class Run:
    def __init__(self, id):
        self.id = id
        self.settings = types.SimpleNamespace(mode="online")

    def log(self, data, step, commit=None):
        call("log", step=step, value=data["training/global_step"])

    def finish(self, exit_code):
        call("finish", exit_code=exit_code)


def init(id, **kw):
    call("init", id=id)
    return Run(id)


def teardown():
    pass
'''
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def tracker_helpers(pid):
    """The processes that have the client."""
    found = []
    for p in [pid, *below(pid)]:
        try:
            if b"verlc_helpers.tracker" in pathlib.Path(f"/proc/{p}/cmdline").read_bytes():
                found.append(p)
        except OSError:
            pass
    return found


def hit(pids, sig):
    for p in pids:
        try:
            os.kill(p, sig)
        except ProcessLookupError:
            pass


def lives(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def attack_run(p, r, begun):
    """Signals until the run is asked to end; whether a record may have been sent twice, and all processes that were seen."""
    twice, seen = False, set()
    early = r.random() < 0.2
    while not early and not begun() and p.poll() is None:
        time.sleep(0.02)
    for _ in range(r.randrange(1, 6)):
        time.sleep(r.random() * 0.6)
        seen.update([p.pid, *below(p.pid)])
        if r.random() < 0.3:
            twice |= bool(tracker_helpers(p.pid))
            hit(tracker_helpers(p.pid), signal.SIGKILL)
        else:
            hit(tracker_helpers(p.pid), r.choice(STOPS))
    seen.update([p.pid, *below(p.pid)])
    end = r.randrange(4)
    if end == 0:  # as ray job stop
        hit([p.pid, *below(p.pid)], signal.SIGTERM)
    elif end == 1:
        p.send_signal(r.choice(STOPS))
    elif end == 2:
        p.kill()
        twice = True
    return twice, seen


def sync(run_dir, env, r):
    """Until nothing is left; some are stopped on the way. True: one was killed."""
    killed = False
    for left in range(20, 0, -1):
        p = subprocess.Popen([VERLC, "trackers", "sync", run_dir], env={**ENV, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)
        if r.random() < 0.5 and left > 5:
            time.sleep(r.random() * 0.8)
            sig = r.choice((signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
            hit([p.pid, *below(p.pid)] if r.random() < 0.5 and sig != signal.SIGKILL else [p.pid], sig)
            killed |= sig == signal.SIGKILL
        out = p.communicate(timeout=120)[0]
        if p.returncode == 0:
            return killed, out
    raise AssertionError(f"sync does not come to its end: {out}")


def round_of(s, n, r):
    d, here = s.dir / f"run{n}", s.dir / f"client{n}"
    here.mkdir()
    (here / "wandb.py").write_text(CLIENT)
    fault = r.choice([[0, 0, 0], [0.05, 0, 0], [0.2, 0, 0], [0.05, 0.1, 0], [0.05, 0, 0.05]])
    (here / "fault").write_text(json.dumps(fault))
    env = {"PYTHONPATH": str(here), "WANDB_API_KEY": "0123456789"}
    p = start(s.ppo(f"run{n}", trainer__total_training_steps=r.choice([20, 100]), trainer__save_freq=100,
                    trainer__logger="[console,wandb]"), env)
    twice, seen = attack_run(p, r, (d / "trackers/wandb.state.json").exists if r.random() < 0.5 else (here / "calls.jsonl").exists)
    err = p.communicate(timeout=200)[1]
    (here / "fault").write_text(json.dumps([fault[0] / 4, 0, 0]))
    killed, out = sync(d, env, r) if (d / "run.db").exists() else (False, "")
    until = time.monotonic() + 5
    while any(map(lives, seen)) and time.monotonic() < until:
        time.sleep(0.05)
    alive = [x for x in seen if lives(x)]
    calls = [json.loads(line) for line in (here / "calls.jsonl").read_text().splitlines()] if (here / "calls.jsonl").exists() else []
    got = [c["step"] for c in calls if c["what"] == "log"]
    steps = [x for x, in sqlite3.connect(d / "run.db").execute("select distinct step from metrics order by step")] if out else []
    first = list(dict.fromkeys(got))
    once = not (twice or killed or fault[2])
    spool = {x["seq"] for x in map(json.loads, (d / "trackers/wandb.jsonl").read_text().splitlines())} if steps else ()
    why = []
    if not set(steps) <= set(got) or first != sorted(first):
        why.append(f"lost or out of order: run.db has {steps}, the client {got}")
    if once and len(got) != len(first):
        why.append(f"sent twice: {got}")
    if steps and (not calls or calls[-1]["what"] != "finish"):
        why.append(f"the run is not ended: {calls[-1:]}")
    if spool:
        why.append(f"{len(spool)} records are still kept")
    if alive:
        why.append(f"alive: {alive}")
    return why, f"{len(got)} records, {len(got) - len(first)} of them again, exit {p.returncode}, fault {fault}", err + out


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--seed", type=int, default=int(time.time()))
    a.add_argument("--rounds", type=int, default=50)
    a = a.parse_args()
    test, n_records = Tests(), 0
    with Scratch(n_train=16) as s:
        for n in range(a.rounds):
            why, what, text = round_of(s, n, random.Random(a.seed * 1000 + n))
            n_records += int(what.split()[0])
            test(f"seed {a.seed} round {n}: {what}", not why, f"{why}\n{text[-1500:]}" if why else "")
        print(f"{n_records} records")
    test.end()


main()
