"""The JSON schema of a function, from its type hints and its docstring in Google's form: what transformers.utils.get_json_schema
gives (of 5.23), without the package.

The schema is what a prompt shows of the tool, so it is compared with transformers' (tools/oracle_tools.py)."""

import enum
import inspect
import json
import re
import types
import typing

NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}  # of JSON's scalars
CONTAINERS = {list: "array", tuple: "array", dict: "object"}
UNIONS = (typing.Union, types.UnionType)

SECTION = r"[\n\s]*"  # in front of a section's head
SUMMARY = re.compile(rf"^(.*?){SECTION}(?:Args:|Returns:|Raises:|\Z)", re.DOTALL)
ARGS = re.compile(rf"\n\s*Args:\n(.*?){SECTION}(?:Returns:|Raises:|\Z)", re.DOTALL)
RETURNS = re.compile(rf"\n\s*Returns:\n\s*(.*?){SECTION}(?:Raises:|\Z)", re.DOTALL)
# "name: description", whose further lines are indented deeper or have no "name:"
ARGUMENT = re.compile(r"(?:^|\n)([ \t]*)(\w+):\s*(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+:|\Z)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class TypeHintParsingException(Exception):
    """A hint has no form in JSON's schemas."""


class DocstringParsingException(Exception):
    """The docstring lacks something."""


# ---- type hints ----

def enumerated(values, what):
    if not values:
        raise TypeHintParsingException(f"{what} has no values")
    other = [v for v in values if type(v) not in NAMES]
    if other:
        raise TypeHintParsingException(f"{what} has the value {other[0]!r}; only int, float, str, bool and None can stand in JSON")
    kinds = list(dict.fromkeys(NAMES[type(v)] for v in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def bare(hint):
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return enumerated([member.value for member in hint], f"the Enum {hint.__name__}")
    if hint is typing.Any:
        return {}
    try:
        name = NAMES.get(hint) or CONTAINERS.get(hint)
    except TypeError:  # a hint that cannot be hashed
        name = None
    if name is None:
        raise TypeHintParsingException(f"the type hint {hint!r} has no JSON schema; int, float, str, bool, Enum, Literal, and "
                                       "list, tuple, dict and unions of them have. Another: @function_tool(schema={...})")
    return {"type": name}


def union(args):
    kinds = [of_hint(a) for a in args if a is not type(None)]
    if len(kinds) == 1:
        out = kinds[0]
    elif all(k.keys() == {"type"} and isinstance(k["type"], str) for k in kinds):
        names = sorted({k["type"] for k in kinds})
        out = {"type": names[0] if len(names) == 1 else names}
    else:
        out = {"anyOf": kinds}
    return out | {"nullable": True} if type(None) in args else out


def pair(hint, args):
    if len(args) == 1 or ... in args:
        raise TypeHintParsingException(f"{hint}: a tuple hint names two or more types; use list[...] for any number")
    return {"type": "array", "prefixItems": [of_hint(a) for a in args]}


def of_hint(hint):
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return bare(hint)
    if origin in UNIONS:
        return union(args)
    if origin is typing.Literal and args:
        return enumerated(list(args), "a Literal")
    if origin is list:
        return {"type": "array"} | ({"items": of_hint(args[0])} if args else {})
    if origin is tuple:
        return pair(hint, args) if args else {"type": "array"}
    if origin is dict:
        return {"type": "object"} | ({"additionalProperties": of_hint(args[1])} if len(args) == 2 else {})
    raise TypeHintParsingException(f"the type hint {hint!r} has no JSON schema")


def receiver(parameters):
    """self or cls, where it stands first and has no hint."""
    first = next(iter(parameters), None)
    return first if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty else None


def parameters_of(function, name):
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    implicit = receiver(parameters)
    shown = {k: p for k, p in parameters.items() if k != implicit}
    for k, p in shown.items():
        if p.annotation is inspect.Parameter.empty:
            raise TypeHintParsingException(f"Argument {k} is missing a type hint in function {name}")
    schema = {"type": "object", "properties": {k: of_hint(h) for k, h in hints.items() if k not in (implicit, "return")}}
    required = [k for k, p in shown.items() if p.default is inspect.Parameter.empty]
    return schema | ({"required": required} if required else {})


def returned(function):
    """The schema of what it returns; None: it has no hint, or one that JSON has no schema for."""
    hints = typing.get_type_hints(function)
    try:
        return of_hint(hints["return"]) if "return" in hints else None
    except TypeHintParsingException:
        return None


# ---- docstring ----

def parse_docstring(doc):
    """(summary, {argument: description}, what it returns or None)"""
    summary, args, returns = SUMMARY.search(doc), ARGS.search(doc), RETURNS.search(doc)
    lines = [line for line in args[1].split("\n") if line.strip()] if args else []
    found = ARGUMENT.findall("\n".join(lines))
    return (summary[1].strip() if summary else None,
            {name: re.sub(r"\s*\n+\s*", " ", text.strip()) for _, name, text in found},
            returns[1].strip() if returns else None)


def get_json_schema(function):
    name = getattr(function, "__name__", "operation")
    doc = inspect.getdoc(function)
    if not doc:
        raise DocstringParsingException(f"Cannot generate JSON schema for {name} because it has no docstring!")
    summary, described, returns = parse_docstring(doc.strip())
    parameters = parameters_of(function, name)
    for argument, schema in parameters["properties"].items():
        if argument not in described:
            raise DocstringParsingException(f"Cannot generate JSON schema for {name} because the docstring has no description for "
                                            f"the argument '{argument}'")
        text = described[argument]
        choices = CHOICES.search(text)
        if choices:
            schema["enum"] = [c.strip() if isinstance(c, str) else c for c in json.loads(choices[1])]
            text = text[:choices.start()].strip()
        schema["description"] = text
    out = {"name": name, "description": summary, "parameters": parameters}
    result = returned(function)
    if result is not None:
        out["return"] = result | ({"description": returns} if returns is not None else {})
    return {"type": "function", "function": out}
