"""The tokenizer that verl passes to reward managers and judges: transformers' where it is installed, else one with the
methods that they call, served by `verlc tokenize`.

Invariant: what is not served raises; it is never another tokenizer's answer."""

import json
import os
import subprocess
import threading

KINDS = {"encode": [], "chat": ["--chat"], "decode": ["--decode"], "continuous": ["--continuous"], "calls": ["--tool-calls"]}
UNUSED = ("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
PROGRAM = os.environ.get("VERLC") or f"/proc/{os.getppid()}/exe"  # the helper's parent is verlc's


def open_tokenizer(directory):
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return Tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def content_of(token):
    return token["content"] if isinstance(token, dict) else token


class Tokenizer:
    def __init__(self, directory):
        self.name_or_path, self.lock, self.processes = directory, threading.Lock(), {}
        path = os.path.join(directory, "tokenizer_config.json")
        config = json.load(open(path, encoding="utf-8")) if os.path.exists(path) else {}
        for name in ("eos_token", "bos_token", "pad_token"):
            token = content_of(config.get(name))
            setattr(self, name, token)
            setattr(self, name + "_id", self.encode(token, add_special_tokens=False)[0] if token else None)

    def ask(self, kind, request, more=(), which=None):
        with self.lock:
            p = self.processes.get((kind, which))
            if p is None:
                p = self.processes[kind, which] = subprocess.Popen([PROGRAM, "tokenize", "--model", self.name_or_path,
                                                                    *KINDS[kind],
                                                             *more],
                                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            p.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            p.stdin.flush()
            line = p.stdout.readline()
        answer = json.loads(line) if line else {"error": "verlc tokenize ended without an answer"}
        if "error" in answer:
            raise ValueError(f"tokenizer of {self.name_or_path}: {answer['error']}")
        return answer

    def encode(self, text, add_special_tokens=True, **_):
        return self.ask("encode", {"text": text, "add_special_tokens": add_special_tokens})["ids"]

    def decode(self, token_ids, skip_special_tokens=False, **_):
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        return self.ask("decode", {"ids": ids, "skip_special_tokens": skip_special_tokens})["text"]

    def batch_decode(self, sequences, **options):
        return [self.decode(ids, **options) for ids in sequences]

    def apply_chat_template(self, conversation, tools=None, tokenize=True, add_generation_prompt=False, **options):
        """options: variables of the template; those of transformers' own that change how ids are given are not served."""
        variables = {k: v for k, v in options.items() if k not in UNUSED}
        answer = self.ask("chat", {**variables, "messages": list(conversation), "add_generation_prompt": add_generation_prompt,
                                   **({"tools": tools} if tools else {})})
        return answer["ids"] if tokenize else answer["text"]

    def tool_calls(self, ids, tools, form):
        """{"content", "calls": [{"id", "name", "arguments"}], "stop_token_ids"} of a turn's ids; form: multi_turn.format."""
        return self.ask("calls", {"ids": list(ids), "tools": tools}, [form], form)

    def continuous(self, request, kwargs):
        """What messages append to a stream of ids: verl's continuous tokens. kwargs: variables of the template, always the same."""
        return self.ask("continuous", request, ["--template-kwargs", json.dumps(kwargs)])
