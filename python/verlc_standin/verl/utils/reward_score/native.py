"""The graders of verlc itself, asked through `verlc algo`: one process, one line of JSON a call.

The program is that of `verlc exec` (VERLC), else the one that started this process, else verlc on PATH.
Invariant: a grader that fails raises; it never gives a score."""

import json
import os
import shutil
import subprocess
import sys
import threading

FAILURES = {"missing": NotImplementedError, "timeout": TimeoutError, "crash": RuntimeError}  # by status
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
        env = {**os.environ, "VERLC_PYTHON": sys.executable}  # its graders' packages are this interpreter's
        PROCESS = os.getpid(), subprocess.Popen([program(), "algo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    return PROCESS[1]


def ask(request):
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
        raise FAILURES.get(answer.get("status"), ValueError)(answer["error"])
    return answer


def grade(data_source, solution, ground_truth, **more):
    """What the grader of this data source answers, or the one named grader=: {"score": number, ...}."""
    return ask({"op": "reward", "data_source": data_source, "solution_str": solution, "ground_truth": ground_truth, **more})


def graded(grader, solution, ground_truth):
    return grade("", solution, ground_truth, grader=grader)


def normal_form(grader, answer):
    """The answer as this grader compares it."""
    return ask({"op": "normal_form", "grader": grader, "answer": answer})["answer"]
