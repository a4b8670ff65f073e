r"""DAPO's mathematics: the text behind the last `Answer:`, compared after normalisation; 1 or -1."""

from verl.utils.reward_score import math_reward
from verl.utils.reward_score.math_reward import balanced
from verl.utils.reward_score.native import graded, normal_form


def last_boxed_only_string(string):
    r"""The last \boxed{...} with its command; None: there is none, or its brace never closes."""
    return balanced(string, string.rfind("\\boxed{"))


def remove_boxed(s):
    assert s.startswith("\\boxed{"), f"box error: {s}"
    return math_reward.remove_boxed(s)


def normalize_final_answer(final_answer):
    return normal_form("math_dapo", final_answer)


def compute_score(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None):
    r"""{"score": 1 or -1, "acc": bool, "pred": text}; strict_box_verify: the last \boxed{} of the last 100 characters."""
    if pause_tokens_index is not None:
        raise NotImplementedError("math_dapo.compute_score: pause_tokens_index")
    return graded("math_dapo_strict_box" if strict_box_verify else "math_dapo", solution_str, ground_truth)
