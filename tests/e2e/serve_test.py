"""`verlc serve` by plain HTTP: answers and streams of each route, log-probs equal to `generate`'s, who may ask, refusals, hostile
clients, the end. tools/oracle_serve.py has the real clients of OpenAI and Anthropic."""

import concurrent.futures
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Tests, run, waited  # noqa: E402

test = Tests()
ONE = [{"role": "user", "content": "1 + 1?"}]


class Server:
    def __init__(self, model, *args, env=None):
        self.process = subprocess.Popen(
            [VERLC, "serve", model, "--port", "0", "--dtype", "fp32", "--max-num-seqs", "16", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENV, **(env or {})},
        )
        self.line = json.loads(self.process.stdout.readline() or self.process.stderr.read())
        self.port = urllib.parse.urlparse(self.line["url"]).port

    def connect(self, timeout=30):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, path, body=None, method=None, headers=None, connection=None):
        """Status, headers, the answer as JSON (text where it is none)."""
        c = connection or self.connect()
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        c.request(method or ("GET" if body is None else "POST"), path, body=data, headers=headers or {})
        r = c.getresponse()
        text = r.read()
        if not connection:
            c.close()
        try:
            return r.status, r.headers, json.loads(text)
        except ValueError:
            return r.status, r.headers, text.decode()

    def stream(self, path, body):
        """The events of a stream: (name, data)."""
        _, headers, text = self.ask(path, {**body, "stream": True})
        test("a stream's type", headers["Content-Type"].startswith("text/event-stream"), str(text)[:300])
        out = []
        for event in text.split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in event.split("\n") if not line.startswith(":"))
            out.append((fields.get("event"), fields["data"]))
        return out

    def raw(self, data, wait=3):
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as s:
            try:
                s.sendall(data)
                return s.recv(65536)
            except OSError:
                return b""

    def idle(self):
        """Nothing is open, after what was left has been noticed."""
        none = "verlc_requests_open 0\n", "verlc_samples_running 0\n", "verlc_kv_blocks_used 0\n"

        def is_idle():
            text = self.ask("/metrics")[2]
            return all(line in text for line in none)

        return waited(is_idle)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def answers(s, model):
    chat = {
        "messages": ONE,
        "max_tokens": 6,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "n": 2,
        "ignore_eos": True,
    }
    status, _, a = s.ask("/v1/chat/completions", chat)
    ids = [c["token_ids"] for c in a["choices"]]
    logp = [[t["logprob"] for t in c["logprobs"]["content"]] for c in a["choices"]]
    request = {"ids": a["prompt_token_ids"], "seed": 7, "n": 2, "max_tokens": 6, "ignore_eos": True}
    want = [
        json.loads(x)
        for x in run("generate", "--model", model, "--dtype", "fp32", input=json.dumps(request) + "\n").stdout.split("\n")
        if x
    ]
    test(
        "a chat has generate's ids and log-probs",
        status == 200
        and ids == [w["ids"] for w in want]
        and logp == [w["logp"] for w in want]
        and [c["message"]["content"] for c in a["choices"]] == [w["text"] for w in want],
        str(a),
    )
    test(
        "log-probs of the most probable",
        all(
            len(t["top_logprobs"]) == 2 and t["top_logprobs"][0]["logprob"] >= t["logprob"] - 1e-6
            for c in a["choices"]
            for t in c["logprobs"]["content"]
        ),
    )
    test("usage", a["usage"]["completion_tokens"] == 12 and a["usage"]["prompt_tokens"] == len(a["prompt_token_ids"]))
    events = s.stream("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})
    chunks = [json.loads(d) for _, d in events[:-1]]
    of = [[c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == i] for i in range(2)]
    test(
        "its stream, put together, is the same",
        events[-1][1] == "[DONE]"
        and chunks[-1]["usage"]["completion_tokens"] == 12
        and all(
            "".join(c["delta"].get("content", "") for c in of[i]) == want[i]["text"]
            and [t for c in of[i] for t in c.get("token_ids", [])] == ids[i]
            and of[i][-1]["finish_reason"] == "length"
            and [t["logprob"] for c in of[i] for t in (c["logprobs"] or {"content": []})["content"]] == logp[i]
            for i in range(2)
        ),
    )
    _, _, a = s.ask("/v1/completions", {"prompt": ["1 + 1", "2"], "max_tokens": 3, "temperature": 0, "logprobs": 1})
    test("completions", [c["index"] for c in a["choices"]] == [0, 1] and len(a["choices"][1]["logprobs"]["tokens"]) == 3)
    text = "".join(
        json.loads(d)["choices"][0]["text"]
        for _, d in s.stream("/v1/completions", {"prompt": "1 + 1", "max_tokens": 3, "temperature": 0})[:-1]
    )
    test("a completion's stream", text == a["choices"][0]["text"])
    word = a["choices"][0]["logprobs"]["tokens"][1]
    _, _, b = s.ask("/v1/completions", {"prompt": "1 + 1", "max_tokens": 3, "temperature": 0, "stop": [word]})
    test("stop", b["choices"][0]["finish_reason"] == "stop" and word not in b["choices"][0]["text"], str(b))
    message = {"model": "m", "messages": ONE, "max_tokens": 4, "temperature": 0, "system": "Be."}
    status, _, a = s.ask("/v1/messages?beta=true", message)
    test("a message", status == 200 and a["stop_reason"] == "max_tokens" and a["content"][0]["type"] == "text", str(a))
    events = [(n, json.loads(d)) for n, d in s.stream("/v1/messages", message)]
    test(
        "its stream",
        all(n == d["type"] for n, d in events)
        and "".join(d["delta"]["text"] for n, d in events if n == "content_block_delta") == a["content"][0]["text"]
        and events[0][0] == "message_start"
        and events[-1][0] == "message_stop",
        str(events),
    )
    del message["max_tokens"]
    test(
        "count_tokens",
        s.ask("/v1/messages/count_tokens", message)[2]
        == {"input_tokens": a["usage"]["input_tokens"] + a["usage"]["cache_read_input_tokens"]},
    )
    model_row = s.ask("/v1/models")[2]["data"][0]
    test("models", model_row["id"] == s.line["model"] and model_row["max_model_len"] == 4096)
    c = s.connect()
    test(
        "one connection, several requests",
        all(s.ask("/v1/completions", {"prompt": "1", "max_tokens": 1}, connection=c)[0] == 200 for _ in range(3))
        and c.sock is not None,
    )
    c.close()
    long = [{"role": "user", "content": "1 + 2 = 3, " * 40}]
    s.ask("/v1/chat/completions", {"messages": long, "max_tokens": 1})
    u = s.ask("/v1/chat/completions", {"messages": long, "max_tokens": 1})[2]["usage"]
    test("a prompt that was seen is cached", u["prompt_tokens_details"]["cached_tokens"] >= u["prompt_tokens"] - 32, str(u))


def refusals(s):
    chat, message = "/v1/chat/completions", {"model": "m", "messages": ONE, "max_tokens": 4}
    bad = [
        (chat, {"messages": ONE, "response_format": {"type": "json_object"}}),
        (chat, {"messages": ONE, "unknown": 1}),
        (chat, {"messages": ONE, "max_tokens": 10**6}),
        (chat, {"messages": ONE, "temperature": "hot"}),
        (chat, {"messages": []}),
        (chat, {"messages": [1]}),
        (chat, {"messages": ONE, "stream": 1}),
        (chat, {"messages": ONE, "n": 1000}),
        (chat, {"messages": ONE, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (chat, "{"),
        (chat, "[]"),
        (chat, ""),
        (chat, '{"messages": "\xff"}'.encode("latin1")),
        (chat, "[" * 100000),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [511, 10**6]}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": "x" * 9000}),
        ("/v1/completions", {"prompt": "1", "stop": [""]}),
        ("/v1/messages", {"messages": ONE}),
        ("/v1/messages", {**message, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("/v1/messages", {**message, "tool_choice": {"type": "any"}}),
    ]
    for path, body in bad:
        status, _, a = s.ask(path, body, method="POST")
        test(
            f"refused: {path} {str(body)[:60]}",
            status == 400 and a["error"]["message"] and a["error"]["type"] == "invalid_request_error",
            f"{status} {a}",
        )
    test(
        "no route, no session",
        [s.ask(p, {})[0] for p in ("/v1/other", "/sessions/a/v1/chat/completions", "/", "/v1/models/x")] == [404] * 4,
    )
    test(
        "methods",
        [s.ask(chat, method=m)[0] for m in ("GET", "PUT", "DELETE", "OPTIONS")] == [405] * 4
        and s.ask("/v1/models", {})[0] == 405,
    )
    test(
        "another host, a browser's page",
        s.ask("/v1/models", headers={"Host": "evil.example"})[0] == 403
        and s.ask(chat, {"messages": ONE}, headers={"Origin": "http://evil.example"})[0] == 403,
    )


def tokens(s):
    """vLLM's /tokenize and /detokenize, and stop_token_ids."""
    status, _, a = s.ask("/tokenize", {"prompt": "1 + 1?", "add_special_tokens": False, "return_token_strs": True})
    test(
        "a text to ids and back",
        status == 200
        and a["count"] == len(a["tokens"]) == len(a["token_strs"]) > 0
        and a["max_model_len"] == s.ask("/v1/models")[2]["data"][0]["max_model_len"]
        and s.ask("/detokenize", {"tokens": a["tokens"]})[2] == {"prompt": "1 + 1?"},
        str(a),
    )
    body = {"messages": ONE, "max_tokens": 4, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    chat = s.ask("/v1/chat/completions", body)[2]
    test(
        "a conversation's ids are those of a chat",
        s.ask("/tokenize", {"messages": ONE})[2]["tokens"] == chat["prompt_token_ids"],
    )
    drawn = chat["choices"][0]["token_ids"]
    body = {"prompt": chat["prompt_token_ids"], "max_tokens": 4, "seed": 1}
    body |= {"stop_token_ids": [drawn[0]], "ignore_eos": True, "return_token_ids": True}
    a = s.ask("/v1/completions", body)[2]
    test(
        "a stop id ends the answer",
        a["choices"][0]["token_ids"] == drawn[:1] and a["choices"][0]["finish_reason"] == "stop",
        str(a),
    )
    bad = [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 1}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": ONE, "continue_final_message": True}),
        ("/tokenize", {"prompt": "a", "other": 1}),
        ("/tokenize", "["),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**12]}),
        ("/v1/completions", {"prompt": "1", "stop_token_ids": [-1]}),
        ("/v1/completions", {"prompt": "1", "stop_token_ids": [1] * 17}),
        ("/v1/completions", {"prompt": "1", "stop_token_ids": 1}),
    ]
    test("refused: tokens", [s.ask(p, b)[0] for p, b in bad] == [400] * len(bad), str([s.ask(p, b) for p, b in bad]))


def hostile(s):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = json.dumps({"messages": ONE, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    early = [head + b"Content-Length: %d\r\n\r\n" % len(body) + body] * 8
    test("clients that leave while they are answered", all(s.raw(e, 60).startswith(b"HTTP/1.1 200") for e in early) and s.idle())
    with socket.create_connection(("127.0.0.1", s.port)) as c:
        c.sendall(early[0].replace(b'"stream": true', b'"stream":false'))
        time.sleep(0.1)
    test("and before they are", s.idle())
    big = s.raw(head + b"Content-Length: 10485760\r\n\r\n" + b"x" * 10485760)
    test("10 MB", big == b"" or b" 413 " in big or b" 400 " in big, str(big[:80]))
    for data in (
        b"\x00" * 4096,
        b"GET " + b"/" * 70000,
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: x\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"X: " + b"y" * 70000 + b"\r\n\r\n",
        early[0] + early[0],
    ):
        s.raw(data, 0.1)
    slow = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(100)]
    for c in slow:
        c.sendall(head[:40])
    flood = []
    for _ in range(1500):
        try:
            flood.append(socket.create_connection(("127.0.0.1", s.port), timeout=1))
        except OSError:
            break
    status = s.ask("/v1/chat/completions", {"messages": ONE, "max_tokens": 2})[0]
    test(
        "slow senders and a flood of connections: others are answered", status == 200 and s.process.poll() is None, str(status)
    )
    for c in slow + flood:
        c.close()
    test("nothing stays open", s.idle())
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        got = list(
            pool.map(
                lambda i: s.ask("/v1/chat/completions", {"messages": ONE, "max_tokens": 8, "temperature": 0})[2], range(24)
            )
        )
    test("24 at a time, each as alone", len({g["choices"][0]["message"]["content"] for g in got}) == 1)


def endings(model):
    s = Server(model, "--token", "--max-num-seqs", "1", "--max-queue", "0", "--name", "tiny", env={"VERLC_API_KEY": "secret"})
    key = {"Authorization": "Bearer secret"}
    test(
        "a key",
        s.line == {"url": s.line["url"], "model": "tiny", "api_key": "secret"}
        and s.ask("/v1/models")[0] == 401
        and s.ask("/v1/models", headers={"x-api-key": "wrong"})[0] == 401
        and s.ask("/v1/models", headers={"x-api-key": "secret"})[0] == 200
        and s.ask("/v1/models", headers=key)[0] == 200
        and s.ask("/health")[2] == {"status": "ok"},
    )
    for most in (150, 600, 2400):  # more where it had been answered before the other one came
        c = s.connect(120)
        c.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({"messages": ONE, "max_tokens": most, "ignore_eos": True, "stream": True}),
            key,
        )
        r = c.getresponse()
        r.read(20)
        status, headers, a = s.ask("/v1/messages", {"messages": ONE, "max_tokens": 1}, headers=key)
        if status == 429:
            break
        r.read()
    test(
        "429 when it is full",
        status == 429 and headers["Retry-After"] == "1" and a["error"]["type"] == "rate_limit_error",
        str(a),
    )
    s.process.send_signal(signal.SIGTERM)
    rest = r.read().decode()
    test("SIGTERM: what is open is answered first", rest.endswith("data: [DONE]\n\n") and s.process.wait(120) == 0, rest[-200:])
    p = run("serve", model, "--tool-parser", "nothing", check=False)
    test.refused("an unknown tool parser", p, 2, "hermes")
    test.refused("no such model", run("serve", "/nowhere", check=False), 3, "/nowhere")
    test.refused("no model", run("serve", check=False), 2, "MODEL")


def plans(model):
    """--plan: the KV cache that the memory leaves, halves of it on two ranks, a GPU that is too small; nothing listens."""
    gib = []
    for ranks in 1, 2:
        out = run("serve", model, "--plan", "--gpu", "80GB", "--tensor-parallel-size", ranks).stdout
        rows = {line[:22].strip(): line[22:].split()[0] for line in out.splitlines()[1:5]}
        test(f"--plan, {ranks} together: a table", set(rows) == {"weights", "KV cache", "activations", "device"} and
             "256.0 samples of full length" in out and ("2 ranks have the model together" in out) == (ranks == 2), out)
        gib.append(float(rows["KV cache"]))
    test("--plan: each of two ranks has half of the KV cache", gib[0] == 2 * gib[1] > 0, gib)
    p = run("serve", model, "--plan", "--gpu", "1MB", check=False)
    test("--plan: what does not fit", p.returncode == 4 and "does not fit: a larger --tensor-parallel-size" in p.stdout, p)
    p = run("serve", model, "--plan", "--gpu", "80GB", "--tensor-parallel-size", 16, check=False)
    test.refused("--plan: more ranks than heads", p, 3, "unsupported --tensor-parallel-size 16 of this model")
    test.refused("--gpu without --plan", run("serve", model, "--gpu", "80GB", check=False), 2, "--gpu goes with --plan")


def main():
    with tempfile.TemporaryDirectory() as d:
        model = pathlib.Path(d) / "model"
        run("model", "init", "--preset", "tiny", "--out", model, "--seed", "1")
        plans(model)
        s = Server(model)
        try:
            answers(s, model)
            refusals(s)
            tokens(s)
            hostile(s)
        finally:
            test("it ends at SIGTERM", s.end() == 0, s.process.stderr.read()[-500:])
        endings(model)
    test.end()


main()
