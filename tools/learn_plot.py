"""The end of `make learn-gpu`: tables of the runs of scripts/learn_gpu.sh and their curves as a picture (with
matplotlib; without it the tables alone).

  python tools/learn_plot.py LEARN_DIR PICTURE [DOCUMENT]

Reads LEARN_DIR/seed_N/NAME/metrics.jsonl and, for the kinds of problem, the validation dumps beside it.
Writes LEARN_DIR/table.md and, where a DOCUMENT is named, the tables between its lines OPEN and CLOSE.
Exit status 1: no GRPO run, or one that starts above 30 % or ends below 90 % (greedy, held out)."""

import json
import pathlib
import statistics
import sys

START, END = 0.3, 0.9
OPEN, CLOSE = "<!-- learn-gpu -->\n", "<!-- end of learn-gpu -->\n"
NAMES = {"grpo": "GRPO", "torch": "GRPO, torch loop", "dapo": "DAPO", "rloo": "RLOO", "ppo": "PPO"}
KINDS = {"sums": lambda a, b, r: a + b == r, "differences": lambda a, b, r: a - b == r,
         "products": lambda a, b, r: a * b == r}


class Run:
    def __init__(self, path):
        self.path, self.seed = path, path.parent.name.removeprefix("seed_")
        rows = [json.loads(line) for line in open(path / "metrics.jsonl")]
        values = [(r["step"], k, v) for r in rows for k, v in r["data"].items()]
        self.accuracy = [(s, v) for s, k, v in values if k == "val/accuracy" or k.startswith("val-core/")]
        times = [v for _, k, v in values if k == "timing_s/step"]
        self.step_s = statistics.median(times) if times else float("nan")
        self.ended = (path / "seconds").exists()
        ends = [path / "seconds", path.parent / "seconds"]  # this run; data, model and supervised training
        self.seconds = sum(int(f.read_text()) for f in ends) if self.ended else None

    def at(self, step):
        return dict(self.accuracy).get(step)

    def kinds(self, step):
        """{kind of problem: accuracy} at a validation."""
        right = {}
        for r in map(json.loads, open(self.path / f"validation/{step}.jsonl")):
            a, b = [int(w) for w in r["input"].split() if w.isdigit()][:2]
            kind = next(k for k, f in KINDS.items() if f(a, b, int(r["gts"])))
            right.setdefault(kind, []).append(r["score"])
        return {k: statistics.mean(right[k]) for k in KINDS}


def percent(x):
    return "" if x is None else f"{100 * x:.1f}"


def line(*cells):
    return "| " + " | ".join(str(c) for c in cells) + " |"


def seeds_table(runs):
    """The GRPO runs, one line a seed."""
    yield line("seed", "before, %", "after, %", *(f"{k}, %" for k in KINDS), "steps to 90 %", "s a step",
               "s in all")
    yield "|" + "---|" * (6 + len(KINDS))
    for r in runs:
        first, last = r.accuracy[0], r.accuracy[-1]
        before, after = r.kinds(first[0]), r.kinds(last[0])
        to_bar = next((s for s, v in r.accuracy if v >= END), "-")
        kinds = [f"{percent(before[k])} to {percent(after[k])}" for k in KINDS]
        yield line(r.seed, percent(first[1]), percent(last[1]), *kinds, to_bar, f"{r.step_s:.2f}", r.seconds)


def names_table(runs):
    """Accuracy at some steps, the seeds of an algorithm in one cell."""
    every = [r for found in runs.values() for r in found]
    steps = [s for s in (0, 20, 40, 80, 120, 160, 200, 300, 400) if any(r.at(s) is not None for r in every)]
    yield line("algorithm", *(f"step {s}" for s in steps), "last (step)", "s a step")
    yield "|" + "---|" * (len(steps) + 3)
    for n, found in runs.items():
        cells = [" ".join(percent(r.at(s)) for r in found if r.at(s) is not None) for s in steps]
        cells.append(" ".join(f"{percent(v)} ({s})" for s, v in (r.accuracy[-1] for r in found)))
        yield line(NAMES[n], *cells, " ".join(f"{r.step_s:.2f}" for r in found))


def draw(runs, picture):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for ax, names, title in ((axes[0], ("grpo", "torch"), "GRPO, one line a seed"),
                             (axes[1], ("grpo", "dapo", "rloo", "ppo"), "algorithms, first seed of each")):
        for colour, n in enumerate(names):
            for i, r in enumerate(runs.get(n, [])[:1 if ax is axes[1] else None]):
                ax.plot(*zip(*r.accuracy), color=f"C{colour}", label=None if i else NAMES[n], lw=1.3)
        ax.axhline(END, color="grey", lw=0.8, ls=":")
        ax.set(title=title, xlabel="step", ylim=(0, 1))
        ax.grid(alpha=0.3)
        ax.legend(loc="lower right")
    axes[0].set_ylabel("accuracy, held out, greedy")
    fig.tight_layout()
    fig.savefig(picture, dpi=110)
    print(f"curves: {picture}")


def main():
    out, picture = pathlib.Path(sys.argv[1]), sys.argv[2]
    runs = {n: [Run(p.parent) for p in sorted(out.glob(f"seed_*/{n}/metrics.jsonl"))] for n in NAMES}
    runs = {n: [r for r in found if len(r.accuracy) > 1] for n, found in runs.items()}
    runs = {n: found for n, found in runs.items() if found}
    grpo = [r for r in runs.get("grpo", []) if r.ended]
    tables = "\n".join([*seeds_table(grpo), "", *names_table(runs), ""])
    print(tables)
    (out / "table.md").write_text(tables)
    for document in map(pathlib.Path, sys.argv[3:]):
        head, rest = document.read_text().split(OPEN)
        document.write_text(head + OPEN + tables + CLOSE + rest.split(CLOSE)[1])
    try:
        draw(runs, picture)
    except ImportError:
        print("no curves: this Python has no matplotlib")
    missed = [r.seed for r in grpo if r.accuracy[0][1] > START or r.accuracy[-1][1] < END]
    if missed or not grpo:
        seeds = " ".join(missed) or "- none ran"
        sys.exit(f"missed (at most {START:.0%} before, at least {END:.0%} after): seeds {seeds}")


main()
