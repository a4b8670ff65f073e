"""Bad input, one named check each: one `error:` line that says what, where and what to
do, the exit status of the contract, and nothing lost or half-written."""

import json
import os
import pathlib
import shutil
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

USAGE, DATA, RESOURCES = 2, 3, 4


def model_copy(s, name):
    shutil.rmtree(s.dir / name, ignore_errors=True)
    return pathlib.Path(shutil.copytree(s.dir / "model", s.dir / name))


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def edit_header(path, change):
    """Rewrites the JSON header of a safetensors file in place."""
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n:])


class Case:
    """Runs a ppo command that must be refused before it makes anything but its directory."""

    def __init__(self, test, s):
        self.test, self.s = test, s

    def __call__(self, name, status, *words, extra=(), **keys):
        p = run(*self.s.ppo("refused", **keys), *extra, check=False, timeout=120)
        self.test.refused(name, p, status, *words)
        left = sorted(f.name for f in (self.s.dir / "refused").glob("*")) if (self.s.dir / "refused").exists() else []
        self.test(name + ": no checkpoint is left", not [f for f in left if f.startswith("global_step")], str(left))
        shutil.rmtree(self.s.dir / "refused", ignore_errors=True)
        return p


def check_models(s, refused):
    path = "actor_rollout_ref.model.path"
    refused("model directory missing", DATA, "no-such-model", "no such directory", **{path: s.dir / "no-such-model"})
    refused("model named by a hub id that is not here", DATA, "nobody/nothing", "nor is there a directory of that name",
            **{path: "nobody/nothing"})
    m = model_copy(s, "m")
    (m / "config.json").unlink()
    refused("config.json missing", DATA, "config.json", **{path: m})
    m = model_copy(s, "m")
    (m / "config.json").write_text('{"architectures": [')
    refused("config.json malformed", DATA, "config.json", **{path: m})
    m = model_copy(s, "m")
    edit_json(m / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    refused("unsupported architecture is named", DATA, "config.json", "unsupported", "Mamba", **{path: m})
    m = model_copy(s, "m")
    for f in m.glob("*.safetensors*"):
        f.unlink()
    refused("weights missing", DATA, "model.safetensors", **{path: m})

    weights = "model.safetensors"
    m = model_copy(s, "m")
    data = (m / weights).read_bytes()
    (m / weights).write_bytes(data[:len(data) * 2 // 3])
    refused("truncated safetensors", DATA, weights, **{path: m})
    (m / weights).write_bytes(data[:5])
    refused("safetensors shorter than its length field", DATA, weights, **{path: m})
    (m / weights).write_bytes(struct.pack("<Q", 1 << 40) + data[8:])
    refused("safetensors with an oversized header", DATA, weights, "header", **{path: m})
    name = "model.layers.0.self_attn.q_proj.weight"

    def reshape(header):
        rows, cols = header[name]["shape"]
        header[name]["shape"] = [cols * 2, rows // 2] if rows % 2 == 0 and rows != cols * 2 else [rows * cols]
    m = model_copy(s, "m")
    edit_header(m / weights, reshape)
    refused("safetensors with a wrong shape", DATA, weights, name, **{path: m})
    m = model_copy(s, "m")
    edit_header(m / weights, lambda h: h.update({"other": h.pop(name)}))
    refused("safetensors without a tensor", DATA, name, **{path: m})
    for kind, bits in (("NaN", 0x7fc0), ("Inf", 0x7f80)):
        m = model_copy(s, "m")
        raw = bytearray((m / weights).read_bytes())
        n = struct.unpack("<Q", raw[:8])[0]
        t = json.loads(raw[8:8 + n])[name]
        at = 8 + n + t["data_offsets"][0]
        raw[at:at + (4 if t["dtype"] == "F32" else 2)] = struct.pack("<I",
                                                                     bits << 16) if t["dtype"] == "F32" else struct.pack("<H", bits)
        (m / weights).write_bytes(raw)
        refused(f"{kind} in the weights", DATA, name, "NaN or Inf", **{path: m})

    m = model_copy(s, "m")
    (m / "tokenizer.json").unlink()
    refused("tokenizer missing", DATA, "tokenizer.json", **{path: m})
    (m / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab":')
    refused("tokenizer malformed", DATA, "tokenizer.json", **{path: m})
    (m / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    refused("tokenizer of an unsupported kind is named", DATA, "tokenizer.json", "unsupported", "Unigram", **{path: m})
    m = model_copy(s, "m")
    edit_json(m / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m.role ")
    refused("chat template with a syntax error", DATA, "template", **{path: m})
    edit_json(m / "tokenizer_config.json", chat_template="{{ raise_exception('roles must alternate') }}")
    refused("chat template that refuses its messages", DATA, "roles must alternate", **{path: m})


def check_data(s, refused):
    train = "data.train_files"
    refused("training file missing", DATA, "gone.jsonl", **{train: s.dir / "gone.jsonl"})
    rows = [json.dumps(s.row(i)) for i in range(8)]
    broken = s.dir / "broken.jsonl"
    broken.write_text("\n".join(rows[:4] + ['{"prompt": [{"role": '] + rows[4:]) + "\n")
    refused("broken JSONL row is named by file and line", DATA, "broken.jsonl:5", **{train: broken})
    broken.write_text("\n".join(rows[:2] + ["[1, 2]"] + rows[2:]) + "\n")
    refused("JSONL row that is no object", DATA, "broken.jsonl:3", **{train: broken})
    bad = s.row(1)
    bad["prompt"] = 7
    broken.write_text("\n".join(rows[:1] + [json.dumps(bad)]) + "\n")
    refused("prompt that is no list of messages", DATA, "broken.jsonl row 2", "prompt", **{train: broken})
    del bad["prompt"]
    broken.write_text("\n".join(rows[:2] + [json.dumps(bad)]) + "\n")
    refused("JSONL row without a required column", DATA, "broken.jsonl:3", "prompt", **{train: broken})
    (s.dir / "empty.jsonl").write_text("")
    refused("training file without a row", DATA, "empty.jsonl", **{train: s.dir / "empty.jsonl"})
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        print("skipped: parquet (pyarrow is not installed)")
    else:
        table = [s.row(i) for i in range(8)]
        good = s.dir / "good.parquet"
        pq.write_table(pa.Table.from_pylist(table), good)
        pq.write_table(pa.Table.from_pylist([{k: v for k, v in r.items() if k != "prompt"} for r in table]), s.dir / "cut.parquet")
        refused("parquet without a required column", DATA, "cut.parquet", "prompt", **{train: s.dir / "cut.parquet"})
        raw = good.read_bytes()
        (s.dir / "torn.parquet").write_bytes(raw[:len(raw) // 2])
        refused("truncated parquet", DATA, "torn.parquet", **{train: s.dir / "torn.parquet"})
        (s.dir / "text.parquet").write_text("hello\n")
        refused("a file that is no parquet", DATA, "text.parquet", **{train: s.dir / "text.parquet"})

    long = s.row(0)
    long["prompt"][0]["content"] = "one two three four five six seven eight nine ten " * 40
    s.write("long.jsonl", [s.row(i) for i in range(7)] + [long])
    keys = {train: s.dir / "long.jsonl", "data.train_batch_size": 8, "trainer.total_training_steps": 1}
    refused("prompt over the limit, truncation=error", DATA, "long.jsonl", "data.max_prompt_length", "64",
            data__filter_overlong_prompts=False, data__truncation="error", **keys)
    for how in ("left", "right", "middle"):
        p = run(*s.ppo(f"cut-{how}", data__truncation=how, data__filter_overlong_prompts=False, **keys), check=False)
        refused.test(f"prompt over the limit, truncation={how} trains on 64 tokens", p.returncode == 0 and
                     "prompt_length/max:64.0" in p.stdout, p.stderr[-400:])
    p = run(*s.ppo("filtered", data__filter_overlong_prompts=True, **{**keys, "data.train_batch_size": 7}), check=False)
    refused.test("prompt over the limit, filtered and counted", p.returncode == 0 and "1 dropped" in p.stderr, p.stderr[-400:])
    refused("unknown truncation policy", USAGE, "data.truncation", "middle", data__truncation="centre")
    s.write("all-long.jsonl", [long] * 4)
    refused("all prompts filtered out", DATA, "data.train_files", "data.max_prompt_length=64", "1409",
            **{train: s.dir / "all-long.jsonl", "data.filter_overlong_prompts": True})
    refused("fewer prompts than a batch", USAGE, "data.train_batch_size", "64", data__train_batch_size=128)


def check_config(s, refused):
    actor = "actor_rollout_ref.actor."
    refused("mini-batch larger than the batch", USAGE, "data.train_batch_size (4)", actor + "ppo_mini_batch_size (8)",
            **{actor + "ppo_mini_batch_size": 8})
    refused("micro-batch that does not divide", USAGE, "divisible", actor + "ppo_micro_batch_size_per_gpu (3)",
            **{actor + "ppo_micro_batch_size_per_gpu": 3})
    refused("devices that do not divide the batch", USAGE, "(8) must be divisible by", "(3)", trainer__n_gpus_per_node=3)
    refused("unknown key, the nearest is named", USAGE, "actor_rollout_ref.actor.ppo_mini_batch_sise",
            "actor_rollout_ref.actor.ppo_mini_batch_size", **{actor + "ppo_mini_batch_sise": 2})
    refused("wrong type", USAGE, "data.train_batch_size", "many", data__train_batch_size="many")
    refused("out of range", USAGE, "actor_rollout_ref.rollout.n", "0", **{"actor_rollout_ref.rollout.n": 0})
    refused("not one of the allowed words", USAGE, "reward.on_error", "ignore", reward__on_error="ignore")
    refused("unknown estimator", USAGE, "algorithm.adv_estimator", "grpp", algorithm__adv_estimator="grpp")
    refused("unknown tracker", USAGE, "trainer.logger", "tensorbord", trainer__logger="[console,tensorbord]")
    refused("temperature 0 in training", USAGE, "rollout.temperature", **{"actor_rollout_ref.rollout.temperature": 0})
    refused("malformed override", USAGE, "data.train_batch_size", extra=["data.train_batch_size"])
    critic = {"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 4}
    refused("a critic without a model", USAGE, "critic.model.path", "gae", **critic)
    refused("a critic of which there is no directory", DATA, "critic.model.path", "nowhere", **critic,
            **{"critic.model.path": s.dir / "nowhere"})
    config = json.loads((s.dir / "model/config.json").read_text())
    (s.dir / "other.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] // 2}))
    run("model", "init", "--arch", s.dir / "other.json", "--out", s.dir / "other")
    refused("a critic with another vocabulary", DATA, "critic.model.path", "vocabulary", "tokenizer", **critic,
            **{"critic.model.path": s.dir / "other"})
    refused("more memory than allowed", RESOURCES, "limit", trainer__device_memory_limit="1MiB")
    p = run("frobnicate", check=False)
    refused.test.refused("unknown command", p, USAGE, "frobnicate", "--help")
    p = run("ppo", "--config-name=ppo_trainer_not", check=False)
    refused.test("unknown configuration name", p.returncode == USAGE and "error: " in p.stderr, p.stderr[-300:])


def check_tools(s, test):
    def tool(name, status, stdin, *words, args=("generate", "--model", s.dir / "model")):
        p = run(*args, check=False, input=stdin, timeout=60)
        test.refused(name, p, status, *words)
    tool("generate: broken line", DATA, '{"prompt": "a", "max_tokens": 2}\n{"prompt"\n', "stdin:2")
    tool("generate: no prompt", DATA, '{"max_tokens": 2}\n', "stdin:1", "prompt")
    tool("generate: n = 0", DATA, '{"prompt": "a", "n": 0}\n', "stdin:1", '"n"')
    tool("generate: an id past the vocabulary", DATA, '{"ids": [99999999]}\n', "stdin:1", "ids")
    tool("generate: an id that wraps", DATA, '{"ids": [4294967297]}\n', "stdin:1", "ids")
    tool("generate: longer than the model", DATA, '{"prompt": "a", "max_tokens": 100000000}\n', "stdin:1", "positions")
    tool("generate: a length that overflows", DATA, '{"prompt": "a", "max_tokens": 9223372036854775807}\n', "stdin:1", "positions")
    tool("generate: top_k past 32 bits", DATA, '{"prompt": "a", "top_k": 4294967297}\n', "stdin:1", "top_k")
    tool("generate: a negative temperature", DATA, '{"prompt": "a", "temperature": -1}\n', "stdin:1", "temperature")
    tool("generate: stop that is no string", DATA, '{"prompt": "a", "stop": [1]}\n', "stdin:1", "stop")
    tool("generate: no model", DATA, '', "no-model", args=("generate", "--model", s.dir / "no-model"))
    tool("generate: an unknown option", USAGE, '', "--modle", "--model", args=("generate", "--modle", "x"))
    tool("generate: a dtype that does not exist", USAGE, '', "--dtype",
         args=("generate", "--model", s.dir / "model", "--dtype", "fp7"))


def check_names(s, test):
    """A working directory whose name is not UTF-8."""
    odd = os.fsencode(s.dir) + b"/odd\xff"
    os.mkdir(odd)
    keys = {"trainer.total_training_steps": 1, "trainer.device": "cpu"}
    p = run(*s.ppo("odd1", **keys), check=False, cwd=odd)
    test("a directory that is not UTF-8: one rank runs in it", p.returncode == 0, p.stderr[-500:])
    p = run(*s.ppo("odd2", **{**keys, "trainer.ranks": 2}), check=False, cwd=odd)
    test.refused("and ranks say why not", p, DATA, "working directory's name is not UTF-8")
    os.rmdir(odd)


def check_merge(s, test):
    """Safetensors in shards become one file with the same bytes; pickles are named and refused."""
    def merge(source):
        return run("model", "merge", "--model", source, "--out", s.dir / "merged", check=False)

    run("model", "export", "--model", s.dir / "model", "--out", s.dir / "shards", "--max-shard-mb", "1")
    p = merge(s.dir / "shards")
    merged, model = (s.dir / d / "model.safetensors" for d in ("merged", "model"))
    same = p.returncode == 0 and merged.read_bytes() == model.read_bytes()
    test("merge: shards become one file, byte for byte", same and len(list((s.dir / "shards").glob("model-*.safetensors"))) > 1,
         p.stderr)
    shutil.rmtree(s.dir / "merged")
    for name, why in (("model_world_size_2_rank_0.pt", "not a zip file"), ("actor/model_world_size_1_rank_0.pt", "not a zip file"),
                      ("dist_ckpt/__0_0.distcp", "unsupported pickled"),
                      ("pytorch_model-00001-of-00002.bin", "unsupported pickled")):
        source = s.dir / "pickled" / name
        source.parent.mkdir(parents=True)
        source.write_bytes(b"")
        test.refused(f"merge: {name}", merge(s.dir / "pickled"), DATA, str(source), why)
        shutil.rmtree(s.dir / "pickled")
    next((s.dir / "shards").glob("model-00002*")).unlink()
    test.refused("merge: a shard is missing", merge(s.dir / "shards"), DATA, "model-00002")
    test("merge: nothing is left of a failure", not (s.dir / "merged").exists() and not (s.dir / "merged.tmp").exists())


def main():
    test = Tests()
    with Scratch() as s:
        refused = Case(test, s)
        check_models(s, refused)
        check_data(s, refused)
        check_config(s, refused)
        check_tools(s, test)
        check_merge(s, test)
        check_names(s, test)
    test.end()


main()
