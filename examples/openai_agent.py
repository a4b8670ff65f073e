"""An agent that is a program: it knows OpenAI's interface alone, and is trained by what it asks.

    pip install openai
    verlc ppo ... "actor_rollout_ref.rollout.agent.command='python3 examples/openai_agent.py'"

A row is a question; the model may call a calculator. The conversation goes on until the model answers without a call. The reward is
the run's reward function's, of the last answer. docs/tutorial_black_box.md goes through it."""

import json
import operator
import os
import re

from openai import OpenAI

TOOL = {"type": "function",
        "function": {"name": "calculate", "description": "Calculates an arithmetic expression.",
                     "parameters": {"type": "object", "required": ["expression"], "properties": {
                         "expression": {"type": "string", "description": "two whole numbers with +, -, * or / between"}}}}}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TURNS = 4


def calculate(expression):
    """What the model writes is data: nothing of it is evaluated."""
    a, op, b = re.fullmatch(r"\s*(-?\d{1,30})\s*([-+*/])\s*(-?\d{1,30})\s*", expression).groups()
    return OPERATORS[op](int(a), int(b))


def answer_of(call):
    try:
        return str(calculate(**json.loads(call.function.arguments)))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return "Error: expression is to be two whole numbers with +, -, * or / between"


def main():
    row = json.loads(os.environ["VERLC_ROW"])
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are the episode's
    messages = list(row["prompt"])
    for _ in range(TURNS):
        said = client.chat.completions.create(model=os.environ["VERLC_MODEL"], messages=messages, tools=[TOOL]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer_of(call)})


if __name__ == "__main__":
    main()
