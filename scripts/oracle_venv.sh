#!/usr/bin/env bash
# The real packages from PyPI in the directory $1, apart from the helpers' .venv, for
# `make oracle`, `make fixtures` and `make bench`: tools/oracle_requirements.txt, and
# verl's files, megatron-core's, bitsandbytes' and trl's (chat templates) without their dependencies, and verl 0.7.1's, which
# has the tools that were removed, in the directory verl-0.7.1; or those of the list $2 alone.  Does nothing while the list
# has not changed.
# PyPI's torch brings CUDA's libraries, some GB; ORACLE_TORCH_INDEX=URL names an index
# of CPU builds to take torch from.
set -eu
cd "$(dirname "$0")/.."
venv=$1 list=${2:-tools/oracle_requirements.txt}
bare=
old=
if [ $# = 1 ]; then bare="verl==0.9.1 megatron-core==0.16.1 bitsandbytes==0.50.2 trl==1.16.0" old=verl==0.7.1; fi
stamp=$venv/verlc-requirements.txt
if cat "$list" - <<<"${bare:+$bare $old}" | cmp -s - "$stamp"; then exit 0; fi
[ -n "${ORACLE_TORCH_INDEX:-}" ] || echo "making $venv from $list; some GB, minutes" >&2
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
if [ -n "${ORACLE_TORCH_INDEX:-}" ] && torch=$(grep '^torch==' "$list"); then
    pip install -q --index-url "$ORACLE_TORCH_INDEX" "$torch"
fi
pip install -q -r "$list"
if [ -n "$bare" ]; then pip install -q --no-deps $bare; fi
if [ -n "$old" ]; then pip install -q --no-deps --target "$venv/verl-0.7.1" $old; fi
cat "$list" - <<<"${bare:+$bare $old}" >"$stamp" # last: an interrupted run starts again
