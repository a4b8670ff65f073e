"""Loads a function from a Python file that the user named: the one place of the helpers
that runs code of others. What names such a file is the command line, never a model or data."""

import importlib.util
import os
import sys
import traceback

from verlc_helpers.protocol import HelperError, one_line


def where_raised(error):
    """FILE:LINE of the innermost frame, for the message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def how_to_install(error):
    """For a package that this interpreter lacks: which one that is, and what installs it there."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    return (f"; the Python that runs it is {sys.executable}: '{sys.executable} -m pip install {error.name.partition('.')[0]}' "
            "puts a package there, VERLC_PYTHON or for a reward reward.python=PYTHON chooses another")


def describe(error):
    return f"{type(error).__name__}: {one_line(error)}{where_raised(error)}{how_to_install(error)}"


LOADED = {}  # modules by path


def load_module(path):
    if path in LOADED:
        return LOADED[path]
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
    LOADED[path] = module
    return module


def load(path, name, key):
    """The function `name` of the file; `key` is what named it."""
    function = getattr(load_module(path), name, None)
    if not callable(function):
        raise HelperError(f"{path} has no function '{name}'{key}", "INPUT")
    return function
