#!/usr/bin/env bash
# The kernels under compute-sanitizer: memcheck, initcheck and racecheck on short variants of the ops tests, all at once.
# After `cmake --preset cuda && cmake --build --preset cuda`; one line a run, exit status 1 if any found something.
# initcheck does not see what cuBLASLt's kernels for Hopper write by TMA, and calls our reading of it uninitialized.
# So there it leaves these kernels out, and VERLC_CUDA_POISON=1 fills their results with NaN first: the tool sees the fill, and
# the tests' own comparisons say whether all of it was written over. (test_device_cuda_gemm starts from NaN at the models' sizes.)
# racecheck leaves out the library's kernels without tensor cores: products are chosen by thousands of calls, each 0.1 s under it.
#   scripts/sanitize_gpu.sh [BUILD_DIR] [SECONDS]      each run may take SECONDS (600); the longest takes about four minutes
set -u
cd "$(dirname "$0")/.."
build=${1:-build/cuda} limit=${2:-600} out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer: it is in the CUDA toolkit's bin" >&2; exit 1; }
export VERLC_TEST_BACKENDS=cuda VERLC_TEST_SHORT=1
library=() slow=()
for name in nvjet xmma cutlass cublas sgemm gemmk1 gemmSN gemv; do library+=(--kernel-name-exclude "kns=$name"); done
for name in sgemm f32f32_f32f32 gemmk1 gemmSN gemv; do slow+=(--kernel-name-exclude "kns=$name"); done
one() { # TOOL TEST
    local log=$out/$1.$2 start=$SECONDS poison=0 options=(--tool "$1" --error-exitcode 99 --print-limit 5)
    [ "$1" != initcheck ] || { poison=1 && options+=("${library[@]}"); }
    [ "$1" != racecheck ] || options+=("${slow[@]}")
    (cd "$build" && VERLC_CUDA_POISON=$poison timeout "$limit" stdbuf -oL compute-sanitizer "${options[@]}" "./$2") >"$log" 2>&1
    local rc=$?
    echo "$1 $2: $([ $rc = 0 ] && echo clean || echo "exit $rc") after $((SECONDS - start)) s;" \
        "$(grep -a 'SUMMARY' "$log" | tail -1)"
    [ $rc = 0 ] || grep -aE '=========|FAILED|error' "$log" | head -25
    [ $rc != 124 ] || grep -aF '[ RUN' "$log" | tail -1 # what it had no time to end
    return $rc
}
pids=()
for tool in memcheck initcheck racecheck; do
    for test in test_device_ops test_device_batch_invariant test_device_sample test_device_attention test_device_decode_attention \
            test_device_optimizer; do
        one $tool $test &
        pids+=($!)
    done
done
bad=0
for p in "${pids[@]}"; do wait "$p" || bad=1; done
exit $bad
