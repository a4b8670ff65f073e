"""The end of `make learn-gpu`: accuracy before and after GRPO from the runs' metrics, and the
curves as a picture (with matplotlib; without it the numbers alone).

  python tools/learn_plot.py LEARN_DIR PICTURE

Exit status 1: held-out accuracy on generated problems rose by less than 15 points."""

import json
import pathlib
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


def draw(out, picture, reward, held_out, torch):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(14, 4))
    loss = curve(metrics(out / "sft/metrics.jsonl"), "train/loss")
    axes[0].plot(*zip(*loss)) if loss else None
    axes[0].set(title="supervised training", xlabel="step", ylabel="loss")
    for ax, title, ours, key in ((axes[1], "GRPO: reward of the samples", reward, "reward"),
                                 (axes[2], "GRPO: accuracy, held out", held_out, "accuracy")):
        ax.plot(*zip(*ours), label="verlc")
        theirs = curve(torch, key)
        if theirs:
            ax.plot(*zip(*theirs), label="torch loop")
        ax.set(title=title, xlabel="step", ylim=(0, 1))
        ax.legend()
    fig.tight_layout()
    fig.savefig(picture, dpi=110)
    print(f"curves: {picture}")


def main():
    out, picture = pathlib.Path(sys.argv[1]), sys.argv[2]
    reward = curve(metrics(out / "grpo/metrics.jsonl"), "critic/rewards/mean")
    held_out = validations(out / "grpo/metrics.jsonl")
    gsm8k = [validations(out / f"gsm8k_{when}/metrics.jsonl") for when in ("before", "after")]
    if len(held_out) < 2 or not reward:
        sys.exit(f"{out}/grpo has no validations: did the run end?")
    torch = metrics(out / "torch.jsonl")
    rise = held_out[-1][1] - held_out[0][1]
    print(f"generated problems, held out: {held_out[0][1]:.3f} -> {held_out[-1][1]:.3f} ({100 * rise:+.1f} points)")
    if all(gsm8k):
        print(f"GSM8K test: {gsm8k[0][-1][1]:.3f} -> {gsm8k[1][-1][1]:.3f}")
    if torch:
        theirs = curve(torch, "accuracy")
        print(f"the torch loop from the same start: {theirs[0][1]:.3f} -> {theirs[-1][1]:.3f}")
    try:
        draw(out, picture, reward, held_out, torch)
    except ImportError:
        print("no curves: this Python has no matplotlib")
    sys.exit(0 if rise >= BAR else 1)


main()
