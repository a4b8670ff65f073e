#!/usr/bin/env bash
# verlc beside the real packages of .venv-oracle: every tool tools/oracle_*.py.
#
#   scripts/oracle.sh [NAME...]            compare: the program's answers with the packages', and the committed
#                                          fixtures with what the packages give now (made in build/oracle).
#                                          Writes nothing into the source tree.
#   scripts/oracle.sh fixtures [NAME...]   rewrite tests/fixtures
#
# NAME: algo conf data grpo model optim quant reward tables text track train.  GSM8K and the real tokenizers are read from
# $SHARED_DATA (DIR/gsm8k/{train,test}.jsonl, DIR/tokenizers/NAME/tokenizer.json.xz); what needs them is skipped
# without.  One line an oracle; whole output in build/oracle/NAME.log.
set -u
cd "$(dirname "$0")/.."
export VERLC=$PWD/build/release/verlc SHARED_DATA=${SHARED_DATA:-$PWD/../shared/data}
# verl and datasets look at the network and at accelerators that are not needed here.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 CUDA_VISIBLE_DEVICES= TOKENIZERS_PARALLELISM=true TQDM_DISABLE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
export PYTHONDONTWRITEBYTECODE=1
py=.venv-oracle/bin/python out=$PWD/build/oracle fix=tests/fixtures
mode=compare
if [ "${1:-}" = fixtures ]; then mode=fixtures; shift; fi
names=${*:-algo conf data grpo model optim quant reward tables text track train}
mkdir -p "$out"

same() { $py tools/oracle_diff.py "$out/$1" "$fix/$1" "${@:2}"; } # made again = committed?
fresh() { rm -rf "${out:?}/$1" && mkdir -p "$out/$1"; }

make_algo() { $py tools/oracle_algo.py --out "$1"; }
make_conf() { $py tools/oracle_conf.py --binary ""; } # in place
make_data() { $py tools/oracle_data.py fixtures "$1" && $py tools/oracle_data.py sets "$1"; }
make_grpo() { $py tools/oracle_grpo.py "$1"; }
make_model() { $py tools/oracle_model.py make "$1"; }
make_optim() { $py tools/oracle_optim.py "$1"; }
make_quant() { $py tools/oracle_quant.py "$1"; }
make_reward() { $py tools/oracle_reward.py "$1"; }
make_text() { $py tools/oracle_text.py fixtures --out "$1"; }
make_train() { $py tools/oracle_train.py "$1"; }

compare_algo() { fresh algo && make_algo "$out/algo" && same algo && $py tools/oracle_algo.py --verlc "$VERLC"; }
compare_conf() { $py tools/oracle_conf.py --check; }
compare_data() {
    fresh data && cp -r $fix/data/tok_* "$out/data/" && make_data "$out/data" && same data || return 1
    [ -d "$SHARED_DATA/gsm8k" ] || { echo "verl's GSM8K rows: skipped, no $SHARED_DATA/gsm8k"; return 0; }
    fresh gsm8k && "$VERLC" data gsm8k --local_dataset_path "$SHARED_DATA/gsm8k" --local_save_dir "$out/gsm8k" &&
        $py tools/oracle_data.py compare "$SHARED_DATA/gsm8k" "$out/gsm8k"
}
compare_grpo() { # the program's ten steps beside torch's: the golden test on the same numbers
    fresh grpo && make_grpo "$out/grpo" && $py tools/oracle_diff.py "$out/grpo" $fix/train &&
        cmake --build --preset release --target test_train_grpo >/dev/null &&
        (cd build/release && set -o pipefail && ./test_train_grpo 2>&1 | sed "/^\\[/d; s/;/,/")
}
compare_model() { fresh model && make_model "$out/model" && same model && $py tools/oracle_model.py check "$VERLC" "$out/model_check"; }
compare_optim() { fresh optim && make_optim "$out/optim" && $py tools/oracle_diff.py "$out/optim" $fix/train; }
compare_quant() { fresh quant && make_quant "$out/quant" && same quant; }
compare_reward() { fresh reward && make_reward "$out/reward" && same reward; }
compare_tables() {
    $py -c 'import sys, unicodedata; sys.exit(unicodedata.unidata_version != "14.0.0")' || return 77 # Python 3.11 only
    fresh tables && $py tools/oracle_text.py tables --out "$out/tables" && cmp "$out/tables/text_tables.h" src/text/text_tables.h
}
compare_text() {
    fresh text && make_text "$out/text" || return 1
    local made=(chat.jsonl hostile.jsonl repair.jsonl unicode.jsonl variants.jsonl)
    if [ -f "$out/text/shared.jsonl" ]; then made+=(shared.jsonl); fi
    same text "${made[@]}" || return 1
    [ -d "$SHARED_DATA/tokenizers" ] || { echo "real tokenizers: skipped, no $SHARED_DATA/tokenizers"; return 0; }
    $py tools/oracle_text.py compare
}
compare_track() { $py tools/oracle_track.py; }
compare_train() { fresh train && make_train "$out/train" && same train; }

fixture_dir() { if [ "$1" = grpo ] || [ "$1" = optim ]; then echo $fix/train; else echo $fix/"$1"; fi; }

passed=0 failed=0 skipped=0
for name in $names; do
    if ! declare -F "compare_$name" >/dev/null; then echo "$name: no such oracle"; exit 2; fi
    if [ $mode = fixtures ] && ! declare -F "make_$name" >/dev/null; then continue; fi
    log=$out/$name.log start=$SECONDS
    if [ $mode = fixtures ]; then cmd=(make_"$name" "$(fixture_dir "$name")"); else cmd=(compare_"$name"); fi
    "${cmd[@]}" 2>"$log.stderr" | tee "$log" | sed -u 's/^/    /'
    rc=${PIPESTATUS[0]}
    figures=$(grep -vE '^ *$|^(wrote|ok)' "$log" | tail -1)
    case $rc in
    0) passed=$((passed + 1)) what=passed ;;
    77) skipped=$((skipped + 1)) what=skipped figures="needs Python 3.11" ;;
    *) failed=$((failed + 1)) what=FAILED; tail -5 "$log.stderr" | sed 's/^/    /' ;;
    esac
    echo "$name: $what in $((SECONDS - start)) s; $figures"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
