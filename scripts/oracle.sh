#!/usr/bin/env bash
# Every oracle under tools/: compares with the real package, and rewrites the committed fixtures it owns.
set -u
cd "$(dirname "$0")/.."
export VERLC=$PWD/build/release/verlc SHARED_DATA=${SHARED_DATA:-$PWD/../shared/data}
passed=0 failed=0
for t in tools/oracle_*.py; do
    echo "== $t"
    if .venv-oracle/bin/python "$t"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
