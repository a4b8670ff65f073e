#!/usr/bin/env bash
# The kernels under compute-sanitizer: memcheck, initcheck and racecheck on short variants of the ops tests, all at once.
# After `cmake --preset cuda && cmake --build --preset cuda`; one line a run, exit status 1 if any found something.
#   scripts/sanitize_gpu.sh [BUILD_DIR] [SECONDS]      each run may take SECONDS (300)
set -u
cd "$(dirname "$0")/.."
build=${1:-build/cuda} limit=${2:-300} out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer: it is in the CUDA toolkit's bin" >&2; exit 1; }
export VERLC_TEST_BACKENDS=cuda VERLC_TEST_SHORT=1
one() { # TOOL TEST
    local log=$out/$1.$2 start=$SECONDS
    (cd "$build" && timeout "$limit" compute-sanitizer --tool "$1" --error-exitcode 99 --print-limit 5 "./$2") >"$log" 2>&1
    local rc=$?
    echo "$1 $2: $([ $rc = 0 ] && echo clean || echo "exit $rc") after $((SECONDS - start)) s;" \
        "$(grep -a 'SUMMARY' "$log" | tail -1)"
    [ $rc = 0 ] || grep -aE '=========|FAILED|error' "$log" | head -25
    return $rc
}
pids=()
for tool in memcheck initcheck racecheck; do
    for test in test_dev_ops test_dev_rows test_dev_sample test_dev_attn test_dev_optim; do
        one $tool $test &
        pids+=($!)
    done
done
bad=0
for p in "${pids[@]}"; do wait "$p" || bad=1; done
exit $bad
