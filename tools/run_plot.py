"""The curves of a run as a picture: reward, validation accuracy, KL loss, entropy, gradient norm, response length.

  python tools/run_plot.py RUN/run.db PICTURE.png

Reads the table `metrics` of a run's database, also while the run goes on; needs matplotlib. A metric that the run has
not is left out; exit status 1 where it has none."""

import pathlib
import sqlite3
import sys

PANELS = [("critic/rewards/mean", "mean reward of the samples"), ("val-core/%", "validation"),
          ("actor/kl_loss", "KL from the reference"), ("actor/entropy", "entropy"), ("actor/grad_norm", "gradient norm"),
          ("response_length/mean", "tokens of a response"), ("train/zero_variance_groups", "share of groups all alike"),
          ("perf/throughput", "tokens a second")]
WINDOW = 10  # steps of the running mean


def curves(db, pattern):
    """{name: [(step, value)]} of the metrics that match."""
    found = {}
    for name, step, value in db.execute("SELECT name, step, value FROM metrics WHERE name LIKE ? ORDER BY name, step", [pattern]):
        found.setdefault(name, []).append((step, value))
    return found


def running_mean(points):
    return [(s, sum(v for _, v in points[max(0, i - WINDOW + 1):i + 1]) / min(WINDOW, i + 1)) for i, (s, _) in enumerate(points)]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    db = sqlite3.connect(f"{pathlib.Path(sys.argv[1]).absolute().as_uri()}?mode=ro", uri=True)
    panels = [(title, found) for pattern, title in PANELS if (found := curves(db, pattern))]
    if not panels:
        sys.exit(f"{sys.argv[1]} has none of these metrics yet")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = (len(panels) + 3) // 4
    fig, axes = plt.subplots(rows, min(4, len(panels)), figsize=(14, 3 * rows), squeeze=False)
    for ax in axes.flat[len(panels):]:
        ax.axis("off")
    for ax, (title, found) in zip(axes.flat, panels):
        for i, (name, points) in enumerate(found.items()):
            each_step = len(points) > 2 * WINDOW
            ax.plot(*zip(*points), color=f"C{i}", alpha=0.3 if each_step else 1, lw=1.2, marker=None if each_step else ".")
            if each_step:
                ax.plot(*zip(*running_mean(points)), color=f"C{i}", lw=1.5)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(", ".join(found) if len(found) == 1 else "step", fontsize=8)
        ax.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(sys.argv[2], dpi=70)


main()
