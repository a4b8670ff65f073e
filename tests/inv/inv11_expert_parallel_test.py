"""Invariant 11 of experts split over ranks that generate together: GRPO of tiny models with experts gives the tokens, weights,
files and router metrics of one rank, whether experts and heads divide or not, with more ranks than experts, with all tokens at two
experts, with adapters on experts and with router replay; and a run goes on with another number of ranks. On CPU ranks."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import experts_model, first_difference, two_experts_model
from verlc_test import Scratch, Tests, run, series

A = "actor_rollout_ref."
TOGETHER = A + "rollout.tensor_model_parallel_size"
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
# A family of each kind of attention and of each kind of experts.
FAMILIES = {
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "shared_expert_intermediate_size": 72,
                  "mlp_only_layers": [1], **SMALL},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 40},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, **SMALL},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32,
                "sliding_window": 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                       "original_max_position_embeddings": 32}},
}


def hybrid_config(s):
    """A Qwen3.5-MoE: gated delta nets, gated attention, a shared expert."""
    text = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 32, "num_experts": 5, "shared_expert_intermediate_size": 72, **SMALL}
    return {"architectures": ["Qwen3_5MoeForCausalLM"], **text}


def main():
    test = Tests()
    with Scratch(small=True) as s:
        def go(name, d, n, together, steps=1, **keys):
            keys = {"trainer.total_training_steps": steps, "trainer.save_freq": 1, "trainer.device": "cpu", "trainer.ranks": n,
                    A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.layout": "sharded", TOGETHER: together,
                    "trainer.force_old_log_prob": True, A + "actor.fsdp_config.dtype": "bfloat16", **keys}
            p = run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)
            test(f"{name}: {together} of {n} ranks together", p.returncode == 0, p.stderr[-1500:])
            return p.stdout + p.stderr

        def compare(name, sizes, steps=1, **keys):
            one = s.dir / f"run_{name}".replace(" ", "_")
            go(name, one, 1, 1, steps, **keys)
            for n, together in sizes:
                d = pathlib.Path(f"{one}_{n}_{together}")
                said = go(name, d, n, together, steps, **keys)
                why = first_difference(one, d, steps) or (set(series(d, "perf/tensor_parallel")) != {together} and said[-1500:])
                test(f"{name}: {together} of {n} ranks together as one", not why, why)
            diff = series(one, "training/rollout_probs_diff_max")
            test(f"{name}: the update has the rollout's probabilities", diff == [0] * steps, diff)
            return one

        model = experts_model(s).rename(s.dir / "experts")
        f32 = {A + "model.path": model, A + "actor.fsdp_config.dtype": "float32"}
        one = compare("qwen3_moe", ((2, 2), (4, 2)), 2, **f32)
        models = {family: experts_model(s, family, config) for family, config in FAMILIES.items()}
        for family, path in models.items():
            n = 4 if family in ("mixtral", "qwen2_moe") else 3  # Mixtral: more ranks than experts
            compare(family, ((n, n),), **{A + "model.path": path})
        compare("qwen3_5_moe", ((3, 3),), **{A + "model.path": experts_model(s, "qwen3_5_moe_text", hybrid_config(s))})
        lora = {A + "model.path": model, A + "model.lora_rank": 4}
        compare("adapters", ((3, 3),), 2, **lora)
        latent = {**lora, A + "model.path": models["deepseek_v3"], A + "model.target_modules": "all-linear"}
        compare("qlora", ((4, 4),), **latent, **{"+" + A + "model.quantization": "nf4"})
        router = {A + "actor.optim.lr": 0.02, "+" + A + "actor.router_replay.mode": "R3",
                  A + "rollout.enable_rollout_routing_replay": True}
        compare("replay", ((3, 3),), 2, **f32, **router)
        uneven = compare("imbalance", ((3, 3),), **{A + "model.path": two_experts_model(model, s.dir / "uneven")})
        load = series(uneven, "actor/router/load_max_over_mean")
        test("two of six experts have all tokens", load == [3], load)

        d = s.dir / "turns"
        for step, (n, together) in enumerate(((2, 2), (3, 3)), 1):
            go(f"step {step}", d, n, together, step, **f32)
        why = first_difference(one, d, 2)
        test("another number in each step: as one rank", not why, why)

        found = []
        for n in (1, 3):
            out = s.dir / f"generated{n}.jsonl"
            keys = {"model.path": model, "data.path": s.dir / "test.jsonl", "data.output_path": out, "data.n_samples": 1,
                    "data.batch_size": 8, "rollout.response_length": 16, "rollout.prompt_length": 64, "trainer.device": "cpu",
                    "trainer.ranks": n, "rollout.tensor_model_parallel_size": n}
            p = run("generate", *[f"{k}={v}" for k, v in keys.items()], check=False)
            said = p.stdout + p.stderr
            test(f"verlc generate: {n} ranks", p.returncode == 0 and (n == 1 or "3 ranks generate together" in said), said[-800:])
            found.append(out.exists() and out.read_bytes())
        test("verlc generate: the bytes of one rank", found[0] and found[0] == found[1])

        ep = {A + "model.path": model, A + "rollout.expert_parallel_size": 4, "trainer.ranks": 4}
        for keys, said in ((ep, "4 ranks generate together, each with its heads, experts and rows of the layers' matrices; as "
                            "rollout.expert_parallel_size says"),
                           (ep | {TOGETHER: 2}, "4 ranks generate together"),
                           (ep | {A + "rollout.expert_parallel_size": 3}, "not the 3 asked for: it does not divide the ranks"),
                           (ep | {A + "model.path": s.dir / "model"}, "rollout.expert_parallel_size: the model has no experts")):
            keys = {"trainer.layout": "sharded", "trainer.device": "cpu", **keys}
            p = run("plan", *s.ppo("plan", **{k.replace(".", "__"): v for k, v in keys.items()})[1:], check=False)
            test(f"the plan: {said}", said in p.stdout, p.stdout[-800:] + p.stderr[-300:])
    test.end()


main()
