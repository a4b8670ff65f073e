"""What a tool with a life cycle inherits from: verl.tools.base_tool."""

from typing import Any, Optional
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class BaseTool:
    """Made once in each process; create, execute and release are called once for each call of the tool."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "Tool schema is not set!"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The description where the YAML has none; a subclass without one in its YAML overrides it."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        """(the id of this call, a response that nobody reads). kwargs: create_kwargs, of the row's tools_kwargs."""
        return str(uuid4()) if instance_id is None else instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        """(response, reward or None, metrics) of the arguments. kwargs: agent_data, which an episode's calls share."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        """Nothing calls it, as in verl's agent loops."""
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        """The call has ended, well or not."""
