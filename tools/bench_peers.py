"""`make bench`: this program beside torch and transformers, in one run, taking turns.

Training (forward and backward, bf16, the Qwen2.5-0.5B shape), generation at batch 1
and 80, start to first token, tokenizer. Each pair is measured in alternating rounds and
the best of each counts, so that a busy machine hurts both. Prints a table of ratios
and writes it to build/bench/peers.json.

  python tools/bench_peers.py MODEL_DIR [train] [generate] [start]"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

VERLC = os.environ.get("VERLC", "build/release/verlc")
DEVICE = {x: ["--device", "cpu"] for x in ("train", "generate")}
THREADS = len(os.sched_getaffinity(0))
ROUNDS = int(os.environ.get("ROUNDS", "2"))


def verlc(*args):
    p = subprocess.run([VERLC, "bench", *map(str, args), *DEVICE.get(args[0], [])], capture_output=True, text=True)
    if p.returncode:
        sys.exit(p.stderr)
    return json.loads(p.stdout.splitlines()[-1])


def say(text):
    print(text, file=sys.stderr, flush=True)


def torch_model(path, **kw):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **kw)


def train(model, table):
    """Tokens per second of forward and backward. torch: bf16 weights, the faster of SDPA and eager."""
    import torch

    batch, length = 2, 512
    ids = torch.randint(0, 150000, (batch, length), generator=torch.Generator().manual_seed(1))

    def step(m):
        m.zero_grad(set_to_none=False)
        t = time.time()
        m(input_ids=ids, labels=ids).loss.backward()
        return batch * length / (time.time() - t)

    peers = {a: torch_model(model, attn_implementation=a).train() for a in ("sdpa", "eager")}
    for m in peers.values():
        m(input_ids=ids[:1, :64], labels=ids[:1, :64]).loss.backward()  # allocates the gradients
    rates = {a: step(m) for a, m in peers.items()}
    say("torch " + ", ".join(f"{a} {r:.1f}" for a, r in rates.items()) + " tokens/s: the faster one is the peer")
    peer, theirs = peers[max(rates, key=rates.get)], max(rates.values())
    peers.clear()
    ours = 0.0
    for _ in range(ROUNDS):
        r = verlc("train", "--model", model, "--batch", batch, "--len", length, "--steps", 1)
        ours = max(ours, r["tokens_per_s"])
        theirs = max(theirs, step(peer))
        say(f"training: {ours:.1f} and {theirs:.1f} tokens/s")
    table.append((f"training tokens/s, {batch} x {length}, forward and backward, bf16", ours, theirs, ours / theirs, 1.2))


# prompts, samples of each, prompt tokens, new tokens, bar. 16 x 5 is the seed recipe's batch; the
# last row shares no prompt and has no bar: there both sides are bound by the prompts' arithmetic.
SHAPES = ((1, 1, 64, 64, 1.5), (16, 5, 64, 64, 3.0), (80, 1, 64, 16, None))


def generate(model, table):
    import torch

    m = torch_model(model).eval()
    for prompts, n, prompt, new, bar in SHAPES:
        batch, steps, reads = prompts * n, [], []
        ids = torch.randint(0, 150000, (prompts, prompt), generator=torch.Generator().manual_seed(1))
        best = {"verlc": 0.0, "hf": 0.0}
        for _ in range(ROUNDS):
            r = verlc("generate", "--model", model, "--batch", batch, "--n", n, "--prompt", prompt, "--len", new, "--steps", 1)
            best["verlc"] = max(best["verlc"], r["tokens_per_s"])
            if batch == 1:
                for _ in range(3):  # the memory's rate varies by the second: one after the other, in turns
                    reads.append(verlc("read")["median_bytes_per_s"])
                    r = verlc("generate", "--model", model, "--prompt", prompt, "--len", new, "--steps", 1)
                    steps.append(r["decode_step_median_s"])
            with torch.inference_mode():
                t = time.time()
                m.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                           num_return_sequences=n, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)
                best["hf"] = max(best["hf"], batch * new / (time.time() - t))
            say(f"generation, batch {batch}: {best['verlc']:.1f} and {best['hf']:.1f} tokens/s")
        what = f"generation tokens/s, {prompts} prompts x {n}, {prompt} + {new} tokens"
        table.append((what, best["verlc"], best["hf"], best["verlc"] / best["hf"], bar))
        if batch == 1:
            # both sides by the median: of the steps of a run and of the passes over memory, then of the turns
            rate, ceiling = r["weight_bytes"] / statistics.median(steps), statistics.median(reads)
            table.append(("batch 1: bytes of weights read per second / ceiling", rate, ceiling, rate / ceiling, 0.85))


def start(model, table):
    """Seconds from the command to the first generated token, files in the page cache."""
    request = '{"ids": [9707, 11], "max_tokens": 1}\n'
    times = []
    for _ in range(ROUNDS + 1):
        t = time.time()
        subprocess.run([VERLC, "generate", "--model", model], input=request, text=True, capture_output=True, check=True)
        times.append(time.time() - t)
    table.append(("start to first token, s (bar: under 5)", min(times), 5.0, 5.0 / min(times), 1.0))


def main():
    model, what = sys.argv[1], sys.argv[2:] or ["train", "generate", "start"]
    table = []
    for name, run in (("train", train), ("generate", generate), ("start", start)):
        if name in what:
            run(model, table)
    print(f"{'what':58s} {'verlc':>12s} {'peer':>12s} {'ratio':>7s}  bar")
    for row, ours, theirs, ratio, bar in table:
        verdict = "no bar" if bar is None else f"{bar:g} {'ok' if ratio >= bar else 'MISSED'}"
        print(f"{row:58s} {ours:12.4g} {theirs:12.4g} {ratio:7.2f}  {verdict}")
    out = pathlib.Path("build/bench")
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.json").write_text(json.dumps(table, indent=1))


main()
