"""Agent loops of the user in their helper: classes in the form of verl 0.9 and of 0.6 to 0.7, with a server that draws what a
script says. Ids beside those of `verlc tokenize`; outputs that do not fit, servers that fail, many episodes at once."""

import json
import os
import pathlib
import struct
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import VERLC, Scratch, Tests, patience  # noqa: E402

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))

LOOPS = '''
from uuid import uuid4
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

class Again(AgentLoopBase):
    """verl 0.9: draws, answers as a user, draws again."""

    def __init__(self, *args, question="?", tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.question, self.given, self.tools = question, kwargs["name"], tools.tools

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        messages, metrics, request_id = list(kwargs["raw_prompt"]), {}, uuid4().hex
        ids = await self.ct_build_initial_tokens(messages)
        prompt, mask, logp = list(ids), [], []
        for turn in range(2):
            with simple_timer("generate_sequences", metrics):
                out = await self.server_manager.generate(request_id=request_id, prompt_ids=ids, sampling_params=sampling_params)
            merged, mask, logp = await self.ct_merge_assistant_token(ids, out.token_ids, mask, logp,
                                                                     assistant_logprobs=out.log_probs)
            ids = merged.token_ids
            before = messages + [{"role": "assistant", "content": "x"}]
            messages = before + [{"role": "user", "content": self.question}]
            if turn == 0:
                merged, mask, logp = await self.ct_merge_context_msg(before, messages, ids, mask, logp)
                ids = merged.token_ids
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids[len(prompt):], response_mask=mask, response_logprobs=logp,
                               num_turns=4, metrics=metrics, reward_score=0.5,
                               extra_fields={"name": self.given, "index": kwargs["index"], "live": self,
                                             "n": self.rollout_config.response_length, "tools": [t.name for t in self.tools]})

@register("older")
class Older(AgentLoopBase):
    """verl 0.6 to 0.9.0."""

    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.response_length = config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        out = await self.server_manager.generate(request_id="r", prompt_ids=prompt, sampling_params=sampling_params)
        more = await self.apply_chat_template([{"role": "user", "content": "Sure?"}], remove_system_prompt=True)
        ids = out.token_ids + more
        one = AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(out.token_ids) + [0] * len(more),
                              metrics={})
        return [one, one]

from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop

class Calling(ToolAgentLoop):
    """A state of verl's own loop is changed, as verl-recipe's loops do."""

    async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        agent_data.extra_fields.setdefault("states", []).append(state.value)
        return state

class Odd(AgentLoopBase):
    async def run(self, sampling_params, how, **kwargs):
        if how == "raise":
            raise RuntimeError("it raises")
        if how == "exit":
            raise SystemExit(3)
        if how == "none":
            return None
        if how == "image":
            await self.server_manager.generate(request_id="r", prompt_ids=[1], sampling_params={}, image_data=["i"])
        return AgentLoopOutput(prompt_ids=[1], response_ids=[1, 2], response_mask=[1, 2] if how == "mask" else [1], metrics={})
'''
YAML = '''
- name: again
  _target_: my_loops.Again
  question: Sure?
- name: odd
  _target_: my_loops.Odd
- name: calling
  _target_: my_loops.Calling
'''


class Server(BaseHTTPRequestHandler):
    """Draws [7, 8, 9] after a prompt; a temperature of 0.2 waits, 0.5 fails, 0.6 answers no tokens, 0.7 is busy once."""

    protocol_version = "HTTP/1.1"
    asked, busy = [], []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.asked.append((self.path, self.headers["Authorization"], request))
        kind, status = request["sampling_params"].get("temperature"), 200
        answer = {"token_ids": [7, 8, 9], "log_probs": [-0.5, -1, -2], "stop_reason": "completed",
                  "extra_fields": {"max_global_steps": 3}}
        if "script" in request["sampling_params"]:  # a turn each
            answer["token_ids"] = request["sampling_params"]["script"][sum(a[2]["request_id"] == request["request_id"]
                                                                           for a in Server.asked) - 1]
            answer["log_probs"] = [-0.25] * len(answer["token_ids"])
        if kind == 0.2:
            time.sleep(0.2)
        if kind == 0.5:
            status, answer = 500, {"error": "no such model"}
        if kind == 0.6:
            answer = {"token_ids": "none"}
        if kind == 0.7 and not Server.busy:
            Server.busy.append(1)
            status = 503
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class Http(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


class Helper:
    """The helper over its socket, as src/helper speaks to it."""

    def __init__(self, **init):
        self.sock, theirs = socket.socketpair()
        self.process = subprocess.Popen([sys.executable, "-m", "verlc_helpers.agent_loop"], pass_fds=[theirs.fileno()],
                                        env={**os.environ, "VERLC": VERLC, "PYTHONPATH": str(ROOT / "python"),
                                             "VERLC_HELPER_FD": str(theirs.fileno())})
        theirs.close()
        self.sock.settimeout(60)
        self.n = 0
        self.send({"id": 0, "max_reply_bytes": 1 << 26, "init": init})
        self.first = self.read()

    def send(self, message):
        data = json.dumps(message).encode()
        self.sock.sendall(struct.pack("<I", len(data)) + data)

    def exactly(self, n):
        parts = b""
        while len(parts) < n:
            parts += self.sock.recv(n - len(parts))
        return parts

    def read(self):
        return json.loads(self.exactly(struct.unpack("<I", self.exactly(4))[0]))

    def ask(self, *requests):
        """Replies in the order of the requests, which run at once."""
        ids = range(self.n + 1, self.n + 1 + len(requests))
        self.n += len(requests)
        for i, r in zip(ids, requests):
            self.send({"id": i, "timeout_s": 30, "req": r})
        replies = {r["id"]: r for r in (self.read() for _ in requests)}
        return [replies[i].get("ok", replies[i]) for i in ids]

    def close(self):
        self.sock.close()
        self.process.wait(20)


def tokenize(model, kind, *requests):
    mode = [] if kind == "--encode" else [kind]
    p = subprocess.run([VERLC, "tokenize", "--model", str(model), *mode], input="".join(json.dumps(r) + "\n" for r in requests),
                       capture_output=True, text=True, check=True)
    return [json.loads(line) for line in p.stdout.splitlines()]


PROMPT = [{"role": "user", "content": "2 + 3"}]


def run(name, temperature=1.0, **row):
    return {"op": "run", "agent_name": name, "session": "1", "sampling_params": {"temperature": temperature},
            "row": {"raw_prompt": PROMPT, "index": 4, **row}}


def main():
    test, http = Tests(), Http(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    with Scratch(n_train=1, n_test=1) as s:
        (s.dir / "my_loops.py").write_text(LOOPS)
        (s.dir / "loops.yaml").write_text(YAML)
        init = {"config": {"actor_rollout_ref": {"rollout": {"prompt_length": 512, "response_length": 256,
                                                             "multi_turn": {"max_assistant_turns": 5}}}, "data": {}},
                "token": "secret",
                "tokenizer": str(s.dir / "model"), "url": f"http://127.0.0.1:{http.server_address[1]}",
                "agent_loop_config_path": str(s.dir / "loops.yaml"),
                "function_tool_path": str(ROOT / "examples/calculator_tool.py")}
        h = Helper(**init)
        told = h.ask({"op": "describe"})[0]
        test("loops by YAML and by @register", told["loops"] == ["again", "odd", "calling",
                                                                 "older"] and told["tools"][0]["name"] == "calculate", told)
        after(test, s, h)
        called(test, s, h)
        faults(test, h)
        h.close()
        (s.dir / "bad.yaml").write_text("- name: x\n  _target_: my_loops.Nothing\n")
        bad = Helper(**init | {"agent_loop_config_path": str(s.dir / "bad.yaml")})
        test("a class that is not there", "my_loops" in bad.first.get("error", "") and bad.first["code"] == "INPUT", bad.first)
        bad.close()
    test.end()


def after(test, s, h):
    """What the two loops give."""
    model, drawn = s.dir / "model", [7, 8, 9]
    first, chat = tokenize(model, "--continuous", {"messages": PROMPT})[0]["ids"], tokenize(
        model, "--chat", {"messages": PROMPT, "add_generation_prompt": True})[0]["ids"]
    messages = PROMPT + [{"role": "assistant", "content": "x"}, {"role": "user", "content": "Sure?"}]
    added = tokenize(model, "--continuous", {"messages": messages, "n_old": 2, "ids": first + drawn})[0]
    one = h.ask(run("again"))[0].get("outputs", [{}])[0]
    n = len(added["ids"])
    test("verl 0.9: two turns", one.get("prompt_ids") == first == chat and added["n_removed"] == 0
         and one["response_ids"] == drawn + added["ids"] + drawn and one["response_mask"] == [1] * 3 + [0] * n + [1] * 3
         and one["response_logprobs"] == [-0.5, -1, -2] + [0] * n + [-0.5, -1, -2], one)
    test("its fields", one.get("reward_score") == 0.5 and one["num_turns"] == 4 and one["metrics"]["generate_sequences"] > 0
         and one["extra_fields"] == {"name": "again", "index": 4, "n": 256, "tools": ["calculate"]}, one)
    path, token, asked = Server.asked[-1]
    test("the request",
         path == "/sessions/1/generate" and token == "Bearer secret" and asked["prompt_ids"] == first + drawn + added["ids"]
         and asked["sampling_params"] == {"temperature": 1.0} and asked["request_id"] == Server.asked[-2][2]["request_id"], asked)
    two = h.ask(run("older"))[0]
    test("verl 0.6: several outputs, apply_chat_template", len(two.get("outputs", [])) == 2
         and two["outputs"][0]["prompt_ids"] == chat and two["outputs"][0]["response_logprobs"] is None, two)


def called(test, s, h):
    """verl's tool_agent, inherited from: a call, its result, an answer."""
    model = s.dir / "model"
    text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    call, answer = (r["ids"] for r in tokenize(model, "--encode", {"text": text, "add_special_tokens": False},
                                               {"text": "5", "add_special_tokens": False}))
    request = run("calling", tools_kwargs={})
    request["sampling_params"]["script"] = [call, answer]
    one = h.ask(request)[0]
    one = one["outputs"][0] if "outputs" in one else one
    tools = h.ask({"op": "describe"})[0]["tools"]
    schemas = [t["schema"] for t in tools]
    first = tokenize(model, "--continuous", {"messages": PROMPT, "tools": schemas})[0]["ids"]
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "calculate", "arguments": {"expression": "2 + 3"}}}]}
    added = tokenize(model, "--continuous", {"messages": PROMPT + [turn, {"role": "tool", "content": "5"}], "n_old": 2,
                                             "ids": first + call, "tools": schemas})[0]["ids"]
    test("a subclass of ToolAgentLoop", one.get("prompt_ids") == first and one["response_ids"] == call + added + answer
         and one["response_mask"] == [1] * len(call) + [0] * len(added) + [1] * len(answer) and one["num_turns"] == 4
         and one["extra_fields"]["states"] == ["processing_tools", "terminated"] and one["extra_fields"]["tool_rewards"] == [0.0]
         and one["response_logprobs"] == [-0.25] * len(call) + [0] * len(added) + [-0.25] * len(answer), one)


def faults(test, h):
    for how, words in (("raise", "RuntimeError: it raises (my_loops.py:"), ("exit", "SystemExit: 3"), ("none", "AttributeError"),
                       ("image", "the model reads text"), ("mask", "something else than 0 and 1"),
                       ("length", "2 response_ids, a mask of 1")):
        got = h.ask(run("odd", how=how))[0]
        test(f"a loop that goes wrong: {how}", words in got.get("crash", ""), got)
    for name, temperature, words in (("again", 0.5, "HTTP 500"), ("again", 0.6, "something else than tokens")):
        got = h.ask(run(name, temperature))[0]
        test(f"a server with {words}", words in got.get("crash", ""), got)
    test("no such loop", "not registered" in h.ask(run("nothing"))[0].get("crash", ""))
    test("a server that is busy", "outputs" in h.ask(run("again", 0.7))[0] and Server.busy)
    begun = time.monotonic()
    many = h.ask(*[run("again", 0.2) for _ in range(100)])
    test("100 episodes at once", all("outputs" in m for m in many) and time.monotonic() - begun < patience(15), many[:1])


if __name__ == "__main__":
    main()
