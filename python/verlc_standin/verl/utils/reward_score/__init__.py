"""verl.utils.reward_score under verlc: the same names, graded by verlc itself (native.py)."""

from verl.utils.reward_score.native import grade


def default_compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None,
                          concurrent_semaphore=None, memory_limit_mb=None, **kwargs):
    """A number, or a dict with "score", by data source. NotImplementedError: no grader of verlc is for it."""
    answer = grade(data_source, solution_str, ground_truth)
    return answer if "pred" in answer else float(answer["score"])


_default_compute_score = default_compute_score
