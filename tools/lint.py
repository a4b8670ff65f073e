"""Checks what DESIGN.md section 4 promises: a module includes only modules above
it, private headers stay private, every file opens with a comment. Exits 1 on a
violation, or on a line over 132 columns, whatever its language. Prints the 20
longest functions; those over 300 lines fail."""

import pathlib
import re
import sys

ORDER = ["base", "helper", "dev", "model", "text", "data", "comm", "roll", "algo", "reward", "ckpt", "track", "ctl", "train", "cmd"]
TOP = pathlib.Path(__file__).resolve().parent.parent
ROOT = TOP / "src"
COLUMNS = 132
FUNCTION = re.compile(r"^[a-zA-Z_][\w \*]*\([^;]*\)\s*\{$")


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        m = re.match(r'\s*#include "(\w+)/(\w+\.h)"', line)
        if m:
            yield number, m.group(1), m.group(2)


def long_lines():
    """Of code and scripts; tables (*.def) and documents have lines of their own."""
    kinds = ["src/*/*.[ch]", "src/*/*.cu*", "include/*.h", "examples/*.c", "tests/**/*.[ch]", "tests/**/*.py", "tools/*.py",
             "python/**/*.py", "scripts/*.sh", "cmake/*.cmake", "CMakeLists.txt", "Makefile"]
    for path in sorted(x for kind in kinds for x in TOP.glob(kind)):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > COLUMNS:
                yield f"{path.relative_to(TOP)}:{number}: {len(line)} columns; at most {COLUMNS}"


def functions(path):
    start = name = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if start is None and line and not line[0].isspace() and line.endswith("{") and "(" in line and "=" not in line:
            start, name = number, line.split("(")[0].split()[-1].lstrip("*")
        elif line == "}" and start is not None:
            yield number - start, name, f"{path.relative_to(ROOT)}:{start}"
            start = None


def main():
    bad, lengths = [], []
    for path in sorted(ROOT.glob("*/*.[ch]")):
        module = path.parent.name
        if module not in ORDER:
            bad.append(f"{path}: module {module} is not in DESIGN section 4")
            continue
        if not path.read_text().startswith("/*"):
            bad.append(f"{path}: does not open with a comment")
        for number, other, header in includes(path):
            if other not in ORDER or ORDER.index(other) > ORDER.index(module):
                bad.append(f"{path}:{number}: {module} must not include {other}/{header}")
            if other != module and header != f"{other}.h" and (header.endswith("_int.h")):
                bad.append(f"{path}:{number}: {other}/{header} is private")
        if path.suffix == ".c":
            lengths += functions(path)
    lengths.sort(reverse=True)
    for n, name, place in lengths[:20]:
        print(f"{n:5d} {name:40s} {place}")
    bad += long_lines()
    bad += [f"{place}: {name} has {n} lines" for n, name, place in lengths if n > 300]
    for line in bad:
        print(line, file=sys.stderr)
    print(f"lint: {len(bad)} violations in {len(lengths)} functions")
    return 1 if bad else 0


sys.exit(main())
