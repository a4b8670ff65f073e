#!/usr/bin/env bash
# build/dist/verlc-VERSION-linux-ARCH.tar.gz and the wheel of the same files, for machines without a compiler: the
# small libraries are linked statically; what stays dynamic is libc and libm, and libstdc++ in the CUDA backend.
# With nvcc the CUDA backend is inside, for the GPUs of VERLC_CUDA_ARCHS ("80 90a"; default: all); CUDA=0 leaves it out.
# Refuses a build that asks for a newer glibc than 2.35, Ubuntu 22.04's: build on Debian 12.
# The same commit and the same packages of the build machine give the same bytes.
set -eu
cd "$(dirname "$0")/.."
floor=GLIBC_2.35
build=build/dist
arch=$(uname -m)
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}"
[ -z "$(git status --porcelain)" ] || echo "note: the tree has changes that are not committed; they are packed too"

nvcc=$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" command -v nvcc || true)
[ "${CUDA:-1}" != 0 ] || nvcc=""
if [ -n "$nvcc" ]; then
    cmake --preset dist -DVERLC_CUDA=ON -DVERLC_CUDA_ARCHS="${VERLC_CUDA_ARCHS:-}" | grep 'CUDA backend'
else
    cmake --preset dist -DVERLC_CUDA=OFF >/dev/null
    echo "no nvcc, or CUDA=0: the result has no CUDA backend and runs on the CPU alone"
fi
cmake --build --preset dist --target verlc libverlc ${nvcc:+verlc_cuda}
version=$(sed -n 's/^CMAKE_PROJECT_VERSION:.*=//p' $build/CMakeCache.txt)
name=verlc-$version-linux-$arch
tree=$build/$name
rm -rf "$tree" $build/wheel $build/*.whl $build/*.tar.gz
cmake --install $build --strip --prefix "$tree" >/dev/null
[ -z "$nvcc" ] || strip "$tree/libverlc_cuda.so" # it names nvcc's temporary files
# one library for users' programs, which need none of the small ones then
{ echo "CREATE $tree/lib/libverlc.a"; sed 's/^/ADDLIB /' <(echo $build/libverlc.a; cat $build/archives.txt); echo SAVE; } | ar -M
strip --strip-unneeded "$tree/lib/libverlc.a"
python3 tools/man_pages.py "$tree/verlc" "$tree/share/man/man1"

# glibc: what the files ask for
binaries=$(find "$tree" -path "$tree/verlc" -o -name '*.so')
newest=$(for f in $binaries; do objdump -T "$f"; done | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -1)
if [ "$(printf '%s\n' "$newest" $floor | sort -V | tail -1)" != $floor ]; then
    echo "the files ask for $newest, newer than $floor of Ubuntu 22.04; build on Debian 12:" >&2
    for f in $binaries; do objdump -T "$f" | grep -F "$newest" | sed "s,^,  ${f##*/}: ," >&2; done
    exit 1
fi

# the licences of others' work inside: what is linked statically, and the page's charts (our own is LICENSE)
mkdir "$tree/LICENSES"
while read -r archive; do
    package=$(dpkg-query -S "$(realpath "$archive")" | cut -d: -f1)
    cp -L "/usr/share/doc/$package/copyright" "$tree/LICENSES/$package"
    dpkg-query -W -f='${Package} ${Version}\n' "$package"
done < <(cat $build/archives.txt; sed -n 's,^DYGRAPHS_DIR:PATH=\(.*\),\1/dygraph.min.js,p' $build/CMakeCache.txt) \
    >"$tree/LICENSES/VERSIONS"
if [ -n "$nvcc" ]; then
    cuda=$(dirname "$(dirname "$(realpath "$nvcc")")")
    eula=$(ls "$cuda"/EULA.txt "$cuda"/dist-info/nvidia_cuda_runtime-*/licenses/License.txt \
        /usr/share/doc/cuda-cudart-dev-*/copyright 2>/dev/null | head -1)
    [ -n "$eula" ] || { echo "no licence of the CUDA runtime under $cuda: EULA.txt" >&2; exit 1; }
    cp "$eula" "$tree/LICENSES/cuda-runtime"
    "$nvcc" --version | sed -n 's/.*release .*, V/cuda-runtime /p' >>"$tree/LICENSES/VERSIONS"
fi

tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w -C $build -c "$name" |
    gzip -9n >"$build/$name.tar.gz"

# the wheel: the same files at their places in an environment
.venv/bin/python -c 'import hatchling, auditwheel' 2>/dev/null ||
    .venv/bin/pip install -q --disable-pip-version-check hatchling==1.33.0 auditwheel==6.8.2
glibc=${newest#GLIBC_}
tag=manylinux_${glibc/./_}_$arch
cp -r "$tree" $build/wheel
cp $build/pyproject.toml packaging/hatch_build.py $build/wheel
wheel=$(cd $build/wheel && VERLC_PLATFORM_TAG=$tag "$OLDPWD/.venv/bin/python" -m hatchling build -t wheel -d .. 2>&1 | tail -1)
wheel=$build/${wheel##*/}
.venv/bin/python -m auditwheel show "$wheel" >$build/auditwheel.log || { cat $build/auditwheel.log >&2; exit 1; }
tr -s ' \n' ' ' <$build/auditwheel.log | grep -q "following platform tag: \"$tag\"" || {
    echo "auditwheel does not agree with the tag $tag:" >&2
    cat $build/auditwheel.log >&2
    exit 1
}
du -h "$build/$name.tar.gz" "$wheel"
