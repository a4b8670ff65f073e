#!/usr/bin/env bash
# The first three rungs (unit, ops, golden) of build/$1 under its sanitizer.
set -u
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
ctest --test-dir "build/$1" --output-on-failure -j "$(nproc)" -L 'unit|ops|golden'
