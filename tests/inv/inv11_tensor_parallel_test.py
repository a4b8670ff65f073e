"""Invariant 11, with ranks that generate together: GRPO and PPO whose rollout has the layers split over 2, 3 or 4 ranks give the
tokens, weights and files of one rank, whether heads divide or not; so does a run that goes on with another number of them. What
cannot be split is said. Small runs on CPU ranks; the death of a rank: inv11_tensor_parallel_kill_test.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import family_model, first_difference
from verlc_test import Scratch, Tests, run, series

STEPS = 2
WIDE = {"vocab_size": 9001}  # rows of the tables that no token has, too
A = "actor_rollout_ref."
TOGETHER = A + "rollout.tensor_model_parallel_size"


def main():
    test = Tests()
    with Scratch() as s:
        def line(d, n, together, **keys):
            keys = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.device": "cpu", "trainer.ranks": n,
                    A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.layout": "sharded", TOGETHER: together, **keys}
            return s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()})

        def go(name, *args, **keys):
            p = run(*line(*args, **keys), check=False)
            test(name, p.returncode == 0, p.stderr[-1500:])
            return p.stdout + p.stderr

        # heads of three chunks of the vocabulary, which do not divide, and of one chunk, which is one rank's; tied and not
        tied, apart = WIDE | {"final_logit_softcapping": 20.0}, WIDE | {"tie_word_embeddings": False}
        bf16 = {A + "model.path": family_model(s, "gemma3", tied), A + "actor.fsdp_config.dtype": "bfloat16",
                A + "actor.optim.optimizer": "Muon", A + "actor.use_kl_loss": False, "trainer.test_freq": 2,
                "trainer.val_before_train": True}
        critic = {"algorithm.adv_estimator": "gae", "critic.model.path": family_model(s, "glm4", WIDE),
                  "critic.ppo_micro_batch_size_per_gpu": 1, "algorithm.use_kl_in_reward": True}
        rows = {A + "model.path": family_model(s, "olmo2", apart), A + "actor.fsdp_config.dtype": "bfloat16"}
        delta = {A + "model.path": family_model(s, "qwen3_5"), "data.max_response_length": 48}
        lora = {A + "model.lora_rank": 4, A + "actor.fsdp_config.dtype": "bfloat16"}
        int8 = {**delta, A + "model.lora_rank": 4, A + "model.target_modules": "all-linear"}
        cases = {"a reference": ({}, ((3, 3), (4, 2))), "bf16": (bf16, ((2, 2),)),
                 "norms of rows": (rows, ((4, 4),)), "delta nets": (delta, ((2, 2),)),
                 "an adapter": (lora, ((3, 3),)), "NF4": ({**lora, A + "model.quantization": "nf4"}, ((2, 2), (2, 1))),
                 "INT8": ({**int8, A + "model.quantization": "int8"}, ((3, 3),)), "a critic": (critic, ())}
        for name, (keys, sizes) in cases.items():
            one = s.dir / name.replace(" ", "_")
            go(f"{name}: one rank", one, 1, 1, **keys)
            for n, together in sizes:
                d = pathlib.Path(f"{one}_{n}_{together}")
                said = go(f"{name}: {together} of {n} ranks together", d, n, together, **keys)
                shown = together == 1 or f": {together} ranks generate together" in said
                why = first_difference(one, d, STEPS) or ("" if shown else said[-1500:])
                test(f"{name}: {together} of {n} ranks together as one", not why, why)
                test(f"{name}: the metric says {together}", set(series(d, "perf/tensor_parallel")) == {together})
        d = s.dir / "turns"
        for step, (n, together) in enumerate(((2, 2), (4, 4)), 1):
            go(f"step {step}: {together} of {n} together", d, n, together, **critic,
               **{"trainer.total_training_steps": step, "trainer.save_freq": 1})
        why = first_difference(s.dir / "a_critic", d, STEPS)
        test("another number in each step: as one rank", not why, why)

        for keys, size, why in (({"trainer.layout": "whole"}, 2, "each rank has the weights whole"),
                                ({"trainer.ranks": 1}, 2, "there is one rank"),
                                ({}, 3, "it does not divide the ranks")):
            p = run("plan", *line("plan", 2, size, **keys)[1:], check=False)
            said = p.stdout[-800:] + p.stderr[-300:]
            test(f"said: {why}", f"tensor parallel: 1, not the {size} asked for: {why}" in p.stdout, said)
    test.end()


main()
