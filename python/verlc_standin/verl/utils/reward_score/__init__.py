"""verl.utils.reward_score under verlc: the same names, graded by verlc itself (native.py)."""

from verl.utils.reward_score.native import grade


def default_compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None,
                          concurrent_semaphore=None, memory_limit_mb=None, **kwargs):
    """A number, or a dict with "score", by data source. NotImplementedError: no grader of verlc is for it."""
    if data_source in ("hiyouga/geometry3k",):
        from verl.utils.reward_score import geo3k
        return float(geo3k.compute_score(solution_str, ground_truth))
    if str(data_source).startswith("searchR1_"):
        from verl.utils.reward_score import search_r1_like_qa_em
        return float(search_r1_like_qa_em.compute_score(solution_str, ground_truth))
    answer = grade(data_source, solution_str, ground_truth)
    return answer if "pred" in answer else float(answer["score"])


_default_compute_score = default_compute_score
