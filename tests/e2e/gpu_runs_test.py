"""Whole runs on a GPU beside the same runs on the CPU: GRPO with an adapter, PPO with a critic, the
optimizers, and what rests in host memory.  In fp32, so that both devices draw the same tokens: the
metrics of the first steps then differ by roundings alone.  Does nothing where there is no GPU."""

import concurrent.futures
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, Scratch, Tests, has_gpu, run, series, state  # noqa: E402

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
STEPS = 4


def keys(s, device, **more):
    return {"trainer.device": device, "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "data.train_batch_size": 8,
            "data.max_response_length": 12, "actor_rollout_ref.rollout.n": 4, ACTOR + "ppo_mini_batch_size": 4,
            ACTOR + "ppo_micro_batch_size_per_gpu": 8, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
            "reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "trainer.force_old_log_prob": True,
            **more}


def start(s, pool, name, device, **more):
    """A run under way; its result when it is asked for."""
    args = s.ppo(name, **keys(s, device, **more))
    return pool.submit(lambda: run(*args))


def compare(s, test, pool, what, names, **more):
    """The same run on both devices; what is to be done when they have ended. Steps after the first start from
    weights that differ by roundings."""
    dirs = {d: f"{what.replace(' ', '_')}_{d}" for d in ("cpu", "cuda")}
    under_way = [start(s, pool, name, d, **more) for d, name in dirs.items()]

    def look():
        for u in under_way:
            u.result()
        for d, name in dirs.items():
            diff = series(s.dir / name, "training/rollout_probs_diff_max")
            test(f"{what} on {d}: rollout and training log-probs are equal in every step", len(diff) == STEPS and max(diff) == 0,
                 str(diff))
        for n in names:
            a, b = (series(s.dir / dirs[d], n) for d in ("cpu", "cuda"))
            print(f"        {n}: cpu {' '.join(f'{x:.6g}' for x in a)} | cuda {' '.join(f'{x:.6g}' for x in b)}")
            size = max(map(abs, a))
            test(f"{what}: {n} is the CPU's", len(a) == len(b) == STEPS and size > 0 and
                 all(abs(x - y) <= 2e-3 * size for x, y in zip(a, b)), f"{a} {b}")

    return look


def critic(s):
    return {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4,
            "critic.ppo_mini_batch_size": 4, "critic.optim.lr": 1e-3, ACTOR + "use_kl_loss": False}


def runs(s, test, pool):
    common = ["critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "response_length/mean"]
    looks = [compare(s, test, pool, "GRPO", common + ["actor/kl_loss"]),
             compare(s, test, pool, "LoRA GRPO", common + ["actor/kl_loss"],
                     **{MODEL + "lora_rank": 8, MODEL + "lora_alpha": 16, ACTOR + "optim.lr": 1e-3}),
             compare(s, test, pool, "PPO", common + ["critic/vf_loss", "critic/values/mean", "critic/grad_norm",
                                                     "critic/vf_explained_var"],
                     **critic(s))]
    for kind, lr in (("AdamW8bit", 1e-4), ("SGD", 1e-1), ("Muon", 1e-4)):
        looks.append(compare(s, test, pool, f"GRPO with {kind}", ["critic/rewards/mean", "actor/grad_norm", "actor/kl_loss"],
                             **{ACTOR + "optim.optimizer": kind, ACTOR + "optim.lr": lr}))
    return looks


def offload(s, test, pool):
    """Where arrays rest changes no bit of weights and optimizer state; the plan says where they are."""
    bf16 = {ACTOR + "fsdp_config.dtype": "bfloat16"}
    ways = {"kept": bf16,
            "all": {**bf16, ACTOR + "fsdp_config.optimizer_offload": True, ACTOR + "fsdp_config.param_offload": True,
                    "actor_rollout_ref.ref.fsdp_config.param_offload": True},
            "master": {**bf16, ACTOR + "fsdp_config.param_offload": True},
            "critic_kept": critic(s), "critic_far": {**critic(s), "critic.fsdp.optimizer_offload": True}}
    under_way = {name: start(s, pool, name, "cuda", **more) for name, more in ways.items()}
    first = start(s, pool, "part", "cuda", **{**bf16, "trainer.save_freq": 2, "trainer.total_training_steps": 2})

    def look():
        plans = {name: u.result().stderr for name, u in under_way.items()}
        first.result()
        run(*s.ppo("part", **keys(s, "cuda", **ways["all"])))
        for name, text in plans.items():
            test(f"{name}: the plan {'has no' if 'kept' in name else 'shows'} host memory",
                 ("offloaded: page-locked host memory" in text) != ("kept" in name), text[-1500:])
        kept = state(s.dir / "kept", STEPS)
        test("GRPO with optimizer, master and reference in host memory ends in the same bits", state(s.dir / "all", STEPS) == kept)
        test("GRPO with the master in host memory ends in the same bits", state(s.dir / "master", STEPS) == kept)
        test("begun without and resumed with offload it ends in the same bits", state(s.dir / "part", STEPS) == kept)
        both = ("actor", "critic")
        test("PPO with the critic's optimizer in host memory ends in the same bits",
             state(s.dir / "critic_far", STEPS, both) == state(s.dir / "critic_kept", STEPS, both))

    return [look]


def main():
    test = Tests()
    with Scratch() as s:
        if has_gpu(s.dir / "model"):
            (s.dir / "digits.py").write_text(DIGITS_REWARD)
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                for look in runs(s, test, pool) + offload(s, test, pool):
                    look()
        else:
            print("skip: no GPU that works")
            test("nothing to compare without a GPU", not os.environ.get("VERLC_TEST_BACKENDS", "").startswith("cuda"))
    test.end()


main()
