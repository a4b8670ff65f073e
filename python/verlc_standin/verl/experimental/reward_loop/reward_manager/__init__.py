"""verl.experimental.reward_loop.reward_manager under verlc: what a file with a reward manager of its own imports."""

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["NaiveRewardManager", "RewardManagerBase", "get_reward_manager_cls", "register"]
