#!/usr/bin/env bash
# The real packages from PyPI in the directory $1, apart from the helpers' .venv, for
# `make oracle`, `make fixtures` and `make bench`: tools/oracle_requirements.txt, and
# verl's files and bitsandbytes' without their dependencies; or those of the list $2 alone.  Does nothing while the list
# has not changed.
# PyPI's torch brings CUDA's libraries, some GB; ORACLE_TORCH_INDEX=URL names an index
# of CPU builds to take torch from.
set -eu
cd "$(dirname "$0")/.."
venv=$1 list=${2:-tools/oracle_requirements.txt}
bare=
if [ $# = 1 ]; then bare="verl==0.9.1 bitsandbytes==0.50.2"; fi
stamp=$venv/verlc-requirements.txt
if cat "$list" - <<<"$bare" | cmp -s - "$stamp"; then exit 0; fi
[ -n "${ORACLE_TORCH_INDEX:-}" ] || echo "making $venv from $list; some GB, minutes" >&2
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
if [ -n "${ORACLE_TORCH_INDEX:-}" ] && torch=$(grep '^torch==' "$list"); then
    pip install -q --index-url "$ORACLE_TORCH_INDEX" "$torch"
fi
pip install -q -r "$list"
if [ -n "$bare" ]; then pip install -q --no-deps $bare; fi
cat "$list" - <<<"$bare" >"$stamp" # last: an interrupted run starts again
