"""`make bench`: this program beside torch and transformers, in one run, taking turns.

Training (forward and backward, bf16, the Qwen2.5-0.5B shape), generation at batch 1
and 80, start to first token, tokenizer. Each pair is measured in alternating rounds and
the best of each counts, so that a busy machine hurts both. Prints a table and writes
build/bench/cpu.json (tools/figures.py says what it holds), which
`make performance FIGURES=build/bench/cpu.json` takes into docs/performance.md.

  python tools/bench_peers.py MODEL_DIR [train] [generate] [start]"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from figures import Figures

VERLC = os.environ.get("VERLC", "build/release/verlc")
DEVICE = {x: ["--device", "cpu"] for x in ("train", "generate")}
THREADS = len(os.sched_getaffinity(0))
ROUNDS = int(os.environ.get("ROUNDS", "2"))
MODEL = "qwen2.5-0.5b"


def verlc(*args):
    p = subprocess.run([VERLC, "bench", *map(str, args), *DEVICE.get(args[0], [])], capture_output=True, text=True)
    if p.returncode:
        sys.exit(p.stderr)
    return json.loads(p.stdout.splitlines()[-1])


def gemm_ceiling():
    """FLOP/s of the largest GEMM of a layer."""
    m, n, k = 2048, 9728, 896
    p = subprocess.run([VERLC, "bench", "gemm", "--jsonl"], input=json.dumps({"op": "fwd", "m": m, "n": n, "k": k}) + "\n",
                       capture_output=True, text=True, check=True)
    return 2 * m * n * k / json.loads(p.stdout.splitlines()[-1])["seconds"]


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
    table.add(f"train/{batch}x{length}", f"training, forward and backward, {batch} x {length}", ours, bar_ratio=1.2,
              peers=[(f"torch {torch.__version__.split('+')[0]}, the faster attention", theirs, True)],
              work={"op": "train", "model": MODEL, "length": length})


# prompts, samples of each, prompt tokens, new tokens, bar. 16 x 5 is recipe 1's batch; the last
# row shares no prompt and has no bar: there both sides are bound by the GEMMs of prefill.
SHAPES = ((1, 1, 64, 64, 1.5), (16, 5, 64, 64, 3.0), (80, 1, 64, 16, None))


def generate(model, table):
    import torch
    import transformers

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
        table.add(f"generate/{prompts}x{n}/{prompt}+{new}", f"generation, {prompts} x {n}, {prompt} + {new}", best["verlc"],
                  peers=[(f"transformers {transformers.__version__}", best["hf"], True)], bar_ratio=bar,
                  work={"op": "generate", "model": MODEL, "prompts": prompts, "n": n, "prompt": prompt, "new": new})
        if batch == 1:
            # both sides by the median: of the steps of a run and of the passes over memory, then of the turns
            rate, ceiling = r["weight_bytes"] / statistics.median(steps), statistics.median(reads)
            table.machine["memory"] = ceiling
            table.add("decode/weights", "decoding, batch 1: weight bytes read", rate / ceiling, "of memory's rate", bar=0.85,
                      note=f"{rate / 1e9:.1f} of {ceiling / 1e9:.1f} GB/s")


def start(model, table):
    """Seconds from the command to the first generated token, files in the page cache."""
    request = '{"ids": [9707, 11], "max_tokens": 1}\n'
    times = []
    for _ in range(ROUNDS + 1):
        t = time.time()
        subprocess.run([VERLC, "generate", "--model", model], input=request, text=True, capture_output=True, check=True)
        times.append(time.time() - t)
    table.add("start/first_token", "start to first token, files cached", min(times), "s", bar=5, lower=True)


def main():
    model, what = sys.argv[1], sys.argv[2:] or ["train", "generate", "start"]
    table = Figures({"memory": verlc("read")["median_bytes_per_s"], "gemm": gemm_ceiling()})
    if os.environ.get("TOKENIZER"):  # scripts/bench.sh measures it
        opens, encodes, decodes = map(float, os.environ["TOKENIZER"].split())
        table.add("tokenizer/open", "Qwen2.5's tokenizer opens", opens, "s", bar=0.5, lower=True)
        table.add("tokenizer/encode", "it encodes, one thread", encodes * 1e6, bar=1e6)
        table.add("tokenizer/decode", "it decodes, one thread", decodes * 1e6, bar=1e6)
    for name, run in (("train", train), ("generate", generate), ("start", start)):
        if name in what:
            run(model, table)
    table.show()
    out = pathlib.Path("build/bench")
    out.mkdir(parents=True, exist_ok=True)
    (out / "cpu.json").write_text(table.text())


main()
