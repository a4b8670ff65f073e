"""The user's reward function, as verl calls it (custom_reward_function.path).

  init {"path": FILE, "name": "compute_score", "kwargs": {...}}
  {"data_source", "solution_str", "ground_truth", "extra_info"}
      -> {"score": number, "extra": {...}}   a number, or a dict with "score"
      -> {"crash": text}                     it raised
      -> {"unparsed": text}                  it returned something else
  {"ping": true} -> {"async": bool}          the file loads

A def is called once at a time.  Calls of an async def run on one event loop, as many as verlc
sends, and its deadline is kept there (event_loop.py).  By hand:
  echo '{"solution_str": "#### 1", ...}' | python3 -m verlc_helpers.reward '{"path": "f.py", "name": "compute_score"}'
"""

import asyncio
import inspect
import math
import os
import sys

from verlc_helpers.protocol import MAX_INT, one_line, serve, text_of
from verlc_helpers.user_function import describe, load

FUNCTION = None
KWARGS = {}
DEEPEST = 100  # lists and dicts inside each other; a reader of JSON has its limit
STANDIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "verlc_standin")


def init(value):
    global FUNCTION, KWARGS
    sys.path.append(STANDIN)  # verl.utils.reward_score, where no verl is installed
    FUNCTION = load(value["path"], value["name"], " (custom_reward_function.name)")
    KWARGS = value.get("kwargs") or {}
    return handle_async if inspect.iscoroutinefunction(FUNCTION) else None


def plain(value, depth=0):
    """The value as JSON can carry it: numpy and torch scalars as numbers, and text of what is no number, text, list or dict,
    nor an integer of 64 bits, a finite number, or nested deeper than DEEPEST."""
    try:
        return convert(scalar(value), depth)
    except Exception:  # the object's own methods
        return text_of(value)


def scalar(value):
    if hasattr(value, "item") and not isinstance(value, (list, tuple, dict, str)):
        return value.item()  # not of an array of several
    return value


def convert(value, depth):
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, dict) and depth < DEEPEST:
        return {text_of(k).replace("\0", "\\0"): plain(v, depth + 1) for k, v in value.items()}  # JSON readers refuse NUL in keys
    if isinstance(value, (list, tuple)) and depth < DEEPEST:
        return [plain(v, depth + 1) for v in value]
    if isinstance(value, int) and -MAX_INT <= value < MAX_INT or isinstance(value, float) and math.isfinite(value):
        return value
    return value if value is None else text_of(value)


def score_of(value):
    """A finite float, or None."""
    try:
        value = scalar(value)
        score = float(value) if isinstance(value, (int, float)) else math.nan
    except Exception:  # an int over all floats; the object's own methods
        return None
    return score if math.isfinite(score) else None


def result(value):
    score = score_of(value.get("score") if isinstance(value, dict) else value)
    if score is None:
        got = text_of(value, repr)[:200]
        return {"unparsed": one_line(f'compute_score returned {got}, not a finite number or a dict with "score"')}
    extra = plain(value) if isinstance(value, dict) else {"acc": score}
    if not isinstance(extra, dict):  # a dict whose own methods fail
        extra = {}
    if isinstance(extra.get("score"), str):
        extra["score"] = score
    return {"score": score, "extra": extra}


def arguments(request):
    return {key: request.get(key) for key in ("data_source", "solution_str", "ground_truth", "extra_info")} | KWARGS


def handle(request):
    if request.get("ping"):
        return {"async": False}
    try:
        value = FUNCTION(**arguments(request))
        if inspect.isawaitable(value):  # a def that returns a coroutine, or a function made async by hand
            value = asyncio.run(finish(value))
        return result(value)
    except BaseException as error:
        return {"crash": describe(error)}


async def handle_async(request):
    if request.get("ping"):
        return {"async": True}
    try:
        return result(await FUNCTION(**arguments(request)))
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # a cancelled call is event_loop.py's
        return {"crash": describe(error)}


async def finish(awaitable):
    return await awaitable


if __name__ == "__main__":
    serve(handle, init)
