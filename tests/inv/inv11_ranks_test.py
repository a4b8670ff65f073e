"""Invariant 11: the same run gives the same tokens, weights and files on any number of ranks. Small runs on CPU ranks."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import ASK, files, first_difference
from verlc_test import Scratch, Tests, reward_dir, run, series

STEPS = 3


def main():
    test = Tests()
    with Scratch(small=True) as s:
        ACTOR = "actor_rollout_ref."
        RM, teacher = "reward.reward_model.", {"distillation.enabled": True, ACTOR + "actor.use_kl_loss": False,
                                               "distillation.teacher_models.teacher_model.model_path": s.dir / "model"}
        (s.dir / "ask.py").write_text(ASK)
        critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 1}
        cases = {
            "grpo with a reference": ((2, 3, 4), {}),
            "ppo with a critic": ((2,), critic),
            "chunks of micro-batches": ((2, 3), {**critic, ACTOR + "actor.grad_chunk": 2, "critic.grad_chunk": 2}),
            "lora": ((2,), {ACTOR + "model.lora_rank": 4}),
            "muon": ((2,), {ACTOR + "actor.optim.optimizer": "Muon"}),
            "adamw 8 bit": ((3,), {ACTOR + "actor.optim.optimizer": "AdamW8bit"}),
            "dynamic batches, two epochs": ((3,), {ACTOR + "actor.use_dynamic_bsz": True,
                                                   ACTOR + "actor.ppo_max_token_len_per_gpu": 160,
                                                   ACTOR + "actor.ppo_epochs": 2}),
            "rejection, rmsprop": ((2,), {**critic, ACTOR + "rollout.top_p": 0.7, ACTOR + "rollout.calculate_log_probs": True,
                                          "algorithm.rollout_correction.rollout_rs": "token_k1",
                                          "algorithm.rollout_correction.rollout_rs_threshold": "'0.7_1.4275'",
                                          ACTOR + "actor.optim.optimizer": "RMSprop", "critic.optim.optimizer": "Adam"}),
            "greedy baselines": ((2,), {"algorithm.adv_estimator": "remax"}),
            "validation": ((2,), {"trainer.test_freq": 2, "trainer.val_before_train": True}),
            "reward model": ((3,), {RM + "enable": True, RM + "model_path": reward_dir(s, "rm"), "reward.num_workers": 1}),
            "served judge": ((2,), {RM + "enable": True, RM + "model_path": s.dir / "model", RM + "rollout.response_length": 8,
                                    "reward.custom_reward_function.path": s.dir / "ask.py", "reward.num_workers": 1}),
            "lists of a teacher": ((2,), {**teacher, "distillation.distillation_loss.loss_mode": "forward_kl_topk",
                                         "distillation.distillation_loss.topk": 4}),
            "checkpoints in the foreground": ((2,), {"trainer.async_save": False}),
        }
        for name, (ranks, keys) in cases.items():
            keys = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.device": "cpu",
                    ACTOR + "actor.ppo_micro_batch_size_per_gpu": 1, **keys}  # four micro-batches an optimizer step
            dirs = {}
            for n in (1, *ranks):
                dirs[n] = s.dir / f"{name} {n}".replace(" ", "_").replace(",", "")
                p = run(*s.ppo(dirs[n], **{k.replace(".", "__"): v for k, v in keys.items()}, trainer__ranks=n), check=False)
                if p.returncode != 0:
                    test(f"{name}: {n} ranks", False, p.stderr[-1500:])
                elif n > 1:
                    why = first_difference(dirs[1], dirs[n], STEPS)
                    test(f"{name}: {n} ranks as 1", not why, why)
        with_chunks, without = (files(s.dir / d, STEPS) for d in ("chunks_of_micro-batches_1", "ppo_with_a_critic_1"))
        same = [k for k in ("optim/actor.safetensors", "optim/critic.safetensors") if with_chunks[k] == without[k]]
        test("chunks decide bits", not same, same)
        rejected = series(s.dir / "rejection_rmsprop_2", "rollout_corr/rollout_rs_masked_fraction")  # 1 / top_p = 1.4286 at most
        test("rejection rejects some", len(rejected) == STEPS and all(0 < x < 1 for x in rejected), rejected)
        tail(s, test)
    test.end()


def tail(s, test):
    """A rank without samples computes reference log-probs and values of those that have ended while others are generated."""
    keys = {"algorithm__adv_estimator": "gae", "critic__model__path": s.dir / "model", "critic__ppo_micro_batch_size_per_gpu": 1,
            "data__train_batch_size": 2, "data__max_response_length": 600, "trainer__total_training_steps": STEPS,
            "trainer__save_freq": STEPS, "trainer__device": "cpu"}
    for n in (1, 3):
        run(*s.ppo(s.dir / f"tail_{n}", **keys, trainer__ranks=n))
    why = first_difference(s.dir / "tail_1", s.dir / "tail_3", STEPS)
    early = series(s.dir / "tail_3", "perf/idle_rank_passes")
    test("passes beside the tail of a generation: 3 ranks as 1", not why and sum(early) > 0, (why, early))


main()
