#!/usr/bin/env bash
# verlc beside the real packages of .venv-oracle: every tool tools/oracle_*.py.
#
#   scripts/oracle.sh [NAME...]            compare: the program's answers with the packages', and the committed
#                                          fixtures with what the packages give now (made in build/oracle).
#                                          Writes nothing into the source tree.
#   scripts/oracle.sh fixtures [NAME...]   rewrite tests/fixtures
#
# NAME: algo archs code conf continuous critic data delta_net distill eval families graders grpo lora mcp megatron model optim
# program_agent quant rate_limit ray rejection reward serve sft steps tables text tool_agent tool_parser tools track trackers
# train verl_ckpt.
# GSM8K and the real tokenizers are read from $SHARED_DATA (DIR/gsm8k/{train,test}.jsonl, DIR/tokenizers/NAME/tokenizer.json.xz);
# what needs them is skipped without.  ORACLE_BATCHES (1000): random batches of each function.  ORACLE_PYTHON: another Python;
# TRACKERS_PYTHON: another one for trackers (.venv-trackers), RAY_PYTHON: for ray (.venv-ray),
# VERIFIERS_PYTHON: for verifiers (.venv-verifiers).
# As many oracles run at a time as there are cores (ORACLE_JOBS).  One line an oracle at its end; whole output in
# build/oracle/NAME.log.  Exit status 0 when all passed.
set -u
cd "$(dirname "$0")/.."
export VERLC=$PWD/build/release/verlc SHARED_DATA=${SHARED_DATA:-$PWD/../shared/data}
# verl and datasets look at the network and at accelerators that are not needed here.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 CUDA_VISIBLE_DEVICES= TOKENIZERS_PARALLELISM=true TQDM_DISABLE=1
export HF_HUB_DISABLE_PROGRESS_BARS=1
export PYTHONDONTWRITEBYTECODE=1
py=${ORACLE_PYTHON:-.venv-oracle/bin/python} out=$PWD/build/oracle fix=tests/fixtures
mode=compare
if [ "${1:-}" = fixtures ]; then mode=fixtures; shift; fi
# the long ones first
names=${*:-families code continuous algo text megatron verl_ckpt conf steps train grpo optim model lora quant critic rejection
    delta_net reward serve sft trackers distill ray mcp tools eval graders data tables track tool_agent tool_parser archs
    program_agent}
batches=${ORACLE_BATCHES:-1000} jobs=${ORACLE_JOBS:-$(nproc)}
mkdir -p "$out"
programs="verlc test_model_golden test_ppo_grpo test_ppo_validation test_model_optim test_agent_tool_parser_verl
    test_agent_continuous_verl test_agent_tool_agent_verl"
cmake --build --preset release --target $programs >"$out/build.log" || { tail "$out/build.log"; exit 1; }

same() { $py tools/oracle_diff.py "$out/$1" "$fix/$1" "${@:2}"; } # made again = committed?
fresh() { rm -rf "${out:?}/$1" && mkdir -p "$out/$1"; }
# The figures of a test program on the files in $2 instead of the committed ones.
program() { (cd build/release && set -o pipefail && VERLC_TRAIN_FIXTURES=$2 "./$1" 2>&1 | sed "/^\\[/d; s/;/,/"); }

make_algo() { $py tools/oracle_algo.py --out "$1"; }
make_code() { $py tools/oracle_code.py --verlc "$VERLC" --out "$1"; }
make_conf() { $py tools/oracle_conf.py --binary ""; } # in place
make_continuous() { $py tools/oracle_continuous.py fixtures --out "$1/continuous"; }
make_critic() { $py tools/oracle_critic.py "$1"; }
make_data() { $py tools/oracle_data.py fixtures "$1" && $py tools/oracle_data.py sets "$1"; }
make_delta_net() { $py tools/oracle_delta_net.py "$1"; }
make_graders() { $py tools/oracle_graders.py --out "$1"; }
make_distill() { $py tools/oracle_distill.py --out "$1"; }
make_grpo() { $py tools/oracle_grpo.py "$1"; }
make_lora() { $py tools/oracle_lora.py make "$1"; } # on the base models in that directory
make_model() { $py tools/oracle_model.py make "$1" && $py tools/oracle_mtp.py "$1"; }
make_optim() { $py tools/oracle_optim.py "$1"; }
make_quant() { $py tools/oracle_quant.py "$1"; }
make_rate_limit() { $py tools/oracle_rate_limit.py "$1"; }
make_rejection() { $py tools/oracle_rejection.py "$1"; }
make_reward() { $py tools/oracle_reward.py "$1"; }
make_text() { $py tools/oracle_text.py fixtures --out "$1"; }
make_tool_agent() { $py tools/oracle_tool_agent.py fixtures --out "$1"; }
make_tool_parser() { $py tools/oracle_tool_parser.py --out "$1"; }
make_tools() { $py tools/oracle_tools.py --fixtures "$1" --batches 0; }
make_train() { $py tools/oracle_train.py "$1"; }

compare_algo() {
    fresh algo && make_algo "$out/algo" && same algo algo.jsonl && $py tools/oracle_algo.py --verlc "$VERLC" --batches "$batches"
}
compare_archs() { $py tools/oracle_archs.py "$VERLC"; }
compare_code() {
    fresh code && make_code "$out/code" && same code && $py tools/oracle_code.py --verlc "$VERLC" --compare 300
}
compare_conf() { $py tools/oracle_conf.py --check; }
compare_continuous() { # conversations of the real tokenizers with their and TRL's templates
    fresh continuous && make_continuous "$out/continuous" && $py tools/oracle_diff.py "$out/continuous" $fix/agent || return 1
    [ -d "$SHARED_DATA/tokenizers" ] || { echo "real tokenizers: skipped, no $SHARED_DATA/tokenizers"; return 0; }
    fresh continuous_many && $py tools/oracle_continuous.py many --out "$out/continuous_many" &&
        (cd build/release && set -o pipefail &&
            export VERLC_CONTINUOUS_FIXTURES="$out/continuous_many" VERLC_CONTINUOUS_ROUNDS=20 &&
            ./test_agent_continuous_verl 2>&1 | grep -vE '^(\[|warning|$)')
}
compare_critic() { fresh critic && make_critic "$out/critic" && same critic; }
compare_data() {
    fresh data && cp -r $fix/data/tok_* "$out/data/" && make_data "$out/data" && same data || return 1
    [ -d "$SHARED_DATA/gsm8k" ] || { echo "verl's GSM8K rows: skipped, no $SHARED_DATA/gsm8k"; return 0; }
    fresh gsm8k && "$VERLC" data gsm8k --local_dataset_path "$SHARED_DATA/gsm8k" --local_save_dir "$out/gsm8k" &&
        $py tools/oracle_data.py compare "$SHARED_DATA/gsm8k" "$out/gsm8k"
}
compare_distill() {
    fresh distill && make_distill "$out/distill" && $py tools/oracle_diff.py "$out/distill" $fix/algo &&
        $py tools/oracle_distill.py --verlc "$VERLC"
}
compare_eval() { $py tools/oracle_eval.py "$VERLC"; }
compare_families() { $py tools/oracle_families.py; } # tokenizers and templates; --table docs/tokenizers.md by hand
compare_graders() {
    fresh graders && make_graders "$out/graders" && $py tools/oracle_diff.py "$out/graders" $fix/algo &&
        $py tools/oracle_graders.py --verlc "$VERLC"
}
compare_grpo() { # the program's ten steps beside torch's: the golden test on the same numbers
    fresh grpo && make_grpo "$out/grpo" && $py tools/oracle_diff.py "$out/grpo" $fix/train &&
        program test_ppo_grpo "$PWD/$fix/train"
}
compare_lora() {
    fresh lora
    for base in exaone4 llama llama_bias phi3 qwen2 qwen3 qwen3_moe; do cp -r "$fix/model/$base" "$out/lora" || return 1; done
    make_lora "$out/lora" && $py tools/oracle_diff.py "$out/lora" $fix/model &&
        $py tools/oracle_lora.py check "$VERLC" "$out/lora_check"
}
compare_model() {
    fresh model && make_model "$out/model" && same model && $py tools/oracle_model.py check "$VERLC" "$out/model_check" || return 1
    fresh families && $py tools/oracle_model.py families "$out/families" &&
        (cd build/release && VERLC_MODEL_FIXTURES=$out/families ./test_model_golden >"$out/families.log" 2>&1) &&
        $py tools/oracle_model.py table "$out/families.log"
}
compare_optim() {
    fresh optim && make_optim "$out/optim" && $py tools/oracle_diff.py "$out/optim" $fix/train && fresh optim_many &&
        $py tools/oracle_optim.py --schedules "$batches" "$out/optim_many" && program test_model_optim "$out/optim_many"
}
compare_delta_net() { fresh delta_net && make_delta_net "$out/delta_net" && same delta_net; }
compare_quant() { fresh quant && make_quant "$out/quant" && same quant; }
compare_program_agent() {
    VERIFIERS_PYTHON=${VERIFIERS_PYTHON:-$PWD/.venv-verifiers/bin/python} $py tools/oracle_program_agent.py "$VERLC"
}
compare_ray() {
    "${RAY_PYTHON:-.venv-ray/bin/python}" tools/oracle_ray.py && "${RAY_PYTHON:-.venv-ray/bin/python}" tools/oracle_ray_ranks.py
}
compare_rate_limit() {
    fresh rate_limit && make_rate_limit "$out/rate_limit" && $py tools/oracle_diff.py "$out/rate_limit" $fix/algo
}
compare_rejection() {
    fresh rejection && make_rejection "$out/rejection" && $py tools/oracle_diff.py "$out/rejection" $fix/train
}
compare_reward() { fresh reward && make_reward "$out/reward" && same reward; }
compare_tables() {
    $py -c 'import sys, unicodedata; sys.exit(unicodedata.unidata_version != "14.0.0")' || return 77 # Python 3.11 only
    fresh tables && $py tools/oracle_text.py tables --out "$out/tables" &&
        cmp "$out/tables/unicode_tables.h" src/text/unicode_tables.h
}
compare_text() {
    fresh text && make_text "$out/text" || return 1
    local made=(chat.jsonl hostile.jsonl repair.jsonl unicode.jsonl variants.jsonl)
    if [ -f "$out/text/shared.jsonl" ]; then made+=(shared.jsonl); fi
    same text "${made[@]}" || return 1
    [ -d "$SHARED_DATA/tokenizers" ] || { echo "real tokenizers: skipped, no $SHARED_DATA/tokenizers"; return 0; }
    $py tools/oracle_text.py compare
}
compare_serve() { $py tools/oracle_serve.py "$VERLC"; }
compare_sft() {
    [ -d "$SHARED_DATA/tokenizers/qwen2_5" ] || { echo "skipped, no $SHARED_DATA/tokenizers/qwen2_5"; return 0; }
    $py tools/oracle_sft.py "$VERLC" "$SHARED_DATA/tokenizers/qwen2_5"
}
compare_steps() { $py tools/oracle_steps.py "$VERLC"; } # more by hand: --mixes 160 --seed 2
compare_tool_agent() {
    fresh tool_agent && make_tool_agent "$out/tool_agent" &&
        $py tools/oracle_diff.py "$out/tool_agent" $fix/agent/tool_agent || return 1
    [ -d "$SHARED_DATA/tokenizers" ] || { echo "real tokenizers: skipped, no $SHARED_DATA/tokenizers"; return 0; }
    $py tools/oracle_tool_agent.py check build/release/test_agent_tool_agent_verl --conversations "$batches"
}
compare_tool_parser() {
    fresh tool_parser && make_tool_parser "$out/tool_parser" &&
        $py tools/oracle_diff.py "$out/tool_parser" $fix/agent tool_parser.jsonl &&
        $py tools/oracle_tool_parser.py --check build/release/test_agent_tool_parser_verl --turns $((3 * batches))
}
compare_track() { $py tools/oracle_track.py; }
compare_trackers() { "${TRACKERS_PYTHON:-.venv-trackers/bin/python}" tools/oracle_trackers.py; }
compare_verl_ckpt() { $py tools/oracle_verl_ckpt.py check "$VERLC"; } # its fixtures come from several versions of torch
compare_megatron() { $py tools/oracle_megatron.py check "$VERLC"; } # megatron-core writes, torch reads, verl names
compare_mcp() { $py tools/oracle_mcp.py; }
compare_tools() {
    fresh tools && make_tools "$out/tools" && $py tools/oracle_diff.py "$out/tools" $fix/agent &&
        $py tools/oracle_tools.py --batches "$batches"
}
compare_train() {
    fresh train && make_train "$out/train" && same train && fresh train_many &&
        $py tools/oracle_train.py --batches "$batches" "$out/train_many" && program test_ppo_validation "$out/train_many"
}

fixture_dir() {
    case $1 in
    grpo | optim | rejection) echo $fix/train ;;
    distill | graders | rate_limit) echo $fix/algo ;;
    lora) echo $fix/model ;;
    tool_agent) echo $fix/agent/tool_agent ;;
    continuous | tool_parser | tools) echo $fix/agent ;;
    *) echo "$fix/$1" ;;
    esac
}

# One oracle: its output as it comes, its line, its status in NAME.rc.
one() {
    local name=$1 log=$out/$1.log start=$SECONDS rc what cmd=(compare_"$1")
    if [ $mode = fixtures ]; then cmd=(make_"$name" "$(fixture_dir "$name")"); fi
    "${cmd[@]}" 2>"$log.stderr" | tee "$log" | sed -u "s/^/    $name: /"
    rc=${PIPESTATUS[0]} what="passed"
    local figures && figures=$(grep -vE '^ *$|^(wrote|ok)' "$log" | tail -1)
    if [ "$rc" = 77 ]; then
        what=skipped figures="needs Python 3.11"
    elif [ "$rc" != 0 ]; then
        what=FAILED
        tail -5 "$log.stderr" | sed "s/^/    $name: /"
    fi
    echo "$rc" >"$out/$name.rc"
    echo "$name: $what in $((SECONDS - start)) s; $figures"
}

chosen=()
for name in $names; do
    if ! declare -F "compare_$name" >/dev/null; then echo "$name: no such oracle"; exit 2; fi
    if [ $mode = fixtures ] && ! declare -F "make_$name" >/dev/null; then continue; fi
    chosen+=("$name")
    rm -f "$out/$name.rc"
done
set -m # a group of processes for each oracle, so that an interrupt ends them all
trap 'for p in $(jobs -p); do kill -- "-$p" 2>/dev/null; done; exit 130' INT TERM
if [ $mode = fixtures ]; then jobs=1; fi # they write into the same directories
for name in "${chosen[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    one "$name" &
done
wait
passed=0 failed=() skipped=0
for name in "${chosen[@]}"; do
    case $(cat "$out/$name.rc" 2>/dev/null) in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed+=("$name") ;;
    esac
done
echo "$passed passed, ${#failed[@]} failed, $skipped skipped in $SECONDS s${failed[0]:+; failed: ${failed[*]}}"
[ ${#failed[@]} = 0 ] && [ $passed -gt 0 ]
