"""verl.workers.reward_manager under verlc: what a file with a reward manager of the older form imports."""

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["AbstractRewardManager", "NaiveRewardManager", "get_reward_manager_cls", "register"]
