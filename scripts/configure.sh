#!/usr/bin/env bash
# build/$1 by CMake's preset $1 and the options behind it, where it is not there, older than the presets or than what
# scripts/setup.sh installed, or made with other options. CMake itself looks at its lists of files in each build.
set -eu
cd "$(dirname "$0")/.."
preset=$1
shift
made=build/$preset/build.ninja options=build/$preset/options
for f in CMakePresets.json .venv/ready-*; do
    if [ -e "$f" ] && [ "$f" -nt "$made" ]; then rm -f "$options"; fi
done
if [ -e "$made" ] && [ -e "$options" ] && { [ $# = 0 ] || [ "$*" = "$(cat "$options")" ]; }; then exit 0; fi
cmake --preset "$preset" "$@" >/dev/null
touch "$made"
if [ $# != 0 ] || [ ! -e "$options" ]; then echo "$*" >"$options"; fi
