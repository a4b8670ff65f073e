#!/usr/bin/env bash
# Every algorithm learns a small task on the CPU: tools/bench_learn.py says how. The curves are drawn with
# matplotlib: $PYTHON's where that has it, else that of a venv made here.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} venv=build/learn-venv
if ! "$python" -c 'import matplotlib' 2>/dev/null; then
    [ -x $venv/bin/python ] || python3 -m venv $venv
    $venv/bin/python -c 'import matplotlib' 2>/dev/null || $venv/bin/python -m pip install -q --disable-pip-version-check matplotlib
    python=$venv/bin/python
fi
exec "$python" tools/bench_learn.py "$@"
