"""What server_manager.generate returns: verl.workers.rollout.replica."""

from verl.tools.model import REQUIRED, Model, anything, integer, list_of, mapping, number, optional, text


class TokenOutput(Model):
    """stop_reason: completed, which is a stop or the limit, aborted, or None."""

    FIELDS = {"token_ids": (list_of(integer), REQUIRED), "log_probs": (optional(list_of(number)), None),
              "routed_experts": (anything, None), "stop_reason": (optional(text), None), "num_preempted": (optional(integer), None),
              "extra_fields": (mapping, dict)}
