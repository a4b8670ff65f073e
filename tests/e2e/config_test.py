"""What a key does is done or said: devices that are asked for and not there, seeds of one thing alone, keys without effect."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

FEW = {"trainer__total_training_steps": 1, "trainer__save_freq": 0, "trainer__logger": "[console]"}


def sft(s, **keys):
    args = {"model.path": s.dir / "model", "data.train_files": s.dir / "sft.jsonl", "data.train_batch_size": 4,
            "engine.dtype": "bf16", "data.max_length": 64, "trainer.total_training_steps": 1, "trainer.save_freq": 0,
            "trainer.logger": "[console]", "trainer.default_local_dir": s.dir / "sft"}
    args.update({k.replace("__", "."): v for k, v in keys.items()})
    return run("sft", *[f"{k}={v}" for k, v in args.items()], check=False)


def check_devices(s, test):
    """One line says what is used; verl's default of 8 says nothing."""
    said = "1 CPU rank (trainer.device=cpu), not the 4 GPUs asked for"
    asked = {"trainer__n_gpus_per_node": 2, "trainer__nnodes": 2, "trainer__device": "cpu"}
    four = {"data__train_batch_size": 8, "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
            "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}
    p = run(*s.ppo("four", **FEW, **asked, **four), check=False)
    test("ppo: 4 devices asked for, 1 used", p.returncode == 0 and p.stderr.count(said) == 1, p.stderr[-500:])
    p = run("plan", *s.ppo("four", **FEW, **asked, **four)[1:], check=False)
    test("plan: the same line", said in p.stderr, p.stderr[-500:])
    p = run(*[a for a in s.ppo("one", **FEW) if not a.startswith("trainer.n")], check=False)
    test("ppo: verl's default of n_gpus_per_node says nothing", p.returncode == 0 and "asked for" not in p.stderr, p.stderr[-300:])
    p = sft(s, **asked)
    test("sft: the same line", p.returncode == 0 and said in p.stderr, p.stderr[-500:])
    test("sft: engine.dtype=bf16 is a dtype, one device says nothing", sft(s).returncode == 0 and "asked for" not in sft(s).stderr)
    test.refused("sft: a batch that the devices do not divide", sft(s, trainer__n_gpus_per_node=3), 2, "data.train_batch_size (4)",
                 "(3)")
    p = run("plan", "sft", f"model.path={s.dir}/model", "data.max_length=64", "trainer.n_gpus_per_node=8", check=False)
    planned = p.returncode == 0 and "memory plan: sft" in p.stdout and "not the 8 GPUs asked for" in p.stderr
    test("plan sft: its plan, and the same line", planned, p.stdout + p.stderr)


def samples(s, run_dir, **keys):
    """{prompt: outputs} of the first step, of every row of a small data set, so that their order decides nothing."""
    out = s.dir / run_dir / "rollouts"
    p = run(*s.ppo(run_dir, **FEW, data__train_files=s.dir / "few.jsonl", data__train_batch_size=8,
                   trainer__rollout_data_dir=out, **keys), check=False)
    rows = [json.loads(line) for f in sorted(out.glob("*.jsonl")) for line in f.read_text().splitlines()]
    assert len(rows) == 16, p.stderr
    by = {}
    for r in rows:
        by.setdefault(r["input"], []).append(r["output"])
    return {k: sorted(v) for k, v in by.items()}, [r["input"] for r in rows]


def check_seeds(s, test):
    s.write("few.jsonl", [s.row(i) for i in range(8)])
    a, order_a = samples(s, "a", trainer__seed=3)
    b, order_b = samples(s, "b", trainer__seed=3, data__seed=3)
    c, order_c = samples(s, "c", trainer__seed=3, data__seed=4)
    d, _ = samples(s, "d", trainer__seed=4, data__seed=3)
    test("data.seed: unset is trainer.seed", (a, order_a) == (b, order_b))
    test("data.seed: another gives another order and the same samples", a == c and order_a != order_c)
    test("trainer.seed: another gives other samples", a != d)
    for key in "actor_rollout_ref.actor.data_loader_seed", "critic.data_loader_seed":
        p = run(*s.ppo("null", **FEW), f"{key}=null", check=False)
        test(f"{key}=null is trainer.seed", p.returncode == 0, p.stderr[-300:])


def check_said(s, test):
    p = run(*s.ppo("gen", **FEW, data__gen_batch_size=16), check=False)
    said = p.returncode == 0 and "data.gen_batch_size=16 has no effect" in p.stderr
    test("data.gen_batch_size without filter_groups is said", said, p.stderr[-300:])
    teacher = {"distillation__enabled": True, "distillation__teacher_models__teacher_model__model_path": s.dir / "model"}
    p = run(*s.ppo("two", **FEW, **teacher), f"+distillation.teacher_models.math.model_path={s.dir}/model", check=False)
    test.refused("a second teacher is refused by name", p, 2, "distillation.teacher_models.math")
    p = run(*s.ppo("kl", **FEW, actor_rollout_ref__actor__kl_loss_type="k9"), check=False)
    test.refused("an unknown kl_loss_type names its key", p, 2, "actor_rollout_ref.actor.kl_loss_type", "k9")


def check_last_step(s, test):
    """verl's default save_freq=-1 leaves the last step; 0 leaves none and says so at the start and at the end."""
    two = {"trainer__total_training_steps": 2, "trainer__logger": "[console]"}
    p = run(*s.ppo("last", **two, trainer__save_freq=-1))
    saved = [d.name for d in (s.dir / "last").glob("global_step_*")]
    test("save_freq=-1: the last step alone is saved", saved == ["global_step_2"], f"{saved} {p.stderr[-300:]}")
    p = run(*s.ppo("none", **two, trainer__save_freq=0))
    test("save_freq=0: none, said at the start and at the end", not [*(s.dir / "none").glob("global_step_*")] and
         p.stderr.count("trainer.save_freq=0") == 2, p.stderr[-500:])


def check_home(s, test):
    """~ in every key that names a file or a directory is the home directory, for what is read and what is written."""
    home = {"HOME": str(s.dir)}
    files = {"data__train_files": "~/train.jsonl", "data__val_files": "[~/test.jsonl]"}
    two = {"trainer__total_training_steps": 2, "trainer__test_freq": 2, "trainer__default_local_dir": "~/home/run",
           "trainer__rollout_data_dir": "~/home/rollouts", "trainer__validation_data_dir": "~/home/validations",
           "actor_rollout_ref__model__path": "~/model", "actor_rollout_ref__model__tokenizer_path": "~/model",
           "critic__model__path": "~/model", "critic__ppo_micro_batch_size_per_gpu": 4, "algorithm__adv_estimator": "gae",
           "reward__custom_reward_function__path": "~/score.py"}
    (s.dir / "score.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                    "    return 1\n")
    p = run(*s.ppo("home", **files, **two), check=False, env=home, cwd=s.dir)
    made = sorted(f.name for f in (s.dir / "home").glob("*")) if p.returncode == 0 else p.stderr[-500:]
    test("ppo: ~ in its paths", made == ["rollouts", "run", "validations"], made)
    p = run(*s.ppo("home", **files, **{**two, "trainer__resume_mode": "resume_path", "trainer__total_training_steps": 3,
                                       "trainer__resume_from_path": "~/home/run/global_step_2"}), check=False, env=home, cwd=s.dir)
    test("ppo: ~ in resume_from_path", p.returncode == 0 and (s.dir / "home/run/global_step_3").is_dir(), p.stderr[-500:])
    p = run("sft", "model.path=~/model", "data.train_files=~/sft.jsonl", "data.train_batch_size=4", "data.max_length=64",
            "trainer.total_training_steps=1", "trainer.logger=[file]", "trainer.default_local_dir=~/home/sft", check=False,
            env=home, cwd=s.dir)
    test("sft: ~ in its paths", p.returncode == 0 and (s.dir / "home/sft/global_step_1").is_dir(), p.stderr[-500:])
    test("no directory is named ~", not list(s.dir.rglob("~*")), list(s.dir.rglob("~*")))


def main():
    test = Tests()
    with Scratch(n_train=16) as s:
        s.write("sft.jsonl", [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
                              for i in range(8)])
        check_devices(s, test)
        check_seeds(s, test)
        check_said(s, test)
        check_last_step(s, test)
        check_home(s, test)
    test.end()


main()
