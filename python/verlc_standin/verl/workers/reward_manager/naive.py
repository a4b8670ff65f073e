"""The older form's default manager: compute_score of each decoded response. Managers of users inherit from it."""

from collections import defaultdict

import numpy as np

from verl.protocol import tensor
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.registry import register


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data, return_dict=False):
        known = self._extract_reward_from_rm_scores(data, return_dict)
        if known is not None:
            return known
        rewards, extras = np.zeros(tuple(data.batch["responses"].shape)), defaultdict(list)
        for i, item in enumerate(data):
            ids, rows = item.batch["responses"], item.non_tensor_batch
            valid = int(item.batch["attention_mask"][item.batch["prompts"].shape[-1]:].sum())
            extra = rows.get("extra_info") or {}
            extra.update(num_turns=rows.get("__num_turns__"), rollout_reward_scores=rows.get("reward_scores", {}))
            score = self.compute_score(data_source=rows[self.reward_fn_key], extra_info=extra,
                                       solution_str=self.tokenizer.decode(ids[:valid], skip_special_tokens=True),
                                       ground_truth=rows["reward_model"]["ground_truth"])
            for key, value in score.items() if isinstance(score, dict) else ():
                extras[key].append(value)
            rewards[i, valid - 1] = score["score"] if isinstance(score, dict) else score
        rewards = tensor(rewards, "float32")
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards
