"""A function that may block, in a thread of its own that nobody waits for longer than its call's deadline.

A thread that is given up gets an exception at its next line of Python, so an endless loop ends; one that waits in C stays until
that returns, and costs memory alone.  Invariant: a call never waits for another's thread."""

import asyncio
import contextvars
import ctypes
import os
import sys
import threading

MANY = 256  # threads given up and still there: the process is replaced
EXIT_S = 0.5  # for the answers under way
given_up = set()


class GivenUp(BaseException):
    """In a thread whose call has had its time."""


def give_up(thread):
    given_up.difference_update([t for t in given_up if not t.is_alive()])
    if thread.is_alive():
        given_up.add(thread)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(GivenUp))
    if len(given_up) > MANY:
        print(f"{len(given_up)} calls of tools still hang after their deadline, the last of {thread.name}: a new process goes on",
              file=sys.stderr, flush=True)
        asyncio.get_running_loop().call_later(EXIT_S, os._exit, 1)


async def in_thread(function, *args, **kwargs):
    """What the function returns or raises."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done = loop.create_future()

    def set_once(value, error):
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(value)

    def run():
        value, problem = None, None
        try:
            value = context.run(function, *args, **kwargs)
        except GivenUp:
            return
        except StopIteration as error:  # a future does not take it
            problem = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            problem = error
        try:
            loop.call_soon_threadsafe(set_once, value, problem)
        except RuntimeError:  # the loop has ended
            pass

    thread = threading.Thread(target=run, name=getattr(function, "__name__", "tool"), daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        give_up(thread)
        raise
