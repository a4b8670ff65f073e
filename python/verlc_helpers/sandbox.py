"""Runs a program that is not trusted in verlc's sandbox: for a reward function that scores code.

    from verlc_helpers.sandbox import run_python
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        r = run_python(solution_str, stdin=ground_truth["input"], wall_s=5)
        return float(r["end"] == "exited" and r["status"] == 0 and r["stdout"] == ground_truth["output"])

Every call gives {"end", "status", "stdout", "stderr", "wall_s", "peak_bytes"}, as `verlc sandbox --help` explains them.
The ..._async forms are for an async def, which has many calls in flight.  docs/reliability.md says what the sandbox protects from.

Invariant: without a sandbox nothing runs; SandboxError says why and what to do.
"""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys

LATEST_S = 30  # beyond wall_s: for the start, and for the kernel to end processes
LONG = 1 << 20
WITHOUT_LIMIT = []  # starts a child without this process's own limit of memory
OPTIONS = {"wall_s": "--wall", "cpu_s": "--cpu", "memory_mb": "--memory-mb", "disk_mb": "--disk-mb", "output_kb": "--output-kb",
           "processes": "--processes", "files_open": "--files"}


def limit_memory(n):
    """Of this process to n bytes, and not of the programs that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (n if hard == resource.RLIM_INFINITY else min(n, hard), hard))
    WITHOUT_LIMIT[:] = ["prlimit", f"--data={'unlimited' if hard == resource.RLIM_INFINITY else hard}"]


class SandboxError(RuntimeError):
    """The sandbox could not run the program: nothing is known about that."""


def verlc():
    """The program: the one that started this helper, else the one in PATH."""
    path = os.environ.get("VERLC") or shutil.which("verlc")
    if not path:
        raise SandboxError("the program verlc is not in PATH; put it there, or set VERLC to its path")
    return path


def command(limits):
    unknown = set(limits) - set(OPTIONS)
    if unknown:
        raise TypeError(f"no limit {sorted(unknown)[0]!r}; there are {', '.join(OPTIONS)}")
    return WITHOUT_LIMIT + [verlc(), "sandbox", "--request"] + [f"{OPTIONS[name]}={value}" for name, value in limits.items()]


def encoded(argv, stdin, files, read):
    return json.dumps({"argv": list(argv), "stdin": stdin, "files": files or {}, "read": list(read)}).encode()


def decoded(status, out, err):
    if status != 0:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(lines[-1] if lines else f"verlc sandbox ended with {status}")
    return json.loads(out)


def allowed_s(limits):
    return limits.get("wall_s", 10) + LATEST_S


def run(argv, stdin="", files=None, read=(), **limits):
    """argv: the program and its arguments; files: {name: text} in its directory; read: directories that it may read."""
    try:
        done = subprocess.run(command(limits), input=encoded(argv, stdin, files, read), capture_output=True, check=False,
                              timeout=allowed_s(limits))
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"verlc sandbox has not ended within {allowed_s(limits):g} s") from error
    return decoded(done.returncode, done.stdout, done.stderr)


async def run_async(argv, stdin="", files=None, read=(), **limits):
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command(limits), stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(child.communicate(encoded(argv, stdin, files, read)), allowed_s(limits))
    except asyncio.TimeoutError as error:
        raise SandboxError(f"verlc sandbox has not ended within {allowed_s(limits):g} s") from error
    finally:
        if child.returncode is None:  # cancelled, or too late: what it runs ends with it
            child.kill()
            await child.wait()
    if len(out) < LONG:
        return decoded(child.returncode, out, err)
    return await asyncio.get_running_loop().run_in_executor(None, decoded, child.returncode, out, err)  # others go on meanwhile


def python_path():
    """This interpreter, by a path without "..": what that would lead through is not in the sandbox."""
    where, name = os.path.split(sys.executable)
    return os.path.join(os.path.realpath(where), name)


def python_dirs():
    """What this interpreter needs in addition to /usr."""
    dirs = [os.path.dirname(os.path.dirname(python_path())), sys.prefix, sys.base_prefix,
            os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))]
    dirs = [os.path.realpath(d) for d in dirs]
    return [d for d in dict.fromkeys(dirs) if not (d + "/").startswith("/usr/") and d != "/"]


def python_request(code, stdin, files):
    return {"argv": [python_path(), "-I", "main.py"], "stdin": stdin, "files": {**(files or {}), "main.py": code},
            "read": python_dirs()}


def run_python(code, stdin="", files=None, **limits):
    """A Python program, with this interpreter and its packages."""
    return run(**python_request(code, stdin, files), **limits)


async def run_python_async(code, stdin="", files=None, **limits):
    return await run_async(**python_request(code, stdin, files), **limits)
