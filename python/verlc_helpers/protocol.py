"""The Python end of src/helper: JSON requests in, JSON replies out.

Started by verlc (VERLC_HELPER_FD names the socket) a frame is a 4-byte
little-endian length and that many bytes of UTF-8 JSON.  Started by hand the
same requests and replies go line by line over standard input and output.
Requests are served one by one, in their order; or, where init returns an async handler,
concurrently (event_loop.py).

SIGTERM, SIGINT and SIGHUP do nothing here: whoever sends them to all processes of a run means the run, which still needs its
helpers to end well. A helper ends with its socket; SIGKILL ends it at any time.

Invariant: every request gets exactly one reply with its id, an error included;
nothing but frames that src/helper can read is ever written to the socket.  This file imports the
standard library only, so that a missing package is reported by its user.
"""

import gc
import json
import os
import re
import signal
import socket
import struct
import sys

LONGEST_LINE = 2000
MAX_INT = 2**63  # what a reader of int64 takes is below, and from -MAX_INT on
LONG = 19  # digits of an integer that may be over 64 bits
DIGITS, TWO_DIGITS = re.compile(b"[0-9]{%d}" % LONG), re.compile(b"[0-9]{2}")
max_reply_bytes = 256 << 20  # what verlc takes; its init says how much
if "VERLC_HELPER_FD" in os.environ:
    gc.disable()  # until init has been done: what modules make as they are imported is no garbage


class HelperError(Exception):
    """An answer of the form "this request cannot be served": the code is the
    name of an ERR_* of src/base/err.h, the text is one line for the user."""

    def __init__(self, message, code="FORMAT"):
        super().__init__(message)
        self.code = code


def install_line(package):
    """What gives this interpreter a package. A distribution's own refuses pip: there the environment next to the program is the
    way, as src/helper/helper.c says of a helper that does not start."""
    if not sys.executable.startswith("/usr/bin/"):
        return f"install it with '{sys.executable} -m pip install -U {package}'"
    top = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # python/ lies in verlc's directory
    return (f"run 'apt-get install python3-venv && cd {top} && python3 -m venv .venv && .venv/bin/pip install -r "
            f"python/requirements.txt {package}' (or set VERLC_PYTHON)")


def text_of(value, how=str):
    """how(value), a text that any object has and UTF-8 can carry."""
    try:
        text = how(value)
    except Exception:  # of the object's own __str__; an int of over 4300 digits; a list too deep
        text = f"<{type(value).__name__}>"
    return text.encode("utf-8", "replace").decode("utf-8")


def one_line(value):
    return " ".join(text_of(value).replace("\0", "\\0").split())[:LONGEST_LINE]


def describe(error):
    """(code, message) of an exception raised by a handler."""
    if isinstance(error, HelperError):
        return error.code, one_line(error)
    if isinstance(error, MemoryError):
        return "NOMEM", "out of memory (the helper's limit or the machine's)"
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)):
        return "INPUT", one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, OSError):
        return "IO", one_line(error)
    return "FORMAT", f"{type(error).__name__}: {one_line(error)}"


def failure(message, error):
    code, text = describe(error)
    return {"id": message.get("id", 0), "error": text, "code": code}


def answer(handle, message):
    """One reply object for one request object."""
    try:
        return {"id": message.get("id", 0), "ok": handle(message.get("req"))}
    except Exception as error:  # a handler's failure is an answer, not a death
        return failure(message, error)


def check_int(digits):
    if not -MAX_INT <= int(digits) < MAX_INT:
        raise ValueError("an integer over 64 bits")


def check_keys(pairs):
    if any("\0" in key for key, _ in pairs):
        raise ValueError("a NUL in a key")


def is_suspect(data):
    """Whether the JSON has an integer that may be over 64 bits, or a NUL that may be in a key. Every ninth byte is looked at first,
    since replies may have 256 MiB: two of those are in any LONG bytes."""
    return b"\\u0000" in data or (TWO_DIGITS.search(data[::LONG // 2]) and DIGITS.search(data)) is not None


def encode(reply):
    """Bytes of a reply's JSON; one that JSON, UTF-8 or the reader cannot carry becomes an error."""
    try:
        data = json.dumps(reply, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
        if is_suspect(data):
            json.loads(data, parse_int=check_int, object_pairs_hook=check_keys)
        if len(data) > max_reply_bytes:
            raise ValueError(f"it has {len(data)} bytes (limit {max_reply_bytes})")
        return data
    except (TypeError, ValueError, RecursionError) as error:
        text = one_line(f"the result is not JSON that verlc reads: {text_of(error)}")
        return json.dumps({"id": reply["id"], "error": text, "code": "FORMAT"}).encode("utf-8")


def frame(reply):
    data = encode(reply)
    return struct.pack("<I", len(data)) + data


def read_exactly(sock, n):
    """n bytes, or None at the end of the stream."""
    parts = []
    while n > 0:
        part = sock.recv(min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def read_message(sock):
    """The next frame's object, or None at the end of the stream."""
    head = read_exactly(sock, 4)
    body = head and read_exactly(sock, struct.unpack("<I", head)[0])
    return body and json.loads(body)


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def nothing(*_):
    """What a signal does to a helper. The programs that it starts have the defaults back, which SIG_IGN would not give them."""


def on_stops(what):
    for sig in STOPS:
        signal.signal(sig, what)


def serve_socket(sock, handle, init):
    global max_reply_bytes
    message = read_message(sock)
    if message is None:
        return
    max_reply_bytes = message["max_reply_bytes"]
    try:
        concurrent = init(message["init"]) if init is not None else None
    except Exception as error:
        sock.sendall(frame(failure(message, error)))
        return
    gc.enable()
    on_stops(nothing)  # init may have imported a library that has handlers of its own, as Ray has
    sock.sendall(frame({"id": 0, "ok": True}))
    if concurrent is not None:
        from verlc_helpers.event_loop import serve_concurrently  # asyncio takes a while to load
        return serve_concurrently(sock, concurrent)
    while (message := read_message(sock)) is not None:
        sock.sendall(frame(answer(handle, message)))


def serve_lines(handle, init):
    if init is not None and len(sys.argv) > 1:
        init(json.loads(sys.argv[1]))
    for line in sys.stdin:
        if line.strip():
            sys.stdout.write(encode(answer(handle, {"req": json.loads(line)})).decode("utf-8") + "\n")
            sys.stdout.flush()


def serve(handle, init=None, block_stops=False, own_code=False):
    """Answers requests with handle(request) until the other end closes.
    init(value) is called once at every start, before the first request.  An async handler that it
    returns takes the place of handle, which then serves requests made by hand only.
    block_stops: SIGTERM, SIGINT and SIGHUP do not reach the programs that it starts either.
    own_code: no code of the user runs here, and nothing is kept that an orderly end would write."""
    fd = os.environ.pop("VERLC_HELPER_FD", None)
    if fd is None:
        return serve_lines(handle, init)
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    on_stops(nothing)
    if block_stops:  # a mask is inherited by every program, and holds until that has a handler of its own, as W&B's has
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    else:
        os.register_at_fork(after_in_child=lambda: on_stops(signal.SIG_DFL))
    try:
        serve_socket(sock, handle, init)
    except (BrokenPipeError, ConnectionResetError):
        pass  # verlc has exited: nobody reads it
    if own_code:
        sys.stderr.flush()
        os._exit(0)  # to free object by object is a tenth of what a short run's helper takes
