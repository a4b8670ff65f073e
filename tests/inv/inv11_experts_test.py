"""Invariants 1 and 11 of a model with experts: GRPO of a tiny Qwen3-MoE gives the same tokens, weights and files on one rank and
two, with weights whole and sharded, and the update's probabilities are the rollout's. Small runs on CPU ranks."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import experts_model, first_difference
from verlc_test import Scratch, Tests, run, series, tensors

STEPS = 3
A = "actor_rollout_ref."


# Other families of the same size.
FAMILIES = {
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                  "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32,
                "sliding_window": 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                       "original_max_position_embeddings": 32}},
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
                 "attention_bias": True, "use_qk_norm": True},
}


def main():
    test = Tests()
    with Scratch(small=True) as s:
        model = experts_model(s)
        bf16 = {A + "actor.fsdp_config.dtype": "bfloat16", A + "actor.optim.optimizer": "Muon"}
        cases = {"bf16, Muon": (bf16, ((2, "auto"), (2, "sharded"))), "lora": ({A + "model.lora_rank": 4}, ((2, "auto"),)),
                 "qlora": ({A + "model.lora_rank": 4, "+" + A + "model.quantization": "nf4"}, ()),
                 "qlora, int8": ({A + "model.lora_rank": 4, "+" + A + "model.quantization": "int8"}, ())}
        for name, (keys, layouts) in cases.items():
            keys = {A + "model.path": model, "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS,
                    "trainer.device": "cpu", A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.force_old_log_prob": True,
                    A + "actor.entropy_coeff": 0.1,
                    **keys}
            one = s.dir / name.replace(" ", "_").replace(",", "")
            for n, layout in ((1, "auto"), *layouts):
                d = one if n == 1 else pathlib.Path(f"{one}_{layout}_{n}")
                p = run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()}, trainer__ranks=n, trainer__layout=layout),
                        check=False)
                why = p.stderr[-1500:] if p.returncode else n > 1 and first_difference(one, d, STEPS)
                test(f"{name}: {n} rank(s), {layout}", not why, why)
            diff = series(one, "training/rollout_probs_diff_max")
            test(f"{name}: the update has the rollout's probabilities", len(diff) == STEPS and not any(diff), diff)
        before, after = (tensors(d / "model.safetensors") for d in (model, s.dir / "bf16_Muon/global_step_3/actor"))
        router, expert = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.{}.up_proj.weight"
        adapter = tensors(s.dir / "lora/global_step_3/actor/adapter_model.safetensors")
        name = "base_model.model.model.layers.0.mlp.experts.{}.up_proj.lora_B.weight"
        test("experts' adapters have peft's names and are trained", all(name.format(e) in adapter for e in range(6)) and
             any(any(adapter[name.format(e)][2]) for e in range(6)))
        test("files have the released names", before.keys() == after.keys() and expert.format(5) in after)
        test("router and experts are trained", all(before[k][2] != after[k][2] for k in (router, expert.format(0))))
        for family, config in FAMILIES.items():
            keys = {A + "model.path": experts_model(s, family, config), "trainer.total_training_steps": 2, "trainer.device": "cpu",
                    A + "actor.fsdp_config.dtype": "bfloat16", "trainer.force_old_log_prob": True}
            p = run(*s.ppo(s.dir / f"of_{family}", **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)
            diff = series(s.dir / f"of_{family}", "training/rollout_probs_diff_max") if p.returncode == 0 else p.stderr[-1500:]
            test(f"{family}: the update has the rollout's probabilities", len(diff) == 2 and not any(diff), diff)
        keys = {A + "model.path": model, A + "model.lora_rank": 4, A + "model.target_modules": "[q_proj,gate]"}
        p = run(*s.ppo(s.dir / "refused", **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)
        test("an adapter on a router is refused", p.returncode > 1 and "the router of the experts" in p.stderr, p.stderr[-500:])
    test.end()


main()
