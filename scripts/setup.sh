#!/usr/bin/env bash
# Makes a fresh Debian 12 or Ubuntu 24.04 ready: system packages with apt (as root or with sudo; otherwise prints the
# line to run and stops), and .venv with the Python packages of the helpers: what `make` and `make demo` need.
# `scripts/setup.sh lint` adds the formatter that lint asks, `scripts/setup.sh test` the test library too.
# Does nothing where everything is there, and asks once: .venv/ready-X is newer than what it was made from.
set -eu
cd "$(dirname "$0")/.."
what=${1:-user}
case $what in user | lint | test) ;; *) echo "usage: scripts/setup.sh [lint|test]" >&2; exit 2 ;; esac
ready=.venv/ready-$what
if [ -x .venv/bin/python ] && [ "$ready" -nt scripts/setup.sh ] && [ "$ready" -nt python/requirements.txt ]; then exit 0; fi

packages="build-essential cmake ninja-build pkg-config python3 python3-venv xz-utils sqlite3 ca-certificates
libjansson-dev libpcre2-dev libutf8proc-dev libyaml-dev libsqlite3-dev libxxhash-dev libseccomp-dev libevent-dev libzmq3-dev
libjs-dygraphs bubblewrap"
modules="jinja2, pyarrow, numpy, huggingface_hub"
wanted="-r python/requirements.txt"
if [ "$what" != user ]; then
    modules="$modules, clang_format"
    wanted="$wanted clang-format==14.0.6"
fi
if [ "$what" = test ]; then
    packages="$packages libcmocka-dev"
    modules="$modules, aiohttp"
    wanted="$wanted aiohttp>=3.9" # examples/http_reward.py
fi

missing=""
for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
if [ -n "$missing" ]; then
    line="apt-get update && apt-get install -y --no-install-recommends$missing"
    if [ "$(id -u)" = 0 ]; then
        run="sh -c"
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        run="sudo sh -c"
    else
        echo "These packages are missing and only root can install them. Run this, then try again:" >&2
        echo "  sudo sh -c '$line'" >&2
        exit 1
    fi
    echo "installing:$missing"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    DEBIAN_FRONTEND=noninteractive $run "$line" >"$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
fi

if ! .venv/bin/python -c "import $modules" 2>/dev/null; then
    echo "making .venv ($modules)"
    python3 -m venv .venv
    .venv/bin/python -m pip install -q --disable-pip-version-check $wanted
fi
if [ "$what" = test ] && ! .venv/bin/python -c "import quickjs" 2>/dev/null; then # tests/e2e/view_page_test.py; node does too
    .venv/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: "quickjs>=1.19" ||
        command -v node >/dev/null || echo "neither quickjs nor node: tests/e2e/view_page_test.py will be skipped" >&2
fi
touch "$ready"
