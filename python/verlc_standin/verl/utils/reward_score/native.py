"""The graders of verlc itself, asked through `verlc algo`: one process, one line of JSON a call.

The program is that of `verlc exec` (VERLC), else the one that started this process, else verlc on PATH.
Invariant: a grader that fails raises; it never gives a score."""

import json
import os
import shutil
import subprocess
import threading

LOCK = threading.Lock()
PROCESS = None  # (pid of its owner, Popen)


def program():
    parent = f"/proc/{os.getppid()}/exe"
    if os.environ.get("VERLC"):
        return os.environ["VERLC"]
    if os.path.basename(os.path.realpath(parent)) == "verlc":
        return os.path.realpath(parent)
    found = shutil.which("verlc")
    if not found:
        raise RuntimeError("verl.utils.reward_score: the program verlc was not found; put it on PATH, or set VERLC to it")
    return found


def process():
    global PROCESS
    if PROCESS is None or PROCESS[0] != os.getpid() or PROCESS[1].poll() is not None:
        PROCESS = os.getpid(), subprocess.Popen([program(), "algo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return PROCESS[1]


def grade(data_source, solution, ground_truth, **more):
    """What the grader of this data source answers: {"score": number, ...}."""
    request = {"op": "reward", "data_source": data_source, "solution_str": solution, "ground_truth": ground_truth, **more}
    line = json.dumps(request).encode("ascii") + b"\n"  # surrogates travel as escapes
    with LOCK:
        p = process()
        p.stdin.write(line)
        p.stdin.flush()
        answer = p.stdout.readline()
    if not answer:
        raise RuntimeError(f"verl.utils.reward_score: {program()} ended without an answer")
    answer = json.loads(answer)
    if "error" in answer:
        raise (NotImplementedError if answer.get("status") == "missing" else ValueError)(answer["error"])
    return answer
