"""`verlc serve` beside `verlc bench generate` on the same model: N requests at a time, each with its own random prompt, as streams.
One JSON line a number of requests: tokens a second of the answers, the same of `verlc bench generate` with that batch, their ratio,
the time to the first token.

  python tools/bench_serve.py VERLC MODEL [--concurrency 64 512] [--prompt 512] [--tokens 256] [--rounds 2] [--stagger]
                              [-- options of both commands]

Clients begin together, and as all answers have one length they ask together again and again: the first token then comes when all
prompts are computed. --stagger: they begin one after the other over the time of one answer, as under load, and the first round is
not counted.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time


async def one(port, body, times):
    """A stream: its tokens are counted by the server's usage, its first piece is timed."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    first, last = None, b""
    while True:
        part = await reader.read(1 << 16)
        if not part:
            break
        if first is None and b'"text"' in part:
            first = time.perf_counter() - start
        last = (last + part)[-4096:]
    writer.close()
    if first is None or b"[DONE]" not in last:
        raise SystemExit(f"an answer broke off: {last[-300:]}")
    times.append(first)
    return json.loads(last.split(b'"usage":{')[-1].split(b',"prompt_tokens_details"')[0].join([b"{", b"}"]))[
        "completion_tokens"
    ]


async def many(port, n, rounds, bodies, stagger=0.0):
    """Tokens a second and times to the first token. stagger: seconds over which clients begin; their first round is not counted."""
    times, ended, warm = [], [], []

    async def client(i):
        await asyncio.sleep(stagger * i / n)
        for r in range(rounds + (stagger > 0)):
            got = await one(port, bodies[(r * n + i) % len(bodies)], warm if stagger > 0 and r == 0 else times)
            ended.append((time.perf_counter(), got))

    start = time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(n)))
    if stagger > 0:  # from when all have asked to when the first has nothing more to ask
        lo, hi = start + 2 * stagger, max(t for t, _ in ended) - stagger
        return sum(got for t, got in ended if lo <= t < hi) / (hi - lo), times
    return sum(got for _, got in ended) / (time.perf_counter() - start), times


def bodies(n, vocab, prompt, tokens):
    rng = random.Random(2)
    return [
        json.dumps(
            {
                "prompt": [rng.randrange(3, vocab) for _ in range(prompt)],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "seed": i,
            }
        ).encode()
        for i in range(n)
    ]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("verlc")
    p.add_argument("model")
    p.add_argument("--concurrency", type=int, nargs="+", default=[64, 512])
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--stagger", action="store_true")
    argv, common = sys.argv[1:], []
    if "--" in argv:
        argv, common = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    a = p.parse_args(argv)
    with open(f"{a.model}/config.json") as f:
        vocab = json.load(f)["vocab_size"]
    for n in a.concurrency:
        server = subprocess.Popen(
            [
                a.verlc,
                "serve",
                a.model,
                "--port",
                "0",
                "--max-num-seqs",
                str(n),
                "--max-model-len",
                str(a.prompt + a.tokens),
                "--max-num-batched-tokens",
                "8192",
                *common,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        port = int(json.loads(server.stdout.readline())["url"].split(":")[2].split("/")[0])
        try:
            asyncio.run(many(port, n, 1, bodies(n, vocab, a.prompt, min(a.tokens, 32))))
            begun = time.perf_counter()
            if a.stagger:
                asyncio.run(many(port, n, 1, bodies(n, vocab, a.prompt, a.tokens)))
            stagger = time.perf_counter() - begun if a.stagger else 0
            rate, times = asyncio.run(many(port, n, a.rounds, bodies(n * (a.rounds + 1), vocab, a.prompt, a.tokens), stagger))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        g = json.loads(
            subprocess.run(
                [
                    a.verlc,
                    "bench",
                    "generate",
                    "--model",
                    a.model,
                    "--batch",
                    str(n),
                    "--prompt",
                    str(a.prompt),
                    "--len",
                    str(a.tokens),
                    *common,
                ],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        q = statistics.quantiles(times, n=20)
        print(
            json.dumps(
                {
                    "concurrent": n,
                    "tokens_per_s": round(rate, 1),
                    "generate_tokens_per_s": g["tokens_per_s"],
                    "ratio": round(rate / g["tokens_per_s"], 3),
                    "first_token_median_s": round(statistics.median(times), 4),
                    "first_token_p95_s": round(q[-1], 4),
                    "prompt": a.prompt,
                    "tokens": a.tokens,
                    "stagger": a.stagger,
                    "device": g["device"],
                }
            ),
            flush=True,
        )


main()
