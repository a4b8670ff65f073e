"""The programs of examples/: GRPO and PPO give the bits of `verlc ppo` with the same keys and
go on from its checkpoints, best-of-n distillation learns; each is short. A program of one's
own builds with a C compiler and verlc.pc, and what it does wrong is one line."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, ENV, VERLC, Scratch, Tests, had_ended, met, run, series, state  # noqa: E402

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(VERLC).resolve().parent
ACTOR = "actor_rollout_ref.actor."


def example(name, args, **kw):
    """The example with the keys of a `verlc ppo` line."""
    return subprocess.run([BUILD / "examples" / name, *map(str, args[1:])], capture_output=True, text=True, timeout=600, env=ENV,
                          **kw)


def short(test):
    files = sorted((ROOT / "examples").glob("*.c"))
    test("four examples", [f.stem for f in files] == ["best_of_n", "grpo", "one_step_off", "ppo"], files)
    for f in files:
        n = len(f.read_text().splitlines())
        test(f"{f.name}: {n} lines", n < 60)


def without(args, *keys):
    """The line less keys that the example sets itself."""
    return [a for a in args if not a.startswith(tuple(k + "=" for k in keys))]


def same_bits(s, test):
    run(*s.ppo("grpo_ppo"))
    own = ("algorithm.adv_estimator", ACTOR + "use_kl_loss")
    p = example("grpo", without(s.ppo("grpo_c"), *own))
    test("grpo.c runs", p.returncode == 0, p.stderr[-500:])
    test("grpo.c: the bits of verlc ppo", state(s.dir / "grpo_c", 6) == state(s.dir / "grpo_ppo", 6))
    names = ("critic/rewards/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "training/global_step")
    test("grpo.c: its metrics", all(series(s.dir / "grpo_c", n) == series(s.dir / "grpo_ppo", n) for n in names))
    p = example("grpo", without(s.ppo("grpo_ranks", trainer__device="cpu", trainer__ranks=2), *own))
    test("grpo.c on two ranks: the same bits",
         p.returncode == 0 and state(s.dir / "grpo_ranks", 6) == state(s.dir / "grpo_ppo", 6), p.stderr[-500:])
    example("grpo", without(s.ppo("grpo_half", trainer__total_training_steps=3), *own))
    run(*s.ppo("grpo_half"))
    test("verlc ppo goes on from grpo.c's checkpoint to the same bits",
         state(s.dir / "grpo_half", 6) == state(s.dir / "grpo_ppo", 6))
    interrupted(s, test, own)
    gae = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4,
           ACTOR + "use_kl_loss": False, "trainer.total_training_steps": 3, "trainer.critic_warmup": 2}
    run(*s.ppo("gae_ppo", **gae))
    p = example("ppo", without(s.ppo("gae_c", **gae), "algorithm.adv_estimator"))
    test("ppo.c runs", p.returncode == 0, p.stderr[-500:])
    both = ("actor", "critic")
    test("ppo.c: the bits of verlc ppo, critic and all", state(s.dir / "gae_c", 3, both) == state(s.dir / "gae_ppo", 3, both))


def interrupted(s, test, own):
    """A signal in mid-run: the last whole step is saved, and the rest gives the unbroken run's bits."""
    def one(_):
        """None: it had ended before the signal came."""
        shutil.rmtree(s.dir / "grpo_int", ignore_errors=True)
        p = subprocess.Popen([BUILD / "examples/grpo", *map(str, without(s.ppo("grpo_int", trainer__save_freq=-1), *own)[1:])],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
        for line in p.stdout:
            if line.startswith("step:2 "):
                p.send_signal(signal.SIGINT)
                break
        err = p.communicate(timeout=300)[1]
        return None if had_ended(p, err, signal.SIGINT) else (p.returncode, err)

    code, err = met(one) or (0, "never in time")
    test("grpo.c: SIGINT ends it with 130, one line and the state", code == 130 and err.count("error: ") == 1 and
         len(list((s.dir / "grpo_int").glob("global_step_*"))) == 1, f"{code} {err[-400:]}")
    example("grpo", without(s.ppo("grpo_int"), *own))
    test("grpo.c: resumed to the unbroken run's bits", state(s.dir / "grpo_int", 6) == state(s.dir / "grpo_ppo", 6))


def best_of_n(s, test):
    (s.dir / "digits.py").write_text(DIGITS_REWARD)
    steps = 30
    keys = {"reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "data.train_batch_size": 16,
            "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 4, ACTOR + "ppo_mini_batch_size": 16,
            ACTOR + "optim.lr": 3e-3,
            ACTOR + "ppo_micro_batch_size_per_gpu": 16, "trainer.total_training_steps": steps, "trainer.save_freq": -1}
    p = example("best_of_n", without(s.ppo("best", **keys), "algorithm.adv_estimator", ACTOR + "use_kl_loss"))
    test("best_of_n.c runs", p.returncode == 0, p.stderr[-500:])
    reward = series(s.dir / "best", "critic/score/mean")
    first, last = sum(reward[:3]) / 3, sum(reward[-3:]) / 3
    print(f"best of n: mean score {first:.3f} -> {last:.3f} in {steps} steps")
    test("best_of_n.c learns", len(reward) == steps and first < 0.4 and last > 0.7, f"{first} -> {last}")


PROGRAM = """#include <verlc.h>
int main(int argc, char **argv) {
    struct verlc *v = verlc_open(NULL, argc, argv);
    struct verlc_batch *b = verlc_batch_create();
    %s
    verlc_batch_free(b);
    return verlc_close(v);
}
"""
STEP = "while (verlc_begin_step(v)) { verlc_rollout(v, b); %s verlc_end_step(v, b); }"
MISTAKES = [
    ("a stage out of order", STEP % "verlc_advantage(v, b);", 2, ["verlc_advantage", "token_level_scores", "verlc_reward"]),
    ("a reference that is not there", STEP % "verlc_reward(v, b); verlc_log_probs(v, VERLC_REF, b);", 2,
     ["no reference", "use_kl_loss"]),
    ("a critic that is not there", STEP % "verlc_values(v, b);", 2, ["no critic", "adv_estimator=gae"]),
    ("an update without advantages", STEP % "verlc_log_probs(v, VERLC_ACTOR, b); verlc_update(v, VERLC_ACTOR, b);", 2,
     ["no column advantages", "verlc_advantage"]),
    ("a stage outside a step", "verlc_rollout(v, b);", 2, ["verlc_rollout", "verlc_begin_step"]),
    ("a step that was not ended", "verlc_begin_step(v); verlc_begin_step(v);", 2, ["verlc_end_step"]),
    ("a column of no batch", "struct verlc_column c; verlc_begin_step(v); verlc_column(v, b, \"socre\", &c);", 2,
     ["no column socre"]),
    ("a row of no batch", "verlc_begin_step(v); verlc_rollout(v, b); verlc_select(v, b, (int64_t[]){99}, 1, b);", 2, ["row 99"]),
    ("a checkpoint of nothing", "verlc_save(v);", 2, ["no step was done"]),
]
SAVES = """if (verlc_begin_step(v)) {
        verlc_rollout(v, b); verlc_reward(v, b); verlc_log_probs(v, VERLC_ACTOR, b); verlc_advantage(v, b);
        verlc_update(v, VERLC_ACTOR, b); verlc_end_step(v, b); verlc_save(v); verlc_save(v); }"""


def build(s, name, body):
    """The program, built as docs/extending.md says."""
    (s.dir / f"{name}.c").write_text(PROGRAM % body)
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", BUILD / "verlc.pc"], capture_output=True, text=True,
                           check=True).stdout.split()
    subprocess.run(["cc", s.dir / f"{name}.c", "-o", s.dir / name, *flags], check=True)
    return s.dir / name


def own_programs(s, test):
    keys = {ACTOR + "use_kl_loss": False, "trainer.total_training_steps": 2, "trainer.save_freq": -1}
    for i, (name, body, status, words) in enumerate(MISTAKES):
        p = subprocess.run([build(s, f"mistake{i}", body), *map(str, s.ppo(f"run{i}", **keys)[1:])], capture_output=True, text=True,
                           timeout=300, env=ENV)
        test.refused(name, p, status, *words)
    program = build(s, "saves", SAVES)
    p = subprocess.run([program, *map(str, s.ppo("saved", **keys)[1:])], capture_output=True, text=True, timeout=300, env=ENV)
    test("verlc_save saves", p.returncode == 0 and len(state(s.dir / "saved", 1)) == 3, p.stderr[-400:])
    p = subprocess.run([program, "--cfg", "job"], capture_output=True, text=True, timeout=60, env=ENV)
    test("--cfg job is answered", p.returncode == 0 and "adv_estimator: gae" in p.stdout, p.stderr)
    p = subprocess.run([program, "no.such.key=1"], capture_output=True, text=True, timeout=60, env=ENV)
    test.refused("an unknown key", p, 2, "no.such.key")
    p = example("grpo", s.ppo("rloo", algorithm__adv_estimator="nosuch"))
    test.refused("the command line is over the program's own keys", p, 2, "nosuch")


def main():
    test = Tests()
    with Scratch() as s:
        short(test)
        same_bits(s, test)
        best_of_n(s, test)
        own_programs(s, test)
    test.end()


main()
