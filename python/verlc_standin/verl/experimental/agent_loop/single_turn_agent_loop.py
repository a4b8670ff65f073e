"""One turn, as verlc itself does it for rows without an agent loop: for loops of the user that inherit from it."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length, self.response_length = self.rollout_config.prompt_length, self.rollout_config.response_length

    async def run(self, sampling_params, priority=0, **kwargs):
        messages, metrics = list(kwargs["raw_prompt"]), {}
        await self.process_multi_modal_info(messages)
        prompt_ids = await self.ct_build_initial_tokens(messages)
        with simple_timer("generate_sequences", metrics):
            drawn = await self.server_manager.generate(request_id=uuid4().hex, prompt_ids=prompt_ids,
                                                       sampling_params=sampling_params,
                                                       priority=priority)
        n = self.response_length
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=drawn.token_ids[:n],
                               response_mask=[1] * len(drawn.token_ids[:n]),
                               response_logprobs=drawn.log_probs[:n] if drawn.log_probs else None, num_turns=2, metrics=metrics,
                               extra_fields={**drawn.extra_fields, "turn_scores": [], "tool_rewards": []})
