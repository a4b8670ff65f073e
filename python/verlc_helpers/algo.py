"""A user's advantage estimator or policy loss in Python (docs/extending.md).

  init {"path": FILE, "name": NAME, "loss": bool}
  {"describe": true, "kwargs"} -> {"needs": [...]}    what the function's parameters ask for
  {"lens", "mask", "tokens", "samples", "index", "numbers", "kwargs"}
      -> {"advantages", "returns"} or {"loss", "dlog_prob"}

Arrays travel as base64 of little-endian doubles, samples end to end without padding; the
function sees numpy arrays of samples x tokens padded with 0, and response_mask says what
is real. It gets those parameters that it names, under verl's names. What it returns for
masked tokens is not read.
"""

import base64
import inspect

from verlc_helpers.protocol import HelperError, install_line, serve
from verlc_helpers.user_function import describe, load

try:
    import numpy as np
except ImportError:
    np = None

ADVANTAGE = ("token_level_rewards", "response_mask", "index", "gamma", "lam", "old_log_probs", "values", "sum_pi_squared",
             "rollout_is_weights", "reward_baselines")
LOSS = ("old_log_prob", "log_prob", "log_prob_fixed", "advantages", "response_mask", "weight", "clip_ratio_low", "clip_ratio_high",
        "clip_ratio_c")
FUNCTION = NAME = LOSS_KIND = None


def init(value):
    global FUNCTION, NAME, LOSS_KIND
    if np is None:
        raise HelperError(f"numpy is missing; {install_line('numpy')}", "INPUT")
    FUNCTION, NAME, LOSS_KIND = load(value["path"], value["name"], ""), value["name"], value["loss"]


def parameters():
    """The function's named parameters, and whether it takes any others."""
    given = inspect.signature(FUNCTION).parameters.values()
    named = [p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind == p.VAR_KEYWORD for p in given)


def describe_function(kwargs):
    named, others = parameters()
    ours = LOSS if LOSS_KIND else ADVANTAGE
    for p in named:
        if p.default is p.empty and p.name not in ours and p.name not in kwargs:
            raise HelperError(f"{NAME} asks for '{p.name}', which is neither in its kwargs nor one of {', '.join(ours)}", "INPUT")
    unknown = [k for k in kwargs if k in ours or not (others or any(p.name == k for p in named))]
    if unknown:
        raise HelperError(f"{NAME} has no parameter '{unknown[0]}' for its kwargs", "INPUT")
    return {"needs": [p.name for p in named]}


def doubles(text, dtype="<f8"):
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


class Shape:
    """Ragged arrays as padded ones and back."""

    def __init__(self, lens):
        self.real = np.arange(max(lens, default=0))[None, :] < np.array(lens, dtype=np.int64)[:, None]

    def pad(self, flat):
        out = np.zeros(self.real.shape, dtype=flat.dtype if flat.dtype.kind != "u" else np.int64)
        out[self.real] = flat
        return out

    def flat(self, value, what):
        try:
            x = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise HelperError(f"{NAME} returned {what} that is not an array of numbers: {error}", "FORMAT") from error
        if x.shape != self.real.shape:
            raise HelperError(f"{NAME} returned {what} of shape {x.shape}, and the batch is {self.real.shape}: samples x tokens",
                              "FORMAT")
        return base64.b64encode(x[self.real].astype("<f8").tobytes()).decode()


def arguments(request, shape):
    out = {k: shape.pad(doubles(v)) for k, v in request["tokens"].items()}
    out.update({k: doubles(v).copy() for k, v in request.get("samples", {}).items()})
    out.update(request["numbers"])
    out["response_mask"] = shape.pad(doubles(request["mask"], "u1"))
    if "index" in request:
        out["index"] = doubles(request["index"], "<i8").copy()
    out.update(request.get("kwargs") or {})
    return out


def run(given):
    named, others = parameters()
    if not others:
        given = {p.name: given[p.name] for p in named if p.name in given}
    try:
        return FUNCTION(**given)
    except (Exception, SystemExit) as error:
        raise HelperError(f"{NAME} raised {describe(error)}", "INPUT") from error


def handle(request):
    if request.get("describe"):
        return describe_function(request.get("kwargs") or {})
    shape = Shape(request["lens"])
    value = run(arguments(request, shape))
    names = ("loss", "dlog_prob") if LOSS_KIND else ("advantages", "returns")
    if not LOSS_KIND and not isinstance(value, tuple):
        value = (value, value)  # as outcome estimators do: returns are the advantages
    if not isinstance(value, tuple) or len(value) != 2:
        what = f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise HelperError(f"{NAME} returned {what}, and it must return {names[0]} and {names[1]}", "FORMAT")
    return {name: shape.flat(v, name) for name, v in zip(names, value)}


if __name__ == "__main__":
    serve(handle, init)
