"""What a reward manager of verl's reward loop inherits from."""

from abc import ABC, abstractmethod

from verl.utils.ray_utils import get_event_loop


class RewardManagerBase(ABC):
    _class_initialized = False

    def __init__(self, config, tokenizer, compute_score=None):
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = get_event_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config, tokenizer):
        """State that all instances share; a subclass sets it once."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data):
        """{"reward_score": number, "reward_extra_info": {...}} of a DataProto with one row."""
