"""Programs scored by their tests: verl's scores of generated programs (tools/oracle_code.py), an evaluation and a run on them,
a reward function that uses the sandbox, a SandboxFusion service (a small one here), and the refusal where there is no sandbox."""

import asyncio
import contextlib
import http.server
import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, patience, run  # noqa: E402

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", ".")).resolve()
sys.path.insert(0, str(ROOT / "python"))
os.environ["VERLC"] = VERLC
from verlc_helpers import code_reward  # noqa: E402
from verlc_helpers.sandbox import run_python  # noqa: E402

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def block(code):
    return f"Here it is.\n```python\n{code}```\nDone."


def ask(solution, truth, **more):
    return asyncio.run(code_reward.handle_async({"data_source": "taco", "solution_str": solution, "ground_truth": truth} | more))


def check_scores(test):
    """Those of verl; the limits are 1 s in both.  Rows without tests are the named difference code-no-tests."""
    cases = [json.loads(line) for line in (ROOT / "tests/fixtures/code/cases.jsonl").read_text(encoding="utf-8").splitlines()]
    without = [case for case in cases if not case["tests"]["inputs"]]
    cases = [case for case in cases if case["tests"]["inputs"]]
    answers = [ask(case["solution"], case["tests"]) for case in without]
    test("a row without tests has no score", answers and all("no tests" in a.get("missing", "") for a in answers), str(answers))

    async def score_all(cases):
        some = asyncio.Semaphore(4)

        async def one(case):
            async with some:
                return await code_reward.handle_async({"solution_str": case["solution"], "ground_truth": case["tests"]})

        return await asyncio.gather(*map(one, cases))

    limits = code_reward.CALL_S, code_reward.PROGRAM_S
    code_reward.CALL_S = code_reward.PROGRAM_S = 1
    start = time.monotonic()
    got = asyncio.run(score_all(cases))
    late = [answer.get("code_outcome") == "time_limit" and answer.get("score") != case["score"] for case, answer in zip(cases, got)]
    slow = [i for i, is_late in enumerate(late) if is_late]
    code_reward.CALL_S = code_reward.PROGRAM_S = 10  # on a busy machine a second may be too short; what never ends still does not
    for i, answer in zip(slow, asyncio.run(score_all([cases[i] for i in slow]))):
        got[i] = answer
    code_reward.CALL_S, code_reward.PROGRAM_S = limits
    bad = [(case, answer) for case, answer in zip(cases, got) if answer.get("score") != case["score"]]
    print(f"        {len(cases)} programs in {time.monotonic() - start:.1f} s")
    test(f"{len(cases)} programs have the scores that verl gives them", not bad and len(cases) > 50, str(bad[:3]))


def check_outcomes(test):
    code_reward.init({"memory_mb": 200})
    for code, tests, outcome, score in ((ADD, TESTS, "passed", 1), ("print(3)\n", TESTS, "wrong_answer", 0.5),
                                        ("x x\n", TESTS, "compile_error", 0), ("1 // 0\n", TESTS, "runtime_error", 0),
                                        ("x = 'y' * (1 << 30)\n", TESTS, "runtime_error", 0),
                                        ("print('x' * (5 << 20))\n", TESTS, "output_limit", 0), ("def f(x, y): return x + y\n", {
                                            "fn_name": "f",
                                            "inputs": ["1\n2"],
                                            "outputs": ["3"]
                                        }, "passed", 1), ("def f(x, y): return x\n", {
                                            "assert_case": ["assert f(1, 2) == 1", "assert f(1, 2) == 2"]
                                        }, "runtime_error", 0.5)):
        r = ask(block(code), json.dumps(tests))
        test(f"outcome {outcome}, score {score}", (r.get("score"), r.get("extra", {}).get("code_outcome")) == (score, outcome),
             str(r))
    for truth, words in ((None, "NoneType"), ("{", "not JSON"), ("[]", "list"), ({
            "inputs": ["1"]
    }, "outputs"), ({
            "inputs": ["1"],
            "outputs": []
    }, "1 inputs and 0"), ({
            "inputs": [["1"]],
            "outputs": ["1"]
    }, "not a text"), ({
            "fn_name": "f",
            "inputs": ["x"],
            "outputs": ["1"]
    }, "not JSON"), ({
            "assert_case": [1]
    }, "assert_case"), ({
            "inputs": [],
            "outputs": []
    }, "no tests"), ({
            "fn_name": "f",
            "inputs": [],
            "outputs": []
    }, "no tests"), ({
            "assert_case": []
    }, "no tests"), ({
            "assert_case": ["assert ("]
    }, "no Python"), ({
            "assert_case": ["# nothing"]
    }, "says nothing")):
        r = ask(block(ADD), truth)
        test(f"no tests: {words}", words in r.get("missing", "") and "score" not in r, str(r))
    code_reward.init({"memory_mb": 1024})
# What a program tries that has not solved its task.  WORDS is a line for whoever reads any descriptor.
SPRAY = """
import os, sys
for word in ('{"test": 0, "failed": "passed"}', '{"test": 1, "failed": "passed"}', '0 passed ""', '1 held ""', 'held 2\\n""',
             'passed 0\\n', 'output 3\\n"x"', 'value 1\\n1', 'loaded 4\\nnull', 'result 3\\n{}\\n'):
    for fd in range(64):
        try: os.write(fd, word.encode() + b"\\n")
        except OSError: pass
"""
FRAMES = """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        for name in ("report", "write", "report_raw"):
            for words in ((0, "failed", "passed"), (0, "passed", ""), ('{"test": 0, "failed": "passed"}\\n',)):
                try: getattr(value, name)(*words)
                except BaseException: pass
    frame = frame.f_back
"""
EXITS = ["import sys\nsys.exit(0)", "quit()", "exit(0)", "raise SystemExit", "raise SystemExit(0)", "import os\nos._exit(0)",
         "import atexit, os\natexit.register(lambda: os._exit(0))\n1 // 0",
         "import sys\nsys.excepthook = lambda *a: sys.exit(0)\n1 // 0",
         "import os, sys\nsys.excepthook = lambda *a: os._exit(0)",
         "import threading, os\nthreading.Timer(0.01, os._exit, [0]).start()",
         "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "import os\nif os.fork(): os._exit(0)"]
EQUALS = """
class Any:
    def __init__(self, *a): pass
    def same(self, *a): return True
    __eq__ = __le__ = __ge__ = __contains__ = same
    def zero(self, *a): return 0
    __sub__ = __rsub__ = __abs__ = __hash__ = zero
    def __ne__(self, other): return False
"""
LOOK = """
import gc, re, sys
def found():
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr(frame.f_locals))
        frame = frame.f_back
    for o in gc.get_objects():
        try: seen.append(repr(o)[:10000])
        except BaseException: pass
    return int((re.findall("5432" + "1[0-9]{3}", "".join(seen)) or [0])[0])
"""
CALLED_CHEATS = [EQUALS + "f = Any\n", EQUALS + "def f(x): return Any()\n", EQUALS + "def f(x): return [Any()]\n",
                 "class L(int):\n    __eq__ = lambda s, o: True\ndef f(x): return L(0)\n",
                 "import builtins\nbuiltins.abs = lambda x: 0\nabs = lambda x: 0\ndef f(x): return 0\n",
                 SPRAY + "def f(x):\n    exec(SPRAY)\n    return 0\n".replace("exec(SPRAY)", SPRAY.strip().replace("\n", "\n    ")),
                 FRAMES + "def f(x): return 0\n", "def f(x):\n    import sys; sys.exit(0)\n",
                 "def f(x):\n    import os; os._exit(0)\n", "def f(x): raise SystemExit\n",
                 LOOK + "def f(x): return found()\n"]


def check_cheats(test):
    """No program has a score for what it does to its tests."""
    secret = [str(54321987), str(54321988)]
    kinds = {"stdin": {"inputs": ["1", "2"], "outputs": secret}, "function": {"fn_name": "f", "inputs": ["1", "2"],
        "outputs": secret},
             "assert": {"assert_case": ["assert f(1) == 54321987", "assert abs(f(2) - 54321988) < 1e-6"]},
             "in": {"assert_case": ["assert 54321987 in f(1)", "assert sorted([f(1)]) == [54321987]"]}}
    general = [SPRAY, FRAMES, *EXITS, LOOK + "print(found())\n"]
    cases = [(kind, tests, code + ("" if kind == "stdin" else "\ndef f(x): return 0\n")) for kind, tests in kinds.items()
             for code in general if kind != "in"]
    cases += [(kind, kinds[kind], code) for kind in ("function", "assert", "in") for code in CALLED_CHEATS]

    async def score_all():
        some = asyncio.Semaphore(4)

        async def one(kind, tests, code):
            async with some:
                return await code_reward.handle_async({"solution_str": block(code), "ground_truth": tests})

        return await asyncio.gather(*(one(*case) for case in cases))

    bad = [(kind, code, r) for (kind, _, code), r in zip(cases, asyncio.run(score_all())) if r.get("score") != 0]
    test(f"{len(cases)} programs that cheat have no score", not bad, f"{len(bad)}: {bad[:3]}")


HONEST = {
    "def f(x, y): return x + y": ["assert f(1, 2) == 3", "assert f('a', 'b') == 'ab' and f([1], [2]) == [1, 2]",
                                  "for i in range(5):\n    assert f(i, i) == 2 * i", "assert f(1, f(2, 3)) == 6, 'nested'",
                                  "assert abs(f(.1, .2) - .3) < 1e-9", "import math\nassert math.isclose(f(.1, .2), .3)",
                                  "assert f(2**80, 1) == 2**80 + 1", "assert type(f(1, 2)) is int and isinstance(f(.5, 1), float)",
                                  "def check(c):\n    assert c(1, 2) == 3\n    assert c(1, 3) != 3\ncheck(f)",
                                  "try:\n    f(1, 'a')\nexcept TypeError as e:\n    assert 'unsupported' in str(e)\n"
                                  "else:\n    assert 0"],
    "def sum(a, b): return a + b": ["assert sum(1, 2) == 3"],
    "def f(a):\n    a.sort()\n    return a": ["a = [3, 1]\nb = f(a)\nassert a == [1, 3] and a is b",
    "assert f([[2], [1]]) == [[1], [2]]"],
    "def f(g, xs): return [g(x) for x in xs]": ["assert f(lambda v: v * v, (1, 2)) == [1, 4]", "assert f(str, [1]) == ['1']",
                                               "assert f(len, ['ab']) == [2]"],
    "def f(n):\n    for i in range(n): yield i": ["assert list(f(3)) == [0, 1, 2]",
    "g = f(2)\nassert next(g) == 0 and next(g) == 1",
                                                "assert sum(f(5)) == 10 and 3 in f(5)"],
    "def f(n):\n    x = []\n    for i in range(n): x = [x]\n    return x": [
        "x = f(400)\nfor i in range(400):\n    assert len(x) == 1\n    x = x[0]\nassert x == []"],
    "class E(ValueError): pass\ndef f():\n    raise E('no', 1)": [
        "try:\n    f()\nexcept E as e:\n    assert e.args == ('no', 1)\nelse:\n    assert 0",
        "try:\n    f()\nexcept ValueError as e:\n    assert type(e).__name__ == 'E'"],
    "from collections import *\nfrom fractions import *\nP = namedtuple('P', 'x y')\ndef f(s): return Counter(s)\n"
    "def p(): return P(1, 2)\ndef q(): return Fraction(1, 3)\ndef d(): return defaultdict(list, {1: [2]})":
        ["assert f('aab') == {'a': 2, 'b': 1} and f('aab').most_common(1) == [('a', 2)]", "assert p() == (1, 2) and p().y == 2",
         "assert len(p()) == 2 and list(p()) == [1, 2] and p()[0] == 1", "assert q() + q() == 2 * q() and str(q()) == '1/3'",
         "assert d() == {1: [2]} and d()[1] == [2]"],
    "class V:\n    n = 0\n    def __init__(self, x): self.x = x; V.n += 1\n    def __eq__(self, o): return self.x == o.x\n"
    "    def __add__(self, o): return V(self.x + o.x)\n    def __repr__(self): return f'V({self.x})'\n"
    "    def __len__(self): return 3\n    def __enter__(self): return self\n    def __exit__(self, *a): self.x = 0":
        ["assert V(1) == V(1) and V(1) != V(2)", "assert V(1) + V(2) == V(3) and str(V(3)) == 'V(3)'",
         "v = V(5)\nv.x = 7\nassert v.x == 7 and isinstance(v, V) and len(v) == 3 and not hasattr(v, 'y')",
         "with V(4) as v:\n    assert v.x == 4\nassert v.x == 0", "V(1)\nassert V.n == 1"],
    "print('loaded')\ndef f(): print('hi')\nasync def g(): return 4": [
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f()\nassert out.getvalue() == 'hi\\n'",
        "import asyncio\nassert asyncio.run(g()) == 4"],
    "def main(): raise SystemExit\ndef f(): return None\nif __name__ != '__main__': main()": ["assert f() is None"],
}


def check_statements(test):
    """Statements about programs that are right hold."""
    cases = [(code, statements[i:i + 10]) for code, statements in HONEST.items() for i in range(0, len(statements), 10)]
    got = [ask(block(code + "\n"), {"assert_case": statements}) for code, statements in cases]
    bad = [(code, r) for (code, _), r in zip(cases, got) if r.get("score") != 1]
    test(f"{sum(len(s) for _, s in cases)} statements about right programs hold", not bad, str(bad[:3]))
    got = ask(block("def f(x): return 4\n"), {"assert_case": ["assert f(2) == 5", "assert f(2) == 4", "f(2).x", "nothing()"]})
    test("a statement that does not hold", got.get("score") == 0.25 and "AssertionError" in got["extra"]["code_detail"], str(got))


FLOOD = """
import os
piece = b'{"test": 0, "output": "x"}\\n' * 40000 + b"0 output 1\\n" * 9000 + b"\\n" * 900000
for fd in range(3, 64):
    try:
        os.set_blocking(fd, True)
        for i in range(30): os.write(fd, piece)
    except OSError: pass
"""


def check_long_answers(test):
    """What one program writes costs the helper little, and delays no other."""
    latest = 0.0

    async def watched(cases):
        async def look():
            nonlocal latest
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                latest = max(latest, time.monotonic() - before)

        looking = asyncio.ensure_future(look())
        got = await asyncio.gather(*(code_reward.handle_async({"solution_str": block(code), "ground_truth": tests})
                                     for code, tests in cases))
        looking.cancel()
        return got

    longest = {"inputs": ["1"] * 10, "outputs": ["1"] * 10}
    got = asyncio.run(watched([(FLOOD, longest), ("print('x\\n' * 1000000)\n", longest), (ADD, TESTS),
                               (FLOOD + "def f(x): return [[]] * 1000000\n", {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]})]))
    test("long answers: the others are scored", [r.get("score") for r in got] == [0, 0, 1, 0], str(got)[:600])
    test("long answers: the event loop goes on", latest < patience(3), f"{latest:.1f} s")
    lines = {"stdout": "\n" * (32 << 20) + "0 value " + "[" * (8 << 20), "end": "exited", "status": 0}
    start = time.process_time()
    answers = code_reward.answers_of(lines, 2)
    long = code_reward.answers_of({"stdout": "1 value " + "[" * (8 << 20) + "\n0 output \"x\"", "end": "exited", "status": 0}, 2)
    test("long answers: lines beyond those of the tests are not read, long ones not parsed", answers[0][0] == "runtime_error" and
         [a[0] for a in long] == ["output", "output_limit"] and time.process_time() - start < 1,
         f"{str(answers)[:200]} {str(long)[:200]}")
    line = json.dumps({"solution_str": block("print(3)\n"), "ground_truth": {
        "inputs": [""],
        "outputs": ["3"]
    }})
    p = subprocess.Popen([sys.executable, "-m", "verlc_helpers.code_reward", '{"parallel": 2}'], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True, env={**ENV, "PYTHONPATH": str(ROOT / "python")})
    p.stdin.write(line + "\n")
    p.stdin.flush()
    answer = p.stdout.readline()
    limits = [row.split() for row in pathlib.Path(f"/proc/{p.pid}/limits").read_text().splitlines() if row.startswith("Max data")]
    p.communicate()
    test("the helper has a limit of memory", json.loads(answer)["ok"]["score"] == 1 and limits[0][3].isdigit() and
         int(limits[0][3]) <= 2 << 30, f"{answer} {limits}")


def check_any_input(test):
    """Whatever the data, a model or a program says, it is read or refused."""
    rng = random.Random(7)
    pieces = ["```python",
              "```", "\n", "1 2", "\\", "{", "}", "[", "]", '"inputs"', '"outputs"', '"fn_name"', '"assert_case"', ":", ",", "null",
              "1e999", "nan", "٣", "\x00", "\ud800", "\x0c", "\r\n", '"a"', "[" * 3000, "9" * 5000, "-", "1_0", " "]
    seen = 0
    for _ in range(5000):
        a, b = ("".join(rng.choices(pieces, k=rng.randrange(9))) for _ in range(2))
        assert isinstance(code_reward.extract(a), str) and isinstance(code_reward.extract_block(a), (str, type(None)))
        same = code_reward.same_output(a, b)
        assert same or a.strip() != b.strip() or "\x0c" in a + b
        truth = a if rng.random() < 0.3 else '{"inputs": ["1"' + a + '], "outputs": ["1"' + b + "]}"
        answers = code_reward.answers_of({"stdout": a + "\n0 " + rng.choice(["value ", "held ", "passed "]) + b, "end": "exited",
                                          "status": 0}, 2)
        assert len(answers) == 2 and all("passed" not in answer[0] for answer in answers)
        assert code_reward.judge_value(answers[0], [1]) in ("passed", "wrong_answer", "runtime_error")
        assert code_reward.judge_statement(answers[0], "secret") == "runtime_error"
        try:
            code_reward.check_texts(code_reward.read_tests(truth))
            seen += 1
        except code_reward.NoTests as error:
            assert str(error)
    test("any text as a response, tests, an output or the channel", 20 < seen < 4900, str(seen))


def check_eval(s, test):
    rows = [{
        "data_source": source,
        "prompt": [{
            "role": "user",
            "content": "Add."
        }],
        "reward_model": {
            "style": "rule",
            "ground_truth": truth
        },
        "responses": answers
    } for source, truth, answers in (("taco", json.dumps(TESTS), [block(ADD), block("print(3)\n")]), ("apps", json.dumps(TESTS),
                                                                                                      [block("x"), "no code"]),
                                     ("openai/gsm8k", "4", ["#### 4", "#### 5"]), ("codeforces", "[]",
                                                                                   [block(ADD), block(ADD)]))]
    p = run("eval", f"data.path={s.write('answers.jsonl', rows)}", "reward.sandbox.max_concurrent=2", check=False)
    got = json.loads(p.stdout) if p.stdout.startswith("{") else {}
    test("eval: programs beside other rows", (got.get("test_score/taco"), got.get("test_score/apps"),
                                              got.get("test_score/openai/gsm8k"), got.get("errors")) == (0.75, 0, 0.5, 2),
         p.stdout + p.stderr[-600:])


OWN = '''
from verlc_helpers.sandbox import run_python_async
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    r = await run_python_async("import os; print(os.getenv('HOME'), len(input()))", wall_s=20,
                               stdin=solution_str.replace("\\n", " ") + "\\n")
    return float(r["end"] == "exited" and r["stdout"].startswith("/tmp "))
'''


def code_rows(s, name, n):
    return s.write(name, [{
        **s.row(i), "data_source": "taco",
        "reward_model": {
            "style": "rule",
            "ground_truth": json.dumps(TESTS)
        }
    } if i % 2 else s.row(i) for i in range(n)])


def check_run(s, test):
    rows = code_rows(s, "code.jsonl", 16)
    args = s.ppo("code",
                 data__train_files=rows,
                 data__val_files=rows,
                 trainer__total_training_steps=2,
                 trainer__save_freq=-1,
                 data__max_response_length=8)
    p = run(*args, check=False)
    metrics = [json.loads(line)["data"]
               for line in (s.dir / "code/metrics.jsonl").read_text().splitlines()] if p.returncode == 0 else [{}]
    failed = {
        k: v
        for k, v in metrics[-1].items()
        if k.startswith("reward/") and k.endswith(("crash", "timeout", "missing", "unparsed")) and v
    }
    test("ppo: a run on programs and other rows", p.returncode == 0 and not failed, f"{failed} {p.stderr[-600:]}")
    own = s.dir / "own.py"
    own.write_text(OWN, encoding="utf-8")
    p = run(*s.ppo("own",
                   reward__custom_reward_function__path=own,
                   trainer__total_training_steps=1,
                   trainer__save_freq=-1,
                   reward__num_workers=1),
            check=False)
    metrics = json.loads((s.dir / "own/metrics.jsonl").read_text().splitlines()[-1])["data"] if p.returncode == 0 else {}
    test("ppo: a reward function that uses the sandbox",
         metrics.get("critic/score/mean") == 1, f"{metrics.get('critic/score/mean')} {p.stderr[-600:]}")


def check_refusal(s, test):
    nowhere = ["unshare", "-Ur"]  # root of a namespace that has no other user
    if os.geteuid() != 0 or subprocess.run([*nowhere, "true"], check=False).returncode != 0:
        return print("skipped: the refusal")
    rows = code_rows(s, "code.jsonl", 16)
    p = subprocess.run([*nowhere, VERLC, *map(str, s.ppo("none", data__train_files=rows, data__val_files=rows))],
                       capture_output=True,
                       text=True,
                       check=False,
                       timeout=100,
                       env=ENV)
    test.refused("ppo: without a sandbox the run does not start", p, 3, "taco", "othing is run")


class Service(http.server.BaseHTTPRequestHandler):
    """SandboxFusion's /run_code, as far as verl uses it; its programs run in verlc's sandbox."""
    protocol_version = "HTTP/1.1"
    lock, now, most, asked, failures = threading.Lock(), 0, 0, [], []
    garbage = None  # the bytes of every answer, in the place of one

    def log_message(self, *_):
        pass

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.garbage is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):  # the helper closes what is too long
                self.wfile.write(self.garbage)
            return
        with self.lock:
            Service.now += 1
            Service.most = max(self.most, self.now)
            self.asked.append(request)
            status = self.failures.pop() if self.failures else 200
        r = run_python(request["code"], stdin=request["stdin"] or "", wall_s=2)
        with self.lock:
            Service.now -= 1
        late = r["end"] != "exited"
        good = r["end"] == "exited" and r["status"] == 0
        reply = {
            "status": "Success" if good else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "TimeLimitExceeded" if late else "Finished",
                "execution_time": r["wall_s"],
                "return_code": r["status"],
                "stdout": r["stdout"],
                "stderr": r["stderr"]
            }
        }
        body = json.dumps(reply if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def http_reply(body):
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


RAN = b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": %s}}'
GARBAGE = {  # what a service that is no SandboxFusion, or a broken one, may send; and what is said about it
    b"": "sandbox_fusion.url", b"\n": "sandbox_fusion.url", b"SSH-2.0-x\r\n": "SSH",
        b"\x16\x03\x01" + bytes(range(256)): "sandbox_fusion.url",
    http_reply(b""): "url", http_reply(b"hello"): "url", http_reply(b"\xff\xfe"): "url", http_reply(b"[" * 100000): "recursion",
    http_reply(b"null"): "NoneType", http_reply(b"[]"): "list", http_reply(b"3"): "int", http_reply(b'"x"'): "str",
        http_reply(b"{}"): "status",
    http_reply(b'{"status": 3}'): "status", http_reply(b'{"status": "Success"}'): "Success",
    http_reply(b'{"status": "Failed", "message": ["x"]}'): "Failed",
        http_reply(b'{"status": "x", "run_result": "y"}'): "run_result",
    http_reply(b'{"status": "x", "run_result": [1]}'): "list",
        http_reply(b'{"status": "Failed", "compile_result": 5}'): "compile_result",
    http_reply(b'{"status": "Failed", "compile_result": {"status": []}}'): "compile_result", http_reply(RAN % b"5"): "stdout",
    http_reply(RAN % b'["3"]'): "stdout", http_reply(RAN % b'{"3": 3}'): "stdout",
    http_reply(b'{"status": "Failed", "run_result": {"status": "Error", "stderr": 7}}'): "stderr",
    http_reply(b'{"status": "Failed", "run_result": {"status": {}}}'): "status",
    b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{": "sandbox_fusion.url", b"HTTP/9 what\r\n\r\n": "HTTP",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n": "url", b"HTTP/1.0 302 x\r\nLocation: gopher://x\r\n\r\n": "302",
    b"HTTP/1.0 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n": "headers", b"HTTP/1.0 200 OK\r\n\r\n" + b" " * (33 << 20): "over"}


def check_garbage(test):
    """Whatever a service sends is a score or an error in words."""
    bad = []
    for Service.garbage, words in GARBAGE.items():
        r = ask(block(ADD), {"inputs": ["1 2"], "outputs": ["3"]})
        if words not in r.get("crash", "") or "score" in r or "\n" in r["crash"] or "Traceback" in r["crash"]:
            bad.append((Service.garbage[:60], words, str(r)[:300]))
    Service.garbage = None
    test(f"service: {len(GARBAGE)} answers that are none are errors in words", not bad, str(bad[:5]))
    r = ask(block("import sys\nsys.exit(0)\n"), {"assert_case": ["assert f(1) == 2"]})
    test("service: an exit before the statement", r.get("score") == 0 and r["extra"]["code_outcome"] == "runtime_error", str(r))


def check_service(s, test):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/run_code"
    code_reward.init({"url": url, "parallel": 3, "memory_mb": 777})
    code_reward.FIRST_DELAY_S = 0.05
    many = {"inputs": ["1 2", "3 4"] * 6, "outputs": ["3", "7\n"] * 5 + ["x", "x"]}
    for name, solution, tests, score, outcome in (("all pass", block(ADD), TESTS, 1, "passed"), ("the first ten count", block(ADD),
                                                                                                 many, 1, "passed"),
                                                  ("half", block("print(3)\n"), TESTS, 0.5,
                                                   "wrong_answer"), ("another block", "```py\n" + ADD + "```", TESTS, 1,
                                                                     "passed"), ("no block", ADD, TESTS, 0, "no_code"),
                                                  ("an error", block("1 // 0\n"), TESTS, 0,
                                                   "runtime_error"), ("too slow", block("while True: pass\n"), {
                                                       "inputs": [""],
                                                       "outputs": [""]
                                                   }, 0, "time_limit"), ("a function", block("def f(x, y): return [x, y]\n"), {
                                                       "fn_name": "f",
                                                       "inputs": ["1\n2"],
                                                       "outputs": ["[1, 2]"]
                                                   }, 1, "passed"), ("a method",
                                                                     block("class Solution:\n    def f(self, x): return x\n"), {
                                                                         "fn_name": "f",
                                                                         "inputs": ["1.5"],
                                                                         "outputs": ["1.5\n"]
                                                                     }, 1, "passed"), ("asserts", block("def f(x): return x\n"), {
                                                                         "assert_case": ["assert f(1) == 1", "assert f(1) == 2"]
                                                                     }, 0.5, "runtime_error")):
        r = ask(solution, tests)
        test(f"service: {name}", (r.get("score"), r.get("extra", {}).get("code_outcome")) == (score, outcome), str(r))
    asked = min(Service.asked, key=lambda request: request["stdin"] != "1 2\n")
    test("service: what is sent",
         (asked["language"], asked["memory_limit_MB"], asked["run_timeout"], asked["stdin"]) == ("python", 777, 10, "1 2\n"),
         str(asked))
    test("service: at most max_concurrent requests at once", 1 < Service.most <= 3, str(Service.most))
    check_garbage(test)
    Service.failures[:] = [504, 504]
    test("service: a gateway's timeout is tried again", ask(block(ADD), {"inputs": ["1 2"], "outputs": ["3"]}).get("score") == 1)
    Service.failures[:] = [500]
    r = ask(block(ADD), {"inputs": ["1 2"], "outputs": ["3"]})
    test("service: its failure is no score", "500" in r.get("crash", "") and "score" not in r, str(r))
    code_reward.init({"url": "http://127.0.0.1:9/run_code"})
    r = ask(block(ADD), TESTS)
    test("service: nobody there", "sandbox_fusion.url" in r.get("crash", ""), str(r))
    code_reward.init({"url": None})
    rows = code_rows(s, "code.jsonl", 16)
    p = run(*s.ppo("service",
                   trainer__validation_data_dir=s.dir / "dump",
                   data__train_files=rows,
                   data__val_files=rows,
                   reward_model__sandbox_fusion__url=url,
                   trainer__total_training_steps=1,
                   trainer__save_freq=-1,
                   trainer__val_before_train=True,
                   data__max_response_length=8),
            check=False)
    dumped = [json.loads(line) for f in (s.dir / "dump").glob("*.jsonl") for line in f.read_text(encoding="utf-8").splitlines()]
    outcomes = {row.get("code_outcome") for row in dumped if row.get("code_outcome")}
    test("ppo: reward_model.sandbox_fusion.url; a response without a block asks nothing", p.returncode == 0 and
         outcomes == {"no_code"}, f"{outcomes} {p.stderr[-600:]}")
    server.shutdown()


def main():
    test = Tests()
    if run("sandbox", "--check", check=False).returncode != 0:
        print("skipped: this machine has no sandbox")
        sys.exit(77)
    code_reward.init({})
    check_scores(test)
    check_outcomes(test)
    check_cheats(test)
    check_statements(test)
    check_long_answers(test)
    check_any_input(test)
    with Scratch() as s:
        check_eval(s, test)
        check_run(s, test)
        check_refusal(s, test)
        check_service(s, test)
    test.end()


if __name__ == "__main__":
    main()
