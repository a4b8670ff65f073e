"""The reward loop's default manager: compute_score of one decoded response. Managers of users inherit from it."""

import asyncio
import inspect

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.utils.reward_score import default_compute_score


@register("naive")
class NaiveRewardManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score=None, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score or default_compute_score)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer

    async def run_single(self, data):
        item = data[-1:][0]
        ids, rows = item.batch["responses"], item.non_tensor_batch
        valid = int(item.batch["attention_mask"][-ids.shape[-1]:].sum())
        extra = rows.get("extra_info") or {}
        extra.update(rows.get("tool_extra_fields") or {})
        extra.update(num_turns=rows.get("__num_turns__"), rollout_reward_scores=rows.get("reward_scores", {}))
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids[:valid], skip_special_tokens=True))
        call = {"data_source": rows["data_source"], "solution_str": text, "ground_truth": rows["reward_model"]["ground_truth"],
                "extra_info": extra}
        if self.reward_router_address is not None:
            call.update(reward_router_address=self.reward_router_address, reward_model_tokenizer=self.reward_model_tokenizer)
        if self.is_async_reward_score:
            result = await self.compute_score(**call)
        else:
            result = await asyncio.get_running_loop().run_in_executor(None, lambda: self.compute_score(**call))
        if isinstance(result, dict):
            return {"reward_score": result["score"], "reward_extra_info": dict(result)}
        return {"reward_score": result, "reward_extra_info": {"acc": result}}
