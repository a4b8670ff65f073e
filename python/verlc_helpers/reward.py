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
import numbers

from verlc_helpers.protocol import one_line, serve
from verlc_helpers.user_function import describe, load

FUNCTION = None
KWARGS = {}


def init(value):
    global FUNCTION, KWARGS
    FUNCTION = load(value["path"], value["name"], " (custom_reward_function.name)")
    KWARGS = value.get("kwargs") or {}
    return handle_async if inspect.iscoroutinefunction(FUNCTION) else None


def plain(value):
    """The value as JSON can carry it; numpy and torch scalars become numbers."""
    if hasattr(value, "item") and not isinstance(value, (list, tuple, dict, str)):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            return str(value)
    if isinstance(value, dict):
        return {str(k).replace("\0", "\\0"): plain(v) for k, v in value.items()}  # JSON readers refuse NUL in keys
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def result(value):
    score = value.get("score") if isinstance(value, dict) else value
    score = plain(score)
    if isinstance(score, bool):
        score = float(score)
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        return {"unparsed": one_line(f"compute_score returned {value!r:.200}, not a finite number or a dict with \"score\"")}
    return {"score": float(score), "extra": plain(value) if isinstance(value, dict) else {"acc": float(score)}}


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
    except (Exception, SystemExit) as error:
        return {"crash": describe(error)}


async def handle_async(request):
    if request.get("ping"):
        return {"async": True}
    try:
        return result(await FUNCTION(**arguments(request)))
    except (Exception, SystemExit) as error:
        return {"crash": describe(error)}


async def finish(awaitable):
    return await awaitable


if __name__ == "__main__":
    serve(handle, init)
