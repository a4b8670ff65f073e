#!/usr/bin/env python3
"""Rates of verlc's CPU GEMMs against torch's, alternating in one run.

Needs torch (make oracle).  usage: bench_gemm_torch.py VERLC [--threads N] [--rounds R]
[--rows 1,80,512] [--isa NAME].  Each line: the best time of every round for
both, their ratio (above 1: verlc is faster).  torch runs bf16 F.linear (fwd),
dy @ W (dx) and dy.T @ x added to an f32 gradient (dw), its usual training path.
"""
import argparse
import json
import os
import subprocess
import time

LAYERS = {"qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864),
          "head": (151936, 896)}
COLD_BYTES = 768 << 20  # with few rows, weights come from memory: as `verlc bench gemm`


def torch_time(torch, op, m, n, k, seconds):
    bf16 = torch.bfloat16
    x, dy = torch.randn(m, k).to(bf16), torch.randn(m, n).to(bf16)
    copies = max(1, COLD_BYTES // (2 * n * k)) if op == "fwd" and m <= 128 else 1
    w = torch.randn(n, k).to(bf16)
    ws = [w.clone() for _ in range(copies)]
    grad = torch.zeros(n, k)

    def once(weight):
        if op == "fwd":
            torch.nn.functional.linear(x, weight)
        elif op == "dx":
            dy @ weight
        else:
            grad.add_(dy.t() @ x)

    best, end, i = 1e9, time.perf_counter() + seconds, 0
    with torch.no_grad():
        while i < 3 or time.perf_counter() < end:
            t = time.perf_counter()
            for weight in ws:
                once(weight)
            best = min(best, (time.perf_counter() - t) / copies)
            i += 1
    return best


def main():
    p = argparse.ArgumentParser()
    p.add_argument("verlc")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--rows", default="1,8,80,512,2048")
    p.add_argument("--layers", default=",".join(LAYERS))
    p.add_argument("--seconds", type=float, default=0.2)
    p.add_argument("--isa")
    a = p.parse_args()
    import torch

    torch.set_num_threads(a.threads)
    cmd = [a.verlc, "bench", "gemm", "--jsonl", "--threads", str(a.threads), "--seconds", str(a.seconds)]
    own = subprocess.Popen(cmd + (["--isa", a.isa] if a.isa else []), stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, text=True)
    print(f"torch {torch.__version__}, {a.threads} threads, bf16")
    print(f"{'layer':8} {'op':4} {'rows':>5} {'verlc ms':>9} {'torch ms':>9} {'GF/s':>7} {'torch':>7} {'ratio':>6}")
    for name in a.layers.split(","):
        n, k = LAYERS[name]
        for op in ("fwd", "dx", "dw"):
            for m in (int(r) for r in a.rows.split(",")):
                if (op != "fwd" and m < 512) or (n > 100000 and m > 80):
                    continue
                best = [1e9, 1e9]
                for _ in range(a.rounds):
                    own.stdin.write(json.dumps({"op": op, "m": m, "n": n, "k": k}) + "\n")
                    own.stdin.flush()
                    best[0] = min(best[0], json.loads(own.stdout.readline())["seconds"])
                    best[1] = min(best[1], torch_time(torch, op, m, n, k, a.seconds))
                gf = 2e-9 * m * n * k
                print(f"{name:8} {op:4} {m:5} {best[0] * 1e3:9.3f} {best[1] * 1e3:9.3f} {gf / best[0]:7.1f} "
                      f"{gf / best[1]:7.1f} {best[1] / best[0]:6.2f}", flush=True)
    own.stdin.close()
    own.wait()


if __name__ == "__main__":
    main()
