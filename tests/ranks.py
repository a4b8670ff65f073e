"""What the tests of ranks share: what of two runs must be equal, and the processes of one."""

import hashlib
import json
import pathlib
import sqlite3

from verlc_test import run, save_tensors, tensors, undated

# of one machine and moment: times, memory, what a cache of one rank saw
OWN = ("timing", "perf/", "actor/perf/", "train/mfu", "train/time(s)", "rollout/kv_blocks_peak",
       "rollout/prefix_cached_tokens", "rollout/num_preempted", "rollout/spec_accept")
# of the run's files: manifest.json has the hashes of the others, config.yaml the number of ranks
NAMED = ("manifest.json", "config.yaml")
# a scorer that asks the judge which the run serves
ASK = """
import asyncio, json, urllib.request

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    def ask():
        body = {"messages": [{"role": "user", "content": solution_str}], "max_tokens": 8, "temperature": 0}
        r = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions", json.dumps(body).encode())
        return json.loads(urllib.request.urlopen(r, timeout=60).read())["choices"][0]["message"]["content"]
    return float(len(await asyncio.get_running_loop().run_in_executor(None, ask)))
"""


def files(run_dir, step):
    """Every file of a checkpoint but those that name the run, by its hash."""
    root = pathlib.Path(run_dir) / f"global_step_{step}"
    return {str(f.relative_to(root)): hashlib.sha256(undated(f)).hexdigest()
            for f in sorted(root.rglob("*")) if f.is_file() and f.name not in NAMED}


def metrics(run_dir):
    lines = (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line)["data"].items() if not k.startswith(OWN)} for line in lines]


def samples(run_dir):
    """Of run.db: all that a sample is, but its times."""
    db = sqlite3.connect(pathlib.Path(run_dir) / "run.db")
    columns = [c[1] for c in db.execute("pragma table_info(samples)") if c[1] not in ("id", "seconds", "ended", "num_preempted")]
    order = [c for c in ("step", "validation", "uid", "sample") if c in columns]
    return db.execute(f"select {', '.join(columns)} from samples order by {', '.join(order)}").fetchall()


def fields(a, b, step):
    """What of trainer.json differs."""
    x, y = (json.loads((pathlib.Path(d) / f"global_step_{step}/trainer.json").read_text()) for d in (a, b))
    return ", ".join(f"{k} is {str(x.get(k))[:200]} and {str(y.get(k))[:200]}" for k in sorted(set(x) | set(y))
                     if x.get(k) != y.get(k)) or "the order of its fields"


def first_difference(a, b, step):
    """Of two runs with a checkpoint of this step (0: with none): "" if there is none."""
    x, y = (files(a, step), files(b, step)) if step else ({}, {})
    if x != y:
        names = [k for k in sorted(set(x) | set(y)) if x.get(k) != y.get(k)]
        return "files: " + ", ".join(names) + (f": {fields(a, b, step)}" if "trainer.json" in names else "")
    for i, (x, y) in enumerate(zip(metrics(a), metrics(b))):
        for k in sorted(set(x) | set(y)):
            if x.get(k) != y.get(k):
                return f"line {i} of metrics.jsonl: {k} is {x.get(k)} and {y.get(k)}"
    return "" if samples(a) == samples(b) else "samples of run.db"


def below(pid):
    """Processes started by pid or below it: {pid: command}."""
    seen, todo, rows = {}, [pid], []
    for p in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((p / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (p / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
            rows.append((int(p.name), parent, command))
        except OSError:  # it has ended meanwhile
            pass
    while todo:
        parent = todo.pop()
        for child, ppid, args in rows:
            if ppid == parent:
                seen[child] = args
                todo.append(child)
    return seen


# shapes whose heads do not divide by two and three, narrow; what `model init` writes where its model's config.json has these keys
FAMILIES = {
    # norms behind attention and MLP, windows, three key heads
    "gemma3": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 96, "intermediate_size": 120,
               "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
               "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 8,
               "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0},
    # one matrix of gate and up, rope of half a head, norms before and behind attention and MLP
    "glm4": {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "hidden_size": 96, "intermediate_size": 144,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    # norms of whole rows of queries and of keys, of what attention and MLP give and of nothing before
    "olmo2": {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 96, "intermediate_size": 160,
              "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    # gated delta nets, and attention with output gates in layer 3
    "qwen3_5": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 96, "intermediate_size": 128,
                "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
                "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
}


def family_model(s, name, keys=None):
    """The scratch's model as one of FAMILIES; keys: of config.json, in addition."""
    arch, out = s.dir / f"{name}.json", s.dir / name
    arch.write_text(json.dumps(json.loads((s.dir / "model/config.json").read_text()) | FAMILIES[name] | (keys or {})))
    run("model", "init", "--arch", arch, "--out", out, "--tokenizer", s.dir / "model", "--dtype", "fp32")
    return out


def experts_model(s, family="qwen3_moe", keys=None):
    """The scratch's model as a Qwen3-MoE, one MLP in layer 1, experts in the others; or as another family."""
    config = json.loads((s.dir / "model/config.json").read_text())
    config |= {"model_type": family} | (keys or {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "norm_topk_prob": True, "mlp_only_layers": [1]})
    arch, out = s.dir / f"{family}.json", s.dir / family
    arch.write_text(json.dumps(config))
    run("model", "init", "--arch", arch, "--out", out, "--tokenizer", s.dir / "model", "--dtype", "fp32")
    return out


def two_experts_model(model, out):
    """The same model with routers of zeros: all tokens go to experts 0 and 1, which the first rank has."""
    out.mkdir()
    for f in model.iterdir():
        if f.name != "model.safetensors":
            (out / f.name).write_bytes(f.read_bytes())
    t = tensors(model / "model.safetensors")
    save_tensors(out / "model.safetensors", {k: (dt, shape, bytes(len(data)) if k.endswith("mlp.gate.weight") else data)
                                             for k, (dt, shape, data) in t.items()})
    return out
