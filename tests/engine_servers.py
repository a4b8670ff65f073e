"""Servers that speak the interfaces of vLLM, SGLang and TensorRT-LLM as rollout.engine_url uses them, on `verlc serve`: what they
draw has the log-probs of the weights that they were last told to read.

Written from vLLM 0.33's entrypoints/openai/completion/protocol.py and entrypoints/serve/dev, SGLang 0.5.23's
srt/managers/io_struct.py and srt/entrypoints/http_server.py, TensorRT-LLM's serve/openai_protocol.py. Keys that such a server does
not know are refused, as theirs are."""

import http.server
import json
import subprocess
import threading
import urllib.error
import urllib.request

from verlc_test import ENV, VERLC

OWNERS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
COMPLETION = {"model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids",
              "ignore_eos", "seed", "n", "logprobs", "stream"}
GENERATE = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"}
SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos",
            "no_stop_trim", "sampling_seed"}


class Refused(Exception):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Server:
    """kind: one of OWNERS. spoil(answer, number of the request): changes what is answered, or raises; owner: of /v1/models."""

    def __init__(self, kind, model, spoil=None, owner=None, max_len=None):
        self.kind, self.spoil, self.max_len = kind, spoil, max_len
        self.owner = owner or OWNERS[kind]
        self.n, self.updates, self.calls, self.serve, self.lock = 0, [], [], None, threading.Lock()
        self.load(model)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.handle(self, None)

            def do_POST(self):
                outer.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def load(self, model):
        self.stop_serve()
        command = [VERLC, "serve", str(model), "--port", "0", "--device", "cpu", "--dtype", "float32"]
        self.serve = subprocess.Popen(command, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        told = json.loads(self.serve.stdout.readline())
        self.backend, self.model = told["url"], told["model"]

    def stop_serve(self):
        if self.serve:
            self.serve.kill()
            self.serve.wait()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.close()

    def close(self):
        self.stop_serve()
        self.http.shutdown()
        self.http.server_close()

    def handle(self, h, body):
        with self.lock:
            self.calls.append(h.path)
        try:
            status, answer = 200, self.answer(h.path, body)
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
        except ConnectionAbortedError:  # a server that dies says nothing
            h.connection.close()
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            h.send_response(status)
            h.send_header("Content-Length", str(len(data)))
            h.end_headers()
            h.wfile.write(data)
        except OSError:
            pass

    def answer(self, path, body):
        if path == "/v1/models":
            card = {"id": "policy", "object": "model", "owned_by": self.owner}
            return {"object": "list", "data": [{**card, "max_model_len": self.max_len} if self.max_len else card]}
        if path == "/generate" and self.kind == "sglang":
            return self.spoiled(self.generate(body))
        if path == "/v1/completions" and self.kind != "sglang":
            return self.spoiled(self.completion(body))
        return self.update(path, body)

    def update(self, path, body):
        if self.kind == "vllm" and path == "/collective_rpc":
            if body["method"] != "reload_weights":
                raise Refused(500, "no such method")
            self.take(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if self.kind == "vllm" and path == "/reset_prefix_cache":
            return {"success": True}
        if self.kind == "sglang" and path == "/update_weights_from_disk":
            self.take(body["model_path"])
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        raise Refused(404, "Not Found")

    def take(self, path):
        with self.lock:
            self.updates.append(path)
            self.load(path)

    def spoiled(self, answer):
        with self.lock:
            self.n += 1
            n = self.n
        return self.spoil(answer, n) if self.spoil else answer

    def draw(self, body):
        """The end tokens are the model's, which `verlc serve` has by itself."""
        assert set(body.pop("stop_token_ids")) == {457}, body
        request = urllib.request.Request(self.backend + "/completions", json.dumps({**body, "model": self.model}).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode()) from error

    def completion(self, body):
        own = {"return_token_ids"} if self.kind == "vllm" else {"detokenize"}
        if unknown := set(body) - COMPLETION - own:
            raise Refused(400, f"Extra inputs are not permitted: {sorted(unknown)}")
        if body["model"] != "policy":
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        asked = {k: v for k, v in body.items() if k not in ("detokenize",)}
        answer = self.draw({**asked, "return_token_ids": True, "logprobs": max(1, body["logprobs"])})
        if not body.get("return_token_ids") and body.get("detokenize", True):
            del answer["choices"][0]["token_ids"]
        return answer

    def generate(self, body):
        s = body["sampling_params"]
        if unknown := (set(body) - GENERATE) | (set(s) - SAMPLING):
            raise Refused(400, f"unknown: {sorted(unknown)}")
        answer = self.draw({"prompt": body["input_ids"], "max_tokens": s["max_new_tokens"], "temperature": s["temperature"],
                            "top_p": s["top_p"], "top_k": s["top_k"], "min_p": s["min_p"], "logprobs": 1, "return_token_ids": True,
                            "repetition_penalty": s["repetition_penalty"], "stop_token_ids": s["stop_token_ids"],
                            "ignore_eos": s["ignore_eos"], "seed": s["sampling_seed"]})
        c = answer["choices"][0]
        pairs = [[p, t, None] for p, t in zip(c["logprobs"]["token_logprobs"], c["token_ids"])]
        return {"text": c["text"], "output_ids": c["token_ids"], "meta_info": {
            "id": "1", "finish_reason": {"type": c["finish_reason"]}, "output_token_logprobs": pairs}}
