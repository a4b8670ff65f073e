"""verl.experimental.agent_loop under verlc: what a file with an agent loop of the user imports."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "SingleTurnAgentLoop", "register"]


def __getattr__(name):
    if name == "ToolAgentLoop":
        from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
        return ToolAgentLoop
    if name in ("AgentLoopManager", "AgentLoopWorker"):
        raise AttributeError(f"{name} is verlc's own (docs/agents.md): an agent loop of the user inherits from AgentLoopBase")
    raise AttributeError(f"the stand-in of verl.experimental.agent_loop has no '{name}'")
