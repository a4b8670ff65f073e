#!/usr/bin/env python3
"""Golden numbers for adapters (src/model/model_lora*.c) from peft and torch, in fp32.

  oracle_lora.py make DIR               writes the fixtures DIR/lora_* (tests/fixtures/model), on the base models in DIR
  oracle_lora.py check VERLC DIR        in a scratch directory, the other way round: peft loads what verlc trains and
                                        exports, `verlc score --adapter` and `verlc model merge` give peft's numbers

Each case is a directory as peft's save_pretrained writes it, and golden.safetensors with what oracle_model.py
records (the gradients are those of the adapter), and merged.NAME: weights after merge_and_unload.
"""
import json
import os
import subprocess
import sys
import tempfile

import torch
from oracle_model import golden_pass, load, released
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

CASES = {
    "lora_qwen2": ("qwen2", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "lora_llama": ("llama", dict(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj", "layers.1.mlp.down_proj"],
                                 exclude_modules=["layers.1.self_attn.v_proj"], use_rslora=True)),
    "lora_qwen3": ("qwen3", dict(r=8, lora_alpha=16, target_modules=r".*\.1\.(self_attn\.(k|o)|mlp\.gate)_proj",
                                 exclude_modules=r".*embed.*")),
    "lora_phi3": ("phi3", dict(r=4, lora_alpha=6, target_modules=["qkv_proj", "gate_up_proj"])),
    "lora_exaone4": ("exaone4", dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])),
    # attention alone; experts are in make_experts
    "lora_qwen3_moe": ("qwen3_moe", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    "lora_bias": ("llama_bias", dict(r=2, lora_alpha=1, target_modules=["k_proj", "o_proj", "down_proj", "gate_proj"])),
}


def adapted(base, kwargs, gen):
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", bias="none", **kwargs))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.4 * torch.randn(p.shape, generator=gen) / p.shape[1] ** 0.5)
    return model.eval()


def plain(name):
    return name.removeprefix("base_model.model.").replace(".default", "")


def make_case(name, base, kwargs, out):
    gen = torch.Generator().manual_seed(sum(map(ord, name)))
    model = adapted(base, kwargs, gen)
    model.save_pretrained(out)
    os.remove(f"{out}/README.md")
    config = json.load(open(f"{out}/adapter_config.json"))
    config["base_model_name_or_path"] = os.path.basename(base)
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    json.dump(config, open(f"{out}/adapter_config.json", "w"), indent=1, sort_keys=True)
    _, golden = golden_pass(model, gen)
    golden |= {f"grad.{plain(k)}": p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    merged = model.merge_and_unload().state_dict()
    golden |= {f"merged.{k}": v.contiguous() for k, v in merged.items() if k != "lm_head.weight" and
               f"layers.{model.config.num_hidden_layers - 1}." in k}
    save_file(golden, f"{out}/golden.safetensors")


class WithExperts:
    """A model of transformers 5, whose experts are stacked, with an adapter on each expert's matrices as peft has it where they are
    modules (transformers 4): W + scale B A, under the modules' names."""

    def __init__(self, model, targets, r, alpha, gen):
        self.model, self.r, self.scale, self.config = model, r, alpha / r, model.config
        self.parts = {}  # parameter: [(module, rows)], of stacked ones a list an expert
        for name, p in model.named_parameters():
            stem, last = name.rsplit(".", 1)[0], name.rsplit(".", 1)[-1]
            if stem.endswith(".experts"):
                parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
                self.parts[name] = [[(f"{stem}.{e}.{k}", p.shape[1] // len(parts)) for k in parts] for e in range(p.shape[0])]
            elif stem.rsplit(".", 1)[-1] in targets:
                self.parts[name] = [(stem, p.shape[0])]
        self.leaves = {}
        for name, parts in self.parts.items():
            cols = dict(model.named_parameters())[name].shape[-1]
            for module, rows in (x for p in parts for x in (p if isinstance(p, list) else [p])):
                for side, shape in (("A", (r, cols)), ("B", (rows, r))):
                    self.leaves[f"{module}.lora_{side}.weight"] = (
                        0.4 * torch.randn(shape, generator=gen) / shape[1] ** 0.5).requires_grad_()

    def delta(self, parts):
        return torch.cat([self.scale * self.leaves[f"{m}.lora_B.weight"] @ self.leaves[f"{m}.lora_A.weight"] for m, _ in parts])

    def weights(self):
        at = dict(self.model.named_parameters())
        return at | {n: at[n] + (torch.stack([self.delta(x) for x in p]) if isinstance(p[0], list) else self.delta(p))
                     for n, p in self.parts.items()}

    def __call__(self, **kw):
        return torch.func.functional_call(self.model, self.weights(), kwargs=kw)


def make_experts(out, base, name="lora_experts"):
    gen = torch.Generator().manual_seed(sum(map(ord, name)))
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = WithExperts(load(base), targets, 3, 6, gen)
    os.makedirs(out, exist_ok=True)
    save_file({f"base_model.model.{k}": v.detach() for k, v in model.leaves.items()}, f"{out}/adapter_model.safetensors",
              metadata={"format": "pt"})
    LoraConfig(task_type="CAUSAL_LM", bias="none", r=3, lora_alpha=6, target_modules=targets).save_pretrained(out)
    config = json.load(open(f"{out}/adapter_config.json"))
    config |= {"base_model_name_or_path": os.path.basename(base), "target_modules": sorted(targets), "inference_mode": True}
    json.dump(config, open(f"{out}/adapter_config.json", "w"), indent=1, sort_keys=True)
    _, golden = golden_pass(model, gen)
    golden |= {f"grad.{k}": v.grad for k, v in model.leaves.items()}
    merged = released({k: v.detach() for k, v in model.weights().items()}, model.config.model_type)
    last = f"layers.{model.config.num_hidden_layers - 1}."
    save_file(golden | {f"merged.{k}": v.contiguous() for k, v in merged.items() if last in k}, f"{out}/golden.safetensors")


def make(out):
    torch.set_num_threads(1)
    make_experts(f"{out}/lora_experts", f"{out}/qwen3_moe")
    for name, (base, kwargs) in CASES.items():
        make_case(name, f"{out}/{base}", kwargs, f"{out}/{name}")


# ---- the other direction ----

def run(*args, stdin=None):
    return subprocess.run(args, input=stdin, text=True, check=True, stdout=subprocess.PIPE).stdout


def worst_score(model, args, gen):
    """Largest difference of log-probs between transformers and `verlc score ARGS`."""
    seqs = [torch.randint(3, model.config.vocab_size, (n,), generator=gen) for n in (5, 17)]
    lines = "".join(json.dumps({"ids": s.tolist(), "response_start": 1}) + "\n" for s in seqs)
    out = [json.loads(x) for x in run(*args, "--dtype", "fp32", stdin=lines).splitlines()]
    worst = 0.0
    for s, o in zip(seqs, out, strict=True):
        with torch.no_grad():
            want = torch.log_softmax(model(input_ids=s[None]).logits[0].double(), -1)[:-1].gather(1, s[1:, None])[:, 0]
        worst = max(worst, ((torch.tensor(o["logp"], dtype=torch.float64) - want).abs() / want.abs().clamp(min=1)).max().item())
    return worst


def train(verlc, d):
    """A few SFT steps of an adapter on the tiny model; the checkpoint's adapter directory."""
    run(verlc, "model", "init", "--preset", "tiny", "--out", f"{d}/tiny")
    run(verlc, "data", "arith", "--out", f"{d}/data", "--n-train", "64", "--n-test", "16", "--format", "jsonl")
    run(verlc, "sft", f"data.train_files={d}/data/sft_train.jsonl", f"data.val_files={d}/data/sft_test.jsonl",
        "data.train_batch_size=16",
        "data.micro_batch_size_per_gpu=8", f"model.path={d}/tiny", "model.lora_rank=6", "model.lora_alpha=12",
        "engine.dtype=float32", "optim.lr=1e-2", "trainer.total_training_steps=4", "trainer.save_freq=4", "trainer.test_freq=-1",
        "trainer.logger=[file]", f"trainer.default_local_dir={d}/run")
    return f"{d}/tiny", f"{d}/run/global_step_4/actor"


def check(verlc, work):
    os.makedirs(work, exist_ok=True)
    gen = torch.Generator().manual_seed(1)
    failed = 0
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory(dir=work) as d:
        cases = [(f"{here}/../tests/fixtures/model/{base}", f"{here}/../tests/fixtures/model/{name}") for name,
                 (base, _) in CASES.items()]
        for base, adapter in [*cases, train(verlc, d)]:
            model = PeftModel.from_pretrained(load(base), adapter).eval()
            a = worst_score(model, (verlc, "score", "--model", base, "--adapter", adapter), gen)
            out = f"{d}/merged_{os.path.basename(adapter)}"
            run(verlc, "model", "merge", "--model", base, "--adapter", adapter, "--out", out)
            want, got = model.merge_and_unload(), load_file(f"{out}/model.safetensors")
            want = released(want.state_dict(), want.config.model_type)
            m = max((want[k] - got[k]).abs().max().item() for k in got)
            b = worst_score(model, (verlc, "score", "--model", out), gen)
            ok = max(a, b) <= 1e-5 and m <= 1e-6
            failed += not ok
            print(f"{os.path.basename(adapter):11s} log-prob difference with adapter {a:.1e}, merged {b:.1e}; "
                  f"weights {m:.1e} {'ok' if ok else 'FAILED'}")
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "make":
        make(sys.argv[2])
    elif len(sys.argv) == 4 and sys.argv[1] == "check":
        sys.exit(1 if check(sys.argv[2], sys.argv[3]) else 0)
    else:
        sys.exit(__doc__)
