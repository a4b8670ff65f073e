"""Inside the sandbox, in the harness: runs a statement that tests a program (`assert add(1, 2) == 3`) in a process that the
program is not in.  The program's functions and objects are Remotes here: what the statement does with them is asked of the
program's process (code_objects.py); what they answer is copied, so that the statement compares data, with Python's own ==.

The program learns the arguments that it is called with, and no more.  So the operators of its objects are asked for two of its
own alone: with other data, == is False, + and < are a TypeError, and `in` goes through the object.  Builtins are Python's,
whatever the program calls its own, but where a statement has no other name that could be the program's (`assert sum(1, 2) == 3`).

Invariant: whatever the other process sends, the statement goes on with values of code_values and Remotes, or fails.
"""

import ast
import builtins
import importlib
import json
import operator
import sys

import code_values
from code_program import Failed
from code_values import BINARY, UNARY

MUTABLE = (list, dict, set, bytearray)
MODULES = dict.fromkeys("""math cmath re json itertools functools collections operator random statistics string copy datetime heapq
bisect sys os io typing fractions decimal time""".split()) | {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
HELPERS = {"isclose": "math", "sqrt": "math", "pi": "math", "inf": "math", "nan": "math", "Counter": "collections",
           "OrderedDict": "collections", "deque": "collections", "defaultdict": "collections", "allclose": "numpy"}

SPECIAL = [f"__{name}__" for name in "name qualname module dict annotations wrapped defaults members mro bases next".split()]


class Lost(BaseException):
    """The program's process has ended or speaks no sense; no statement goes on after that."""


class Session:
    """What the statement knows of the program's process."""

    def __init__(self, program):
        self.program, self.remotes, self.errors, self.callbacks, self.failure = program, {}, {}, [], None

    # ---- values ----

    def encode(self, value, kept):
        def other(value, one):
            if isinstance(value, Remote):
                return {"object": number_of(value)}
            for k, known in enumerate(kept):
                if known is value:
                    return {"kept": k}
            if type(value) in MUTABLE:
                kept.append(value)
                return {"keep": [len(kept) - 1, code_values.exactly(value, one)]}
            if (name := code_values.builtin_name(value)) is not None:
                return {"builtin": name}
            if isinstance(value, type) and hasattr(value, "_of_program"):
                return {"object": number_of(value._of_program)}
            try:
                return code_values.exactly(value, one)
            except code_values.Unknown:
                return self.encode_unknown(value)

        return code_values.encode(value, other)

    def encode_unknown(self, value):
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} of the statement cannot be given to the program")
        self.callbacks.append(value)
        return {"callback": len(self.callbacks) - 1}

    def decode(self, encoded, kept):
        def other(kind, what, one):
            if kind == "kept":
                return kept[what]
            if kind == "error":
                return self.error_class(what)
            if kind == "coroutine":
                return waiting(self.remote(what, False))
            if kind != "object":
                raise ValueError(kind)
            return self.remote(*what)

        return code_values.decode(encoded, other)

    def remote(self, n, has_data):
        if n not in self.remotes:
            self.remotes[n] = new_remote(self, int(n), bool(has_data))
        return self.remotes[n]

    def error_class(self, what):
        """An exception of the program's, as a class that is derived from the same builtin ones."""
        name, bases, n = what
        if name in bases:
            return error_of(name)
        if n not in self.errors:
            base = next((error_of(b) for b in bases), Exception)
            self.errors[n] = type(str(name), (base, ), {"_of_program": self.remote(n, False), "__getattr__": from_program})
        return self.errors[n]

    def raised(self, encoded):
        args = self.decode(encoded["args"], [])
        kind = self.error_class(encoded["kind"])
        error = kind.__new__(kind, *args)
        error.args = args
        error._object = self.remote(encoded["object"], False)
        return error

    # ---- questions ----

    def ask(self, op, *args, **kwargs):
        if self.failure:
            raise Lost
        kept = []
        question = {"op": op, "args": [self.encode(a, kept) for a in args],
                    "kwargs": {name: self.encode(a, kept) for name, a in kwargs.items()}}
        try:
            return self.answered(question, kept)
        except Failed as failure:
            self.failure = failure
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError, ImportError) as error:
            self.failure = Failed("runtime_error", f"the program's process answers no sense: {error!r}")
        raise Lost

    def answered(self, question, kept):
        word, reply = self.exchange(question)
        while word == "call":
            word, reply = self.exchange(self.call_back(reply))
        if word != "result":
            raise ValueError(word)
        for k, encoded in reply.get("changed", []):
            change(kept[k], self.decode(encoded, kept))
        error = self.raised(reply["raised"]) if "raised" in reply else None
        value = None if error is not None else self.decode(reply["value"], kept)
        return error, value, str(reply["printed"])

    def exchange(self, what):
        self.program.send("ask", what)
        word, data = self.program.receive()
        return word, json.loads(data)

    def call_back(self, asked):
        """A function of the statement's that the program calls."""
        args, kwargs = self.decode(asked["args"], []), self.decode(asked["kwargs"], [])
        try:
            return {"value": self.encode(self.callbacks[asked["callback"]](*args, **kwargs), [])}
        except Exception as error:
            return {"raised": [type(error).__name__, str(error)]}


def error_of(name):
    kind = getattr(builtins, name)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ValueError(name)
    return kind


async def waiting(coroutine):
    """A coroutine of the program's, which its process runs when it is awaited here."""
    return ask("run", coroutine)


def from_program(error, name):
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(error._object, name)


def change(target, value):
    """A container of the statement's becomes what the program has made of its copy."""
    if type(target) is not type(value):
        raise ValueError("a container changes its type")
    if isinstance(target, (list, bytearray)):
        target[:] = value
    else:
        value = value.copy()
        target.clear()
        target.update(value)


# ---- the program's objects ----

class Remote:
    __slots__ = ("_session", "_number", "_has_data", "__weakref__")


def new_remote(session, number, has_data):
    made = object.__new__(Remote)
    object.__setattr__(made, "_session", session)
    object.__setattr__(made, "_number", number)
    object.__setattr__(made, "_has_data", has_data)
    return made


def slot(remote, name):
    return object.__getattribute__(remote, name)


def number_of(remote):
    return slot(remote, "_number")


def ask(op, remote, *args, **kwargs):
    error, value, printed = slot(remote, "_session").ask(op, remote, *args, **kwargs)
    if printed:
        sys.stdout.write(printed)
    if error is not None:
        raise error
    return value


def data_of(value):
    """Of an object that is derived from a type of data: that data."""
    return ask("data", value) if isinstance(value, Remote) and slot(value, "_has_data") else value


def own(value):
    return isinstance(value, Remote)


def binary(name, left, right):
    a, b = data_of(left), data_of(right)
    if own(a) and own(b):
        return ask(name, a, b)
    if own(a) or own(b):
        return {"eq": False, "ne": True}.get(name, NotImplemented)
    try:
        return divmod(a, b) if name == "divmod" else getattr(operator, name)(a, b)
    except TypeError:
        return NotImplemented


def unary(name):
    function = getattr(builtins, name, None) or getattr(operator, name)

    def method(self, *args):
        value = data_of(self) if name not in ("str", "repr", "hash", "dir") else self
        return ask(name, value, *args) if own(value) else function(value, *args)

    return method


def getitem(self, key):
    value = data_of(self)
    return ask("getitem", value, key) if own(value) else value[key]


def getattribute(self, name):
    """Not numpy's __array_interface__ and its like, which is an address in this process."""
    if name.startswith("__") and name not in SPECIAL:
        raise AttributeError(name)
    return ask("getattr", self, name)


def contains(self, item):
    return any(item is x or item == x for x in iter(self))


def add_methods():
    for name in UNARY:
        setattr(Remote, f"__{name}__", unary(name))
    for name in BINARY:
        bare = name.rstrip("_")
        setattr(Remote, f"__{bare}__", lambda self, other, name=name: binary(name, self, other))
        if name not in ("eq", "ne", "lt", "le", "gt", "ge") and not name.startswith("i"):
            setattr(Remote, f"__r{bare}__", lambda self, other, name=name: binary(name, other, self))
    methods = {"__getattr__": getattribute,
               "__deepcopy__": lambda self, _: ask("deepcopy", self),
               "__copy__": lambda self: ask("copy", self),
               "__setattr__": lambda self, name, value: ask("setattr", self, name, value),
               "__delattr__": lambda self, name: ask("delattr", self, name),
               "__call__": lambda self, *args, **kwargs: ask("call", self, *args, **kwargs),
               "__getitem__": getitem, "__contains__": contains,
               "__setitem__": lambda self, key, value: ask("setitem", self, key, value),
               "__delitem__": lambda self, key: ask("delitem", self, key),
               "__enter__": lambda self: ask("enter", self),
               "__exit__": lambda self, *what: ask("exit", self, None, None, None),
               "__instancecheck__": lambda self, value: own(value) and ask("isinstance", value, self),
               "__subclasscheck__": lambda self, value: own(value) and ask("issubclass", value, self)}
    for name, method in methods.items():
        setattr(Remote, name, method)


add_methods()


# ---- the statement ----

def loads_and_stores(tree):
    loads, stores = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            loads.append(node.id) if isinstance(node.ctx, ast.Load) else stores.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stores.add(node.name)
        elif isinstance(node, ast.arg):
            stores.add(node.arg)
        elif isinstance(node, ast.alias):
            stores.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            stores.add(node.name)
    return loads, stores


def calls_in_order(node):
    """Names that are called, as the calls are made: inner ones first."""
    found = [name for child in ast.iter_child_nodes(node) for name in calls_in_order(child)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        found.append(node.func.id)
    return found


class Names(dict):
    """The statement's global names: its own, Python's builtins, the program's."""

    def __init__(self, session, tree):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self.session = session
        loads, stores = loads_and_stores(tree)
        called = calls_in_order(tree)
        free = [name for name in called + loads if name not in stores]
        bases = {node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
        modules = {name for name in bases & set(MODULES) if name not in called}
        others = [n for n in free if not hasattr(builtins, n) and n not in modules and n not in HELPERS]
        self.taken = {name: MODULES[name] or name for name in modules}
        self.helpers = {name: HELPERS[name] for name in free if name in HELPERS} if others else {}
        self.own_builtin = None
        if not others and (candidates := [name for name in dict.fromkeys(free) if hasattr(builtins, name)]):
            defined = self.value("defined", candidates)
            self.own_builtin = next((name for name in candidates if name in defined), None)

    def value(self, op, what):
        error, value, _ = self.session.ask(op, what)
        if error is not None:
            raise KeyError(what)
        return value

    def __missing__(self, name):
        if hasattr(builtins, name) and name != self.own_builtin:
            raise KeyError(name)
        value = self.value("global", name)
        if name in self.taken:
            return importlib.import_module(self.taken[name])
        if name in self.helpers:
            return getattr(importlib.import_module(self.helpers[name]), name)
        return value


class Said:
    """An exception, whose text may be asked of the program."""

    def __init__(self, error):
        self.error = error

    def __repr__(self):
        try:
            return repr(self.error)
        except BaseException:
            return type(self.error).__name__


def run(program, statement):
    """Whether it holds: it has run to its end, and the program's process has not ended.  Failed: what else has happened."""
    session = Session(program)
    try:
        tree = ast.parse(statement, "test.py")
        exec(compile(tree, "test.py", "exec"), Names(session, tree))
    except Lost:
        pass
    except BaseException as error:
        raise session.failure or Failed("runtime_error", Said(error)) from error
    if session.failure:
        raise session.failure
