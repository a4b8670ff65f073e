"""PPO with a critic, end to end on the tiny model: it learns a dense reward, the critic
comes to explain the returns, the warm-up trains the critic alone, a checkpoint holds
both models, and a run that was cut in two ends in the bits of an unbroken one - with
the KL penalty in the reward under an adaptive weight, and PF-PPO's resampling."""

import json
import math
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, series, state  # noqa: E402

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the answer."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
'''
ACTOR = "actor_rollout_ref.actor."


def gae(s):
    return {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4,
            "critic.optim.lr": 1e-3, ACTOR + "use_kl_loss": False, "reward.custom_reward_function.path": s.dir / "digits.py",
            "reward.num_workers": 1}


def learns(s, test):
    steps = 40
    tiny = {"actor_rollout_ref.model.path": s.dir / "tiny", "critic.model.path": s.dir / "tiny"}  # the small model hardly learns
    keys = {**gae(s), **tiny, "data.train_batch_size": 32, "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 2,
            ACTOR + "ppo_mini_batch_size": 32, ACTOR + "ppo_micro_batch_size_per_gpu": 32, ACTOR + "optim.lr": 3e-3,
            "critic.ppo_mini_batch_size": 16, "critic.ppo_micro_batch_size_per_gpu": 16, "trainer.critic_warmup": 4,
            "trainer.total_training_steps": steps, "trainer.save_freq": -1}
    run(*s.ppo("learn", **keys))
    reward, explained, loss = (series(s.dir / "learn", n)
                               for n in ("critic/rewards/mean", "critic/vf_explained_var", "critic/vf_loss"))
    first, last = sum(reward[:3]) / 3, sum(reward[-3:]) / 3
    print(f"ppo: mean reward {first:.3f} -> {last:.3f} in {steps} steps; explained variance {explained[0]:.2f} -> "
          f"{max(explained):.2f}; value loss {loss[0]:.3f} -> {loss[-1]:.4f}")
    test("PPO starts where a random model is", first < 0.4, f"{first}")
    test("PPO raises the mean reward", last > 0.8, f"{first} -> {last}")
    test("the critic comes to explain returns", explained[0] < 0 and max(explained) > 0.2, f"{explained}")
    test("the value loss falls", loss[-1] < loss[0] / 4, f"{loss[0]} -> {loss[-1]}")
    warm, entropy = series(s.dir / "learn", "actor/lr"), series(s.dir / "learn", "actor/entropy")
    test("the policy waits for trainer.critic_warmup", len(warm) == len(entropy) == steps - 3 and len(loss) == steps,
         f"{len(warm)} updates")
    for name in ("critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr", "critic/values/mean",
                 "timing_s/values", "timing_s/update_critic", "timing_per_token_ms/update_critic"):
        test(f"one {name} a step", len(series(s.dir / "learn", name)) == steps)


def resumes(s, test):
    reference = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4, "algorithm.use_kl_in_reward": True,
                 "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.kl_coef": 0.05, "algorithm.kl_ctrl.horizon": 100}
    keys = {**gae(s), **reference, "critic.shuffle": True, "critic.ppo_epochs": 2, "algorithm.use_pf_ppo": True,
            ACTOR + "optim.lr": 1e-3, "trainer.total_training_steps": 4, "trainer.save_freq": 2}
    run(*s.ppo("whole", **keys))
    run(*s.ppo("parts", **{**keys, "trainer.total_training_steps": 2}))
    run(*s.ppo("parts", **keys))
    both = ("actor", "critic")
    whole, parts = state(s.dir / "whole", 4, both), state(s.dir / "parts", 4, both)
    test("cut in two and resumed: the same bits", whole == parts, str([f for f in whole if whole[f] != parts[f]]))
    test("the critic has moved", whole["critic/model.safetensors"] != state(s.dir / "whole", 2, both)["critic/model.safetensors"])
    config = json.loads((s.dir / "whole/global_step_4/critic/config.json").read_text())
    test("critic/ is a token classifier for transformers", config["architectures"] == ["Qwen2ForTokenClassification"] and
         config["id2label"] == {"0": "LABEL_0"}, str(config))
    coeff, kl = (series(s.dir / "whole", f"actor/{n}") for n in ("reward_kl_penalty_coeff", "reward_kl_penalty"))
    test("the adaptive KL weight moves", coeff[0] == 0.05 and len(set(coeff)) == 4, f"{coeff}, kl {kl}")
    rewards, scores = (series(s.dir / "whole", f"critic/{n}/mean") for n in ("rewards", "score"))
    test("the KL penalty is in the rewards", kl[-1] > 0 and rewards[-1] < scores[-1], f"{rewards} of {scores}, kl {kl}")
    drawn = series(s.dir / "whole", "training/pf_ppo/distinct_fraction")
    test("PF-PPO draws some samples twice", all(0 < d < 1 for d in drawn), str(drawn))
    run(*s.ppo("grpo", **{"trainer.total_training_steps": 1}))
    p = run(*s.ppo("grpo", **gae(s)), check=False)
    test.refused("a checkpoint without a critic is not gone on from with one", p, 3, "global_step_1 has no critic")
    run(*s.ppo("from_it", **{**gae(s), "critic.model.path": s.dir / "whole/global_step_4/critic",
                             "trainer.total_training_steps": 1}))
    test("a critic that was saved starts another run", len(series(s.dir / "from_it", "critic/vf_loss")) == 1)


def balanced(s, test):
    """The cut of dynamic batching, and with it the order of the rows of a mini-batch, changes gradients by rounding alone."""
    norms = []
    for name, tokens in (("by_samples", 0), ("by_64", 64), ("by_300", 300)):
        dynamic = {"ppo_max_token_len_per_gpu": tokens or 1, "use_dynamic_bsz": tokens > 0}
        keys = {**gae(s), **{ACTOR + k: v for k, v in dynamic.items()}, **{"critic." + k: v for k, v in dynamic.items()}}
        run(*s.ppo(name, **keys, **{"trainer.total_training_steps": 1, "trainer.save_freq": -1}))
        norms.append([series(s.dir / name, f"{m}/grad_norm")[0] for m in ("actor", "critic")])
    off = max(abs(a - b) / a for other in norms[1:] for a, b in zip(norms[0], other))
    test("balanced micro-batches have the gradients of others", norms[0] != norms[1] and off < 1e-5, f"{norms}")


def adapters(s, test):
    """LoRA for the critic: its base is frozen, its head trained; a run cut in two ends in the bits of an unbroken one."""
    keys = {**gae(s), "critic.model.lora_rank": 4, "critic.model.lora_alpha": 8, "trainer.total_training_steps": 2,
            "trainer.save_freq": 1}
    p = run(*s.ppo("lora", **keys))
    test("the plan counts the adapter and the head", "frozen weights; adapter and value head" in p.stdout + p.stderr)
    run(*s.ppo("lora_parts", **{**keys, "trainer.total_training_steps": 1}))
    run(*s.ppo("lora_parts", **keys))
    both = ("actor", "critic")
    whole, parts = state(s.dir / "lora", 2, both), state(s.dir / "lora_parts", 2, both)
    test("a critic's adapter, cut in two and resumed: the same bits", whole == parts,
         str([f for f in whole if whole[f] != parts[f]]))
    first, critic = state(s.dir / "lora", 1, both), s.dir / "lora/global_step_2/critic"
    test("adapter and head have moved", whole["critic/adapter_model.safetensors"] != first["critic/adapter_model.safetensors"])
    config = json.loads((critic / "adapter_config.json").read_text())
    test("critic/ is an adapter for peft's token classifier", config["task_type"] == "TOKEN_CLS" and
         config["modules_to_save"] == ["classifier", "score"] and not (critic / "model.safetensors").exists(), str(config))
    one = {**keys, "actor_rollout_ref.model.lora_rank": 4, "trainer.total_training_steps": 2, "trainer.save_freq": 2,
           "actor_rollout_ref.model.path": s.dir / "tiny", "critic.model.path": s.dir / "tiny"}  # MiB that the plan's figures show
    shutil.copytree(s.dir / "tiny", s.dir / "model_again")
    p, q = run(*s.ppo("one_base", **one)), run(*s.ppo("two_bases", **{**one, "critic.model.path": s.dir / "model_again"}))
    size = [next(float(x.split()[1]) for x in r.stderr.splitlines() if x.strip().startswith("critic ")) for r in (p, q)]
    test("policy and critic with adapters on one directory have one base", "frozen weights are the policy's" in p.stderr and
         "the policy's" not in q.stderr and size[0] < size[1], f"{size} MiB")
    moments = [{k: v for k, v in state(s.dir / d, 2, both).items() if "optim" in k} for d in ("one_base", "two_bases")]
    test("and the bits of a run with two", moments[0] == moments[1])
    run("model", "merge", "--adapter", critic, "--out", s.dir / "merged_critic")
    config = json.loads((s.dir / "merged_critic/config.json").read_text())
    test("merged it is a token classifier", config["architectures"] == ["Qwen2ForTokenClassification"], str(config))

    def values(name, **more):  # of the same samples: the policy is the same at the first step
        run(*s.ppo(name, **{**gae(s), "trainer.total_training_steps": 1, "trainer.save_freq": -1, **more}))
        return series(s.dir / name, "critic/values/mean")[0]

    started = values("from_adapter", **{"critic.model.lora_adapter_path": critic})
    merged = values("from_merged", **{"critic.model.path": s.dir / "merged_critic"})
    test("a run starts from the adapter, or from the merged critic", abs(started - merged) < 1e-3 * abs(merged),
         f"{started}, {merged}")
    test("QLoRA for the critic", math.isfinite(values("qlora",
                                                      **{"critic.model.lora_rank": 4, "critic.model.quantization": "nf4"})))
    p = run(*s.ppo("bad", **{**gae(s), "critic.model.quantization": "nf4"}), check=False)
    test.refused("a quantised critic without an adapter", p, 2, "set critic.model.lora_rank")
    p = run(*s.ppo("bad", **{**keys, "critic.model.target_modules": "[wq]"}), check=False)
    test.refused("a critic's target that is not there", p, 2, "no linear module is called 'wq'")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "digits.py").write_text(REWARD)
        learns(s, test)
        balanced(s, test)
        adapters(s, test)
        resumes(s, test)
    test.end()


main()
