#!/usr/bin/env bash
# Runs every test of build/release rung by rung and closes with "N passed, N failed, N skipped".
set -u
cd "$(dirname "$0")/.."
log=build/test.log
python3 tools/lint.py >build/lint.log 2>&1 & # beside the tests
lint=$!
# Two more than there are cores: many tests wait, for a deadline or a signal.
ctest --test-dir build/release --output-on-failure -j "$(($(nproc) + 2))" "$@" | tee "$log"
rc=${PIPESTATUS[0]}
wait "$lint" || { cat build/lint.log; rc=1; }
failed=$(grep -cE '\*\*\*(Failed|Timeout|Exception|Not Run)' "$log")
passed=$(grep -cE ' Passed ' "$log")
skipped=$(grep -cE '\*\*\*Skipped' "$log")
echo "$passed passed, $failed failed, $skipped skipped"
[ "$rc" = 0 ] && [ "$failed" = 0 ] && [ "$passed" -gt 0 ]
