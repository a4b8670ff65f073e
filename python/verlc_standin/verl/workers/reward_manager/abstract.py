"""What a reward manager of verl's older form, called with a whole batch, inherits from."""

from abc import ABC, abstractmethod
from typing import Any, Callable

RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    @abstractmethod
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **kwargs):
        """reward.reward_kwargs come as kwargs."""

    @abstractmethod
    def __call__(self, data, return_dict=False):
        """Rewards (rows, response length), or {"reward_tensor": them, "reward_extra_info": {name: list}}."""

    def _extract_reward_from_rm_scores(self, data, return_dict=False):
        """Those that the batch has already, or None."""
        scores = data.batch.get("rm_scores")
        if scores is None or not return_dict:
            return scores
        keys = data.meta_info.get("reward_extra_keys", [])
        return {"reward_tensor": scores, "reward_extra_info": {k: data.non_tensor_batch[k] for k in keys}}
