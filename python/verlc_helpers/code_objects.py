"""Inside the sandbox, the process of a program that a statement tests: loads it, and answers the statement's questions about its
functions and objects (code_statement.py) until it is ended.  As in code_program.py all that is here is in the program's hands, and
nothing is here that it is not to know; the statement is not.

Invariant: one frame an answer; what is no data is a number of a list here.
"""

import builtins
import copy
import io
import json
import operator
import signal
import sys
import types

import code_values
from code_program import LONGEST_DETAIL, receive, send

BASES = {int: int.__int__, float: float.__float__, str: str.__str__, list: lambda v: list(list.__iter__(v)),
         tuple: lambda v: tuple(tuple.__iter__(v)), dict: lambda v: dict(dict.items(v)), set: lambda v: set(set.__iter__(v)),
         frozenset: lambda v: frozenset(frozenset.__iter__(v)), bytes: lambda v: bytes(memoryview(v))}


def run_coroutine(coroutine):
    import asyncio  # which takes a while to load
    return asyncio.run(coroutine)


def operation(name):
    return getattr(operator, name, None) or getattr(builtins, name)


OPERATIONS = {name: operation(name) for name in code_values.BINARY + code_values.UNARY} | {
    "call": lambda f, *args, **kwargs: f(*args, **kwargs),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "isinstance": isinstance, "issubclass": issubclass,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "enter": lambda o: type(o).__enter__(o), "exit": lambda o, *what: type(o).__exit__(o, *what),
    "run": run_coroutine, "copy": copy.copy, "deepcopy": copy.deepcopy,
}


class Objects:
    """What the statement knows of this process."""

    def __init__(self, names, answers, questions):
        self.names, self.answers, self.questions = names, answers, questions
        self.objects, self.numbers = [], {}
        self.operations = OPERATIONS | {"global": lambda name: names[name], "defined": lambda some: [n for n in some if n in names],
                                        "data": self.data}

    @staticmethod
    def base(value):
        return next((base for base in BASES if isinstance(value, base)), None)

    def data(self, value):
        return BASES[self.base(value)](value)

    def number(self, value):
        n = self.numbers.get(id(value))
        if n is None:
            n = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # which keeps its id its own
        return n

    def encode(self, value, kept, whole=False):
        refs = {id(v): k for k, v in kept.items()}

        def other(value, one):
            nonlocal whole
            if id(value) in refs and not whole:
                return {"kept": refs[id(value)]}
            whole = False
            if (name := code_values.builtin_name(value)) is not None:
                return {"builtin": name}
            if isinstance(value, type) and issubclass(value, BaseException):
                return {"error": self.error_class(value)}
            if type(value) is types.CoroutineType:
                return {"coroutine": self.number(value)}
            try:
                return code_values.exactly(value, one)
            except code_values.Unknown:
                return {"object": [self.number(value), self.base(value) is not None]}

        return code_values.encode(value, other)

    def error_class(self, kind):
        bases = [b.__name__ for b in kind.__mro__ if getattr(builtins, b.__name__, None) is b]
        return [str(kind.__name__), bases, self.number(kind)]

    def raised(self, error):
        try:
            args = self.encode(tuple(error.args), {})
        except Exception:
            args = {"tuple": []}
        return {"kind": self.error_class(type(error)), "args": args, "object": self.number(error)}

    def decode(self, encoded, kept):
        def other(kind, what, one):
            if kind == "object":
                return self.objects[what]
            if kind == "keep":
                kept[what[0]] = one(what[1])
                return kept[what[0]]
            if kind == "kept":
                return kept[what]
            if kind == "callback":
                return lambda *args, **kwargs: self.call_back(what, args, kwargs)
            raise ValueError(kind)

        return code_values.decode(encoded, other)

    def call_back(self, number, args, kwargs):
        """A function of the statement's."""
        send(self.answers, "call", {"callback": number, "args": self.encode(list(args), {}), "kwargs": self.encode(kwargs, {})})
        while "op" in (reply := receive(self.questions)):
            self.answer(reply)
        if "raised" in reply:
            raise getattr(builtins, reply["raised"][0], RuntimeError)(reply["raised"][1])
        return self.decode(reply["value"], {})

    def states(self, kept):
        return {k: json.dumps(self.encode(v, kept, whole=True)) for k, v in kept.items()}

    def answer(self, question):
        kept = {}
        args, kwargs, before = deeper(self.arguments, question, kept)
        try:
            value, reply = self.operations[question["op"]](*args, **kwargs), {}
        except BaseException as error:
            value, reply = None, {"raised": self.raised(error)}
        deeper(self.reply, value, reply, kept, before)

    def arguments(self, question, kept):
        args = [self.decode(encoded, kept) for encoded in question["args"]]
        kwargs = {name: self.decode(encoded, kept) for name, encoded in question["kwargs"].items()}
        return args, kwargs, self.states(kept)

    def reply(self, value, reply, kept, before):
        if not reply:
            reply["value"] = self.encode(value, kept)
        if kept:
            reply["changed"] = [[k, json.loads(state)] for k, state in self.states(kept).items() if state != before[k]]
        reply["printed"] = printed()
        send(self.answers, "result", reply)


def deeper(function, *args):
    """Values are copied to a depth that the program itself may not have."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, code_values.DEEP))
    try:
        return function(*args)
    finally:
        sys.setrecursionlimit(limit)


def catch_output():
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
    return sys.stdout


def printed():
    """What was printed since the last time, where the program has left sys.stdout as it was."""
    if sys.stdout is not CATCHING or CATCHING.closed:
        return ""
    text = CATCHING.buffer.getvalue().decode("utf-8", "replace")
    CATCHING.seek(0)
    CATCHING.truncate()
    return text


CATCHING = None


def serve_statement(task, answers, questions):
    global CATCHING
    signal.alarm(task["seconds"])
    sys.argv = ["main.py"]
    CATCHING = catch_output()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = "main.py"
    try:
        code = compile(task["code"], "main.py", "exec")
    except Exception as error:
        return send(answers, "compile_error", repr(error)[:LONGEST_DETAIL])
    try:
        exec(code, vars(main))
    except BaseException as error:
        return send(answers, "runtime_error", repr(error)[:LONGEST_DETAIL])
    printed()
    send(answers, "loaded", None)
    objects = Objects(vars(main), answers, questions)
    while True:
        objects.answer(receive(questions))
