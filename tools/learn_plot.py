"""The end of `make learn-gpu`: accuracy before and after GRPO from the runs' metrics and samples, a table of the
seeds where the torch loop has run too, and the curves as a picture (with matplotlib; without it the numbers alone).

  python tools/learn_plot.py LEARN_DIR PICTURE

Two accuracies: by the reward's rule (the number after ####) and of the last number of the answer, marked or not.
Exit status 1: held-out accuracy on generated problems, by the reward's rule, rose by less than 15 points."""

import itertools
import json
import pathlib
import re
import sqlite3
import statistics
import sys

BAR = 0.15


def metrics(path):
    """[(step, {metric: value})] of one run; nothing where it has not run."""
    return [(r["step"], r["data"]) for r in map(json.loads, open(path))] if path.exists() else []


def curve(rows, name):
    return [(step, data[name]) for step, data in rows if name in data]


def accuracy_name(rows):
    """The mean reward of a validation: val-core/SOURCE/reward/mean@1 or what stands for it."""
    names = sorted({k for _, data in rows for k in data if k.startswith("val-") and k.split("/")[-1].startswith("mean@")})
    return next((k for k in names if k.startswith("val-core/")), names[0] if names else None)


def validations(path):
    rows = metrics(path)
    name = accuracy_name(rows)
    return curve(rows, name) if name else []


def last_number_right(run):
    """{step: share of the validation's answers whose last number is right} from the samples of run.db."""
    right = {}
    if (run / "run.db").exists():
        for step, text, truth in sqlite3.connect(run / "run.db").execute(
                "SELECT step, response, ground_truth FROM samples WHERE validation = 1"):
            numbers = re.findall(r"-?[0-9][0-9.,]*", text)
            right.setdefault(step, []).append(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == truth)
    return {step: statistics.mean(r) for step, r in right.items()}


def before_after(run, what):
    accuracy, number = validations(run / "metrics.jsonl"), last_number_right(run)
    ends = [accuracy[0], accuracy[-1]]
    values = " -> ".join(f"{100 * a:.1f} %" + (f" (last number {100 * number[s]:.1f} %)" if s in number else "") for s, a in ends)
    print(f"{what}: {values}")
    return ends[1][1] - ends[0][1]


def runs_of(out):
    """[(label, colour, reward curve, accuracy curve)], verlc's first."""
    paths = sorted(out.glob("grpo*/metrics.jsonl"))
    ours = [("verlc", "C0", curve(metrics(p), "critic/rewards/mean"), validations(p)) for p in paths]
    theirs = [("torch loop", "C1", curve(metrics(p), "critic/rewards/mean"), curve(metrics(p), "val/accuracy"))
              for p in sorted(out.glob("torch_*.jsonl"))]
    return ours, theirs


def compare(ours, theirs):
    """Accuracy at each validation that all runs have, and the mean reward since the one before."""
    steps = sorted(set.intersection(*(set(dict(r[3])) for r in ours + theirs)))
    print(f"{'steps':>9s}  {'accuracy, verlc':>24s}  {'accuracy, torch':>24s}  {'reward, verlc':>24s}  {'reward, torch':>24s}")
    for before, step in zip([steps[0], *steps], steps):
        cells = []
        for runs in (ours, theirs):
            cells.append(" ".join(f"{dict(r[3])[step]:.3f}" for r in runs))
        for runs in (ours, theirs):
            mean = [[v for s, v in r[2] if before < s <= step] for r in runs]
            cells.append(" ".join(f"{statistics.mean(m):.3f}" for m in mean if m))
        print(f"{step:9d}  " + "  ".join(f"{c:>24s}" for c in cells))


def distances(ours, theirs):
    """How far two runs are from each other, on average over the steps that both have: seeds of one program, and of two.
    Without step 0: nothing is trained yet, and greedy answers where two tokens are as probable follow rounding."""
    def apart(a, b, index):
        a, b = (dict(smooth(r[2]) if index == 2 else r[3]) for r in (a, b))
        return statistics.mean(abs(a[s] - b[s]) for s in set(a) & set(b) - {0})

    for index, what in ((2, "reward, mean of 5 steps"), (3, "accuracy")):
        pairs = {"two seeds of verlc": list(itertools.combinations(ours, 2)),
                 "two of torch": list(itertools.combinations(theirs, 2)), "one of each": list(itertools.product(ours, theirs))}
        print(f"mean distance of {what}: " +
              ", ".join(f"{name} {statistics.mean(apart(a, b, index) for a, b in p):.4f}" for name, p in pairs.items() if p))


def smooth(points, width=5):
    values = [v for _, v in points]
    return [(s, statistics.mean(values[max(0, i - width + 1):i + 1])) for i, (s, _) in enumerate(points)]


def draw(out, picture, ours, theirs):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(14, 4))
    loss = curve(metrics(out / "sft/metrics.jsonl"), "train/loss")
    axes[0].plot(*zip(*loss)) if loss else None
    axes[0].set(title="supervised training", xlabel="step", ylabel="loss", yscale="log")
    for ax, title, index in ((axes[1], "GRPO: reward, mean of 5 steps", 2), (axes[2], "GRPO: accuracy, held out", 3)):
        seen = set()
        for label, colour, *curves in ours + theirs:
            points = curves[index - 2]
            ax.plot(*zip(*(smooth(points) if index == 2 else points)), color=colour, label=None if label in seen else label, lw=1.2)
            seen.add(label)
        last = max(s for r in theirs or ours for s, _ in r[2])  # of the comparison, where there is one; the right side shows all
        ax.set(title=title, xlabel="step", ylim=(0, 1), xlim=(0, last if index == 2 else None))
        ax.legend()
    for ax in axes:
        ax.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(picture, dpi=110)
    print(f"curves: {picture}")


def main():
    out, picture = pathlib.Path(sys.argv[1]), sys.argv[2]
    ours, theirs = runs_of(out)
    if not ours or len(ours[0][3]) < 2:
        sys.exit(f"{out}/grpo has no validations: did the run end?")
    rise = before_after(out / "grpo", "generated problems, held out")
    gsm8k = [validations(out / f"gsm8k_{when}/metrics.jsonl") for when in ("before", "after")]
    if all(gsm8k):
        print(f"GSM8K test: {100 * gsm8k[0][-1][1]:.1f} % -> {100 * gsm8k[1][-1][1]:.1f} %")
    if theirs:
        compare(ours, theirs)
        distances(ours, theirs)
    try:
        draw(out, picture, ours, theirs)
    except ImportError:
        print("no curves: this Python has no matplotlib")
    sys.exit(0 if rise >= BAR else 1)


main()
