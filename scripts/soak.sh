#!/usr/bin/env bash
# kill -9 at $1 random moments, resumed to the end: bitwise.
set -eu
cd "$(dirname "$0")/.."
VERLC=$PWD/build/release/verlc SOURCE_DIR=$PWD .venv/bin/python tests/fault/kill_resume_test.py "${1:-1000}"
