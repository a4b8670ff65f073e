"""Learning, small enough for every test run: GRPO on a dense reward raises the mean
reward from what a random model gets to nearly all, with the KL term holding it near
the reference; SFT on a rule lowers the loss until the rule is known. Seeded: the same
numbers each time, whatever the number of threads."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, Scratch, Tests, run, series  # noqa: E402

STEPS = 30

def grpo(s, test):
    (s.dir / "digits.py").write_text(DIGITS_REWARD)
    keys = {"reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "data.train_batch_size": 8,
            "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 64,
            "actor_rollout_ref.actor.optim.lr": 3e-3, "trainer.total_training_steps": STEPS, "trainer.save_freq": -1}
    run(*s.ppo("grpo", **keys))
    reward, kl, norm = (series(s.dir / "grpo", n) for n in ("critic/rewards/mean", "actor/kl_loss", "actor/grad_norm"))
    first, last = sum(reward[:3]) / 3, sum(reward[-3:]) / 3
    print(f"grpo: mean reward {first:.3f} -> {last:.3f} in {STEPS} steps; kl {kl[0]:.4f} -> {kl[-1]:.4f}")
    test("one record a step", len(reward) == STEPS, str(len(reward)))
    test("GRPO starts where a random model is", first < 0.4, f"{first}")
    test("GRPO raises the mean reward", last > 0.8 and last > first + 0.4, f"{first} -> {last}")
    test("the policy leaves the reference as it learns", kl[0] < 1e-6 < kl[-1], f"{kl[0]} -> {kl[-1]}")
    test("the gradient norm is finite and not 0", all(n > 0 for n in norm))
    run(*s.ppo("again", **{**keys, "trainer.total_training_steps": 4}), env={"VERLC_THREADS": "2"})
    test("the same seed gives the same rewards, on two threads too", series(s.dir / "again", "critic/rewards/mean") == reward[:4])
    run(*s.ppo("other", trainer__seed=99, **{**keys, "trainer.total_training_steps": 4}))
    test("another seed gives others", series(s.dir / "other", "critic/rewards/mean") != reward[:4])


def sft(s, test):
    rows = [{"messages": [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]}
            for a in range(10) for b in range(10)]
    train, val = s.write("sft.jsonl", rows), s.write("sft_val.jsonl", rows[::7])
    run("sft", f"data.train_files={train}", f"data.val_files={val}", "data.train_batch_size=20", "data.max_length=64",
        "data.max_token_len_per_gpu=2048", f"model.path={s.dir / 'model'}", "engine.dtype=float32", "optim.lr=2e-3",
        "trainer.total_training_steps=40", "trainer.test_freq=10", "trainer.save_freq=40",
        f"trainer.default_local_dir={s.dir / 'sft'}", "trainer.logger=[console,file]")
    loss, val_loss = series(s.dir / "sft", "train/loss"), series(s.dir / "sft", "val/loss")
    print(f"sft: loss {loss[0]:.3f} -> {loss[-1]:.3f}, validation {val_loss[0]:.3f} -> {val_loss[-1]:.3f}")
    test("SFT lowers the loss", loss[-1] < loss[0] / 2, f"{loss[0]} -> {loss[-1]}")
    test("SFT lowers the validation loss", val_loss[-1] < val_loss[0], str(val_loss))
    p = run("generate", "--model", s.dir / "sft/global_step_40/actor", "--dtype", "fp32",
            input=json.dumps({"messages": [{"role": "user", "content": "2 plus 3?"}], "temperature": 0, "max_tokens": 8}) + "\n")
    answer = json.loads(p.stdout)
    test("the trained model answers in the taught form and ends", answer["finish_reason"] == "stop" and
         answer["text"].strip().isdigit(), str(answer))


def main():
    test = Tests()
    with Scratch() as s:
        grpo(s, test)
        sft(s, test)
    test.end()


main()
