"""Makes tests/fixtures/train/optim.json: what torch.optim's SGD, Adam, RAdam, RMSprop, AdamW (with
amsgrad and maximize too) and Muon (its bfloat16 replaced by fp32, so that the algorithm and not the rounding is compared), AdamW
with block-wise 8-bit moments (code books of bitsandbytes, the arithmetic in numpy) and
verl's learning rate schedules give.  Weights and gradients are formulas, which
tests/golden/test_model_optim.c has too.  Needs torch >= 2.9, numpy, bitsandbytes and
verl's files (run by `make oracle`).

  python tools/oracle_optim.py [--verl DIR] [--schedules N] [OUT_DIR]
"""

import argparse
import ast
import importlib.util
import json
import math
import pathlib
import random

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, STRIDE, BLOCK, MIN_QUANTIZED = 6, 131, 256, 4096
LR, WD, BETAS, EPS = 0.01, 0.1, (0.9, 0.95), 1e-8


# A Llama of one layer: wide, tall and square matrices, some of them large enough for 8-bit moments.
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 72,
          "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 80,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
          "initializer_range": 0.02, "torch_dtype": "float32", "eos_token_id": 1}
SHAPES = {"model.embed_tokens.weight": (80, 64), "model.layers.0.input_layernorm.weight": (64,),
          "model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.self_attn.k_proj.weight": (32, 64),
          "model.layers.0.self_attn.v_proj.weight": (32, 64), "model.layers.0.self_attn.o_proj.weight": (64, 64),
          "model.layers.0.post_attention_layernorm.weight": (64,), "model.layers.0.mlp.gate_proj.weight": (72, 64),
          "model.layers.0.mlp.up_proj.weight": (72, 64), "model.layers.0.mlp.down_proj.weight": (64, 72),
          "model.norm.weight": (64,), "lm_head.weight": (80, 64)}


def weight(name, n):
    return (0.05 * np.sin(0.11 * np.arange(n, dtype=np.float64) + len(name))).astype(np.float32)


def gradient(name, n, step):
    """The gradient of parameter `name` (n elements) in a step."""
    i = np.arange(n, dtype=np.float64)
    return (np.sin(0.37 * i + 0.013 * i * i + 1.7 * step + len(name)) * np.where(np.arange(n) % 5 == 0, 1.0,
                                                                                 1e-3)).astype(np.float32)


def set_gradients(params, step):
    for name, p in params.items():
        p.grad = torch.from_numpy(gradient(name, p.numel(), step)).reshape(p.shape)


def samples(params):
    return {k: [float(x) for x in p.detach().reshape(-1)[::STRIDE]] for k, p in params.items()}


def load():
    return {k: torch.nn.Parameter(torch.from_numpy(weight(k, math.prod(d))).reshape(d)) for k, d in SHAPES.items()}


def with_torch(make):
    params = load()
    optimizers = make(params)
    for step in range(1, STEPS + 1):
        set_gradients(params, step)
        for o in optimizers:
            o.step()
    return samples(params)


def muon(params, adjust, nesterov):
    hidden = [p for k, p in params.items() if p.dim() == 2 and ".layers." in k]
    rest = [p for k, p in params.items() if not (p.dim() == 2 and ".layers." in k)]
    return [torch.optim.Muon(hidden, lr=LR, weight_decay=WD, momentum=0.95, nesterov=nesterov, ns_steps=5, adjust_lr_fn=adjust),
            torch.optim.AdamW(rest, lr=LR, betas=BETAS, eps=EPS, weight_decay=WD)]


class Moments:
    """A flat array kept as codes of a book, scaled block by block."""

    def __init__(self, n, book):
        self.book, self.n = book.astype(np.float32), n
        self.middle = (0.5 * (self.book[:-1] + self.book[1:])).astype(np.float32)
        self.put(np.zeros(n, np.float32))

    def put(self, x):
        pad = np.zeros(-self.n % BLOCK, np.float32)
        blocks = np.concatenate([x, pad]).reshape(-1, BLOCK)
        self.scale = np.abs(blocks).max(1, keepdims=True)
        v = np.divide(blocks, self.scale, out=np.zeros_like(blocks), where=self.scale > 0)
        self.code = np.searchsorted(self.middle, v, side="left")

    def get(self):
        return (self.book[self.code] * self.scale).reshape(-1)[:self.n].astype(np.float32)


def adamw8(books):
    params = load()
    big = {k for k, p in params.items() if p.dim() == 2 and p.numel() >= MIN_QUANTIZED}
    small = torch.optim.AdamW([p for k, p in params.items() if k not in big], lr=LR, betas=BETAS, eps=EPS, weight_decay=WD)
    state = {k: (Moments(params[k].numel(), books[0]), Moments(params[k].numel(), books[1])) for k in big}
    for step in range(1, STEPS + 1):
        set_gradients(params, step)
        small.step()
        for k in big:
            one = torch.nn.Parameter(params[k].detach().reshape(-1).clone())
            one.grad = params[k].grad.reshape(-1)
            o = torch.optim.AdamW([one], lr=LR, betas=BETAS, eps=EPS, weight_decay=WD)
            m, v = state[k]
            o.state[one] = {"step": torch.tensor(float(step - 1)), "exp_avg": torch.from_numpy(m.get().copy()),
                            "exp_avg_sq": torch.from_numpy(v.get().copy())}
            o.step()
            m.put(o.state[one]["exp_avg"].numpy())
            v.put(o.state[one]["exp_avg_sq"].numpy())
            params[k].data = one.data.reshape(params[k].shape)
    return samples(params), sorted(big)


def by_class(name, **options):
    """The keys of a case, and torch's values: the options under torch's names."""
    betas = {} if name == "RMSprop" else {"betas": BETAS}
    make = getattr(torch.optim, name)
    return {"optimizer": name, **options}, with_torch(
        lambda p: [make(p.values(), lr=LR, eps=EPS, weight_decay=WD, **betas, **options)])


RELATIVES = [("AdamW", dict(amsgrad=True)), ("AdamW", dict(maximize=True)), ("AdamW", dict(amsgrad=True, maximize=True)),
             ("Adam", {}), ("Adam", dict(amsgrad=True, maximize=True)), ("Adam", dict(decoupled_weight_decay=True)), ("RAdam", {}),
             ("RAdam", dict(decoupled_weight_decay=True, maximize=True)), ("RMSprop", dict(alpha=0.99)),
             ("RMSprop", dict(alpha=0.9, momentum=0.8)), ("RMSprop", dict(alpha=0.9, centered=True)),
             ("RMSprop", dict(alpha=0.95, momentum=0.5, centered=True, maximize=True))]

SCHEDULES = [("constant", 0, 12, 0, 0.5), ("constant", 4, 12, 0, 0.5), ("cosine", 3, 20, 0.1, 0.5), ("cosine", 0, 20, 0.0, 0.5),
             ("cosine", 5, 40, 0.2, 2.0), ("wsd", 4, 40, 0.1, 0.5), ("wsd", 0, 25, 0.0, 0.5)]


def random_schedule(k):
    """A warm-up that may be as long as the run or longer, runs of one step, any number of cycles."""
    r = random.Random(f"schedule/{k}")
    total = r.choice([1, 2, 5, 20, 60])
    return (r.choice(["constant", "cosine", "wsd"]), r.choice([0, 1, r.randint(0, total), total, total + 3]), total,
            r.choice([0.0, 0.1, round(r.random(), 3), 1.0]), r.choice([0.5, 0.25, 1.0, 2.5]), r.choice([0.0, 0.0, 0.3, 1.0]),
            r.random() < 0.7)


def schedules(verl, n_random):
    """verl's three schedules at every step of a run, by their own functions."""
    path = verl / "utils/torch_functional.py"
    source = path.read_text()
    space = {"math": math, "LambdaLR": torch.optim.lr_scheduler.LambdaLR, "Optimizer": torch.optim.Optimizer}
    names = {kind: f"get_{kind}_schedule_with_warmup" for kind in ("constant", "cosine", "wsd")}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names.values():
            exec(compile("from __future__ import annotations\n" + ast.get_source_segment(source, node), str(path), "exec"), space)
    cases = []
    runs = [s + (0.0, True) for s in SCHEDULES] + [random_schedule(k) for k in range(n_random)]
    for kind, warmup, total, ratio, cycles, init, from_0 in runs:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        kw = {} if kind == "constant" else dict(num_training_steps=total, min_lr_ratio=ratio, num_cycles=cycles)
        kw |= {"init_lr_ratio": init, "zero_indexed_step": from_0} if kind == "cosine" else {}
        s = space[names[kind]](optimizer, num_warmup_steps=warmup, **kw)
        rates = []
        for _ in range(total + 3):
            rates.append(s.get_last_lr()[0])
            optimizer.step()
            s.step()
        cases.append({"schedule": kind, "warmup": warmup, "total": total, "min_lr_ratio": ratio, "num_cycles": cycles,
                      "init_lr_ratio": init, "zero_indexed_step": from_0 or kind != "cosine", "lr": 0.5, "rates": rates})
    return cases


def main():
    import bitsandbytes.functional as bnb

    parser = argparse.ArgumentParser()
    parser.add_argument("--verl", default=None)
    parser.add_argument("--schedules", type=int, default=0, help="random schedules beside the fixture's")
    parser.add_argument("out", nargs="?", default=ROOT / "tests/fixtures/train", type=pathlib.Path)
    args = parser.parse_args()
    verl = pathlib.Path(args.verl) if args.verl else pathlib.Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    books = [bnb.create_dynamic_map(signed=s).numpy() for s in (True, False)]
    plain = torch.bfloat16
    out = {"config": CONFIG, "steps": STEPS, "stride": STRIDE, "lr": LR, "weight_decay": WD, "betas": BETAS, "eps": EPS,
           "books": [[float(x) for x in b] for b in books], "schedules": schedules(verl, args.schedules), "cases": []}

    def case(name, keys, values, **more):
        out["cases"].append({"name": name, **keys, "values": values, **more})

    case("AdamW", {"optimizer": "AdamW"},
         with_torch(lambda p: [torch.optim.AdamW(p.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WD)]))
    for mu, damp, nesterov in [(0, 0, False), (0.9, 0, False), (0.9, 0.1, False), (0.9, 0, True)]:
        keys = {"optimizer": "SGD", "momentum": mu, "dampening": damp, "nesterov": nesterov}
        case(f"SGD {mu} {damp} {nesterov}", keys, with_torch(lambda p: [torch.optim.SGD(
            p.values(), lr=LR, momentum=mu, dampening=damp, nesterov=nesterov, weight_decay=WD)]))
    torch.bfloat16 = torch.float32  # the name that torch.optim.Muon casts by
    for adjust, nesterov in [("match_rms_adamw", True), ("original", False)]:
        keys = {"optimizer": "Muon", "momentum": 0.95, "nesterov": nesterov, "original": adjust == "original"}
        case(f"Muon {adjust}", keys, with_torch(lambda p: muon(p, adjust, nesterov)))
    torch.bfloat16 = plain
    values, big = adamw8(books)
    case("AdamW8bit", {"optimizer": "AdamW8bit"}, values, quantized=big)
    keys = {"optimizer": "SGD", "momentum": 0.9, "dampening": 0, "nesterov": False, "maximize": True}
    case("SGD 0.9 maximize", keys, with_torch(lambda p: [torch.optim.SGD(
        p.values(), lr=LR, momentum=0.9, weight_decay=WD, maximize=True)]))
    for name, options in RELATIVES:
        case(" ".join([name, *map(str, options)]), *by_class(name, **options))
    path = args.out / "optim.json"
    path.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(f"{path}: {len(out['cases'])} optimizers, {len(out['schedules'])} schedules, quantized: {big}, "
          f"{path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
