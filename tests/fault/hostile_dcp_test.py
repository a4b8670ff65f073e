"""Hostile checkpoints of torch.distributed.checkpoint, as `verlc model_merger --backend megatron` meets them: each is refused with
one line that names the file, within seconds, nothing of it is run, and no target is left."""

import io
import json
import math
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import torch_file as tf  # noqa: E402
from verlc_test import ENV, VERLC, Tests  # noqa: E402

NORM = "decoder.final_layernorm.weight"  # ("F32", (4,))
HEAD = "output_layer.weight"  # ("F32", (5, 4))
STACK = "decoder.layers.mlp.linear_fc1.weight"  # ("F32", (2, 12, 4))
EXPERTS = "decoder.layers.1.mlp.experts.experts."


class Run:
    def __init__(self, call, args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def sound(parts=1):
    ckpt = tf.Dcp(2)
    for name, (kind, shape, data) in tf.megatron_names(tf.tiny_qwen2(2), tf.TINY_QWEN2).items():
        ckpt.add(name, kind, shape, data, (parts,) + (1,) * (len(shape) - 1))
    return ckpt


def lay_out(root, name, config=tf.TINY_QWEN2):
    actor = root / name
    (actor / "dist_ckpt").mkdir(parents=True)
    (actor / "huggingface").mkdir()
    (actor / "huggingface/config.json").write_text(json.dumps(config))
    return actor


def sound_experts(each):
    ckpt = tf.Dcp(2)
    for name, shape in tf.tiny_qwen3_moe(each).items():
        ckpt.add(name, "F32", shape, bytes(4 * math.prod(shape)))
    return ckpt


def changes_of_experts():
    """(what, words of the message, a tensor an expert?, a change of a sound checkpoint)"""
    fc1, fc2, third = EXPERTS + "linear_fc1.weight", EXPERTS + "linear_fc2.weight", EXPERTS + "2.linear_fc2.weight"
    down, gate = EXPERTS + "1.linear_fc2.weight", EXPERTS + "1.linear_fc1.weight_w"

    def drop(name):
        def change(ckpt):
            ckpt.tensors.pop(name)
            ckpt.storage = [s for s in ckpt.storage if s[0] != name]
        return change

    def add(name, shape):
        return lambda c: c.add(name, "F32", shape, bytes(4 * math.prod(shape)))

    def other(name, shape):
        return lambda c: (drop(name)(c), add(name, shape)(c))

    yield "an expert missing", "no tensor becomes model.layers.1.mlp.experts.1.down_proj.weight", True, drop(down)
    yield "half of an expert missing", "no tensor becomes model.layers.1.mlp.experts.1.gate_proj.weight", True, drop(gate)
    yield "all experts missing", "no tensor becomes model.layers.1.mlp.experts.0.gate_proj.weight", False, drop(fc1)
    yield "no router", "no tensor becomes model.layers.1.mlp.gate.weight", False, drop("decoder.layers.1.mlp.router.weight")
    yield "an expert of another shape", "config.json asks for (4, 3)", True, other(down, (3, 4))
    yield "an expert of one dimension", "config.json asks for (4, 3)", True, other(down, (12,))
    yield "experts of another width", "config.json asks for (3, 4)", False, other(fc1, (2, 8, 4))
    yield "an odd number of rows", "odd number of rows", False, other(fc1, (2, 5, 4))
    yield "one expert for two", "has 1 experts, config.json 2", False, other(fc2, (1, 8, 3))
    yield "three experts for two", "has 3 experts, config.json 2", False, other(fc2, (3, 4, 3))
    yield "experts without an axis of them", "has 4 experts, config.json 2", False, other(fc2, (4, 3))
    yield "only an axis of experts", "has 1 dimensions", False, other(fc2, (2,))
    yield "an axis too many", "has 4 dimensions", False, other(fc2, (2, 4, 3, 1))
    yield "experts of all layers, of which one has none", "does not ask for", False, lambda c: (
        drop(fc2)(c), add("decoder.layers.mlp.experts.experts.linear_fc2.weight", (2, 2, 4, 3))(c))
    yield "an expert that config.json has not", f"unsupported weight {third}, which", True, add(third, (4, 3))
    yield "an expert twice", "two tensors become model.layers.1.mlp.experts.1.down_proj.weight", False, add(down, (4, 3))
    yield "an expert twice by its number", "two tensors become", True, add(EXPERTS + "01.linear_fc2.weight", (4, 3))
    yield "expert 10^30", "unsupported weight", True, add(EXPERTS + "1" + 30 * "0" + ".linear_fc2.weight", (4, 3))
    yield "expert -1", "unsupported weight", True, add(EXPERTS + "-1.linear_fc2.weight", (4, 3))
    yield "a bias of experts", "unsupported weight", False, add(EXPERTS + "linear_fc2.bias", (2, 4))
    yield "a router's bias", "unsupported weight", False, add("decoder.layers.1.mlp.router.expert_bias", (2,))
    yield "a shared expert that the family has not", "unsupported weight", False, add(
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight", (4, 3))


def entry(ckpt, name, i=0):
    """A line of the storage: [name, offsets, path, start, length]"""
    return [s for s in ckpt.storage if s[0] == name][i]


def put(ckpt, name, raw):
    """Another stream of bytes for a tensor's first chunk."""
    entry(ckpt, name)[2:] = ckpt.put(raw)


def zipped(tensor, compress=zipfile.ZIP_STORED, extra=()):
    data, storages = tf.dumps(tensor)
    out = io.BytesIO()
    tf.write(out, data, storages, compress, extra)
    return out.getvalue()


def changes(mark):
    """(what, words of the message, a change of a sound checkpoint)"""
    f4 = bytes(16)

    def store(at, value, name=NORM):
        return lambda c: entry(c, name).__setitem__(at, value)

    def shape(value, name=NORM):
        return lambda c: c.tensors[name].__setitem__(1, value)

    def chunks(value, name=NORM):
        return lambda c: c.tensors[name].__setitem__(2, value)

    def same_bytes(c):
        entry(c, NORM)[2:] = entry(c, "decoder.layers.self_attention.linear_qkv.layer_norm_weight")[2:]

    yield "a chunk behind the file's end", "reaches outside", store(3, 1 << 40)
    yield "a chunk at a negative offset", "not described", store(3, -8)
    yield "a chunk longer than the file", "reaches outside", store(4, (1 << 62) + 5)
    yield "a chunk one byte short", "no zip directory", lambda c: entry(c, NORM).__setitem__(4, entry(c, NORM)[4] - 1)
    yield "two chunks in the same bytes", "", same_bytes
    yield "two chunks that overlap in the file", "overlap at byte", overlap_bytes
    yield "a file ../x", "no file next to it", store(2, "../x")
    yield "a file /etc/passwd", "no file next to it", store(2, "/etc/passwd")
    yield "a hidden file", "no file next to it", store(2, ".metadata")
    yield "a file that is missing", "is missing", store(2, "__9_0.distcp")
    yield "a chunk that no file has", "no file has", lambda c: c.storage.remove(entry(c, NORM))
    yield "a chunk stored twice", "two chunks at the same place", lambda c: c.storage.append(list(entry(c, NORM)))
    yield "a chunk listed twice", "two chunks at the same place", chunks([((0,), (4,)), ((0,), (4,))])
    yield "a hole", "2 elements of 4", lambda c: cut(c, NORM, [((0,), (2,))])
    yield "a chunk outside the tensor", "not inside it", chunks([((2,), (4,))])
    yield "a chunk of another number of dimensions", "not inside it", chunks([((0, 0), (4, 1))])
    yield "chunks that overlap", "overlapping chunks", lambda c: cut(c, HEAD, [((0, 0), (4, 4)), ((2, 0), (3, 4))])
    yield "chunks that overlap, as many elements as it has", "overlapping chunks", lambda c: cut(
        c, HEAD, [((0, 0), (3, 4)), ((2, 0), (2, 4))])
    yield "chunks that cross", "overlapping chunks", lambda c: cut(c, HEAD, [((0, 0), (2, 2)), ((0, 1), (5, 3)), ((4, 0), (1, 1))])
    yield "no chunks", "0 elements of 4", chunks([])
    yield "a shape of 2^62 x 2^62", "not a shape", shape((1 << 62, 1 << 62), HEAD)
    yield "a shape of 2^61", "", shape((1 << 61,))
    yield "no dimensions", "not a shape", shape(())
    yield "an empty tensor", "not a shape", shape((0,))
    yield "another dtype in the file", "another dtype or shape", lambda c: put(c, NORM, c.stream("BF16", (4,), bytes(8)))
    yield "another shape in the file", "another dtype or shape", lambda c: put(c, NORM, c.stream("F32", (2, 2), f4))
    yield "a dtype of no weight", "unsupported dtype", lambda c: c.tensors[NORM].__setitem__(0, "BOOL")
    yield "a dtype of another weight", "unsupported dtype i64", lambda c: integers(c, NORM)
    yield "a chunk that is no zip", "not a zip", lambda c: put(c, NORM, b"hello " * 100)
    yield "a compressed chunk", "compressed", lambda c: put(c, NORM, zipped(tf.tensor("F32", (4,), f4, 0), zipfile.ZIP_DEFLATED))
    yield "a bomb of zeros", "compressed", lambda c: put(c, NORM, zipped(tf.tensor("F32", (4,), f4, 0), zipfile.ZIP_DEFLATED,
                                                                       [("archive/data/9", bytes(50 << 20))]))
    yield "a chunk that runs a command", "names posix.system", lambda c: put(c, NORM, zipped(Run(os.system, (f"touch {mark}",))))
    yield "a chunk that is a dictionary", "is not a tensor", lambda c: put(c, NORM, zipped({"w": tf.tensor("F32", (4,), f4, 0)}))
    yield "a tensor outside its storage", "reach outside", lambda c: put(c, NORM, zipped(tf.tensor("F32", (4,), f4, 0, offset=2)))
    yield "a missing layer", "has 1 layers, config.json 2", one_layer
    yield "no norm", "no tensor becomes model.norm.weight", lambda c: c.tensors.pop(NORM)
    yield "experts of a family without", "unsupported weight decoder.layers.mlp.experts", lambda c: c.add(
        "decoder.layers.mlp.experts.experts.linear_fc1.weight", "F32", (2, 2), f4)
    yield "a LoRA run's", "LoRA run", lambda c: c.add("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "F32",
                                                      (2, 2), f4)
    yield "a bias that config.json has not", "does not ask for", lambda c: c.add(
        "decoder.layers.mlp.linear_fc2.bias", "F32", (2, 4), bytes(32))
    yield "one layer's weight and all layers'", "two tensors become", lambda c: c.add(
        "decoder.layers.1.mlp.linear_fc1.weight", "F32", (12, 4), bytes(192))
    yield "layer 10^30", "unsupported weight", lambda c: c.add(
        "decoder.layers.1" + 30 * "0" + ".mlp.linear_fc2.weight", "F32", (4,), f4)
    yield "NaN in a weight", "NaN or Inf", lambda c: put(c, NORM, c.stream("F32", (4,), b"\xff" * 16))


def cut(ckpt, name, chunks):
    """Other boxes of a tensor, each with a stream of its own."""
    kind, shape, _ = ckpt.tensors.pop(name)
    ckpt.storage = [s for s in ckpt.storage if s[0] != name]
    ckpt.tensors[name] = [kind, shape, chunks]
    for at, size in chunks:
        n = 4
        for k in size:
            n *= k
        ckpt.storage.append([name, at, *ckpt.put(ckpt.stream(kind, size, bytes(n)))])


def integers(ckpt, name):
    _, shape, _ = ckpt.tensors.pop(name)
    ckpt.storage = [s for s in ckpt.storage if s[0] != name]
    ckpt.add(name, "I64", shape, bytes(32))


def overlap_bytes(ckpt):
    """A chunk whose bytes end with those of another one."""
    path, start, n = entry(ckpt, HEAD)[2:]
    entry(ckpt, NORM)[2:] = [path, start + 1, n - 1]


def one_layer(ckpt):
    ckpt.tensors.pop(STACK)
    ckpt.storage = [s for s in ckpt.storage if s[0] != STACK]
    ckpt.add(STACK, "F32", (1, 12, 4), bytes(192))


def pickles(mark, good):
    """(what, words, the bytes of .metadata)"""
    yield "a command in .metadata", "names posix.system", pickle.dumps(Run(os.system, (f"touch {mark}",)), 4)
    yield "a command among the tensors", "builtins.exec", pickle.dumps({"state_dict_metadata": Run(exec, ("1",))}, 4)
    yield "an unknown class of torch's", "torch.nn.modules.linear.Linear", b"ctorch.nn.modules.linear\nLinear\n."
    yield "an empty .metadata", "truncated", b""
    yield "text", "not what torch", b"hello"
    yield "a dictionary", "no object Metadata", pickle.dumps({}, 4)
    yield "half of it", "truncated", good[:len(good) // 2]
    yield "all but its end", "truncated", good[:-1]
    yield "a string of 4 GB", "truncated", b"\x80\4X\xff\xff\xff\xff"
    yield "a memo entry 2^31", "no memo entry", b"\x80\4j\xff\xff\xff\x7f."
    yield "tuples in tuples", "", b"\x80\4)" + b"\x85" * 100000 + b"."


def merge(actor, out):
    start = time.time()
    p = subprocess.run([VERLC, "model_merger", "merge", "--backend", "megatron", "--local_dir", actor, "--target_dir", out],
                       env=ENV, capture_output=True, text=True, timeout=60)
    return p.returncode, p.stderr, time.time() - start


def main():
    test = Tests()
    with tempfile.TemporaryDirectory(prefix="verlc-test-") as root, tf.stand_ins():
        root = pathlib.Path(root)
        mark, cases = root / "RAN", []
        for parts in (1, 2):
            actor = lay_out(root, f"sound{parts}")
            sound(parts).write(actor / "dist_ckpt")
            rc, err, _ = merge(actor, root / f"merged{parts}")
            test(f"a sound one in {parts} parts is merged", rc == 0 and (root / f"merged{parts}/model.safetensors").exists(), err)
        good = (actor / "dist_ckpt/.metadata").read_bytes()
        for i, (what, words, change) in enumerate(changes(mark)):
            actor, ckpt = lay_out(root, f"case{i}"), sound()
            change(ckpt)
            ckpt.write(actor / "dist_ckpt")
            cases.append((what, words, actor))
        for each in (False, True):
            actor = lay_out(root, f"experts{each:d}", tf.TINY_QWEN3_MOE)
            sound_experts(each).write(actor / "dist_ckpt")
            rc, err, _ = merge(actor, root / f"merged_experts{each:d}")
            test(f"a sound one with experts, {'a tensor each' if each else 'joined'}, is merged", rc == 0, err)
        for i, (what, words, each, change) in enumerate(changes_of_experts()):
            actor, ckpt = lay_out(root, f"expert{i}", tf.TINY_QWEN3_MOE), sound_experts(each)
            change(ckpt)
            ckpt.write(actor / "dist_ckpt")
            cases.append((what, words, actor))
        for i, (what, words, raw) in enumerate(pickles(mark, good)):
            actor = lay_out(root, f"pickle{i}")
            sound().write_files(actor / "dist_ckpt")
            (actor / "dist_ckpt/.metadata").write_bytes(raw)
            cases.append((what, words, actor))
        for i, (what, words, name, target) in enumerate((
                ("a link to a file elsewhere", "out of the model directory", "__0_0.distcp", "/etc/passwd"),
                ("a link to /dev/zero", "out of the model directory", ".metadata", "/dev/zero"))):
            actor = lay_out(root, f"link{i}")
            sound().write(actor / "dist_ckpt")
            (actor / "dist_ckpt" / name).unlink()
            (actor / "dist_ckpt" / name).symlink_to(target)
            cases.append((what, words, actor))
        for i, name in enumerate(("huggingface", "dist_ckpt")):
            actor = lay_out(root, f"folder{i}")
            sound().write(actor / "dist_ckpt")
            (actor / name).rename(root / f"elsewhere{i}")
            (actor / name).symlink_to(root / f"elsewhere{i}")
            cases.append((f"{name}/ that is a link out of the checkpoint", "out of the model directory", actor))
        test("there are more than 75", len(cases) > 75, len(cases))
        for what, words, actor in cases:
            rc, err, seconds = merge(actor, root / "out")
            left = [p.name for p in root.iterdir() if p.name.startswith("out")]
            lines = [line for line in err.splitlines() if line.startswith("error")]
            test(what, rc == 3 and words in err and actor.name in err and len(lines) == 1 and not mark.exists() and seconds < 20 and
                 not left, (rc, err, seconds, left))
    test.end()


main()
