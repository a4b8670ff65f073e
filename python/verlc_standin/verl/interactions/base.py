"""What an interaction inherits from: verl.interactions.base."""

from typing import Any, Optional
from uuid import uuid4


class BaseInteraction:
    """Made once in each process; start_interaction at an episode's first turn, generate_response after each turn without tool
    calls, finalize_interaction at the episode's end."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: Optional[str] = None, **kwargs) -> str:
        """kwargs: the row's interaction_kwargs."""
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]],
                                **kwargs) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the episode ends, the user's next message, the turn's score or None, anything)"""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        return 0.0

    async def finalize_interaction(self) -> None:
        """The episode has ended."""
