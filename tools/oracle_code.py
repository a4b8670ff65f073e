"""Makes tests/fixtures/code/cases.jsonl: programs and functions with tests, and the scores that verl's prime_code gives them.
With --compare N nothing is written: N other cases are scored by verl and by verlc_helpers.code_reward in the sandbox of --verlc.
Time limits are 1 s in both instead of verl's 5 and 10.  Differences with a name are those of docs/differences.md.

verl's scorer imports pyext, which no Python above 3.10 can install; the one function that it calls is here in three lines.
Run: python tools/oracle_code.py [--verlc BIN] (--out DIR | --compare N). Deterministic but for programs near a limit."""
import argparse
import asyncio
import collections
import contextlib
import io
import json
import os
import random
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "python"))
SECONDS = 1

# Whole programs that read two numbers and answer with them in some form; {} is what is printed of a and b.
READERS = [
    "a, b = map(int, input().split())\n", "import sys\na, b = map(int, sys.stdin.read().split()[:2])\n",
    "import sys\na, b = map(int, sys.stdin.readline().split())\n",
    "from sys import stdin\na, b = map(int, stdin.readline().split())\n", "a, b = map(int, stdin.read().split()[:2])\n",
    "import sys\nfor line in sys.stdin:\n    a, b = map(int, line.split())\n    break\n",
    "import sys\na, b = map(int, sys.stdin.readlines()[0].split())\n", "a, b = map(int, open(0).read().split()[:2])\n",
    "import sys\na, b = map(int, sys.stdin.buffer.readline().split())\n", "a = int(input())\nb = int(input())\n",
    "x = 1\nfrom sys import stdin\na, b = map(int, stdin.readline().split())\n",
    "import numpy as np\na, b = np.array(input().split(), dtype=int)\n",
    "def read():\n    return map(int, input().split())\na, b = read()\n", "a, b = map(int, open('/dev/stdin').read().split())\n",
    "import os\na, b = map(int, os.read(0, 100).split())\n",
    "a, b = [int(x) for x in input().split()][:2]\nwhile True:\n    try: input()\n    except EOFError: break\n"
]
WRITERS = [
    "print(a + b)\n", "print(a + b, end='')\n", "print('', a + b, ' ')\n", "print(a + b)\nprint()\nprint()\n",
    "print()\nprint(a + b)\n", "print(float(a + b))\n", "print(a + b + 1e-6)\n", "print(a + b + 1e-3)\n",
    "print((a + b) * (1 + 2e-5))\n", "print(a + b + 1)\n", "print(a - b)\n", "import sys\nsys.stdout.write(str(a + b))\n",
    "stdout.write(str(a + b))\n", "import sys\nprint(a + b, file=sys.stderr)\n", "print(a)\nprint(b)\n", "print(b)\nprint(a)\n",
    "print(a, b)\n", "print(b, a)\n", "print(a, b, sep='\\n\\n')\n", "print('%d.0\\n%d' % (a, b))\n", "print(a + b)\nexit()\n",
    "import sys\nprint(a + b)\nsys.exit(0)\n", "print(a + b)\nraise SystemExit(1)\n", "print(a + b)\nquit()\n",
    "print(a + b)\nraise ValueError(a)\n", "print(a + b)\n1 // 0\n", "print(a + b)\nraise KeyboardInterrupt\n",
    "import os\nprint(a + b)\nos._exit(0)\n", "print(a + b, 'YES')\n", "print('yes' if a + b else 'no')\n",
    "print(str(a + b) + '\\r')\n", "print('\\x0c%d' % (a + b))\n", "print(chr(0x2003) + str(a + b))\n",
    "print(10 ** 30 + a + b)\n", "print(float('nan'))\n", "print(float('inf'))\n", "print('1_0')\n", "print('\u0663')\n",
    "print('''a\nb''')\n", "pass\n", "def main():\n    print(a + b)\nif __name__ == '__main__':\n    main()\n",
    "if __name__ == '__main__':\n    print(a + b)\n", "if __name__ == \"__main__\": print(a + b)\nelse: print(7)\n",
    "if __name__ == '__main__':\n    print(a + b)\nprint(1)\n",
    "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(5000) - 5000 + a + b)\n",
    "class A:\n    def go(self):\n        return a + b\nprint(A().go())\n",
    "import threading\nt = threading.Thread(target=lambda: print(a + b))\nt.start()\nt.join()\n",
    "import subprocess\nprint(a + b)\n", "import os\nos.getcwd()\nprint(a + b)\n", "open('x', 'w').write('1')\nprint(a + b)\n",
    "print(sum(accumulate([a, b])) - a)\n", "print(gcd(a, b))\n", "print(Counter([a, b]).most_common()[0][1])\n",
    "global c\nc = a + b\nprint(c)\n", "print(a +\n", "  print(a + b)\n", "print(a + b\t)\n# \u00e9\n",
    "print(*sorted([a, b]), sep='\\n')\n", "print([a, b])\n", "print(a + b); print(a + b)\n", "print('Case #1: %d' % (a + b))\n"
]
RARE = [
    "while True: pass\n", "import time\ntime.sleep(30)\n", "while True: print('x' * 100)\n",
    "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return f(n + 1)\nf(0)\n", "import os\nos.kill(0, 9)\n",
    "try:\n    while True: pass\nexcept BaseException: print(1)\n", "import signal\nsignal.alarm(0)\nprint(a + b)\n"
]
INPUTS = ["1 2", "1 2\n", "3 4\n5 6\n", "0 0\n", "-1 5", "10 20\n\n", " 7 8 \n", "1\n2\n", "100000 200000", ""]
FENCES = [
    "```python\n%s```", "```python\n%s```\nthis adds them", "First\n```python\nprint(1)\n```\nthen\n```python\n%s\n```", "%s",
    "```\n%s```", "```py\n%s```", "Here:\n```python\n%s", "```python%s```", "``` python\n%s```"
]
FUNCTIONS = [
    "def f(x, y): return x + y", "def f(x, y): return [x, y]", "def f(x, y): return (x, y)", "def f(x, y): return [(x, y)]",
    "def f(x, y): return {x: y}", "def f(x, y): return str(x + y)", "def f(x, y): return float(x + y)",
    "def f(x, y): return x == y", "def f(x, y): return None", "def f(x, y): return {x, y}", "def f(x, y): print(x + y)",
    "def g(x, y): return x + y", "class Solution:\n    def f(self, x, y): return x + y",
    "class Solution:\n    def g(self, x): return x", "def f(*x): return sum(x)", "def f(x): return x",
    "def f(x, y): raise ValueError", "def f(x, y): exit()", "import sys\ndef f(x, y): sys.exit(0)", "f = max",
    "f = lambda x, y: [[x], [y]]", "def f(x, y): return [[x], (y,)]", "def f(x, y): return ((x, y), (y, x))", "x = ",
    "def f(x, y):\n    while True: pass", "print(3)\ndef f(x, y): return x + y",
    "n = 0\ndef f(x, y):\n    global n\n    n += 1\n    return x + y if n < 2 else 0", "def f(x, y): return x + y + 1e-9",
    "def f(x): return {k: v for k, v in x.items()}", "def f(x): return list(x)", "def f(x): return [x]",
    "def f(x): return sorted(x)", "def f(x): return x[0]"
]
CALLS = [("1\n2", "3"), ("1\n2", "[1, 2]"), ("1\n2", "[[1, 2]]"), ("1\n2", "[3]"), ("1\n2", '{"1": 2}'), ("1\n2", '[{"1": 2}]'),
         ("1\n2", '"3"'), ("1\n2", "3.0"), ("1\n1", "true"), ("1\n2", "null"), ('{"1": 2}', '{"1": 2}'), ('{"a": 2}', '{"a": 2}'),
         ('{"1": 2}', "[1]"), ("[3, 1]", "[3, 1]"), ("[3, 1]", "[1, 3]"), ("[3, 1]", "3"), ("[3, 1]", "[[3, 1]]"), ("[]", "[]"),
         ("0", "false"), ("1\n2", "[[1], [2]]"), ("1\n2", "[[[1, 2], [2, 1]]]"), ("1\n2", "[[1, 2], [2, 1]]")]


def expected_of(rng, text):
    """What the tests expect, of a program that prints the sum and of some that print something else."""
    numbers = [int(w) for w in text.split()[:2]] or [0]
    a, b = numbers[0], numbers[-1]
    return rng.choice(["%d\n" % (a + b)] * 25 + [
        "%d" % (a + b),
        "%d.0\n" % (a + b),
        "\n%d\n\n" % (a + b),
        "%d\n%d\n" % (a, b),
        "%d %d\n" % (a, b),
        "  %d  \r\n" % (a + b),
        "%d\n\n%d" % (a, b), "", "YES\n",
        "[%d, %d]\n" % (a, b), "nan", "inf", "10", "3", "1\n",
        "%d\n   \n" % (a + b), "a\nb\n",
        "Case #1: %d\n" % (a + b)
    ])


def program_case(rng):
    code = rng.choice(READERS[:3] * 8 + READERS) + rng.choice(WRITERS[:9] * 8 + WRITERS)
    if rng.random() < 0.04:
        code = rng.choice(READERS[:3]) + rng.choice(RARE)
    fence = rng.choice([FENCES[0]] * 12 + FENCES)
    inputs = [rng.choice(INPUTS[:5] * 5 + INPUTS) for _ in range(rng.choice([1, 1, 2, 2, 3, 12 if rng.random() < 0.1 else 2]))]
    return {
        "solution": fence % code if "%s" in fence else code,
        "tests": {
            "inputs": inputs,
            "outputs": [expected_of(rng, i) for i in inputs]
        }
    }


def function_case(rng):
    code = rng.choice(FUNCTIONS)
    calls = [rng.choice(CALLS) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.4:
        calls = [calls[0]] * len(calls)
    return {
        "solution": "```python\n" + code + "\n```",
        "tests": {
            "fn_name": "f",
            "inputs": [i for i, _ in calls],
            "outputs": [o for _, o in calls]
        }
    }


def cases(seed, n):
    rng = random.Random(seed)
    fixed = [{
        "solution": s,
        "tests": {
            "inputs": i,
            "outputs": o
        }
    } for s, i, o in [("", ["1"], ["1"]), ("```python\n```", ["1"],
                                           [""]), ("```python\nimport os\n```", ["1"],
                                                   [""]), ("print(1)", [], []), ("print(1)", ["1"] * 11, ["1"] * 10 + ["2"])]]
    fixed += [{
        "solution": f,
        "tests": {
            "fn_name": "f",
            "inputs": [i],
            "outputs": [o]
        }
    } for f in FUNCTIONS[:6] for i, o in CALLS[:5]]
    return (fixed + [program_case(rng) if rng.random() < 0.75 else function_case(rng) for _ in range(n)])[:max(n, len(fixed))]


# ---- verl's ----


def verl_scorer():
    pyext = types.ModuleType("pyext")

    class RuntimeModule:

        @staticmethod
        def from_string(name, docstring, source):
            names = {}
            exec(source, names)
            return types.SimpleNamespace(**names)

    pyext.RuntimeModule = RuntimeModule
    sys.modules.setdefault("pyext", pyext)
    from verl.utils.reward_score import prime_code
    from verl.utils.reward_score.prime_code import utils
    original = utils.check_correctness
    prime_code.apps_check_correctness = lambda in_outs, generation, timeout, debug: original(in_outs, generation, SECONDS, debug)
    return prime_code.compute_score


def verl_score(case):
    score = verl_scorer()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return float(score(case["solution"], json.dumps(case["tests"]), continuous=True)[0])


def verl_scores(all_cases):
    return [verl_score(case) for case in all_cases]


# ---- verlc's ----


def verlc_scores(all_cases, verlc):
    os.environ["VERLC"] = str(Path(verlc).resolve())
    from verlc_helpers import code_reward
    code_reward.CALL_S = code_reward.PROGRAM_S = SECONDS
    code_reward.init({"parallel": os.cpu_count()})

    async def score():
        some = asyncio.Semaphore(os.cpu_count())

        async def one(case):
            async with some:
                return await code_reward.handle_async({"solution_str": case["solution"], "ground_truth": case["tests"]})

        return await asyncio.gather(*map(one, all_cases))

    return asyncio.run(score())


def compare(n, verlc):
    all_cases = [case for case in cases(5, n) if case["tests"]["inputs"]]  # without: the difference code-no-tests
    here, there = verlc_scores(all_cases, verlc), verl_scores(all_cases)
    outcomes = collections.Counter(r.get("extra", {}).get("code_outcome", next(iter(r))) for r in here)
    bad = [(c, r, v) for c, r, v in zip(all_cases, here, there) if r.get("score") != v]
    for case, ours, verl in bad[:20]:
        print(json.dumps({"case": case, "verlc": ours, "verl": verl}, ensure_ascii=False))
    print(
        f"code: {len(all_cases)} cases, {len(bad)} scores differ; "
        f"{sum(v == 1 for v in there)} are 1, {sum(0 < v < 1 for v in there)} between; {dict(outcomes)}"
    )
    return not bad


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--verlc", default=os.environ.get("VERLC", str(ROOT / "build/release/verlc")))
    p.add_argument("--out")
    p.add_argument("--compare", type=int)
    a = p.parse_args()
    if a.compare:
        sys.exit(0 if compare(a.compare, a.verlc) else 1)
    some = cases(1, 90)
    Path(a.out).mkdir(parents=True, exist_ok=True)
    with open(Path(a.out) / "cases.jsonl", "w", encoding="utf-8") as f:
        for case, score in zip(some, verl_scores(some)):
            f.write(json.dumps(case | {"score": score}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
