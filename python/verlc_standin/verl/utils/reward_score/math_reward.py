r"""MATH: the content of the last \boxed{}, compared after the usual normalisation."""

from verl.utils.reward_score.native import graded, normal_form


def balanced(string, start):
    """From start to the brace that closes the first one behind it; None: start is negative, or it never closes."""
    depth = 0
    for end in range(start, len(string)) if start >= 0 else ():
        depth += (string[end] == "{") - (string[end] == "}")
        if string[end] == "}" and depth == 0:
            return string[start:end + 1]
    return None


def last_boxed_only_string(string):
    r"""The last \boxed{...} (or \boxed X$, or \fbox{...}) with its command; None: there is none, or its brace never closes."""
    if "\\boxed " in string:
        return "\\boxed " + string.rsplit("\\boxed ", 1)[1].split("$")[0]
    start = string.rfind("\\boxed")
    return balanced(string, start if start >= 0 else string.rfind("\\fbox"))


def remove_boxed(s):
    r"""What stands in \boxed{...} or behind `\boxed `. AssertionError: s is neither."""
    for front, back in (("\\boxed ", ""), ("\\boxed{", "}")):
        if s.startswith(front):
            assert s.endswith(back), s
            return s[len(front):len(s) - len(back)]
    raise AssertionError(f"{s}: not a \\boxed expression")


def strip_string(string):
    """MATH's normal form. ValueError: the string has none."""
    return normal_form("math_reward", string)


def is_equiv(str1, str2, verbose=False):
    """Whether two answers are the same in normal form; as they stand, where one has none."""
    if str1 is None or str2 is None:
        return str1 is str2
    try:
        return strip_string(str1) == strip_string(str2)
    except ValueError:
        return str1 == str2


def compute_score(solution_str, ground_truth):
    return float(graded("math_reward", solution_str, ground_truth)["score"])
