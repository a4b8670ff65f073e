"""Files as torch.save writes them, without torch: for the tests that need shards of their own, sound or hostile."""

import contextlib
import io
import math
import pathlib
import pickle
import struct
import sys
import types
import zipfile

STORAGES = {"F32": ("FloatStorage", 4), "BF16": ("BFloat16Storage", 2), "I64": ("LongStorage", 8), "BOOL": ("BoolStorage", 1)}

DTYPES = {"F32": "float32", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}
META, FILES = "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem."


class Call:
    """Is pickled as a call of module.name(*args), with a state where there is one."""

    def __init__(self, name, *args, state=None):
        self.parts = (name, args, state)

    def __reduce__(self):
        name, args, state = self.parts
        return (named(name), args) if state is None else (named(name), args, state)


class Storage:
    def __init__(self, kind, key, n, data):
        self.kind, self.key, self.n, self.data = kind, key, n, data


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            return ("storage", named("torch." + STORAGES[obj.kind][0]), obj.key, "cpu", obj.n)
        return None


def named(full):
    """What pickles as that name; a stand-in where its module is not installed."""
    module, name = full.rsplit(".", 1)
    return getattr(sys.modules[module], name)


NAMES = ["torch._utils._rebuild_tensor_v2", "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass",
         "torch._utils._rebuild_parameter", "torch.Size", "torch.Tensor", "torch.distributed.tensor.DTensor",
         "torch.distributed.tensor._dtensor_spec.DTensorSpec", "torch.distributed.tensor._dtensor_spec.TensorMeta",
         "torch.distributed.device_mesh.DeviceMesh", "torch.distributed.tensor.placement_types.Shard",
         "torch.distributed.tensor.placement_types.Replicate", "torch.distributed.tensor.placement_types.Partial",
         *("torch." + s for s, _ in STORAGES.values()), *("torch." + d for d in DTYPES.values()),
         "torch.serialization._get_layout", FILES + "_StorageInfo",
         *(META + n for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                              "ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"))]


@contextlib.contextmanager
def stand_ins():
    """The names of torch that pickles hold, as classes that do nothing, while pickles are written."""
    kept = {k: v for k, v in sys.modules.items() if k.split(".")[0] == "torch"}
    for full in NAMES:
        module, name = full.rsplit(".", 1)
        parts = module.split(".")
        for i in range(len(parts)):
            sys.modules.setdefault(".".join(parts[:i + 1]), types.ModuleType(".".join(parts[:i + 1])))
        setattr(sys.modules[module], name, type(name, (), {"__module__": module}))
    yield
    for k in [k for k in sys.modules if k.split(".")[0] == "torch"]:
        del sys.modules[k]
    sys.modules.update(kept)


def strides(shape):
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


def tensor(kind, shape, data, key, stride=None, offset=0, n=None):
    count = len(data) // STORAGES[kind][1] if n is None else n
    return Call("torch._utils._rebuild_tensor_v2", Storage(kind, str(key), count, data), offset, tuple(shape),
                strides(shape) if stride is None else stride, False, {})


def dtensor(local, shape, mesh, placements):
    """A DTensor of FSDP as torch 2.6 saves it. mesh: (sizes, names)."""
    spec, d = "torch.distributed.tensor._dtensor_spec.", "torch.distributed.tensor.placement_types."
    sizes, names = mesh
    ranks = struct.pack(f"<{math.prod(sizes)}q", *range(math.prod(sizes)))
    mesh = Call("torch.distributed.device_mesh.DeviceMesh",
                state={"device_type": "cpu", "mesh": tensor("I64", sizes, ranks, f"mesh{local.parts[1][0].key}"),
                       "mesh_dim_names": names})
    placed = tuple(Call(d + p) if i is None else Call(d + p, state={"dim": i}) for p, i in placements)
    meta = Call(spec + "TensorMeta", Call("torch.Size", tuple(shape)), strides(shape), None)
    state = (None, {"_local_tensor": local, "_spec": Call(spec + "DTensorSpec", state={"mesh": mesh, "placements": placed,
                                                                                         "tensor_meta": meta})})
    return Call("torch._tensor._rebuild_from_type_v2", named("torch._utils._rebuild_wrapper_subclass"),
                named("torch.distributed.tensor.DTensor"), (), state)


def dumps(obj):
    """(the pickle, its storages)"""
    out = io.BytesIO()
    found = {}

    class Finder(Pickler):
        def persistent_id(self, o):
            if isinstance(o, Storage):
                found[o.key] = o.data
            return super().persistent_id(o)

    Finder(out, 2).dump(obj)
    return out.getvalue(), found


def write(path, data, storages, compress=zipfile.ZIP_STORED, extra=()):
    """A zip file with these parts; extra: more (name, bytes)."""
    with zipfile.ZipFile(path, "w", compress) as z:
        z.writestr("archive/data.pkl", data)
        z.writestr("archive/byteorder", b"little")
        for key, content in storages.items():
            z.writestr(f"archive/data/{key}", content)
        z.writestr("archive/version", b"3\n")
        for name, content in extra:
            z.writestr(name, content)


def save(path, obj, **kw):
    data, storages = dumps(obj)
    write(path, data, storages, **kw)


def shard_model(tensors, out, world):
    """Tensors {name: (kind, shape, bytes)} as the shards that `world` ranks of FSDP2 save."""
    out = pathlib.Path(out)
    with stand_ins():
        for rank in range(world):
            state = {}
            for i, (name, (kind, shape, data)) in enumerate(tensors.items()):
                rows = -(-shape[0] // world)
                lo, hi = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
                row = len(data) // shape[0]
                local = tensor(kind, (hi - lo, *shape[1:]), data[lo * row:hi * row], i)
                state[name] = dtensor(local, shape, ((world,), ("fsdp",)), [("Shard", 0)])
            save(out / f"model_world_size_{world}_rank_{rank}.pt", state)


# ---- torch.distributed.checkpoint ----


def box(data, shape, at, size):
    """The bytes of a box of a row-major tensor."""
    item = len(data) // math.prod(shape)
    if not shape:
        return data
    step = math.prod(shape[1:]) * item
    return b"".join(box(data[i * step:(i + 1) * step], shape[1:], at[1:], size[1:]) for i in range(at[0], at[0] + size[0]))


def boxes(shape, parts):
    """(offsets, sizes) of a tensor that is cut into so many parts along each dimension; uneven where it does not divide."""
    out = [((), ())]
    for n, k in zip(shape, parts):
        step = -(-n // k)
        out = [(at + (i,), size + (min(step, n - i),)) for at, size in out for i in range(0, n, step)]
    return out


class Dcp:
    """A checkpoint of torch.distributed.checkpoint in the making; its parts may be changed before it is written."""

    def __init__(self, n_files=2):
        self.files = [b"" for _ in range(n_files)]
        self.tensors, self.storage, self.n = {}, [], 0

    def stream(self, kind, shape, data):
        """A tensor as torch.save writes it alone."""
        out = io.BytesIO()
        with stand_ins():
            save(out, tensor(kind, shape, data, 0))
        return out.getvalue()

    def put(self, raw):
        """(file, offset, length)"""
        at, self.n = self.n % len(self.files), self.n + 1
        place = (f"__{at}_0.distcp", len(self.files[at]), len(raw))
        self.files[at] += raw
        return place

    def add(self, name, kind, shape, data, parts=None):
        chunks = boxes(shape, parts or (1,) * len(shape))
        self.tensors[name] = [kind, shape, chunks]
        for at, size in chunks:
            self.storage.append([name, at, *self.put(self.stream(kind, size, box(data, shape, at, size)))])

    def metadata(self):
        size = lambda s: Call("torch.Size", tuple(s))  # noqa: E731
        entries = {}
        for name, (kind, shape, chunks) in self.tensors.items():
            properties = (named("torch." + DTYPES[kind]), Call("torch.serialization._get_layout", "torch.strided"), False,
                          Call(META + "_MEM_FORMAT_ENCODING", 0), False)
            entries[name] = Call(META + "TensorStorageMetadata", state={
                "properties": Call(META + "TensorProperties", state=properties), "size": size(shape),
                "chunks": [Call(META + "ChunkStorageMetadata", state={"offsets": size(at), "sizes": size(n)}) for at, n in chunks]})
        storage = {Call(META + "MetadataIndex", state={"fqn": name, "offset": size(at), "index": i}):
                   Call(FILES + "_StorageInfo", state={"relative_path": path, "offset": start, "length": n})
                   for i, (name, at, path, start, n) in enumerate(self.storage)}
        return Call(META + "Metadata", state={"state_dict_metadata": entries, "planner_data": None, "storage_data": storage})

    def write(self, out):
        with stand_ins():
            self.write_files(out)
            (out / ".metadata").write_bytes(pickle.dumps(self.metadata(), 4))

    def write_files(self, out):
        for i, data in enumerate(self.files):
            (out / f"__{i}_0.distcp").write_bytes(data)


def megatron_names(tensors, config):
    """A Hugging Face model {name: (kind, shape, bytes)} as megatron-core's tensors for all layers: what verl's runs save."""
    layers, groups = config["num_hidden_layers"], config["num_key_value_heads"]
    out = {}

    def rows(name, first, n):
        kind, shape, data = tensors[name]
        step = len(data) // shape[0]
        return data[first * step:(first + n) * step]

    def stack(ours, make, sample, n_rows):
        kind, shape, _ = tensors[f"model.layers.0.{sample}"]
        out["decoder.layers." + ours] = (kind, (layers, n_rows, *shape[1:]), b"".join(make(f"model.layers.{i}.")
                                                                                      for i in range(layers)))

    def qkv(end):
        def make(layer):
            shapes = {p: tensors[f"{layer}self_attn.{p}_proj.{end}"][1][0] // groups for p in "qkv"}
            return b"".join(rows(f"{layer}self_attn.{p}_proj.{end}", g * n, n) for g in range(groups) for p, n in shapes.items())
        return make

    sizes = {n.split("layers.0.")[1]: t[1][0] for n, t in tensors.items() if "layers.0." in n}
    for end in ("weight", "bias"):
        if f"self_attn.q_proj.{end}" in sizes:
            total = sum(sizes[f"self_attn.{p}_proj.{end}"] for p in "qkv")
            stack(f"self_attention.linear_qkv.{end}", qkv(end), f"self_attn.q_proj.{end}", total)
    pairs = (("self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
             ("self_attention.q_layernorm.weight", "self_attn.q_norm"),
             ("self_attention.k_layernorm.weight", "self_attn.k_norm"), ("self_attention.linear_proj.weight", "self_attn.o_proj"),
             ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"), ("mlp.linear_fc2.weight", "mlp.down_proj"))
    for theirs, ours in pairs:
        if ours + ".weight" in sizes:
            stack(theirs, lambda layer, ours=ours: tensors[f"{layer}{ours}.weight"][2], ours + ".weight", sizes[ours + ".weight"])
    stack("mlp.linear_fc1.weight", lambda layer: b"".join(tensors[f"{layer}mlp.{p}_proj.weight"][2] for p in ("gate", "up")),
          "mlp.gate_proj.weight", 2 * sizes["mlp.gate_proj.weight"])
    out["embedding.word_embeddings.weight"] = tensors["model.embed_tokens.weight"]
    out["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
    if "lm_head.weight" in tensors:
        out["output_layer.weight"] = tensors["lm_head.weight"]
    return out


# The model of fuzz_dcp.c.
TINY_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 4, "intermediate_size": 6,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 5,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
              "tie_word_embeddings": False, "torch_dtype": "float32"}


def tiny_qwen2(layers):
    """{name: (kind, shape, bytes)} of TINY_QWEN2, as Hugging Face names it."""
    layer = {"input_layernorm.weight": (4,), "self_attn.q_proj.weight": (4, 4), "self_attn.k_proj.weight": (2, 4),
             "self_attn.v_proj.weight": (2, 4), "self_attn.q_proj.bias": (4,), "self_attn.k_proj.bias": (2,),
             "self_attn.v_proj.bias": (2,), "self_attn.o_proj.weight": (4, 4), "post_attention_layernorm.weight": (4,),
             "mlp.gate_proj.weight": (6, 4), "mlp.up_proj.weight": (6, 4), "mlp.down_proj.weight": (4, 6)}
    shapes = {"model.embed_tokens.weight": (5, 4), "model.norm.weight": (4,), "lm_head.weight": (5, 4),
              **{f"model.layers.{i}.{k}": s for i in range(layers) for k, s in layer.items()}}
    return {k: ("F32", s, struct.pack(f"<{math.prod(s)}f", *range(math.prod(s)))) for k, s in shapes.items()}


# The other model of fuzz_dcp.c; its first layer has no experts.
TINY_QWEN3_MOE = TINY_QWEN2 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2,
                               "num_experts_per_tok": 1, "moe_intermediate_size": 3, "mlp_only_layers": [0],
                               "decoder_sparse_step": 1}


def tiny_qwen3_moe(each):
    """{name: shape} of TINY_QWEN3_MOE, as megatron-core names it. each: a tensor an expert, as with singleton_local_shards."""
    experts = "decoder.layers.1.mlp.experts.experts."
    shapes = {"embedding.word_embeddings.weight": (5, 4), "decoder.final_layernorm.weight": (4,), "output_layer.weight": (5, 4),
              "decoder.layers.1.mlp.router.weight": (2, 4), "decoder.layers.1.pre_mlp_layernorm.weight": (4,),
              "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (4,), "decoder.layers.0.mlp.linear_fc1.weight": (12, 4),
              "decoder.layers.0.mlp.linear_fc2.weight": (4, 6)}
    shapes |= {f"decoder.layers.self_attention.{k}": (2, *s) for k, s in (
        ("linear_qkv.weight", (8, 4)), ("linear_qkv.layer_norm_weight", (4,)), ("linear_proj.weight", (4, 4)),
        ("q_layernorm.weight", (2,)), ("k_layernorm.weight", (2,)))}
    for i in range(2) if each else ():
        shapes |= {f"{experts}{i}.linear_fc1.weight_w": (3, 4), f"{experts}{i}.linear_fc1.weight_v": (3, 4),
                   f"{experts}{i}.linear_fc2.weight": (4, 3)}
    if not each:
        shapes |= {experts + "linear_fc1.weight": (2, 6, 4), experts + "linear_fc2.weight": (2, 4, 3)}
    return shapes


# The third model of fuzz_dcp.c.
TINY_DEEPSEEK_V3 = TINY_QWEN2 | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": None,
                                 "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 3,
                                 "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 3,
                                 "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_hidden_layers": 1}


def tiny_deepseek_v3(te):
    """{name: shape} of TINY_DEEPSEEK_V3, as megatron-core names it. te: with the modules of Transformer Engine."""
    attention = {"linear_q_proj.weight": (8, 4), "linear_kv_down_proj.weight": (4, 4), "linear_kv_up_proj.weight": (10, 2),
                 "linear_kv_up_proj.layer_norm_weight" if te else "kv_layernorm.weight": (2,), "linear_proj.weight": (4, 6)}
    layer = {"input_layernorm.weight": (4,), "pre_mlp_layernorm.weight": (4,),
             **{f"self_attention.{k}": s for k, s in attention.items()},
             "mlp.router.weight": (2, 4), "mlp.router.expert_bias": (2,),
             "mlp.experts.experts.linear_fc1.weight": (2, 6, 4), "mlp.experts.experts.linear_fc2.weight": (2, 4, 3),
             "mlp.shared_experts.linear_fc1.weight": (6, 4), "mlp.shared_experts.linear_fc2.weight": (4, 3)}
    return {"embedding.word_embeddings.weight": (5, 4), "decoder.final_layernorm.weight": (4,), "output_layer.weight": (5, 4),
            **{f"decoder.layers.0.{k}": s for k, s in layer.items()}}
