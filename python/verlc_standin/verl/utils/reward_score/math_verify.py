"""Math-Verify's comparison of the answers in a response with the ground truth; needs the package math-verify."""

from verl.utils.reward_score.native import graded


def compute_score(model_output, ground_truth, timeout_score=0, timeout=30.0):
    """1 or 0; timeout_score after the limit of verlc's grader, which is verl's default of timeout."""
    try:
        return graded("math_verify", model_output, ground_truth)["score"]
    except TimeoutError:
        return timeout_score
