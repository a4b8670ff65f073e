"""A calculator as a tool: actor_rollout_ref.rollout.multi_turn.function_tool_path=examples/calculator_tool.py

What the policy writes is parsed as an expression of numbers and + - * / // % ** and parentheses; nothing of it is run."""

import ast
import operator

from verl.tools.function_tool import function_tool

BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
          ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
LONGEST, LARGEST_POWER, LARGEST = 200, 100, 1e100


def value_of(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](value_of(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        a, b = value_of(node.left), value_of(node.right)
        if isinstance(node.op, ast.Pow) and (abs(b) > LARGEST_POWER or abs(a) > LARGEST):
            raise ValueError("the power is too large")
        return BINARY[type(node.op)](a, b)
    raise ValueError("only numbers, + - * / // % ** and parentheses")


def shown(value):
    """4 for 4.0, and no digits of rounding: 0.3 for 0.1 + 0.2."""
    if isinstance(value, complex) or abs(value) > LARGEST:
        raise ValueError("the result is no number of ordinary size")
    return str(value) if isinstance(value, int) else f"{value:.12g}"


@function_tool
def calculate(expression: str):
    """Calculates an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, for example (12 + 3) * 4
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace(",", ""), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is no arithmetic expression") from None
    return shown(value_of(tree.body))
