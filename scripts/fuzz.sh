#!/usr/bin/env bash
# Every fuzz target of tests/fuzz for FUZZ_SECONDS (30) each, under the address and
# undefined-behaviour sanitizers: by libFuzzer where a clang has it (apt: clang and
# libclang-rt-14-dev or the like), else by the plain driver.  Seeds come from
# tests/fixtures; what is found is kept in build/fuzz/found, a crasher in build/fuzz/crash.
# `scripts/fuzz.sh text model` runs those two.  One line a target; fails on a crash.
set -u
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-30} out=build/fuzz
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

has_libfuzzer() {
    command -v "$1" >/dev/null &&
        echo '#include <stddef.h>
              int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n) { return p && n ? 0 : 0; }' |
        "$1" -fsanitize=fuzzer,address -x c - -o /dev/null 2>/dev/null
}
compiler=cc engine="the plain driver (no clang with libFuzzer)"
for c in clang clang-{20..14}; do
    if has_libfuzzer "$c"; then compiler=$c engine=libFuzzer; break; fi
done
echo "$engine, $seconds s a target; built with $compiler"
if ! grep -qs "^CMAKE_C_COMPILER:[A-Z]*=.*/$compiler$" $out/CMakeCache.txt; then rm -f $out/CMakeCache.txt; fi
mkdir -p $out
{ cmake --preset fuzz -DCMAKE_C_COMPILER="$compiler" && cmake --build --preset fuzz; } >$out/build.log 2>&1 ||
    { tail -30 $out/build.log; exit 1; }
python3 tests/fuzz/corpus.py $out/fuzz_corpus || exit 1

run_target() { # its last line says how it went
    local name=$1 log=$out/$1.log found=$out/found/$1
    mkdir -p "$found" $out/crash
    if [ "$engine" != libFuzzer ]; then
        $out/"$name" --seconds "$seconds" --keep $out/crash $out/fuzz_corpus/"$name" >"$log" 2>&1
        local rc=$?
        tail -1 "$log"
        return $rc
    fi
    $out/"$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1 \
        -artifact_prefix=$out/crash/"$name"- "$found" $out/fuzz_corpus/"$name" >"$log" 2>&1 || {
        grep -E 'ERROR: |SUMMARY: |runtime error|CHECK' "$log" | head -3
        echo "$name: FAILED; kept as $(grep -oE "$out/crash/[^ ]+" "$log" | tail -1); the report is $log"
        return 1
    }
    awk -v name="$name" '/^stat::number_of_executed_units/ { n = $2 }
        /cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") c = $(i + 1) }
        END { printf "%s: %d inputs, %d edges covered, no crash\n", name, n, c }' "$log"
}
passed=0 failed=0
for src in tests/fuzz/fuzz_*.c; do
    name=$(basename "$src" .c)
    [ "$name" = fuzz_main ] && continue
    if [ $# -gt 0 ] && [[ " $* " != *" ${name#fuzz_} "* ]]; then continue; fi
    if run_target "$name"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
