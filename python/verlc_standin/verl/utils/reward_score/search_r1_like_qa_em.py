"""Search-R1: the text of the last <answer>, compared with the targets after normalisation."""

import re

from verl.utils.reward_score.native import graded, normal_form


def normalize_answer(s):
    """Lower case, without ASCII punctuation and articles, one space between words."""
    return normal_form("search_r1_like_qa_em", s)


def targets(golden_answers):
    return [normalize_answer(a) for a in ([golden_answers] if isinstance(golden_answers, str) else golden_answers)]


def em_check(prediction, golden_answers):
    return int(normalize_answer(prediction) in targets(golden_answers))


def subem_check(prediction, golden_answers):
    said = normalize_answer(prediction)
    return int(any(a in said for a in targets(golden_answers)))


def extract_solution(solution_str):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return found[-1].strip() if found else None


def scored(grader, solution_str, ground_truth, format_score, score):
    if extract_solution(solution_str) is None:
        return 0
    right = graded(grader, solution_str, {"target": plain(ground_truth["target"])})["score"]  # 1, or 1/4 among many tags
    return score * right if right else format_score


def plain(golden_answers):
    return golden_answers if isinstance(golden_answers, str) else list(golden_answers)  # a numpy array in Parquet's rows


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return scored("search_r1_like_qa_em", solution_str, ground_truth, format_score, score)


def compute_score_subem(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return scored("search_r1_like_qa_subem", solution_str, ground_truth, format_score, score)
