"""GSM8K: the number behind `#### `, compared as text."""

import re

from verl.utils.reward_score.native import graded

WINDOW = 300  # characters at the end of an answer that are looked at


def extract_solution(solution_str, method="strict"):
    """strict: the number of the last `#### N`, without commas and dollars; flexible: the last number. None: there is none."""
    if method not in ("strict", "flexible"):
        raise AssertionError(f"method={method}: expected strict or flexible")
    tail = solution_str[-WINDOW:]
    if method == "strict":
        found = re.findall(r"#### (\-?[0-9\.\,]+)", tail)
        return found[-1].replace(",", "").replace("$", "") if found else None
    found = re.findall(r"(\-?[0-9\.\,]+)", tail)
    return next((n for n in reversed(found) if n != "."), found[0] if found else None)


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """score where the answer is right, format_score where it is another one, 0 where there is none."""
    answer = extract_solution(solution_str, method)
    if not isinstance(ground_truth, str):  # equals no answer
        return 0 if answer is None else format_score
    if graded("gsm8k" if method == "strict" else "gsm8k_flexible", solution_str, ground_truth)["score"] == 1:
        return score
    return 0 if answer is None else format_score
