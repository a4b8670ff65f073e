r"""Geometry3K: nine tenths for the boxed answer, one tenth for <think>...</think> in front of it."""

import re

from verl.utils.reward_score.native import graded


def format_reward(predict_str):
    return 1.0 if re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) else 0.0


def acc_reward(predict_str, ground_truth, use_boxed=True):
    """use_boxed=False compares the whole text, through the package mathruler."""
    if use_boxed:
        return float(graded("geo3k", predict_str, ground_truth)["score"] > 0.5)
    from mathruler.grader import grade_answer
    return 1.0 if grade_answer(predict_str, ground_truth) else 0.0


def compute_score(predict_str, ground_truth, use_boxed=True, format_score=0.1):
    return (1 - format_score) * acc_reward(predict_str, ground_truth, use_boxed) + format_score * format_reward(predict_str)
