"""The user's reward function, as verl calls it (custom_reward_function.path), or reward manager (reward_manager.py).

  init {"path": FILE, "name": "compute_score", "kwargs": {...}, "style": how it is called, "router_address", "rm_tokenizer",
        "manager": {...}}
  {"data_source", "solution_str", "ground_truth", "extra_info", "data"}
      -> {"score": number, "extra": {...}}   a number, or a dict with "score"
      -> {"crash": text}                     it raised
      -> {"unparsed": text}                  it returned something else
  {"batch": [request, ...]} -> {"results": [reply, ...]}, or {"crash"} or {"unparsed"} for all   style batch
  {"ping": true} -> {"async": bool, "batch": bool}   the file loads

style: "named" passes arguments by name; "positional" the four by position, as verl's prime manager does; "batch" calls it
once with lists, as verl's batch manager does.
A def is called once at a time.  Calls of an async def run on one event loop, as many as verlc
sends, and its deadline is kept there (event_loop.py).  By hand:
  echo '{"solution_str": "#### 1", ...}' | python3 -m verlc_helpers.reward '{"path": "f.py", "name": "compute_score"}'
"""

import asyncio
import inspect
import math
import os
import sys

from verlc_helpers.protocol import MAX_INT, HelperError, one_line, serve, text_of
from verlc_helpers.user_function import describe, load

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
FUNCTION = None
KWARGS = {}
STYLE = "named"
MANAGER = None
DEEPEST = 100  # lists and dicts inside each other; a reader of JSON has its limit
STANDIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "verlc_standin")


def init(value):
    global FUNCTION, KWARGS, STYLE, MANAGER
    sys.path.append(STANDIN)  # verl.utils.reward_score, where no verl is installed
    if value.get("path"):
        FUNCTION = load(value["path"], value["name"], " (custom_reward_function.name)")
    KWARGS = value.get("kwargs") or {}
    STYLE = value.get("style") or "named"
    judge = judge_arguments(value)
    if value.get("manager"):
        from verlc_helpers.reward_manager import Manager
        MANAGER = Manager(value["manager"], FUNCTION, KWARGS, judge)
        return handle_async if MANAGER.is_async else None
    KWARGS = judge | KWARGS
    if inspect.iscoroutinefunction(FUNCTION) and STYLE != "batch":
        return handle_async
    return None


def judge_arguments(value):
    """What verl passes on where there is a reward model: the address of its server and its tokenizer."""
    if value.get("router_address"):
        from verlc_helpers.tokenizer import open_tokenizer
        if FUNCTION and not value.get("manager") and not accepts(FUNCTION, "reward_router_address"):
            raise HelperError(f"{value['name']} has no argument reward_router_address, with which verl calls it where there is a "
                              "generative reward model; a judge that gives the score itself needs "
                              "reward.reward_model.prompt_template", "INVAL")
        path = value.get("rm_tokenizer")
        return {"reward_router_address": value["router_address"], "reward_model_tokenizer": open_tokenizer(path) if path else None}
    needed = inspect.signature(FUNCTION).parameters.get("reward_router_address") if FUNCTION else None
    if needed and needed.default is inspect.Parameter.empty and "reward_router_address" not in (value.get("kwargs") or {}):
        raise HelperError(f"{value['name']} needs reward_router_address: set reward.reward_model.enable=True and "
                          "reward.reward_model.model_path=DIR, and verlc serves that model; or run a server that has "
                          "/v1/chat/completions and set reward.reward_model.router_address=HOST:PORT", "INVAL")
    return {}


def accepts(function, name):
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())


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


def result(value, what="compute_score returned", key="score", extra=None):
    """One sample's reply. extra: what the metrics get; None: a dict's keys, else the score as acc."""
    if STYLE == "positional" and isinstance(value, (list, tuple)) and value:
        value = value[0]
    score = score_of(value.get(key) if isinstance(value, dict) else value)
    if score is None:
        got = text_of(value, repr)[:200]
        return {"unparsed": one_line(f'{what} {got}, not a finite number or a dict with "{key}"')}
    extra = plain(extra if extra is not None else value if isinstance(value, dict) else {"acc": score})
    if not isinstance(extra, dict):  # a dict whose own methods fail
        extra = {}
    if isinstance(extra.get("score"), str):
        extra["score"] = score
    return {"score": score, "extra": extra}


def call(request):
    """The function's value, or a coroutine of it."""
    if MANAGER is not None:
        return MANAGER.single(request)
    if STYLE == "positional":
        return FUNCTION(*(request.get(key) for key in ARGUMENTS), **KWARGS)
    return FUNCTION(**{key: request.get(key) for key in ARGUMENTS} | KWARGS)


def finished(value):
    if MANAGER is not None:
        return result(value, "run_single returned", "reward_score", (value.get("reward_extra_info") or {})
                      if isinstance(value, dict) else None)
    return result(value)


def call_batch(requests):
    """All of them in one call; a reply for each, or one for all."""
    if MANAGER is not None:
        return MANAGER.batch(requests, result)
    values = waited(FUNCTION(**{key + "s": [r.get(key) for r in requests] for key in ARGUMENTS} | KWARGS))
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(requests):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else text_of(values, repr)[:200]
        return {"unparsed": one_line(f"compute_score returned {got}, not a list of {len(requests)} scores")}
    return {"results": [result(v) for v in values]}


def is_batch():
    return MANAGER.is_batch if MANAGER is not None else STYLE == "batch"


def waited(value):
    """Of a def that returns a coroutine, or a function made async by hand: its value."""
    return asyncio.run(finish(value)) if inspect.isawaitable(value) else value


def handle(request):
    try:
        if request.get("ping"):
            return {"async": False, "batch": is_batch()}
        if is_batch():
            return call_batch(request["batch"])
        return finished(waited(call(request)))
    except BaseException as error:
        return {"crash": describe(error)}


async def handle_async(request):
    if request.get("ping"):
        if MANAGER is not None:
            MANAGER.get()  # on the loop that it will run on
        return {"async": True, "batch": False}
    try:
        return finished(await call(request))
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # a cancelled call is event_loop.py's
        return {"crash": describe(error)}


async def finish(awaitable):
    return await awaitable


if __name__ == "__main__":
    serve(handle, init)
