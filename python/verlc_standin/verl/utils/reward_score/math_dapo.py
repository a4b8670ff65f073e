r"""DAPO's mathematics: the text behind the last `Answer:`, compared after normalisation; 1 or -1."""

from verl.utils.reward_score.math_reward import balanced, remove_boxed
from verl.utils.reward_score.native import grade


def compute_score(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None):
    r"""{"score": 1 or -1, "acc": bool, "pred": text}; strict_box_verify: the last \boxed{} of the last 100 characters."""
    if not strict_box_verify:
        return grade("math_dapo", solution_str, ground_truth)
    tail = solution_str[-100:]
    box = balanced(tail, tail.rfind("\\boxed{"))
    pred = remove_boxed(box) if box else None
    return {"score": 1.0 if pred == ground_truth else -1.0, "acc": pred == ground_truth, "pred": pred}
