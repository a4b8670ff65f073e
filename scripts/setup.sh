#!/usr/bin/env bash
# Makes a fresh Debian 12 or Ubuntu 24.04 ready: system packages with apt (as root
# or with sudo; otherwise prints the line to run and stops), and .venv with the
# Python packages of the helpers and the formatter that lint asks.  Does nothing where everything is there.
set -eu
cd "$(dirname "$0")/.."

packages="build-essential cmake ninja-build pkg-config python3 python3-venv xz-utils sqlite3 ca-certificates
libjansson-dev libpcre2-dev libutf8proc-dev libyaml-dev libsqlite3-dev libxxhash-dev libseccomp-dev libevent-dev libzmq3-dev
libjs-dygraphs bubblewrap libcmocka-dev"

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

if ! .venv/bin/python -c 'import jinja2, pyarrow, numpy, huggingface_hub, clang_format' 2>/dev/null; then
    echo "making .venv (jinja2, pyarrow, numpy, huggingface_hub, clang-format)"
    python3 -m venv .venv
    .venv/bin/pip install -q --disable-pip-version-check -r python/requirements.txt clang-format==14.0.6
fi
