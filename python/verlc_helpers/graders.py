"""What the native graders cannot decide from text: LaTeX through pylatexenc, expressions through sympy, and math-verify.

  {"packages": "sympy pylatexenc"} -> {"missing": text or null, "python": PATH}   imports what pip installs under these names
  {"latex": text}                  -> {"text": plain text, null where pylatexenc cannot read it}
  {"zero": expression}             -> {"zero": whether sympy simplifies it to 0}
  {"value": text}                  -> {"text": Python's text of its value, "empty": bool}; of arithmetic, tuples and lists
                                      alone; {} else
  {"math_verify": text, "gold": answer} -> {"score": 0 or 1}, or {"timeout": text}

Packages are imported by the first question that needs them.  The caller's deadline ends a question that takes too long.

Invariant: no text is evaluated but by sympy's parser, which the caller gives expressions of at most two letters.
"""

import ast
import functools
import importlib
import operator
import sys

from verlc_helpers.protocol import HelperError, one_line, serve
from verlc_helpers.user_function import how_to_install

CACHE = 4096
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.BitXor: operator.xor,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}


def packages(names):
    """What the import of a package says, where one fails."""
    failed = []
    for name in names.split():
        try:
            importlib.import_module(name.replace("-", "_"))
        except Exception as error:  # ImportError; a package that does not fit another
            failed.append(name if isinstance(error, ModuleNotFoundError) else f"{name} ({one_line(error)})")
    return {"missing": ", ".join(failed) or None, "python": sys.executable}


@functools.lru_cache(CACHE)  # the samples of a prompt have one ground truth
def latex(text):
    from pylatexenc import latex2text
    try:
        return {"text": latex2text.LatexNodes2Text().latex_to_text(text)}
    except Exception:  # prm800k: the text stays as it is
        return {"text": None}


@functools.lru_cache(CACHE)
def zero(expression):
    import sympy
    from sympy.parsing import sympy_parser as parser
    rules = parser.standard_transformations + (parser.implicit_multiplication_application,)
    try:
        return {"zero": bool(sympy.simplify(parser.parse_expr(expression.replace("^", "**"), transformations=rules)) == 0)}
    except Exception:  # prm800k: what cannot be read is not equal
        return {"zero": False}


def computed(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, complex)):
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](computed(node.left), computed(node.right))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](computed(node.operand))
    if isinstance(node, (ast.Tuple, ast.List)):
        return (tuple if isinstance(node, ast.Tuple) else list)(map(computed, node.elts))
    raise ValueError


def value(text):
    try:
        result = computed(ast.parse(text.strip(" \t"), mode="eval").body)
        return {"text": str(result), "empty": result == () or result == []}
    except Exception:  # no arithmetic
        return {}


def math_verify(text, gold):
    """verl's math_verify.compute_score: whether one of the extracted answers is the boxed gold."""
    from math_verify.errors import TimeoutException
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

    def parsed(text, *targets):
        try:
            return parse(text, targets, raise_on_error=True)
        except Exception:
            return []

    try:
        golds = parsed(f"\\boxed{{{gold}}}", LatexExtractionConfig())
        answers = golds and parsed(text, ExprExtractionConfig(), LatexExtractionConfig())
        results = [verified(g, a) for a in answers for g in golds]
    except TimeoutException as error:
        return {"timeout": f"math-verify: {one_line(error)[:200]}"}
    if True not in results and None in results:
        return {"timeout": "math-verify: no comparison of two expressions within its limit"}
    return {"score": float(True in results)}


def verified(gold, answer):
    """None: not within math-verify's own limit."""
    from math_verify.errors import TimeoutException
    from math_verify.grader import verify
    try:
        return verify(gold, answer, raise_on_error=True)
    except TimeoutException:
        return None
    except Exception:
        return False


def handle(request):
    if "math_verify" in request:
        return math_verify(request["math_verify"], request["gold"])
    (name, argument), = request.items()
    return {"packages": packages, "latex": latex, "zero": zero, "value": value}[name](argument)


def handle_with_advice(request):
    try:
        return handle(request)
    except ModuleNotFoundError as error:
        raise HelperError(f"{one_line(error)}{how_to_install(error)}", "HELPER") from error


if __name__ == "__main__":
    serve(handle_with_advice, own_code=True)
