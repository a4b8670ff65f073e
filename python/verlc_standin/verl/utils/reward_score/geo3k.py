r"""Geometry3K: nine tenths for the boxed answer, one tenth for <think>...</think> in front of it. Needs mathruler."""

import re


def format_reward(predict_str):
    return 1.0 if re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) else 0.0


def acc_reward(predict_str, ground_truth, use_boxed=True):
    from mathruler.grader import extract_boxed_content, grade_answer
    answer = extract_boxed_content(predict_str) if use_boxed else predict_str
    return 1.0 if grade_answer(answer, ground_truth) else 0.0


def compute_score(predict_str, ground_truth, use_boxed=True, format_score=0.1):
    return (1 - format_score) * acc_reward(predict_str, ground_truth, use_boxed) + format_score * format_reward(predict_str)
