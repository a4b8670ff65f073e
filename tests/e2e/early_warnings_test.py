"""Early warnings of real runs: small ones that are led astray on purpose get the right one, once, in the log and in run.db; one
that learns gets none; trainer.early_warnings=False turns them off."""

import pathlib
import re
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, Scratch, Tests, run  # noqa: E402

ACTOR = "actor_rollout_ref.actor."


def said(s, test, name, p):
    """{warning: its lines on stderr}; run.db has the same."""
    found = re.findall(r"^warning: step (\d+): (\w+): (.*)$", p.stderr, re.M)
    lines = [f"{kind}: {text}" for _, kind, text in found]
    with sqlite3.connect(s.dir / name / "run.db") as db:
        events = db.execute("SELECT step, message FROM events WHERE kind='warning' ORDER BY id").fetchall()
    test(f"{name}: run.db has the log's warnings", events == [(int(step), line) for (step, _, _), line in zip(found, lines)],
         (events, lines))
    kinds = [kind for _, kind, _ in found]
    test(f"{name}: each is said once", len(kinds) == len(set(kinds)), kinds)
    return {kind: text for _, kind, text in found}


def ppo(s, test, name, **keys):
    base = {"reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "data.max_response_length": 8,
            "actor_rollout_ref.rollout.n": 4, ACTOR + "ppo_mini_batch_size": 4, ACTOR + "ppo_micro_batch_size_per_gpu": 16,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 16, "trainer.save_freq": 0,
            "trainer.total_training_steps": 12}
    return run(*s.ppo(name, **{**base, **keys}))


def unusual(s, test):
    """Numbers that are allowed and hardly meant: each is said before the model is read, by its key, and is in run.db."""
    odd = {ACTOR + "optim.lr": 999, ACTOR + "kl_loss_coef": -1, ACTOR + "clip_ratio_high": 1e9, ACTOR + "entropy_coeff": -2,
           ACTOR + "optim.weight_decay": 100, ACTOR + "optim.betas": "[0.999,0.1]", ACTOR + "grad_clip": 1e-9,
           "algorithm.gamma": 0.5, "actor_rollout_ref.rollout.temperature": 50, "actor_rollout_ref.rollout.top_k": 1,
           ACTOR + "optim.lr_warmup_steps": 1000}
    keys = {"reward.custom_reward_function.path": s.dir / "constant.py", "trainer.total_training_steps": 2, "trainer.save_freq": 0}
    p = run(*s.ppo("unusual", **{**keys, **odd}), check=False)
    lines = re.findall(r"^warning: (unusual_setting: (\S+)=.*)$", p.stderr, re.M)
    want = {k for k in odd if not k.endswith("betas")} | {ACTOR + "optim.betas.0", ACTOR + "optim.betas.1"}
    test("unusual values: each is said by its key, once", sorted(k for _, k in lines) == sorted(want), p.stderr)
    test("before the model is read", p.stderr.index("optim.lr=999 (usual: 1e-10 to 0.1)") < p.stderr.index("memory plan"), p.stderr)
    with sqlite3.connect(s.dir / "unusual/run.db") as db:
        events = [m for m, in db.execute("SELECT message FROM events WHERE kind='warning'") if m.startswith("unusual_setting")]
    test("run.db has them", sorted(events) == sorted(line for line, _ in lines), events)
    p = run(*s.ppo("usual", **keys, **{"trainer.early_warnings": False, ACTOR + "optim.lr": 999}), check=False)
    test("trainer.early_warnings=False: none", "unusual_setting" not in p.stderr, p.stderr)
    rows = s.write("odd.jsonl", [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]}] * 4)
    p = run("sft", f"model.path={s.dir / 'model'}", f"data.train_files={rows}", "data.val_files=[]", "data.train_batch_size=4",
            "trainer.total_training_steps=1", "trainer.save_freq=0", "optim.lr=5", f"trainer.default_local_dir={s.dir / 'odd'}")
    test("sft too", "unusual_setting: optim.lr=5" in p.stderr, p.stderr)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "digits.py").write_text(DIGITS_REWARD)
        (s.dir / "constant.py").write_text("def compute_score(**given):\n    return 1.0\n")
        (s.dir / "broken.py").write_text(
            "def compute_score(solution_str, **given):\n    return len(solution_str) / (0 if len(solution_str) % 2 else 1)\n")

        tiny = {"actor_rollout_ref.model.path": s.dir / "tiny"}  # the small model is slow to learn and to be led astray
        p = ppo(s, test, "learns", **tiny, **{ACTOR + "optim.lr": 3e-3, ACTOR + "ppo_mini_batch_size": 8,
                                              "data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 8})
        test("a run that learns: none", said(s, test, "learns", p) == {}, p.stderr)

        keys = {"reward.custom_reward_function.path": s.dir / "constant.py"}
        w = said(s, test, "constant", ppo(s, test, "constant", **keys))
        test("a constant reward", "all are 1" in w.get("reward_constant", "") and "zero_variance_groups" not in w, w)
        p = ppo(s, test, "off", **keys, **{"trainer.early_warnings": False, "trainer.total_training_steps": 4})
        test("trainer.early_warnings=False", said(s, test, "off", p) == {})

        w = said(s, test, "broken", ppo(s, test, "broken", **{"reward.custom_reward_function.path": s.dir / "broken.py",
                                                              "trainer.total_training_steps": 4}))
        errors = w.get("reward_errors", "")
        test("a scorer that fails on many samples", "of 16" in errors and "reward.on_error" in errors, w)

        w = said(s, test, "far", ppo(s, test, "far", **tiny, **{ACTOR + "optim.lr": 0.03, ACTOR + "ppo_mini_batch_size": 1,
                                                        ACTOR + "ppo_micro_batch_size_per_gpu": 4}))
        test("a learning rate far too high, four optimizer steps a step", {"large_update", "entropy_collapse"} < set(w), w)

        w = said(s, test, "jump", ppo(s, test, "jump", **{ACTOR + "optim.lr": 0.1, ACTOR + "optim.lr_warmup_steps": 9}))
        test("a warm-up to such a rate: KL jumps", "optim.lr" in w.get("kl_jump", ""), w)

        rows = [{"messages": [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]}
                for a in range(10) for b in range(10)]
        few, other = s.write("few.jsonl", rows[:8]), s.write("other.jsonl", rows[50:90:3])
        p = run("sft", f"data.train_files={few}", f"data.val_files={other}",
                "data.train_batch_size=8", "data.max_length=64", f"model.path={s.dir / 'model'}", "engine.dtype=float32",
                "optim.lr=3e-3", "trainer.total_training_steps=40", "trainer.test_freq=2", "trainer.save_freq=0",
                f"trainer.default_local_dir={s.dir / 'sft'}", "trainer.logger=[file]")
        w = said(s, test, "sft", p)
        test("sft on eight rows: overfitting, and nothing else", set(w) == {"overfitting"}, w)
        unusual(s, test)
    test.end()


main()
