"""The code interpreter of verl until 0.7.1: a program runs in verlc's own sandbox, or in a SandboxFusion service.

config: sandbox_fusion_url (missing, empty or "verlc": verlc's sandbox, which runs Python), num_workers 10, rate_limit 10,
enable_global_rate_limit true, default_timeout 30, default_language python, memory_limit_mb 1024.
The answer is what the program printed and its errors, or "no stdout here" where it did not come to its end; the reward is None.

Invariant: a program runs in a sandbox or not at all."""

import math
import os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.execution_pool import ExecutionPool
from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api
from verl.utils.rollout_trace import rollout_trace_op

NOTHING = "no stdout here"
OWN = ("", "verlc")
GRACE_S = 1.0  # a sandbox counts its own start


def run_here(code, timeout, memory_mb):
    """(stdout + stderr), or None where the program was ended by a limit. SandboxError: it could not be run."""
    from verlc_helpers.sandbox import run_python
    ran = run_python(code, wall_s=timeout + GRACE_S, cpu_s=math.ceil(timeout + GRACE_S), memory_mb=memory_mb)
    ended = ran["end"] in ("exited", "signaled")
    return ran["stdout"] + ran["stderr"] if ended else None


class SandboxFusionTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}
        self.num_workers, self.rate_limit = config.get("num_workers", 10), config.get("rate_limit", 10)
        self.default_timeout, self.default_language = config.get("default_timeout", 30), config.get("default_language", "python")
        self.enable_global_rate_limit = config.get("enable_global_rate_limit", True)
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.sandbox_fusion_url = config.get("sandbox_fusion_url") or ""
        if self.sandbox_fusion_url in OWN:
            run_here("", 10, self.memory_limit_mb)  # where there is no sandbox that is said before the run
            self.execution_pool = ExecutionPool(min(self.num_workers, len(os.sched_getaffinity(0))))
        else:
            self.execution_pool = ExecutionPool(self.num_workers, self.rate_limit if self.enable_global_rate_limit else None)

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": []}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        code = parameters.get("code", "")
        code = code if isinstance(code, str) else str(code)
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code,
                                                          parameters.get("timeout", self.default_timeout),
                                                          parameters.get("language", self.default_language))
        if isinstance(result, ToolResponse):
            return result, None, None
        return ToolResponse(text=None if result is None else str(result)), None, None

    def execute_code(self, instance_id, code, timeout=30, language="python"):
        if self.sandbox_fusion_url in OWN:
            output = run_here(code, timeout, self.memory_limit_mb) if language == "python" else None
            return ToolResponse(text=NOTHING if output is None else output)
        try:
            reply, _ = call_sandbox_api(self.sandbox_fusion_url, code, None, timeout, timeout, self.memory_limit_mb, language)
        except Exception:  # a timeout that is no number
            reply = None
        ran = reply.get("run_result") or {} if reply else {}
        if ran.get("status") == "Finished":
            return ToolResponse(text=ran.get("stdout") + ran.get("stderr"))
        return ToolResponse(text=NOTHING)

    async def calc_reward(self, instance_id: str, **kwargs):
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
