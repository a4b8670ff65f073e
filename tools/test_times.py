"""tests/times.txt and the table of CONTRIBUTING.md from the log of `make test`: how long each test takes. It measures nothing.

  make test && python3 tools/test_times.py [LOG]      (build/test.log)

CMakeLists.txt reads tests/times.txt: the longest tests start first, and `make check` has those that are quick."""

import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
ROW = re.compile(r"Test +#\d+: (\S+) \.*\s+Passed +([\d.]+) sec")


def table(rows):
    lines = ["| test | seconds |", "|---|---|"] + [f"| `{name}` | {seconds:.0f} |" for seconds, name in rows[:20]]
    return "\n".join(lines)


def main():
    log = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TOP / "build/test.log"
    rows = sorted(((float(s), name) for name, s in ROW.findall(log.read_text())), reverse=True)
    if len(rows) < 50:
        sys.exit(f"{log}: {len(rows)} tests passed there; run `make test` as a whole first")
    (TOP / "tests/times.txt").write_text("".join(f"{seconds:.1f} {name}\n" for seconds, name in rows))
    page = TOP / "CONTRIBUTING.md"
    text, n = re.subn(r"(<!-- test times -->\n).*?(\n<!-- end of test times -->)", lambda m: m[1] + table(rows) + m[2],
                      page.read_text(), flags=re.S)
    if n != 1:
        sys.exit(f"{page}: the lines <!-- test times --> and <!-- end of test times --> are not there once")
    page.write_text(text)


main()
