"""The modules of src/modules.list, and who calls whom: by the includes of the sources and by the symbols of built objects.

  python3 tools/modules.py [BUILD]      modules by size, and circles of files that call each other (BUILD: build/release)

tools/lint.py checks both."""

import pathlib
import re
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
ROOT = TOP / "src"


def calls():
    """{module: those it calls, theirs too}, in order."""
    rows = (line.split(":") for line in (ROOT / "modules.list").read_text().splitlines() if re.match(r"[a-z_]+:", line))
    found = {}
    for name, others in rows:
        found[name] = set(others.split()).union(*(found[other] for other in others.split()))
    return found


def sources(path):
    return [p for kind in ("*.c", "*.h", "*.cu", "*.cuh", "*.def") for p in path.rglob(kind)]


def symbols(build):
    """{file of src: (symbols it defines, symbols it takes)} of the modules' objects; {} where none is built."""
    objects = {o: o.as_posix().split(".dir/src/")[1][:-2] for o in (build / "CMakeFiles").glob("verlc_*.dir/src/**/*.c.o")}
    objects = {o: name for o, name in objects.items() if (ROOT / name).exists()}  # not those of files that are gone
    if not objects:
        return {}
    out = subprocess.run(["nm", "--print-file-name", "--no-demangle", *map(str, objects)], capture_output=True, text=True).stdout
    found = {name: (set(), set()) for name in objects.values()}
    for line in out.splitlines():
        path, rest = line.rsplit(":", 1)
        *_, kind, symbol = rest.split()
        if kind in "TDBRVWC":
            found[objects[pathlib.Path(path)]][0].add(symbol)
        elif kind == "U":
            found[objects[pathlib.Path(path)]][1].add(symbol)
    return found


def edges(found):
    """{file: files whose symbols it takes}."""
    owner = {symbol: name for name, (defined, _) in found.items() for symbol in defined}
    return {name: {owner[s] for s in taken if s in owner} - {name} for name, (_, taken) in found.items()}


def circles(graph):
    """Strongly connected files, the largest first (Tarjan)."""
    number, low, stack, out = {}, {}, [], []

    def visit(v):
        number[v] = low[v] = len(number)
        stack.append(v)
        for w in sorted(graph[v]):
            if w not in number:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == number[v]:
            out.append(sorted(stack[stack.index(v):]))
            del stack[stack.index(v):]
    sys.setrecursionlimit(10000)
    for v in sorted(graph):
        if v not in number:
            visit(v)
    return sorted((c for c in out if len(c) > 1), key=len, reverse=True)


def main():
    graph = edges(symbols(TOP / (sys.argv[1] if len(sys.argv) > 1 else "build/release")))
    lines = {m: sum(len(p.read_text().splitlines()) for p in sources(ROOT / m)) for m in calls()}
    for m, n in lines.items():
        folders = {p.parent for p in sources(ROOT / m)}
        widest = max((len([p for p in sources(f) if p.parent == f]), f.relative_to(ROOT).as_posix()) for f in folders)
        print(f"{m:10s} {n:6d} lines {100 * n / sum(lines.values()):5.1f} %   at most {widest[0]:3d} files in {widest[1]}")
    for c in circles(graph):
        print(f"{len(c)} files call each other: {' '.join(c)}")


if __name__ == "__main__":
    main()
