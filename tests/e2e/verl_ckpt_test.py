"""verl's FSDP checkpoints: the fixtures that torch wrote (tools/oracle_verl_ckpt.py) become model directories bit for bit, and
runs start from shards with the bits of runs that start from the model itself. verlc's own, under the same command line and the
same names: copied, with huggingface/ and lora_adapter/."""

import json
import os
import pathlib
import shutil
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import torch_file as tf  # noqa: E402
from verlc_test import Scratch, Tests, run, save_tensors  # noqa: E402

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
        if f.name != "lora_train_meta.json" and f.is_file():
            (copy / f.name).write_bytes(f.read_bytes())
    shutil.copytree(src / "huggingface", copy / "huggingface")
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
            ("megatron", ["--backend", "megatron", "--local_dir", src, *out], 3, "give --backend fsdp"),
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


def own(test, s):
    """train -> merge -> evaluate on a checkpoint of verlc's."""
    run(*s.ppo("own", trainer__total_training_steps=1, actor_rollout_ref__actor__checkpoint__save_contents="[model,hf_model]"))
    step = s.dir / "own/global_step_1"
    actor = step / "actor"
    p = merge(actor, s.dir / "own_merged")
    whole = read(actor / "model.safetensors")
    same = rounded(whole) if any(t == "F32" for t, _, _ in whole.values()) else whole
    test("own: copied as bf16, with one note", read(s.dir / "own_merged/model.safetensors") == same and
         p.stderr.count("note:") == 1 and "nothing is to be merged" in p.stderr, p.stderr)
    lines = json.dumps({"ids": [1, 5, 9, 2, 30, 36], "response_start": 1}) + "\n"
    p = run("score", "--model", s.dir / "own_merged", input=lines)
    test("own: the copy is evaluated", "logp" in p.stdout and (s.dir / "own_merged/tokenizer.json").exists(), p.stderr)
    run("model_merger", "merge", "--backend", "megatron", "--local_dir", step, "--target_dir", s.dir / "own_fp32", "--dtype",
        "fp32")
    master = tf_flat(step / "optim/actor.safetensors")
    got = b"".join(d for _, _, d in read(s.dir / "own_fp32/model.safetensors").values())
    test("own: fp32 is the master, by the step's directory and whatever backend the script says", sorted(got) == sorted(master))
    names = {f.name for f in (actor / "huggingface").iterdir()}
    test("own: hf_model: actor/huggingface has what actor has, weights in the same bytes on disk",
         names == {f.name for f in actor.iterdir() if f.is_file()} and
         (actor / "huggingface/model.safetensors").samefile(actor / "model.safetensors"), names)
    scores = [run("score", "--model", d, input=lines).stdout for d in (actor, actor / "huggingface")]
    test("own: both are models", scores[0] == scores[1])
    shutil.copytree(FIXTURES / "fsdp2_w2", s.dir / "into")
    for src, hf in ((actor, actor / "huggingface"), (s.dir / "into", s.dir / "into/huggingface")):
        merge(src, hf)
        test(f"merged into {src.name}/huggingface, as verl's scripts do", run("score", "--model", hf, input=lines).stdout != "")
    copy = s.dir / "copied/global_step_1"
    shutil.copytree(step, copy)
    (copy / "actor/huggingface/config.json").write_text("{}")
    (copy / "actor/huggingface/model.safetensors").write_bytes(b"merged")
    (copy.parent / "latest_checkpointed_iteration.txt").write_text("1")
    p = run(*s.ppo("copied", trainer__total_training_steps=2))
    test("own: a copy into whose huggingface/ a script has written is resumed", "resumed from" in p.stderr, p.stderr[-500:])
    names = {f.name for f in (s.dir / "copied/global_step_2/actor/huggingface").iterdir()}
    test("own: without hf_model it has configuration and tokenizer", {"config.json", "tokenizer.json"} <= names and
         not any("model.safetensors" in n for n in names), names)
    with (step / "actor/model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x01")
    test.refused("own: a damaged one", merge(actor, s.dir / "no", check=False), 3, "differ from the manifest's checksum")


def tf_flat(path):
    return read(path)["master"][2]


def own_lora(test, s):
    keys = {"actor_rollout_ref__model__lora_rank": 2, "actor_rollout_ref__model__lora_alpha": 4, "trainer__total_training_steps": 1}
    run(*s.ppo("own_lora", **keys))
    actor, out = s.dir / "own_lora/global_step_1/actor", s.dir / "own_lora_merged"
    p = merge(actor, out, "--dtype", "fp32")
    test("own LoRA: the base model, and lora_adapter/ beside it", read(out / "lora_adapter/adapter_model.safetensors") ==
         read(actor / "adapter_model.safetensors") and read(out / "model.safetensors").keys() ==
         read(s.dir / "model/model.safetensors").keys() and "lora_adapter" in p.stderr, p.stderr)
    test("own LoRA: lora_adapter/ in the checkpoint", (actor / "lora_adapter/adapter_model.safetensors").samefile(
        actor / "adapter_model.safetensors") and (actor / "lora_adapter/adapter_config.json").exists())
    names = {f.name for f in (actor / "huggingface").iterdir()}
    test("own LoRA: huggingface/ has configuration and tokenizer of the base model", "model.safetensors" not in names and
         {"config.json", "tokenizer.json"} <= names and not any(n.startswith("adapter_") for n in names), names)
    gone = s.dir / "adapter_copy"
    shutil.copytree(actor, gone)
    config = json.loads((gone / "adapter_config.json").read_text())
    large = {k: (t, shape, struct.pack("<f", 1e3) * (len(data) // 4) if "lora_B" in k else data)
             for k, (t, shape, data) in read(gone / "adapter_model.safetensors").items()}
    save_tensors(gone / "adapter_model.safetensors", large)
    for alpha in (1e308, 3e38):
        (gone / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
        p = run("model", "merge", "--model", s.dir / "model", "--adapter", gone, "--out", s.dir / "inf", check=False)
        test.refused(f"lora_alpha={alpha}", p, 3, "lora_alpha", "tensor model.layers" if alpha < 1e300 else "fp32")
        test("and nothing is written", not (s.dir / "inf").exists())
    (gone / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(s.dir / "nowhere")}))
    p = merge(gone, s.dir / "lora_no_base", check=False)
    test.refused("own LoRA: a base that is not there", p, 3, "nowhere")
    p = merge(gone, s.dir / "lora_base", "--hf_model_path", s.dir / "model")
    test("own LoRA: --hf_model_path names it", (s.dir / "lora_base/model.safetensors").exists(), p.stderr)


def links(test, dir):
    """No file of a checkpoint is read through a link that leaves it."""
    for src, name in (("fsdp2_w2", "model_world_size_2_rank_1.pt"), ("fsdp2_w2", "huggingface/config.json"),
                      ("fsdp2_w2", "fsdp_config.json"), ("fsdp2_w2", "huggingface/tokenizer_config.json"),
                      ("fsdp2_w2", "huggingface"), ("lora_w1", "lora_train_meta.json")):
        d, secret = dir / "linked", dir / "secret"
        for old in (d, secret):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(FIXTURES / src, d)
        secret.mkdir()
        if (d / name).exists():
            (d / name).rename(secret / "x")
        else:
            (secret / "x").write_text("{}")
        (d / name).symlink_to(secret / "x")
        p = merge(d, dir / f"linked_out_{src}_{name.replace('/', '_')}", check=False)
        test.refused(f"a link out of the checkpoint: {name}", p, 3, "a link to", "out of the model directory")
    d = dir / "linked_inside"
    shutil.copytree(FIXTURES / "fsdp2_w2", d)
    (d / "rank1").mkdir()
    (d / "model_world_size_2_rank_1.pt").rename(d / "rank1/shard.pt")
    (d / "model_world_size_2_rank_1.pt").symlink_to("rank1/shard.pt")
    merge(d, dir / "linked_inside_out")
    test("a link inside of it", read(dir / "linked_inside_out/model.safetensors") == rounded(read(d / "whole.safetensors")))
    (dir / "linked_hf").mkdir()
    (dir / "linked_hf/model.safetensors").symlink_to(FIXTURES / "fsdp2_w2/whole.safetensors")
    test.refused("test's directory", compare(FIXTURES / "fsdp2_w2", dir / "linked_hf"), 3, "a link to")


def main():
    test = Tests()
    with Scratch() as s:
        for part in (fixtures, lora, command_line, links):
            part(test, s.dir)
        for part in (start, own, own_lora):
            part(test, s)
    test.end()


main()
