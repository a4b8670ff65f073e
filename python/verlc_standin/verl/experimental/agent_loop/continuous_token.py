"""verl's continuous tokens, by those of verlc (`verlc tokenize --continuous`): what messages append to ids that were drawn."""

import dataclasses

from verlc_helpers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class MergeResult:
    """token_ids: the stream; of its end removed_prefix_token_count were taken off, then appended_token_count came."""

    token_ids: list
    appended_token_count: int
    kind: str = "context"
    inserted_token_ids: tuple = ()
    removed_prefix_token_count: int = 0


def plain_messages(messages):
    return [dict(m) for m in messages]


class ContinuousTokenBuilder:
    def __init__(self, directory, chat_template_kwargs):
        self.tokenizer, self.kwargs = Tokenizer(directory), dict(chat_template_kwargs or {})

    def ask(self, **request):
        return self.tokenizer.continuous(request, self.kwargs)

    def supports_multimodal(self):
        return False

    def build_initial_tokens(self, messages, *, tools=None, **_):
        return self.ask(messages=plain_messages(messages), tools=tools)["ids"]

    def merge_assistant_tokens(self, runtime_token_ids, assistant_token_ids):
        return MergeResult(list(runtime_token_ids) + list(assistant_token_ids), len(assistant_token_ids), "assistant")

    def merge_context_tokens(self, previous_messages, updated_messages, runtime_token_ids, *, tools=None):
        old, new = plain_messages(previous_messages), plain_messages(updated_messages)
        if new[:len(old)] != old:
            raise ValueError("the messages so far were changed: only further ones can be appended")
        got = self.ask(messages=new, n_old=len(old), ids=list(runtime_token_ids), tools=tools)
        kept = len(runtime_token_ids) - got["n_removed"]
        return MergeResult(list(runtime_token_ids[:kept]) + got["ids"], len(got["ids"]),
                           removed_prefix_token_count=got["n_removed"])

    def align_response_metadata(self, merge_result, response_mask, response_logprobs=None, *, assistant_logprobs=None):
        """(mask, log-probs or None) of the response with the same change: 1 and the log-prob where the model drew, else 0."""
        drawn, n = merge_result.kind == "assistant", merge_result.appended_token_count
        if response_logprobs is None and assistant_logprobs is not None:
            raise ValueError("response_logprobs is required when assistant_logprobs is provided")
        kept = len(response_mask) - merge_result.removed_prefix_token_count
        mask = list(response_mask[:kept]) + [int(drawn)] * n
        if response_logprobs is None:
            return mask, None
        added = list(assistant_logprobs or []) if drawn else [0.0] * n
        if len(added) != n:
            raise ValueError(f"{len(added)} log-probs of {n} tokens that the model drew")
        return mask, list(response_logprobs[:kept]) + added


BUILDERS = {}  # by directory and variables: a builder has a process


def create_continuous_token_builder(tokenizer, *, chat_template_kwargs=None, **_):
    key = tokenizer.name_or_path, repr(sorted((chat_template_kwargs or {}).items()))
    if key not in BUILDERS:
        BUILDERS[key] = ContinuousTokenBuilder(tokenizer.name_or_path, chat_template_kwargs)
    return BUILDERS[key]
