"""Rows for a first try of tools: multiplications of two numbers of two digits, seeded.

    python3 examples/calculator_rows.py [DIR]

sft.jsonl: conversations that call the tool of examples/calculator_tool.py, for verlc sft. train.jsonl, test.jsonl: the questions
alone, for verlc ppo; the answer is right after "#### "."""

import json
import pathlib
import random
import sys

N_SFT, N_TRAIN, N_TEST = 4096, 2000, 128


def question(rng):
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    return a, b, [{"role": "user", "content": f"{a} boxes hold {b} apples each. How many apples are there?"}]


def conversation(rng):
    a, b, messages = question(rng)
    call = json.dumps({"name": "calculate", "arguments": {"expression": f"{a} * {b}"}})
    return {"messages": messages + [{"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
                                    {"role": "tool", "content": str(a * b)}, {"role": "assistant", "content": f"#### {a * b}"}]}


def row(rng):
    a, b, messages = question(rng)
    return {"data_source": "openai/gsm8k", "prompt": messages, "reward_model": {"style": "rule", "ground_truth": str(a * b)}}


def main():
    directory, rng = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "."), random.Random(1)
    for name, make, n in (("sft", conversation, N_SFT), ("train", row, N_TRAIN), ("test", row, N_TEST)):
        lines = "".join(json.dumps(make(rng)) + "\n" for _ in range(n))
        (directory / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
