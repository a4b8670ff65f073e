"""Makes tests/fixtures/agent/tool_parser.jsonl: generated turns with what verl 0.9.1's tool parsers read in them.
With --check PROGRAM nothing is written there: PROGRAM (test_agent_tool_parser_verl) reads --turns random turns of each format
beside verl's own parsers. Differences with a name are those of docs/differences.md.
Run: python tools/oracle_tool_parser.py [--verl DIR] [--seed N] [--turns N] (--out DIR | --check PROGRAM). Deterministic.

A turn is written as the format has it, with values of every kind, and then bent: cut at any character, pieces of the markup
put in, taken out, doubled and exchanged, blocks in blocks, characters that Python takes for blanks, digits or cases.
"""

import argparse
import asyncio
import collections
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # invalid escapes in generated literals
logging.disable(logging.CRITICAL)


def verl_parsers(directory):
    """verl's module of the parsers. What it only imports stands in: verl's package would load torch and ray."""
    if directory:
        sys.path.insert(0, directory)
    root = Path(importlib.util.find_spec("verl").origin).parent

    def module(name, path=None):
        if path is None:
            found = types.ModuleType(name)
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        if path is not None:
            spec.loader.exec_module(found)
        return found

    for name in ("verl", "verl.utils", "verl.tools"):
        module(name).__path__ = []
    module("verl.utils.ray_utils").get_event_loop = asyncio.get_event_loop
    module("verl.utils.rollout_trace").rollout_trace_op = lambda function: function
    schemas = module("verl.tools.schemas", root / "tools/schemas.py")
    return module("verl.experimental.agent_loop.tool_parser", root / "experimental/agent_loop/tool_parser.py"), schemas


class Text:
    """A tokenizer whose ids are the text."""

    pad_token = "<the pad token>"

    def decode(self, ids, skip_special_tokens=False):
        return ids

    def convert_tokens_to_ids(self, token):
        return 1


# ---- what models write ----

TYPES = ["string", "str", "text", "varchar", "char", "enum", "integer", "int", "int32", "uint8", "long", "short",
         "unsigned", "number", "num", "float", "float64", "boolean", "bool", "binary", "object", "dict",
         "dict[str, int]", "array", "list", "tuple", "null", "any", "", " Integer ", "NUMBER", "Boolean",
         ["integer", "number"], ["string", "null"]]
NAMES = ["get_weather", "get_weather", "get_weather", "calc", "calc", "search", "f", "Calc", "a-b", "weather.get",
         "日本", "é_1", "name with blank", "x" * 40]
KEYS = ["city", "x", "count", "flag", "items", "opts", "ключ", "a b", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8",
        "k9"]
NUMBERS = ["0", "1", "-1", "+5", "007", "3.0", "3.5", "-0", "-0.0", "1e5", "1E-7", "1e400", "-1e400", "1_000", "1__0",
           "_1", "1_", "12345678901234567890123", "0x1F", "0xff_ff", "0b101", "0o17", "017", "00", "0_0", ".5", "5.",
           "1.5e3", "1e", "nan", "NaN", "inf", "Infinity", "-Infinity", "-nan", "+inf", "1j", "2+3j", "-1-2.5j", "1+2",
           "--1", "+-1", "- 1", "(1)", "1.", "1.e2", "٣", "１２", "−5", " 7 ", "\u00a08\u2003", "\x1c9", "1e22", "1e16",
           "123456789012345680.0", "0.0001", "0.00001", "1e-5", "0.1", "0.30000000000000004", "1.10", "100.0",
           "5e-324", "1.7976931348623157e308", "9007199254740993.0", "1_0.5_0e1_0", "1" * 4300, "1" * 4301, "0" * 4301,
           "9" * 310, "0x" + "f" * 3571, "0x" + "f" * 3572, "-0x" + "7" * 4000, "0b" + "1" * 14284, "0b" + "1" * 14285,
           "0o" + "7" * 500, "True", "false", "None", "null", "NULL", "Null", "tRue", "FALSE", "true "]
TEXTS = ["", "Berlin", "two words", " padded ", "\nline\n", "\n\n", "\r\n", "a\nb", "ünïcödé", "日本語", "😀", "\\", '"',
         "'", "<b>", "</b>", "a > b", "x<y", "&amp;", "\t", "\x00", "\x1f", "\x7f", "\u2028", "\ufeff1", "{", "}", "[",
         "a,b", "k:v", "null", "\u0130", "ſ", "İnt", "\x85", "x" * 300]
STRINGS = [r'"\u00e9"', r'"\ud83d\ude00"', r'"\ud800"', r'"\udc00x"', r'"\ud83d\u0041"', r'"\x41"', r'"a\/b"',
           r'"\b\f\n\r\t"', '"\t"', '"\n"', r'"\u12"', r'"\u00G0"', '"open', r'"\"', '"\x7f"', '"\u2028"', '"\x00"',
           r'"\u0000"', r'"\\"', '""']
LITERALS = ["'a'", '"a"', "'a' 'b'", "'''a\nb'''", '"""q"q"""', "r'\\d'", "u'x'", "b'x'", "rb'\\x'", "Rb'y'", "ur'x'",
            "f'x'", "'a' b'b'", "b'a' b'b'", "b'é'", "'\\x41'", "'\\x4'", "'\\101'", "'\\777'", "'\\u00e9'",
            "'\\ud800'", "'\\ud83d\\ude00'", "'\\U0001f600'", "'\\U00110000'", "'\\q'", "'a\\\nb'", "'a\nb'", "'",
            "''", "''''''", "'''", "()", "(1,)", "(1, 2)", "1, 2", "1,", ",", "(,)", "[,]", "[1,]", "[1,,2]", "[1 2]",
            "{}", "{1}", "{1, 2}", "{'a': 1}", "{'a': 1,}", "{'a'}", "{1: 2, 3}", "{,}", "{**{}}", "[*[1]]",
            "{1: 'a', True: 'b', 1.0: 'c'}", "{True: 1, 1: 2}", "{None: 1}", "{1.5: 1, '1.5': 2}", "{(1, 2): 3}",
            "{[1]: 2}", "{(1, [2]): 3}", "{1j: 1}", "{1: 2, 1+0j: 3}", "{0: 1, -0.0: 2, False: 3}", "{2**3: 1}",
            "{9007199254740993: 1, 9007199254740992.0: 2}", "{1e999: 1}", "{b'a': 1}", "{1: b'a', 1: 2}", "set()",
            "[set()]", "(set)()", "set ( )", "set(1)", "set", "{set(): 1}", "frozenset()", "...", ". . .", "[...]",
            "-True", "not True", "~1", "1 if 1 else 2", "__import__('os')", "[x for x in y]", "lambda: 1", "1 # c",
            "# c\n1", "\n1", "\n 1", " 1", "\t1", "1\n", "1\n ", "1\n\n", "1\n2", "1;", "1\\\n", "\\\n1", "(1\n)",
            "[1, # c\n 2]", "[1,\n\n2]", "\f1", "\v1", "\n\f1", " \f1", "\n \f1", "1\r", "1\r\n", "'''\r\n'''",
            "(1)(2)", "1(2)", "'a'.x", "'a'[0]", "1 .real", "1if 1else 2", "[" * 200 + "]" * 200,
            "[" * 201 + "]" * 201, "(" * 200 + "1" + ")" * 200, "(" * 201 + "1" + ")" * 201,
            "{1:" * 199 + "1" + "}" * 199, "[(" * 101 + ")]" * 101, "-(1)", "-(-1)", "(-1)", "(-1)+2j", "1+(2j)",
            "(1+2j)", "-(1+2j)", "1+2j+3j", "1-2j", "True+2j", "2j+1", "0xffj", "9" * 400 + "+1j", "01j", "09.5", "09",
            "0_7", "0x", "0x_1", "0b2", "0o8", "1_000j", "1e5j", "NoneNone", "None None", "Nonex", "𝐓𝐫𝐮𝐞", "print",
            "a", "é", "(", ")", "[", "{", "[1", "[1)", "{1:", "{1:2", "$", "?", "!", "1 2"]


def scalar(rng):
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(TEXTS)
    return rng.choice(
        [
            rng.randint(-(10**6), 10**6),
            rng.choice([0, -1, 10**30, 2**63]),
            rng.random() * 10 ** rng.randint(-8, 20),
            True,
            False,
            None,
            round(rng.random(), 2),
            float(rng.randint(-5, 5)),
        ]
    )


def value(rng, depth=0):
    if depth < 3 and rng.random() < 0.35:
        if rng.random() < 0.5:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(12 if rng.random() < 0.1 else 4))}
    return scalar(rng)


def json_text(rng, v):
    if rng.random() < 0.08:
        return rng.choice(
            STRINGS
            + NUMBERS
            + TEXTS
            + [
                "[" * 300 + "]" * 300,
                "[" * 2000 + "]" * 2000,
                '{"a": 1, "a": 2}',
                '{"a": 1,}',
                "[1,]",
                "{'a': 1}",
                "[1 2]",
                "{1: 2}",
                '{"a" 1}',
                "[NaN, -Infinity]",
                '{"a":{"a":1,"b":2,"a":[]}}',
            ]
        )
    text = json.dumps(
        v,
        ensure_ascii=rng.random() < 0.5,
        indent=rng.choice([None, None, None, 1]),
        separators=rng.choice([None, None, (",", ":")]),
    )
    return (
        rng.choice(["", "", "", " ", "\n", "\t\r\n", "\u00a0"])
        + text
        + rng.choice(["", "", "", " ", "\n", "\n\n", ";", "\x0c"])
    )


def raw_text(rng, v):
    """A value as the XML formats have it."""
    kind = rng.randrange(12)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(LITERALS)
    if kind == 4:
        return repr(v)
    if kind == 5:
        return rng.choice(STRINGS)
    if kind == 6:
        return rng.choice([literal, literal, bent_literal])(rng)
    if isinstance(v, str) and kind < 11:
        return v
    return json_text(rng, v)


def literal(rng, depth=0):
    """Something like a literal of Python."""
    blank = lambda: rng.choice(["", "", "", " ", "\n", "\t", " # c\n", "\\\n"])
    kind = rng.randrange(8 if depth < 3 else 3)
    if kind < 3:
        return (
            blank()
            + rng.choice(rng.choice([LITERALS[:36], NUMBERS[:46], ["1", "'a'", "None", "True", "2.5"]]))
            + blank()
        )
    inner = [literal(rng, depth + 1) for _ in range(rng.randrange(4))]
    comma = blank() + "," + blank()
    end = rng.choice(["", "", ","])
    if kind == 3:
        return "(" + comma.join(inner) + end + ")"
    if kind == 4:
        return "{" + comma.join(inner) + end + "}"
    if kind == 5:
        return blank() + "[" + comma.join(inner) + end + "]" + blank()
    if kind == 6:
        return "{" + comma.join(f"{literal(rng, 3)}{blank()}:{i}" for i in inner) + end + "}"
    return rng.choice(["-", "+", "- ", ""]) + literal(rng, 3) + rng.choice(["+", "-", " + "]) + literal(rng, 3)


def bent_literal(rng):
    text = rng.choice([literal(rng), rng.choice(LITERALS)])[:300]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        put = rng.choice(
            list("()[]{},:'\"\\\n\r #\f\t+-.jJ01xe_ruUbfBF") + ["'''", "set", "\\x4", "\\u00", "\r\n", "é"]
        )
        text = text[:at] + put + text[at + rng.choice([0, 0, 1]) :]
    return text


def pairs(rng):
    return [(rng.choice(KEYS), value(rng)) for _ in range(rng.choice([0, 1, 1, 2, 3, 12 if rng.random() < 0.1 else 2]))]


def gap(rng):
    return rng.choice(["", "", "\n", "\n", " ", "\n\n", "\r\n", "\u2003", "\x1c", "text"])


def line(rng):
    return rng.choice(["", "\n", "\n"])


def hermes(rng):
    call = {"name": rng.choice(NAMES), "arguments": dict(pairs(rng))}
    if rng.random() < 0.25:
        call = rng.choice(
            [
                {"name": "f"},
                {"arguments": {}},
                {"name": 1, "arguments": {}},
                {"name": None, "arguments": 1},
                [1],
                "x",
                5,
                None,
                {"name": "f", "arguments": '{"x": 1}'},
                {"arguments": [1, "a"], "name": "", "more": {}},
                {"name": "f\0g", "arguments": 0},
            ]
        )
    return f"<tool_call>{gap(rng)}{json_text(rng, call)}{gap(rng)}</tool_call>"


def qwen3_coder(rng):
    body = "".join(
        f"{gap(rng)}<parameter={k}>{line(rng)}{raw_text(rng, v)}{line(rng)}</parameter>"
        for k, v in pairs(rng)
    )
    functions = "".join(
        f"{gap(rng)}<function={rng.choice(NAMES)}>{body}{gap(rng)}</function>" for _ in range(rng.choice([1, 1, 1, 2]))
    )
    return f"<tool_call>{functions}{gap(rng)}</tool_call>"


def glm(rng):
    body = "".join(
        f"<arg_key>{gap(rng)}{k}</arg_key>{gap(rng)}<arg_value>{raw_text(rng, v)}</arg_value>{gap(rng)}"
        for k, v in pairs(rng)
    )
    return f"<tool_call>{gap(rng)}{rng.choice(NAMES)}{gap(rng)}{body}</tool_call>"


def seed(rng):
    body = "".join(f"{gap(rng)}<parameter={k}>{raw_text(rng, v)}</parameter>" for k, v in pairs(rng))
    functions = "".join(
        f"{gap(rng)}<function={rng.choice(NAMES)}>{body}{gap(rng)}</function>" for _ in range(rng.choice([1, 1, 1, 2]))
    )
    return f"<seed:tool_call>{functions}{gap(rng)}</seed:tool_call>"


def minimax(rng):
    body = "".join(f'{gap(rng)}<parameter name="{k}">{raw_text(rng, v)}</parameter>' for k, v in pairs(rng))
    calls = "".join(
        f'{gap(rng)}<invoke name="{rng.choice(NAMES)}">{body}{gap(rng)}</invoke>'
        for _ in range(rng.choice([1, 1, 2, 3]))
    )
    return f"<minimax:tool_call>{calls}{gap(rng)}</minimax:tool_call>"


def kimi(rng):
    def call():
        name = rng.choice(NAMES + ["calc2", "GET-WEATHER", "functions.ÉTÉ", "functions.f_calc", "unknown", "été"])
        of = rng.choice([f"functions.{name}:{rng.randrange(3)}", name, f" {name} ", name.upper(), ""])
        arguments = json_text(rng, rng.choice([dict(pairs(rng)), dict(pairs(rng)), value(rng)]))
        return f"<|tool_call_begin|>{of}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    return (
        "<|tool_calls_section_begin|>"
        + "".join(call() + gap(rng) for _ in range(rng.choice([1, 1, 2, 3])))
        + "<|tool_calls_section_end|>"
    )


def deepseek_v4(rng):
    def parameter(k, v):
        string = rng.choice(["true", "false", "false", "True", ""])
        return f'{gap(rng)}<｜DSML｜parameter name="{k}" string="{string}">{raw_text(rng, v)}</｜DSML｜parameter>'

    body = "".join(parameter(k, v) for k, v in pairs(rng))
    calls = "".join(
        f'{gap(rng)}<｜DSML｜invoke name="{rng.choice(NAMES)}">{body}{gap(rng)}</｜DSML｜invoke>'
        for _ in range(rng.choice([1, 1, 2]))
    )
    return rng.choice(["", "\n\n", "\n"]) + f"<｜DSML｜tool_calls>{calls}{gap(rng)}</｜DSML｜tool_calls>"


def gemma4(rng):
    def argument(k, v):
        if rng.random() < 0.5:
            return f'{k}:<|"|>{rng.choice(TEXTS)}<|"|>'
        return f"{k}:{rng.choice(NUMBERS) if rng.random() < 0.5 else json.dumps(v)}"

    body = rng.choice([",", ",", ", ", ";", ""]).join(argument(k, v) for k, v in pairs(rng))
    return f"<|tool_call>call:{rng.choice(NAMES)}{{{body}}}<tool_call|>"


def gpt_oss(rng):
    to = rng.choice(
        [" to=functions.", " to=functions.", " to=functions.", "to=functions.", " to=functions.a to=functions.", " to="]
    )
    channel = rng.choice(["commentary", "commentary", "analysis", "", "final", " "])
    return (
        f"<|start|>assistant<|channel|>{channel}{to}{rng.choice(NAMES + [''])}{rng.choice([' ', ' ', '', '  '])}"
        f"<|constrain|>json<|message|>{json_text(rng, dict(pairs(rng)))}<|call|>"
    )


FORMATS = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "gpt-oss": gpt_oss,
    "glm": glm,
    "seed": seed,
    "minimax": minimax,
    "kimi": kimi,
    "deepseek_v4": deepseek_v4,
    "gemma4": gemma4,
}
AROUND = ["", "", "I look it up.", "<think>so</think>", "<think>\nso <tool_call> it\n</think>\n\n",
          " \n<think>a</think>b", "</think>x", "\u2003</think>", "<think>open", "日本語 😀\n", "<|im_end|>",
          "<|observation|>", "<｜end▁of▁sentence｜>", "<|channel|>analysis<|message|>so<|end|>",
          "<|start|>assistant<|channel|>analysis<|message|>a to=functions.f b<|end|>",
          "<|channel|>final<|message|>done<|return|>", "\n", "\r\n"]
MARKS = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "\n", "<",
         "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<seed:tool_call>", "</seed:tool_call>",
         "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>", '<parameter name="', '"',
         "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="', "</｜DSML｜invoke>",
         '<｜DSML｜parameter name="', '" string="true">', '" string="false">', "</｜DSML｜parameter>",
         "<｜end▁of▁sentence｜>", "</think>", "<think>", "<|tool_call>call:", "<|tool_call>", "}<tool_call|>", '<|"|>',
         "{", "}", ",", ":", "<|start|>assistant<|channel|>", "<|channel|>analysis<|message|>", "<|end|>",
         " to=functions.", " <|constrain|>json<|message|>", "<|call|>", " ", "\u2003", "\x1c", "\\", "'", "null", "0"]


def bent(rng, text):
    """The turn, broken."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:b]
        elif kind == 1:
            text = text[:a] + rng.choice(MARKS) + text[a:]
        elif kind == 2:
            text = text[:a] + text[a + rng.choice([1, 1, 2, 5, 20]) :]
        elif kind == 3:
            text = text[:b] + text[a:]
        elif kind == 4:
            there = [m for m in MARKS if m in text]
            mark = rng.choice(there) if there else ""
            text = text.replace(mark, rng.choice(MARKS + [""]), rng.choice([1, 1, -1])) if mark else text
        elif kind == 5:
            text = text[a:]
        else:
            text = text[:a] + text[a:b] + text[a:b] + text[b:]
        text = text[:20000]
    return text


def turn(rng, name):
    write = FORMATS[name]
    calls = [write(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    if rng.random() < 0.05:
        calls.append(FORMATS[rng.choice(list(FORMATS))](rng))
    text = rng.choice(AROUND) + rng.choice(["", "", gap(rng)]).join(calls) + rng.choice(AROUND)
    return bent(rng, text) if rng.random() < 0.6 else text


def tools(rng):
    def tool():
        of = rng.choice([TYPES, TYPES, ["array"], ["object"]])
        properties = {
            k: {"type": rng.choice(of), "description": "d"}
            for k in rng.sample(KEYS, rng.choice([len(KEYS), rng.randrange(len(KEYS))]))
        }
        required = [k for k in properties if rng.random() < 0.2]
        kind = "function" if rng.random() < 0.95 else "other"
        parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
        return {
            "type": kind,
            "function": {"name": rng.choice(NAMES + ["ÉTÉ"]), "description": "d", "parameters": parameters},
        }

    return [tool() for _ in range(rng.choice([1, 2, 4, 8]))] if rng.random() < 0.9 else None


# ---- verl's answers ----


class Verl:
    def __init__(self, directory):
        self.module, self.schemas = verl_parsers(directory)
        self.parsers = {name: self.module.ToolParser.get_tool_parser(name, Text()) for name in FORMATS}
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.named = collections.Counter()

    def extract(self, name, text, schemas):
        return self.loop.run_until_complete(self.parsers[name].extract_tool_calls(text, schemas))

    def answer(self, name, text, schemas):
        content, calls = self.extract(name, text, schemas)
        out = []
        for c in calls:
            out.append(clean(c))
            self.named["tool-call-nul"] += any("\0" in s for s in (c.name, c.arguments, c.tool_call_id or ""))
            self.named["tool-call-surrogate"] += any("\ud800" <= x <= "\udfff" for x in c.name + c.arguments)
        return {"content": content, "calls": out}


def clean(call):
    """[name, arguments, id] as C strings of UTF-8: NUL, and a lone surrogate of a name, are U+FFFD; one of arguments is its
    escape."""
    name, arguments, id_ = (s and s.replace("\0", "\ufffd") for s in (call.name, call.arguments, call.tool_call_id))
    name = name.encode(errors="surrogatepass").decode(errors="replace")
    return [name, arguments.encode(errors="backslashreplace").decode(), id_]


def turns(verl, seed_, n):
    """n turns of each format with verl's answers; every eighth is cut at each of some characters."""
    for name in FORMATS:
        rng = random.Random(f"{seed_} {name}")
        made = 0
        while made < n:
            text, schema = turn(rng, name), tools(rng)
            if "\\N" in text:
                continue  # names of characters: tool-call-character-name
            parsed = schema and [verl.schemas.OpenAIFunctionToolSchema.model_validate(t) for t in schema]
            cuts = [text]
            if rng.random() < 0.02 and len(text) < 600:
                cuts = [text[:i] for i in range(len(text) + 1)]
            for cut in cuts[: n - made]:
                yield {"format": name, "text": cut, "tools": schema, "verl": verl.answer(name, cut, parsed)}
                made += 1


def write(path, rows):
    with open(path, "w") as f:
        for row in rows:
            f.write(json.dumps(row, separators=(",", ":")) + "\n")


def short(rows, most):
    """Few and small rows: the fixture."""
    kept = collections.Counter()
    for row in rows:
        if len(json.dumps(row)) < 1200 and kept[row["format"]] < most:
            kept[row["format"]] += 1
            yield row


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--verl", help="an unpacked wheel of verl 0.9.1")
    p.add_argument("--out", help="directory of the fixture")
    p.add_argument("--check", help="test_agent_tool_parser_verl")
    p.add_argument("--turns", type=int, default=3000)
    p.add_argument("--keep", help="file of the turns")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    verl = Verl(a.verl)
    if a.out:
        os.makedirs(a.out, exist_ok=True)
        write(f"{a.out}/tool_parser.jsonl", short(turns(verl, 0, 400), 40))
        print(f"wrote {a.out}/tool_parser.jsonl")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        path = a.keep or f"{directory}/turns.jsonl"
        write(path, turns(verl, a.seed, a.turns))
        rc = subprocess.run([a.check, path], stderr=subprocess.STDOUT).returncode
    print("by name: " + ", ".join(f"{k} {v}" for k, v in sorted(verl.named.items())))
    return rc


if __name__ == "__main__":
    sys.exit(main())
