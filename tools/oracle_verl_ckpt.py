"""verl's checkpoints beside verl: shards written by torch's own ranks (gloo, CPU) through verl's FSDPCheckpointManager, merged
by verl's FSDPModelMerger and by `verlc model_merger`; every tensor is compared bit for bit, in fp32 with the weights that the
ranks had and in bf16 with what verl's merger writes.

  python tools/oracle_verl_ckpt.py check VERLC        needs torch, transformers, peft, accelerate and verl 0.9.1's files
  python tools/oracle_verl_ckpt.py make DIR CASE...   fixtures; torch alone, of any version

tests/fixtures/verl_ckpt was made by the second: fsdp2_w2 and lora_w1 with torch 2.6.0, hsdp_w4 with torch 2.9.1, fsdp2_w4 with
torch 2.15.0, fsdp1_w2 with torch 2.4.1. Of a fixture with replicas only the first is kept, as verl's merger reads no other.
"""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# a Qwen2 of one layer, whose rows do not divide by the ranks everywhere
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 12, "intermediate_size": 18,
          "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 37,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
          "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 0, "use_sliding_window": False}
CASES = {"fsdp2_w1": ("fsdp2", 1), "fsdp2_w2": ("fsdp2", 2), "fsdp2_w4": ("fsdp2", 4), "fsdp1_w1": ("fsdp1", 1),
         "fsdp1_w2": ("fsdp1", 2), "fsdp1_w4": ("fsdp1", 4), "hsdp_w4": ("hsdp2", 4), "hsdp1_w4": ("hsdp1", 4),
         "lora_w1": ("fsdp2", 1)}


def in_ranks(fn, world, *args):
    """fn(rank, world, *args) in so many processes of one group. Forked: they have the packages of this one."""
    with tempfile.TemporaryDirectory() as tmp:
        mp.start_processes(_rank, (world, f"file://{tmp}/store", fn, args), nprocs=world, start_method="fork")


def _rank(rank, world, store, fn, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    fn(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()


def shard(model, kind, world):
    """As verl's workers wrap an actor: FSDP1 or FSDP2, over all ranks or over two with replicas."""
    if kind.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if kind.endswith("2"):
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            from torch.distributed._composable.fsdp import fully_shard
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    strategy = ShardingStrategy.HYBRID_SHARD if kind.startswith("hsdp") else ShardingStrategy.FULL_SHARD
    return FSDP(model, device_id=torch.device("cpu"), device_mesh=mesh, sharding_strategy=strategy, use_orig_params=False)


# ---- fixtures ----


def tree(shapes):
    """A module with parameters of these names."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.register_parameter(leaf, nn.Parameter(torch.randn(shape)))
    return root


def qwen2_shapes(config):
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {"self_attn.q_proj.weight": (h, h), "self_attn.q_proj.bias": (h,), "self_attn.k_proj.weight": (kv, h),
             "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.weight": (kv, h), "self_attn.v_proj.bias": (kv,),
             "self_attn.o_proj.weight": (h, h), "mlp.gate_proj.weight": (f, h), "mlp.up_proj.weight": (f, h),
             "mlp.down_proj.weight": (h, f), "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    return {"model.embed_tokens.weight": (v, h), **{f"model.layers.0.{k}": s for k, s in layer.items()},
            "model.norm.weight": (h,), "lm_head.weight": (v, h)}


def lora_shapes(shapes):
    out = {}
    for name, shape in shapes.items():
        base = "base_model.model." + name
        if ".q_proj.weight" in name or ".v_proj.weight" in name:
            stem = base[:-len("weight")]
            out[stem + "base_layer.weight"] = shape
            out[stem + "lora_A.default.weight"] = (2, shape[1])
            out[stem + "lora_B.default.weight"] = (shape[0], 2)
        else:
            out[base.replace(".q_proj.bias", ".q_proj.base_layer.bias").replace(".v_proj.bias", ".v_proj.base_layer.bias")] = shape
    return out


def fixture_rank(rank, world, out, kind, lora):
    torch.manual_seed(world)
    shapes = qwen2_shapes(CONFIG)
    model = tree(lora_shapes(shapes) if lora else shapes)
    full = {k: v.clone() for k, v in model.state_dict().items()}
    model = shard(model, kind, world)
    if kind.endswith("2"):
        part = model.state_dict()
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)):
            part = model.state_dict()
    if not kind.startswith("hsdp") or rank < 2:
        torch.save(part, out / f"model_world_size_{world}_rank_{rank}.pt")
    if rank > 0:
        return
    (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": int(kind[-1]), "world_size": world}, indent=4))
    (out / "huggingface").mkdir()
    (out / "huggingface/config.json").write_text(json.dumps(CONFIG, indent=2))
    if lora:
        (out / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}, indent=4))
    # the weights as bytes, in the form of a safetensors file: no package is needed to write it
    write_safetensors(out / "whole.safetensors", full)


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, t in tensors.items():
        n = t.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            f.write(t.contiguous().numpy().tobytes())


def make(out, names):
    for name in names:
        kind, world = CASES[name]
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
        in_ranks(fixture_rank, world, out / name, kind, name.startswith("lora"))
        print(f"wrote {out / name} with torch {torch.__version__}")


# ---- beside verl ----


def models():
    """Name -> a model of transformers with random weights."""
    from transformers import (AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, Qwen2Config, Qwen3Config)

    small = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
             "num_key_value_heads": 1, "vocab_size": 101, "max_position_embeddings": 64, "head_dim": 8}
    torch.manual_seed(3)
    out = {"qwen2": AutoModelForCausalLM.from_config(Qwen2Config(**small, tie_word_embeddings=False)),
           "qwen2_tied": AutoModelForCausalLM.from_config(Qwen2Config(**small, tie_word_embeddings=True)),
           "llama": AutoModelForCausalLM.from_config(LlamaConfig(**small, tie_word_embeddings=False)),
           "qwen3_bf16": AutoModelForCausalLM.from_config(Qwen3Config(**small, tie_word_embeddings=True)).to(torch.bfloat16),
           "critic": AutoModelForTokenClassification.from_config(Qwen2Config(**small, num_labels=1))}
    from peft import LoraConfig, get_peft_model
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    out["lora"] = get_peft_model(copy.deepcopy(out["qwen2"]), config)
    with torch.no_grad():
        for name, p in out["lora"].named_parameters():
            if "lora_B" in name:
                p.normal_()
        for p in [p for m in out.values() for p in m.parameters() if p.ndim == 1]:
            p.add_(torch.randn_like(p) * 0.1)
    return out


def save_rank(rank, world, out, names, kind):
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    built = models()
    for name in names:
        to, model = out / f"{name}_{kind}_{world}", built[name]
        model.config.architectures = [type(getattr(model, "base_model", model).model if name == "lora" else model).__name__]
        if rank == 0:
            to.mkdir()
            torch.save({k: v.clone() for k, v in model.state_dict().items()}, to / "whole.pt")
        dist.barrier()
        contents = {"save_contents": ["model"], "load_contents": ["model"]}
        manager = FSDPCheckpointManager(shard(model, kind, world), None, None, None, checkpoint_config=contents)
        manager.save_checkpoint(str(to / "actor"), global_step=1)


def merge_as_verl(_, directories):
    from verl.model_merger import base_model_merger
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    base_model_merger.hf_tokenizer = base_model_merger.hf_processor = lambda *a, **kw: None  # these models have none
    for out in directories:
        config = ModelMergerConfig(operation="merge", backend="fsdp", target_dir=str(out / "verls"), local_dir=str(out / "actor"),
                                   hf_model_config_path=str(out / "actor/huggingface"))
        FSDPModelMerger(config).merge_and_save()


def tensors_of(directory):
    from safetensors.torch import load_file
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        out.update(load_file(path))
    return out


def equal(got, want):
    return (got.keys() == want.keys() and
            all(got[k].dtype == want[k].dtype and got[k].shape == want[k].shape and
                torch.equal(got[k].contiguous().flatten().view(torch.uint8), want[k].contiguous().flatten().view(torch.uint8))
                for k in want))


def peft_split(full):
    """(base, adapter) under the names that each has in a file."""
    base = {k.replace("base_model.model.", "").replace(".base_layer", ""): v for k, v in full.items() if "lora_" not in k}
    return base, {k.replace(".default", ""): v for k, v in full.items() if "lora_" in k}


def check_one(verlc, out, name):
    """Names of the comparisons that fail."""
    from transformers import AutoModelForCausalLM
    full = torch.load(out / "whole.pt", weights_only=True)
    base, adapter = peft_split(full) if name == "lora" else (dict(full), {})
    if name in ("qwen2_tied", "qwen3_bf16"):
        base.pop("lm_head.weight", None)
    actor, ours, own, verls = out / "actor", out / "ours", out / "own", out / "verls"
    run = [verlc, "model_merger", "merge", "--backend", "fsdp", "--local_dir", actor, "--target_dir", ours]
    subprocess.run(run, check=True, stderr=subprocess.DEVNULL)
    subprocess.run([verlc, "model", "merge", "--model", actor, "--out", own], check=True, stderr=subprocess.DEVNULL)
    tested = subprocess.run([verlc, "model_merger", "test", "--backend", "fsdp", "--local_dir", actor, "--test_hf_dir", verls],
                            stderr=subprocess.DEVNULL)
    results = {"own dtype": equal(tensors_of(own), base),
               "bf16": equal(tensors_of(ours), {k: v.bfloat16() for k, v in base.items()}),
               "verl's merger": equal(tensors_of(ours), tensors_of(verls)), "test": tested.returncode == 0}
    if adapter:
        results["adapter"] = equal(tensors_of(own / "lora_adapter"), adapter)
        results["verl's adapter"] = equal(tensors_of(ours / "lora_adapter"), tensors_of(verls / "lora_adapter"))
        theirs, mine = (json.loads((d / "lora_adapter/adapter_config.json").read_text()) for d in (verls, ours))
        results["adapter_config.json"] = all(theirs[k] == mine[k] for k in ("r", "lora_alpha", "task_type", "peft_type")) \
            and set(theirs["target_modules"]) == set(mine["target_modules"])
    elif name != "critic":
        loaded = AutoModelForCausalLM.from_pretrained(ours).state_dict()
        results["from_pretrained"] = all(torch.equal(loaded[k].float(), v.bfloat16().float()) for k, v in full.items())
    return [k for k, ok in results.items() if not ok]


def import_verl():
    import oracle_verl
    sys.meta_path.append(oracle_verl.Absent())
    import peft  # noqa: F401
    from verl.model_merger import fsdp_model_merger  # noqa: F401
    from verl.utils.checkpoint import fsdp_checkpoint_manager  # noqa: F401


def check(verlc):
    torch.set_num_threads(1)
    import_verl()
    every, two = ["qwen2", "qwen2_tied", "llama", "qwen3_bf16", "critic", "lora"], ["qwen2_tied", "critic"]
    runs = [("fsdp2", w, every) for w in (1, 2, 4)]
    runs += [(k, w, two) for k, w in (("fsdp1", 1), ("fsdp1", 2), ("fsdp1", 4), ("hsdp2", 4), ("hsdp1", 4))]
    with tempfile.TemporaryDirectory() as tmp:
        for kind, world, names in runs:
            in_ranks(save_rank, world, pathlib.Path(tmp), names, kind)
        cases = [(n, pathlib.Path(tmp) / f"{n}_{k}_{w}") for k, w, names in runs for n in names]
        mp.start_processes(merge_as_verl, ([out for _, out in cases],), nprocs=1, start_method="fork")
        bad = {out.name: failed for name, out in cases if (failed := check_one(verlc, out, name))}
    print(f"{len(cases)} checkpoints of 1, 2 and 4 ranks, torch {torch.__version__}: {len(bad)} differ {bad or ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(pathlib.Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["check"]:
        sys.exit(check(sys.argv[2]))
    else:
        sys.exit(__doc__)
