"""verl's Megatron checkpoints: written by megatron-core's GPTModel on CPU ranks (gloo), or by torch.distributed.checkpoint in other
shardings, read by torch and named by verl's MegatronModelMerger, and merged by `verlc model_merger`; every tensor is compared bit
for bit, in the checkpoint's dtype and in bf16.

  python tools/oracle_megatron.py check VERLC        needs torch, transformers, megatron-core 0.16.1's and verl 0.9.1's files
  python tools/oracle_megatron.py make DIR CASE...   fixtures: tests/fixtures/megatron_ckpt

A process that writes may hang in megatron-core's queues: each has a deadline.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from oracle_verl_ckpt import equal, in_ranks, tensors_of
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

DEADLINE = 240  # seconds of one rank
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 4, "vocab_size": 37, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
         "eos_token_id": 0, "rope_theta": 10000.0}
WIDE = SMALL | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1,
           "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20, "norm_topk_prob": False}
# DeepSeek's: shared experts, dense layers first; with `correction` a router's bias
DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 2.0, "first_k_dense_replace": 1, "tie_word_embeddings": False}
LATENT = DEEPSEEK | {"num_key_value_heads": 8, "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4,
                     "v_head_dim": 7, "head_dim": 4}
SMALL_LATENT = LATENT | {"num_key_value_heads": 4, "moe_intermediate_size": 8}
# name -> (model_type, config, dtype)
MODELS = {
    "llama": ("llama", WIDE | {"tie_word_embeddings": False}, torch.float32),
    "llama_mha": ("llama", WIDE | {"num_key_value_heads": 8, "tie_word_embeddings": False}, torch.bfloat16),
    "qwen2": ("qwen2", WIDE | {"tie_word_embeddings": False}, torch.bfloat16),
    "qwen2_tied": ("qwen2", WIDE | {"tie_word_embeddings": True}, torch.float32),
    "qwen3": ("qwen3", WIDE | {"tie_word_embeddings": True}, torch.bfloat16),
    "mistral": ("mistral", WIDE | {"tie_word_embeddings": False}, torch.float16),
    "seed_oss": ("seed_oss", WIDE | {"tie_word_embeddings": False}, torch.bfloat16),
    "critic": ("qwen2", WIDE | {"tie_word_embeddings": False}, torch.float32),
    "qwen3_moe": ("qwen3_moe", WIDE | EXPERTS, torch.bfloat16),
    "qwen3_moe_mixed": ("qwen3_moe", WIDE | EXPERTS | {"mlp_only_layers": [0, 2]}, torch.float32),
    "qwen2_moe": ("qwen2_moe", WIDE | SHARED, torch.bfloat16),
    "mixtral": ("mixtral", WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}, torch.float32),
    "deepseek_v3": ("deepseek_v3", WIDE | LATENT, torch.bfloat16),
    "moonlight": ("deepseek_v3", WIDE | LATENT | {"q_lora_rank": None, "first_k_dense_replace": 2}, torch.float32),
    "deepseek_v2": ("deepseek_v2", WIDE | LATENT | {"q_lora_rank": None, "topk_method": "greedy"}, torch.bfloat16),
    "glm4_moe": ("glm4_moe", WIDE | DEEPSEEK | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
                 torch.bfloat16),
    "small_deepseek_v3": ("deepseek_v3", SMALL | SMALL_LATENT, torch.bfloat16),
    "small_moonlight": ("deepseek_v3", SMALL | SMALL_LATENT | {"q_lora_rank": None, "num_hidden_layers": 1,
                                                               "first_k_dense_replace": 0}, torch.float32),
    "small_qwen2": ("qwen2", SMALL | {"tie_word_embeddings": False}, torch.bfloat16),
    "small_qwen3": ("qwen3", SMALL | {"tie_word_embeddings": True}, torch.float32),
    "small_critic": ("qwen2", SMALL | {"num_hidden_layers": 1, "tie_word_embeddings": False}, torch.float32),
    "small_qwen3_moe": ("qwen3_moe", SMALL | EXPERTS | {"moe_intermediate_size": 8}, torch.bfloat16),
    "small_qwen2_moe": ("qwen2_moe", SMALL | SHARED | {"moe_intermediate_size": 8, "mlp_only_layers": [0]}, torch.float32),
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "seed_oss": "SeedOss",
           "qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "mixtral": "Mixtral", "glm4_moe": "Glm4Moe",
           "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
CORRECTED = ("deepseek_v3", "glm4_moe")  # their routers have a correction bias
STACKED, SINGLE = {}, {"singleton_local_shards": True}  # one tensor for all layers, or one for each
TE = {"te": True}  # norms of latent attention under the names of Transformer Engine's modules
GROUPED = {"grouped": True}  # megatron-core's GroupedMLP; else its SequentialMLP, whose files are TEGroupedMLP's too
# fixtures: model, sizes (tensor, pipeline, expert, and tensor parallel of experts), layout of layers, of directories
CASES = {"tp2_pp2": ("small_qwen2", (2, 2), STACKED, "v1"), "pp2_single": ("small_qwen3", (1, 2), SINGLE, "v2"),
         "critic": ("small_critic", (2, 1), STACKED, "v2"), "experts_tp2_ep2": ("small_qwen3_moe", (2, 1, 2, 2), STACKED, "v2"),
         "experts_single": ("small_qwen2_moe", (2, 1, 2, 1), SINGLE, "v1"),
         "latent_tp2_ep2": ("small_deepseek_v3", (2, 1, 2, 1), STACKED, "v2"),
         "latent_single": ("small_moonlight", (1, 1, 1, 1), SINGLE, "v1")}


def hf_config(name):
    kind, config, dtype = MODELS[name]
    own = {"seed_oss": {"attention_bias": True, "attention_out_bias": False}}.get(kind, {})
    return {"architectures": [CLASSES[kind] + "ForCausalLM"], "model_type": kind, **config, **own,
            "torch_dtype": str(dtype).split(".")[1]}


def on_cpu():
    """megatron-core asks CUDA in places that have nothing to do there."""
    torch.cuda.synchronize = lambda *a, **kw: None
    torch.cuda.set_device = lambda *a, **kw: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = lambda *a, **kw: None
    torch.Tensor.cuda = lambda self, *a, **kw: self
    from megatron.core.transformer.moe import grouped_gemm_util
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None  # no forward pass is run
    from megatron.core.transformer import multi_latent_attention
    multi_latent_attention.TELinear = NoWeights  # Transformer Engine's, where modules are compared with it


# ---- written by megatron-core ----


def experts_of(name, grouped):
    """What verl's config_converter.py gives TransformerConfig of experts."""
    kind, c, _ = MODELS[name]
    n = c.get("num_experts", c.get("num_local_experts", c.get("n_routed_experts")))
    if not n:
        return {}
    dense = c.get("mlp_only_layers", range(c.get("first_k_dense_replace", 0)))
    freq = [int(i not in dense) for i in range(c["num_hidden_layers"])] if dense or "n_routed_experts" in c else 1
    bias = kind in CORRECTED
    shared = c.get("n_shared_experts", 0) * c.get("moe_intermediate_size", 0) or None
    return {"num_moe_experts": n, "moe_ffn_hidden_size": c.get("moe_intermediate_size", c["intermediate_size"]),
            "moe_shared_expert_intermediate_size": c.get("shared_expert_intermediate_size", shared), "moe_layer_freq": freq,
            "moe_router_enable_expert_bias": bias, "moe_router_score_function": "sigmoid" if bias else "softmax",
            "moe_shared_expert_gate": kind == "qwen2_moe", "moe_router_topk": c["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none", "moe_grouped_gemm": grouped, "moe_token_dispatcher_type": "alltoall"}


def latent_of(name):
    """What verl's config_converter.py gives MLATransformerConfig."""
    _, c, _ = MODELS[name]
    if "kv_lora_rank" not in c:
        return {}
    return {"q_lora_rank": c["q_lora_rank"], "kv_lora_rank": c["kv_lora_rank"], "qk_head_dim": c["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": c["qk_rope_head_dim"], "v_head_dim": c["v_head_dim"], "rope_type": "rope",
            "apply_rope_fusion": False, "multi_latent_attention": True}


class NoWeights(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


def gpt_model(name, grouped):
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind, c, dtype = MODELS[name]
    tp, pp = ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
    ep, etp = ps.get_expert_model_parallel_world_size(), ps.get_expert_tensor_parallel_world_size()
    config = (MLATransformerConfig if latent_of(name) else TransformerConfig)(
        num_layers=c["num_hidden_layers"], hidden_size=c["hidden_size"], ffn_hidden_size=c["intermediate_size"],
        num_attention_heads=c["num_attention_heads"], num_query_groups=c["num_key_value_heads"], kv_channels=c["head_dim"],
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=kind in ("qwen2", "qwen2_moe", "seed_oss", "glm4_moe"), normalization="RMSNorm",
        qk_layernorm=kind.startswith("qwen3") or kind == "glm4_moe" or bool(latent_of(name)),
        params_dtype=dtype, bf16=dtype == torch.bfloat16, pipeline_dtype=dtype, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        gradient_accumulation_fusion=False, **experts_of(name, grouped), **latent_of(name))
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs if latent_of(name) else ():
        layer.submodules.self_attention.submodules.core_attention = NoWeights  # megatron-core's own takes one head size
    vocab = -(-c["vocab_size"] // (4 * tp)) * 4 * tp  # padded, as Megatron-LM does
    first, last = ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()
    model = GPTModel(config, spec, vocab_size=vocab, max_sequence_length=64, pre_process=first, post_process=last,
                     share_embeddings_and_output_weights=c["tie_word_embeddings"], position_embedding_type="rope")
    if "critic" in name and last:
        model.output_layer = torch.nn.Linear(c["hidden_size"], 1, bias=False)  # as verl's LinearForLastLayer
    model.to(dtype)
    for key, t in model.named_buffers():
        if key.endswith("expert_bias"):  # which megatron-core keeps in f32
            t.data = torch.randn(t.shape, generator=torch.Generator().manual_seed(len(key)))
    return model


def te_name(key):
    for norm, matrix in (("q_layernorm.", "linear_q_up_proj.layer_norm_"), ("kv_layernorm.", "linear_kv_up_proj.layer_norm_")):
        key = key.replace(f"self_attention.{norm}", f"self_attention.{matrix}")
    return key


def ranks_of(tp, pp, ep=1, etp=1):
    return max(tp * pp, etp * ep * pp)


def write_rank(rank, world, cases, tp, pp, ep=1, etp=None):
    """cases: (directory of dist_ckpt, model, metadata)"""
    signal.alarm(DEADLINE)
    on_cpu()
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    ps.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
                                 expert_tensor_parallel_size=etp, create_gloo_process_groups=False)
    for out, name, metadata in cases:
        model = gpt_model(name, "grouped" in metadata)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):  # of what ranks share one copy is written
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i + 1000 * rank)))
        shared = {**metadata, "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
        state = model.sharded_state_dict(metadata=shared)
        for t in state.values() if "te" in metadata else ():
            t.key = te_name(t.key) if hasattr(t, "key") else None
        dist_checkpointing.save({"model": state}, str(out),
                                sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1))
        dist.barrier()


def lay_out(out, name, layout):
    """The directories of one checkpoint; returns that of dist_ckpt."""
    base = out / "actor" / ("model" if layout == "v2" else "")
    (base / "huggingface").mkdir(parents=True)
    (base / "dist_ckpt").mkdir()
    (base / "huggingface/config.json").write_text(json.dumps(hf_config(name), indent=2) + "\n")
    _, c, _ = MODELS[name]
    (out / "actor/transformer_config.json").write_text(json.dumps(
        {"num_layers": c["num_hidden_layers"], "num_query_groups": c["num_key_value_heads"], "kv_channels": c["head_dim"],
         "layernorm_zero_centered_gamma": False, "multi_latent_attention": False, **latent_of(name)}) + "\n")
    return base / "dist_ckpt"


# ---- written by torch alone, in shardings that Megatron does not make ----


def whole_weights(name, optimizer):
    """megatron-core's names and whole tensors."""
    kind, c, dtype = MODELS[name]
    torch.manual_seed(5)
    layers, h, f, d = c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"embedding.word_embeddings.weight": (48, h), "decoder.final_layernorm.weight": (h,)}
    layer = {"self_attention.linear_qkv.layer_norm_weight": (h,), "self_attention.linear_qkv.weight": (q + 2 * kv, h),
             "self_attention.linear_proj.weight": (h, q), "mlp.linear_fc1.layer_norm_weight": (h,),
             "mlp.linear_fc1.weight": (2 * f, h), "mlp.linear_fc2.weight": (h, f)}
    if kind in ("qwen2", "seed_oss"):
        layer["self_attention.linear_qkv.bias"] = (q + 2 * kv,)
    shapes |= {f"decoder.layers.{k}": (layers, *s) for k, s in layer.items()}
    if not c["tie_word_embeddings"]:
        shapes["output_layer.weight"] = (48, h)
    out = {k: torch.randn(s).to(dtype) for k, s in shapes.items()}
    if optimizer:
        out |= {f"optimizer.state.exp_avg.{k}": torch.randn(s) for k, s in shapes.items()}
    return out


def torch_rank(rank, world, cases, mesh_shape):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    signal.alarm(DEADLINE)
    mesh = init_device_mesh("cpu", mesh_shape)
    for out, name, dims in cases:
        state = {}
        for key, t in whole_weights(name, True).items():
            placed = [Shard(d) if d < t.ndim else Replicate() for d in dims][:len(mesh_shape)]
            state[key] = distribute_tensor(t, mesh, placed)  # uneven where it does not divide
        dcp.save(state, checkpoint_id=str(out), storage_writer=dcp.FileSystemWriter(str(out), thread_count=2))
        dist.barrier()


# ---- the reference ----


def read_by_torch(directory):
    reader = dcp.FileSystemReader(str(directory))
    meta = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in meta.items()
             if isinstance(m, TensorStorageMetadata) and not k.startswith("optimizer.")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def each_expert(key, t):
    """As TEGroupedMLP's state_dict() has them, which verl's merger names."""
    before, found, after = key.partition("mlp.experts.experts.")
    if not found:
        return {key: t}
    number, _, rest = after.partition(".")
    if number.isdigit():
        return {f"{before}mlp.experts.{rest}{number}": t}
    return {f"{before}mlp.experts.{after}{i}": t[i] for i in range(len(t))}


# Mixtral's names in Hugging Face's files: verl's merger, which has none for it, gives those of Qwen.
MIXTRAL = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts.", "gate_proj": "w1", "up_proj": "w3",
           "down_proj": "w2"}


def reference(name, state):
    """verl's merger on what torch has read."""
    from transformers import AutoConfig
    from verl.model_merger.megatron_model_merger import MegatronModelMerger

    _, c, _ = MODELS[name]
    layers, per_layer, extra = c["num_hidden_layers"], {}, {}
    if latent_of(name):  # whose norms verl's merger knows under these names alone
        state = {te_name(k): t for k, t in state.items()}
    for key, t in state.items():
        parts = key.split(".")
        if parts[:2] == ["decoder", "layers"] and not parts[2].isdigit():
            for i in range(layers):
                per_layer |= each_expert(".".join(["decoder.layers", str(i), *parts[2:]]), t[i])
        elif key.endswith("_w"):
            per_layer |= each_expert(key[:-2], torch.cat([t, state[key[:-1] + "v"]]))
        elif not key.endswith("_v"):
            per_layer |= each_expert(key, t)
    if "critic" in name:
        extra["score.weight"] = per_layer.pop("output_layer.weight")  # which verl's merger does not name
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in per_layer:
            per_layer[key] = per_layer[key][:c["vocab_size"]]  # its model has no rows of padding to load into
    merger = object.__new__(MegatronModelMerger)
    merger.world_size, merger.rank = 1, 0
    merger.hf_config = AutoConfig.for_model(**hf_config(name))
    merger.config = type("Config", (), {"tie_word_embedding": c["tie_word_embeddings"], "is_value_model": False})
    exec_mapping(merger)
    merged = merger._merge_state_dicts([per_layer])
    for old, new in MIXTRAL.items() if name == "mixtral" else ():
        merged = {k.replace(old, new): v for k, v in merged.items()}
    return {k: v.contiguous() for k, v in {**merged, **extra}.items()}


def exec_mapping(merger):
    """The statements of MegatronModelMerger.__init__ that make params_mapping, from verl's source: those before them need GPUs."""
    import inspect
    import textwrap

    from verl.model_merger import megatron_model_merger as module
    source = inspect.getsource(module.MegatronModelMerger.__init__)
    at = source.index("        self.params_mapping = {")
    exec(textwrap.dedent(source[at:]), {"self": merger})


# ---- check ----


def check_one(verlc, out, name, dist_ckpt):
    want = reference(name, read_by_torch(dist_ckpt))
    actor, ours, own = out / "actor", out / "ours", out / "own"
    flags = ["--is-value-model"] if "critic" in name else []
    common = ["--backend", "megatron", "--local_dir", actor]
    run = [[verlc, "model_merger", "merge", *common, "--target_dir", ours, *flags],
           [verlc, "model", "merge", "--model", actor, "--out", own],
           [verlc, "model_merger", "test", *common, "--test_hf_dir", ours]]
    codes = [subprocess.run(r, stderr=subprocess.PIPE, text=True, timeout=60) for r in run]
    results = {"exit status: " + "".join(c.stderr for c in codes): all(c.returncode == 0 for c in codes)}
    if results[next(iter(results))]:
        rounded = {k: v if k.endswith("e_score_correction_bias") else v.bfloat16() for k, v in want.items()}
        results |= {"own dtype": equal(tensors_of(own), want), "bf16": equal(tensors_of(ours), rounded)}
        results["transformers"] = loads(ours, rounded)
    return [k for k, ok in results.items() if not ok]


def loads(directory, want):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
    auto = AutoModelForTokenClassification if "TokenClass" in AutoConfig.from_pretrained(directory).architectures[0] \
        else AutoModelForCausalLM
    model = auto.from_pretrained(directory)
    if not any("experts" in k for k in want):
        got = model.state_dict()
    else:  # transformers joins experts when it reads, and parts them again when it writes
        with tempfile.TemporaryDirectory() as out:
            model.save_pretrained(out)
            got = tensors_of(pathlib.Path(out))
    return all(torch.equal(got[k].to(v.dtype), v) for k, v in want.items())


def import_all():
    import oracle_verl
    sys.meta_path.append(oracle_verl.Absent())
    from verl.model_merger import megatron_model_merger  # noqa: F401


def check(verlc):
    torch.set_num_threads(1)
    every = [n for n in MODELS if not n.startswith("small")]
    experts, latent = [n for n in every if experts_of(n, False)], [n for n in every if latent_of(n)]
    layouts = [((1, 1), every, STACKED, "v1"), ((2, 1), ["llama", "qwen2_tied", "critic"], STACKED, "v2"),
               ((1, 2), ["qwen3", "qwen2"], SINGLE, "v2"), ((2, 2), every, STACKED, "v2"),
               ((4, 1), ["llama_mha", "seed_oss"], SINGLE, "v1"), ((1, 1, 2, 1), experts, STACKED, "v1"),
               ((2, 1, 2, 1), experts, SINGLE, "v2"), ((2, 1, 2, 2), experts, STACKED | GROUPED, "v2"),
               ((1, 2, 2, 1), experts, STACKED, "v1"), ((2, 1, 1, 1), latent, STACKED | TE, "v2"),
               ((1, 2, 1, 1), latent, SINGLE | TE, "v1")]
    uneven = [((1,), "qwen2", (0,)), ((2,), "qwen2", (1,)), ((4,), "llama", (1,)), ((2, 2), "seed_oss", (1, 2)),
              ((3,), "qwen2_tied", (0,))]
    cases = []
    with tempfile.TemporaryDirectory() as tmp:
        for sizes, names, metadata, layout in layouts:
            group = []
            for name in names:
                out = pathlib.Path(tmp) / "_".join([name, *map(str, sizes), *metadata])
                group.append((lay_out(out, name, layout), name, metadata))
                cases.append((out, name, group[-1][0]))
            in_ranks(write_rank, ranks_of(*sizes), group, *sizes)
        for mesh, name, dims in uneven:
            out = pathlib.Path(tmp) / f"{name}_mesh{'x'.join(map(str, mesh))}_dim{''.join(map(str, dims))}"
            cases.append((out, name, lay_out(out, name, "v1")))
            in_ranks(torch_rank, torch.Size(mesh).numel(), [(cases[-1][2], name, dims)], mesh)
        import_all()
        bad = {out.name: failed for out, name, dist_ckpt in cases if (failed := check_one(verlc, out, name, dist_ckpt))}
    print(f"{len(cases)} Megatron checkpoints of 1, 2, 3 and 4 ranks, {sum(name in experts for _, name, _ in cases)} with experts, "
          f"torch {torch.__version__}: {len(bad)} differ {bad or ''}")
    return 1 if bad else 0


def make(out, names):
    from safetensors.torch import save_file
    import_all()
    for name in names:
        model, sizes, metadata, layout = CASES[name]
        shutil.rmtree(out / name, ignore_errors=True)
        directory = lay_out(out / name, model, layout)
        in_ranks(write_rank, ranks_of(*sizes), [(directory, model, metadata)], *sizes)
        (directory / "common.pt").unlink()  # objects that are no tensors: not read
        save_file(reference(model, read_by_torch(directory)), out / name / "whole.safetensors")
        print(f"wrote {out / name} with torch {torch.__version__}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(pathlib.Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["check"]:
        sys.exit(check(sys.argv[2]))
    else:
        sys.exit(__doc__)
