"""verl's FSDP checkpoints: the fixtures that torch wrote (tools/oracle_verl_ckpt.py) become model directories bit for bit, and
runs start from shards with the bits of runs that start from the model itself."""

import json
import os
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import torch_file as tf  # noqa: E402
from verlc_test import Scratch, Tests, run  # noqa: E402

FIXTURES = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2])) / "tests/fixtures/verl_ckpt"


def read(path):
    """{name: (dtype, shape, bytes)}"""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + n])
    return {k: (v["dtype"], v["shape"], raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])
            for k, v in header.items() if k != "__metadata__"}


def bf16(data):
    """f32 to nearest even, as the upper halves."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return struct.pack(f"<{len(words)}H", *((u + 0x7fff + (u >> 16 & 1)) >> 16 for u in words))


def rounded(tensors):
    return {k: ("BF16", shape, bf16(data)) for k, (_, shape, data) in tensors.items()}


def merge(local, target, *more, check=True):
    return run("model_merger", "merge", "--backend", "fsdp", "--local_dir", local, "--target_dir", target, *more, check=check)


def compare(local, hf):
    return run("model_merger", "test", "--backend", "fsdp", "--local_dir", local, "--test_hf_dir", hf, check=False)


def fixtures(test, dir):
    names = sorted(p.name for p in FIXTURES.iterdir() if not p.name.startswith("lora"))
    test("there are fixtures of 2 and 4 ranks", len(names) >= 3, names)
    for name in names:
        src, whole = FIXTURES / name, read(FIXTURES / name / "whole.safetensors")
        merge(src, dir / name)
        test(f"{name}: bf16 as verl's merger", read(dir / name / "model.safetensors") == rounded(whole))
        run("model", "merge", "--model", src, "--out", dir / (name + "_own"))
        test(f"{name}: the bits of the shards", read(dir / (name + "_own") / "model.safetensors") == whole)
        config = json.loads((dir / name / "config.json").read_text())
        test(f"{name}: config.json", config["torch_dtype"] == "bfloat16" and config["hidden_size"] == 12, config)
        lines = json.dumps({"ids": [1, 5, 9, 2, 30, 36], "response_start": 1}) + "\n"
        scores = [run("score", "--model", d, "--dtype", "fp32", input=lines).stdout
                  for d in (src, src / "huggingface", dir / (name + "_own"))]
        test(f"{name}: shards give the merged model's log-probs", scores[0] == scores[1] == scores[2] and "logp" in scores[0],
             scores)
        same = compare(src, dir / name)
        test(f"{name}: test finds them equal", same.returncode == 0, same.stderr)
    other = compare(FIXTURES / "fsdp2_w2", dir / "fsdp2_w4")
    test("test finds another model", other.returncode == 3 and "differs from the merged checkpoint" in other.stderr,
         other.stderr)
    merge(FIXTURES / names[0], dir / "split", "--max-shard-mb", 1)
    test("one small file is not split", (dir / "split/model.safetensors").exists())


def lora(test, dir):
    src, whole = FIXTURES / "lora_w1", read(FIXTURES / "lora_w1/whole.safetensors")
    merge(src, dir / "lora", "--dtype", "fp32")
    base, adapter = read(dir / "lora/model.safetensors"), read(dir / "lora/lora_adapter/adapter_model.safetensors")
    test("LoRA: the base under its model's names", base == {k.replace("base_model.model.", "").replace(".base_layer", ""): v
                                                           for k, v in whole.items() if "lora_" not in k}, sorted(base))
    test("LoRA: the adapter under peft's names",
         adapter == {k.replace(".default", ""): v for k, v in whole.items() if "lora_" in k},
         sorted(adapter))
    config = json.loads((dir / "lora/lora_adapter/adapter_config.json").read_text())
    test("LoRA: adapter_config.json", (config["r"], config["lora_alpha"], sorted(config["target_modules"])) ==
         (2, 4, ["q_proj", "v_proj"]), config)
    run("model", "merge", "--model", dir / "lora", "--adapter", dir / "lora/lora_adapter", "--out", dir / "lora_merged")
    test("LoRA: base and adapter merge", (dir / "lora_merged/model.safetensors").exists())
    alone = run("score", "--model", src, check=False, input='{"ids": [1, 2], "response_start": 1}\n')
    test("LoRA: not opened as if it had no adapter", alone.returncode == 3 and "lora_adapter_path" in alone.stderr, alone.stderr)
    copy = dir / "no_alpha"
    copy.mkdir()
    for f in src.iterdir():
        if f.name != "lora_train_meta.json":
            (copy / f.name).symlink_to(f)
    unknown = merge(copy, dir / "no_alpha_out", check=False)
    test("LoRA: no lora_alpha is made up", unknown.returncode == 3 and "lora_alpha" in unknown.stderr, unknown.stderr)


def start(test, s):
    """Runs from shards of the tiny model, as PPO and SFT of verl lay them out."""
    model = read(s.dir / "model/model.safetensors")
    sft = s.dir / "verl/global_step_7"
    actor = s.dir / "verl_ppo/global_step_7/actor"
    for d in (sft, actor):
        d.mkdir(parents=True)
        tf.shard_model(model, d, 3)
        (d / "huggingface").mkdir()
        for f in (s.dir / "model").iterdir():
            if f.name != "model.safetensors":
                (d / "huggingface" / f.name).write_bytes(f.read_bytes())
    weights = []
    for i, path in enumerate((s.dir / "model", actor, actor.parent, sft)):
        keys = {"actor_rollout_ref__model__path": path, "trainer__total_training_steps": 1}
        p = run(*s.ppo(f"run{i}", **keys))
        weights.append((s.dir / f"run{i}/global_step_1/actor/model.safetensors").read_bytes())
        read_shards = i == 0 or "3 FSDP ranks" in p.stderr
        test(f"PPO from {path.relative_to(s.dir)}", weights[i] == weights[0] and read_shards, p.stderr[-500:])
    tokenizer = s.dir / "run1/global_step_1/actor/tokenizer.json"
    test("the tokenizer goes along", tokenizer.read_bytes() == (s.dir / "model/tokenizer.json").read_bytes())
    for mode, root, step in (("resume_path", "elsewhere", "global_step_7/actor"),
                             ("auto", "verl_ppo", "global_step_N/actor")):
        keys = {"trainer__resume_mode": mode, "trainer__resume_from_path": actor.parent}
        p = run(*s.ppo(root, **keys), check=False)
        test(f"resume_mode={mode} says how to start from it", p.returncode == 3 and
             "model.path=" in p.stderr and step in p.stderr, p.stderr)
    critic = run(*s.ppo("critic", algorithm__adv_estimator="gae", critic__model__path=actor, critic__optim__lr=1e-4,
                        critic__ppo_micro_batch_size_per_gpu=2,
                        trainer__total_training_steps=1))
    test("a critic from shards", "value head is new" in critic.stderr, critic.stderr[-500:])


def command_line(test, dir):
    src = FIXTURES / "fsdp2_w2"
    fsdp, out = ["--backend", "fsdp", "--local_dir"], ["--target_dir", dir / "x"]
    for what, args, status, words in (
            ("megatron", ["--backend", "megatron", "--local_dir", src, *out], 3, "--backend megatron: unsupported"),
            ("an upload", [*fsdp, src, *out, "--hf_upload_path", "a/b"], 3, "hf upload a/b"),
            ("no directory", [*fsdp, dir / "nowhere", *out], 3, "there is no such"),
            ("no shards", [*fsdp, FIXTURES, *out], 3, "no model_world_size_W_rank_R.pt"),
            ("another backend", ["--backend", "fsdp3", "--local_dir", src, *out], 2, "expected fsdp"),
            ("no backend", ["--local_dir", src], 2, "--backend fsdp"),
            ("a full directory", [*fsdp, src, "--target_dir", FIXTURES], 2, "not empty")):
        p = run("model_merger", "merge", *args, check=False)
        test(f"refused: {what}", p.returncode == status and words in p.stderr, p.stderr)
    p = merge(src, dir / "flags", "--tie-word-embedding", "--is-value-model", "--trust-remote-code", "--use_cpu_initialization")
    test("options that do nothing say so", p.stderr.count("note") == 4, p.stderr)
    first = (dir / "flags/model.safetensors").stat().st_ino
    again, forced = merge(src, dir / "flags", check=False), merge(src, dir / "flags", "--force")
    test("--force replaces a model", again.returncode == 2 and forced.returncode == 0 and
         (dir / "flags/model.safetensors").stat().st_ino != first and not list(dir.glob("flags*tmp")), again.stderr)


def main():
    test = Tests()
    with Scratch() as s:
        for part in (fixtures, lora, command_line):
            part(test, s.dir)
        start(test, s)
    test.end()


main()
