"""Inside the sandbox, the process of a program that is tested: loads it, and answers each test (a text for standard input, or
arguments) with a frame: output, value, or what has failed.  All that is here is in the program's hands: it may change any of it,
and answer in its place.  So an answer is data and no verdict, and nothing is here that a program is not to know: no expected
answer, no descriptor but the two of this process (code_harness.py).

A program sees what verl's prime_code shows it (testing_util.py): the names of many modules, a text as sys.stdin, and
without the functions of os and the modules that verl takes away.

Invariant: one frame an answer, ASCII, on a pipe that is read as far as it has this form.
"""

import ast
import builtins
import io
import json
import os
import signal
import sys

TAKEN_FROM_OS = ("kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace "
                 "unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir").split()
TAKEN_MODULES = "ipdb joblib resource psutil tkinter subprocess ctypes".split()
LONGEST_DETAIL = 300


class Failed(Exception):
    def __init__(self, kind, error):
        super().__init__(kind)
        self.kind = kind
        self.detail = (error if isinstance(error, str) else repr(error))[:LONGEST_DETAIL]


# ---- frames: a word, the length, JSON in ASCII ----

def write_all(fd, data):
    while data:
        data = data[os.write(fd, data):]


def send(fd, word, what):
    data = json.dumps(what).encode()
    write_all(fd, b"%s %d\n" % (word.encode(), len(data)) + data)


def receive(fd):
    """The harness's requests; it says nothing that is not of this form."""
    head = b""
    while not head.endswith(b"\n"):
        head += os.read(fd, 1) or os._exit(0)
    n, parts = int(head.split()[1]), []
    while n > 0:
        parts.append(os.read(fd, n) or os._exit(0))
        n -= len(parts[-1])
    return json.loads(b"".join(parts))


# ---- tests ----

def take_away():
    builtins.exit = builtins.quit = builtins.help = None
    import shutil  # loaded by the harness, where there are tests
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
        exec(task["prelude"] + (task["code"] if name else as_function(task["code"])), names)
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
    return "output", out.getvalue()


def int_keys(args):
    """JSON's keys are strings; verl makes them numbers where the first argument is an object of such, and drops the others."""
    try:
        return [{int(key): value for key, value in args[0].items()}] if isinstance(args[0], dict) else args
    except Exception:
        return args


def tagged(value):
    """JSON that distinguishes a tuple from a list and a key 1 from a key '1'."""
    if isinstance(value, dict):
        return {"dict": [[tagged(k), tagged(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [tagged(v) for v in value]}
    return value


def call_with_arguments(function, args):
    value = function(*int_keys(args))
    json.dumps(value)  # what JSON cannot carry is a failure
    return "value", tagged(value)


def run_one(task, function, test):
    try:
        word, what = call_with_arguments(function, test) if task["fn_name"] else call_with_stdin(function, test)
    except Exception as error:
        raise Failed("runtime_error", error) from error
    if len(json.dumps(what)) > task["longest"]:
        raise Failed("output_limit", f"over {task['longest']} bytes")
    return word, what


def answer_tests(task, numbers, answers, _):
    """One frame a test; one that has failed is the last."""
    take_away()
    try:
        signal.alarm(task["seconds"])
        function = load(task)
        for i in numbers:
            signal.alarm(task["seconds"])
            word, what = run_one(task, function, task["tests"][i])
            signal.alarm(0)
            send(answers, word, what)
    except Failed as failure:
        send(answers, failure.kind, failure.detail)
