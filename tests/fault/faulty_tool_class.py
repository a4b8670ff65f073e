"""A tool with a life cycle, for tests/unit/test_agent_tools.c."""

import asyncio

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Counter(BaseTool):
    """Counts the calls of its episode; tells its own life."""

    lives = []

    def get_openai_tool_schema(self):
        described = {"name": "count", "description": "Counts."}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": described})

    async def create(self, instance_id=None, **kwargs):
        Counter.lives.append("create" + str(kwargs))
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        fields = agent_data.extra_fields
        if parameters.get("lives"):
            return ToolResponse(text=" ".join(Counter.lives)), None, {}
        fields["n"] = fields.get("n", 0) + 1
        fields["live"] = self  # not for JSON
        fields.pop("once", None)
        if parameters.get("fail"):
            raise RuntimeError("counted and failed")
        if parameters.get("wait"):
            await asyncio.sleep(3600)
        return ToolResponse(text=f"{agent_data.request_id} {fields['n']} {len(agent_data.messages)}"), 1, {}

    async def release(self, instance_id, **kwargs):
        Counter.lives.append("release")
        if Counter.lives.count("release") > 4:
            raise RuntimeError("release fails")
