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

import ast
import asyncio
import concurrent.futures
import http.client
import json
import math
import os
import secrets
import time
import urllib.error
import urllib.request
import warnings

from verlc_helpers import code_harness
from verlc_helpers.protocol import one_line, serve, text_of
from verlc_helpers.sandbox import SandboxError, limit_memory, python_dirs, python_path, run_async

FIRST_TESTS = 10
CALL_S, PROGRAM_S = 5, 10  # verl's: of a function with all tests, of a program with one
LONGEST_ANSWER = 4 << 20
OUTPUT_KB = 64 << 10
LONGEST_TEXT = 200
HELPER_BYTES = 1 << 30

SETTINGS = {"parallel": 1, "memory_mb": 1024, "url": None}
HARNESS = {}
POOL = None
JUDGE = concurrent.futures.ThreadPoolExecutor(1)  # one long answer at a time is in memory as Python's objects


def init(value):
    global POOL
    SETTINGS.update(value or {})
    here = os.path.dirname(code_harness.__file__)
    for name in ("code_harness", *code_harness.MODULES):
        with open(f"{here}/{name}.py", encoding="utf-8") as file:
            HARNESS[f"{name}.py"] = file.read()
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
    if not inputs:
        raise NoTests("it has no tests")
    if isinstance(asserts, list):
        check_statements(asserts, len(inputs))
    return tests


def check_statements(asserts, n):
    if len(asserts) != n or not all(isinstance(a, str) for a in asserts):
        raise NoTests('its "assert_case" is not a list of texts, one a test')
    for i, statement in enumerate(asserts):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                empty = not ast.parse(statement).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise NoTests(f'element {i} of "assert_case" is no Python: {error}') from error
        if empty:
            raise NoTests(f'element {i} of "assert_case" says nothing')


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

ANSWERS = ("output", "value", "held")  # the other words are failures
ENDS = {"wall_limit": "time_limit", "cpu_limit": "time_limit", "exited": "runtime_error", "signaled": "runtime_error"}


def answer_of(line, n):
    """(test, (word, what it says)) of a line of the harness; None: it is none."""
    number, word, detail = (line.split(" ", 2) + ["", ""])[:3]
    if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) < n) or word not in code_harness.WORDS:
        return None
    if len(line) > LONGEST_ANSWER + 64:
        return int(number), ("output_limit", f"over {LONGEST_ANSWER} bytes")
    try:
        return int(number), (word, json.loads(detail))
    except (ValueError, RecursionError):
        return int(number), ("runtime_error", "an answer that is too deep, or has a number of thousands of digits")


def answers_of(result, n):
    """One (word, what it says) a test: the first of the harness about it."""
    answers = [None] * n
    for line in result["stdout"].split("\n", 2 * n + 1)[:2 * n + 1]:
        answer = answer_of(line, n)
        if answer and answers[answer[0]] is None:
            answers[answer[0]] = answer[1]
    rest = ENDS.get(result["end"], result["end"]), f"the sandbox ended: {result['end']} {result['status']}"
    return [answer or rest for answer in answers]


async def run_harness(task, n, rounds, parts=()):
    """The harness's answers to n tests; parts: what it reads of each only after the program's process was made."""
    task |= {"longest": LONGEST_ANSWER}
    if parts:
        task["parts"] = [[sum(map(len, parts[:i])), len(part)] for i, part in enumerate(parts)]
    head = json.dumps(task)
    stdin = f"{len(head):0{code_harness.LENGTH}}{head}{''.join(parts)}"
    wall = 2 + rounds * (task["seconds"] + (3 if parts else 1))
    result = await run_async([python_path(), "-I", "code_harness.py"], stdin, HARNESS, python_dirs(), wall_s=wall, cpu_s=wall,
                             memory_mb=SETTINGS["memory_mb"], output_kb=OUTPUT_KB)
    if result["end"] == "exited" and result["status"] != 0 and not result["stdout"]:
        raise SandboxError(f"{python_path()} does not run in the sandbox: {one_line(result['stderr'])[-300:]}")
    return await in_thread(answers_of, result, n)


async def in_thread(function, *args):
    """What may take a while for long answers; the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(JUDGE, function, *args)


def judge_output(answer, expected):
    word, detail = answer
    if word != "output" or not isinstance(detail, str):
        return "runtime_error" if word in ANSWERS else word
    return "passed" if same_output(detail, expected) else "wrong_answer"


def judge_value(answer, expected):
    word, detail = answer
    if word != "value":
        return "runtime_error" if word in ANSWERS else word
    try:
        return "passed" if same_value(untagged(detail), expected) else "wrong_answer"
    except (ValueError, TypeError, RecursionError):
        return "runtime_error"


def judge_statement(answer, secret):
    word, detail = answer
    if word != "held":
        return "runtime_error" if word in ANSWERS else word
    return "passed" if detail == secret else "runtime_error"


def short(text):
    return one_line(text)[:LONGEST_TEXT]


def reported(answer, kind, i):
    """One line about a test that failed."""
    detail = answer[1]
    detail = detail[:10 * LONGEST_TEXT] if isinstance(detail, str) else detail
    return short(f"test {i}: {kind}: {text_of(detail) if kind != 'wrong_answer' else 'answered ' + text_of(detail, repr)}")


def first_failure(answers, kinds):
    for i, (answer, kind) in enumerate(zip(answers, kinds)):
        if kind != "passed":
            return kind, reported(answer, kind, i)
    return "passed", ""


def scored(kinds, outcome):
    score = sum(kind == "passed" for kind in kinds) / len(kinds)
    return {"score": score, "extra": {"acc": score, "code_outcome": outcome[0], "code_detail": outcome[1]}}


def judged(judge, answers, expected):
    kinds = [judge(a, e) for a, e in zip(answers, expected)]
    return kinds, first_failure(answers, kinds)


async def score_calls(code, tests):
    """A function: the first failure, ("passed", "") where there is none."""
    args = [[parsed(line, "inputs") for line in text.split("\n")] for text in tests["inputs"]]
    expected = [parsed(text, "outputs") for text in tests["outputs"]]
    answers = await run_harness({"code": code, "fn_name": tests["fn_name"], "tests": args, "seconds": CALL_S}, len(args), 1)
    return (await in_thread(judged, judge_value, answers, expected))[1]


async def score_asserts(code, asserts):
    secrets_ = [secrets.token_hex(16) for _ in asserts]
    parts = [json.dumps([secret, statement]) for secret, statement in zip(secrets_, asserts)]
    answers = await run_harness({"code": code, "seconds": PROGRAM_S}, len(asserts), len(asserts), parts)
    return scored(*judged(judge_statement, answers, secrets_))


async def score_here(request):
    tests = read_tests(request.get("ground_truth"))
    code = extract(request.get("solution_str") or "")
    if isinstance(tests.get("assert_case"), list):
        return await score_asserts(code, tests["assert_case"][:FIRST_TESTS])
    check_texts(tests)
    called = None
    if tests.get("fn_name") is not None:
        called = await score_calls(code, tests)
        if called[0] == "passed":
            return scored(["passed"], called)
    inputs, outputs = tests["inputs"][:FIRST_TESTS], tests["outputs"][:FIRST_TESTS]
    answers = await run_harness({"code": code, "fn_name": None, "tests": inputs, "seconds": PROGRAM_S}, len(inputs), len(inputs))
    kinds, failure = await in_thread(judged, judge_output, answers, outputs)
    return scored(kinds, called or failure)


# ---- with a SandboxFusion service ----

ATTEMPTS, FIRST_DELAY_S, BEYOND_S = 3, 1, 10
LONGEST_REPLY = 32 << 20

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


def read_reply(reply, deadline):
    """The body, which may come in drops and without end."""
    parts, n = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        n += len(part)
        if n > LONGEST_REPLY:
            raise ValueError(f"its answer is over {LONGEST_REPLY} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return b"".join(parts)


def post(payload):
    """The service's answer; SandboxError where it gives none."""
    url = SETTINGS["url"]
    kind = "application/json"
    wait_s = 2 * PROGRAM_S + BEYOND_S
    for attempt in range(ATTEMPTS):
        try:
            message = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": kind, "Accept": kind})
            with urllib.request.urlopen(message, timeout=wait_s) as reply:
                return checked_reply(json.loads(read_reply(reply, time.monotonic() + wait_s)))
        except urllib.error.HTTPError as error:
            if error.code != 504 or attempt + 1 == ATTEMPTS:
                raise SandboxError(f"{url} answers {error.code} {error.reason}") from error
            time.sleep(FIRST_DELAY_S * (attempt + 1))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            text = one_line(error) or type(error).__name__
            raise SandboxError(f"{url}: {text[:300]}; is reward.sandbox_fusion.url right, and the service up?") from error


# What an answer has where it is SandboxFusion's: of a key, its types.
RUN_FORM = dict.fromkeys(("status", "stdout", "stderr"), (str, type(None))) | {"return_code": (int, float, type(None))}


def checked_reply(reply):
    """The answer; ValueError where it is not of SandboxFusion's form."""
    if not isinstance(reply, dict):
        raise ValueError(f"its answer is {type(reply).__name__}, not SandboxFusion's object")
    if not isinstance(reply.get("status"), str):
        raise ValueError('its answer has no text as "status", as SandboxFusion\'s has')
    for key in ("compile_result", "run_result"):
        part = reply.get(key)
        if part is not None and not isinstance(part, dict):
            raise ValueError(f'its answer has {type(part).__name__} as "{key}", not an object')
        for name, types in RUN_FORM.items():
            if part and not isinstance(part.get(name), types):
                raise ValueError(f'its answer has {type(part[name]).__name__} as "{name}" of "{key}"')
    return reply


def failed_run(result):
    return result.get("status") == "Error" or (result.get("status") == "Finished" and result.get("return_code") != 0)


def judge_reply(reply, expected, mark):
    """(kind, detail) of the service's answer; mark: what is to be printed after all else."""
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
        if not output.rstrip("\n").endswith(mark):
            return "runtime_error", "it ended before its statement did"
        output = output.rstrip("\n")[:-len(mark)] if mark else output
        if expected is None or output.rstrip("\n") == str(expected).rstrip("\n"):
            return "passed", ""
        return "wrong_answer", output
    detail = one_line(reply.get("message"))[:300]
    raise SandboxError(f"{SETTINGS['url']} answers {status!r}, of the run {ran.get('status')!r}: {detail}")


async def score_there(request):
    code = extract_block(request.get("solution_str") or "")
    tests = read_tests(request.get("ground_truth"))
    if code is None:
        return scored(["no_code"], ("no_code", "the response has no code block"))
    asserts = tests.get("assert_case")

    def one(i):
        given = tests["inputs"][i]
        mark = secrets.token_hex(16) if asserts else ""
        program = program_of(code + "\n\n" + asserts[i], tests.get("fn_name")) + f"\nprint('{mark}')\n" if asserts else program_of(
            code, tests.get("fn_name"))
        payload = {"compile_timeout": PROGRAM_S, "run_timeout": PROGRAM_S, "code": program, "language": "python", "files": {},
                   "stdin": None if given is None else str(given), "memory_limit_MB": SETTINGS["memory_mb"], "fetch_files": []}
        return judge_reply(post(payload), tests["outputs"][i], mark)

    loop = asyncio.get_running_loop()
    n = min(len(tests["inputs"]), FIRST_TESTS)
    some = await asyncio.gather(*(loop.run_in_executor(POOL, one, i) for i in range(n)))
    kinds = [kind for kind, _ in some]
    if "compile_error" in kinds:  # of one test: of all after it
        at = kinds.index("compile_error")
        kinds[at:] = ["compile_error"] * (n - at)
    return scored(kinds, first_failure(some, kinds))


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


def init_helper(value):
    """As a process of its own, which has a limit of memory: answers under way, as bytes and as one text."""
    limit_memory(HELPER_BYTES + (value or {}).get("parallel", 1) * 4 * (OUTPUT_KB << 10))
    return init(value)


if __name__ == "__main__":
    serve(handle, init_helper)
