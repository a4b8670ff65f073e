"""A tool of an MCP server, as verl had them until 0.7.1: class_name verl.tools.mcp_base_tool.MCPBaseTool, config {type: mcp,
rate_limit, timeout}, mcp {mcp_servers_config_path, tool_selected_list} in the YAML give one for each tool of the servers."""

import json
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.mcp_clients.McpClientManager import ClientManager
from verl.utils.rollout_trace import rollout_trace_op

METRICS = {"query_count": 0, "status": "unknown", "total_results": 0, "api_request_error": None}


class MCPBaseTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}
        self.timeout = config.get("timeout", 30)

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "reward": []}
        return instance_id, ToolResponse()

    async def _call_tool(self, instance_id, parameters):
        try:
            result = await ClientManager.call_tool(self.name, parameters, self.timeout)
            text, found = self._parse_tool_result(result.content)
            return text, found | {"api_request_error": None}
        except ConnectionError as error:
            text = f"\n Connection failed: {error}"
        except Exception as error:
            text = f"\n An unexpected error occurred: {error}"
        return text, {"api_request_error": text}

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        if not self.name or parameters is None:
            return ToolResponse(text=json.dumps({"result": "Error: 'parameters' is missing or empty."})), 0.0, {}
        try:
            text, found = await self._call_tool(instance_id, parameters)
            self._instance_dict[instance_id]["reward"].append(text.strip())
            return ToolResponse(text=text), 0.0, {key: found.get(key, default) for key, default in METRICS.items()}
        except Exception as error:
            return ToolResponse(text=json.dumps({"result": f"Tool execution failed: {error}"})), 0.0, {"error": str(error)}

    async def calc_reward(self, instance_id: str, **kwargs):
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        self._instance_dict.pop(instance_id, None)

    def _parse_tool_result(self, content):
        """(text for the model, metrics) of the parts of an answer; a subclass reads them otherwise."""
        return " ".join(part.text for part in content if part.type == "text"), {}
