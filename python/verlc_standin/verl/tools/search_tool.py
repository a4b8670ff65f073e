"""The search tool of verl until 0.7.1, over a retrieval service (utils/search_r1_like_utils.py).

config: retrieval_service_url, topk 3, timeout 30, num_workers 120, rate_limit 120, enable_global_rate_limit true."""

import json
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.execution_pool import ExecutionPool
from verl.tools.utils.search_r1_like_utils import perform_single_search_batch
from verl.utils.rollout_trace import rollout_trace_op

NO_QUERIES = "Error: 'query_list' is missing, empty, or not a list in parameters."


class SearchTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}
        self.num_workers, self.rate_limit = config.get("num_workers", 120), config.get("rate_limit", 120)
        self.timeout, self.topk = config.get("timeout", 30), config.get("topk", 3)
        self.enable_global_rate_limit = config.get("enable_global_rate_limit", True)
        self.execution_pool = ExecutionPool(self.num_workers, self.rate_limit if self.enable_global_rate_limit else None,
                                            "executing search")
        self.retrieval_service_url = config.get("retrieval_service_url")
        assert self.retrieval_service_url, "Configuration must include 'retrieval_service_url'"

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "reward": []}
        return instance_id, ToolResponse()

    def execute_search(self, instance_id, query_list, retrieval_service_url, topk, timeout):
        return perform_single_search_batch(retrieval_service_url=retrieval_service_url, query_list=query_list, topk=topk,
                                           timeout=timeout)

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        queries = parameters.get("query_list")
        if not queries or not isinstance(queries, list):
            return ToolResponse(text=json.dumps({"result": NO_QUERIES})), 0.0, {}
        try:
            text, found = await self.execution_pool.execute.remote(self.execute_search, instance_id, queries,
                                                                   self.retrieval_service_url, self.topk, self.timeout)
            self._instance_dict[instance_id]["reward"].append(text.strip())
            return ToolResponse(text=text), 0.0, {k: found.get(k) for k in ("query_count", "status", "total_results",
                                                                            "api_request_error")}
        except Exception as error:
            return ToolResponse(text=json.dumps({"result": f"Search execution failed: {error}"})), 0.0, {"error": str(error)}

    async def calc_reward(self, instance_id: str, **kwargs):
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        self._instance_dict.pop(instance_id, None)
