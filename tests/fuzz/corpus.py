"""Makes the seed corpus of the fuzz targets from tests/fixtures: OUT/fuzz_X/NAME.
Run by CTest and scripts/fuzz.sh. Needs Python's standard library; the same files every time.

  python3 tests/fuzz/corpus.py OUT
"""

import base64
import hashlib
import json
import math
import pickle
import shutil
import sqlite3
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_file as tf  # noqa: E402

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
LARGEST = 1 << 14  # bytes; a longer seed makes every input slow


def jsonl(path):
    return [json.loads(line) for line in (FIXTURES / path).read_text().splitlines()]


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def every(items, n):
    """n of them, evenly chosen."""
    return items[:: max(1, len(items) // n)][:n]


def conf():
    cases = json.loads((FIXTURES / "conf/hydra.json").read_text())["cases"]
    for arg in sorted({a for c in cases for a in c["args"] if len(a) < 200}):
        yield b"\0" + arg.encode()
        yield b"\1" + arg.split("=", 1)[-1].encode()
        if "${" in arg:
            yield b"\4" + arg.split("=", 1)[-1].encode()
    for path in sorted((FIXTURES / "conf").rglob("*.yaml")):
        yield b"\2" + path.read_bytes()
        yield b"\3" + path.read_bytes()
    yield b"\3no mapping of keys"
    yield b"\3defaults:\n  - ppo_trainer\n  - _self_\ndata:\n  path: x.parquet\n"
    yield b"\3# @package _global_\ndefaults: [evaluation, {optional a: b}, a@b.c: d]\nx: ${data.path}\n"


def tokenizer_files():
    """The variants' tokenizer.json with vocabularies of a few tokens."""
    models = {m["name"]: m["model"] for m in jsonl("text/models.jsonl")}
    for row in jsonl("text/variants.jsonl"):
        model = dict(models[row["model"]], **row["options"])
        merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"][:12]]
        words = dict.fromkeys(list(model["vocab"])[:12] + [w for a, b in merges for w in (a, b, a + b.removeprefix("##"))])
        model["vocab"] = {w: i for i, w in enumerate(words)}
        model["merges"] = merges
        yield dict(row["sections"], model=model)


def text():
    def patterns(node):
        if isinstance(node, dict):
            for k, v in node.items():
                if k == "Regex" and isinstance(v, str):
                    yield v
                yield from patterns(v)
        elif isinstance(node, list):
            for v in node:
                yield from patterns(v)

    files = list(tokenizer_files())
    for f in files:
        yield b"\0" + compact(f)
    for row in jsonl("text/unicode.jsonl"):
        if "regex" in row:
            yield b"\1" + row["regex"].encode()
    for p in sorted({p for f in files for p in patterns(f)}):
        yield b"\1" + p.encode()
    for row in every(jsonl("text/hostile.jsonl"), 60):
        yield b"\2" + row["text"].encode()
        yield b"\3" + row["text"].encode()
    for row in every(jsonl("text/repair.jsonl"), 40):
        yield b"\2" + bytes.fromhex(row["hex"])


def tokenizer():
    for name in ("tok_plain", "tok_system"):
        yield b"\0" + (FIXTURES / "data" / name / "tokenizer_config.json").read_bytes()
    token = lambda s: {"content": s, "lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    yield b"\0" + compact({"added_tokens_decoder": {"9": token("<s>"), "10": token("</s>")}, "eos_token": "</s>",
                           "bos_token": token("<s>"), "pad_token": None, "add_bos_token": True, "model_max_length": 10**30})
    yield b"\0" + compact({"chat_template": [{"name": "default", "template": "{{ messages }}"},
                                             {"name": "tool_use", "template": "{{ tools }}"}]})
    yield b"\1" + compact({"eos_token": token("</s>"), "additional_special_tokens": ["<a>", token("<b>")]})
    for which in (b"\2", b"\3"):
        yield which + "{% for m in messages %}{{ m.content }}é{% endfor %}".encode()
        yield which + b"\xff\0{{"


def safetensors(header, body):
    head = header if isinstance(header, bytes) else compact(header)
    return struct.pack("<Q", len(head)) + head + body


def model():
    t = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    for dtype, size in (("F32", 4), ("BF16", 2), ("F16", 2), ("I32", 4), ("I64", 8), ("U8", 1)):
        yield b"\1" + safetensors({"w": {"dtype": dtype, "shape": [3], "data_offsets": [0, 3 * size]}}, bytes(3 * size))
    yield b"\1" + safetensors({"__metadata__": {"format": "pt"}, "a": t, "b": dict(t, data_offsets=[16, 32])}, bytes(32))
    yield b"\1" + safetensors({"scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
                               "empty": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}}, bytes(4))
    yield b"\1" + safetensors(b"{}      ", b"")
    for path in sorted((FIXTURES / "model").rglob("config*.json")):
        yield b"\0" + path.read_bytes()
    for path in sorted((FIXTURES / "model").glob("*/model.safetensors")):
        data = path.read_bytes()
        yield b"\1" + data[: 8 + struct.unpack("<Q", data[:8])[0]]  # the header, its tensors missing
    for path in sorted((FIXTURES / "quant").glob("bnb_*/model.safetensors")):
        yield b"\1" + path.read_bytes()


def model_dir():
    model, adapter = FIXTURES / "model/llama_bias", FIXTURES / "model/lora_bias"
    data = (model / "model.safetensors").read_bytes()
    names = [n for n in json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]]) if n != "__metadata__"]
    yield b"\0" + (model / "config.json").read_bytes()
    yield b"\1" + data[: 8 + struct.unpack("<Q", data[:8])[0]]
    yield b"\2" + compact({"metadata": {"total_size": 1}, "weight_map": {n: "model.safetensors" for n in names}})
    yield b"\2" + compact({"weight_map": {n: f"model-{i}.safetensors" for i, n in enumerate(names)}})
    yield b"\3" + compact({"eos_token_id": [1, 2], "pad_token_id": 0, "temperature": 0.7})
    yield b"\4" + (adapter / "adapter_config.json").read_bytes()
    yield b"\5" + (adapter / "adapter_model.safetensors").read_bytes()
    flat = {n: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i, n in enumerate(("master", "m", "v"))}
    yield b"\6" + safetensors({"__metadata__": {"step": "1", "format": "pt"}, **flat}, bytes(48))


def track():
    with tempfile.TemporaryDirectory() as d:
        db = sqlite3.connect(Path(d) / "run.db")
        db.execute("PRAGMA page_size=512")
        db.execute("CREATE TABLE metrics(step INTEGER, name TEXT, value REAL, PRIMARY KEY(step, name)) WITHOUT ROWID")
        db.execute("CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO metrics VALUES(?, 'a', 1)", [(i,) for i in range(12)])
        db.commit()
        db.close()
        yield b"\0" + (Path(d) / "run.db").read_bytes()
        db = sqlite3.connect(Path(d) / "run.db")
        db.execute("INSERT INTO meta VALUES('kept', 'ab')")
        for table in ("samples(id INTEGER PRIMARY KEY, step, response)", "events(id INTEGER PRIMARY KEY, step, message)",
                      "histograms(step, validation, name, lo)", "status(key, value)"):
            db.execute("CREATE TABLE " + table)
        db.execute("INSERT INTO samples VALUES(3, 1, 'r')")
        db.commit()
        db.close()
        yield b"\4" + (Path(d) / "run.db").read_bytes()
    yield b"\0SQLite format 3\0"
    yield b"\1" + b"".join(compact({"step": i, "data": {"a": 0.5, "b": None}}) + b"\n" for i in range(9)) + b'{"step": 9, "da'
    yield b"\2" + b"".join(compact({"seq": i, "step": i, "data": {"a": 0.5}}) + b"\n" for i in range(9)) + b'{"seq": 9, "s'
    yield b"\2" + compact({"seq": 2**63 - 1, "step": 1}) + b"\n"
    yield b"\3" + compact({"sent": 4, "run": {"id": "x"}})
    yield b"\3" + compact({"sent": 2**63 - 1, "run": None})
    yield b"\1[1]\n\n{}\n{\"step\": -1}\n{\"step\": 1.5}\n"


EPISODE = ('{"turns": 3, "end": "stop", "malformed": 1, "calls": [{"segment": 0, "name": "add", "arguments": "{}", "result": "2", '
           '"status": "ok", "seconds": 0.5, "reward": 1, "truncated": true}]}')


def run_db():
    """Runs of format 1 and 2 with three samples, in small pages so that changed bytes meet every structure."""
    def blob(kind, *v):
        return struct.pack(f"<{len(v)}{kind}", *v)
    for version in (1, 2):
        with tempfile.TemporaryDirectory() as d:
            db = sqlite3.connect(Path(d) / "run.db")
            blobs = ("entropy", "ref_logp", "advantages", "token_bytes", "prompt_bytes")
            added = "".join(f", {c} BLOB" for c in blobs) + ", reward_message TEXT, segments BLOB, episode TEXT"
            more = added if version == 2 else ""
            db.executescript(f"""PRAGMA page_size=512; CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT);
                CREATE TABLE metrics(step INTEGER, name TEXT, value REAL, PRIMARY KEY(step, name)) WITHOUT ROWID;
                CREATE TABLE samples(id INTEGER PRIMARY KEY, step INTEGER, validation INTEGER, uid INTEGER, sample INTEGER,
                data_source TEXT, prompt TEXT, response TEXT, ground_truth TEXT, score REAL, advantage REAL, reward_status TEXT,
                finish TEXT, prompt_ids BLOB, ids BLOB, logp BLOB, extra TEXT{more});""")
            meta = {"format": version, "project": "p", "experiment": "e", "config": "{}"}
            if version == 2:
                meta |= {"total_steps": 9, "started": 1.5e9, "headline": '["actor/grad_norm"]', "exit": "failed: no",
                         "ended": 1.6e9, "plan": '{"total": 9, "limit": 9, "parts": [{"name": "a", "bytes": 9, "block": true}]}'}
                db.executescript("""CREATE INDEX samples_place ON samples(step, validation, uid, sample);
                    CREATE TABLE histograms(step INTEGER, validation INTEGER, name TEXT, lo REAL, hi REAL, counts BLOB,
                    PRIMARY KEY(step, validation, name)) WITHOUT ROWID;
                    CREATE TABLE status(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
                    CREATE TABLE events(id INTEGER PRIMARY KEY, step INTEGER, wall REAL, kind TEXT, message TEXT);
                    INSERT INTO status VALUES('phase', 'gen'), ('step', 2), ('done', 3), ('total', 4), ('wall', 1.5e9);
                    INSERT INTO events VALUES(1, 1, 1.5e9, 'warning', 'low');""")
                db.execute("INSERT INTO histograms VALUES(1, 0, 'score', 0, 1, ?)", [blob("i", 1, 2)])
            db.executemany("INSERT INTO meta VALUES(?, ?)", [(k, str(v)) for k, v in meta.items()])
            names = ("actor/grad_norm", "val-core/x", "timing_s/gen")
            db.executemany("INSERT INTO metrics VALUES(?, ?, ?)", [(s, n, s / 2) for s in (1, 2) for n in names])
            for i in range(3):
                row = [i + 1, 1, i == 2, 3, i, "d", "a\nb", "4é", "4", 0.5, 1, "score", "stop", blob("i", 5), blob("i", 1, 2),
                       blob("f", -1, 0), '{"acc": 1}']
                if version == 2:
                    row += [blob("f", 1, 2), blob("f", -1, -2), blob("f", 1, -1), blob("H", 1, 2), blob("H", 3), "no",
                            *((blob("i", 1, 0, 1, 1), EPISODE) if i else (None, None))]
                db.execute(f"INSERT INTO samples VALUES({','.join('?' * len(row))})", row)
            db.commit()
            db.close()
            yield (Path(d) / "run.db").read_bytes()


def generate():
    yield compact({"ids": [5, 9, 64], "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
                   "seed": 1})
    yield compact({"prompt": "How many é?", "stop": ["\n", "####"], "ignore_eos": True, "repetition_penalty": 1.1})
    yield compact({"prompt": "x", "stop": "\n", "max_tokens": 2**62})
    yield compact({"ids": [2**40, -1], "n": 4096})


def score():
    yield compact({"ids": [5, 9, 64, 3], "response_start": 2})
    yield compact({"ids": [5, 9], "response_start": 3})
    yield compact({"ids": [], "response_start": 2**62})


def data():
    rows = every(jsonl("algo/graders.jsonl"), 8) + every(jsonl("text/chat.jsonl"), 6)
    for row in rows:
        yield compact(row) + b"\n"
        yield json.dumps([row, row]).encode()
    yield b"".join(compact(r) + b"\n" for r in rows[:4]) + b"\n\r\n" + compact(rows[4])
    for state in ({"epoch": 0, "index": 0}, {"epoch": 1, "index": 2, "n_rows": 5, "batch_size": 2, "seed": 0, "shuffle": False,
                                             "drop_last": False}):
        yield compact(state)


def sft():
    say = lambda role, content: {"role": role, "content": content}
    turns = [say("system", "Be brief."), say("user", "2 + 2?"), say("assistant", "4\n#### 4"), say("user", "é日🎉"),
             say("assistant", "")]
    for kind in range(32):
        rows = {
            0: [{"messages": turns}, {"messages": turns[1:3], "enable_thinking": True,
                                      "tools": [{"type": "function", "function": {"name": "f"}}]}],
            1: [{"prompt": "How many?", "response": "3"}, {"prompt": [turns[1]], "response": ""}],
        }.get(kind % 4, [{"prompt": turns[1:2], "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "4"},
                          "extra_info": {"index": 1}}])
        yield bytes([kind]) + b"".join(compact(r) + b"\n" for r in rows)


def ckpt():
    none = "0" * 32
    entry = lambda n, s=none: {"bytes": n, "xxh3_128": s}
    manifest = lambda files, **more: b"\0" + compact({"format": 1, "verlc": "0.1.0", "step": 7, "files": files, **more})
    yield manifest({"actor/config.json": entry(2)})
    yield manifest({"actor/config.json": entry(2), "trainer.json": entry(2)})
    yield manifest({"../escape": entry(1), "/etc/passwd": entry(1)})
    braces = "dc7048f8f8747f561349cde127705c16"  # XXH3-128 of "{}", what the target puts into all files
    whole = {f: entry(2, braces) for f in ("actor/config.json", "actor/model.safetensors", "trainer.json", "config.yaml")}
    yield manifest({**whole, "actor/optim.safetensors": entry(2, braces)})
    yield manifest({**whole, "optim/actor.safetensors": entry(2, braces)}, format=2, parts=["actor"])
    yield manifest({**whole, "optim/actor.safetensors": entry(2, braces),
                    "actor/model.safetensors.index.json": entry(2, braces)}, format=2, parts=["actor", "critic", 3])
    yield manifest({})
    yield b"\1" + compact({"global_step": 7, "isa": "avx2", "data": {"epoch": 0, "index": 4}, "kl_ctrl": 0.001, "bad_steps": 0,
                           "total_tokens": 99})
    for tracker in (b"7", b"007\n", b"-1", b"99999999999999999999", b""):
        yield b"\2" + tracker


def helper():
    frame = lambda value: struct.pack("<I", len(compact(value))) + compact(value)
    init = frame({"id": 0, "ok": None})
    ok = [frame({"id": i, "ok": {"text": "x" * i}}) for i in range(1, 5)]
    no = [frame({"id": i, "error": "no", "code": "INPUT"}) for i in range(1, 5)]
    yield b"\0\0" + init
    yield b"\4\0" + init + b"".join(ok)
    yield b"\4\1" + ok[0] + no[1] + ok[2] + no[3]
    yield b"\4\0" + init + no[0] + ok[1][:-3]
    yield b"\1\1" + frame({"id": 2, "ok": 1})
    yield b"\1\0" + frame({"id": 0, "error": "no such template", "code": "FORMAT"})
    yield b"\1\1" + b"\xff\xff\xff\xff" + b"text where a frame should be"
    yield b"\1\1" + frame([1, 2])


def algo():
    lines, seen = jsonl("algo/algo.jsonl") + jsonl("algo/distill.jsonl"), {}
    for line in lines:
        line.pop("expect")
        line.pop("tol", None)
        key = (line["op"], line.get("estimator"), line.get("loss_mode"), line.get("type"), line.get("loss_agg_mode"))
        seen.setdefault(key, line)
    for line in seen.values():
        yield compact(line)


def sandbox():
    yield from (b"\xff\xfe{", b"a\xc3\xa9\xed\xa0\x80\xf0\x9f")
    for request in (
        {"argv": ["python3", "main.py"], "stdin": "1 2\n", "files": {"main.py": "print(1)"}, "read": ["/opt/x"]},
        {"argv": []}, {"argv": ["a\0"]}, {"argv": ["x"] * 300}, {"files": {str(i): "" for i in range(20)}}, {"files": {"../x": 1}},
        [], {"stdin": None}, {"read": "x"}):
        yield compact(request)


def reward():
    for row in every(jsonl("algo/graders.jsonl"), 250):
        yield compact({"text": row["text"], "gold": row["gold"], "answers": list(row["asked"].values())})
        yield row["text"].encode()
    for reply in ({"score": 1, "extra": {"acc": 1.0}}, {"score": 1e308, "extra": {"a\0": [None, True, -(2**63), {"x": "\0"}]}},
                  {"score": 0.5}, {"score": "1", "extra": {}}, {"crash": "ValueError: no"}, {"unparsed": ""}, [1], None):
        yield compact(reply)


def serve():
    one = [{"role": "user", "content": "1+1"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function",
                                                                  "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}
    chat = {"messages": [*one, call, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]}],
            "tools": tools,
            "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "n": 2,
            "stop": ["x", "yz"], "max_tokens": 9, "seed": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
            "repetition_penalty": 1.1, "stop_token_ids": [3, 4],
            "response_format": {"type": "text"}, "tool_choice": "auto", "return_token_ids": True}
    message = {"model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be"}], "stream": True, "stop_sequences": ["x"],
               "tools": [{"name": "f", "input_schema": {"type": "object"}}], "messages": [
                   *one, {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "t"},
                                                           {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}]},
                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": "2"},
                                                {"type": "text", "text": "?"}]},
                   {"role": "system", "content": "s"}]}
    completion = {"prompt": ["a", [1, 2], "c"], "n": 2, "logprobs": 2, "echo": False, "max_tokens": 3}
    ids = b"\0" + bytes(range(1, 121))
    yield bytes([254, 0, 0]) + compact({"prompt": "1 + 1", "add_special_tokens": False, "return_token_strs": True})
    yield bytes([254, 0, 0]) + compact({"messages": one, "add_generation_prompt": False, "tools": tools})
    yield bytes([255, 0, 0]) + compact({"tokens": [1, 2, 3]})
    for k in range(10):
        yield bytes([0, k, 3 * k]) + compact(chat) + ids
        yield bytes([2, k, k]) + compact(message) + ids
    for stream in (True, False):
        yield bytes([0, 0, 1]) + compact({"messages": one, "stream": stream, "stop": "e", "n": 3}) + ids
        yield bytes([1, 0, 2]) + compact({**completion, "stream": stream}) + ids
        yield bytes([2, 0, 9]) + compact({**message, "stream": stream, "tools": []}) + ids


def user():
    for spec in ("./my_adv.c:f", "dir/my_loss.py:g_1", "~/a b.c:_x", "x.c", "x.c:", "a:b.py:c", "x.c:f.c", ":f"):
        yield b"\0" + spec.encode()
    yield (b"\1In file included from f_12.c:2:\n/a/my_adv.c: In function 'f':\n/a/my_adv.c:3:12: error: 'b' undeclared\n"
           b"    3 |     return b;\n      |            ^\n/a/my_adv.c:3:12: note: each undeclared identifier is reported once\n")
    yield b"\1/usr/bin/ld: /tmp/x.o: undefined reference to `g'\r\ncollect2: error: ld returned 1 exit status\n"
    for n in range(5):
        text = base64.b64encode(struct.pack(f"<{n}d", *([0.1, -2.0, float("nan"), 1e300, 3.0][:n]))).decode()
        yield b"\2" + compact({"loss": text, "dlog_prob": text})


def torch():
    small = b"ctorch._utils\n_rebuild_tensor_v2\nq\3((X\7\0\0\0storageq\4ctorch\nFloatStorage\nq\5X\1\0\0\0%dX\3\0\0\0cpuK%ctQ"
    for storage, count, rest in ((0, 3, b"K\0K\3\x85K\1\x85"), (1, 6, b"K\0K\2K\3\x86K\3K\1\x86"),
                                 (2, 9, b"K\1K\2K\2\x86K\1K\3\x86"), (3, 1, b"K\0))"), (1, 6, b"K\6K\0\x85K\1\x85")):
        yield b"\1\x80\2}q\0(X\1\0\0\0wq\1" + small % (storage, count) + rest + b"\x89}tRu."
    for path in sorted((FIXTURES / "verl_ckpt").rglob("*.pt")):
        yield b"\0" + path.read_bytes()
        with zipfile.ZipFile(path) as z:
            name = next(n for n in z.namelist() if n.endswith("/data.pkl"))
            yield b"\1" + z.read(name)


def dcp():
    theirs = tf.megatron_names(tf.tiny_qwen2(2), {"num_hidden_layers": 2, "num_key_value_heads": 1})
    some = {k: theirs[k] for k in ("decoder.final_layernorm.weight", "output_layer.weight")}
    for tensors, parts in ((theirs, 1), (theirs, 2), (some, 1), (some, 3)):
        ckpt = tf.Dcp(1)
        for name, (kind, shape, data) in tensors.items():
            ckpt.add(name, kind, shape, data, (1,) * (len(shape) - 1) + (parts if len(shape) < 3 else 1,))
        with tf.stand_ins():
            metadata = pickle.dumps(ckpt.metadata(), 4)
        yield struct.pack("<I", len(metadata)) + metadata + ckpt.files[0]
    for each in (False, True):
        ckpt = tf.Dcp(1)
        for name, shape in tf.tiny_qwen3_moe(each).items():
            if each and "experts" not in name:
                continue  # LARGEST
            ckpt.add(name, "F32", shape, bytes(4 * math.prod(shape)))
        with tf.stand_ins():
            metadata = pickle.dumps(ckpt.metadata(), 4)
        yield struct.pack("<I", len(metadata) | 2 << 30) + metadata + ckpt.files[0]
    for te in (False, True):
        ckpt = tf.Dcp(1)
        for name, shape in tf.tiny_deepseek_v3(te).items():
            ckpt.add(name, "F32", shape, bytes(4 * math.prod(shape)))
        with tf.stand_ins():
            metadata = pickle.dumps(ckpt.metadata(), 4)
        yield struct.pack("<I", len(metadata) | 3 << 30) + metadata + ckpt.files[0]
    for path in sorted((FIXTURES / "megatron_ckpt").rglob(".metadata")):
        raw = path.read_bytes()
        yield struct.pack("<I", len(raw)) + raw


def comm():
    frame = struct.pack("<IHHiIQQQ", 0x434C5256, 1, 4, 1, 0, 7, 0, 8)
    yield b"\0" + frame + b"12345678"
    yield b"\0" + struct.pack("<IHHiIQQQ", 0x434C5256, 1, 1, -1, 0, 1, 0, 0)
    yield b"\1" + compact({"type": "join", "protocol": 1, "version": "1", "build": "ab", "rank": 0, "size": 2, "host": "a",
                           "machine": "a 1", "pid": 5, "calls": "10.0.0.1:5", "mesh": ["", "10.0.0.1:6,10.1.0.1:6"]})
    yield b"\2" + compact({"type": "heartbeat", "stage": "update", "done": 3, "total": 8, "age": 0.5, "waits_for": -2, "call": 4})
    yield b"\3" + compact({"call": "echo", "args": {}, "arrays": [0, 5, 70000]})
    yield b"\4" + compact({"protocol": 1, "address": "10.0.0.1:5", "key": "k" * 40, "job": "7/0"})
    yield b"\5SLURM_JOB_ID=7\nSLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_NTASKS=4\nSLURM_LOCALID=1\nSLURM_NODEID=0" \
          b"\nSLURM_TASKS_PER_NODE=2(x2)"
    yield b"\5RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nGROUP_RANK=0\nMASTER_ADDR=a"
    yield b"\5OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2"
    yield b"\5PMI_RANK=1\nPMI_SIZE=2\nMPI_LOCALRANKID=1\nMPI_LOCALNRANKS=2\nVERLC_RANK=1\nVERLC_RANKS=2"


def tool_parser():
    """A format, whether tools follow as a line of JSON, the turn."""
    formats = "hermes qwen3_coder gpt-oss glm seed minimax kimi deepseek_v4 gemma4 llama3_json".split()
    for row in every(jsonl("agent/tool_parser.jsonl"), 120):
        head = bytes([formats.index(row["format"]) + 16 * bool(row["tools"])])
        yield head + (compact(row["tools"]) + b"\n" if row["tools"] else b"") + row["text"].encode()
    for text in ('{"name": "f", "parameters": {"x": 1}}<|eom_id|>',
                 '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": 1}',
                 '<|python_tag|>search.call(query="a b", k="2")<|eom_id|>'):
        yield bytes([9]) + text.encode()


def episode():
    """The number of responses, then their episodes."""
    whole = {"turns": 4, "end": "stop", "malformed": 0, "dropped": 0, "calls": [{"segment": 0, "name": "add", "arguments": "{}",
             "result": "3é", "status": "ok", "seconds": 0.5, "truncated": False}], "messages": [{"role": "tool", "content": "3é"}],
             "extra_info": {"num_turns": 4, "tool_rewards": [1], "turn_scores": []}}
    failed = {**whole, "failure": "the agent loop failed", "score": -1.5, "score_info": {"acc": True}}
    yield b"\2" + compact([whole, json.dumps(failed)])
    yield b"\1" + compact([{**failed, "turns": -1}])
    yield b"\1" + compact(["[1]"])
    yield b"\1" + compact([{**whole, "turns": 2**40, "score": "1"}])


def conversation():
    """Variables and draws, then requests of an agent: conversations that grow, and others."""
    for row in jsonl("agent/continuous/cases.jsonl"):
        for i, case in enumerate(row.get("cases", [])):
            messages, tools = case["messages"], case["tools"]
            grows = [compact({"messages": messages[:k], "tools": tools}) for k in range(1, len(messages) + 1)]
            if i % 3 == 0:
                yield bytes([i * 37 % 256]) + b"\n".join(grows)
    said = {"role": "assistant", "content": "a"}
    turns = [{"role": "user", "content": "q"}, said, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    requests = [turns[:1], turns[:1], turns, turns[:1] + [{**said, "content": "other"}] + turns[2:], turns[:1] + turns[2:]]
    for head in range(0, 256, 5):
        yield bytes([head]) + b"\n".join(compact({"messages": m}) for m in requests)
    yield b"\1" + compact({"messages": [{"role": "system", "tools": [{}], "response_format": {"a": 1.5}, "content": None},
                                        {"role": "developer", "content": "d", "task": "action"},
                                        {"role": "latest_reminder", "content": 3}]})


def engine_answer():
    """The kind of a server, and what it answers."""
    ids, logps = [4, 5, 457], [-0.5, -2.25, -1e-3]
    for finish in ("stop", "length", "abort", None):
        for n in (1, 3, 16):
            t, p = (ids * 6)[-n:] if n < 16 else [7] * 16, (logps * 6)[:n]
            done = {"token_ids": t, "logprobs": {"token_logprobs": p}, "finish_reason": finish}
            yield b"\0" + compact({"choices": [done]})
            yield b"\2" + compact({"choices": [{**done, "text": ""}]})
            yield b"\1" + compact({"output_ids": t, "meta_info": {"finish_reason": {"type": finish}, "output_token_logprobs": [
                [a, b, None] for a, b in zip(p, t)]}})
    yield b"\0" + compact({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 128}]})
    yield b"\1" + compact({"success": True, "message": "Succeeded to update model weights."})


def main(out):
    for make in (algo, ckpt, comm, conf, conversation, data, dcp, engine_answer, episode, generate, helper, model, model_dir,
                 reward, run_db, sandbox, score, serve, sft, text, tokenizer, tool_parser, torch, track, user):
        folder = out / f"fuzz_{make.__name__}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for seed in make():
            if len(seed) <= LARGEST:
                (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
        assert any(folder.iterdir()), folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
