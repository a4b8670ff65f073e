"""Tools that fail, for tests/unit/test_agent_tools.c and tests/fault/tools_test.py: the file of function_tool_path."""

import asyncio
import os
import sys
import time

from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def add(a: int, b: int):
    """Adds two numbers.

    Args:
        a: One
        b: Another
    """
    return str(a + b), 0.5


@function_tool
def fail():
    """Raises."""
    raise ValueError("no such thing")


@function_tool
def hang(c: bool = False):
    """Never ends.

    Args:
        c: In a call of C, which nothing can interrupt
    """
    if c:
        time.sleep(3600)
    while True:
        pass


@function_tool
async def hang_async():
    """Never ends, on the event loop's side."""
    await asyncio.sleep(3600)


@function_tool
async def block():
    """Holds the event loop for ever."""
    time.sleep(3600)


@function_tool
def leave():
    """Ends the process."""
    os._exit(3)


@function_tool
def leave_politely():
    """sys.exit."""
    sys.exit(4)


@function_tool
def flood():
    """Prints without end, nearly."""
    for _ in range(20000):
        print("x" * 100)
    return "dry"


@function_tool
def long(n: int):
    """A long text.

    Args:
        n: Characters
    """
    return "ä" + "x" * (n - 2) + "z"


@function_tool
def odd(kind: str):
    """A wrong value.

    Args:
        kind: Which
    """
    return {"none": None, "list": [1, ToolResponse(text="a")], "four": (1, 2, 3, 4), "empty": (), "reward": ("a", "b"),
            "nan": ("a", float("nan")), "set": {"a": {1}}, "surrogate": "a\ud800b", "nul": "a\0b", "dict": {"ü": 1},
            "image": ToolResponse(text="a", image=["i"]), "text": ToolResponse.model_construct(text=5)}[kind]


@function_tool
async def nap(s: float):
    """Waits.

    Args:
        s: Seconds
    """
    await asyncio.sleep(s)
    return "rested"


@function_tool
def where():
    """The process."""
    return str(os.getpid())
