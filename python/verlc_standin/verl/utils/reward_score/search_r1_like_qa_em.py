"""Search-R1: the text of the last <answer>, compared with the targets after normalisation."""

import re
import string


def normalize_answer(s):
    """Lower case, without ASCII punctuation and articles, one space between words."""
    s = "".join(c for c in s.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())


def targets(golden_answers):
    return [normalize_answer(a) for a in ([golden_answers] if isinstance(golden_answers, str) else golden_answers)]


def em_check(prediction, golden_answers):
    return int(normalize_answer(prediction) in targets(golden_answers))


def subem_check(prediction, golden_answers):
    return int(any(a in normalize_answer(prediction) for a in targets(golden_answers)))


def extract_solution(solution_str):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return found[-1].strip() if found else None


def graded(check, solution_str, ground_truth, format_score, score):
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    if not check(answer, ground_truth["target"]):
        return format_score
    many = solution_str.count("<answer>") > 10 or solution_str.count("</answer>") > 10
    return score / 4 if many else score


def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return graded(em_check, solution_str, ground_truth, format_score, score)


def compute_score_subem(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return graded(subem_check, solution_str, ground_truth, format_score, score)
