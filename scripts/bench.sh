#!/usr/bin/env bash
# The CPU's figures beside torch's and transformers' into build/bench/cpu.json: see tools/bench_peers.py, and
# `verlc bench --help` for ours alone.
set -eu
cd "$(dirname "$0")/.."
export VERLC=$PWD/build/release/verlc
mkdir -p build/bench
model=build/bench/qwen2.5-0.5b
[ -f $model/config.json ] || "$VERLC" model init --arch qwen2.5-0.5b --out $model --seed 1
"$VERLC" bench gemm
python3 tests/fault/reward_workers_test.py --full
# The tokenizer: time to open, and tokens/s of one thread over GSM8K; the packed tokenizer.json of $SHARED_DATA.
data=${SHARED_DATA:-$PWD/../shared/data} tok=build/bench/tokenizer
if [ -f "$data/tokenizers/qwen2_5/tokenizer.json.xz" ] && [ -f "$data/gsm8k/train.jsonl" ]; then
    mkdir -p $tok
    for f in "$data"/tokenizers/qwen2_5/*.xz; do xz -dc "$f" >"$tok/$(basename "$f" .xz)"; done
    TOKENIZER=$("$VERLC" tokenize --model $tok --bench "$data/gsm8k/train.jsonl" |
        awk '/^open/ { o = $2 } /^encode/ { e = ($0 ~ /tokens\/s/ && $8 + 0 > e) ? $8 : e } /^decode/ { d = $8 }
            END { print o, e, d }') # seconds to open, M tokens/s
    export TOKENIZER
else
    echo "tokenizer: skipped, no $data/tokenizers/qwen2_5 and $data/gsm8k"
fi
.venv-oracle/bin/python tools/bench_peers.py $model "$@"
