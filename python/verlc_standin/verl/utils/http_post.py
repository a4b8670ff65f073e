"""One JSON request over HTTP with a limit in time and size, by the standard library: for the tools that ask a service."""

import http.client
import json
import time
import urllib.error
import urllib.request

LONGEST_REPLY = 64 << 20
HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


class ServiceError(Exception):
    """No answer that can be used. status: HTTP's, or 0; again: another try may help."""

    def __init__(self, text, status=0, again=False):
        super().__init__(text)
        self.status, self.again = status, again


def body(reply, deadline):
    """All of it, which may come in drops and without end."""
    parts, n = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        n += len(part)
        if n > LONGEST_REPLY:
            raise ServiceError(f"its answer is over {LONGEST_REPLY} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("Read timed out.")
    return b"".join(parts)


def post_json(url, payload, timeout_s):
    """The answer's JSON; ServiceError."""
    try:
        message = urllib.request.Request(url, json.dumps(payload).encode("utf-8"), HEADERS)
        with urllib.request.urlopen(message, timeout=timeout_s) as reply:
            data = body(reply, time.monotonic() + timeout_s)
    except urllib.error.HTTPError as error:
        kind = "Client Error" if error.code < 500 else "Server Error"
        raise ServiceError(f"{error.code} {kind}: {error.reason} for url: {url}", status=error.code) from error
    except urllib.error.URLError as error:
        raise ServiceError(f"{url}: {error.reason}", again=True) from error
    except (OSError, http.client.HTTPException) as error:
        raise ServiceError(f"{url}: {error or type(error).__name__}", again=True) from error
    except ValueError as error:  # no URL
        raise ServiceError(str(error)) from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServiceError(str(error)) from error
