"""Inside the sandbox: gives a program its tests, each in a process of its own, and reports what it answered (code_reward.py
sends this file and its modules there).

Standard input begins with a length of 16 digits and {"code", "seconds", "longest"} of that length.  With "fn_name" and "tests" a
test is a text for standard input, or with fn_name the list of arguments.  With "parts" a test is a statement: part i is [place,
length] of [secret, statement] in the rest of standard input.

Standard output gets "ready" before the first program, and one line a test: its number, a word of WORDS, JSON in ASCII.  The
words say what happened: output and value are what the program answered, which is compared elsewhere; held is a statement that
has run to its end, with its secret.  There is no word for a test that has passed.

The program's process has two pipes to this one and nothing else of it.  A statement is read after the program's process was
made, by a process that is made for it; its secret and what it expects are in no other one.

Invariant: nothing runs outside the sandbox; no process of the harness runs anything of the program's, and none of the program's
has the channel or standard input.
"""

import errno
import json
import os
import select
import signal
import sys
import time

FAILURES = "compile_error runtime_error output_limit time_limit".split()
WORDS = ["output", "value", "held"] + FAILURES
FROM_PROGRAM = ["output", "value", "loaded", "result", "call", "compile_error", "runtime_error", "output_limit"]
LONGEST_HEAD, LENGTH = 64, 16
TICK_S = 0.05
NAMES = ("string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
           "builtins typing").split()
PRELUDE = ("".join(f"from {name} import *\n" for name in NAMES) +
           "".join(f"import {name}\n" for name in NAMES if name not in ("builtins", "typing")) +
           "sys.setrecursionlimit(6*10**5)\n")
MODULES = ("code_program", "code_values", "code_objects", "code_statement")  # of this directory


class Channel:
    """To the world outside."""

    def __init__(self, fd):
        self.fd = fd

    def report(self, i, word, what):
        self.report_raw(i, word, json.dumps(what).encode())

    def report_raw(self, i, word, data):
        code_program.write_all(self.fd, b"%d %s %s\n" % (i, word.encode(), data))


# ---- the process of a program ----

def fork():
    """As os.fork; what an earlier program has left may need a moment to go."""
    end = time.monotonic() + 2
    while True:
        try:
            return os.fork()
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > end:
                raise
            time.sleep(0.01)


def leave_all_but(*fds):
    """Descriptors 3, 4 ... are these; 0, 1 and 2 lead nowhere; there are no others."""
    high = [os.dup(fd) for fd in fds]
    nothing = os.open(os.devnull, os.O_RDWR)
    for at, fd in enumerate([nothing] * 3 + high):
        os.dup2(fd, at)
    os.closerange(3 + len(fds), os.sysconf("SC_OPEN_MAX"))


class Program:
    """A process that runs run(answers, questions) of code_program, and what it says until the deadline."""

    def __init__(self, run, seconds, longest):
        self.seconds, self.longest, self.status = seconds, longest, None
        self.answers, theirs = os.pipe()
        questions, self.questions = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            self.become(run, theirs, questions)
        os.close(theirs)
        os.close(questions)
        self.deadline, self.rest = time.monotonic() + seconds, b""
        self.poll = select.poll()
        self.poll.register(self.answers, select.POLLIN)
        os.set_blocking(self.questions, False)

    @staticmethod
    def become(run, theirs, questions):
        """Never returns."""
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            leave_all_but(theirs, questions)
            sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
            run(3, 4)
        finally:
            os._exit(0)

    def close(self):
        os.close(self.answers)
        os.close(self.questions)

    def ended(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def how_ended(self):
        end = time.monotonic() + 1
        while not self.ended() and time.monotonic() < end:
            time.sleep(0.001)
        if self.status is None:
            return code_program.Failed("runtime_error", "the program has closed what it answers on")
        if not os.WIFSIGNALED(self.status):
            return code_program.Failed("runtime_error", f"the program ended: exit code {os.WEXITSTATUS(self.status)}")
        number = os.WTERMSIG(self.status)
        if number == signal.SIGALRM:
            return self.late()
        return code_program.Failed("runtime_error", "the program ended: " + signal.Signals(number).name)

    def late(self):
        return code_program.Failed("time_limit", f"over {self.seconds} s")

    def read(self):
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise self.late()
            was_ended = self.ended()
            if self.poll.poll(1000 * min(left, 0 if was_ended else TICK_S)):
                piece = os.read(self.answers, 1 << 16)
                if piece:
                    return piece
                was_ended = True
            if was_ended:
                raise self.how_ended()

    def receive(self):
        """(word, JSON as bytes, ASCII without ends of lines)."""
        parts = [self.rest]
        while b"\n" not in parts[0]:
            if len(parts[0]) > LONGEST_HEAD:
                raise self.garbled()
            parts[0] += self.read()
        head, _, parts[0] = parts[0].partition(b"\n")
        word, n = self.read_head(head)
        have = len(parts[0])
        while have < n:
            parts.append(self.read())
            have += len(parts[-1])
        data = b"".join(parts)
        data, self.rest = data[:n], data[n:]
        if data.translate(None, PRINTABLE):
            raise self.garbled()
        return word, data

    def read_head(self, head):
        word, _, n = head.decode("ascii", "replace").partition(" ")
        if word not in FROM_PROGRAM or not (n.isascii() and n.isdigit()) or len(n) > LENGTH:
            raise self.garbled()
        if int(n) > self.longest:
            raise code_program.Failed("output_limit", f"over {self.longest} bytes")
        return word, int(n)

    @staticmethod
    def garbled():
        return code_program.Failed("runtime_error", "the program's process answers no sense")

    def send(self, word, what):
        data = json.dumps(what).encode()
        data = b"%s %d\n" % (word.encode(), len(data)) + data
        ready = select.poll()
        ready.register(self.questions, select.POLLOUT)
        while data:
            if self.deadline <= time.monotonic():
                raise self.late()
            if not ready.poll(1000 * TICK_S):
                continue
            try:
                data = data[os.write(self.questions, data[:1 << 16]):]
            except BlockingIOError:
                pass
            except BrokenPipeError as error:
                raise self.how_ended() from error


PRINTABLE = bytes(range(0x20, 0x7f))


def end_others():
    """Every process in the sandbox but its first one and this."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except OSError:  # there is none
        pass


# ---- tests ----

def run_tests(task, numbers, channel):
    i = numbers[0]
    program = Program(lambda answers, questions: code_program.answer_tests(task, numbers, answers, questions),
                      task["seconds"] + 1, task["longest"])
    try:
        for i in numbers:
            word, data = program.receive()
            if word not in WORDS:
                raise program.garbled()
            channel.report_raw(i, word, data)
            if word in FAILURES:
                break
    except code_program.Failed as failure:
        channel.report(i, failure.kind, failure.detail)
    program.close()
    end_others()


def read_input(place, n):
    parts = []
    while n > 0:
        parts.append(os.pread(0, n, place))
        if not parts[-1]:
            raise EOFError("standard input ends early")
        place, n = place + len(parts[-1]), n - len(parts[-1])
    return b"".join(parts)


def answer_statement(task, i, channel):
    """In a process of its own, which reads the statement when the program has a process of its own."""
    try:
        program = Program(lambda answers, questions: code_objects.serve_statement(task, answers, questions),
                          task["seconds"] + 1, task["longest"])
        word, data = program.receive()
        if word in FAILURES:
            return channel.report_raw(i, word, data)
        sys.setrecursionlimit(code_values.DEEP)
        place, n = task["parts"][i]
        secret, statement = json.loads(read_input(task["rest"] + place, n))
        code_statement.run(program, statement)
        channel.report(i, "held", secret)
    except code_program.Failed as failure:
        channel.report(i, failure.kind, failure.detail)


def wait(pid, seconds):
    """The wait status of a process, or None after that time."""
    end = time.monotonic() + seconds
    delay = 0.0005
    while True:
        some, status = os.waitpid(pid, os.WNOHANG)
        if some or time.monotonic() > end:
            return status if some else None
        time.sleep(delay)
        delay = min(2 * delay, 0.01)


def run_statement(task, i, channel):
    pid = fork()
    if pid == 0:
        try:
            answer_statement(task, i, channel)
        finally:
            os._exit(0)
    status = wait(pid, task["seconds"] + 2)
    end_others()
    if status is None:
        channel.report(i, "time_limit", f"over {task['seconds']} s")
    elif status != 0:
        channel.report(i, "runtime_error", "the statement's process has ended")


# ---- the start ----

def import_numpy():
    try:
        import numpy  # noqa: F401
    except ImportError:
        pass


def silence():
    """A channel to the true standard output; 1 and 2 lead nowhere from now on."""
    channel = Channel(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    return channel


def import_modules(statements):
    """They are next to this file, where programs may write later."""
    global code_program, code_objects, code_statement, code_values
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import code_program
    if statements:
        import code_objects
        import code_statement
        import code_values
    del sys.path[0]


def main():
    if os.path.exists("/proc/self"):  # every machine has that, and the sandbox never
        sys.exit("code_harness.py runs programs that are not trusted, in verlc's sandbox alone")
    n = int(read_input(0, LENGTH))
    task = json.loads(read_input(LENGTH, n))
    task |= {"rest": LENGTH + n, "prelude": PRELUDE}
    import_modules("parts" in task)
    limit = sys.getrecursionlimit()
    if "parts" not in task:
        exec("import shutil\n" + PRELUDE, {"sys": sys})  # loads the modules once
    sys.setrecursionlimit(limit)
    if "numpy" in task["code"]:  # it does not load without what is taken away; verl has it loaded before
        import_numpy()
    channel = silence()
    code_program.write_all(channel.fd, b"ready\n")  # whatever happens from here on is the program's doing
    if "parts" in task:
        for i in range(len(task["parts"])):
            run_statement(task, i, channel)
        return
    numbers = list(range(len(task["tests"])))
    for some in [numbers] if task["fn_name"] else [[i] for i in numbers]:
        run_tests(task, some, channel)


if __name__ == "__main__":
    main()
