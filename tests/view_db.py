"""A run.db as a GRPO run would write it, for tests and measurements of `verlc view`, made in seconds.

    python3 tests/view_db.py OUT_DIR [--steps 2000] [--samples 1024] [--group 8] [--tokens 48]

The schema is the one in src/track/run_db_schema.c."""

import argparse
import array
import json
import math
import pathlib
import random
import re
import sqlite3
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPECIAL = {"151643": "<|endoftext|>", "151644": "<|im_start|>", "151645": "<|im_end|>"}
WORDS = (
    "the answer is so we add both numbers then each of them has half as many left over after that total price "
    "\\boxed{42} #### 42 = + 7 × 6 apples because every day one more"
).split()


def schema():
    """The statements that make format 2, from the C source."""
    text = (ROOT / "src/track/run_db_schema.c").read_text()
    tables = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', re.search(r"schema\[\] =(.*?);\n(?:static|/\*)", text, re.S)[1]))
    columns = re.findall(r'\{"(\w+)", "(\w+)"\}', re.search(r"added\[\]\[2\] = \{(.*?)\};", text, re.S)[1])
    return tables + "".join(f"ALTER TABLE samples ADD COLUMN {name} {kind};" for name, kind in columns)


def metrics_of(step, steps, rng):
    """Curves that look like a run that learns."""
    x = step / steps
    reward = 0.15 + 0.65 * (1 - math.exp(-3 * x)) + rng.gauss(0, 0.04)
    out = {
        "critic/rewards/mean": reward,
        "critic/score/mean": reward,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "actor/grad_norm": 0.4 * math.exp(rng.gauss(0, 0.35)) * (8 if rng.random() < 0.01 else 1),
        "actor/kl_loss": 0.15 * x + abs(rng.gauss(0, 0.004)),
        "actor/ppo_kl": rng.gauss(0, 1e-4),
        "actor/entropy": 0.9 * math.exp(-1.2 * x) + rng.gauss(0, 0.01),
        "actor/lr": 1e-6 * min(1, step / 20),
        "actor/pg_loss": rng.gauss(0, 0.02),
        "actor/pg_clipfrac": abs(rng.gauss(0, 0.01)),
        "response_length/mean": 210 + 160 * x + rng.gauss(0, 9),
        "response_length/max": 512.0,
        "response_length/clip_ratio": max(0, 0.02 + 0.1 * x + rng.gauss(0, 0.01)),
        "prompt_length/mean": 92 + rng.gauss(0, 3),
        "train/zero_variance_groups": max(0, 0.2 + 0.5 * x + rng.gauss(0, 0.04)),
        "perf/throughput": 4400 + rng.gauss(0, 120),
        "perf/mfu/actor": 0.41 + rng.gauss(0, 0.01),
        "perf/gpu_utilization": 86 + rng.gauss(0, 3),
        "perf/gpu_memory_used_gb": 71.5,
        "reward/num_errors": float(rng.random() < 0.02),
        "timing_s/gen": 6 + 4 * x + rng.gauss(0, 0.3),
        "timing_s/reward": abs(rng.gauss(0.2, 0.1)),
        "timing_s/ref": 1.1 + rng.gauss(0, 0.05),
        "timing_s/adv": 0.02,
        "timing_s/update_actor": 4.2 + x + rng.gauss(0, 0.1),
    }
    out["timing_s/step"] = sum(v for k, v in out.items() if k.startswith("timing_s/"))
    out.update({f"extra/metric_{i}": rng.gauss(0, 1) for i in range(40)})
    if step % 20 == 0:
        out.update({"val-core/openai/gsm8k/acc/mean@1": 0.2 + 0.6 * (1 - math.exp(-3 * x)), "timing_s/testing": 12.0})
        out["timing_s/save_checkpoint"] = 1.5
    return out


def prompt_of(uid):
    """A prompt as Qwen's template makes it: its text, ids and the bytes of each token; special tokens have none."""
    question = f"Question {uid}: Anna has {uid} apples and buys {uid % 9} more each day. How many are there after a week? "
    question += "Let's think step by step and output the final answer after ####. " * 4
    turns = (("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."), ("user", question))
    parts = []
    for role, text in turns:
        words = text.strip().split(" ")
        parts += [(151644, ""), (8948, role), (198, "\n"), *((1000 + len(w), w) for w in [words[0], *(" " + w for w in words[1:])])]
        parts += [(151645, ""), (198, "\n")]
    parts += [(151644, ""), (77091, "assistant"), (198, "\n")]
    ids = array.array("i", [n for n, _ in parts]).tobytes()
    return "".join(w for _, w in parts), ids, array.array("H", [len(w.encode()) for _, w in parts]).tobytes()


def conversation(n, rng):
    """n tokens as a conversation with tools: segments as run.db has them, the record of the episode."""
    rounds = rng.randint(0, 3)
    cuts = sorted(rng.sample(range(1, n), min(n - 1, 2 * rounds))) if rounds else []
    pairs = [(b - a, k % 2) for k, (a, b) in enumerate(zip([0] + cuts, cuts + [n]))]
    calls = []
    for k in range(0, len(pairs) - 1, 2):
        for _ in range(rng.choice([1, 1, 2])):
            status = rng.choice(["ok"] * 6 + ["error", "timeout", "arguments", "unknown"])
            calls.append({"segment": k, "name": rng.choice(["calculator", "calculator", "search"]), "status": status,
                          "arguments": json.dumps({"expression": f"{rng.randrange(99)} * 7"}),
                          "result": "42" if status == "ok" else "Error: <b>no</b>", "seconds": rng.random(),
                          "truncated": rng.random() < 0.2, **({"reward": 0.5} if rng.random() < 0.3 else {})})
    end = rng.choice(["stop"] * 5 + ["length", "max_assistant_turns", "refused"])
    episode = {"turns": len(pairs) + 1, "end": end, "malformed": int(rng.random() < 0.1), "dropped": 0, "calls": calls}
    if end == "refused":
        episode["reason"] = "the template's render is no continuation"
    return array.array("i", [v for pair in pairs for v in pair]).tobytes(), json.dumps(episode)


def sample(i, group, tokens, rng, agents=False):
    """One row of the table samples, without its step."""
    uid, index = divmod(i, group)
    n = max(4, min(tokens * 3, int(rng.gauss(tokens, tokens / 3))))
    words = [("" if k == 0 else " ") + rng.choice(WORDS) for k in range(n - 1)] + [""]
    score = None if i == 3 else float(rng.random() < (uid % 7) / 6)

    prompt, prompt_ids, prompt_bytes = prompt_of(uid)
    stop = n < tokens * 1.6

    def f32(low, high):
        return array.array("f", [rng.uniform(low, high) for _ in range(n)]).tobytes()

    logp = array.array("f", [-abs(rng.gauss(0, 1)) ** 3 for _ in range(n)])
    ref = array.array("f", [v + rng.gauss(0, 0.15) for v in logp])
    return (
        0,
        uid,
        index,
        "openai/gsm8k",
        prompt,
        "".join(words),
        str(uid + 7 * (uid % 9)),
        score,
        None if score is None else score - 0.5,
        "score" if score is not None else "timeout",
        "stop" if stop else "length",
        prompt_ids,
        array.array("i", [rng.randrange(50000) for _ in range(n - 1)] + [151645 if stop else 7]).tobytes(),
        logp.tobytes(),
        json.dumps({"acc": score, "pred": "42"}),
        f32(0, 1.5),
        ref.tobytes(),
        None,
        None if score is not None else "the scorer took longer than 30 s",
        array.array("H", [len(w.encode()) for w in words]).tobytes(),
        prompt_bytes,
        *(conversation(n, rng) if agents else (None, None)),
    )


def make(directory, steps, samples, group=8, tokens=48, ended=True, name="grpo", seed=0, lr=1e-6, agents=False):
    rng = random.Random(seed)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(directory / "run.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=OFF")
    db.executescript(schema())
    db.execute("BEGIN")
    now = time.time()
    plan = {
        "total": 61 << 30,
        "limit": 80 << 30,
        "parts": [
            {"name": n, "bytes": b, "note": t, "block": k}
            for n, b, t, k in (
                ("weights", 15 << 30, "7.6e9 parameters in bfloat16", False),
                ("optimizer", 30 << 30, "two moments in float32", False),
                ("KV cache", 14 << 30, "6,144 blocks", True),
                ("activations", 11 << 30, "recomputed for each layer", True),
                ("logits", 2 << 30, "", False),
            )
        ],
    }
    config = {
        "data": {"train_batch_size": samples // group, "max_response_length": 512},
        "actor_rollout_ref": {"actor": {"optim": {"lr": lr}}, "rollout": {"n": group}},
        "trainer": {"total_training_steps": steps, "project_name": "gsm8k", "experiment_name": name, "seed": seed},
    }
    meta = {
        "format": "2",
        "version": "0.2.0",
        "project": "gsm8k",
        "experiment": name,
        "config": json.dumps(config),
        "plan": json.dumps(plan),
        "set": json.dumps(["data.train_batch_size", "actor_rollout_ref.actor.optim", "trainer.total_training_steps"]),
        "special_tokens": json.dumps(SPECIAL),
        "total_steps": str(steps),
        "started": f"{now - 3600:.3f}",
        "headline": json.dumps(["critic/rewards/mean"]),
    }
    if ended:
        meta |= {"ended": f"{now:.3f}", "exit": "done"}
    db.executemany("INSERT OR REPLACE INTO meta VALUES(?, ?)", meta.items())
    db.executemany(
        "INSERT INTO metrics VALUES(?, ?, ?)",
        ((s, k, v) for s in range(1, steps + 1) for k, v in sorted(metrics_of(s, steps, rng).items())),
    )
    db.execute(
        "INSERT INTO events(step, wall, kind, message) VALUES(?, ?, 'warning', ?)",
        (steps // 2, now - 1800, "zero-variance groups: 82 % for 10 steps; harder prompts help"),
    )
    db.execute(
        "INSERT INTO events(step, wall, kind, message) VALUES(?, ?, 'checkpoint', ?)",
        (steps // 4 * 3, now - 900, "global_step_%d" % (steps // 4 * 3)),
    )
    for s in range(1, steps + 1):
        ones = round(samples * (0.2 + 0.6 * s / steps))
        counts = array.array("i", [samples - ones] + [0] * 38 + [ones])
        lengths = array.array("i", [round(samples * math.exp(-(((b - 12 - 8 * s / steps) / 6) ** 2)) / 10) for b in range(40)])
        db.executemany(
            "INSERT INTO histograms VALUES(?, 0, ?, ?, ?, ?)",
            [(s, "score", 0.0, 1.0, counts.tobytes()), (s, "response_length", 4.0, 512.0, lengths.tobytes())],
        )
    columns = (
        "validation, uid, sample, data_source, prompt, response, ground_truth, score, advantage, reward_status, finish, "
        "prompt_ids, ids, logp, extra, entropy, ref_logp, advantages, reward_message, token_bytes, prompt_bytes, "
        "segments, episode"
    )
    db.execute(f"CREATE TEMP TABLE one AS SELECT {columns} FROM samples WHERE 0")
    db.executemany(
        f"INSERT INTO one({columns}) VALUES({', '.join('?' * 23)})",
        (sample(i, group, tokens, rng, agents) for i in range(samples)),
    )
    for s in range(1, steps + 1):  # in SQLite alone: the samples of a step are those of the first
        db.execute(f"INSERT INTO samples(step, {columns}) SELECT ?, {columns} FROM one", (s,))
    for s in range(20, steps + 1, 20):
        db.execute(
            f"INSERT INTO samples(step, {columns}) SELECT ?, 1, {columns.split(', ', 1)[1]} FROM one WHERE sample = 0 LIMIT 64",
            (s,),
        )
    db.execute("COMMIT")
    db.close()
    return directory / "run.db"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out")
    for key, value in (("steps", 2000), ("samples", 1024), ("group", 8), ("tokens", 48)):
        p.add_argument(f"--{key}", type=int, default=value)
    p.add_argument("--agents", action="store_true", help="conversations with tools")
    a = p.parse_args()
    start = time.time()
    path = make(a.out, a.steps, a.samples, a.group, a.tokens, agents=a.agents)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB in {time.time() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
