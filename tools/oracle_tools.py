#!/usr/bin/env python3
"""verl's tools beside verlc's: schemas, the texts of calls, truncation (0.9.1), and the built-in tools and interactions that verl
had until 0.7.1, each by verl's own code.

  oracle_tools.py [--batches N] [--fixtures DIR]    N random cases of each kind, compared; DIR/tools.jsonl (tests/fixtures/agent)
  oracle_tools.py --answer DIR                      cases from stdin, the answers of the verl in DIR to stdout

verl 0.7.1 is ORACLE_VERL_OLD, else verl-0.7.1 in the directory of this Python's environment.  Modules are loaded without what
verl's packages import around them; Ray is a stand-in that calls at once.  `call` is ToolAgentLoop._call_tool, out of its class."""

import argparse
import ast
import asyncio
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import random
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEST = ROOT / "tests" / "e2e" / "agent_tools_test.py"
sys.path.insert(0, str(TEST.parent))
OLD = {"builtin", "mcp_parts", "interaction"}  # kinds of 0.7.1


# ---- verl ----

class Ref:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from ()
        return self.value


class Actor:
    def __init__(self, thing):
        self.thing = thing

    def __getattr__(self, name):
        method = getattr(self.thing, name)
        return types.SimpleNamespace(remote=lambda *a, **k: Ref(method(*a, **k)))


class ActorClass:
    def __init__(self, cls):
        self.cls = cls

    def options(self, **_):
        return self

    def remote(self, *a, **k):
        return Actor(self.cls(*a, **k))


def fake_ray():
    ray = types.ModuleType("ray")
    ray.__path__ = []
    ray.remote = lambda *a, **k: ActorClass(a[0]) if a else ActorClass
    ray.method = lambda **k: lambda f: f
    ray.get = lambda ref: ref.value
    actor = types.ModuleType("ray.actor")
    ray.actor = actor
    sys.modules.update({"ray": ray, "ray.actor": actor})


def load_verl(directory):
    """verl's modules of a directory, without what its packages' __init__ files import."""
    fake_ray()
    fastmcp = types.ModuleType("fastmcp")  # verl's code around the client is compared here, the client in oracle_mcp.py
    fastmcp.exceptions = types.ModuleType("fastmcp.exceptions")
    fastmcp.exceptions.ClientError = type("ClientError", (Exception,), {})
    manager = types.ModuleType("verl.tools.utils.mcp_clients.McpClientManager")
    manager.ClientManager = None
    clients = types.ModuleType("verl.tools.utils.mcp_clients")
    clients.__path__ = []
    sys.modules.update({"fastmcp": fastmcp, "fastmcp.exceptions": fastmcp.exceptions, clients.__name__: clients,
                        manager.__name__: manager})
    for name in ("verl", "verl.utils", "verl.utils.reward_score", "verl.utils.reward_score.sandbox_fusion"):
        module = types.ModuleType(name)
        module.__path__ = [str(pathlib.Path(directory, *name.split(".")))]
        sys.modules[name] = module


def method(directory, file, cls, name, **names):
    """One method, out of its class."""
    path = pathlib.Path(directory, "verl", file)
    found = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == cls)
    body = [n for n in found.body if getattr(n, "name", None) == name]
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return names[name]


def verls_call(test, directory):
    import logging
    from typing import Any

    from verl.tools import function_tool, tool_registry
    from verl.tools.schemas import ToolResponse
    logger = logging.getLogger("verl")
    logger.setLevel(logging.CRITICAL)
    call_tool = method(directory, "experimental/agent_loop/tool_agent_loop.py", "ToolAgentLoop", "_call_tool", json=json,
                       logger=logger,
                       Any=Any, ToolResponse=ToolResponse, FunctionTool=function_tool.FunctionTool, FunctionCall=object,
                       AgentData=object, normalize_function_tool_return=function_tool.normalize_function_tool_return)

    def call(case):
        function_tool.FUNCTION_TOOL_REGISTRY.clear()
        function_tool._LOADED_FUNCTION_TOOL_PATHS.clear()
        with contextlib.redirect_stdout(io.StringIO()):
            tools = tool_registry.load_all_tools(test.class_file(test.CLASSES), test.source_file(test.FUNCTIONS))
        tools = {t.name: t for t in tools}
        selection = case["tool_selection"]
        active = {n: tools[n] for n in selection if n in tools} if selection and tools else tools
        loop = types.SimpleNamespace(tools=tools,
    max_tool_response_length=case["longest"],
     tool_response_truncate_side=case["side"])
        data = types.SimpleNamespace(_active_tools=active, request_id="e", messages=[], extra_fields={})
        asked = types.SimpleNamespace(name=case["name"], arguments=case["arguments"])
        one, reward, _ = asyncio.run(call_tool(loop, asked, case["tools_kwargs"], data))
        return [one.text or "", reward]
    return call


def answer(directory):
    load_verl(directory)
    import agent_tools_test as test
    kinds = dict(test.KINDS)
    if pathlib.Path(directory, "verl", "tools", "function_tool.py").is_file():
        kinds["call"] = verls_call(test, directory)
    out = sys.stdout
    for line in sys.stdin:
        case = json.loads(line)
        with contextlib.redirect_stdout(io.StringIO()):
            got = kinds[case["kind"]](case)
        print(json.dumps(test.plain(got)), file=out, flush=True)


# ---- cases ----

WORDS = ["answer", "Grüße", "the city", "a \"quoted\" text", "x" * 70, "", "1", "line\nline", "日本語"]


def junk(rng):
    return rng.choice([None, 0, 1, 2, True, 1.5, "yes", "NO", "abc", [], ["a", 1], {}, {"a": 1}, "ü" * 40, [["a"]]])


def maybe(rng, value, odds=0.07):
    return junk(rng) if rng.random() < odds else value


def shuffled(rng, pairs):
    pairs = list(pairs)
    rng.shuffle(pairs)
    return dict(pairs)


def random_property(rng):
    fields = [("type", maybe(rng, rng.choice(["string", "integer", ["integer", "number"], "array", "object"])))]
    for name, value in (("description", rng.choice(WORDS)), ("enum", rng.choice([["a", "b"], [1, 2.5, None], []])),
                        ("items", {"type": "string"}), ("default", 3), ("nullable", True), ("properties",
                                                                                            {"q": {"type": "string"}})):
        if rng.random() < 0.4:
            fields.append((name, maybe(rng, value)))
    return shuffled(rng, fields[rng.random() < 0.04:])


def random_schema(rng):
    properties = {f"p{i}": maybe(rng, random_property(rng), 0.03) for i in range(rng.randrange(4))}
    parameters = [("type", "object"), ("properties", maybe(rng, properties, 0.03))]
    if rng.random() < 0.7:
        parameters.append(("required", maybe(rng, list(properties)[:2])))
    if rng.random() < 0.2:
        parameters.append(("additionalProperties", False))
    fields = [("name", maybe(rng, "tool")), ("description", maybe(rng, rng.choice(WORDS)))]
    if rng.random() < 0.9:
        fields.append(("parameters", maybe(rng, shuffled(rng, parameters), 0.03)))
    if rng.random() < 0.5:
        fields.append(("strict", maybe(rng, rng.choice([True, False, "on", 0]))))
    fields = fields[rng.random() < 0.03:]
    whole = shuffled(rng, [("type", maybe(rng, "function", 0.03)), ("function", maybe(rng, shuffled(rng, fields), 0.03))])
    return {"kind": "schema", "schema": maybe(rng, whole, 0.02)}


HINTS = ["int", "float", "str", "bool", "list", "dict", "tuple", "list[int]", "list[list[str]]", "dict[str, int]",
         "tuple[int, str]",
         "Optional[int]", "int | None", "int | float", "Union[str, list]", "Union[str, list[int]]", "Literal['a', 'b']",
         "Literal[1, 'x', None]", "Optional[Literal['u']]", "Color", "Mixed", "Any", "None", "list[Any]", "tuple[int]",
         "tuple[int, ...]",
         "set", "Thing", "Optional[Union[int, str]]", "'int'", "bytes", "Callable", "Annotated[int, 'x']", "list | tuple", "Empty"]
GIVEN = ["One", "The value (choices: [\"a\", \"b\"])", "Two lines\n            and more", "", "colon: here",
         "what (choices: [1, 2])  ",
         "tail (CHOICES: [\" x \"])", "Wide:\n            deeper: it is", "(choices: nothing)", "naïve 'q'"]


def random_function(rng):
    names = [f"a{i}" for i in range(rng.randrange(4))]
    given = [n for n in names if rng.random() < 0.97]
    rng.shuffle(given) if rng.random() < 0.2 else None
    hint = lambda: rng.choice(HINTS[:21] if rng.random() < 0.93 else HINTS)  # noqa: E731
    defaults = rng.randrange(len(names) + 1)
    hinted = lambda n, end: f"{n}: {hint()}{end}" if rng.random() < 0.98 else n + end  # noqa: E731
    parameters = [hinted(n, " = None" if i >= defaults else "") for i, n in enumerate(names)]
    parameters += ["*more"] if rng.random() < 0.02 else []
    args = "".join(f"        {n}: {rng.choice(GIVEN)}\n" for n in given)
    doc = rng.choice(["Does it.", "Does it.\n\n    At length:\n    and more.", "", "Summary  \n    over two lines", "Raises: no"])
    doc += f"\n\n    Args:\n{args}" if args or rng.random() < 0.2 else ""
    doc += rng.choice(["", "", "\n    Returns:\n        A thing: it\n    ", "\n    Raises:\n        ValueError: x\n    "])
    back = rng.choice(["", "", " -> str", " -> Thing", " -> Any", " -> list[int]"])
    deco = rng.choice(["@function_tool", "@function_tool()", "@function_tool('renamed')"])
    how = rng.choice(["def", "def", "async def"])
    body = f'    """{doc}"""\n' if rng.random() < 0.98 else ""
    return {"kind": "function", "source": f"{deco}\n{how} f({', '.join(parameters)}){back}:\n{body}    return 1\n"}


RETURNS = ["'text'", "''", "None", "5", "{'a': 'ü', 'b': [1]}", "[1, 'x']", "ToolResponse(text='t')", "('a',)", "('a', 1)",
           "('a', None)",
           "('a', True)", "('a', '2.5')", "('a', 'x')", "('a', 1, {'k': 1})", "('a', 1, None)", "('a', 1, [('k', 2)])",
           "('a', 1, 5)", "()",
           "(1, 2, 3, 4)", "({'a': 1}, 0.25)", "(ToolResponse(text='t'), 0.5)", "(None, 0)", "({'a': {1}},)", "b'bytes'", "3.5",
           "[ToolResponse(text='t')]", "(5, -1.5)", "float('inf')", "('a', float('inf'))", "True"]

ARGUMENTS = ['{}', '{"a": 1}', '{"a": 1, "b": 2}', '{"a": "x"}', '{"c": 1}', '[1]', '"x"', '5', 'null', '', '{', '{"a": }',
             "{'a': 1}",
             '{"a": 1} x', '{"a": NaN}', '{"text": "ä"}', '{"text": "日本", "n": 30}', '{"text": "ab", "n": 6}',
             '{"text": "x", "n": 17}',
             '{"how": "key"}', '{"how": "value"}', '{"how": "empty"}', '{"how": "response"}', '{"how": "image"}',
             '{"how": "four"}',
             '{"how": "other"}', '{"none": 1}', '{"a": 1e400}', '{"a": 1, "a": 2}', '\t{"a": 3}\n', '{"a": "\u0000"}', '[]',
             'true']
NAMES = ["add", "later", "repeat", "fail", "echo", "broken", "empty", "nothing", "", "Add"]


def random_call(rng):
    kwargs = rng.choice([{}, {"echo": {"create_kwargs": {"x": 1}}}, {"broken": {"create_kwargs": {"fail": 1}}}, {"echo": {}},
                         {"echo": None}, {"add": {"create_kwargs": {"x": 1}}}])
    selection = rng.choice([None, None, [], ["add", "echo"], ["echo", "nothing", "add"], ["nothing"], ["fail", "repeat", "later"]])
    return {"kind": "call", "name": rng.choice(NAMES), "arguments": rng.choice(ARGUMENTS),
            "tools_kwargs": kwargs, "tool_selection": selection, "longest": rng.choice([0, 1, 2, 7, 8, 16, 17, 256]),
            "side": rng.choice(["left", "right", "middle", "odd"])}


def random_response(rng):
    values = {k: rng.choice([None, "t", 5, ["i"], "img", {"a": 1}, [], b"b", ("x",), "long " * 20]) for k in ("text", "image",
                                                                                                              "video")
              if rng.random() < 0.6}
    return {"kind": "response", "values": {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}}


def number(rng):
    return rng.choice(["72", "7", "1,200", "-3.5", "$5", "x", "", "#### 72",
                      "the 72 and 7.", "72.", "####72", 72, None, ["72"], "0"])


RUNS = [{"status": "Finished", "stdout": "1\n", "stderr": "", "return_code": 0},
        {"status": "Finished", "stdout": "1\n", "stderr": "Traceback ü", "return_code": 1},
        {"status": "TimeLimitExceeded", "stdout": "x", "stderr": ""}, {"status": "Error"}, {"status": "Finished", "stdout": None,
                                                                                           "stderr": ""}, None, "odd", []]
FOUND = [{"document": {"contents": "Title\nbody\nmore"}, "score": 1}, {"document": {"contents": "\"T\""}, "score": 0},
         {"document": {"contents": ""}}, {"document": {"contents": " a \n\n b "}}, {"document": {}}, "odd", {"contents": "x"}]


def random_sandbox(rng):
    replies = []
    for _ in range(rng.randrange(1, 4)):
        body = {"status": rng.choice(["Success", "Failed", "SandboxError"]), "run_result": rng.choice(RUNS), "message": ""}
        if rng.random() < 0.3:
            body["compile_result"] = {"status": "Finished", "stderr": "e", "return_code": 1}
        text = json.dumps(body) if rng.random() < 0.9 else rng.choice(["{}", "[]", "[1]", "null", "no JSON", ""])
        replies.append([rng.choice([200, 200, 200, 504, 500, 404]), text])
    more = [("timeout", rng.choice([3, 1, "3"])), ("language", rng.choice(["cpp", "brainfuck", "python"]))]
    calls = [shuffled(rng, [("code", rng.choice(["print(1)", 5, "", "ü"])), *(m for m in more if rng.random() < 0.3)])
             for _ in range(rng.randrange(1, 3))]
    return {"kind": "builtin", "class": "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "create": {}, "calls": calls,
            "config": {"sandbox_fusion_url": "URL", **rng.choice([{}, {}, {"default_timeout": 4, "memory_limit_mb": 64}])},
            "replies": replies}


def random_search(rng):
    replies = []
    for _ in range(rng.randrange(1, 4)):
        result = [rng.sample(FOUND[:4], rng.randrange(4)) for _ in range(rng.randrange(3))]
        result = result if rng.random() < 0.85 else rng.choice([[[FOUND[4]]], [[FOUND[5]]], [[FOUND[6]]], {"a": 1}, None, "x"])
        text = json.dumps({"result": result}) if rng.random() < 0.9 else rng.choice(["{}", "[]", "[1]", "null", "no JSON", ""])
        replies.append([rng.choice([200, 200, 200, 503, 502, 500, 404, 400]), text])
    return {"kind": "builtin", "class": "verl.tools.search_tool.SearchTool", "create": {}, "replies": replies,
            "calls": [{"query_list": rng.choice([["a"], ["a", "ü"], [], "a", None])} for _ in range(rng.randrange(1, 3))],
            "config": {"retrieval_service_url": "URL", **({"topk": 5,
                                                           "enable_global_rate_limit": False} if rng.random() < .3 else {})}}


def random_builtin(rng):
    which = rng.random()
    if which < 0.3:
        return random_sandbox(rng)
    if which < 0.6:
        return random_search(rng)
    create = rng.choice([{}, {"ground_truth": "72"}, {"create_kwargs": {"ground_truth": "72"}}, {"create_kwargs": {}},
                         {"create_kwargs": {"ground_truth": rng.choice(["1200", "7", 72, None])}}])
    geo = which > 0.9
    return {"kind": "builtin", "class": "verl.tools.geo3k_tool.Geo3kTool" if geo else "verl.tools.gsm8k_tool.Gsm8kTool",
            "config": {}, "create": {"ground_truth": rng.choice(["72", "\\frac{1}{2}", "x^2"])} if geo else create,
            "calls": [rng.choice([{"answer": rng.choice(["0.5", "\\frac12", "72", "x^2", ""]) if geo else number(rng)}, {}])
                      for _ in range(rng.randrange(1, 4))]}


TEXTS = ["{'query': 'a b', 'results': [{'title': 'x'}, {'title': 'y'}]}", '{"query": "q", "results": []}', "nothing", "",
         '{"results": [{"title": "it\'s"}]', "results: [1]", '"query":"n" "results" : [\n1]\n']


def random_mcp_parts(rng):
    return {"kind": "mcp_parts", "class": rng.choice(["verl.tools.mcp_base_tool.MCPBaseTool",
                                                      "verl.tools.mcp_search_tool.MCPSearchTool"]),
            "parts": [[rng.choice(["text", "text", "image"]), rng.choice(TEXTS)] for _ in range(rng.randrange(4))]}


def random_interaction(rng):
    weather = rng.random() < 0.4
    said = lambda role: {"role": role, "content": rng.choice(["#### 72", "72", "#### 7", "", "no tool call",
                                                              "sunny"])}  # noqa: E731
    turns = [[said(rng.choice(["user", "assistant", "tool"])) for _ in range(rng.randrange(4))]
                   for _ in range(rng.randrange(1, 4))]
    return {"kind": "interaction", "turns": turns, "kwargs": {"name": "x", "ground_truth": rng.choice(["72", "7", None, 72])},
            "class": "verl.interactions." + ("weather_interaction.WeatherInteraction" if weather
                                             else "gsm8k_interaction.Gsm8kInteraction")}


def cases_of(kind, n, seed):
    rng = random.Random(f"{kind} {seed}")
    if kind == "returned":
        return [{"kind": kind, "value": v} for v in RETURNS]
    return [globals()[f"random_{kind}"](rng) for _ in range(n)]


# ---- both answers ----

def asked(command, cases, **env):
    lines = "".join(json.dumps(c) + "\n" for c in cases)
    p = subprocess.run(command, input=lines, capture_output=True, text=True, env={**os.environ, **env}, check=False)
    if p.returncode:
        sys.exit(f"{command}: {p.stderr[-3000:]}")
    return [json.loads(line) for line in p.stdout.splitlines()]


def verl_dir(version):
    if version == "0.9.1":
        spec = importlib.util.find_spec("verl")
        return os.environ.get("ORACLE_VERL") or (spec and pathlib.Path(next(iter(spec.submodule_search_locations))).parent)
    return os.environ.get("ORACLE_VERL_OLD") or pathlib.Path(sys.prefix, "verl-0.7.1")


def compare(kind, cases):
    directory = verl_dir("0.7.1" if kind in OLD else "0.9.1")
    verl = asked([sys.executable, __file__, "--answer", str(directory)], cases)
    ours = asked([sys.executable, str(TEST), "--answer"], cases)
    wrong = [(c, v, o) for c, v, o in zip(cases, verl, ours) if v != o]
    for c, v, o in wrong[:3]:
        print(f"{kind}: {json.dumps(c)[:1500]}\n   verl {json.dumps(v)[:1500]}\n   ours {json.dumps(o)[:1500]}")
    print(f"{kind}: {len(cases)} cases, {len(wrong)} differ")
    return len(wrong), verl


KINDS = ["schema", "function", "returned", "response", "call", "builtin", "mcp_parts", "interaction"]
IN_FIXTURE = {"schema": 25, "function": 40, "response": 12, "call": 60, "builtin": 40, "mcp_parts": 8, "interaction": 10}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--fixtures")
    parser.add_argument("--answer")
    args = parser.parse_args()
    if args.answer:
        return answer(args.answer)
    n_wrong, lines = 0, []
    for kind in KINDS:
        wrong, verl = compare(kind, kept := cases_of(kind, IN_FIXTURE.get(kind, 0), "fixture"))
        n_wrong += wrong
        lines += [json.dumps({"case": c, "verl": v}, ensure_ascii=False)
                             for c, v in zip(kept, verl) if "geo3k" not in str(c.get("class"))]
        n_wrong += compare(kind, cases_of(kind, args.batches, "more"))[0]
    if args.fixtures:
        pathlib.Path(args.fixtures).mkdir(parents=True, exist_ok=True)
        pathlib.Path(args.fixtures, "tools.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{n_wrong} differ")
    return n_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
