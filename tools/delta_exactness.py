"""What exactness costs for a gated delta net layer: `verlc bench delta --json` beside tools/gpu_delta_inexact.cu.

  python3 tools/delta_exactness.py BENCH.json... INEXACT.jsonl

Exact: a decoding step and a prefill have the bits of training. Inexact: the fastest form there that counts. Its layer is ours with
that rule in the place of our rule; its training has our backward, which exactness does not touch. Ratios are times, exact by
inexact, of the rule alone and of the layer."""

import json
import pathlib
import sys

# what is compared: our case that has an inexact form, the rule's, the layer's
WHAT = (("prefill", "rule forward", "rule forward", "layer forward"), ("train", "rule kept", "rule train", "layer train"),
        ("decode", "rule step", "rule step", "layer step"))
BARS = {"prefill": 1.1, "train": 1.1, "decode": 1.0}


def seconds(cases, name, rows=None):
    """Of that case; a step's is the mean over a chunk. None: it was not measured."""
    found = [c["seconds"] for c in cases if c["case"] == name and c.get("open", "mean") == "mean" and rows in (None, c["rows"])]
    return found[0] if found else None


def fastest(lines, name, rows):
    found = [x for x in lines if x.get("case") == name and x["rows"] == rows and x["counted"]]
    return min(found, key=lambda x: x["seconds"]) if found else None


def comparisons(cases, lines):
    """(what, rows, our rule, the inexact rule, our layer, the form) of what both have measured; seconds."""
    for what, name, ours, layer in WHAT:
        for rows in sorted({c["rows"] for c in cases if c["case"] == name}):
            best, rule = fastest(lines, name, rows), seconds(cases, ours, rows)
            if best:
                backward = rule - seconds(cases, name, rows) if what == "train" else 0
                yield what, rows, rule, best["seconds"] + backward, seconds(cases, layer, rows), best["form"]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    cases = [c for path in sys.argv[1:-1] for c in json.loads(pathlib.Path(path).read_text())["cases"]]
    lines = [json.loads(line) for line in pathlib.Path(sys.argv[-1]).read_text().splitlines() if line.startswith("{")]
    print(f"{'what':8s} {'rows':>6s} {'rule us':>9s} {'inexact':>9s} {'ratio':>6s} "
          f"{'layer us':>9s} {'inexact':>9s} {'ratio':>6s} bar, form")
    for what, rows, rule, inexact, layer, form in comparisons(cases, lines):
        other = layer - rule + inexact
        verdict = "ok" if layer / other <= BARS[what] else "MISSED"
        print(f"{what:8s} {rows:6d} {rule * 1e6:9.1f} {inexact * 1e6:9.1f} {rule / inexact:6.2f} "
              f"{layer * 1e6:9.1f} {other * 1e6:9.1f} {layer / other:6.3f} {BARS[what]:g} {verdict}, {form}")


if __name__ == "__main__":
    main()
