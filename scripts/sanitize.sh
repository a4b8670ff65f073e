#!/usr/bin/env bash
# What CMakeLists.txt labels `sanitized` of build/$1, under its sanitizer: the first three rungs (unit, ops, golden); for tsan
# without those of code on one thread.
set -u
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
ctest --test-dir "build/$1" --output-on-failure -j "$(($(nproc) + 1))" -L sanitized
