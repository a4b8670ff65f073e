"""Functions as tools, by @function_tool: verl.tools.function_tool."""

import asyncio
import dataclasses
import importlib.util
import inspect
import json
import logging
import os
import sys
from typing import Any, Callable

from verl.tools.function_schema import get_json_schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)
FUNCTION_TOOL_REGISTRY = {}  # by name
LOADED = {}  # tools by the path of their file


@dataclasses.dataclass
class FunctionTool:
    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters):
        """What the function returns: a coroutine is awaited, another function runs in a thread."""
        if self.is_async:
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


def where(fn):
    return f"{fn.__module__}.{fn.__qualname__}"


def schema_of(fn, name):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    variadic = [n for n, p in inspect.signature(fn).parameters.items() if p.kind in kinds]
    if variadic:
        raise ValueError(f"@function_tool '{name}' ({where(fn)}) has the parameters {variadic}, which a tool's schema cannot "
                         "describe: name each parameter")
    schema = get_json_schema(fn)
    schema["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(schema)


def function_tool(name=None, *, schema=None):
    """@function_tool, or @function_tool("name"), before a def or an async def with a docstring in Google's form, whose Args
    describe every parameter, and a type hint for each. schema: the description itself, a dict or OpenAIFunctionToolSchema."""
    def register(fn, tool_name):
        described = (OpenAIFunctionToolSchema.model_validate(schema) if isinstance(schema, dict) else schema if schema is not None
                     else schema_of(fn, tool_name))
        other = FUNCTION_TOOL_REGISTRY.get(tool_name)
        if other is not None and other.fn is not fn:
            raise ValueError(f"two functions are registered as the tool '{tool_name}': {where(other.fn)} and {where(fn)}")
        FUNCTION_TOOL_REGISTRY[tool_name] = FunctionTool(tool_name, fn, described, inspect.iscoroutinefunction(fn))
        return fn

    if callable(name) and schema is None:
        return register(name, name.__name__)
    return lambda fn: register(fn, name or fn.__name__)


def get_function_tool(name):
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"no function is registered as the tool '{name}'; is its file the one of function_tool_path?")
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path):
    """The tools that a file registers, by name; it is run once in a process."""
    full = os.path.abspath(path)
    if not os.path.isfile(full):
        raise FileNotFoundError(f"function_tool_path {path} does not exist")
    if full in LOADED:
        return LOADED[full]
    before = set(FUNCTION_TOOL_REGISTRY)
    name = "_verl_function_tools_" + full.replace(os.sep, "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ImportError(f"function_tool_path {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    names = sorted(set(FUNCTION_TOOL_REGISTRY) - before)
    if not names:
        logger.warning("function_tool_path %s has no @function_tool", path)
    LOADED[full] = [FUNCTION_TOOL_REGISTRY[n] for n in names]
    return LOADED[full]


def response_of(value):
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, dict):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False))
    return ToolResponse(text=value if isinstance(value, str) else str(value))


def normalize_function_tool_return(ret):
    """(ToolResponse, reward, metrics) of what a function returned: a text, a dict (its JSON), a ToolResponse, anything else as
    str(); or a tuple of one of these, the reward and the metrics, of which the last may be missing or None."""
    if not isinstance(ret, tuple):
        return response_of(ret), 0.0, {}
    if not 1 <= len(ret) <= 3:
        raise TypeError(f"@function_tool return tuple must have length 1, 2, or 3 (got length {len(ret)}: {ret!r}). Use "
                        "(response,), (response, reward), or (response, reward, metrics).")
    _, reward, metrics = ret + (None,) * (3 - len(ret))
    return response_of(ret[0]), 0.0 if reward is None else float(reward), {} if metrics is None else dict(metrics)
