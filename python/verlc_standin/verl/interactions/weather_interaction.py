"""Thanks where a tool was called, once."""

from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction

NO_CALL = "no tool call"
ANSWERS = {1.0: "Thank you for your weather query!", 0.0: "Please use the weather tool to get the weather information."}


class WeatherInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs):
        results = [m.get("content") for m in messages if m.get("role") == "tool"]
        self._instance_dict[instance_id]["response"] = results[-1] if results else NO_CALL
        reward = await self.calculate_score(instance_id)
        return True, ANSWERS[reward], reward, {}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        return 0.0 if self._instance_dict[instance_id]["response"] == NO_CALL else 1.0

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
