"""verl's ToolAgentLoop for classes of the user that inherit from it: its states, its rules and its texts. Rows of tool_agent itself
are run by verlc without Python (src/agent/tool_agent.c), and give the same."""

import asyncio
import enum
import json
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser  # noqa: F401
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse
from verl.utils.profiler import simple_timer
from verlc_helpers.tool_episode import AgentData as Shared
from verlc_helpers.tools import truncated


class AgentState(enum.Enum):
    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData(Shared):
    def __init__(self, messages, request_id, tools_kwargs, metrics=None, **_):
        super().__init__(request_id)
        self.messages, self.tools_kwargs, self.metrics = messages, tools_kwargs, {} if metrics is None else metrics


class ToolAgentLoop(AgentLoopBase):
    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        rules = self.rollout_config.multi_turn
        self.max_user_turns, self.max_assistant_turns = rules.get("max_user_turns"), rules.get("max_assistant_turns")
        self.max_parallel_calls = rules.get("max_parallel_calls", 1)
        self.max_tool_response_length = rules.get("max_tool_response_length", 256)
        self.tool_response_truncate_side = rules.get("tool_response_truncate_side", "middle")
        self.tools = {t.name: t for t in (tools.tools if tools else [])}
        self.tool_schemas = [self.schema_of(t) for t in (tools.tools if tools else [])]
        self.tool_parser_name = rules.get("format", "hermes")
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, self.tokenizer)
        self.prompt_length, self.response_length = self.rollout_config.prompt_length, self.rollout_config.response_length

    @staticmethod
    def schema_of(tool):
        return tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)

    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        await self.process_multi_modal_info(messages)
        data = AgentData(messages=messages, request_id=uuid4().hex, tools_kwargs=kwargs.get("tools_kwargs") or {})
        self.select_tools(data, (kwargs.get("extra_info") or {}).get("tool_selection"))
        state = AgentState.PENDING
        while state != AgentState.TERMINATED:
            state = await self.handle(state, data, sampling_params)
        return self.output(data)

    def select_tools(self, data, selection):
        data._active_tools, data._active_tool_schemas = self.tools, self.tool_schemas
        if selection and self.tools:
            data._active_tools = {n: self.tools[n] for n in selection if n in self.tools}
            data._active_tool_schemas = [self.schema_of(t) for t in data._active_tools.values()]

    async def handle(self, state, data, sampling_params):
        if state == AgentState.PENDING:
            return await self._handle_pending_state(data, sampling_params)
        if state == AgentState.GENERATING:
            return await self._handle_generating_state(data, sampling_params)
        if state == AgentState.PROCESSING_TOOLS:
            return await self._handle_processing_tools_state(data)
        return await self._handle_interacting_state(data)

    def output(self, data):
        n, most = len(data.response_mask), self.response_length
        begin = len(data.prompt_ids) - n
        data.extra_fields.update(turn_scores=data.turn_scores, tool_rewards=data.tool_rewards)
        return AgentLoopOutput(prompt_ids=data.prompt_ids[:begin], response_ids=data.prompt_ids[begin:][:most],
                               response_mask=data.response_mask[:most], num_turns=data.user_turns + data.assistant_turns + 1,
                               response_logprobs=data.response_logprobs[:most] or None, metrics=data.metrics,
                               extra_fields=data.extra_fields)

    async def _handle_pending_state(self, agent_data, sampling_params):
        agent_data.prompt_ids = await self.ct_build_initial_tokens(agent_data.messages, tools=agent_data._active_tool_schemas)
        return AgentState.GENERATING

    async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
        stops = sorted({*(sampling_params.get("stop_token_ids") or []), *self.tool_parser.stop_token_ids})
        sampling_params = sampling_params | ({"stop_token_ids": stops} if stops else {})
        with simple_timer("generate_sequences", agent_data.metrics):
            drawn = await self.server_manager.generate(request_id=agent_data.request_id, prompt_ids=agent_data.prompt_ids,
                                                       sampling_params=sampling_params)
        self.take_drawn(agent_data, drawn)
        logp = agent_data.response_logprobs if agent_data.response_logprobs or drawn.log_probs else None
        merged, agent_data.response_mask, logp = await self.ct_merge_assistant_token(
            agent_data.prompt_ids, drawn.token_ids, agent_data.response_mask, logp, assistant_logprobs=drawn.log_probs or None)
        agent_data.prompt_ids, agent_data.response_logprobs = merged.token_ids, logp or []
        if (not ignore_termination and len(agent_data.response_mask) >= self.response_length) or (
                self.max_assistant_turns and agent_data.assistant_turns >= self.max_assistant_turns) or (
                self.max_user_turns and agent_data.user_turns >= self.max_user_turns):
            return AgentState.TERMINATED
        content, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(
            drawn.token_ids, [t.tool_schema for t in agent_data._active_tools.values()])
        agent_data.messages.append(self._build_assistant_message(content, agent_data))
        return AgentState.PROCESSING_TOOLS if agent_data.tool_calls else AgentState.TERMINATED

    def take_drawn(self, data, drawn):
        metrics, count = data.metrics, drawn.num_preempted
        metrics["num_preempted"] = (-1 if count is None else count) if "num_preempted" not in metrics else (
            metrics["num_preempted"] + (count or 0))
        latest = drawn.extra_fields.get("max_global_steps")
        if not data.extra_fields:
            data.extra_fields.update(drawn.extra_fields)
        elif latest:
            data.extra_fields["max_global_steps"] = latest
        data.assistant_turns += 1
        data.response_ids = drawn.token_ids

    def _build_assistant_message(self, content, agent_data):
        message, calls = {"role": "assistant", "content": content or ""}, []
        for call in agent_data.tool_calls[:self.max_parallel_calls]:
            try:
                arguments = json.loads(call.arguments)
            except (ValueError, RecursionError):
                arguments = None
            function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
            calls.append({"type": "function", "function": function} | ({"id": call.tool_call_id} if call.tool_call_id else {}))
        return message | ({"tool_calls": calls} if calls else {})

    async def _handle_processing_tools_state(self, agent_data):
        before, calls = list(agent_data.messages), agent_data.tool_calls[:self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            results = await asyncio.gather(*(self._call_tool(c, agent_data.tools_kwargs, agent_data) for c in calls))
        for call, (response, reward, _) in zip(calls, results):
            if response.image or response.video:
                raise ValueError(f"the tool {call.name} answered with images or video, and the model reads text")
            agent_data.messages.append({"role": "tool", "content": response.text or ""}
                                       | ({"tool_call_id": call.tool_call_id} if call.tool_call_id else {}))
            if reward is not None:
                agent_data.tool_rewards.append(reward)
        merged, mask, logp = await self.ct_merge_context_msg(before, agent_data.messages, agent_data.prompt_ids,
                                                             agent_data.response_mask,
                                                             agent_data.response_logprobs or None,
                                                             tools=agent_data._active_tool_schemas)
        if len(mask) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.prompt_ids, agent_data.response_mask, agent_data.response_logprobs = merged.token_ids, mask, logp or []
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _handle_interacting_state(self, agent_data):
        raise NotImplementedError(f"{type(self).__name__} has no _handle_interacting_state")

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        """(ToolResponse, reward, metrics); a failure is a text with reward 0.0."""
        name, active = tool_call.name, getattr(agent_data, "_active_tools", self.tools)
        if name not in active:
            return ToolResponse(text=f"Unknown function '{name}'. Available tools: {list(active)}"), 0.0, {}
        try:
            arguments = json.loads(tool_call.arguments)
        except (ValueError, TypeError, RecursionError) as error:
            return ToolResponse(text=f"Invalid JSON in arguments for '{name}': {error}"), 0.0, {}
        tool, instance = active[name], None
        try:
            if isinstance(tool, FunctionTool):
                response, reward, metrics = normalize_function_tool_return(await tool.call(arguments))
            else:
                kwargs = tools_kwargs.get(name, {}).get("create_kwargs", {})
                instance, _ = await tool.create(create_kwargs=kwargs)
                response, reward, metrics = await tool.execute(instance, arguments, agent_data=agent_data)
        except Exception as error:
            return ToolResponse(text=f"Error executing tool '{name}': {error}"), 0.0, {}
        finally:
            if instance:
                await tool.release(instance)
        text, _ = truncated(response.text, self.max_tool_response_length, self.tool_response_truncate_side)
        return response.model_copy(update={"text": text}), reward, metrics
