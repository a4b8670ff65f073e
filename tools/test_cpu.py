"""CPU seconds (user and system) of tests and of all processes that they wait for, one test at a time: what a change of a test saves
is seen on a busy machine too, where wall time is not. It changes no file.

  python3 tools/test_cpu.py [--build build/release] REGEX...     (as ctest -R; build/asan, build/tsan)"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time


def tests_of(build, wanted):
    """Name, command, environment and directory of each."""
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    for t in json.loads(shown.stdout)["tests"]:
        if not any(re.search(w, t["name"]) for w in wanted):
            continue
        p = {x["name"]: x["value"] for x in t["properties"]}
        env = dict(e.split("=", 1) for e in p.get("ENVIRONMENT", []))
        yield t["name"], t.get("command"), env, p.get("WORKING_DIRECTORY", build)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--build", default="build/release")
    a.add_argument("regex", nargs="+")
    a = a.parse_args()
    failed = 0
    print(f"{'cpu':>8} {'user':>8} {'system':>8} {'wall':>8}  test")
    for name, command, env, cwd in tests_of(a.build, a.regex):
        if not command:
            print(f"{'':35}  {name}: not built")
            continue
        with tempfile.TemporaryFile() as log:
            began = time.time()
            p = subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            _, status, used = os.wait4(p.pid, 0)
            wall = time.time() - began
            p.returncode = os.waitstatus_to_exitcode(status)
            if bad := p.returncode not in (0, 77):
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-4000:])
        failed += bad
        print(f"{used.ru_utime + used.ru_stime:8.2f} {used.ru_utime:8.2f} {used.ru_stime:8.2f} {wall:8.2f}  {name}"
              f"{'  FAILED' if bad else ''}", flush=True)
    sys.exit(1 if failed else 0)


main()
