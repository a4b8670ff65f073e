"""Scores programs by their tests: data sources codecontests, apps, codeforces and taco, as verl's prime_code does it, or with
a SandboxFusion service (verl's sandbox_fusion).

  init {"parallel", "memory_mb", "url"}       url: the service's; null: verlc's own sandbox
  {"solution_str", "ground_truth", ...} -> {"score": 0..1, "extra": {"acc", "code_outcome", "code_detail"}}
                                           {"missing": text}  the ground truth is no list of tests
                                           {"crash": text}    the sandbox or the service failed: nothing is known

A ground truth is a dict, or its JSON: {"inputs", "outputs"} of texts, with "fn_name" for a function that is called, or
{"assert_case"} of statements.  The score is the share of the first ten tests that pass; a function passes all of its tests or
is scored as a program without one (verl).  code_outcome is "passed" or what the first failed test was: wrong_answer,
compile_error, runtime_error, time_limit, output_limit, memory_limit, ...

Invariant: expected answers stay in this process, outside the sandbox, and are compared here.
"""

import asyncio
import concurrent.futures
import json
import math
import os
import time
import urllib.error
import urllib.request

from verlc_helpers import code_harness
from verlc_helpers.protocol import HelperError, one_line, serve
from verlc_helpers.sandbox import SandboxError, python_dirs, run_async, sys

FIRST_TESTS = 10
CALL_S, PROGRAM_S = 5, 10  # verl's: of a function with all tests, of a program with one
LONGEST_ANSWER = 4 << 20
OUTPUT_KB = 64 << 10
LONGEST_TEXT = 200

SETTINGS = {"parallel": 1, "memory_mb": 1024, "url": None}
HARNESS = ""
POOL = None


def init(value):
    global HARNESS, POOL
    SETTINGS.update(value or {})
    with open(code_harness.__file__, encoding="utf-8") as file:
        HARNESS = file.read()
    POOL = concurrent.futures.ThreadPoolExecutor(SETTINGS["parallel"])
    return handle_async


class NoTests(Exception):
    """The ground truth cannot be used."""


# ---- the code ----

def extract(text):
    """verl's prime_code: the last ```python block; a text without one is the program."""
    return text.split("```python")[-1].split("```")[0]


def extract_block(text):
    """verl's sandbox_fusion: the last ```python block, else the first block without its language; None: there is none."""
    if "```python" in text:
        return extract(text)
    if "```" not in text:
        return None
    block = text.split("```")[1]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().isalpha() else block


# ---- the tests ----

def texts(tests, key):
    values = tests.get(key)
    if not isinstance(values, list):
        raise NoTests(f'its "{key}" is missing or not a list')
    return values


def read_tests(ground_truth):
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise NoTests(f"it is not JSON: {error}") from error
    if not isinstance(tests, dict):
        raise NoTests(f"it is {type(tests).__name__}, not an object of tests")
    asserts = tests.get("assert_case")
    if isinstance(asserts, list):
        tests = {"inputs": ["" for _ in asserts], "outputs": [None for _ in asserts]} | tests
    inputs, outputs = texts(tests, "inputs"), texts(tests, "outputs")
    if len(inputs) != len(outputs):
        raise NoTests(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if isinstance(asserts, list) and (len(asserts) != len(inputs) or not all(isinstance(a, str) for a in asserts)):
        raise NoTests('its "assert_case" is not a list of texts, one a test')
    return tests


def check_texts(tests):
    for key in ("inputs", "outputs"):
        for i, value in enumerate(tests[key]):
            if not isinstance(value, str):
                raise NoTests(f'element {i} of "{key}" is {type(value).__name__}, not a text')


def parsed(text, key):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoTests(f'"{key}" of a function holds {one_line(text)[:60]!r}, which is not JSON') from error


# ---- comparing ----

def is_number(text):
    return text.isdigit()


def close(output, expected):
    """numpy.allclose of the lines as numbers, where one of them is no whole number."""
    if not output or len(output) != len(expected) or all(map(is_number, output + expected)):
        return False
    try:
        pairs = [(float(a), float(b)) for a, b in zip(output, expected)]
    except ValueError:
        return False
    return all(a == b or (math.isfinite(b) and abs(a - b) <= 1e-8 + 1e-5 * abs(b)) for a, b in pairs)


def same_output(output, expected):
    """What a program printed: by whole text, by lines without outer blanks and empty lines, or as numbers."""
    lines = output.splitlines()
    if expected.strip() in ("\n".join(lines).strip(), "\n".join(line.strip() for line in lines).strip()):
        return True
    wanted = [line.strip() for line in expected.split("\n") if line]
    filled = [line for line in lines if line]
    return wanted in (lines, filled) or close(filled, wanted)


def int_keys(value):
    """As verl treats an expected object: keys of digits are numbers, and it stands in a list."""
    try:
        return [{int(k): v for k, v in value.items()}] if isinstance(value, dict) else value
    except ValueError:
        return value


def same_value(value, expected):
    """What a function returned."""
    expected = int_keys(expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        expected = int_keys(expected[0]) if isinstance(int_keys(expected[0]), list) else expected
    value = list(value) if isinstance(value, tuple) else value
    first = expected[0] if isinstance(expected, list) and expected else None
    if value == expected or (first is not None and value == first):
        return True
    try:
        return isinstance(value[0], tuple) and [list(x) for x in value] == expected[0]
    except (TypeError, KeyError, IndexError):
        return False


def untagged(value):
    if not isinstance(value, dict):
        return value
    (kind, items), = value.items()
    if kind == "dict":
        return {untagged(k): untagged(v) for k, v in items}
    items = [untagged(item) for item in items]
    return tuple(items) if kind == "tuple" else items


# ---- in verlc's sandbox ----

ENDS = {"wall_limit": "time_limit", "cpu_limit": "time_limit", "exited": "runtime_error", "signaled": "runtime_error"}


def answers_of(result, n):
    """One answer a test; what the program has made of the channel counts as far as it is JSON of this form."""
    answers = [None] * n
    for line in result["stdout"].splitlines():
        try:
            answer = json.loads(line)
            i = answer["test"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(i) is int and 0 <= i < n and answers[i] is None:
            answers[i] = answer
    rest = {"failed": ENDS.get(result["end"], result["end"]), "detail": f"the sandbox ended: {result['end']} {result['status']}"}
    return [rest if answer is None else answer for answer in answers]


async def run_harness(code, fn_name, tests, seconds):
    rounds = 1 if fn_name else len(tests)
    task = {"code": code, "fn_name": fn_name, "tests": tests, "seconds": seconds, "longest": LONGEST_ANSWER}
    wall = 2 + rounds * (seconds + 1)
    result = await run_async([sys.executable, "-I", "code_harness.py"], json.dumps(task), {"code_harness.py": HARNESS},
                             python_dirs(), wall_s=wall, cpu_s=wall, memory_mb=SETTINGS["memory_mb"], output_kb=OUTPUT_KB)
    if result["end"] == "exited" and result["status"] != 0 and not result["stdout"]:
        raise SandboxError(f"{sys.executable} does not run in the sandbox: {one_line(result['stderr'])[-300:]}")
    return answers_of(result, len(tests))


def judge_output(answer, expected):
    if not isinstance(answer.get("output"), str):
        return answer.get("failed", "runtime_error")
    return "passed" if same_output(answer["output"], expected) else "wrong_answer"


def judge_value(answer, expected):
    if "value" not in answer:
        return answer.get("failed", "runtime_error")
    try:
        return "passed" if same_value(untagged(answer["value"]), expected) else "wrong_answer"
    except (ValueError, TypeError, RecursionError):
        return "runtime_error"


def short(text):
    return one_line(text)[:LONGEST_TEXT]


def told(answer, kind, i):
    """One line about a test that failed."""
    what = answer.get("detail") if kind != "wrong_answer" else f"answered {answer.get('output', answer.get('value'))!r}"
    return short(f"test {i}: {kind}: {what}")


def first_failure(answers, kinds):
    for i, (answer, kind) in enumerate(zip(answers, kinds)):
        if kind != "passed":
            return kind, told(answer, kind, i)
    return "passed", ""


def scored(kinds, outcome):
    score = sum(kind == "passed" for kind in kinds) / len(kinds) if kinds else 1.0
    return {"score": score, "extra": {"acc": score, "code_outcome": outcome[0], "code_detail": outcome[1]}}


async def score_calls(code, tests):
    """A function: (all tests passed, the first failure)."""
    args = [[parsed(line, "inputs") for line in text.split("\n")] for text in tests["inputs"]]
    expected = [parsed(text, "outputs") for text in tests["outputs"]]
    answers = await run_harness(code, tests["fn_name"], args, CALL_S)
    return first_failure(answers, [judge_value(a, e) for a, e in zip(answers, expected)])


async def score_asserts(code, asserts):
    async def one(i, statement):
        result = await run_async([sys.executable, "-I", "main.py"], "", {"main.py": code + "\n\n" + statement}, python_dirs(),
                                 wall_s=PROGRAM_S, cpu_s=PROGRAM_S, memory_mb=SETTINGS["memory_mb"])
        good = result["end"] == "exited" and result["status"] == 0
        kind = "passed" if good else ENDS.get(result["end"], result["end"])
        return {"detail": (result["stderr"].strip().splitlines() or [result["end"]])[-1]}, kind
    some = [await one(i, statement) for i, statement in enumerate(asserts[:FIRST_TESTS])]
    kinds = [kind for _, kind in some]
    return scored(kinds, first_failure([answer for answer, _ in some], kinds))


async def score_here(request):
    tests = read_tests(request.get("ground_truth"))
    code = extract(request.get("solution_str") or "")
    if isinstance(tests.get("assert_case"), list):
        return await score_asserts(code, tests["assert_case"])
    check_texts(tests)
    called = None
    if tests.get("fn_name") is not None:
        called = await score_calls(code, tests)
        if called[0] == "passed":
            return scored([], called)
    inputs, outputs = tests["inputs"][:FIRST_TESTS], tests["outputs"][:FIRST_TESTS]
    if not inputs:
        return scored([], ("passed", ""))
    answers = await run_harness(code, None, inputs, PROGRAM_S)
    kinds = [judge_output(a, e) for a, e in zip(answers, outputs)]
    return scored(kinds, called or first_failure(answers, kinds))


# ---- with a SandboxFusion service ----

ATTEMPTS, FIRST_DELAY_S, BEYOND_S = 3, 1, 10

CALLER = """
def _verlc_call():
    import json as j, sys as s
    text = s.stdin.read()
    args = [j.loads(line) for line in text.split("\\n")] if text.strip() else []
    owner = globals()
    function = owner[NAME] if NAME in owner else getattr(owner["Solution"](), NAME)
    value = function(*args)
    print(j.dumps(value) if value is None or isinstance(value, (dict, list, tuple, bool)) else str(value))
if __name__ == "__main__":
    _verlc_call()
"""


def program_of(code, fn_name):
    """A program that calls the function with the arguments of its standard input and prints what it returns."""
    if not fn_name:
        return code
    return f"import sys\n{code_harness.PRELUDE}{code}\n" + CALLER.replace("NAME", repr(fn_name))


def post(payload):
    """The service's answer; SandboxError where it gives none."""
    url = SETTINGS["url"]
    kind = "application/json"
    message = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": kind, "Accept": kind})
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(message, timeout=2 * PROGRAM_S + BEYOND_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 504 or attempt + 1 == ATTEMPTS:
                raise SandboxError(f"{url} answers {error.code} {error.reason}") from error
            time.sleep(FIRST_DELAY_S * (attempt + 1))
        except (OSError, ValueError) as error:
            raise SandboxError(f"{url}: {error}; is reward.sandbox_fusion.url right, and the service up?") from error


def failed_run(result):
    return result.get("status") == "Error" or (result.get("status") == "Finished" and result.get("return_code") != 0)


def judge_reply(reply, expected):
    """(kind, detail) of the service's answer."""
    compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
    status = reply.get("status")
    if status == "Failed" and compiled and (failed_run(compiled) or compiled.get("status") == "TimeLimitExceeded"):
        return "compile_error", compiled.get("stderr") or compiled.get("status")
    if status == "Failed" and ran.get("status") == "TimeLimitExceeded":
        return "time_limit", "TimeLimitExceeded"
    if status == "Failed" and failed_run(ran):
        return "runtime_error", ran.get("stderr")
    if status == "Success" and ran.get("status") == "Finished":
        output = ran.get("stdout") or ""
        if expected is None or output.rstrip("\n") == str(expected).rstrip("\n"):
            return "passed", ""
        return "wrong_answer", f"answered {output!r}"
    raise SandboxError(f"{SETTINGS['url']} answers {status!r}, of the run {ran.get('status')!r}: {reply.get('message')}")


async def score_there(request):
    code = extract_block(request.get("solution_str") or "")
    tests = read_tests(request.get("ground_truth"))
    if code is None:
        return scored(["no_code"], ("no_code", "the response has no code block"))
    asserts = tests.get("assert_case") or [""] * len(tests["inputs"])

    def one(i):
        given = tests["inputs"][i]
        program = program_of(code + "\n\n" + asserts[i], tests.get("fn_name"))
        payload = {"compile_timeout": PROGRAM_S, "run_timeout": PROGRAM_S, "code": program, "language": "python", "files": {},
                   "stdin": None if given is None else str(given), "memory_limit_MB": SETTINGS["memory_mb"], "fetch_files": []}
        return judge_reply(post(payload), tests["outputs"][i])

    loop = asyncio.get_running_loop()
    n = min(len(tests["inputs"]), FIRST_TESTS)
    judged = await asyncio.gather(*(loop.run_in_executor(POOL, one, i) for i in range(n)))
    kinds = [kind for kind, _ in judged]
    if "compile_error" in kinds:  # of one test: of all after it
        at = kinds.index("compile_error")
        kinds[at:] = ["compile_error"] * (n - at)
    return scored(kinds or ["no_tests"], first_failure([{"detail": d} for _, d in judged], kinds) if kinds else ("no_tests", ""))


async def handle_async(request):
    if request.get("ping"):
        return {"async": True}
    try:
        return await (score_there(request) if SETTINGS["url"] else score_here(request))
    except NoTests as error:
        return {"missing": one_line(f"reward_model.ground_truth of data_source '{request.get('data_source')}': {error}")}
    except (SandboxError, OSError) as error:
        return {"crash": one_line(error)}


def handle(request):
    return asyncio.run(handle_async(request))


if __name__ == "__main__":
    serve(handle, init)
