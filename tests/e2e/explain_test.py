"""`verlc explain`: a metric, a key, an early warning, an unknown name, and the pages that it makes. That
every metric which a run reports has its text is checked at the end of each test that uses Scratch."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from verlc_test import Scratch, Tests, run  # noqa: E402


def told(name):
    """What explain says of a name, without its line ends."""
    return " ".join(run("explain", name).stdout.split())


def keys(test):
    text = told("actor_rollout_ref.actor.optim.lr")
    want = ["peak learning rate", "a number from 0 to 1e3", "default 1.0e-06", "used by ppo,", "in verl the same name",
            "learning_rate", "change it the first to try", "related actor_rollout_ref.actor.optim.lr_warmup_steps"]
    test("a key: meaning, type, default, programs, names, advice, related keys", all(w in text for w in want), text)
    test("a key of an enumeration has its values", "values gae grpo " in told("algorithm.adv_estimator"))
    test("a key that verl has not", "in verl no such key: it is verlc's" in told("reward.grader"))
    test("a key without effect, an older name", "accepted, without effect" in told("actor_rollout_ref.actor.strategy")
         and "older name of reward.reward_manager.name" in told("reward_model.reward_manager"))
    text = told("data.max_response_length")
    test("a key whose value is the default of others",
         "default of" in text and "actor_rollout_ref.rollout.response_length" in text, text)
    text = told("actor/entropy")
    test("a metric that is watched: when a run warns, and what helps", "Warning entropy_collapse" in text and "What helps: "
         "actor_rollout_ref.actor.clip_ratio_high=0.28" in text, text)


def parts_of_names(test):
    text = run("explain", "lr").stdout
    test("the end of a name lists the keys that have it", "\n  optim.lr\n" in text and "actor/lr" in text and
         "\n  actor_rollout_ref.actor.optim.lr\n" in text, text)
    test("a key without its first part", told("actor.optim.lr").startswith("actor_rollout_ref.actor.optim.lr (key)"))
    test("rollout.n is that of ppo, whatever verl's generation had",
         told("rollout.n").startswith("actor_rollout_ref.rollout.n (key)"))
    test("a value of a key", "GRPO is a value of algorithm.adv_estimator" in told("GRPO"))
    test.refused("a slip", run("explain", "trainer.total_epohcs", check=False), 2, "did you mean trainer.total_epochs?")


def tutorial(test):
    """The last column of the tutorial's table of hyper-parameters is what explain says of each row's first key."""
    page = (ROOT / "docs/tutorial.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)`.*\| (.+) \|$", page[page.index("What each hyper-parameter does"):], re.M)
    full = {"actor": "actor_rollout_ref.actor", "rollout": "actor_rollout_ref.rollout"}
    wrong = []
    for key, when in rows:
        first, rest = key.split(".", 1)
        if " ".join(when.replace("`", "").split()) not in told(f"{full.get(first, first)}.{rest}"):
            wrong.append((key, when))
    test("the tutorial's table", len(rows) >= 18 and not wrong, str(wrong))


def values(test):
    """Keys of key_advice.def exist; each value is one that the refusal of a wrong one names."""
    rows = (ROOT / "src/conf/keys/key_advice.def").read_text()
    notes = re.findall(r'^(VALUES|ADVICE)\("([^"]+)", "([^"]*)"(?:, "([^"]*)")?\)', rows, re.M)
    table = run("ppo", "--help", "all").stdout
    names = {k for _, key, _, related in notes for k in [key, *related.split()]}
    unknown = [k for k in sorted(names) if f"\n{k}=" not in table and f"\n+{k}=" not in table]
    test("key_advice.def: every key is one", len(notes) > 25 and not unknown, str(unknown))
    with Scratch(n_train=4, n_test=2) as s:
        more = {"algorithm.kl_penalty": ["algorithm.use_kl_in_reward=True"],
                "critic.loss_agg_mode": ["algorithm.adv_estimator=gae", f"critic.model.path={s.dir / 'model'}"],
                "distillation.distillation_loss.loss_mode": [
                    "distillation.enabled=True", f"distillation.teacher_models.teacher_model.model_path={s.dir / 'model'}"]}
        for kind, key, words, _ in notes:
            if kind == "VALUES" and key not in ("trainer.device", "trainer.logger"):
                said = run("plan", *s.ppo("x")[1:], *more.get(key, []), f"{key}=nonsense", check=False)
                lacks = [w for w in words.split() if w.rstrip("+") not in said.stderr and w != "null"]
                test(f"values of {key}", said.returncode == 2 and not lacks, f"{lacks} {said.stderr[-500:]}")


def main():
    test = Tests()
    one = run("explain", "critic/vf_explained_var").stdout
    test("a metric: what it is and how to read it", "var(returns - values)" in one and "worse than a constant" in one, one)
    test("a pattern speaks for its names", "bootstrap" in run("explain", "val-core/my/data/acc/maj@8/mean").stdout)
    test("a key", "passes over the training data" in run("explain", "trainer.total_epochs").stdout)
    test.refused("an unknown name", run("explain", "actor/nothing", check=False), 2, "actor/nothing", "verlc explain")
    page = run("explain", "--markdown").stdout
    test("an early warning", "DAPO" in run("explain", "entropy_collapse").stdout)
    test("unusual values", "| `actor_rollout_ref.actor.optim.lr` | 1e-10 to 0.1 |" in run("explain", "unusual_setting").stdout)
    test("docs/warnings.md is what the program prints",
         run("explain", "--warnings").stdout == (ROOT / "docs/warnings.md").read_text())
    test("docs/metrics.md is what the program prints", page == (ROOT / "docs/metrics.md").read_text())
    keys(test)
    parts_of_names(test)
    tutorial(test)
    values(test)
    test.end()


main()
