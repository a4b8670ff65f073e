"""`verlc explain`: a metric, a key, an early warning, an unknown name, and the pages that it makes. That
every metric which a run reports has its text is checked at the end of each test that uses Scratch."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from verlc_test import Tests, run  # noqa: E402


def main():
    test = Tests()
    one = run("explain", "critic/vf_explained_var").stdout
    test("a metric: what it is and how to read it", "var(returns - values)" in one and "worse than a constant" in one, one)
    test("a pattern speaks for its names", "bootstrap" in run("explain", "val-core/my/data/acc/maj@8/mean").stdout)
    test("a key", "passes over the training data" in run("explain", "trainer.total_epochs").stdout)
    test.refused("an unknown name", run("explain", "actor/nothing", check=False), 2, "actor/nothing", "verlc explain")
    page = run("explain", "--markdown").stdout
    test("an early warning", "DAPO" in run("explain", "entropy_collapse").stdout)
    test("unusual values", "| `actor_rollout_ref.actor.optim.lr` | 1e-10 to 0.1 |" in run("explain", "unusual_value").stdout)
    test("docs/warnings.md is what the program prints",
         run("explain", "--warnings").stdout == (ROOT / "docs/warnings.md").read_text())
    test("docs/metrics.md is what the program prints", page == (ROOT / "docs/metrics.md").read_text())
    test("a metric: what it is, how to read it", "var(returns - values)" in one and "worse than a constant" in one, one)
    test.end()


main()
