"""The connections of an external engine: one HTTP request each, many at once; and the command that brings new weights.

What is asked and what an answer means is src/external_engine's. A server that cannot be reached is a value, not a failure of the
helper. VERLC_ENGINE_API_KEY in the environment goes along as a bearer token.
Invariant: an answer's body reaches verlc as the bytes that came, where they are UTF-8.
"""

import asyncio
import json
import os
import signal

from verlc_helpers.http_client import HttpError, request
from verlc_helpers.protocol import HelperError, one_line, serve

SAID = 2000


def headers():
    key = os.environ.get("VERLC_ENGINE_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def call(req):
    """{"status", "body"}, or {"error"}: nobody answers."""
    body = b"" if req.get("body") is None else json.dumps(req["body"]).encode()
    try:
        status, got = await request(req["method"], req["url"], body, headers())
    except HttpError as error:
        return {"error": one_line(str(error).removeprefix(req["url"] + ": "))}
    return {"status": status, "body": got.decode("utf-8", "replace")}


async def command(req):
    """Its exit status, as of a server's answer: 200 for 0; it ends, with what it started, where the call is cancelled."""
    process = await asyncio.create_subprocess_shell(req["command"], env={**os.environ, **req["env"]}, start_new_session=True,
                                                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                                                    stderr=asyncio.subprocess.STDOUT)
    try:
        said, _ = await process.communicate()
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if process.returncode == 0:
        return {"status": 200, "body": ""}
    return {"status": 500, "body": f"the command ended with {process.returncode}: {said[-SAID:].decode('utf-8', 'replace')}"}


async def handle_async(req):
    if not isinstance(req, dict) or req.get("op") not in ("call", "command"):
        raise HelperError("op: call or command is wanted", "INVAL")
    return await (call(req) if req["op"] == "call" else command(req))


def init(value):
    return handle_async


def handle(req):
    return asyncio.run(handle_async(req))


if __name__ == "__main__":
    serve(handle, init)
