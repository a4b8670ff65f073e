"""A program that is installed into an environment, as the wheel does it: bin/verlc finds the helpers in share/verlc/python
and the environment's own interpreter, without a variable and without activation, whatever lies in the directories above.
Also a tarball's layout: python/ and .venv beside the program."""

import os
import pathlib
import shutil
import subprocess
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


def packages_missing(s, test):
    """What a tarball's user is told who has not made the .venv beside the program: a line that mends it, for the package that
    was missed first, the chat template's jinja2 too."""
    bare = s.dir / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    install(s.dir / "verlc-2/verlc", s.dir / "verlc-2/python")
    verlc_test.VERLC = str(s.dir / "verlc-2/verlc")
    env = {"VERLC_PYTHON": str(bare / "bin/python")}
    for name, args, package in (("a chat template", ["tokenize", "--model", s.dir / "model", "--chat"], "jinja2"),
                                ("a hub id", ["model", "info", "no/model"], "huggingface_hub")):
        p = run(*args, input=CHAT, check=False, env=env)
        test(f"{name} without its package, in an environment: pip's line",
             p.returncode != 0 and f"{bare}/bin/python -m pip install -U {package}" in p.stderr, p.stderr)
    script = ("import sys; sys.path.insert(0, sys.argv[1]); sys.executable = '/usr/bin/python3'\n"
              "from verlc_helpers.protocol import install_line; print(install_line('jinja2'))")
    call = [sys.executable, "-c", script, s.dir / "verlc-2/python"]
    line = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    test("a distribution's Python refuses pip: the environment beside the program",
         f"cd {s.dir / 'verlc-2'} && python3 -m venv .venv && .venv/bin/pip install -r python/requirements.txt jinja2" in line,
         line)


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
        packages_missing(s, test)
    test.end()


main()
