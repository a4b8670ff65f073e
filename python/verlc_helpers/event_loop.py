"""Many requests at once in one helper: an async handler on one event loop.

Every request is a task from the moment it is read and has a deadline of its own
("timeout_s"); a task that passes it is cancelled and answered as a timeout, the others go
on.  Replies are written as tasks finish, in any order.  Time in which the process was stopped
(SIGSTOP, a paused VM) is not counted, as in src/base/clock.h.

A call that blocks the event loop (time.sleep, a request with a library that is not async) holds up all the others.  One
that does so for its whole timeout is answered as a timeout by a thread, which then ends the process: the answer says so ("last"),
and verlc sends the others again, to a new one.

A call may fork. The child has nothing of the socket, and ends where it would come back to the loop: requests are the parent's.

Invariant: a request delays another's deadline only while it blocks the event loop.
"""

import asyncio
import contextvars
import json
import os
import struct
import sys
import threading
import time
import weakref

from verlc_helpers.protocol import HelperError, failure, frame

TICK_S = 0.05
GAP_S = 0.5  # a longer gap between two ticks was a stop
MESSAGE = contextvars.ContextVar("message")  # the request that the code works for
OWNERS = weakref.WeakKeyDictionary()  # of a task: that request


def serve_concurrently(sock, handle):
    """Until the other end closes; tasks that still run are cancelled then."""
    asyncio.run(serve(sock, handle))


def make_task(loop, coro, **options):
    """Every task of a call, and those that they start, have its request."""
    task = asyncio.Task(coro, loop=loop, **options)
    if (message := MESSAGE.get(None)) is not None:
        OWNERS[task] = message
    return task


def leave_to_parent(loop, fd):
    """In a child after a fork; the thread of the loop is there only if it was that which forked."""
    os.close(fd)
    loop.call_soon(os._exit, 0)


async def serve(sock, handle):
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    loop.set_task_factory(make_task)
    os.register_at_fork(after_in_child=lambda: leave_to_parent(loop, fd))
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks = set()  # the loop itself holds tasks weakly
    waits = Waits()
    ticking = asyncio.ensure_future(waits.tick())
    writing = threading.Lock()

    async def serve_one(message):
        MESSAGE.set(message)
        data = frame(await answer(handle, message, waits))
        with writing:
            writer.write(data)

    watch = Watch(loop, waits, sock, writer.transport, writing)
    threading.Thread(target=watch.run, daemon=True).start()

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
        self.ticks = 0

    async def tick(self):
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            self.ticks += 1
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


class Watch:
    """Ends the process where a call blocks the loop for as long as its timeout."""

    def __init__(self, loop, waits, sock, transport, writing):
        self.loop, self.waits, self.sock, self.transport, self.writing = loop, waits, sock, transport, writing

    def run(self):
        ticks, blocked, before = -1, 0.0, time.monotonic()
        while True:
            time.sleep(TICK_S * 4)
            now = time.monotonic()
            passed, before = min(now - before, GAP_S), now
            blocked = blocked + passed if ticks == self.waits.ticks else 0.0
            ticks = self.waits.ticks
            if blocked > GAP_S:
                self.check(blocked)

    def check(self, blocked):
        task = asyncio.current_task(self.loop)
        message = OWNERS.get(task) if task else None
        if not message or not message.get("timeout_s") or blocked < message["timeout_s"]:
            return
        with self.writing:  # the loop may have come back meanwhile
            if asyncio.current_task(self.loop) is task and self.transport.get_write_buffer_size() == 0:
                error = HelperError(f"it blocked the event loop for {blocked:.3g} s: use asyncio.sleep, an async client", "TIMEOUT")
                self.sock.setblocking(True)
                self.sock.sendall(frame(failure(message, error) | {"last": True}))
                sys.stdout.flush()
                os._exit(1)


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
