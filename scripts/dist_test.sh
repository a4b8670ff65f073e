#!/usr/bin/env bash
# Tries what `make dist` made on bare systems: Debian 12, Ubuntu 22.04 and 24.04 as debootstrap makes them, with
# python3-venv and nothing else. In each: the wheel in a virtual environment up to the first GRPO step of a tiny model
# (bar: 60 s), self-test, removal; then the tarball, its Python packages by the line that it prints itself.
# usage: scripts/dist_test.sh [bookworm] [jammy] [noble]. Needs root, debootstrap, Debian's and Ubuntu's archives and
# PyPI; a distribution that cannot be had is skipped by name. The systems are kept in build/bare for the next time.
set -eu
cd "$(dirname "$0")/.."
wheel=$(ls build/dist/verlc-*.whl) || { echo "no wheel: run make dist" >&2; exit 1; }
bare=$PWD/build/bare
passed=0 failed=0 skipped=0
[ "$(id -u)" = 0 ] || { echo "chroot needs root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "run apt-get install debootstrap" >&2; exit 1; }

# An Ubuntu newer than this debootstrap has the script of the one before.
get() {
    script=/usr/share/debootstrap/scripts/$1
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/jammy
    components=main
    [ "$1" = bookworm ] || components=main,universe
    rm -rf "$bare/$1"
    mkdir -p "$bare"
    debootstrap --variant=minbase --components=$components --include=python3-venv "$1" "$bare/$1.part" "" "$script" \
        >"$bare/$1.log" 2>&1 && mv "$bare/$1.part" "$bare/$1"
}

unmount() { ! mountpoint -q "$1/proc" || umount "$1/proc"; }

try() {
    root=$bare/$1
    rm -rf "$root/try"
    mkdir "$root/try"
    cp "$wheel" build/dist/verlc-*.tar.gz "$root/try"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$root/try/ca.crt"
    cp scripts/dist_try.sh "$root/try"
    trap 'unmount "$root"' EXIT
    unmount "$root"
    mount -t proc proc "$root/proc"
    chroot "$root" env -i PATH=/usr/bin:/bin HOME=/try PIP_CERT=/try/ca.crt ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
        ${https_proxy:+https_proxy="$https_proxy"} bash /try/dist_try.sh "$1" | tee "$bare/$1.result" || true
    unmount "$root"
    grep -q '^end' "$bare/$1.result" || echo "FAILED  $1: the trial did not come to its end" | tee -a "$bare/$1.result"
    passed=$((passed + $(grep -c '^ok ' "$bare/$1.result" || true)))
    failed=$((failed + $(grep -c '^FAILED ' "$bare/$1.result" || true)))
}

for name in ${*:-bookworm jammy noble}; do
    if [ -d "$bare/$name" ] || get "$name"; then
        try "$name"
    else
        echo "skipped $name: $(tail -1 "$bare/$name.log")"
        skipped=$((skipped + 1))
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
