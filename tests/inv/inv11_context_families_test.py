"""Invariant 11, with ranks that share the rows of a micro-batch (context parallel), by families: tiny models with experts, latent
attention, sinks, output gates and gated delta nets give the tokens, weights, files and router metrics of one rank with the same
keys; a load-balancing loss, router replay and adapters on experts too. On CPU ranks."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import experts_model, first_difference
from verlc_test import Scratch, Tests, run, series

A = "actor_rollout_ref."
PARTS = A + "actor.ulysses_sequence_parallel_size"
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
FAMILIES = {
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32,
                "sliding_window": 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                       "original_max_position_embeddings": 32}},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, **SMALL},
    "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 3, "full_attention_interval": 3, **DELTA},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2, "full_attention_interval": 2,
                   "num_experts": 5, "shared_expert_intermediate_size": 72, "decoder_sparse_step": 1,
                   "mlp_only_layers": [], **DELTA, **SMALL},
}


def main():
    test = Tests()
    with Scratch(small=True) as s:
        def go(name, d, n, parts, **keys):
            keys = {"trainer.total_training_steps": 1, "trainer.save_freq": 1, "trainer.device": "cpu", "trainer.ranks": n,
                    PARTS: parts, A + "actor.ppo_micro_batch_size_per_gpu": 2, "trainer.force_old_log_prob": True,
                    A + "actor.fsdp_config.dtype": "bfloat16", **keys}
            p = run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)
            test(f"{name}: {n} ranks", p.returncode == 0, p.stderr[-1500:])
            return p.stdout + p.stderr

        def compare(name, parts, n, **keys):
            one = s.dir / f"run_{name}".replace(" ", "_")
            d = pathlib.Path(f"{one}_{n}")
            go(name, one, 1, parts, **keys)
            said = go(name, d, n, parts, **keys)
            together = {min(parts, n)}
            why = first_difference(one, d, 1) or ("" if set(series(d, "perf/context_parallel")) == together else said[-1500:])
            test(f"{name}: {parts} parts on {n} ranks as on one", not why, why)
            return one

        for i, (family, config) in enumerate(FAMILIES.items()):
            layout = {"trainer.layout": "sharded"} if i == 1 else {}
            compare(family, 2 + i, 3, **{A + "model.path": experts_model(s, family, config)}, **layout)
        p = run("plan", *s.ppo(s.dir / "plan", **{k.replace(".", "__"): v for k, v in {
            A + "model.path": s.dir / "deepseek_v3", "trainer.ranks": 2, PARTS: 2,
            "trainer.device": "cpu"}.items()})[1:], check=False)
        test("a plan has all ranks attend, by rows", "2 ranks compute a micro-batch together" in p.stdout and
             "for attention" not in p.stdout, p.stdout[-1500:] + p.stderr[-500:])
        latent = {A + "model.path": s.dir / "deepseek_v3", A + "actor.ppo_micro_batch_size_per_gpu": 4,
                  A + "actor.fsdp_config.dtype": "float32"}
        norms = [series(compare("latent attention", 4, 2, **latent), "actor/grad_norm")]
        go("latent attention whole", s.dir / "latent_whole", 1, 1, **latent)
        norms.append(series(s.dir / "latent_whole", "actor/grad_norm"))
        # other orders of f32 sums
        test("the parts' gradients are the whole's", norms[0] and abs(norms[0][0] / norms[1][0] - 1) < 1e-4, norms)
        compare("latent attention with an adapter", 3, 2, **latent, **{A + "model.lora_rank": 4})
        model = experts_model(s).rename(s.dir / "experts")
        keys = {A + "model.path": model, A + "actor.fsdp_config.dtype": "float32"}
        balanced = {A + "model.override_config.output_router_logits": True, A + "model.override_config.router_aux_loss_coef": 0.1}
        replay = {A + "actor.optim.lr": 0.02, "+" + A + "actor.router_replay.mode": "R2"}
        one = compare("a load-balancing loss and replay", 3, 2, **keys, **{"+" + k: v for k, v in balanced.items()}, **replay)
        test("the loss is there", series(one, "actor/router/aux_loss"))
        lora = keys | {A + "model.lora_rank": 4}
        compare("adapters", 4, 3, **lora)
        for step, n in enumerate((1, 4, 2, 3)):
            d = s.dir / ("turns" if step else "alone")
            go("resume", d, n, 4, **lora, **{"trainer.total_training_steps": step or 3, "trainer.save_freq": 1})
        why = first_difference(s.dir / "alone", s.dir / "turns", 3)
        test("4 parts on another number of ranks in each step: as on one", not why, why)
    test.end()


main()
