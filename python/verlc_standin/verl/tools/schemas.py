"""What a tool is described by, is called with and answers: verl.tools.schemas.

A description keeps what verl keeps, in its order, since both are tokens of the prompt: of a parameter type, description and
enum; items, default, nullable and the like are left out."""

import json

from verl.tools.model import (REQUIRED, Model, anything, boolean, dict_of, list_of, mapping, named, one_of, optional, record, text,
                              word)


class OpenAIFunctionPropertySchema(Model):
    """A parameter. type: a name, or the list of a union."""

    FIELDS = {"type": (one_of(str=text, list=named("list[str]", list_of(text))), REQUIRED),
              "description": (optional(text), None), "enum": (optional(list_of(anything)), None)}


class OpenAIFunctionParametersSchema(Model):
    FIELDS = {"type": (text, REQUIRED), "properties": (dict_of(record(OpenAIFunctionPropertySchema)), REQUIRED),
              "required": (list_of(text), list)}


class OpenAIFunctionSchema(Model):
    FIELDS = {"name": (text, REQUIRED), "description": (text, REQUIRED),
              "parameters": (record(OpenAIFunctionParametersSchema),
                             lambda: OpenAIFunctionParametersSchema(type="object", properties={}, required=[])),
              "strict": (boolean, False)}


class OpenAIFunctionToolSchema(Model):
    FIELDS = {"type": (text, REQUIRED), "function": (record(OpenAIFunctionSchema), REQUIRED)}


class OpenAIFunctionParsedSchema(Model):
    """A call as a parser found it; arguments: JSON text."""

    FIELDS = {"name": (text, REQUIRED), "arguments": (text, REQUIRED)}


class OpenAIFunctionCallSchema(Model):
    FIELDS = {"name": (text, REQUIRED), "arguments": (mapping, REQUIRED)}

    @staticmethod
    def from_openai_function_parsed_schema(parsed_schema):
        """(the call, False), or with {} for its arguments and True where they are no JSON object."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_object = isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments if is_object else {}), not is_object


class OpenAIFunctionToolCall(Model):
    FIELDS = {"id": (text, REQUIRED), "type": (word("function"), "function"),
              "function": (record(OpenAIFunctionCallSchema), REQUIRED)}


class ToolResponse(Model):
    """What a tool answers. verlc's models take its text alone."""

    FIELDS = {"text": (optional(text), None), "image": (optional(list_of(anything)), None),
              "video": (optional(list_of(anything)), None)}

    @classmethod
    def _before(cls, values):
        for kind in ("image", "video"):
            if kind in values and not isinstance(values[kind], list):
                one = "img" if kind == "image" else kind
                raise ValueError(f"{kind.capitalize()} must be a list, but got {type(values[kind])}. Please check the "
                                 f"tool.execute(). For single {kind}s, wrap in a list: [{kind}]. "
                                 f"Example: {{'{kind}': [{one}1]}} or {{'{kind}': [{one}1, {one}2, ...]}}.")

    def is_empty(self):
        return not (self.text or self.image or self.video)

    def is_text_only(self):
        return self.text and not self.image and not self.video
