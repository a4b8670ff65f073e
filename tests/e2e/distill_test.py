"""On-policy distillation: a teacher learns sums by SFT, and a smaller student of random weights, that is paid
nothing for being right, learns them from the teacher's distribution on its own samples. Then every loss mode, what a
step records, that it resumes to the same bits, and the refusals. Seeded: the same numbers each time."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, series, state  # noqa: E402

SUMS = [(a, b) for a in range(5) for b in range(5)]
EXACT = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
'''
TEACHER = "distillation.teacher_models.teacher_model.model_path"
LOSS = "distillation.distillation_loss."
STUDENT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}


def make_models(s):
    chat = [{"messages": [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]} for a,
            b in SUMS]
    rows = [{"data_source": "sums", "prompt": c["messages"][:1], "ability": "math", "extra_info": {"index": i},
             "reward_model": {"style": "rule", "ground_truth": c["messages"][1]["content"]}} for i, c in enumerate(chat)]
    s.write("sums.jsonl", rows)
    (s.dir / "exact.py").write_text(EXACT)
    run("sft", f"data.train_files={s.write('chat.jsonl', chat)}", "data.train_batch_size=25", "data.max_length=64",
        "data.max_token_len_per_gpu=2048", f"model.path={s.dir / 'model'}", "engine.dtype=float32", "optim.lr=1e-3",
        "trainer.total_training_steps=120", "trainer.test_freq=-1", "trainer.save_freq=120",
        f"trainer.default_local_dir={s.dir / 'sft'}", "trainer.logger=[console]")
    config = {**json.loads((s.dir / "model/config.json").read_text()), **STUDENT}
    (s.dir / "student.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / "student.json", "--tokenizer", s.dir / "model", "--out", s.dir / "student", "--seed", 3)


def distill(s, name, teacher="sft/global_step_120/actor", **keys):
    args = {"actor_rollout_ref.model.path": s.dir / "student", "data.train_files": s.dir / "sums.jsonl",
            "data.val_files": s.dir / "sums.jsonl",
            "reward.custom_reward_function.path": s.dir / "exact.py", "reward.num_workers": 1, "data.train_batch_size": 12,
            "data.max_prompt_length": 32, "data.max_response_length": 6, "actor_rollout_ref.actor.ppo_mini_batch_size": 12,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 12, "actor_rollout_ref.actor.use_kl_loss": False,
            "actor_rollout_ref.actor.optim.lr": 2e-3, "distillation.enabled": True, TEACHER: s.dir / teacher,
            LOSS + "loss_mode": "forward_kl_topk", LOSS + "topk": 16, LOSS + "use_task_rewards": False, "trainer.save_freq": -1,
            "trainer.total_epochs": 1000, **keys}
    return s.ppo(name, **args)


def learns(s, test):
    steps = 200
    p = run(*distill(s, "learn", **{"trainer.total_training_steps": steps, "actor_rollout_ref.rollout.n": 4}))
    reward, loss, overlap = (series(s.dir / "learn", n)
                             for n in ("critic/score/mean", "actor/distillation/loss", "actor/distillation/overlap_ratio"))
    first, last = sum(reward[:5]) / 5, sum(reward[-5:]) / 5
    print(f"forward_kl_topk: mean reward {first:.3f} -> {last:.3f} in {steps} steps; loss {loss[0]:.3f} -> {loss[-1]:.4f}")
    test("a student of random weights is right by chance at most", first < 0.2, f"{first}")
    test("it learns the teacher's sums without being paid for them", last > 0.8, f"{first} -> {last}")
    test("the loss falls to nearly none", loss[-1] < 0.1 * loss[0], f"{loss[0]} -> {loss[-1]}")
    test("the lists come together", overlap[-1] > overlap[0], f"{overlap[0]} -> {overlap[-1]}")
    mass = series(s.dir / "learn", "actor/distillation/student_mass")
    test("the student's mass moves to the teacher's tokens", mass[-1] > 0.95 > mass[0], f"{mass[0]} -> {mass[-1]}")
    test("the plan counts the teacher", "teacher weights" in p.stderr and "teacher log-probs" in p.stderr)
    test("no policy loss is computed", not series(s.dir / "learn", "actor/pg_loss"))


def every_loss(s, test):
    own = "actor/distillation/"
    common = [own + "loss", own + "loss_min", own + "loss_max"]
    lists = common + [f"{own}{who}_mass{which}" for who in ("student", "teacher") for which in ("", "_min", "_max")] + [
        own + "overlap_ratio", own + "overlap_token_advantage"]
    estimators = common + [own + "abs_loss"]
    clip = [own + "pg_clipfrac", own + "ppo_kl", own + "pg_clipfrac_lower"]
    modes = [("reverse_kl_topk", {}, lists), ("jsd_topk", {LOSS + "topk": 512}, lists),
             ("k3", {LOSS + "use_task_rewards": True}, estimators), ("k1", {LOSS + "use_policy_gradient": True}, estimators + clip),
             ("forward_kl_topk", {LOSS + "use_task_rewards": True, LOSS + "distillation_loss_coef": 0.5, LOSS + "loss_max_clamp": 5,
                                  LOSS + "log_prob_min_clamp": -12}, lists)]
    for mode, more, names in modes:
        run(*distill(s, mode, **{LOSS + "loss_mode": mode, "trainer.total_training_steps": 3, **more}))
        values = {n: series(s.dir / mode, n) for n in names}
        test(f"{mode}: verl's metrics, every step", all(len(v) == 3 for v in values.values()), str(values))
        test(f"{mode}: the update moves the student", all(n > 0 for n in series(s.dir / mode, "actor/grad_norm")))
        if "actor/distillation/teacher_mass" in names:
            low, high = min(values["actor/distillation/teacher_mass_min"]), max(values["actor/distillation/teacher_mass_max"])
            test(f"{mode}: the teacher's mass is a probability", 0 < low <= high < 1 + 1e-5, f"{low}, {high}")
        shutil.rmtree(s.dir / mode)
    run(*distill(s, "self", teacher="student", **{LOSS + "loss_mode": "reverse_kl_topk", LOSS + "topk": 512,
                                                  "trainer.total_training_steps": 1}))
    test("a student that is its own teacher has nothing to learn", abs(series(s.dir / "self", own + "loss")[0]) < 1e-6 and
         series(s.dir / "self", own + "overlap_ratio") == [1.0] and series(s.dir / "self", "actor/grad_norm")[0] < 1e-4,
         str(series(s.dir / "self", "actor/grad_norm")))


def resumes(s, test):
    keys = {"trainer.save_freq": 2, "trainer.total_training_steps": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 6}
    run(*distill(s, "whole", **keys))
    run(*distill(s, "parts", **{**keys, "trainer.total_training_steps": 2}))
    run(*distill(s, "parts", **keys))
    test("a resumed run ends in the bits of an unbroken one", state(s.dir / "whole", 4)["optim/actor.safetensors"] ==
         state(s.dir / "parts", 4)["optim/actor.safetensors"])
    run(*distill(s, "cut", **{**keys, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 3, "trainer.total_training_steps": 1,
                              "distillation.teacher_models.teacher_model.inference.max_num_batched_tokens": 1}))
    a, b = (series(s.dir / d, "actor/distillation/loss")[0] for d in ("whole", "cut"))
    test("micro-batches do not change the loss", abs(a - b) < 1e-4 * abs(a), f"{a}, {b}")


def refusals(s, test):
    def refused(what, status, words, **keys):
        test.refused(what, run(*distill(s, "no", **{"trainer.total_training_steps": 1, **keys}), check=False), status, *words)
    refused("no teacher", 2, [TEACHER], **{TEACHER: "null"})
    refused("a teacher that is not there", 3, [TEACHER], **{TEACHER: s.dir / "none"})
    refused("an unknown loss", 2, ["loss_mode", "k33", "jsd_topk"], **{LOSS + "loss_mode": "k33"})
    refused("k1 differentiated", 2, ["k1", "use_policy_gradient=True"], **{LOSS + "loss_mode": "k1"})
    refused("a list longer than the vocabulary", 2, ["topk=600", "512"], **{LOSS + "topk": 600})
    refused("an empty list", 2, ["topk=0"], **{LOSS + "topk": 0})
    refused("another policy loss", 2, ["policy_loss_mode=gspo", "vanilla"], **{LOSS + "policy_loss_mode": "gspo"})
    other = s.dir / "other"
    shutil.copytree(s.dir / "student", other)
    text = (other / "tokenizer.json").read_text()
    vocab = json.loads(text)["model"]["vocab"]
    token = next(t for t, i in vocab.items() if i == 300)
    vocab = json.loads(text)
    vocab["model"]["vocab"] = {("zz" + t if t == token else t): i for t, i in vocab["model"]["vocab"].items()}
    vocab["model"]["merges"] = [m for m in vocab["model"]["merges"]
                                if "".join(m if isinstance(m, list) else m.split(" ")) != token and token not in m]
    (other / "tokenizer.json").write_text(json.dumps(vocab))
    refused("a teacher with another tokenizer", 3, ["tokenizer", "token 300"], **{TEACHER: other})


def main():
    test = Tests()
    with Scratch() as s:
        make_models(s)
        learns(s, test)
        every_loss(s, test)
        resumes(s, test)
        refusals(s, test)
    test.end()


main()
