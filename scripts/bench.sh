#!/usr/bin/env bash
# Every figure with a peer: see tools/bench_peers.py, and `verlc bench --help` for ours alone.
set -eu
cd "$(dirname "$0")/.."
export VERLC=$PWD/build/release/verlc
mkdir -p build/bench
model=build/bench/qwen2.5-0.5b
[ -f $model/config.json ] || "$VERLC" model init --arch qwen2.5-0.5b --out $model --seed 1
"$VERLC" bench gemm
.venv-oracle/bin/python tools/bench_peers.py $model "$@"
