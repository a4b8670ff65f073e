"""A program that is installed into an environment, as the wheel does it: bin/verlc finds the helpers in share/verlc/python
and the environment's own interpreter, without a variable and without activation, whatever lies in the directories above.
Also a tarball's layout: python/ and .venv beside the program."""

import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import verlc_test  # noqa: E402
from verlc_test import Scratch, Tests, run  # noqa: E402

HELPERS = pathlib.Path(os.environ["SOURCE_DIR"]) / "python"
CHAT = '{"messages": [{"role": "user", "content": "What is 1 + 2?"}]}\n'


def interpreter(path):
    """A Python at this path that leaves a file beside itself when it runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n: > "{path}.ran"\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return pathlib.Path(f"{path}.ran")


def install(program, helpers):
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(shutil.which(verlc_test.VERLC), program)
    shutil.copytree(HELPERS, helpers, ignore=shutil.ignore_patterns("__pycache__"))


def main():
    test = Tests()
    for name in ("VERLC_PYTHON", "VERLC_HELPERS_DIR", "VIRTUAL_ENV"):
        verlc_test.ENV.pop(name, None)
    with Scratch(1, 1) as s:
        wanted = run("tokenize", "--model", s.dir / "model", "--chat", input=CHAT).stdout
        decoy = s.dir / "python/verlc_helpers/protocol.py"  # a checkout's, above both
        decoy.parent.mkdir(parents=True)
        decoy.write_text("raise SystemExit('the helpers of another directory')\n")
        above = interpreter(s.dir / ".venv/bin/python")
        for kind, program, helpers, python in (("wheel", "env/bin/verlc", "env/share/verlc/python", "env/bin/python3"),
                                               ("tarball", "verlc-1/verlc", "verlc-1/python", "verlc-1/.venv/bin/python")):
            install(s.dir / program, s.dir / helpers)
            ran = interpreter(s.dir / python)
            verlc_test.VERLC = str(s.dir / program)
            p = run("tokenize", "--model", s.dir / "model", "--chat", input=CHAT, check=False, cwd="/")
            test(f"{kind}: its own helpers", p.returncode == 0 and p.stdout == wanted, p.stderr[-300:])
            test(f"{kind}: its own interpreter", ran.exists() and not above.exists())
    test.end()


main()
