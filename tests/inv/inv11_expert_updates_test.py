"""Invariant 11 of experts on their ranks in updates (expert parallel updates): GRPO and SFT of tiny models with experts give the
tokens, weights, files and metrics of one rank, whether experts divide between ranks or are fewer, with all tokens at two experts,
with adapters on experts, with losses of routers, and with passes of which ranks have different numbers; and a run goes on with
another number of ranks, or with layers gathered. On CPU ranks."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import experts_model, first_difference, two_experts_model
from verlc_test import Scratch, Tests, run, series

A = "actor_rollout_ref."
EXPERTS = A + "actor.fsdp_config.turbo_config.distributed.expert_parallel_size"
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
SHARED = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "shared_expert_intermediate_size": 72, "mlp_only_layers": [1],
          **SMALL}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 32,
           "sliding_window": 16, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                  "original_max_position_embeddings": 32}}


def sft(s, test, model):
    """On 1 to 3 ranks, validation too; the last step on two ranks after a checkpoint of three."""
    lines = [json.dumps({"messages": [{"role": "user", "content": f"What is {i} + 1?"},
                                      {"role": "assistant", "content": f"It is {i + 1}." + " Yes." * (i % 4)}]}) for i in range(24)]
    (s.dir / "chats.jsonl").write_text("\n".join(lines))
    for name, more in {"sft": {}, "sft adapter": {"model.lora_rank": 4}}.items():
        dirs = [s.dir / f"{name} {n}".replace(" ", "_") for n in (1, 2, 3)]
        for n, steps, d in ((1, 3, dirs[0]), (2, 3, dirs[1]), (3, 2, dirs[2]), (2, 3, dirs[2])):
            keys = {"model.path": model, "data.train_files": s.dir / "chats.jsonl", "data.val_files": s.dir / "chats.jsonl",
                    "data.train_batch_size": 8, "data.max_length": 128, "data.max_token_len_per_gpu": 256, "optim.lr": 1e-3,
                    "trainer.total_training_steps": steps, "trainer.test_freq": 2, "trainer.save_freq": 1,
                    "trainer.device": "cpu", "trainer.logger": "[console,file]", "trainer.default_local_dir": d,
                    "trainer.ranks": n, "engine.turbo_config.distributed.expert_parallel_size": n, **more}
            p = run("sft", *[f"{k}={v}" for k, v in keys.items()], check=False)
            test(f"{name}: {n} ranks", p.returncode == 0, p.stderr[-1500:])
        for d in dirs[1:]:
            why = first_difference(dirs[0], d, 3)
            test(f"{d.name} as one rank", not why, why)
        found = [set(series(d, "perf/expert_parallel")) for d in dirs]
        test(f"{name}: experts are on ranks", found == [set(), {2}, {2, 3}], found)


def main():
    test = Tests()
    only = sys.argv[1:]
    with Scratch(small=True) as s:
        def go(name, d, n, steps=1, **keys):
            keys = {"trainer.total_training_steps": steps, "trainer.save_freq": 1, "trainer.device": "cpu", "trainer.ranks": n,
                    A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.layout": "sharded", EXPERTS: n,
                    "trainer.force_old_log_prob": True, A + "actor.fsdp_config.dtype": "bfloat16", **keys}
            p = run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)
            test(f"{name}: {n} ranks", p.returncode == 0, p.stderr[-1500:])
            return p.stdout + p.stderr

        def compare(name, sizes, steps=1, **keys):
            if only and name not in only:
                return None
            one = s.dir / f"run_{name}".replace(" ", "_")
            go(name, one, 1, steps, **keys)
            for n, more in sizes:
                d = pathlib.Path(f"{one}_{n}")
                said = go(name, d, n, steps, **keys, **more)
                why = first_difference(one, d, steps) or (set(series(d, "perf/expert_parallel")) != {n} and said[-1500:])
                test(f"{name}: {n} ranks as one", not why, why)
            return one

        together = {A + "rollout.tensor_model_parallel_size": 2}
        # five prompts, and micro-batches of two sequences in passes: ranks have different numbers of them
        odd = {"data.train_batch_size": 5, A + "actor.ppo_mini_batch_size": 5, A + "rollout.log_prob_micro_batch_size_per_gpu": 2}
        model = experts_model(s).rename(s.dir / "experts")
        f32 = {A + "model.path": model, A + "actor.fsdp_config.dtype": "float32", A + "actor.optim.lr": 0.01}
        one = compare("qwen3_moe", ((2, together), (3, {}), (4, together)), 2, **f32)
        compare("shared", ((3, {}),), **{A + "model.path": experts_model(s, "qwen2_moe", SHARED)}, **odd)
        compare("gpt_oss", ((4, {}),), **{A + "model.path": experts_model(s, "gpt_oss", GPT_OSS)},
                **{A + "actor.optim.optimizer": "Muon"})
        lora = {A + "model.path": model, A + "model.lora_rank": 4}
        compare("adapters", ((2, together), (3, {})), 2, **lora)
        compare("qlora", ((4, together),), **lora, **odd, **{"+" + A + "model.quantization": "nf4"})
        losses = {A + "model.override_config.output_router_logits": True, A + "model.override_config.router_aux_loss_coef": 0.1,
                  "+" + A + "actor.router_replay.mode": "R3", A + "rollout.enable_rollout_routing_replay": True}
        compare("router", ((3, {}),), 2, **f32, **losses)
        # the first rank gets more rows than it has room for, so there are several rounds
        uneven = compare("imbalance", ((3, {}),), **{A + "model.path": two_experts_model(model, s.dir / "uneven"),
                                                     "data.max_prompt_length": 32, A + "actor.ppo_mini_batch_size": 4})
        if uneven:
            load = series(uneven, "actor/router/load_max_over_mean")
            test("two of six experts have all tokens", load == [3], load)
        if not only or "sft" in only:
            sft(s, test, model)
        if one:
            test("experts are trained", min(series(one, "actor/grad_norm")) > 0)
            d = s.dir / "turns"
            for step, (n, experts) in enumerate(((3, 3), (2, 1)), 1):
                go(f"step {step}", d, n, step, **{**f32, EXPERTS: experts})
            why = first_difference(one, d, 2)
            test("another number in each step: as one rank", not why, why)
        asked = {A + "model.path": model, EXPERTS: 4, "trainer.ranks": 4, "trainer.layout": "sharded", "trainer.device": "cpu"}
        for keys, said in (({}, "each of 4 ranks has its experts of every layer, whole; as expert_model_parallel_size says\n"),
                           ({EXPERTS: 2}, "as expert_model_parallel_size says, over all ranks"),
                           ({"trainer.layout": "whole"}, "none, not the 4 asked for: each rank has the weights whole"),
                           ({A + "actor.grad_chunk": 2}, "none, not the 4 asked for: grad_chunk adds up"),
                           ({A + "actor.ulysses_sequence_parallel_size": 2}, "none, not the 4 asked for: ranks share the rows"),
                           ({A + "model.path": s.dir / "model"}, "none, not the 4 asked for: the model has no experts")):
            p = run("plan", *s.ppo("plan", **{k.replace(".", "__"): v for k, v in {**asked, **keys}.items()})[1:], check=False)
            test(f"the plan: {said}", said in p.stdout, p.stdout[-800:] + p.stderr[-300:])
    test.end()


main()
