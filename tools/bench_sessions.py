"""`make bench-sessions`: thousands of episodes that wait for their tools while the engine generates.

One step of GRPO with agent loop tool_agent. Each turn of an episode is up to --tokens tokens and a call of a tool that sleeps
--tool-seconds; the weights are such that the model always writes that, at the cost of any other weights: what the layers add is 0,
and a table in the head says what follows. The same step with tools that answer at once is the reference.

  python tools/bench_sessions.py [--device cpu] [--model ARCH] [--sessions N] [--turns N] [--tokens N]
      [--tool-seconds S] [--seqs N]

--device cpu: a tiny model; it shows that nothing waits for a tool, and no rate of a GPU.
On a GPU the step is traced, which says how long the device waited for the host.
Environment: VERLC, OUT_DIR. Writes OUT_DIR/sessions.json.
Exit status 1: less than 90 % of the reference's rate, or a run failed."""

import argparse
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from tool_model import TEMPLATE  # noqa: E402

VERLC = os.environ.get("VERLC", ROOT / "build/release/verlc")
OUT = pathlib.Path(os.environ.get("OUT_DIR", ROOT / "build/bench")).resolve()
CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
BAR = 0.9
TOOL = '''import asyncio

from verl.tools.function_tool import function_tool


@function_tool
async def wait() -> str:
    """Waits."""
    await asyncio.sleep(SECONDS)
    return "done"
'''
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def verlc(*args, **kw):
    return subprocess.run([VERLC, *map(str, args)], text=True, check=True, **kw)


# ---- the model ----


def tensors_of(path):
    """name -> (dtype, shape, begin, end) of the file, and where its data begins."""
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        head = json.loads(f.read(n))
    head.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], *v["data_offsets"]) for k, v in head.items()}, 8 + n


def numbers(raw, dtype):
    if dtype == "F32":
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    return [struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0] for i in range(0, len(raw), 2)]


def raw_of(values, dtype):
    packed = struct.pack(f"<{len(values)}f", *values)
    return packed if dtype == "F32" else b"".join(packed[i + 2:i + 4] for i in range(0, len(packed), 4))


def scripted_model(model, out, n_tokens):
    """A copy that writes up to n_tokens - 2 words, the call and the end of its turn after each newline."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    ids = {t["content"]: t["id"] for t in added} | tokenizer["model"]["vocab"]
    call = max(ids.values()) + 1
    added.append({**added[-1], "id": call, "content": CALL, "special": False})
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    end = {"eos_token_id": ids["<|im_end|>"]}
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False} | end
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps(end))
    words = [ids[w] for w in sorted(tokenizer["model"]["vocab"]) if w.replace("Ġ", "").isalnum()][:n_tokens - 2]
    chain = [ids["Ċ"], *words, call, ids["<|im_end|>"]]
    copy_with_head(model / "model.safetensors", out / "model.safetensors", config["hidden_size"], chain)
    return out


def copy_with_head(source, to, hidden, chain):
    tensors, base = tensors_of(source)
    dtype, shape, begin, end = tensors["model.embed_tokens.weight"]
    bytes_row = (end - begin) // shape[0]
    head, at = {}, 0
    for name, (dt, dims, lo, hi) in [*tensors.items(), ("lm_head.weight", (dtype, shape, begin, end))]:
        head[name] = {"dtype": dt, "shape": dims, "data_offsets": [at, at + hi - lo]}
        at += hi - lo
    text = json.dumps(head).encode()
    with open(source, "rb") as f, open(to, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, (_, _, lo, hi) in tensors.items():
            f.seek(base + lo)
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))  # what a layer adds
            out.write(bytes(hi - lo) if zero else f.read(hi - lo))
        begin_head = out.tell()
        out.truncate(begin_head + end - begin)
        for a, b in zip(chain, chain[1:]):  # the state of a token is its row, normalised
            f.seek(base + begin + a * bytes_row)
            row = numbers(f.read(bytes_row), dtype)
            norm = sum(x * x for x in row) ** 0.5
            out.seek(begin_head + b * bytes_row)
            out.write(raw_of([40 * x / norm / hidden ** 0.5 for x in row], dtype))


# ---- the runs ----


def command(args, model, run, tool):
    n = 8
    keys = {
        "algorithm.adv_estimator": "grpo", "data.train_files": OUT / "sessions.jsonl", "data.val_files": OUT / "sessions.jsonl",
        "data.train_batch_size": args.sessions // n, "data.max_prompt_length": 128,
        "data.max_response_length": args.turns * (args.tokens + 32), "actor_rollout_ref.model.path": model,
        A + "ppo_mini_batch_size": args.sessions // n, A + "ppo_micro_batch_size_per_gpu": 8, A + "use_kl_loss": "False",
        R + "log_prob_micro_batch_size_per_gpu": 8, R + "name": "verlc", R + "n": n, R + "max_num_seqs": args.seqs,
        R + "gpu_memory_utilization": 0.7, R + "agent.default_agent_loop": "tool_agent",
        R + "multi_turn.function_tool_path": tool, R + "multi_turn.max_assistant_turns": args.turns,
        "trainer.total_training_steps": 1, "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.val_before_train": "False",
        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.default_local_dir": run, "trainer.logger": "[file]",
        "trainer.device": args.device, "reward.custom_reward_function.path": OUT / "sessions_reward.py"}
    if args.device == "cuda":
        keys["trainer.profile_steps"] = "[1]"
    return ["ppo", *(f"{k}={v}" for k, v in keys.items())]


def one_run(args, model, seconds):
    """Metrics of the step, and the share of generation in which the device had nothing to do (None: not traced)."""
    name = f"sessions_{seconds:g}s"
    run, tool = OUT / name, OUT / f"{name}.py"
    shutil.rmtree(run, ignore_errors=True)
    tool.write_text(TOOL.replace("SECONDS", str(seconds)))
    with open(OUT / f"{name}.log", "w") as log:
        verlc(*command(args, model, run, tool), stdout=subprocess.DEVNULL, stderr=log)
    m = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["data"]
    found = re.search(r"trace: +gen ([0-9.]+) ms, idle ([0-9.]+) ms", (OUT / f"{name}.log").read_text())
    idle = float(found[2]) / float(found[1]) if found else None
    drawn, busy = m["response_length/mean"] * args.sessions, m["perf/engine_busy"]
    print(f"tools of {seconds:g} s: {args.sessions} sessions of {m['num_turns/mean']:.0f} turns, {m['tool_call_counts/mean']:.1f} "
          f"calls each: generation {m['timing_s/gen']:.2f} s, {drawn / m['timing_s/gen']:,.0f} tokens/s, engine busy {busy:.1%}"
          + ("" if idle is None else f", the device waits {idle:.1%} of it"), flush=True)
    return {"seconds": m["timing_s/gen"], "tokens": drawn, "idle": idle, "busy": busy,
            "calls": m["tool_call_counts/mean"]}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda")
    p.add_argument("--model", default="qwen2.5-0.5b")
    for name, value in (("sessions", 2000), ("turns", 5), ("tokens", 256), ("seqs", 512)):
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--tool-seconds", type=float, default=1)
    args = p.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    base, model = OUT / f"sessions_base_{args.model}", OUT / "sessions_model"
    shutil.rmtree(model, ignore_errors=True)
    tiny = OUT / "sessions_tiny"
    if not (tiny / "config.json").exists():
        verlc("model", "init", "--preset", "tiny", "--out", tiny, "--seed", 1, stdout=subprocess.DEVNULL)
    if args.device == "cuda" and not (base / "config.json").exists():
        verlc("model", "init", "--arch", args.model, "--out", base, "--tokenizer", tiny, "--seed", 1, stdout=subprocess.DEVNULL)
    base = tiny if args.device == "cpu" else base
    scripted_model(base, model, args.tokens)
    rows = [{"data_source": "sessions", "prompt": [{"role": "user", "content": f"Wait {i}."}],
             "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i}} for i in range(args.sessions // 8)]
    (OUT / "sessions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (OUT / "sessions_reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                            "    return float(len(solution_str) % 2)\n")
    at_once, waiting = one_run(args, model, 0), one_run(args, model, args.tool_seconds)
    ratio = at_once["seconds"] / waiting["seconds"]
    print(f"with tools of {args.tool_seconds:g} s: {ratio:.1%} of the rate of tools that answer at once (bar {BAR:.0%})")
    (OUT / "sessions.json").write_text(json.dumps({"at_once": at_once, "waiting": waiting, "ratio": ratio}, indent=1) + "\n")
    sys.exit(ratio < BAR or waiting["calls"] < 0.8 * (args.turns - 1))


main()
