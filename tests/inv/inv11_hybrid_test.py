"""Invariants 1, 5 and 11 of a model with gated delta nets: GRPO and SFT of a tiny Qwen3.5 give the same tokens, weights and files
on one rank and several, with weights whole and sharded, and resumed; the update's probabilities are the rollout's. The model is
a vision-language checkpoint: what is not the text's comes out as it was. Small runs on CPU ranks."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import files, first_difference
from verlc_test import Scratch, Tests, run, save_tensors, series, tensors

STEPS = 3
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 97 / 97
"""
A = "actor_rollout_ref."
OTHER = {"model.visual.patch_embed.proj.weight": ("BF16", [4, 3, 2], bytes(range(48))), "mtp.fc.weight": ("F32", [2, 2], bytes(16)),
         "mtp.norm.weight": ("BF16", [5], bytes(range(10)))}


def hybrid_model(s):
    """The scratch's model as a Qwen3.5 with a vision tower that nobody reads: gated delta nets, and gated attention in layer 3."""
    text = json.loads((s.dir / "model/config.json").read_text())
    text |= {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "linear_key_head_dim": 16, "linear_value_head_dim": 32, "hidden_size": 96, "intermediate_size": 128}
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text,
              "vision_config": {"model_type": "qwen3_5_vision"}, "tie_word_embeddings": True}
    (s.dir / "hybrid.json").write_text(json.dumps(config))
    run("model", "init", "--arch", s.dir / "hybrid.json", "--out", s.dir / "hybrid", "--tokenizer", s.dir / "model", "--dtype",
        "fp32")
    weights = s.dir / "hybrid/model.safetensors"
    save_tensors(weights, tensors(weights) | OTHER)
    return s.dir / "hybrid"


def grpo(s, model, d, **keys):
    keys = {A + "model.path": model, "trainer.total_training_steps": STEPS, "trainer.save_freq": 1, "trainer.device": "cpu",
            A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.force_old_log_prob": True, "data.max_response_length": 48,
            "reward.custom_reward_function.path": s.dir / "reward.py", "reward.num_workers": 1, **keys}
    return run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in keys.items()}), check=False)


def check_grpo(s, model, test):
    bf16 = {A + "actor.fsdp_config.dtype": "bfloat16", A + "actor.optim.optimizer": "Muon"}
    cases = {"bf16, Muon": (bf16, ((2, "auto"), (3, "sharded"))), "lora": ({A + "model.lora_rank": 4}, ((2, "auto"),))}
    for name, (keys, layouts) in cases.items():
        one = s.dir / name.replace(" ", "_").replace(",", "")
        for n, layout in ((1, "auto"), *layouts):
            d = one if n == 1 else pathlib.Path(f"{one}_{layout}_{n}")
            p = grpo(s, model, d, **keys, **{"trainer.ranks": n, "trainer.layout": layout})
            why = p.stderr[-1500:] if p.returncode else n > 1 and first_difference(one, d, STEPS)
            test(f"{name}: {n} rank(s), {layout}", not why, why)
        diff = series(one, "training/rollout_probs_diff_max")
        test(f"{name}: the update has the rollout's probabilities", len(diff) == STEPS and not any(diff), diff)
        norms = series(one, "actor/grad_norm")
        test(f"{name}: there are gradients", len(norms) == STEPS and all(norms), norms)
    one = s.dir / "bf16_Muon"
    before, after = (tensors(d / "model.safetensors") for d in (model, one / f"global_step_{STEPS}/actor"))
    prefix = "model.language_model.layers.0.linear_attn."
    test("files have the names that they had", before.keys() == after.keys(), sorted(before.keys() ^ after.keys()))
    trained = [prefix + n for n in ("in_proj_qkv.weight", "conv1d.weight", "norm.weight", "in_proj_b.weight")]
    test("a gated delta net is trained", all(before[k][2] != after[k][2] for k in trained))
    test("other parts keep their bytes", all(after[k] == before[k] and after[k][2] == OTHER[k][2] for k in OTHER))
    before = files(one, STEPS)
    shutil.rmtree(one / f"global_step_{STEPS}")
    (one / "latest_checkpointed_iteration.txt").write_text(str(STEPS - 1))
    p = grpo(s, model, one, **bf16, **{"trainer.ranks": 2})
    test("resumed on two ranks: the same files", p.returncode == 0 and files(one, STEPS) == before, p.stderr[-1500:])


def check_sft(s, model, test):
    chats = [{"messages": [{"role": "user", "content": f"What is {i} + 1?"},
                           {"role": "assistant", "content": f"It is {i + 1}." + " Yes." * (i % 9)}]} for i in range(16)]
    s.write("chats.jsonl", chats)
    for n in (1, 2):
        args = {"model.path": model, "data.train_files": s.dir / "chats.jsonl", "data.train_batch_size": 8, "data.max_length": 128,
                "data.max_token_len_per_gpu": 256, "optim.lr": 1e-3, "trainer.total_training_steps": 2, "trainer.save_freq": 2,
                "trainer.test_freq": -1, "trainer.device": "cpu", "trainer.logger": "[console,file]", "trainer.ranks": n,
                "trainer.default_local_dir": s.dir / f"sft{n}"}
        p = run("sft", *[f"{k}={v}" for k, v in args.items()], check=False)
        why = p.stderr[-1500:] if p.returncode else n > 1 and first_difference(s.dir / "sft1", s.dir / "sft2", 2)
        test(f"sft: {n} rank(s)", not why, why)


def main():
    test = Tests()
    with Scratch() as s:
        model = hybrid_model(s)
        (s.dir / "reward.py").write_text(REWARD)
        check_grpo(s, model, test)
        check_sft(s, model, test)
    test.end()


main()
