"""The user's reward function, as verl calls it (custom_reward_function.path), or reward manager (reward_manager.py).

  init {"path": FILE, "name": "compute_score", "kwargs": {...}, "style": how it is called, "router_address", "rm_tokenizer",
        "manager": {...}}
  {"data_source", "solution_str", "ground_truth", "extra_info", "data"}
      -> {"score": number, "extra": {...}}   a number, or a dict with "score"
      -> {"crash": text}                     it raised
      -> {"unparsed": text}                  it returned something else
  {"batch": [request, ...]} -> {"results": [reply, ...]}, or {"crash"} or {"unparsed"} for all   style batch
  {"ping": true} -> {"async": bool, "batch": bool}   the file loads
  {"trial": request, "call": bool} -> {}, {"refuse": text} or {"doubt": text}   of a call before the run; call false: its arguments

style: "named" passes arguments by name; "positional" the four by position, as verl's prime manager does; "batch" calls it
once with lists, as verl's batch manager does.
A def is called once at a time.  Calls of an async def run on one event loop, as many as verlc
sends, and its deadline is kept there (event_loop.py).  By hand:
  echo '{"solution_str": "#### 1", ...}' | python3 -m verlc_helpers.reward '{"path": "f.py", "name": "compute_score"}'
"""

import inspect
import math
import os
import sys

from verlc_helpers import reward_trial
from verlc_helpers.protocol import MAX_INT, HelperError, one_line, serve, text_of
from verlc_helpers.user_function import describe, load

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
FUNCTION = None
KWARGS = {}
STYLE = "named"
MANAGER = None
LAST = None  # value that became a result, for a trial
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
    global LAST
    if STYLE == "positional" and isinstance(value, (list, tuple)) and value:
        value = value[0]
    LAST = value
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


# ---- one call before the run ----

def check_arguments(request):
    """Refused where no call can be made."""
    four = "data_source, solution_str, ground_truth, extra_info"
    if MANAGER is not None:
        return MANAGER.check_arguments()
    if STYLE == "batch":
        lists = {key + "s": [request.get(key)] for key in ARGUMENTS}
        reward_trial.check_arguments(FUNCTION, (), lists | KWARGS,
                                     f"verlc calls it once with lists, by name: {', '.join(lists)}: give it these or **kwargs")
    elif STYLE == "positional":
        reward_trial.check_arguments(FUNCTION, [request.get(key) for key in ARGUMENTS], KWARGS,
                                     f"verlc calls it by position, as verl's prime manager does: {four}")
    else:
        reward_trial.check_arguments(FUNCTION, (), {key: request.get(key) for key in ARGUMENTS} | KWARGS,
                                     f"verlc calls it by name, as verl does: {four}: give it these parameters or **kwargs")
    return None


def judged(reply):
    """What a reply to one sample says of all that will come."""
    one = reply["results"][0] if reply.get("results") else reply
    if "unparsed" not in one:
        return {}
    key = "score" if MANAGER is None else "reward_score"
    every = "results" not in reply and is_batch() or reward_trial.is_hopeless(LAST, key)
    return {"refuse" if every else "doubt": one["unparsed"]}


def tried(request):
    try:
        check_arguments(request["trial"])
        if not request["call"]:
            return {}
        with reward_trial.marked():
            return judged(call_batch([request["trial"]]) if is_batch() else finished(waited(call(request["trial"]))))
    except BaseException as error:
        return reward_trial.raised(error)


async def tried_async(request):
    try:
        check_arguments(request["trial"])
        if not request["call"]:
            return {}
        with reward_trial.marked():
            return judged(finished(await call(request["trial"])))
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        return reward_trial.raised(error)


def is_batch():
    return MANAGER.is_batch if MANAGER is not None else STYLE == "batch"


def waited(value):
    """Of a def that returns a coroutine, or a function made async by hand: its value."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # takes as long to load as everything else here
    return asyncio.run(finish(value))


def handle(request):
    try:
        if request.get("ping"):
            return {"async": False, "batch": is_batch()}
        if "trial" in request:
            return tried(request)
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
    if "trial" in request:
        return await tried_async(request)
    try:
        return finished(await call(request))
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # a cancelled call is event_loop.py's
        return {"crash": describe(error)}


async def finish(awaitable):
    return await awaitable


if __name__ == "__main__":
    serve(handle, init)
