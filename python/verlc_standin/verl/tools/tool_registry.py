"""The tools of a run from its YAML and its file of functions: verl.tools.tool_registry, and the MCP servers of verl until 0.7.1.

  tools:
    - class_name: package.module.Class
      config: {type: native, ...}       or mcp
      tool_schema: {...}                may be missing where the class describes itself
      mcp: {mcp_servers_config_path: FILE, tool_selected_list: [...]}     of type mcp
"""

import asyncio
import enum
import importlib
import importlib.util
import sys

from verl.tools.function_tool import load_function_tools_from_path
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.yaml_file import load_yaml


class ToolType(enum.Enum):
    NATIVE = "native"
    MCP = "mcp"


def get_tool_class(cls_name):
    module_name, _, class_name = cls_name.rpartition(".")
    if not module_name:
        raise ValueError(f"class_name {cls_name} has no module: write package.module.Class")
    module = sys.modules.get(module_name) or importlib.import_module(module_name)
    return getattr(module, class_name)


def mcp_tools(cls, entry):
    from verl.tools.utils.mcp_clients.McpClientManager import ClientManager
    servers, rate = entry["mcp"], entry["config"].get("rate_limit", 10)
    schemas = asyncio.run(ClientManager.find_tools(servers["mcp_servers_config_path"], rate, servers.get("tool_selected_list")))
    return [cls(config=entry["config"], tool_schema=OpenAIFunctionToolSchema.model_validate(s)) for s in schemas]


def tools_of(entry):
    """The tools of one entry of the YAML: one, or those of an MCP server."""
    kind = ToolType(entry["config"]["type"])
    cls = get_tool_class(entry["class_name"])
    if kind is ToolType.MCP:
        return mcp_tools(cls, entry)
    schema = entry.get("tool_schema")
    return [cls(config=entry["config"], tool_schema=None if schema is None else OpenAIFunctionToolSchema.model_validate(schema))]


def initialize_tools_from_config(tools_config_file):
    entries = load_yaml(tools_config_file).get("tools")
    if not isinstance(entries, list):
        raise ValueError(f"{tools_config_file} has no list 'tools'")
    for k, entry in enumerate(entries):
        for key, kind in (("class_name", str), ("config", dict)):
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise ValueError(f"{tools_config_file}: tools[{k}] has no {key}")
        if "type" not in entry["config"]:
            raise ValueError(f"{tools_config_file}: tools[{k}].config has no type (native)")
    return [tool for entry in entries for tool in tools_of(entry)]


def load_all_tools(tool_config_path, function_tool_path):
    """Those of the YAML in its order, then functions by name."""
    native = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    functions = load_function_tools_from_path(function_tool_path) if function_tool_path else []
    twice = sorted({t.name for t in functions} & {t.name for t in native})
    if twice:
        raise ValueError(f"the names {twice} of function_tool_path are those of tools in {tool_config_path}; rename one of each")
    return native + functions
