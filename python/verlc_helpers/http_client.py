"""GET, and POST of JSON, from an event loop, by the standard library: thousands may wait at once.

Invariant: a reply is of the request that its connection was opened for."""

import asyncio
import json
import urllib.parse

LONGEST = 256 << 20
BUSY = (429, 503)
PAUSE_S, LONGEST_PAUSE_S = 0.2, 10


class HttpError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(f"HTTP {status}: {text}" if status else text)
        self.status = status


async def read_head(reader):
    """(status, headers in lower case)"""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict((k.strip().lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines[1:] if line))
    return int(lines[0].split(" ", 2)[1]), headers


async def read_chunks(reader):
    parts, n = [], 0
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        n += size
        if n > LONGEST:
            raise HttpError(0, f"an answer of over {LONGEST} bytes")
        parts.append((await reader.readexactly(size + 2))[:-2])
    return b"".join(parts)


async def read_body(reader, headers):
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await read_chunks(reader)
    if int(headers.get("content-length", 0)) > LONGEST:
        raise HttpError(0, f"an answer of over {LONGEST} bytes")
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read(LONGEST)


async def exchange(method, url, data, headers):
    at = urllib.parse.urlsplit(url)
    secure = at.scheme == "https"
    reader, writer = await asyncio.open_connection(at.hostname, at.port or (443 if secure else 80), ssl=secure or None)
    try:
        target = (at.path or "/") + (f"?{at.query}" if at.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {at.netloc}", "Content-Type: application/json", "Connection: close",
                 f"Content-Length: {len(data)}", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data)
        await writer.drain()
        status, got = await read_head(reader)
        return status, got, await read_body(reader, got)
    finally:
        writer.close()


async def request(method, url, data=b"", headers=None):
    """(status, body); waits where the server is busy. HttpError: there is no answer; its own deadline is the caller's."""
    pause = PAUSE_S
    while True:
        try:
            status, got, body = await exchange(method, url, data, headers or {})
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            closed = isinstance(error, asyncio.IncompleteReadError)
            why = "the connection was closed before the answer" if closed else error or type(error).__name__
            raise HttpError(0, f"{url}: {why}") from error
        if status not in BUSY:
            return status, body
        after = got.get("retry-after", "")
        await asyncio.sleep(min(float(after), LONGEST_PAUSE_S) if after.isdigit() else pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def post_json(url, payload, headers=None):
    """The answer's JSON. HttpError."""
    status, body = await request("POST", url, json.dumps(payload).encode(), headers)
    if status != 200:
        raise HttpError(status, body[:500].decode("utf-8", "replace"))
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(0, f"{url} answers no JSON: {error}") from error
