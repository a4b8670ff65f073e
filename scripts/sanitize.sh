#!/usr/bin/env bash
# The first three rungs (unit, ops, golden) of build/$1 under its sanitizer; for tsan without those of code on one thread.
set -u
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
threadless='test_(conf|data|text_golden|view_terminal|cmd_algo|agent_(tool_parser|tool_agent|tool_journal|token_tree|continuous))'
ctest --test-dir "build/$1" --output-on-failure -j "$(($(nproc) + 1))" -L 'unit|ops|golden' \
    $([ "$1" != tsan ] || echo "-E $threadless")
