"""The tool of verl's Geometry3K examples until 0.7.1. As in verl it does not read create_kwargs: the ground truth is one that a
subclass gives. Text alone."""

from typing import Optional

from verl.tools.gsm8k_tool import Gsm8kTool
from verl.utils.reward_score import geo3k


class Geo3kTool(Gsm8kTool):
    def __init__(self, config, tool_schema):
        import mathruler.grader  # noqa: F401  compares answers; missing, it is missed here and not at a call
        super().__init__(config, tool_schema)

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        return await super().create(instance_id, ground_truth)

    def answer_text(self, answer):
        return answer

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return geo3k.compute_score(state["response"], state["ground_truth"], use_boxed=False, format_score=0.0)
