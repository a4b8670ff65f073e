"""The processes that run a Python scorer: what a call costs, how many calls of an async judge are in flight, and that no
sample is lost where processes are killed. `make bench` runs it with --full: the judge of 10 s and the minute of kills that
the figures are stated for, beside verl's own manager where .venv-oracle is."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, run  # noqa: E402

FULL = "--full" in sys.argv
KILL_S = 60 if FULL else 6
JUDGE_S = 10 if FULL else 1

SCORERS = '''
import asyncio, os, time
def trivial(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
def index_of(solution_str):
    return float(solution_str.split()[1].rstrip("."))
scores = False
def begun():
    """For those who kill this process: it has started."""
    global scores
    if not scores:
        open(os.path.join(os.path.dirname(__file__), f"scores.{os.getpid()}"), "w").close()
    scores = True
def short(data_source, solution_str, ground_truth, extra_info=None, seconds=0.01):
    begun()
    time.sleep(seconds)
    return index_of(solution_str)
now = most = 0
async def judge(data_source, solution_str, ground_truth, extra_info=None):
    global now, most
    now += 1
    most = max(most, now)
    await asyncio.sleep(JUDGE_S)
    for _ in range(100):
        await asyncio.sleep(0 if most >= 200 else 0.1)  # a busy machine sends them when it can
    if now == most:  # the first of a full round to end
        with open(os.path.join(os.path.dirname(__file__), f"in_flight.{os.getpid()}"), "w") as f:
            f.write(str(most))
    now -= 1
    return index_of(solution_str)
async def brief_judge(data_source, solution_str, ground_truth, extra_info=None):
    begun()
    await asyncio.sleep(0.1)
    return index_of(solution_str)
def deadly(data_source, solution_str, ground_truth, extra_info=None):
    if index_of(solution_str) % 100 == 7:
        os._exit(9)
    return index_of(solution_str)
async def deadly_judge(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.1)
    return deadly(data_source, solution_str, ground_truth)
'''.replace("JUDGE_S", str(JUDGE_S))


def bench(s, name, **options):
    args = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
    return json.loads(run("bench", "reward", f"--path={s.dir / 'scorers.py'}", f"--name={name}", *args, timeout=600).stdout)


def check_overhead(s, test):
    for size in 1024, 2048, 4096:
        for _ in range(30):  # the least is the scorer's own; what else runs on the machine adds to the others
            got = bench(s, "trivial", bytes=size, samples=10000 if FULL else 2000)
            if got["ms_per_sample"] <= 0.2:
                break
        print(f"        {size} bytes, one process: {got['ms_per_sample']:.3f} ms a sample")
        test(f"a Python scorer costs at most 0.2 ms a sample of {size} bytes", got["ms_per_sample"] <= 0.2 and
             got["score"] == got["samples"], str(got))


def check_judge(s, test):
    n, workers, in_flight = (1000, 2, 200) if FULL else (400, 1, 200)
    got = bench(s, "judge", samples=n, workers=workers)
    most = [int(f.read_text()) for f in s.dir.glob("in_flight.*")]
    print(f"        {n} calls of {JUDGE_S} s, {workers} processes: {got['seconds']:.2f} s, in flight {most}")
    test("at least 200 calls of an async judge are in flight in each process", got["score"] == n and got["sum"] == n * (n - 1) / 2
         and len(most) == workers and min(most) >= in_flight, f"{most}: {got}")


def processes():
    """{pid: parent, command line} of all processes."""
    got = {}
    for d in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            got[int(d.name)] = (int((d / "stat").read_text().rsplit(")", 1)[1].split()[1]), (d / "cmdline").read_text())
        except OSError:
            continue
    return got


def scorers_of(pid):
    """The Python processes of a run, below their reapers."""
    all_of = processes()
    below = {p for p, (parent, _) in all_of.items() if parent == pid}
    return [p for p, (parent, line) in all_of.items() if parent in below and "verlc_helpers.reward" in line]


def check_kills(s, test, name, n, **options):
    """A process is killed every second (two in the short test); each sample has its score all the same. One that dies while it
    starts would end the run, so that none is killed before it scores."""
    args = [VERLC, "bench", "reward", f"--path={s.dir / 'scorers.py'}", f"--name={name}", f"--samples={n}",
            *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]
    p = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    killed, done = [], threading.Event()

    def kill():
        while not done.wait(1 if FULL else 0.5) and (FULL or len(killed) < 2 * KILL_S):  # a busy machine starts them slowly
            scoring = [q for q in scorers_of(p.pid) if (s.dir / f"scores.{q}").exists()]
            for pid in sorted(scoring, key=lambda q: killed.count(q))[-1:]:
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                except ProcessLookupError:
                    pass

    killer = threading.Thread(target=kill)
    killer.start()
    out, err = p.communicate(timeout=600)
    done.set()
    killer.join()
    got = json.loads(out) if out else {}
    print(f"        {name}: {len(killed)} kills in {got.get('seconds', 0):.1f} s")
    test(f"{name}: killed processes lose no sample", got.get("score") == n and got["sum"] == n * (n - 1) / 2 and
         len(killed) >= KILL_S / 2, f"{len(killed)} kills, {got} {err[-600:]}")


def check_blame(s, test):
    """A sample that ends its process, whenever it is scored."""
    for name, options in (("deadly", {"workers": 2}), ("deadly_judge", {"workers": 2})):
        got = bench(s, name, samples=200, **options)
        want = 200 * 199 / 2 - 7 - 107
        test(f"{name}: a sample that ends its process is a crash, the others have their scores", got["crash"] == 2 and
             got["score"] == 198 and got["sum"] == want and "exit code 9" in got["message"], str(got))


VERL = '''
import asyncio, inspect, sys, time
sys.path.insert(0, "tools")
import torch
from oracle_rate_limit import verl_class
class Base:
    def __init__(self, config, tokenizer, *_):
        self.loop = asyncio.get_running_loop()
        self.tokenizer = tokenizer
class Words:
    def decode(self, ids, skip_special_tokens=True):
        return text
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
text = "First we add the apples. " * 82
Naive = verl_class("experimental/reward_loop/reward_manager/naive.py", "NaiveRewardManager", RewardManagerBase=Base,
                   DataProto=object, register=lambda name: lambda cls: cls, inspect=inspect, default_compute_score=None)
sys.path.insert(0, "python/verlc_standin")
from verl.protocol import DataProto  # verlc's, which is the smaller one
async def main():
    manager = Naive(None, Words(), compute_score)
    data = [DataProto.from_dict({"responses": torch.zeros(1, 512, dtype=torch.long),
                                 "attention_mask": torch.ones(1, 640, dtype=torch.long)},
                                {"data_source": ["openai/gsm8k"], "reward_model": [{"ground_truth": "0"}], "extra_info": [{}]})
            for _ in range(2000)]
    t = time.perf_counter()
    await asyncio.gather(*(manager.run_single(d) for d in data))
    print(round((time.perf_counter() - t) / 2, 3))
asyncio.run(main())
'''


def show_verl():
    python = pathlib.Path(".venv-oracle/bin/python")
    if python.exists():
        p = subprocess.run([python, "-c", VERL], capture_output=True, text=True)
        print(f"        verl's naive manager, in its own process: {p.stdout.strip() or p.stderr[-500:]} ms a sample")


def main():
    test = Tests()
    with Scratch() as s:
        (s.dir / "scorers.py").write_text(SCORERS)
        check_overhead(s, test)
        check_judge(s, test)
        check_kills(s, test, "short", KILL_S * 350, workers=4)
        check_kills(s, test, "brief_judge", KILL_S * 2000, workers=2, max_concurrent=200)
        check_blame(s, test)
    if FULL:
        show_verl()
    test.end()


main()
