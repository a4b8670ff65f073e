"""make learn-calculator: a tiny model that cannot calculate learns to call a calculator, on the CPU.

A model of 620 thousand parameters is asked for products of two numbers of two digits (those of four digits). Supervised training
first shows it calls of the tool, which says any number there: it learns the form of a call and to copy what the tool says, and
not to calculate. Then it sees both ways, more often the answer by itself; that is its likeliest now, so it starts with few right
answers. GRPO with agent loop tool_agent goes on from there. The measure is greedy answers to held-out problems.

  python tools/learn_calculator.py [SEED...]

Environment: LEARN_DIR (build/learn-calculator), LEARN_JOBS (seeds side by side: 2), VERLC_THREADS (of each: 1), VERLC.
Writes LEARN_DIR/table.md. Started again it goes on where it stopped. Exit status 1: a seed starts above 30 % or ends below 90 %."""

import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERLC = os.environ.get("VERLC", ROOT / "build/release/verlc")
OUT = pathlib.Path(os.environ.get("LEARN_DIR", ROOT / "build/learn-calculator")).resolve()
JOBS = int(os.environ.get("LEARN_JOBS", "2"))
START, BAR, STEPS, EVERY, N_TRAIN, N_TEST, N_SFT = 0.3, 0.9, 40, 10, 2000, 200, 16000
SFT = (("calls", 1200, 1.5e-3), ("both", 500, 7e-4))  # rows, steps, learning rate; unknown answers hide what can be copied
METRIC = "val-core/openai/gsm8k/acc/mean@1"
SHAPE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 128, "intermediate_size": 352,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
         "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 457, "bos_token_id": None, "torch_dtype": "float32"}
TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for t in tools %}{{- ' ' + t.function.name }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOL = '''import operator
import re

from verl.tools.function_tool import function_tool

OPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@function_tool
def calculator(expression: str) -> str:
    """Calculates with two numbers.

    Args:
        expression: two numbers with +, - or * between them
    """
    m = re.fullmatch(r" *([0-9]{1,9}) *([-+*]) *([0-9]{1,9}) *", expression)
    return str(OPS[m[2]](int(m[1]), int(m[3]))) if m else "error"
'''
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
GRPO = {
    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 32, "data.max_prompt_length": 64, "data.max_response_length": 128,
    ACTOR + "fsdp_config.dtype": "float32", ROLLOUT + "dtype": "float32", ACTOR + "use_kl_loss": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False, ACTOR + "optim.lr": 7e-5, ACTOR + "ppo_mini_batch_size": 16,
    ACTOR + "use_dynamic_bsz": True, ACTOR + "ppo_max_token_len_per_gpu": 8192, ROLLOUT + "name": "verlc", ROLLOUT + "n": 8,
    ROLLOUT + "agent.default_agent_loop": "tool_agent", ROLLOUT + "multi_turn.enable": True,
    ROLLOUT + "multi_turn.format": "hermes", ROLLOUT + "multi_turn.max_assistant_turns": 3,
    "trainer.total_training_steps": STEPS, "trainer.total_epochs": 100, "trainer.val_before_train": True,
    "trainer.test_freq": EVERY, "trainer.save_freq": EVERY, "trainer.max_actor_ckpt_to_keep": 1, "trainer.n_gpus_per_node": 1,
    "trainer.device": "cpu", "trainer.logger": "[file]",
}


def verlc(*args):
    env = {**os.environ, "VERLC_THREADS": os.environ.get("VERLC_THREADS", "1")}
    p = subprocess.run([VERLC, *map(str, args)], capture_output=True, text=True, env=env)
    if p.returncode:
        sys.exit(f"verlc {' '.join(map(str, args[:4]))} ...: exit {p.returncode}\n{p.stderr[-3000:]}")


def problems(rng):
    """All, each as text and answer."""
    found = [(f"{a} * {b}", a * b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]
    rng.shuffle(found)
    return found


def question(x):
    return [{"role": "user", "content": f"What is {x}?"}]


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def make_data():
    rng = random.Random(1)
    all_of, tools = problems(rng), [{"type": "function", "function": {"name": "calculator"}}]
    rl = [{"data_source": "openai/gsm8k", "prompt": question(x), "reward_model": {"style": "rule", "ground_truth": str(y)}}
          for x, y in all_of[:N_TRAIN + N_TEST]]
    write(OUT / "train.jsonl", rl[:N_TRAIN])
    write(OUT / "test.jsonl", rl[N_TRAIN:])
    taught = all_of[N_TRAIN + N_TEST:]
    for name, calls in (("calls", 1), ("both", 0.45)):
        rows = []
        for i in range(N_SFT):
            x, y = taught[i % len(taught)]
            call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{x}"}}}}</tool_call>'
            shown = rng.random() < calls
            said = rng.randrange(1000, 10000) if shown else y  # what the tool says counts
            turns = [{"role": "assistant", "content": call}, {"role": "tool", "content": str(said)}] if shown else []
            rows.append({"messages": [*question(x), *turns, {"role": "assistant", "content": f"#### {said}"}], "tools": tools})
        write(OUT / f"{name}.jsonl", rows)
    (OUT / "calculator.py").write_text(TOOL)


def make_model(seed):
    """Random weights; the tiny tokenizer with the tokens of calls."""
    d = OUT / f"model_{seed}"
    (OUT / "shape.json").write_text(json.dumps(SHAPE))
    verlc("model", "init", "--preset", "tiny", "--out", OUT / f"tiny_{seed}")
    verlc("model", "init", "--arch", OUT / "shape.json", "--out", d, "--tokenizer", OUT / f"tiny_{seed}", "--seed", seed)
    tokenizer = json.loads((d / "tokenizer.json").read_text())
    first = max(t["id"] for t in tokenizer["added_tokens"]) + 1
    tokenizer["added_tokens"] += [{**tokenizer["added_tokens"][-1], "id": first + i, "content": t, "special": False}
                                  for i, t in enumerate(TOKENS)]
    (d / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((d / "tokenizer_config.json").read_text())
    (d / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return d


def teach(seed, model, rows, steps, lr):
    """Supervised training; the directory of its model."""
    out = OUT / f"{rows}_{seed}"
    keys = {"model.path": model, "data.train_files": OUT / f"{rows}.jsonl", "data.val_files": "[]", "data.train_batch_size": 64,
            "data.max_length": 256, "data.max_token_len_per_gpu": 8192, "optim.lr": lr, "optim.lr_scheduler_type": "cosine",
            "optim.lr_warmup_steps_ratio": 0.05, "engine.model_dtype": "fp32", "trainer.total_training_steps": steps,
            "trainer.total_epochs": 100, "trainer.save_freq": steps, "trainer.test_freq": -1, "trainer.seed": seed,
            "trainer.logger": "[file]", "trainer.device": "cpu", "trainer.default_local_dir": out}
    if not (out / f"global_step_{steps}").exists():
        verlc("sft", *[f"{k}={v}" for k, v in keys.items()])
    return out / f"global_step_{steps}/actor"


def train(seed):
    taught = OUT / f"model_{seed}"
    if not (taught / "model.safetensors").exists():
        make_model(seed)
    for stage in SFT:
        taught = teach(seed, taught, *stage)
    keys = {**GRPO, "actor_rollout_ref.model.path": taught, "data.train_files": OUT / "train.jsonl",
            "data.val_files": OUT / "test.jsonl", ROLLOUT + "multi_turn.function_tool_path": OUT / "calculator.py",
            "trainer.seed": seed, "trainer.default_local_dir": OUT / f"grpo_{seed}"}
    verlc("ppo", *[f"{k}={v}" for k, v in keys.items()])
    lines = [json.loads(line) for line in (OUT / f"grpo_{seed}/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["data"][METRIC], line["data"].get("tool_call_counts/mean")) for line in lines
            if METRIC in line["data"]}


def main():
    seeds = [int(s) for s in sys.argv[1:]] or [1, 2, 3]
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "calculator.py").exists():
        make_data()
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        curves = list(pool.map(train, seeds))
    steps = sorted(curves[0])
    table = ["| seed | " + " | ".join(f"step {k}" if k else "start" for k in steps) + " |", "|---|" + "---|" * len(steps)]
    table += [f"| {s} | " + " | ".join(f"{100 * c[k][0]:.1f}" for k in steps) + " |" for s, c in zip(seeds, curves)]
    (OUT / "table.md").write_text("\n".join(table) + "\n")
    print("held-out accuracy, %\n" + "\n".join(table))
    sys.exit(not all(c[steps[0]][0] <= START and c[steps[-1]][0] >= BAR for c in curves))


if __name__ == "__main__":
    main()
