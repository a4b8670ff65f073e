"""The tables of docs/performance.md, made from docs/figures/*.json (tools/figures.py says what those hold).

  python tools/performance_tables.py                     writes the tables again
  python tools/performance_tables.py build/bench/gpu.json ...   takes these figures into docs/figures first, row by row
  python tools/performance_tables.py --check             exit status 1 if a table is not what the figures give"""

import pathlib
import re
import sys

from figures import Figures, bar_text, number, ratio, roofline

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE, FIGURES = ROOT / "docs/performance.md", ROOT / "docs/figures"
TABLE = re.compile(r"(<!-- figures: (\w+) ([\w ]+) -->\n).*?(<!-- end of figures -->)", re.S)


def take(path):
    new = Figures.read(path)
    home = FIGURES / pathlib.Path(path).name
    old = Figures.read(home)
    if new.machine.get("gpu") != old.machine.get("gpu"):  # figures of two GPUs do not mix
        old.machine, old.rows = {}, []
    old.machine |= new.machine
    fresh = {r["id"]: r for r in new.rows}
    for i, r in enumerate(old.rows):
        if r["id"] in fresh:
            row = fresh.pop(r["id"])
            named = {p["name"] for p in row["peers"]}
            row["peers"] += [p | {"same_run": False} for p in r["peers"] if p["name"] not in named or not p["same_run"]]
            old.rows[i] = row
    old.rows += fresh.values()
    home.write_text(old.text())


def table(name, groups):
    """Columns that are empty in every row are left out."""
    f = Figures.read(FIGURES / f"{name}.json")
    if groups == ["machine"]:
        form = {"memory": lambda v: f"{v / 1e9:,.1f} GB/s", "gemm": lambda v: f"{v / 1e12:.2f} TFLOP/s"}
        said = {k: form.get(k, str)(v) for k, v in f.machine.items()}
        return "".join(f"- {k}: {v}\n" for k, v in said.items())
    rows = [r for r in f.rows if r["id"].split("/")[0] in groups]
    cells = []
    for r in rows:
        limit = roofline(r["work"], f.machine) if f.share(r) else None
        cells.append([
            r["what"] + (f" ({r['note']})" if r["note"] else ""), r["unit"], number(r["ours"], r["unit"]),
            "; ".join(f"{p['name']}: {number(p['value'], r['unit'])}{'' if p['same_run'] else ' *'}" for p in r["peers"]),
            "; ".join(f"{ratio(r, p['value']):.2f}" for p in r["peers"]),
            number(limit, r["unit"]) if limit else "", f"{f.share(r):.0%}" if limit else "",
            bar_text(r)])
    heads = ["what", "unit", "verlc", "peer", "ratio", "roofline", "reached", "bar"]
    keep = [i for i in range(len(heads)) if any(c[i] for c in cells)]
    lines = ["| " + " | ".join(c[i] for i in keep) + " |" for c in [heads, *cells]]
    lines.insert(1, "|" + "---|" * len(keep))
    return "\n".join(lines) + "\n"


def page():
    return TABLE.sub(lambda m: m[1] + table(m[2], m[3].split()) + m[4], PAGE.read_text())


def main():
    if sys.argv[1:] == ["--check"]:
        if page() != PAGE.read_text():
            sys.exit("docs/performance.md: its tables are not those of docs/figures: run make performance")
        return
    for path in sys.argv[1:]:
        take(path)
    PAGE.write_text(page())


main()
