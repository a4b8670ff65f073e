"""One call of the user's reward function before a run generates anything: what it says of all calls to come.

Refused is raised where no call can work: the arguments do not fit, an import fails, the value is of a type that is no score. All
else that goes wrong with an answer that no model wrote is a doubt: a real answer may do better.
While it goes on the environment has VERLC_REWARD_TRIAL=1, for functions that count or pay for their calls.
"""

import contextlib
import inspect
import os
import traceback

from verlc_helpers.protocol import one_line, text_of
from verlc_helpers.user_function import how_to_install


class Refused(Exception):
    pass


@contextlib.contextmanager
def marked():
    os.environ["VERLC_REWARD_TRIAL"] = "1"
    try:
        yield
    finally:
        del os.environ["VERLC_REWARD_TRIAL"]


def place(function):
    """ (FILE:LINE) of its definition."""
    try:
        code = inspect.unwrap(function).__code__
        return f" ({code.co_filename}:{code.co_firstlineno})"
    except Exception:
        return ""


def check_arguments(function, args, named, how):
    """Refused unless it takes these arguments; how: they are passed, for the message."""
    try:
        signature = inspect.signature(function)
    except Exception:  # of a C function, or an object that says nothing
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        name = getattr(function, "__name__", text_of(function, repr))
        raise Refused(f"{name}{signature}{place(function)} cannot be called: {one_line(error)}; {how}") from None


def is_hopeless(value, key):
    """Whether a value of this type is no score, whatever the answer is. None and NaN may be of this one alone."""
    if isinstance(value, dict):
        if key not in value:
            return True
        value = value[key]
    try:
        value = value.item() if hasattr(value, "item") else value
    except Exception:  # an array of several
        return True
    return not (value is None or isinstance(value, (int, float)))


def raised(error):
    """{"refuse": text} of an exception that every call will raise, else {"doubt": text}, with the line of the user's file."""
    if isinstance(error, Refused):
        return {"refuse": one_line(error)}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_own(f.filename)]
    at = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    text = f"it raised {type(error).__name__}: {one_line(error)}{at}{how_to_install(error)}"
    return {"refuse" if isinstance(error, (ImportError, SyntaxError)) else "doubt": text}


def is_own(filename):
    return os.path.dirname(os.path.abspath(filename)) == os.path.dirname(os.path.abspath(__file__)) or "asyncio" in filename
