"""Invariant 11, with ranks that share the rows of a micro-batch (context parallel): GRPO and PPO give the tokens,
weights and files of one rank with the same keys, in every layout, with an adapter and a critic, on fewer ranks than parts too; so
does a run that goes on with another number of ranks. What does not fit one rank is refused with the number that fits. Small runs
on CPU ranks."""

import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import first_difference
from verlc_test import ON_GPUS, Scratch, Tests, run, series

STEPS = 2
A = "actor_rollout_ref."
PARTS = A + "actor.ulysses_sequence_parallel_size"
GEMMA = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 96, "intermediate_size": 120,
         "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
         "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 8, "sliding_window_pattern": 2,
         "rope_local_base_freq": 10000.0}
OLMO = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 64, "intermediate_size": 120,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def family(s, name, keys):
    """The scratch's model as one of another family."""
    config = json.loads((s.dir / "model/config.json").read_text()) | keys
    (s.dir / f"{name}.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / f"{name}.json", "--out", s.dir / name, "--tokenizer", s.dir / "model", "--dtype", "fp32")
    return s.dir / name


def total_mib(plan):
    """What a plan says that a rank needs."""
    value, unit = re.search(r"\n  total +([0-9.]+) ([MG])iB", plan).groups()
    return float(value) * (1024 if unit == "G" else 1)


def sharing(ranks):
    """Over how many ranks a limit is shared: those of a CPU; each that shares a GPU has its own."""
    return 1 if ON_GPUS else ranks


def plan_7b(s, parts):
    """GiB that a rank of 8 GPUs needs for samples of 131,072 tokens of a 7B, and its limit."""
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
              "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
              "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 152064, "tie_word_embeddings": False, "eos_token_id": 1}
    (s.dir / "7b").mkdir(exist_ok=True)
    (s.dir / "7b/config.json").write_text(json.dumps(config))
    keys = {A + "model.path": s.dir / "7b", "data.max_prompt_length": 2048, "data.max_response_length": 129024, PARTS: parts,
            A + "actor.fsdp_config.dtype": "bfloat16", "trainer.n_gpus_per_node": 8, "data.train_batch_size": 8,
            A + "actor.ppo_mini_batch_size": 8,
            **{A + k: 1 for k in ("actor.ppo_micro_batch_size_per_gpu", "ref.log_prob_micro_batch_size_per_gpu",
                                  "rollout.log_prob_micro_batch_size_per_gpu")}}
    line = s.ppo("plan", **{k.replace(".", "__"): v for k, v in keys.items()})
    p = run("plan", "--gpu", "80GB", "--gpus", 8, *line[1:], check=False)
    return [float(re.search(rf"\n  {name} +([0-9.]+) GiB", p.stdout)[1]) for name in ("total", "limit")]


def main():
    test = Tests()
    with Scratch(small=True) as s:
        def line(d, n, parts, **keys):
            keys = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.device": "cpu", "trainer.ranks": n,
                    PARTS: parts, **keys}
            return s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()})

        def go(name, *args, **keys):
            p = run(*line(*args, **keys), check=False)
            test(name, p.returncode == 0, p.stderr[-1500:])
            return p.stdout + p.stderr

        sharded = {"trainer.layout": "sharded"}
        bf16 = {A + "model.path": family(s, "gemma", GEMMA), A + "actor.fsdp_config.dtype": "bfloat16",
                A + "actor.optim.optimizer": "Muon", A + "actor.use_kl_loss": False, A + "actor.ppo_micro_batch_size_per_gpu": 1}
        critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "algorithm.use_kl_in_reward": True,
                  "critic.ulysses_sequence_parallel_size": 3}
        olmo = {A + "model.path": family(s, "olmo", OLMO), A + "actor.fsdp_config.dtype": "bfloat16"}
        lora = {A + "model.lora_rank": 4, A + "actor.fsdp_config.dtype": "bfloat16"}
        forced = {"trainer.force_old_log_prob": True}
        teacher = {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": s.dir / "model",
                   A + "actor.use_kl_loss": False, "distillation.distillation_loss.loss_mode": "forward_kl_topk",
                   "distillation.distillation_loss.topk": 4}
        cases = {"a reference": (4, forced, ((2, {}), (3, sharded))), "bf16": (3, bf16, ((2, sharded), (4, {}))),
                 "norms of rows": (3, olmo, ((2, {}),)), "an adapter": (4, lora, ((3, {}),)), "a critic": (2, critic, ()),
                 "lists of a teacher": (2, teacher, ((2, sharded), (3, {"distillation.ranks": 2})))}
        for name, (parts, keys, others) in cases.items():
            one = s.dir / name.replace(" ", "_")
            go(f"{name}: one rank", one, 1, parts, **keys)
            for n, more in others:
                d = pathlib.Path(f"{one}_{n}")
                said = go(f"{name}: {n} ranks", d, n, parts, **keys, **more)
                together = min(parts, n)
                shown = f"context parallel: {together} ranks compute" in said
                why = first_difference(one, d, STEPS) or ("" if shown else said[-1500:])
                test(f"{name}: {parts} parts on {n} ranks as on one", not why, why)
                test(f"{name}: the metric says {together}", set(series(d, "perf/context_parallel")) == {together})
        d = s.dir / "turns"
        for step, n in enumerate((4, 2), 1):
            go(f"step {step}: {n} ranks", d, n, 2, **critic, **{"trainer.total_training_steps": step, "trainer.save_freq": 1})
        why = first_difference(s.dir / "a_critic", d, STEPS)
        test("another number of ranks in each step: as one rank", not why, why)
        long = {"data.max_response_length": 16000, A + "actor.ppo_micro_batch_size_per_gpu": 1,
                A + "ref.log_prob_micro_batch_size_per_gpu": 1,
                A + "rollout.max_num_seqs": 1, "trainer.recompute": "layer"}
        need = {n: total_mib(run("plan", *line("plan", 4, n, **long)[1:]).stdout) for n in (1, 2, 4)}
        test("a rank needs less the more share the rows", need[1] > need[2] > need[4], str(need))
        long["trainer.device_memory_limit"] = f"{(need[1] + need[2]) / 2 * sharing(4):.0f}MiB"
        p = run("plan", *line("plan", 4, 1, **long)[1:], check=False)
        test("what is too long for one rank is refused, with the number that fits",
             p.returncode == 4 and f"{PARTS}=2 (context parallel) fits" in p.stdout + p.stderr, p.stdout[-600:] + p.stderr[-600:])
        p = run("plan", *line("plan", 4, 2, **long)[1:], check=False)
        test("which fits", p.returncode == 0, p.stdout[-600:] + p.stderr[-600:])
        plans = {n: plan_7b(s, n) for n in (1, 4)}
        test("a 7B with 131,072 tokens on 8 GPUs of 80 GB: 4 parts fit, one does not",
             plans[1][0] > plans[1][1] and plans[4][0] <= plans[4][1], plans)
        s.write("long.jsonl", [{**json.loads((s.dir / "train.jsonl").read_text().splitlines()[0]),
                                "prompt": [{"role": "user", "content": "abcde fghij " * 160}]}])
        scored = {"data.train_files": s.dir / "long.jsonl", "data.train_batch_size": 1, "data.max_prompt_length": 6000,
                  A + "actor.ppo_mini_batch_size": 1, A + "actor.ppo_micro_batch_size_per_gpu": 1, **forced,
                  A + "ref.log_prob_micro_batch_size_per_gpu": 1, "trainer.recompute": "layer", "trainer.total_training_steps": 1,
                  "trainer.save_freq": 1}
        total = {n: total_mib(run("plan", *line("plan", 2, n, **scored)[1:]).stdout) for n in (1, 2)}
        limit = {"trainer.device_memory_limit": f"{sum(total.values()) / 2 * sharing(2):.0f}MiB"}
        if ON_GPUS:  # a group's own memory is more than a model this small saves
            limit = {}
        else:
            p = run(*line(s.dir / "refused", 2, 1, **scored, **limit), check=False)
            test("a rank has no room for a long sample", p.returncode == 4, f"{total} {p.stderr[-600:]}")
        go("two ranks have", s.dir / "two", 2, 2, **scored, **limit)
        go("and one with more memory", s.dir / "one", 1, 2, **scored)
        why = first_difference(s.dir / "one", s.dir / "two", 1)
        test("generated, scored twice, trained: as one rank", not why, why)
        p = run("plan", *line("plan", 2, 5)[1:])
        test("a plan says how many parts ranks have", "context parallel: 2 ranks compute" in p.stdout
             and "gradients are summed in 5 parts" in p.stdout, p.stdout[-600:])
        whole = go("without the key", s.dir / "whole", 1, 1, **forced)
        test("the key decides the order of sums", first_difference(s.dir / "whole", s.dir / "a_reference", STEPS), whole[-500:])
    test.end()


main()
