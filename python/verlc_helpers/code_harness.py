"""Inside the sandbox: gives a program its tests, and reports what it answered (code_reward.py sends this file there).

Standard input is {"code", "fn_name", "tests", "seconds", "longest"}; without fn_name a test is a text for standard input, with
it the list of arguments.  Standard output gets one JSON object a test: {"test": i, "output": text} or {"test": i, "value": tagged},
else {"test": i, "failed": kind, "detail": text}.  No expected answer comes here, and whatever the program writes there
itself is only another answer.

A program sees what verl's prime_code shows it (testing_util.py): the names of many modules, a text as sys.stdin, and without
the functions of os and the modules that verl takes away.  Each test runs in a process forked from this one, which ends with
everything that it has started; with fn_name all tests run in one.

Invariant: nothing runs outside the sandbox; the process that forks runs nothing of the program's.
"""

import ast
import builtins
import io
import json
import os
import shutil
import signal
import sys

MODULES = ("string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
           "builtins typing").split()
PRELUDE = ("".join(f"from {name} import *\n" for name in MODULES) +
           "".join(f"import {name}\n" for name in MODULES if name not in ("builtins", "typing")) +
           "sys.setrecursionlimit(6*10**5)\n")
TAKEN_FROM_OS = ("kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace "
                 "unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir").split()
TAKEN_MODULES = "ipdb joblib resource psutil tkinter subprocess ctypes".split()
LONGEST_DETAIL = 300


class Failed(Exception):
    def __init__(self, kind, error):
        super().__init__(kind)
        self.kind = kind
        self.detail = repr(error)[:LONGEST_DETAIL]


def take_away():
    builtins.exit = builtins.quit = builtins.help = None
    for name in TAKEN_FROM_OS:
        setattr(os, name, None)
    shutil.rmtree = shutil.move = shutil.chown = None
    for name in TAKEN_MODULES:
        sys.modules[name] = None


def is_import(line):
    return line.startswith(("from ", "import "))


def without_main_guard(code):
    """The code with its last statement's body in the place of `if __name__ == '__main__':`."""
    try:
        body = ast.parse(code).body
        if isinstance(body[-1], ast.If) and ast.unparse(body[-1].test).strip() == "__name__ == '__main__'":
            return ast.unparse(body[:-1]) + "\n" + ast.unparse(body[-1].body)
    except Exception:  # what does not parse is found by compiling it
        pass
    return code


def as_function(code):
    """The program as the function code(); imports before its first other line stay outside."""
    text, started = "", False
    for line in without_main_guard(code).split("\n"):
        if not started and not is_import(line):
            text += "stdin = sys.stdin\nstdout = sys.stdout\ndef code():\n"
            started = True
        text += ("\t" if started else "") + line + "\n"
    return text


def load(task):
    """The function to call."""
    name = task["fn_name"]
    names = {}
    try:
        exec(PRELUDE + (task["code"] if name else as_function(task["code"])), names)
        owner = names["Solution"]() if name and "class Solution" in task["code"] else None
        return getattr(owner, name) if owner is not None else names[name or "code"]
    except Exception as error:
        raise Failed("compile_error", error) from error


def call_with_stdin(function, text):
    """What the function prints."""
    early, lines, out = sys.stdin, iter(text.split("\n")), io.StringIO()
    early.read = lambda *_: text  # of a program that has taken sys.stdin before
    early.readline = lambda *_: next(lines)
    early.readlines = lambda *_: text.split("\n")
    out.close = lambda _: 1
    quiet, sys.stdin, sys.stdout = sys.stdout, io.StringIO(text), out
    try:
        function()
    except SystemExit:
        pass
    finally:
        sys.stdout = quiet
    return {"output": out.getvalue()}


def int_keys(args):
    """JSON's keys are strings; verl makes them numbers where the first argument is an object of such, and drops the others."""
    try:
        return [{int(key): value for key, value in args[0].items()}] if isinstance(args[0], dict) else args
    except Exception:
        return args


def tagged(value):
    """JSON that tells a tuple from a list and a key 1 from a key '1'."""
    if isinstance(value, dict):
        return {"dict": [[tagged(k), tagged(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [tagged(v) for v in value]}
    return value


def call_with_arguments(function, args):
    value = function(*int_keys(args))
    json.dumps(value)  # what JSON cannot carry is a failure
    return {"value": tagged(value)}


def run_one(task, function, test):
    try:
        return call_with_arguments(function, test) if task["fn_name"] else call_with_stdin(function, test)
    except Exception as error:
        raise Failed("runtime_error", error) from error


def answer_tests(task, numbers, channel):
    """In a process of their own; an answer that has failed is the last."""
    take_away()
    i = numbers[0]
    try:
        signal.alarm(task["seconds"])
        function = load(task)
        for i in numbers:
            signal.alarm(task["seconds"])
            answer = run_one(task, function, task["tests"][i])
            signal.alarm(0)
            line = json.dumps({"test": i} | answer)
            if len(line) > task["longest"]:
                raise Failed("output_limit", f"over {task['longest']} bytes")
            channel.write(line + "\n")
            channel.flush()
    except Failed as failure:
        channel.write(json.dumps({"test": i, "failed": failure.kind, "detail": failure.detail}) + "\n")
        channel.flush()


class TooLong(Exception):
    pass


def too_long(*_):
    raise TooLong


def end_others():
    """Every process in the sandbox but its first one and this."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except OSError:  # there is none
        pass


def wait(pid, seconds):
    """How the process has ended: its wait status, or None after that time."""
    signal.signal(signal.SIGALRM, too_long)
    try:
        signal.alarm(seconds)
        return os.waitpid(pid, 0)[1]
    except TooLong:
        return None
    finally:
        signal.alarm(0)


def run_tests(task, numbers, channel):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            answer_tests(task, numbers, channel)
        finally:
            os._exit(0)
    status = wait(pid, task["seconds"] + 1)
    end_others()
    if status is None or os.WIFSIGNALED(status):
        late = status is None or os.WTERMSIG(status) == signal.SIGALRM
        how = f"over {task['seconds']} s" if late else signal.Signals(os.WTERMSIG(status)).name
        kind = "time_limit" if late else "runtime_error"
        channel.write(json.dumps({"test": numbers[0], "failed": kind, "detail": how}) + "\n")
        channel.flush()


def import_numpy():
    try:
        import numpy  # noqa: F401
    except ImportError:
        pass


def silence():
    """A channel to the true standard output; 0, 1 and 2 lead nowhere from now on."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    return channel


def main():
    if os.path.exists("/proc/self"):  # every machine has that, and the sandbox never
        sys.exit("code_harness.py runs programs that are not trusted, in verlc's sandbox alone")
    task = json.load(sys.stdin)
    exec(PRELUDE, {"sys": sys})  # loads the modules once
    if "numpy" in task["code"]:  # it does not load without what is taken away; verl has it loaded before
        import_numpy()
    channel = silence()
    numbers = list(range(len(task["tests"])))
    for some in [numbers] if task["fn_name"] else [[i] for i in numbers]:
        run_tests(task, some, channel)


if __name__ == "__main__":
    main()
