"""What an agent loop of the user inherits from and returns: of verl 0.9 (ct_build_initial_tokens, ct_merge_*), and of 0.6 to 0.9.0
(apply_chat_template, init_class).

Invariant: ids that were drawn are never made again; what is appended to them comes from verlc's continuous tokens."""

import abc

from verl.experimental.agent_loop.continuous_token import create_continuous_token_builder
from verl.tools.model import REQUIRED, Model, anything, integer, list_of, mapping, number, optional, record
from verl.utils.ray_utils import get_event_loop

_agent_loop_registry = {}  # what makes a loop, by name: {"_target_": class, keyword: value}


class AgentLoopMetrics(Model):
    FIELDS = {"generate_sequences": (number, 0.0), "tool_calls": (number, 0.0), "compute_score": (number, 0.0),
              "num_preempted": (integer, -1)}


class AgentLoopOutput(Model):
    """One sample. response_mask: 1 at tokens that the model drew."""

    FIELDS = {"prompt_ids": (list_of(integer), REQUIRED), "response_ids": (list_of(integer), REQUIRED),
              "response_mask": (list_of(integer), REQUIRED), "response_logprobs": (optional(list_of(number)), None),
              "routed_experts": (anything, None), "multi_modal_data": (optional(mapping), None),
              "reward_score": (optional(number), None), "num_turns": (integer, 0), "metrics": (record(AgentLoopMetrics), REQUIRED),
              "extra_fields": (mapping, dict), "mm_processor_kwargs": (optional(mapping), None),
              "mm_processor_output": (anything, None)}


class DictConfigWrap:
    def __init__(self, config):
        self.config = config


class ToolListWrap:
    def __init__(self, tools):
        self.tools = tools


def ids_of(rendered):
    """transformers gives a list, or a mapping with input_ids."""
    ids = rendered if isinstance(rendered, list) else rendered["input_ids"]
    return list(ids[0]) if ids and isinstance(ids[0], list) else list(ids)


class AgentLoopBase(abc.ABC):
    """Made anew for each episode."""

    _class_initialized = False

    def __init__(self, trainer_config, server_manager, tokenizer, processor=None, dataset_cls=None, data_config=None,
                 hf_model_type=None, **kwargs):
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config, self.server_manager = trainer_config.config, server_manager
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.tokenizer, self.processor, self.dataset_cls = tokenizer, processor, dataset_cls
        self.data_config = data_config.config if data_config is not None else self.config.get("data", {})
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {}) or {}
        self.mm_processor_kwargs = {}
        self.continuous_token_builder = create_continuous_token_builder(tokenizer,
                                                                        chat_template_kwargs=self.apply_chat_template_kwargs)
        self.loop = get_event_loop()
        self._system_prompt = None

    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        """State that all episodes share, of loops for verl 0.6; a subclass sets it once."""
        cls._class_initialized = True

    async def in_thread(self, function):
        return await self.loop.run_in_executor(None, function)

    async def process_multi_modal_info(self, messages):
        """{}: models are of text."""
        for message in messages:
            if not isinstance(message.get("content"), (str, type(None))) and any(
                    part.get("type") != "text" for part in message["content"]):
                raise ValueError("a message has images, video or audio, and the model reads text")
        return {}

    async def process_vision_info(self, messages):
        return await self.process_multi_modal_info(messages)

    # verl 0.9

    async def ct_build_initial_tokens(self, messages, tools=None, images=None, videos=None, audios=None, mm_inputs_out=None):
        """Ids of the first prompt, of which the end stays where it is longer than rollout.prompt_length."""
        ids = await self.in_thread(lambda: self.continuous_token_builder.build_initial_tokens(messages, tools=tools))
        most = self.rollout_config.prompt_length
        return ids[-most:] if len(ids) > most else ids

    async def ct_merge_assistant_token(self, runtime_token_ids, assistant_token_ids, response_mask, response_logprobs=None,
                                       assistant_logprobs=None):
        """(result, mask, log-probs) with what the model has drawn; result.token_ids is the stream."""
        builder = self.continuous_token_builder
        result = builder.merge_assistant_tokens(runtime_token_ids, assistant_token_ids)
        return (result, *builder.align_response_metadata(result, response_mask, response_logprobs,
                                                         assistant_logprobs=assistant_logprobs))

    async def ct_merge_context_msg(self, previous_messages, updated_messages, runtime_token_ids, response_mask,
                                   response_logprobs=None, tools=None):
        """The same with messages that are no assistant's."""
        builder = self.continuous_token_builder
        result = await self.in_thread(lambda: builder.merge_context_tokens(previous_messages, updated_messages, runtime_token_ids,
                                                                           tools=tools))
        return (result, *builder.align_response_metadata(result, response_mask, response_logprobs))

    # verl 0.6 to 0.9.0

    @property
    def system_prompt(self):
        """What the template writes before the first message."""
        if self._system_prompt is None:
            empty = {"role": "user", "content": ""}
            one, two = (ids_of(self.tokenizer.apply_chat_template([empty] * n, add_generation_prompt=False, tokenize=True))
                        for n in (1, 2))
            self._system_prompt = one[:len(one) - (len(two) - len(one))]
        return self._system_prompt

    async def apply_chat_template(self, messages, tools=None, images=None, videos=None, remove_system_prompt=False, **_):
        """Ids of the messages alone, with the generation prompt."""
        ids = ids_of(await self.in_thread(lambda: self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, **self.apply_chat_template_kwargs)))
        return ids[len(self.system_prompt):] if remove_system_prompt else ids

    @abc.abstractmethod
    async def run(self, sampling_params, **kwargs):
        """AgentLoopOutput, or a list of several, of one episode. kwargs: the row's columns."""


def register(agent_name):
    """@register("name") before a class."""
    def decorator(cls):
        _agent_loop_registry[agent_name] = {"_target_": f"{cls.__module__}.{cls.__qualname__}"}
        return cls
    return decorator
