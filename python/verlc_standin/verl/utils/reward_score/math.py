"""The older name of math_reward."""

from verl.utils.reward_score.math_reward import compute_score, is_equiv, last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed"]
