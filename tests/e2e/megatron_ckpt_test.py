"""verl's Megatron checkpoints: the fixtures that megatron-core wrote (tools/oracle_megatron.py) become model directories bit for
bit, and runs start from a dist_ckpt/ in any sharding with the bits of runs that start from the model itself."""

import json
import math
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import torch_file as tf  # noqa: E402
from verlc_test import Scratch, Tests, run  # noqa: E402

FIXTURES = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2])) / "tests/fixtures/megatron_ckpt"
LINE = json.dumps({"ids": [1, 5, 9, 2, 30, 36], "response_start": 1}) + "\n"


def read(path):
    """{name: (dtype, shape, bytes)}"""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + n])
    return {k: (v["dtype"], v["shape"], raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])
            for k, v in header.items() if k != "__metadata__"}


def merge(local, target, *more, check=True):
    return run("model_merger", "merge", "--backend", "megatron", "--local_dir", local, "--target_dir", target, *more, check=check)


def fixtures(test, dir):
    for name in sorted(p.name for p in FIXTURES.iterdir()):
        actor, whole = FIXTURES / name / "actor", read(FIXTURES / name / "whole.safetensors")
        run("model", "merge", "--model", FIXTURES / name, "--out", dir / name)
        test(f"{name}: the bits that torch reads", read(dir / name / "model.safetensors") == whole)
        merge(actor, dir / (name + "_bf16"))
        got = read(dir / (name + "_bf16") / "model.safetensors")
        f32 = {k for k in whole if k.endswith("e_score_correction_bias")}  # it is never rounded
        test(f"{name}: bf16 as verl's merger writes", got.keys() == whole.keys() and
             all(t == ("F32" if k in f32 else "BF16") for k, (t, _, _) in got.items()))
        same = run("model_merger", "test", "--backend", "megatron", "--local_dir", actor, "--test_hf_dir", dir / name, check=False)
        test(f"{name}: test finds them equal", same.returncode == 0, same.stderr)
        if name != "critic":
            got = [run("score", "--model", d, "--dtype", "fp32", input=LINE).stdout for d in (actor, dir / name)]
            test(f"{name}: the checkpoint gives the merged model's log-probs", got[0] == got[1] and "logp" in got[0], got)
    config = json.loads((dir / "critic/config.json").read_text())
    test("critic: config.json says what it is", config["architectures"] == ["Qwen2ForTokenClassification"] and
         read(dir / "critic/model.safetensors")["score.weight"][1] == [1, 16], config)


def command_line(test, dir):
    src = FIXTURES / "tp2_pp2/actor"
    for what, args, status, words in (
            ("the other backend", ["--backend", "fsdp", "--local_dir", src], 3, "give --backend megatron"),
            ("no checkpoint", ["--backend", "megatron", "--local_dir", FIXTURES], 3, "no dist_ckpt/.metadata"),
            ("no critic", ["--backend", "megatron", "--local_dir", src, "--is-value-model"], 3, "drop the option"),
            ("another model's configuration", ["--backend", "megatron", "--local_dir", src, "--hf_model_path",
                                               FIXTURES / "pp2_single/actor/model/huggingface"], 3, "which config.json asks for")):
        p = run("model_merger", "merge", *args, "--target_dir", dir / "x", check=False)
        test(f"refused: {what}", p.returncode == status and words in p.stderr and not (dir / "x").exists(), p.stderr)
    merge(src, dir / "no_head", "--tie-word-embedding")
    test("--tie-word-embedding leaves output_layer out", "lm_head.weight" not in read(dir / "no_head/model.safetensors"))
    shutil.copytree(src / "dist_ckpt", dir / "converted")
    p = merge(dir / "converted", dir / "from_converted", "--hf_model_path", src / "huggingface")
    test("the files alone, with --hf_model_path", read(dir / "from_converted/model.safetensors") ==
         read(dir / "tp2_pp2_bf16/model.safetensors"), p.stderr)
    p = merge(dir / "converted", dir / "x", check=False)
    test("refused: the files alone", p.returncode == 3 and "config.json" in p.stderr, p.stderr)
    experts, latent = FIXTURES / "experts_single/actor", FIXTURES / "latent_single/actor"
    for i, (what, of, config, words) in enumerate((
            ("norms that are offsets", src, {"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
            ("another number of experts", experts, {"num_moe_experts": 8}, "num_moe_experts is 8, by config.json 4"),
            ("another choice of experts", experts, {"moe_router_topk": 1}, "moe_router_topk is 1, by config.json 2"),
            ("experts, which config.json has not", src, {"num_moe_experts": 8}, "num_moe_experts is 8, by config.json 0"),
            ("latent attention, which config.json has not", src, {"multi_latent_attention": True},
             "multi_latent_attention is true, by config.json false"),
            ("another latent", latent, {"kv_lora_rank": 8, "kv_channels": 128}, "kv_lora_rank is 8, by config.json 6"))):
        copy = dir / f"other{i}/actor"
        shutil.copytree(of, copy)
        (copy / "transformer_config.json").write_text(json.dumps(config))
        p = merge(copy, dir / "x", check=False)
        test(f"refused: {what}", p.returncode == 3 and words in p.stderr, p.stderr)
    (dir / "other0/actor/transformer_config.json").write_text('{"num_moe_experts": null, "moe_router_topk": 2}')
    p = merge(dir / "other0/actor", dir / "defaults", check=False)
    test("read: a configuration's defaults of experts that there are not", p.returncode == 0, p.stderr)


def latents(test, dir):
    """DeepSeek-V3 under the names of either kind of modules; what is missing, and what has another shape."""
    bias, norm = "decoder.layers.0.mlp.router.expert_bias", "decoder.layers.0.self_attention.kv_layernorm.weight"
    for i, (te, change, words) in enumerate((
            (False, {}, None), (True, {"mtp.layers.0.eh_proj.weight": (4, 8)}, None),
            (False, {bias: None}, "no tensor becomes model.layers.0.mlp.gate.e_score_correction_bias"),
            (False, {bias: (3,)}, "becomes model.layers.0.mlp.gate.e_score_correction_bias of shape (3, 1)"),
            (False, {norm: None}, "no tensor becomes model.layers.0.self_attn.kv_a_layernorm.weight"),
            (True, {norm: (2,)}, "two tensors become model.layers.0.self_attn.kv_a_layernorm.weight"),
            (True, {"decoder.layers.0.self_attention.linear_q_down_proj.weight": (3, 4)}, "config.json does not ask for"))):
        shapes = {k: s for k, s in {**tf.tiny_deepseek_v3(te), **change}.items() if s}
        base = dir / f"latent{i}"
        save(base, {k: ("F32", s, bytes(4 * math.prod(s))) for k, s in shapes.items()}, lambda shape: (1,) * len(shape))
        (base / "huggingface").mkdir()
        (base / "huggingface/config.json").write_text(json.dumps(tf.TINY_DEEPSEEK_V3))
        p = merge(base, dir / f"latent{i}_out", check=False)
        if words:
            test(f"refused: {words}", p.returncode == 3 and words in p.stderr, p.stderr)
            continue
        got = read(dir / f"latent{i}_out/model.safetensors")
        test(f"DeepSeek-V3, te {te}: the correction bias is f32, all else bf16", p.returncode == 0 and
             {k for k, (t, _, _) in got.items() if t == "F32"} == {"model.layers.0.mlp.gate.e_score_correction_bias"}, p.stderr)
        test("MTP layers are noted" if change else "no note without", ("MTP layers" in p.stderr) == bool(change), p.stderr)


def start(test, s):
    """Runs from the tiny model, cut in ways of tensor and pipeline parallel, and in some that neither makes."""
    model, config = read(s.dir / "model/model.safetensors"), json.loads((s.dir / "model/config.json").read_text())
    theirs = tf.megatron_names(model, config)
    theirs["optimizer.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"] = ("F32", (4,), bytes(16))
    for where, parts in (("v1/global_step_7/actor", lambda shape: (1,) * len(shape)),
                         ("v2/global_step_7/actor/model", lambda shape: (len(shape) > 1 and 2 or 1, 2, 1)[:len(shape)]),
                         ("odd/global_step_7/model", lambda shape: (1, 3, 5)[-len(shape):])):
        base = s.dir / where
        save(base, theirs, parts)
        shutil.copytree(s.dir / "model", base / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
        run("model", "merge", "--model", base, "--out", s.dir / "whole" / where)
        test(f"the model again from {where}", read(s.dir / "whole" / where / "model.safetensors") == model)
    want, _ = first_step(s, "run", s.dir / "model")
    got, p = first_step(s, "run_v2", s.dir / "v2/global_step_7/actor")
    test("PPO from it has the bits of PPO from the model", got == want and "3 files of Megatron's" in p.stderr, p.stderr[-500:])
    theirs["output_layer.weight"] = ("F32", (1, config["hidden_size"]), bytes(4 * config["hidden_size"]))
    save(s.dir / "value/model", theirs, lambda shape: (1,) * len(shape))
    shutil.copytree(s.dir / "model", s.dir / "value/model/huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    p = run(*s.ppo("run_critic", algorithm__adv_estimator="gae", critic__model__path=s.dir / "value", critic__optim__lr=1e-4,
                   critic__ppo_micro_batch_size_per_gpu=2, trainer__total_training_steps=1))
    test("a critic goes on from its head", "files of Megatron's" in p.stderr and "value head is new" not in p.stderr,
         p.stderr[-900:])
    for path in (s.dir / "v2/global_step_7", base / "huggingface", base / "dist_ckpt"):
        p = run("score", "--model", path, input=LINE)
        test(f"a model: {path.relative_to(s.dir)}", "logp" in p.stdout, p.stderr)
    p = merge(s.dir / "v1/global_step_7/actor", s.dir / "noted")
    test("the optimizer's state is noted", "1 tensors in" in p.stderr and "not read" in p.stderr, p.stderr)
    p = run(*s.ppo("v1", trainer__resume_mode="auto"), check=False)
    test("a resume says how to start from it", p.returncode == 3 and "model.path=" in p.stderr, p.stderr)
    saved = s.dir / "bridge/actor/model"
    shutil.copytree(s.dir / "model", saved / "huggingface")
    (saved / "dist_ckpt").mkdir()  # verl makes it, empty
    p = run("score", "--model", saved.parent, input=LINE)
    test("mbridge's model/huggingface is the model", "logp" in p.stdout, p.stderr)
    merge(saved.parent, s.dir / "bridge_out")
    test("and is what a merge copies", (s.dir / "bridge_out/model.safetensors").exists())


def save(base, tensors, parts):
    """parts: into how many boxes a shape is cut along each dimension."""
    (base / "dist_ckpt").mkdir(parents=True)
    ckpt = tf.Dcp(3)
    for name, (kind, shape, data) in tensors.items():
        ckpt.add(name, kind, shape, data, parts(shape))
    ckpt.write(base / "dist_ckpt")


def first_step(s, name, path):
    p = run(*s.ppo(name, actor_rollout_ref__model__path=path, trainer__total_training_steps=1))
    return (s.dir / name / "global_step_1/actor/model.safetensors").read_bytes(), p


def main():
    test = Tests()
    with Scratch() as s:
        fixtures(test, s.dir)
        command_line(test, s.dir)
        latents(test, s.dir)
        start(test, s)
    test.end()


main()
