"""Invariants 11 and 13 for a server on ranks: a model split over 2 and 3 ranks, and two copies of one, give the tokens, log-probs
and usage of one process, with an adapter too; clients that leave; ranks that are killed or stopped, with requests and without."""

import concurrent.futures
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import below
from verlc_test import ENV, ON_GPUS, VERLC, Scratch, Tests, patience, run, waited

LONG = {"prompt": "1 + 1", "max_tokens": 3000, "ignore_eos": True, "stream": True}


class Server:
    def __init__(self, model, *args):
        command = [VERLC, "serve", model, "--port", 0, "--device", "cuda" if ON_GPUS else "cpu", "--max-num-seqs", 6, *args]
        self.process = subprocess.Popen([str(a) for a in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=ENV)
        self.port = urllib.parse.urlparse(json.loads(self.process.stdout.readline())["url"]).port

    def open(self, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        c.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        return c, c.getresponse()

    def ask(self, path, body=None):
        c, r = self.open(path, body)
        text = r.read().decode()
        c.close()
        return text

    def ranks(self):
        return [pid for pid, args in below(self.process.pid).items() if args.endswith(" worker")]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=120)[1] if self.process.wait(120) == 0 else "it has failed"


def answers(s, model, *args):
    """What a server gives to eight requests at once, and what it says."""
    server = Server(model, *args)

    def chat(i):
        a = json.loads(server.ask("/v1/chat/completions", {
            "messages": [{"role": "user", "content": f"1 + {i}?"}], "max_tokens": 20 + i, "seed": i, "n": 1 + i % 3,
            "logprobs": True, "top_logprobs": i % 3, "return_token_ids": True, "ignore_eos": i % 2 == 0,
            "temperature": 0.5 * (i % 4)}))
        choices = [(c["token_ids"], c["logprobs"], c["message"], c["finish_reason"]) for c in a["choices"]]
        return choices, a["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(chat, range(8)))
    events = server.ask("/v1/completions", {**LONG, "max_tokens": 30, "seed": 1, "stop": ["7", "e"], "logprobs": 1})
    drawn = [json.loads(e[6:])["choices"] for e in events.split("\n\n") if e.startswith("data: {")]
    logp = [x for c in drawn for x in (c[0]["logprobs"] or {}).get("token_logprobs", [])]
    got.append(["".join(c[0]["text"] for c in drawn), logp])
    got.append(json.loads(server.ask("/v1/completions", {"prompt": [10**6]}))["error"]["message"])
    return got, server.end()


def check_left(test, model):
    server = Server(model, "--tensor-parallel-size", 2)
    for _ in range(3):
        c, r = server.open("/v1/completions", LONG)
        r.read(50)
        c.sock.close()
        r.close()
    idle = waited(lambda: "verlc_samples_running 0\n" in (text := server.ask("/metrics")) and "verlc_kv_blocks_used 0\n" in text)
    test("clients that leave: their samples are cancelled on all ranks", idle, server.ask("/metrics"))
    server.end()


def check_lost(test, model, sig, busy):
    """A rank is lost: the server ends by its name, and its clients get an end."""
    server = Server(model, "--tensor-parallel-size", 2)
    ranks = server.ranks()
    if busy:
        _, r = server.open("/v1/completions", LONG)
        r.read(50)
    os.kill(ranks[-1], sig)
    begin = time.time()
    rest = r.read().decode() if busy else "error"
    try:
        _, err = server.process.communicate(timeout=patience(60))
    except subprocess.TimeoutExpired:
        server.process.kill()
        _, err = server.process.communicate()
    took = time.time() - begin
    last = [line for line in err.splitlines() if line.startswith("error: ")]
    gone = waited(lambda: not [p for p in ranks if pathlib.Path(f"/proc/{p}").exists()], patience(10))
    test(f"signal {int(sig)}, {'drawing' if busy else 'idle'}: it ends within 10 s, by name, and nothing is left",
         server.process.returncode == 1 and len(last) == 1 and "rank " in last[0] and took < patience(10) and gone and
         "error" in rest,
         f"{server.process.returncode} {took:.1f} s {err[-500:]} {rest[-200:]}")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        model = s.dir / "model"
        keys = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__optim__lr": 0.02}
        run(*s.ppo("lora", trainer__device="cpu", trainer__total_training_steps=1, **keys))
        cases = {"bf16": (), "an adapter": ("--adapter", s.dir / "lora/global_step_1/actor", "--dtype", "fp32")}
        for name, args in cases.items():
            one, _ = answers(s, model, *args)
            for tp, dp in ((2, 1), (3, 1), (1, 2)) if name == "bf16" else ((2, 1),):
                got, said = answers(s, model, *args, "--tensor-parallel-size", tp, "--data-parallel-size", dp)
                test(f"{name}: {tp} ranks together, {dp} of them: the answers of one process", got == one, f"{got}\n{one}")
                test(f"{name}: {tp} x {dp}: it says so", (f"{tp} ranks have the model together" in said) == (tp > 1), said)
        check_left(test, model)
        for sig, busy in ((signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGSTOP, True)):
            check_lost(test, model, sig, busy)
        for args, code, why in ((("--tensor-parallel-size", 16), 3, "fewer heads"),
                                (("--tensor-parallel-size", 2, "--draft", 2), 3, "--draft"),
                                (("--data-parallel-size", 2, "--max-model-len", 10**6), 2, "positions")):
            test.refused(f"refused: {why}", run("serve", model, *args, check=False), code, why)
    test.end()


main()
