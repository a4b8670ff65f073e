"""Many requests at once in one helper: an async handler on one event loop.

Every request is a task from the moment it is read and has a deadline of its own
("timeout_s"); a task that passes it is cancelled and answered as a timeout, the others go
on.  Replies are written as tasks finish, in any order.

Invariant: a request delays another's deadline only while it blocks the event loop.
"""

import asyncio
import json
import struct

from verlc_helpers.protocol import HelperError, failure, frame


def serve_concurrently(sock, handle):
    """Until the other end closes; tasks that still run are cancelled then."""
    asyncio.run(serve(sock, handle))


async def serve(sock, handle):
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks = set()  # the loop itself holds tasks weakly

    async def serve_one(message):
        writer.write(frame(await answer(handle, message)))

    while True:
        try:
            head = await reader.readexactly(4)
            message = json.loads(await reader.readexactly(struct.unpack("<I", head)[0]))
        except asyncio.IncompleteReadError:
            return
        task = asyncio.ensure_future(serve_one(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)  # it starts, and what is finished is answered, before the next is read


async def answer(handle, message):
    """One reply object for one request object."""
    timeout = message.get("timeout_s")
    task = asyncio.ensure_future(handle(message.get("req")))
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # else asyncio complains of late failures
    await asyncio.wait([task], timeout=timeout)
    try:
        if not task.done():
            task.cancel()
            raise HelperError(f"no answer within {timeout:g} s; the call was cancelled", "TIMEOUT")
        if task.cancelled():
            raise HelperError("the call was cancelled from inside", "HELPER")
        return {"id": message["id"], "ok": task.result()}
    except Exception as error:
        return failure(message, error)
