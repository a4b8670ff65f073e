"""Checkpoints of verl's that are hostile or damaged: each is refused with exit status 3 and a message that names the file and
what is wrong; nothing in one is run, no memory is taken because a number in it says so, and nothing is left behind."""

import os
import pathlib
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import torch_file as tf  # noqa: E402
from verlc_test import ENV, VERLC, Tests  # noqa: E402

DATA = struct.pack("<6f", *range(6))
ONE = ((1,), ("fsdp",))
MEMORY = 3 << 30  # address space of the program: a bomb of gigabytes ends it


def merge(actor, out):
    """(exit status, stderr, seconds)"""
    start = time.monotonic()
    p = subprocess.run([VERLC, "model_merger", "merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(out)],
                       capture_output=True, text=True, timeout=60, env=ENV,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)))
    return p.returncode, p.stderr, time.monotonic() - start


class Run:
    def __init__(self, call, args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def good():
    return {"w": tf.dtensor(tf.tensor("F32", (2, 3), DATA, 0), (2, 3), ONE, [("Shard", 0)])}


def w(*args, **kw):
    return {"w": tf.tensor(*args, **kw)}


def pickles(mark):
    """(what, bytes of data.pkl, words of the message)"""
    touch = f"touch {mark}"
    yield "os.system", pickle.dumps({"w": Run(os.system, (touch,))}, 2), "system"
    yield "os.system in protocol 5", pickle.dumps({"w": Run(os.system, (touch,))}, 5), "system"
    yield "os.system in protocol 0", f"cos\nsystem\n(S'{touch}'\ntR.".encode(), "os.system"
    yield "builtins.eval", pickle.dumps({"w": Run(eval, (f"open({str(mark)!r}, 'w')",))}, 2), "eval"
    yield "builtins.exec", pickle.dumps(Run(exec, (f"open({str(mark)!r}, 'w')",)), 4), "builtins.exec"
    yield "subprocess.Popen", pickle.dumps(Run(subprocess.Popen, (["touch", str(mark)],)), 4), "subprocess.Popen"
    yield "getattr of a module", pickle.dumps(Run(getattr, (Run(__import__, ("os",)), "system")), 4), "builtins.getattr"
    yield "a nested name", b"\x80\x04\x8c\x0bcollections\x8c\x20OrderedDict.__init__.__globals__\x93.", "OrderedDict.__init__"
    yield "INST", f"(S'x'\nios\nsystem\n.".encode(), "operation"
    yield "INST first", b"\x80\x02(ios\nsystem\n.", "os.system"
    yield "OBJ", b"\x80\x02(ccollections\nOrderedDict\no.", "operation 0x6f"
    yield "an extension code", b"\x80\x02\x82\x01.", "operation 0x82"
    yield "a buffer from outside", b"\x80\x05\x97.", "operation 0x97"
    yield "torch.load", b"\x80\x02ctorch\nload\nX\x01\0\0\0x\x85R.", "torch.load"
    yield "numpy's arrays", b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n.", "numpy.core.multiarray._reconstruct"
    yield "a state for a class", b"\x80\x02ctorch\nSize\n}X\x01\0\0\0aK\x01sb.", "no object"
    yield "a call of a call", b"\x80\x02ctorch\nSize\n)R)R.", "a call of what is no name"
    yield "OrderedDict with arguments", b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "with arguments"
    yield "a memo entry of 2^31", b"\x80\x02]r\xff\xff\xff\x7f.", "memo entry"
    yield "a memo entry that is not there", b"\x80\x02h\x05.", "no memo entry"
    yield "a string of 4 GiB", b"\x80\x02X\xff\xff\xff\xff.", "in the middle"
    yield "a string of 2^63", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "operation 0x8d"
    yield "a list of itself", b"\x80\x02]q\x00h\x00a.", "not a state_dict"
    yield "a tensor that is its own dictionary", b"\x80\x02}q\x00X\x01\0\0\0wh\x00s.", "not a tensor"
    bomb = b"".join(b"q%c](%se" % (i, b"h%c" % i * 9) for i in range(200))  # a list of nine times the one before, and again
    yield "lists of lists of lists", b"\x80\x02]" + bomb + b"0.", "operation 0x30"
    yield "100,000 tuples deep", b"\x80\x02)" + b"\x85" * 100000 + b".", "not a state_dict"
    yield "1,000,000 marks", b"\x80\x02" + b"(" * 1000000 + b".", "at its end"
    yield "200,000,000 values", b"\x80\x02" + b"]" * 20000000 + b".", "more than"
    yield "an empty stack", b"\x80\x02R.", "0"
    yield "a pop below a mark", b"\x80\x02K\x01(\x85.", "where there are 0"
    yield "no end", b"\x80\x02}", "in the middle"
    yield "two values at the end", b"\x80\x02K\x01K\x02.", "at its end"
    yield "protocol 9", b"\x80\x09}.", "protocol 9"


def tensors():
    """(what, the state_dict, words of the message)"""
    yield "a storage that is too small", w("F32", (2, 4), DATA, 0, n=8), "another number"
    yield "a storage that is too large", w("F32", (1,), DATA, 0, n=1), "another number"
    yield "2^62 elements in a storage", w("F32", (1,), DATA, 0, n=1 << 62), "another number"
    yield "a negative size", w("F32", (-2, 3), DATA, 0), "numbers >= 0"
    yield "a negative stride", w("F32", (2, 3), DATA, 0, stride=(-3, 1)), "numbers >= 0"
    yield "a negative offset", w("F32", (1,), DATA, 0, offset=-1), "outside its storage"
    yield "an offset behind the end", w("F32", (1,), DATA, 0, offset=6), "outside its storage"
    yield "an offset of 2^63 - 1", w("F32", (2,), DATA, 0, offset=(1 << 63) - 1), "outside its storage"
    yield "a stride behind the end", w("F32", (2, 3), DATA, 0, stride=(4, 1)), "outside its storage"
    yield "strides that overflow", w("F32", (3, 2), DATA, 0, stride=(1 << 62, 1 << 62)), "outside its storage"
    yield "2^40 elements of stride 0", w("F32", (1 << 40,), DATA, 0, stride=(0,)), "outside its storage"
    yield "sizes whose product overflows", w("F32", (1 << 32, 1 << 32), DATA, 0, stride=(0, 0)), "outside its storage"
    yield "nine dimensions", w("F32", (1,) * 9, DATA[:4], 0), "at most 8"
    yield "sizes without strides", w("F32", (2, 3), DATA, 0, stride=(1,)), "equally long"
    yield "a size of 2^100", w("F32", (1 << 100,), DATA, 0, stride=(1,)), "numbers >= 0"
    yield "NaN", w("F32", (6,), struct.pack("<6f", *[float("nan")] * 6), 0), "NaN or Inf"
    yield "bool", w("BOOL", (6,), b"\0" * 6, 0), "unsupported dtype"
    yield "a number as a weight", {"w": 3}, "not a tensor"
    yield "a name that is no string", {3: tf.tensor("F32", (6,), DATA, 0)}, "name of a tensor"
    yield "a name of safetensors itself", {"__metadata__": tf.tensor("F32", (6,), DATA, 0)}, "may not have the name __metadata__"
    yield "a name that an adapter's prefix hides", {"base_model.model.__metadata__": tf.tensor("F32", (6,), DATA, 0),
                                                    "base_model.model.a.lora_A.default.weight": tf.tensor("F32", (6,), DATA, 0)
                                                    }, "becomes __metadata__"
    yield "Partial", {"w": tf.dtensor(tf.tensor("F32", (6,), DATA, 0), (6,), ONE, [("Partial", None)])}, "unsupported placement"
    yield "a mesh of tensor parallelism", {"w": tf.dtensor(tf.tensor("F32", (6,), DATA, 0), (6,), ((1, 1), ("fsdp", "tp")),
                                                         [("Shard", 0), ("Shard", 0)])}, "unsupported device mesh"
    yield "two placements on one dimension", {"w": tf.dtensor(tf.tensor("F32", (6,), DATA, 0), (6,), ONE,
                                                              [("Replicate", None), ("Shard", 0)])}, "placements"
    yield "a shard of dimension 7", {"w": tf.dtensor(tf.tensor("F32", (6,), DATA, 0), (6,), ONE, [("Shard", 7)])}, "does not have"
    yield "fewer rows than the whole has", {"w": tf.dtensor(tf.tensor("F32", (2, 3), DATA, 0), (9, 3), ONE,
                                                            [("Shard", 0)])}, "2 rows of 9"
    yield "more rows than the whole has", {"w": tf.dtensor(tf.tensor("F32", (2, 3), DATA, 0), (1, 3), ONE, [("Shard", 0)])}, "fit"
    yield "a mesh of 4 ranks in a world of 1", {"w": tf.dtensor(tf.tensor("F32", (2, 3), DATA, 0), (2, 3), ((4,), ("fsdp",)),
                                                                [("Shard", 0)])}, "world size 1"


def one_rank(root, name="model_world_size_1_rank_0.pt"):
    """A checkpoint directory without its shard."""
    actor = pathlib.Path(tempfile.mkdtemp(dir=root))
    (actor / "huggingface").mkdir()
    (actor / "huggingface/config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    return actor, actor / name


def change(path, at, data):
    raw = bytearray(path.read_bytes())
    raw[at:at + len(data)] = data
    path.write_bytes(raw)


def files(root):
    """(what, the directory, words of the message)"""
    data, storages = tf.dumps(good())

    def case(what, words, fn, name="model_world_size_1_rank_0.pt"):
        actor, path = one_rank(root, name)
        fn(path)
        return what, actor, words

    def zipped(compress=zipfile.ZIP_STORED, extra=(), keep=None):
        return lambda p: tf.write(p, data, keep if keep is not None else storages, compress, extra)

    def cut(n):
        def fn(p):
            tf.write(p, data, storages)
            p.write_bytes(p.read_bytes()[:n])
        return fn

    def patched(find, at, new):
        def fn(p):
            tf.write(p, data, storages)
            change(p, p.read_bytes().rindex(find) + at, new)
        return fn

    yield case("an empty file", "not a zip", lambda p: p.write_bytes(b""))
    yield case("a file of text", "not a zip", lambda p: p.write_text("hello " * 100))
    yield case("a bare pickle, torch's old format", "torch 1.6", lambda p: p.write_bytes(data))
    size = len(data)
    for n in (30, size // 2, size + 200):
        yield case(f"a zip that ends after {n} bytes", "truncated", cut(n))
    yield case("a compressed file", "compressed", zipped(zipfile.ZIP_DEFLATED))
    yield case("a bomb of zeros", "compressed", zipped(zipfile.ZIP_DEFLATED, [("archive/data/9", bytes(50 << 20))]))
    yield case("two entries of one name", "two zip entries", zipped(extra=[("archive/data/0", DATA)]))
    yield case("an entry ../../x", "not a name", zipped(extra=[("archive/../../x", DATA)]))
    yield case("an entry /etc/x", "not a name", zipped(extra=[("/etc/x", DATA)]))
    yield case("entries in two folders", "two folders", zipped(extra=[("other/x", data)]))
    yield case("no storages", "the file has no storage", zipped(keep={}))
    yield case("an encrypted entry", "encrypted", patched(b"PK\1\2", 8, b"\1"))
    yield case("an entry behind the end", "is not where", patched(b"PK\1\2", 42, b"\xf0\xff\xff\x7f"))
    yield case("an entry of 2 GB", "compressed", patched(b"PK\1\2", 24, b"\xff\xff\xff\x7f"))
    yield case("a directory of 65,535 entries", "does not fit", patched(b"PK\5\6", 10, b"\xff\xff"))
    yield case("overlapping entries", "", lambda p: overlap(p, data, storages))
    yield case("a big-endian machine's", "byte order", lambda p: (tf.write(p, data, storages),
                                                                  change(p, p.read_bytes().index(b"little"), b"biglit")))
    yield case("a FIFO", "not a regular file", os.mkfifo)
    yield case("a directory", "not a regular file", lambda p: p.mkdir())
    yield case("a link to /dev/zero", "out of the model directory", lambda p: p.symlink_to("/dev/zero"))
    yield case("a link to nothing", "target cannot be read", lambda p: p.symlink_to("nothing"))
    yield case("a link to itself", "target cannot be read", lambda p: p.symlink_to(p.name))
    yield case("a link to a file elsewhere", "out of the model directory", lambda p: p.symlink_to("/etc/passwd"))
    yield case("a link to a file that is none of torch's", "not a zip", lambda p: (p.with_name("other").write_text("none " * 100),
                                                                                   p.symlink_to("other")))
    yield case("rank 1 of 2 alone", "rank_0.pt is missing", zipped(), "model_world_size_2_rank_1.pt")
    yield case("rank 0 of 2 alone", "rank_1.pt is missing", lambda p: tf.save(p, w("F32", (6,), DATA, 0)),
               "model_world_size_2_rank_0.pt")
    yield case("a world size of 10^18", "world size", zipped(), "model_world_size_1000000000000000000_rank_0.pt")


def overlap(path, data, storages):
    """The second entry's header lies in the first one's data."""
    tf.write(path, data, storages)
    raw = path.read_bytes()
    first, second = raw.index(b"PK\1\2"), raw.index(b"PK\1\2", raw.index(b"PK\1\2") + 4)
    change(path, second + 42, raw[first + 42:first + 46])


def two_ranks(root):
    """(what, the directory, words of the message): ranks that do not belong together."""
    mesh, shard = ((2,), ("fsdp",)), [("Shard", 0)]

    def part(rows, key=0, whole=4):
        return tf.dtensor(tf.tensor("F32", (rows, 3), DATA[:rows * 12], key), (whole, 3), mesh, shard)

    plain = tf.tensor("F32", (6,), DATA, 5)
    other = tf.tensor("F32", (6,), DATA[::-1], 5)
    cases = [("another name on rank 1", {"w": part(2)}, {"v": part(2)}, "no tensor w"),
             ("one tensor more on rank 1", {"w": part(2)}, {"w": part(2), "v": part(2, 1)}, "rank 0 has 1"),
             ("another whole on rank 1", {"w": part(2)}, {"w": part(2, whole=5)}, "another dtype, shape or placement"),
             ("a row missing", {"w": part(2)}, {"w": part(1)}, "3 rows of 4"),
             ("a plain tensor that differs", {"w": part(2), "b": plain}, {"w": part(2), "b": other}, "differs from rank 0"),
             ("a DTensor that is plain on rank 1", {"w": part(2)}, {"w": tf.tensor("F32", (2, 3), DATA, 0)}, "")]
    for what, first, second, words in cases:
        actor, _ = one_rank(root)
        tf.save(actor / "model_world_size_2_rank_0.pt", first)
        tf.save(actor / "model_world_size_2_rank_1.pt", second)
        yield what, actor, words
    actor, _ = one_rank(root)
    for world in (1, 2):
        tf.save(actor / f"model_world_size_{world}_rank_0.pt", good())
    yield "two world sizes", actor, "world sizes 1 and 2"
    for what, text, words in (("a world size of -3", '{"world_size": -3}', "world size"),
                              ("no world size", "{}", "world_size"), ("another world size", '{"world_size": 8}', "missing")):
        actor, path = one_rank(root)
        tf.save(path, good())
        (actor / "fsdp_config.json").write_text(text)
        yield what, actor, words


def main():
    test = Tests()
    with tempfile.TemporaryDirectory(prefix="verlc-test-") as root, tf.stand_ins():
        root = pathlib.Path(root)
        mark, out = root / "RAN", root / "out"
        actor, path = one_rank(root)
        tf.save(path, good())
        rc, err, _ = merge(actor, out)
        test("a sound one is merged", rc == 0 and (out / "model.safetensors").exists(), err)
        cases = []
        for what, data, words in pickles(mark):
            actor, path = one_rank(root)
            tf.write(path, data, {"0": DATA})
            cases.append((what, actor, words))
        for what, state, words in tensors():
            actor, path = one_rank(root)
            tf.save(path, state)
            cases.append((what, actor, words))
        traversal, path = one_rank(root)
        tf.save(path, w("F32", (6,), DATA, "../../../../etc/passwd"))
        cases.append(("a storage ../../../../etc/passwd", traversal, "not a name"))
        for at, bytes_ in ((0, b"\xff"), (3, b"\xc3"), (4, b"\xed\xa0\x80"), (7, b"\xf4")):
            actor, path = one_rank(root)
            data, storages = tf.dumps({"n" * 8: tf.tensor("F32", (6,), DATA, 0)})
            name = b"n" * at + bytes_ + b"n" * (8 - at - len(bytes_))
            tf.write(path, data.replace(b"n" * 8, name), storages)
            cases.append((f"a name with {bytes_.hex()}", actor, "is not UTF-8"))
        cases += [*files(root), *two_ranks(root)]
        test("there are more than 20", len(cases) > 20, len(cases))
        for i, (what, actor, words) in enumerate(cases):
            rc, err, seconds = merge(actor, root / f"out{i}")
            left = [p.name for p in root.iterdir() if p.name.startswith(f"out{i}")]
            named = actor.name in err or "world_size" in err
            test(what, rc == 3 and words in err and named and not mark.exists() and seconds < 20 and not left,
                 (rc, err, seconds, left))
    test.end()


main()
