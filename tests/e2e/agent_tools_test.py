"""Tools and interactions as verl has them: schemas, texts, rewards and truncation on the cases of tests/fixtures/agent/tools.jsonl,
whose answers are verl's own (tools/oracle_tools.py; 0.9.1, and 0.7.1 for what it removed); the examples.

  agent_tools_test.py --answer     cases line by line from stdin, verlc's answers to stdout: for the oracle"""

import asyncio
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
sys.path.insert(0, str(HERE.parents[2] / "python"))
os.environ.setdefault("VERLC", os.path.abspath("build/release/verlc"))

FIXTURES = HERE.parents[1] / "fixtures" / "agent"
HEAD, FUNCTIONS, CLASSES = ((FIXTURES / f"{name}.py").read_text() for name in ("function_head", "call_functions", "call_classes"))
FILES = {}


# ---- a service that answers what a case says ----

class Service(BaseHTTPRequestHandler):
    """POST /N: the N-th reply of a case, (status, body); what was asked is kept."""

    replies, asked = [], []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Service.asked.append(json.loads(body))
        status, text = Service.replies[min(len(Service.asked), len(Service.replies)) - 1]
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def service(replies):
    Service.replies, Service.asked = replies, []
    if "url" not in FILES:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        FILES["url"] = f"http://127.0.0.1:{server.server_address[1]}/x"
    return FILES["url"]


def source_file(text, end=".py"):
    """A file with this text, the same for the same text."""
    if (text, end) not in FILES:
        FILES.setdefault("dir", tempfile.mkdtemp(prefix="verlc-tools-"))
        path = pathlib.Path(FILES["dir"], f"case{len(FILES)}{end}")
        path.write_text(text)
        FILES[text, end] = str(path)
    return FILES[text, end]


# ---- one answer; the same code asks verl and the stand-in ----

def tried(f):
    """The value, or the class and text of what was raised."""
    try:
        return f()
    except Exception as error:
        text = re.sub(r"errors\.pydantic\.dev/[0-9.]+/", "errors.pydantic.dev/", str(error))
        return {"raised": type(error).__name__, "text": text}


def schema(case):
    from verl.tools.schemas import OpenAIFunctionToolSchema
    dump = lambda **how: OpenAIFunctionToolSchema.model_validate(case["schema"]).model_dump(**how)  # noqa: E731
    return tried(lambda: json.dumps([dump(exclude_unset=True, exclude_none=True), dump()]))


def response(case):
    from verl.tools.schemas import ToolResponse
    return tried(lambda: [str(ToolResponse(**case["values"])), ToolResponse(**case["values"]).is_empty()])


def function(case):
    """The schema of a function's source; of a refusal its class alone."""
    from verl.tools import function_tool
    function_tool.FUNCTION_TOOL_REGISTRY.clear()
    found = tried(lambda: [t.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
                           for t in function_tool.load_function_tools_from_path(source_file(HEAD + case["source"]))])
    if isinstance(found, dict) and found["raised"] != "ValidationError":
        found.pop("text")
    return json.dumps(found)


def returned(case):
    from verl.tools.function_tool import normalize_function_tool_return
    from verl.tools.schemas import ToolResponse  # noqa: F401
    value = eval(case["value"], {"ToolResponse": ToolResponse})  # the fixture's own expressions

    def told():
        one, reward, metrics = normalize_function_tool_return(value)
        return [str(one), repr(reward), repr(metrics)]
    return tried(told)


def made(name, config, described=None):
    """A built-in tool, or a class of verl.interactions."""
    module, _, cls = name.rpartition(".")
    found = getattr(__import__(module, fromlist=[cls]), cls)
    if ".interactions." in name:
        return found(config)
    from verl.tools.schemas import OpenAIFunctionToolSchema
    return found(config, OpenAIFunctionToolSchema.model_validate(described or {
        "type": "function", "function": {"name": "t", "description": "d", "parameters": {
            "type": "object", "properties": {}, "required": []}}}))


async def life(tool, create, calls):
    instance, _ = await tool.create(**create)
    out = []
    for parameters in calls:
        one, reward, _ = await tool.execute(instance, parameters)
        out.append([one.text, reward])
    await tool.release(instance)
    return out


def builtin(case):
    """A life of a built-in tool with several calls; of one that asks a service also what was asked."""
    config, replies = dict(case["config"]), case.get("replies")
    for key in ("sandbox_fusion_url", "retrieval_service_url"):
        if key in config:
            config[key] = service([tuple(r) for r in replies])
    time_sleep, time.sleep = time.sleep, lambda s: None
    try:
        out = tried(lambda: asyncio.run(life(made(case["class"], config), case["create"], case["calls"])))
    finally:
        time.sleep = time_sleep
    text = json.dumps([out, Service.asked if replies else None])
    return text.replace(FILES.get("url", "\0"), "URL")


def mcp_parts(case):
    class Part:
        def __init__(self, kind, text):
            self.type, self.text = kind, text
    return tried(lambda: made(case["class"], {})._parse_tool_result([Part(*p) for p in case["parts"]]))


def interaction(case):
    async def turns():
        it = made(case["class"], {"name": "x"})
        await it.start_interaction("id", **case["kwargs"])
        return [await it.generate_response("id", m, **case["kwargs"]) for m in case["turns"]]
    return tried(lambda: asyncio.run(turns()))


KINDS = {f.__name__: f for f in (schema, response, function, returned, builtin, mcp_parts, interaction)}


def call(case):
    """A call through the helper's own code; verl's answer is ToolAgentLoop._call_tool's."""
    from verlc_helpers import tools
    key = case["longest"], case["side"]
    if key not in FILES:
        from verl.tools import function_tool
        function_tool.FUNCTION_TOOL_REGISTRY.clear()
        function_tool.LOADED.clear()
        FILES[key] = tools.Tools({"function_tool_path": source_file(FUNCTIONS), "max_response_length": case["longest"],
                                  "truncate_side": case["side"], "tool_config_path": class_file(CLASSES)})
    t = FILES[key]
    request = {"op": "call", "episode": "e", **{k: case[k] for k in ("name", "arguments", "tools_kwargs", "tool_selection")}}

    async def one():
        t.episodes.end("e")
        return await t.call(request, t.episodes.of(request))
    reply = asyncio.run(one())
    return [reply["text"], reply["reward"]]


def class_file(text):
    """A YAML of the classes of a source."""
    name = pathlib.Path(source_file(text)).stem
    sys.path.insert(0, FILES["dir"])
    names = re.findall(r"^class (\w+)\(BaseTool\)", text, re.MULTILINE)
    return source_file("tools:\n" + "".join(f"  - class_name: {name}.{n}\n    config: {{type: native}}\n" for n in names), ".yaml")


def ours(case):
    return plain((call if case["kind"] == "call" else KINDS[case["kind"]])(case))


def plain(answer):
    """As JSON has it, without the name that a file was given."""
    return json.loads(re.sub(r"_verl_function_tools_[\w-]+?_case\d+_py", "MODULE", json.dumps(answer)))


def stand_in():
    """The stand-in, though a verl may be installed."""
    from verlc_helpers import verl_package
    sys.path.insert(0, verl_package.STANDIN)


# ---- the test ----

ROOT = HERE.parents[2]


def helper(requests, path="", **init):
    """Answers of a tool process, or the text with which it refuses to start."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{path}"}
    p = subprocess.run([sys.executable, "-m", "verlc_helpers.tools", json.dumps(init)],
                       input="".join(json.dumps(r) + "\n" for r in requests),
                       capture_output=True, text=True, env=env, timeout=60, cwd=tempfile.gettempdir(), check=False)
    replies = [json.loads(line) for line in p.stdout.splitlines() if line.startswith("{")]
    return [r.get("ok", r) for r in replies] if p.returncode == 0 else p.stderr.splitlines()[-1]


def calls(name, *arguments, **more):
    return [{"op": "call", "episode": "e", "name": name, "arguments": json.dumps(a), **more} for a in arguments]


def yaml_of(cls, **config):
    entry = {"class_name": cls, "config": {"type": "native", **config}, "tool_schema": {"type": "function", "function": {
        "name": "t", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}}}}
    return source_file(json.dumps({"tools": [entry]}), ".yaml")


def examples(test):
    asked = [{"expression": e} for e in ("(12 + 3) * 4", "0.1+0.2", "-7 // 2", "1,200 * 2", "2 ** 0.5", "1 / 0", "9 ** 9 ** 9",
                                         "x", "__import__")]
    texts = [r["text"] for r in helper(calls("calculate", *asked), function_tool_path=str(ROOT / "examples/calculator_tool.py"))]
    test("examples/calculator_tool.py", texts[:5] == ["60", "0.3", "-4", "2400", "1.41421356237"] and all(
        t.startswith("Error executing tool 'calculate': ") for t in texts[5:]), texts)
    out = helper([{"op": "describe"}, *calls("calculate", asked[0], asked[0], asked[5])],
                 tool_config_path=str(ROOT / "examples/calculator_tool.yaml"))
    test("examples/calculator_tool.yaml", [(r["text"], r["reward"]) for r in out[1:3]] == [("60", 0), ("60", -0.05)]
         and out[1]["set"] == {"calculated": {"(12 + 3) * 4": "60"}} and out[3]["status"] == "error", out)
    one = helper([{"op": "describe"}], function_tool_path=str(ROOT / "examples/calculator_tool.py"))
    test("both describe the same tool", one[0]["tools"] == [t | {"function": True} for t in out[0]["tools"]], one)


def refused(test, name, words, **init):
    """A tool process does not start with these files, and says why."""
    from verlc_helpers import tools
    from verlc_helpers.protocol import HelperError
    try:
        tools.Tools(init)
        test(name, False, "it loads")
    except HelperError as error:
        test(name, words in str(error) and error.code == "INPUT", error)


def refusals(test):
    refused(test, "ImageZoomInTool is refused by name", "ImageZoomInTool gives images",
            tool_config_path=yaml_of("verl.tools.image_zoom_in_tool.ImageZoomInTool"))
    entry = {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp", "rate_limit": 1},
             "mcp": {"mcp_servers_config_path": "/nowhere.json"}}
    if not importlib.util.find_spec("mcp"):
        refused(test, "MCP tools say what to install", f"need the Python package mcp: '{sys.executable} -m pip install mcp'",
                tool_config_path=source_file(json.dumps({"tools": [entry]}), ".yaml"))
    refused(test, "a class that is not there", "No module named 'no'", tool_config_path=yaml_of("no.such.Class"))
    refused(test, "a service without its address", "Configuration must include 'retrieval_service_url'",
            tool_config_path=yaml_of("verl.tools.search_tool.SearchTool"))
    both = str(ROOT / "examples/calculator_tool.")
    refused(test, "a name in both files", "tool 'calculate'", tool_config_path=both + "yaml", function_tool_path=both + "py")
    for name, broken in (("a key twice", "tools: []\ntools: []\n"), ("no mapping", "- 1\n"), ("no YAML", "a: ["),
                         ("no type", "tools: [{class_name: a.B, config: {}}]"), ("a reference to nothing", "tools: ${x}")):
        path = source_file(broken, ".yaml")
        refused(test, f"a YAML file with {name}", f"tool_config_path={path}: ", tool_config_path=path)


WHERE = '''
import verl.tools.schemas, verl.tools.gsm8k_tool
from verl.tools.function_tool import function_tool
@function_tool
def where():
    """Files."""
    return {"schemas": verl.tools.schemas.__file__, "gsm8k": verl.tools.gsm8k_tool.__file__}
'''


def installed(test):
    """A verl that is installed is used, and what it has no more comes from the stand-in."""
    standin = ROOT / "python" / "verlc_standin" / "verl"
    site = pathlib.Path(tempfile.mkdtemp(prefix="verlc-verl-"))
    for name in ("__init__", "tools/__init__", "tools/model", "tools/schemas", "tools/base_tool", "tools/function_tool",
                 "tools/function_schema", "utils/__init__", "utils/rollout_trace"):
        (site / "verl" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "verl" / f"{name}.py").write_text((standin / f"{name}.py").read_text())
    (site / "verl" / "tools" / "tool_registry.py").write_text("raise ImportError('of another version')")
    files, scored = helper(calls("where", {}) + calls("t", {"answer": "72"},
                                                      tools_kwargs={"t": {"create_kwargs": {"ground_truth": "72"}}}),
                           str(site), tool_config_path=yaml_of("verl.tools.gsm8k_tool.Gsm8kTool"),
                           function_tool_path=source_file(WHERE),
                           max_response_length=1000)
    files = json.loads(files["text"])
    test("an installed verl is used, the stand-in for what it lacks", files["schemas"].startswith(str(site))
         and files["gsm8k"].startswith(str(standin)) and scored["text"] == "Current parsed answer='72' reward=1.0", (files,
                                                                                                                     scored))
    shutil.rmtree(site)


def sandbox(test):
    """Programs of the policy in verlc's own sandbox, where there is one."""
    code = ["print(1 + 1)", "1 / 0", "while True: pass", "open('/etc/shadow')"]
    path = yaml_of("verl.tools.sandbox_fusion_tools.SandboxFusionTool", default_timeout=1)
    out = helper(calls("t", *({"code": c} for c in code), {"code": "x", "language": "cpp"}), tool_config_path=path,
                 max_response_length=1000)
    if isinstance(out, str) and "SandboxError" in out:
        return print(f"skipped: {out}")
    texts = [r["text"] for r in out]
    test("a program runs in the sandbox",
         texts[0] == "2\n" and "ZeroDivisionError" in texts[1] and texts[2] == texts[4] == "no stdout here"
         and "Error" in texts[3] and out[0]["reward"] is None, out)


def main():
    from verlc_test import Tests
    cases = [json.loads(line) for line in (FIXTURES / "tools.jsonl").read_text().splitlines()]
    test = Tests()
    for kind in dict.fromkeys(c["case"]["kind"] for c in cases):
        asked = [c for c in cases if c["case"]["kind"] == kind]
        wrong = [c for c in asked if ours(c["case"]) != c["verl"]]
        test(f"{kind}: {len(asked)} cases as verl", not wrong,
             f"{len(wrong)} differ; {wrong[:1]}, ours {wrong and ours(wrong[0]['case'])}")
    examples(test)
    refusals(test)
    installed(test)
    sandbox(test)
    test.end()


if __name__ == "__main__":
    stand_in()
    if sys.argv[1:] == ["--answer"]:
        for line in sys.stdin:
            print(json.dumps(ours(json.loads(line))), flush=True)
    else:
        main()
