"""How the user's compute_score is called: an async one many times at once in one process, each call
with its own deadline; what extra_info holds beside the data's; reward.reward_kwargs; and texts with
a NUL, which arrive, are graded and are stored whole."""

import json
import pathlib
import sqlite3
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

JUDGE = '''
import asyncio, os
busy = most = 0
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A judge behind an API: it answers after a while and knows how many it serves."""
    global busy, most
    busy += 1
    most = max(most, busy)
    try:
        await asyncio.sleep(60 if solution_str == "slow" else 0.5)
    finally:
        busy -= 1
    if solution_str == "raise":
        raise ValueError("no opinion")
    return {"score": 1.0, "most": most, "pid": os.getpid()}
'''


def evaluate(s, rows, *more):
    path = s.write("scored.jsonl", rows)
    t = time.monotonic()
    p = run("eval", f"data.path={path}", *more, check=False)
    return p, json.loads(p.stdout) if p.returncode == 0 else {}, time.monotonic() - t


def check_async(s, test):
    (s.dir / "judge.py").write_text(JUDGE)
    keys = [f"custom_reward_function.path={s.dir / 'judge.py'}", "+reward.num_workers=1", "+reward.timeout=5"]
    rows = [{"data_source": "a/b", "reward_model": {"ground_truth": ""}, "responses": ["fine"]} for _ in range(240)]
    p, got, seconds = evaluate(s, rows, *keys)
    test("an async compute_score: at least 200 calls in flight in one process", got.get("val-aux/a/b/most/mean@1", 0) >= 200 and
         got["test_score/a/b"] == 1, f"{got or p.stderr[-500:]}")
    test("and 240 calls of half a second take no 120 s", seconds < 30, f"{seconds:.1f} s")
    rows[7]["responses"], rows[9]["responses"] = ["slow"], ["raise"]
    p, got, seconds = evaluate(s, rows, *keys)
    test("a call that passes its deadline and one that raises cost nobody else", got.get("errors") == 2 and
         got["test_score/a/b"] == 1, f"{got} {p.stderr[-500:]}")


def main():
    test = Tests()
    with Scratch() as s:
        check_async(s, test)
    test.end()


main()
