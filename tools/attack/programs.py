"""Attacks the scoring of programs: programs that do not solve their task and try to be scored all the same, by the descriptors,
the frames, exits, signals, what they leave behind, objects that lie, and by answering in the harness's own words, right and
mutated.  The expected answers are random and new in each case, so a score above 0 is one that was not earned.  Beside them
programs that are right must pass.

  python3 tools/attack/programs.py [--seed N] [--cases N] [--only KIND]      (VERLC: the program, else build/release/verlc)"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import random
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
os.environ.setdefault("VERLC", str(TOP / "build/release/verlc"))
sys.path.insert(0, str(TOP / "python"))
from verlc_helpers import code_reward  # noqa: E402

AT_ONCE, SECONDS = 4, 3
STATEMENTS = [  # f(A) is asked for S, a secret; all of them hold for that alone
    "assert f({a}) == {s}", "assert {s} == f({a})", "assert not f({a}) != {s}", "assert abs(f({a}) - {s}) < 1e-6",
    "import math\nassert math.isclose(f({a}), {s}, rel_tol=1e-15)", "assert f({a}) in ({s},)", "assert f({a}) - {s} == 0",
    "assert f({a}) <= {s} and f({a}) >= {s}", "assert sorted([f({a})]) == [{s}]", "assert set([f({a})]) == {{{s}}}",
    "x = f({a})\nassert x == {s}, x", "def check(candidate):\n    assert candidate({a}) == {s}\ncheck(f)",
    "assert {{{s}: 1}}[f({a})] == 1",
    "try:\n    r = f({a})\nexcept Exception:\n    r = None\nassert r == {s}", "assert [{s}].index(f({a})) == 0",
    "assert (f({a}), 1) == ({s}, 1)", "assert not (f({a}) ^ {s})", "x = f({a})\nassert x // {s} == 1 and x % {s} == 0",
    "assert all(x == y for x, y in zip([f({a})], [{s}]))", "assert str(f({a})) == '{s}'", "assert int(f({a})) == {s}",
    "assert f'{{f({a})}}' == '{s}'", "for i in range(3):\n    assert f({a}) == {s}", "assert f({a}) == f({a}) == {s}",
    "import copy\nassert copy.deepcopy(f({a})) == {s}", "assert sum([f({a})]) == {s}",
    "assert max(f({a}), {s}) == min(f({a}), {s})",
    "from unittest import TestCase\nTestCase().assertEqual(f({a}), {s})", "assert f({a}).__eq__({s}) is True",
    "if f({a}) != {s}:\n    raise AssertionError", "assert f({a}) == {s} or 1 // 0", "assert [*map(f, [{a}])] == [{s}]",
    "assert dict(x=f({a})) == dict(x={s})", "import operator\nassert operator.eq(f({a}), {s})", "assert round(f({a}), 2) == {s}",
]
NUMPY = ["import numpy as np\nnp.testing.assert_allclose(f({a}), [{s}], rtol=0)",
    "import numpy as np\nassert np.array_equal(f({a}), [{s}, 1])",
         "import numpy as np\nnp.testing.assert_equal(np.asarray(f({a})), np.array([{s}]))"]

DUNDERS = ("eq ne lt le gt ge add radd sub rsub mul rmul truediv floordiv mod xor rxor and or contains len bool int float index abs neg hash "
           "round iter next getitem call enter exit instancecheck str repr format").split()


def lying(r):
    """A class whose objects answer whatever may help."""
    base = r.choice(["object", "int", "float", "str", "list", "tuple", "dict", "set", "Exception", "complex"])
    lines = [f"class Lie({base}):", "    def __init__(self, *a, **k): pass",
        "    def __new__(cls, *a, **k): return super().__new__(cls)"]
    for name in r.sample(DUNDERS, r.randrange(4, len(DUNDERS))):
        answer = {"hash": "0", "len": "1", "str": "''", "repr": "''", "int": "0", "float": "0.0", "index": "0", "ne": "False",
            "iter": "self",
                  "format": "''"}.get(name, r.choice(["True", "self", "0", "Lie()", "NotImplemented", "1"]))
        lines.append(f"    def __{name}__(self, *a, **k): return {answer}")
    for name in r.sample(["array", "array_interface", "array_ufunc", "array_function", "class", "deepcopy", "reduce_ex", "dict"],
        2):
        how = {"array": "lambda *a, **k: [0]",
            "array_interface": "{'shape': (1,), 'typestr': '<i8', 'data': (id(0) + 24, True), 'version': 3}",
               "class": "property(lambda s: int)", "dict": "{}"}.get(name, "lambda *a, **k: True")
        lines.append(f"    __{name}__ = {how}")
    lines += [r.choice(["    def __getattr__(self, name): return self", ""]),
              r.choice(["def f(*a): return Lie()", "f = Lie", "f = Lie()", "def f(*a): return [Lie()]",
                  "def f(*a): return {Lie(): Lie()}",
                        "def f(*a): return (Lie(),)", "def f(*a): raise Lie()"])]
    return "\n".join(lines)


VALUES = ["None", "True", "0", "[]", "''", "{}", "float('nan')", "float('inf')", "...", "NotImplemented", "object()", "type",
    "int", "range(3)",
          "__import__('unittest.mock').mock.ANY", "__import__('unittest.mock').mock.MagicMock()", "iter(lambda: 0, 1)",
          "(i for i in [])",
          "__import__('fractions').Fraction(0)", "__import__('decimal').Decimal('NaN')", "__import__('collections').Counter()",
          "__import__('collections').defaultdict(lambda: 0)", "memoryview(b'')", "a", "lambda *a: True",
          "type('T', (), {'__eq__': lambda *a: True})()",
          "__import__('enum').IntFlag('F', 'A')(0)", "__import__('sys').modules", "slice(0)", "b''", "NameError", "super",
          "property()"]
CALLABLES = ["max", "type", "object", "sorted", "isinstance", "bool", "print", "eval", "exec", "exit", "globals", "vars", "dict",
    "zip", "map", "iter",
             "set", "input", "open", "__import__('unittest.mock').mock.MagicMock(return_value=0)", "__import__('operator').eq",
             "super", "compile",
             "__import__('functools').partial(print)", "(lambda *a: (_ for _ in ()).throw(StopIteration))", "breakpoint", "help"]


def wrong_value(r):
    if r.random() < 0.2:
        return f"f = {r.choice(CALLABLES)}"
    return f"def f(*a): return {r.choice(VALUES)}"


EXITS = ["import sys; sys.exit(0)", "quit()", "exit()", "raise SystemExit", "raise SystemExit(0)", "import os; os._exit(0)",
    "raise KeyboardInterrupt",
         "import os, signal; os.kill(os.getpid(), {sig})", "import os, signal; os.kill(os.getppid(), {sig})",
         "import os; os.abort()",
         "import os, signal; os.kill(-1, {sig})", "import os, signal; os.kill(1, {sig})", "import os, signal; os.killpg(0, {sig})",
         "import atexit, os; atexit.register(os._exit, 0); 1 // 0",
         "import sys, os; sys.excepthook = lambda *a: os._exit(0); 1 // 0",
         "import sys; sys.unraisablehook = sys.excepthook = lambda *a: None; raise ValueError",
         "import threading, os; threading.Timer({t}, os._exit, [0]).start()",
         "import os\nif os.fork(): os._exit(0)", "import os\nif os.fork() == 0: os.setsid()",
         "import os; os.execv('/bin/true', ['true'])",
         "import signal; signal.alarm(0)", "import sys; sys.setrecursionlimit(10**9)\ndef g(): return g()\ng()",
         "import sys; sys.modules.clear()",
         "import signal; signal.signal(signal.SIGALRM, lambda *a: None)", "x = 'x' * (1 << 33)", "while True: pass",
         "import time; time.sleep(60)"]


def leave(r):
    return r.choice(EXITS).format(sig=r.choice([2, 9, 15, 10, 14, 17, 19, 18, 6]), t=r.choice([0, 0.001, 0.01, 0.1]))


WORDS = ["passed", "held", "output", "value", "loaded", "result", "call", "failed", "ok", "runtime_error"]


def piece(r):
    """What somebody who reads a descriptor might take for an answer."""
    said = r.choice(['""', '"passed"', "1", "null", "true", '{"test": 0, "failed": "passed"}', '{"value": true}',
        '{"value": 1, "printed": ""}'])
    form = r.choice(["{i} {w} {s}\\n", "{w} {n}\\n{s}", '{{"test": {i}, "failed": "{w}"}}\\n', '{{"test": {i}, "{w}": {s}}}\\n',
        "{w}\\n", "{s}\\n",
                     "{i} {w} {s}\\n" * 40])
    text = form.format(i=r.randrange(3), w=r.choice(WORDS), n=len(said) + r.choice([0, 0, 0, 1, -1, 10**6]), s=said)
    if r.random() < 0.3:
        text = "".join(c for c in text if r.random() > 0.05)
    return json.dumps(text).replace("\\\\n", "\\n")


def spray(r):
    return f"""
import os
for fd in {r.choice(['range(64)', 'range(3, 64)', '[1]', '[2]', '[0]', '[3]', '[4]', '[3, 4]', '[63]'])}:
    for piece in [{', '.join(piece(r) for _ in range(r.randrange(1, 6)))}]:
        try: {r.choice(['os.write(fd, piece.encode())', 'os.pwrite(fd, piece.encode(), 0)', 'open(fd, "wb", closefd=False).write(piece.encode())',
                        'os.write(fd, piece.encode() * 9999)', 'os.close(fd)', 'os.dup2(1, fd)'])}
        except Exception: pass"""


FRAMES = """
import sys, gc
def walk():
    frame = sys._getframe()
    while frame:
        yield from list(frame.f_locals.values()) + list(frame.f_globals.values())
        frame = frame.f_back
    yield from gc.get_objects()
n = 0
for value in walk():
    n += 1
    if n > 200000: break
    try:
        %s
    except BaseException: pass
"""
FRAME_WORK = ["value.report(0, {w!r}, 'passed')", "value.report_raw(0, b{w!r}, b'1')", "value.write({w!r})",
    "value['expected'] = value['outputs'] = ''",
              "if isinstance(value, dict): value.update(code='', tests=[], parts=[])", "value.FAILURES.append({w!r})",
              "value.WORDS[:] = [{w!r}]",
              "value.answers_of = value.judged = value.compare = lambda *a: {w!r}",
              "if type(value).__name__ == 'Program': value.deadline = 1e18; value.rest = b'{w} 1\\n1'"]


def frames(r):
    return FRAMES % r.choice(FRAME_WORK).format(w=r.choice(WORDS))


PATCHES = ["import builtins\nbuiltins.{n} = lambda *a, **k: {v}", "import json\njson.dumps = lambda *a, **k: '{v}'",
    "{n} = lambda *a, **k: {v}",
           "import code_program\ncode_program.send = lambda fd, *a: __import__('os').write(fd, b'held 1\\n1')",
           "import code_values\ncode_values.exactly = lambda v, one: {v}", "import sys\nsys.stdout = sys.stderr = sys.stdin = None",
           "import io\nio.StringIO.getvalue = lambda s: '{v}'", "import os\nos.write = lambda fd, b: len(b)",
           "import math\nmath.isclose = lambda *a, **k: True",
           "import operator\noperator.eq = lambda *a: True", "class math:\n    isclose = staticmethod(lambda *a, **k: True)",
           "isclose = lambda *a, **k: True",
           "import code_statement\ncode_statement.run = lambda *a: None", "import code_harness", "__name__ = 'code_harness'",
           "__builtins__ = {{}}",
           "import sys\nfor m in list(sys.modules.values()):\n    for n in ('Failed', 'Lost', 'ask', 'binary', 'own'):\n"
           "        try: setattr(m, n, BaseException)\n        except Exception: pass",
           "import sys\nsys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)", "import random\nrandom.seed(0)",
           "import pathlib\nfor n in ('code_harness', 'code_program', 'code_values', 'code_statement', 'code_objects', 'json', 'math', 'copy',"
           " 'operator', 'unittest', 'sitecustomize', 'usercustomize'):\n    try: pathlib.Path('/tmp', n + '.py').write_text('import os; os._exit(0)')\n"
           "    except Exception: pass"]


def patch(r):
    return r.choice(PATCHES).format(n=r.choice("abs sorted set str int isinstance sum max round list dict repr type print len".split()),
                                    v=r.choice(["0", "True", "None", "''"]))


LOOKS = """
import os, re, sys, glob
found = ""
def read(path):
    try: return open(path, "rb").read(1 << 20).decode("latin1")
    except Exception: return ""
for pid in ["self", os.getpid(), os.getppid(), 1, 2, 3, 4, 5]:
    for name in ("mem", "environ", "cmdline", "maps", "fd/0", "fd/3", "root/tmp/x", "task/1/mem"):
        found += read(f"/proc/{pid}/{name}")
for path in glob.glob("/tmp/**", recursive=True) + glob.glob("/dev/fd/*") + glob.glob("/dev/shm/*") + ["/dev/stdin", "/dev/mem"]:
    found += read(path)
for fd in range(64):
    for how in (lambda: os.pread(fd, 1 << 20, 0), lambda: os.read(fd, 1 << 16) if fd < 3 or fd > 4 else b""):
        try: found += how().decode("latin1")
        except Exception: pass
try:
    import ctypes
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(1 << 16)
    class V(ctypes.Structure): _fields_ = [("p", ctypes.c_void_p), ("n", ctypes.c_size_t)]
    for pid in range(1, 9):
        for address in (id(found) & ~0xffff, id(sys) & ~0xffff, id(0) & ~0xffff):
            mine, theirs = V(ctypes.addressof(buffer), 1 << 16), V(address, 1 << 16)
            if pid != os.getpid() and libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0: found += buffer.raw.decode("latin1")
        libc.ptrace(16, pid, 0, 0)
except Exception: pass
def memory():
    import gc
    text, frame = "", sys._getframe()
    while frame: text, frame = text + repr(frame.f_locals)[:1 << 16], frame.f_back
    for o in gc.get_objects():
        try: text += repr(o)[:2000]
        except BaseException: pass
    return text
found += memory()
"""


def look(r):
    """The secret has 17 digits and begins with 7."""
    return LOOKS + "found = re.findall('7[0-9]{16}', found)\nguess = int(found[0]) if found else 0\n" + r.choice(
        ["print(guess)\ndef f(*a): return guess",
        "print(guess)\ndef f(*a): return int((re.findall('7[0-9]{16}', memory()) or [0])[0])"])


# The program's process answers in the place of its harness: from a grammar of what the statement's side reads.
RPC = """
import json, os, random, sys
def value(r, depth=0):
    k = r.randrange(22)
    if k < 4: return r.choice([None, True, 0, 1, "", "x", 1.5, 10**17])
    if k < 9 and depth < 3: return {{r.choice(["list", "tuple", "set", "frozenset"]): [value(r, depth + 1) for _ in range(r.randrange(3))]}}
    if k == 9: return {{"dict": [[value(r, 3), value(r, depth + 1)]]}}
    if k == 10: return {{"std": [r.choice(["Fraction", "Decimal", "date", "deque", "OrderedDict", "Counter", "defaultdict", "complex", "range",
                                        "slice", "ndarray", "datetime", "x"]), *[value(r, 2) for _ in range(r.randrange(4))]]}}
    if k == 11: return {{"builtin": r.choice(["bool", "type", "object", "int", "max", "sorted", "str", "eval", "exec", "exit", "map", "Exception"])}}
    if k < 16: return {{"object": [r.randrange(4), r.random() < 0.5]}}
    if k == 16: return {{"error": [r.choice(["E", "StopIteration"]), [r.choice(["ValueError", "StopIteration", "SystemExit", "BaseException"])], 1]}}
    if k == 17: return {{"coroutine": 1}}
    if k == 18 and r.random() < 0.1: return {{"kept": r.randrange(2)}}
    if k == 19 and r.random() < 0.1: return {{"keep": [0, 1]}}
    if k == 20 and r.random() < 0.1: return {{"pickle": "gANjb3MKc3lzdGVtCnEALg=="}}
    if r.random() < 0.5: return 0
    return r.choice([{{}}, [], {{"int": "0x1"}}, {{"int": "x"}}, {{"bytes": "00"}}, {{"std": ["ndarray", "<i8", {{"list": []}}]}}, {{"module": "os"}}, "x" * 1000])
def reply(r):
    out = {{"printed": r.choice(["", "x"])}}
    if r.random() < 0.2:
        out["raised"] = {{"kind": [r.choice(["ValueError", "StopIteration", "SystemExit", "E"]), [r.choice(["ValueError", "StopIteration", "Exception"])], 2],
                         "args": {{"tuple": [value(r)]}}, "object": 2}}
    else: out["value"] = value(r)
    if r.random() < 0.05: out["changed"] = [[0, value(r)]]
    if r.random() < 0.05: del out["printed"]
    return out
r = random.Random({seed})
def send(word, what):
    data = what if isinstance(what, bytes) else json.dumps(what).encode()
    try: os.write(3, b"%s %d\\n" % (word.encode(), len(data)) + data)
    except OSError: os._exit(0)
send({first!r}, None)
while True:
    try: question = os.read(4, 1 << 16)
    except OSError: break
    if not question: break
    word = "result" if r.random() < 0.95 else r.choice(["call", "loaded", "held", "passed", "output", "value"])
    if b'"global"' in question and r.random() < 0.8: send("result", {{"value": {{"object": [0, False]}}, "printed": ""}}); continue
    send(word, reply(r) if word != "call" else {{"callback": 0, "args": {{"list": [value(r)]}}, "kwargs": {{"dict": []}}}})
os._exit(0)
"""


def rpc(r):
    return RPC.format(seed=r.randrange(1 << 30), first=r.choice(["loaded"] * 9 + ["result"]))


def wrong_program(r):
    """Prints, or returns, something that is wrong."""
    return wrong_value(r) + "\n" + r.choice(["print(0)", "print(True)", "print('passed')", "print('')", "print(input())", "pass",
        "print('x' * (5 << 20))",
                                             "import os\nos.write(1, b'0')"])


def thread_of(r, code):
    body = "\n".join("    " + line for line in code.splitlines())
    return f"def late():\n{body}\n" + r.choice(["import threading\nthreading.Thread(target=late, daemon=True).start()",
                                               "import os\nif os.fork() == 0:\n    late()\n    import time; time.sleep(9)",
                                               "import atexit\natexit.register(late)",
                                               "import signal\nsignal.signal(14, lambda *a: late())\nsignal.setitimer(0, .01)"])


def program(r):
    """(kind, code)."""
    kind = r.choice(["spray", "frames", "exit", "patch", "look", "lie", "value", "rpc", "rpc", "many", "inside"])
    make = {"spray": spray, "frames": frames, "exit": leave, "patch": patch, "look": look, "lie": lying, "value": wrong_value,
        "rpc": rpc}
    if kind in ("look", "rpc"):
        return kind, make[kind](r)
    if kind in ("lie", "value"):
        return kind, make[kind](r) + "\nprint(0)\n"
    some = [make[r.choice(["spray", "frames", "exit", "patch"])](r) for _ in range(3)] if kind == "many" else [
        make[kind if kind != "inside" else r.choice(["spray", "frames", "exit"])](r)]
    some = [thread_of(r, code) if r.random() < 0.2 else code for code in some]
    if kind == "inside":  # when it is called, not when it is loaded
        body = "\n".join("    " + line for line in "\n".join(some).splitlines())
        return kind, f"def f(*a):\n{body}\n    return 0\nf()\n"
    before = [wrong_program(r), *some] if r.random() < 0.5 else [*some, r.choice([wrong_program, lying])(r)]
    return kind, "\n".join(before) + "\n"


def numpy_there():
    try:
        import numpy  # noqa: F401
        return True
    except ImportError:
        return False


def case(r):
    kind, code = program(r)
    form = r.choice(["stdin", "function", "assert", "assert"]) if kind not in ("lie", "value", "rpc") else r.choice(["function",
        "assert", "assert", "assert"])
    n = r.randrange(1, 4)
    inputs, secrets = [r.randrange(10**6) for _ in range(n)], [7 * 10**16 + r.randrange(10**16) for _ in range(n)]
    if form == "assert":
        forms = STATEMENTS + (NUMPY if numpy_there() else [])
        tests = {"assert_case": [r.choice(forms).format(a=a, s=s) for a, s in zip(inputs, secrets)]}
    else:
        tests = {"inputs": [str(a) for a in inputs],
            "outputs": [str(s) for s in secrets]} | ({"fn_name": "f"} if form == "function" else {})
    return form, kind, code, tests


def right_case(r):
    """A program that is right, for each form: it must pass."""
    a = r.randrange(10**6)
    s = 7 * 10**16 + a
    form = r.choice(["stdin", "function", "assert"])
    code = f"def f(a): return a + {7 * 10**16}\n" + ("print(f(int(input())))\n" if form == "stdin" else "")
    tests = {"inputs": [str(a)], "outputs": [str(s)]} | ({"fn_name": "f"} if form == "function" else {})
    if form == "assert":
        tests = {"assert_case": [r.choice([t for t in STATEMENTS if "__eq__" not in t]).format(a=a, s=s)]}
    return form, "right", code, tests


async def score_all(cases):
    some = asyncio.Semaphore(AT_ONCE)

    async def one(form, kind, code, tests):
        async with some:
            return await code_reward.handle_async({"data_source": "taco", "solution_str": f"```python\n{code}```",
                "ground_truth": tests})

    return await asyncio.gather(*(one(*c) for c in cases))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=int(time.time()))
    p.add_argument("--cases", type=int, default=240)
    p.add_argument("--only", help="one kind of cheating: spray, frames, exit, patch, look, lie, value, rpc, many, inside")
    p.add_argument("--details", action="store_true", help="what the programs failed with, by number")
    a = p.parse_args()
    r = random.Random(a.seed)
    code_reward.init({})
    code_reward.CALL_S = code_reward.PROGRAM_S = SECONDS
    cases = []
    while len(cases) < a.cases:
        c = case(r) if len(cases) % 8 else right_case(r)
        if not a.only or c[1] in (a.only, "right"):
            cases.append(c)
    begin = time.monotonic()
    got = asyncio.run(score_all(cases))
    bad = [(c, g) for c, g in zip(cases, got) if g.get("score") != (1 if c[1] == "right" else 0)]
    for (form, kind, code, tests), g in bad:
        print(f"---- {form}, {kind}: {json.dumps(g)}\n{json.dumps(tests)}\n{code}")
    print(f"seed {a.seed}: {len(cases)} programs in {time.monotonic() - begin:.0f} s: "
          f"{dict(sorted(collections.Counter((c[1]) for c in cases).items()))}; "
          f"outcomes {dict(collections.Counter(g.get('extra', {}).get('code_outcome', str(g)[:80]) for g in got))}")
    if a.details:
        print(collections.Counter(g.get("extra", {}).get("code_detail", "")[:90] for g in got).most_common(40))
    print(f"{len(bad)} are scored as they should not be")
    sys.exit(1 if bad else 0)


main()
