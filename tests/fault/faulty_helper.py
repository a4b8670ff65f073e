"""A helper that fails on request, for tests/fault/test_helper_faults.c."""

import asyncio
import os
import signal
import subprocess
import sys
import time

if os.environ.get("FAULTY_IMPORT"):
    __import__(os.environ["FAULTY_IMPORT"])
if os.environ.get("FAULTY_START") == "hang":
    time.sleep(600)
if os.environ.get("FAULTY_START") == "slow":
    time.sleep(1)
if os.environ.get("FAULTY_START") == "exit":
    sys.exit("no good start")

from verlc_helpers.protocol import HelperError, serve

state = {"init": None, "n": 0}


class Unprintable(Exception):
    def __str__(self):
        raise self


def init(value):
    if value == "refuse":
        raise HelperError("this init is refused", "INVAL")
    state["init"] = value
    return handle_async if value == "async" else None


def handle(request):
    state["n"] += 1
    kind = request["do"]
    if kind == "echo":
        return {"value": request.get("value"), "init": state["init"], "n": state["n"], "pid": os.getpid()}
    if kind == "exit":
        print("last words", file=sys.stderr)
        os._exit(7)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hang":
        print("about to hang")
        time.sleep(600)
    if kind == "sleep":
        time.sleep(request["s"])
        return request["s"]
    if kind == "spin":
        while True:
            pass
    if kind == "garbage":
        os.write(3, b"\xff" * 64)
        time.sleep(600)
    if kind == "text":
        os.write(3, b"\x05\x00\x00\x00hello")
        time.sleep(600)
    if kind == "wrong_id":
        body = b'{"id":99,"ok":true}'
        os.write(3, len(body).to_bytes(4, "little") + body)
        time.sleep(600)
    if kind == "print":
        for _ in range(request["lines"]):
            print("x" * 79)
        return "printed"
    if kind == "big":
        return "y" * request["bytes"]
    if kind == "memory":
        return len(bytearray(request["bytes"]))
    if kind == "refuse":
        raise HelperError("row 3 is bad", "INPUT")
    if kind == "raise":
        return 1 // 0
    if kind == "nan":
        return float("nan")
    if kind == "surrogate":
        return "\ud800"
    if kind == "integer":
        return ["y" * request["before"], 2**63]
    if kind == "key":
        return {"a\0b": 1}
    if kind == "deep":
        deep = []
        for _ in range(100_000):
            deep = [deep]
        return deep
    if kind == "unprintable":
        raise Unprintable
    if kind == "child":  # a grandchild that keeps the socket open, then the helper dies
        child = subprocess.Popen(["sleep", "600"], pass_fds=[3])
        if request.get("die"):
            os._exit(3)
        return child.pid
    if kind == "children":  # how a program and a fork that it starts end by SIGTERM
        program = subprocess.Popen(["sleep", "600"])
        fork = os.fork()
        if fork == 0:
            time.sleep(600)
        time.sleep(0.1)
        program.terminate()
        os.kill(fork, signal.SIGTERM)
        return [program.wait(10), os.WTERMSIG(os.waitpid(fork, 0)[1])]
    raise HelperError("unknown request")


async def block():
    time.sleep(600)


async def handle_async(request):
    if request["do"] == "wait":
        await asyncio.sleep(request["s"])
        return {"pid": os.getpid()}
    if request["do"] == "block":  # in a task that the call has started
        await asyncio.gather(asyncio.sleep(0), block())
    if request["do"] == "cancel":
        asyncio.current_task().cancel()
        await asyncio.sleep(600)
    if request["do"] == "stubborn":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    return handle(request)


if __name__ == "__main__":
    serve(handle, init)
