"""What a reward function may return beside its score: any Python object.  None of them costs the sample its score or ends
the helper; what JSON cannot hold arrives as text.  And scores that are none, and what it may raise."""

import json
import math
import pathlib
import random
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "python"))
from verlc_test import Scratch, Tests, run, tensors  # noqa: E402
from verlc_helpers import protocol, reward  # noqa: E402

VALUES = r'''
import decimal, enum, fractions, math
try:
    import numpy as np
    NUMPY = [np.float32(0.5), np.int64(7), np.uint64(2**64 - 1), np.bool_(True), np.array([1.5]), np.arange(3), np.nan,
             np.str_("text"), np.array(["a", None], dtype=object)]
except ImportError:
    NUMPY = []


class Bad:
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__


class BadKey:
    def __str__(self):
        return "\ud800\0"


class BadDict(dict):
    def items(self):
        raise RuntimeError("no items")


class Any:
    def __getattr__(self, name):
        return lambda *a: self


class Grade(enum.IntEnum):
    GOOD = 3


def nested(n):
    value = []
    for _ in range(n):
        value = {"in": [value]}
    return value


LOOP = {}
LOOP["self"] = LOOP
VALUES = [2**63 - 1, -2**63, 2**63, -2**63 - 1, 2**64, 10**400, 10**5000, 1e308, -0.0, math.nan, math.inf, -math.inf, True, None,
          b"\xff\0", bytearray(b"x"), {1, 2}, frozenset(), "\ud800", "a\0b", "\udcff" * 3, "", nested(50), nested(99), nested(700),
          nested(100_000), LOOP, (1, (2, 3)), range(3), complex(1, 2), decimal.Decimal("1.1"), fractions.Fraction(1, 3), Bad(),
          BadDict(a=1), Any(), Grade.GOOD, object, len, {1: 2, None: 3, (4, 5): 6, True: 7}, {"a\0b": 1, "\ud800": 2, BadKey(): 3},
          {"k" * 100_000: 1}, [2**70, {"x": [2**70, math.nan]}], "9" * 5000, *NUMPY]
'''

REWARD = VALUES + r'''
import os
N = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global N
    open(CALLS, "a").write(f"{os.getpid()}\n")
    N += 1
    return {"score": 0.25 * (N % 4), "value": VALUES[(N - 1) % len(VALUES)], "n": N}
'''


def check_values(s, test):
    made = {}
    exec(VALUES, made)
    n = len(made["VALUES"])
    (s.dir / "values.py").write_text(REWARD.replace("CALLS", repr(str(s.dir / "calls"))))
    keys = {"reward.custom_reward_function.path": s.dir / "values.py", "reward.trial_call": False,
            "reward.num_workers": 1, "trainer.save_freq": -1,
            "data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 4, "trainer.total_training_steps": -(-n // 32),
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "reward.on_error": "stop",
            "trainer.rollout_data_dir": s.dir / "dump"}
    p = run(*s.ppo("values", **keys), check=False)
    test("every value: each sample has its score", p.returncode == 0, f"exit {p.returncode}: {p.stderr[-500:]}")
    pids = (s.dir / "calls").read_text().split() if (s.dir / "calls").exists() else []
    test("one process served them all", len(pids) >= n and len(set(pids)) == 1, f"{len(pids)} calls, {set(pids)}")
    rows = [json.loads(x) for f in (s.dir / "dump").glob("*.jsonl") for x in f.read_text(errors="strict").splitlines()]
    got = {r["n"]: r for r in rows}
    test("their scores are the ones returned", len(got) >= n and all(r["score"] == 0.25 * (k % 4) for k, r in got.items()))

    def arrived(i):
        return got[1 + i]["value"]

    grade = made["VALUES"].index(made["Grade"].GOOD)
    want = {0: 2**63 - 1, 1: -2**63, 2: "9223372036854775808", 3: "-9223372036854775809", 5: "1" + "0" * 400, 6: "<int>",
            9: "nan", 10: "inf", 12: True, 13: None, 14: "b'\\xff\\x00'", 18: "?", 19: "a\0b", grade: 3}
    wrong = {i: arrived(i) for i, v in want.items() if 1 + i in got and (arrived(i) != v or type(arrived(i)) is not type(v))}
    test("what JSON holds arrives as it is, the rest as text", got != {} and not wrong, str(wrong)[:500])


def check_scores(s, test):
    """Of the helper alone: what is a score and what is none; every answer can be read."""
    made = {}
    exec(VALUES, made)
    scores = {7: 7.0, True: 1.0, -0.5: -0.5, 2**70: float(2**70), 10**300: 1e300}
    for value, want in scores.items():
        for given in (value, {"score": value}):
            got = reward.result(given)
            test(f"{given!r:.40} is a score", got["score"] == want and isinstance(got["extra"].get("score", 1.0), (int, float)),
                 str(got)[:200])
    for value in (None, "1", "nan", float("nan"), float("inf"), 10**400, [], {}, {"acc": 1}, 1j, made["Bad"](), made["LOOP"],
                  made["nested"](9999), "\ud800\0"):
        for given in (value, {"score": value}):
            got = reward.result(given)
            test(f"{protocol.text_of(given, repr):.40} is no score", set(got) == {"unparsed"} and "\0" not in got["unparsed"] and
                 protocol.encode({"id": 1, "ok": got}).find(b'"code"') < 0, str(got)[:200])

    rng = random.Random(3)

    def hostile(depth):
        kind = rng.randrange(6 if depth < 8 else 3)
        if kind < 3:
            return rng.choice(made["VALUES"])
        if kind == 3:
            return [hostile(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(["a", "\0", "\udfff", 3, 2**80, None, made["Bad"]()]): hostile(depth + 1) for _ in range(3)}

    bad = []
    for _ in range(300):
        data = protocol.encode({"id": 1, "ok": reward.result({"score": 1, "extra": hostile(0)})})
        json.loads(data, parse_int=protocol.check_int, object_pairs_hook=protocol.check_keys)
        if b'"code":' in data:
            bad.append(data[:200])
    test("300 nests of such values can be read", not bad, str(bad[:1]))


RAISES = '''
import asyncio, os
KINDS = [KeyboardInterrupt, SystemExit(3), GeneratorExit, asyncio.CancelledError, MemoryError, RecursionError, StopIteration,
         UnicodeError("\\ud800\\0"), ValueError("x" * 1_000_000)]
class Unprintable(Exception):
    def __str__(self):
        raise self
KINDS.append(Unprintable())
N = 0
DECORATORdef compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global N
    N += 1
    open(CALLS, "a").write(f"{os.getpid()}\\n")
    if N <= len(KINDS):
        raise KINDS[N - 1]
    return 1.0
'''


def check_raises(s, test):
    for name, decorator in (("def", ""), ("async def", "async ")):
        calls = s.dir / f"{name.split()[0]}.calls"
        path = s.dir / f"raises_{name.split()[0]}.py"
        path.write_text(RAISES.replace("DECORATOR", decorator).replace("CALLS", repr(str(calls))))
        keys = {"reward.custom_reward_function.path": path, "reward.trial_call": False,
                "reward.num_workers": 1, "reward.max_concurrent": 2,
                "trainer.save_freq": -1, "trainer.total_training_steps": 1, "data.train_batch_size": 8,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 8}
        p = run(*s.ppo(f"raises_{name.split()[0]}", **keys), check=False)
        pids = calls.read_text().split()
        test(f"{name}: whatever it raises costs one sample, and no process", "10 of 16 samples ended as crash" in p.stderr and
             len(pids) == 16 and len(set(pids)) == 1 and p.returncode in (0, 1), f"{len(pids)} {set(pids)}: {p.stderr[-400:]}")


EXTREMES = '''
VALUES = [1e308, -1e308, 1.7976931348623157e308, -1e39, 3.5e38, 1e38, -3e38, 5e-324, -0.0, 1.0]
N = 0
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global N
    N += 1
    return {"score": VALUES[N % len(VALUES)], "acc": VALUES[(N + 1) % len(VALUES)]}
'''


def check_extremes(s, test):
    """Scores at the ends of double: those that float32 does not hold are no scores, the others train; weights stay finite."""
    (s.dir / "extremes.py").write_text(EXTREMES)
    for name, keys in {"grpo": {}, "no std": {"algorithm.norm_adv_by_std_in_grpo": False}}.items():
        keys |= {"reward.custom_reward_function.path": s.dir / "extremes.py", "reward.num_workers": 1, "trainer.save_freq": 2,
                 "data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 5, "trainer.total_training_steps": 2,
                 "trainer.val_before_train": True, "trainer.test_freq": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
        d = "extremes_" + name.replace(" ", "_")
        p = run(*s.ppo(d, **keys), check=False)
        test(f"{name}: no score ends the run", p.returncode == 0 and "beyond what float32 holds" in p.stderr and
             "10 of 20 samples have no score: 10 unparsed" in p.stderr, f"exit {p.returncode}: {p.stderr[-600:]}")
        bad = [k for k, (dtype, _, raw) in tensors(s.dir / d / "global_step_2/actor/model.safetensors").items()
               if dtype != "F32" or not all(map(math.isfinite, struct.unpack(f"<{len(raw) // 4}f", raw)))]
        test(f"{name}: no weight is NaN or infinite", not bad, bad[:3])


def main():
    test = Tests()
    with Scratch() as s:
        check_scores(s, test)
        check_values(s, test)
        check_raises(s, test)
        check_extremes(s, test)
    test.end()


main()
