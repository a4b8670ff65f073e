#!/usr/bin/env bash
# The figures of one GPU beside their bars and, where python3 has torch with CUDA or vLLM, theirs from the same run:
# tools/bench_gpu_peers.py has the rows and the options.  SHARED_DATA=DIR holds GSM8K and the real tokenizers.
#   scripts/bench_gpu.sh [ROW...] [--long] [--no-peers]
#   scripts/bench_gpu.sh recipe2        the second recipe alone: under nine minutes, its phases step by step
set -eu
cd "$(dirname "$0")/.."
export VERLC=${VERLC:-$PWD/build/release/verlc}
"$VERLC" bench --help >/dev/null || { echo "no $VERLC: make CUDA=1 builds it" >&2; exit 1; }
exec "${PYTHON:-python3}" tools/bench_gpu_peers.py "$@"
