"""verl's tool parsers, by those of verlc (`verlc tokenize --tool-calls`)."""

import asyncio

from verlc_helpers.tokenizer import Tokenizer

from verl.tools.model import REQUIRED, Model, optional, text

PARSERS = {}  # by directory and format: a parser has a process


class FunctionCall(Model):
    """arguments: JSON text, as the model meant it."""

    FIELDS = {"name": (text, REQUIRED), "arguments": (text, REQUIRED), "tool_call_id": (optional(text), None)}


def schema_of(tool):
    return tool if isinstance(tool, dict) else tool.model_dump(exclude_unset=True, exclude_none=True)


class ToolParser:
    def __init__(self, directory, name):
        self.tokenizer, self.name = Tokenizer(directory), name
        self.stop_token_ids = self.tokenizer.tool_calls([], None, name)["stop_token_ids"]

    @classmethod
    def get_tool_parser(cls, name, tokenizer):
        key = tokenizer.name_or_path, name
        if key not in PARSERS:
            PARSERS[key] = cls(*key)
        return PARSERS[key]

    async def extract_tool_calls(self, responses_ids, tools=None):
        """(content, [FunctionCall, ...]) of the ids of one turn."""
        schemas = [schema_of(t) for t in tools or []]
        got = await asyncio.get_running_loop().run_in_executor(
            None, lambda: self.tokenizer.tool_calls(responses_ids, schemas, self.name))
        return got["content"], [FunctionCall(name=c["name"], arguments=c["arguments"], tool_call_id=c["id"]) for c in got["calls"]]
