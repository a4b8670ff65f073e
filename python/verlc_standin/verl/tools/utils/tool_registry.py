"""The name of verl.tools.tool_registry until verl 0.7.1."""

from verl.tools.tool_registry import ToolType, get_tool_class, initialize_tools_from_config  # noqa: F401
