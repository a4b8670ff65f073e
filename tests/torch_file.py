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
         *("torch." + s for s, _ in STORAGES.values())]


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
