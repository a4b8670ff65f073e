"""Many requests at once in one helper: an async handler on one event loop.

Every request is a task from the moment it is read and has a deadline of its own
("timeout_s"); a task that passes it is cancelled and answered as a timeout, the others go
on.  Replies are written as tasks finish, in any order.  Time in which the process was stopped
(SIGSTOP, a paused VM) is not counted, as in src/base/clock.h.

Invariant: a request delays another's deadline only while it blocks the event loop.
"""

import asyncio
import json
import struct
import time

from verlc_helpers.protocol import HelperError, failure, frame

TICK_S = 0.05
GAP_S = 0.5  # a longer gap between two ticks was a stop


def serve_concurrently(sock, handle):
    """Until the other end closes; tasks that still run are cancelled then."""
    asyncio.run(serve(sock, handle))


async def serve(sock, handle):
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks = set()  # the loop itself holds tasks weakly
    waits = Waits()
    ticking = asyncio.ensure_future(waits.tick())

    async def serve_one(message):
        writer.write(frame(await answer(handle, message, waits)))

    while True:
        try:
            head = await reader.readexactly(4)
            message = json.loads(await reader.readexactly(struct.unpack("<I", head)[0]))
        except asyncio.IncompleteReadError:
            ticking.cancel()
            return
        task = asyncio.ensure_future(serve_one(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)  # it starts, and what is finished is answered, before the next is read


class Waits:
    """The seconds left of each wait under way."""

    def __init__(self):
        self.left = {}

    async def tick(self):
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed, before = min(now - before, GAP_S), now
            for over in list(self.left):
                self.left[over] -= passed
                if self.left[over] <= 0 and not over.done():
                    over.set_result(None)

    async def wait(self, task, timeout):
        """Until the task is done, or has had timeout seconds; None: no limit."""
        if timeout is None:
            return await asyncio.wait([task])
        over = asyncio.get_running_loop().create_future()
        self.left[over] = timeout + TICK_S  # it may begin just before a tick
        try:
            await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.left[over]


async def answer(handle, message, waits):
    """One reply object for one request object."""
    timeout = message.get("timeout_s")
    task = asyncio.ensure_future(handle(message.get("req")))
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # else asyncio complains of late failures
    await waits.wait(task, timeout)
    try:
        if not task.done():
            task.cancel()
            raise HelperError(f"no answer within {timeout:g} s; the call was cancelled", "TIMEOUT")
        if task.cancelled():
            raise HelperError("the call was cancelled from inside", "HELPER")
        return {"id": message["id"], "ok": task.result()}
    except Exception as error:
        return failure(message, error)
