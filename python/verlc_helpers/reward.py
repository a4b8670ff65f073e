"""The user's reward function, as verl calls it (custom_reward_function.path).

  init {"path": FILE, "name": "compute_score", "kwargs": {...}}
  {"data_source", "solution_str", "ground_truth", "extra_info"}
      -> {"score": number, "extra": {...}}   a number, or a dict with "score"
      -> {"crash": text}                     it raised
      -> {"unparsed": text}                  it returned something else
  {"ping": true} -> {}                       the file loads

def and async def both work.  By hand:
  echo '{"solution_str": "#### 1", ...}' | python3 -m verlc_helpers.reward '{"path": "f.py", "name": "compute_score"}'
"""

import asyncio
import importlib.util
import inspect
import math
import numbers
import os
import sys
import traceback

from verlc_helpers.protocol import HelperError, one_line, serve

FUNCTION = None
KWARGS = {}


def where_raised(error):
    """FILE:LINE of the innermost frame, for the message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def describe(error):
    return one_line(f"{type(error).__name__}: {error}{where_raised(error)}")


def init(value):
    global FUNCTION, KWARGS
    path, name = value["path"], value["name"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # its neighbours import as they did
    spec = importlib.util.spec_from_file_location("custom_module", path)
    if spec is None:
        raise HelperError(f"{path} is not a Python file", "INPUT")
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_module"] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise HelperError(f"{path} does not load: {describe(error)}", "INPUT") from error
    FUNCTION = getattr(module, name, None)
    if not callable(FUNCTION):
        raise HelperError(f"{path} has no function '{name}' (custom_reward_function.name)", "INPUT")
    KWARGS = value.get("kwargs") or {}


def plain(value):
    """The value as JSON can carry it; numpy and torch scalars become numbers."""
    if hasattr(value, "item") and not isinstance(value, (list, tuple, dict, str)):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
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


def handle(request):
    if request.get("ping"):
        return {}
    call = {key: request.get(key) for key in ("data_source", "solution_str", "ground_truth", "extra_info")}
    call.update(KWARGS)
    try:
        value = FUNCTION(**call)
        if inspect.isawaitable(value):
            value = asyncio.run(finish(value))
        return result(value)
    except (Exception, SystemExit) as error:
        return {"crash": describe(error)}


async def finish(awaitable):
    return await awaitable


if __name__ == "__main__":
    serve(handle, init)
