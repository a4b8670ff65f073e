#!/usr/bin/env python3
"""Golden numbers for the critic from Hugging Face's ForTokenClassification and torch, in fp32.

  oracle_critic.py [DIR]     writes DIR/ARCH.safetensors and DIR/qwen2/ (tests/fixtures/critic)

The bodies are the tiny random models of tools/oracle_model.py (tests/fixtures/model/ARCH); the head is random.  The loss
is PPO's clipped value loss in verl 0.9.1's form, token-mean over the valid tokens, written here in torch from its formula.
DIR/qwen2 is a directory as transformers itself saves it, to be loaded; the other heads are put into place by the test.
DIR/lora_ARCH is an adapter of a token classifier as peft saves it, head included, with golden.safetensors: the same
numbers, and gradients of the adapter and of the head alone.

Tensors of ARCH.safetensors
  ids, q_start, first (N) i32    N packed sequences and where each response begins
  values f32                     of the state before each response token, in sequence order
  old, returns f64, mask u8      the loss's inputs, of the same tokens
  loss f64, dvalue f32           and its derivative by each value
  score.weight, score.bias f32   the head; grad.NAME f32 of every parameter
"""
import json
import os
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForTokenClassification

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "../tests/fixtures/model")
ARCHS = ("qwen2", "llama", "qwen3", "mistral")
LENS, FIRST = (23, 70, 9), (10, 31, 8)  # prompt and response together, prompt
CLIP = 0.5
LORA = {  # peft 0.21 takes "all-linear" for a token classifier with its head, which then cannot be saved
    "qwen2": dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "llama": dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["v_proj", "layers.1.mlp.down_proj"]),
}


def with_head(auto, arch, seed, bias, **config):
    """The body of the fixture with a random head of one label, as transformers' class builds it."""
    config = AutoConfig.from_pretrained(os.path.join(MODELS, arch), num_labels=1, **config)
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    weights = {k: v for k, v in load_file(os.path.join(MODELS, arch, "model.safetensors")).items() if k != "lm_head.weight"}
    weights["score.weight"] = 0.3 * torch.randn(1, config.hidden_size)
    if bias:
        weights["score.bias"] = 0.1 * torch.randn(1)
    model.load_state_dict(weights)
    return model


def critic(arch):
    return with_head(AutoModelForTokenClassification, arch, 11, True, classifier_dropout=0.0)


def packed(seqs):
    return {"ids": torch.cat(seqs).int(), "q_start": torch.tensor([0, *torch.tensor([len(s) for s in seqs]).cumsum(0)]).int()}


def clipped_value_loss(v, old, returns, mask):
    vc = torch.maximum(torch.minimum(v, old + CLIP), old - CLIP)
    return 0.5 * (torch.maximum((v - returns) ** 2, (vc - returns) ** 2) * mask).sum() / mask.sum()


def golden(arch, model):
    gen = torch.Generator().manual_seed(5)
    seqs = [torch.randint(0, model.config.vocab_size, (n,), generator=gen) for n in LENS]
    rows = [model(input_ids=s[None]).logits[0, :, 0] for s in seqs]
    # the value of target t is that of the state before it
    v = torch.cat([r[f - 1 : n - 1] for r, f, n in zip(rows, FIRST, LENS)])
    noise = lambda scale: scale * torch.randn(v.shape, generator=gen, dtype=torch.float64)  # noqa: E731
    old, returns = v.detach().double() + noise(0.5), v.detach().double() + noise(1.0)
    mask = (torch.rand(v.shape, generator=gen) > 0.1).to(torch.float64)
    v.retain_grad()
    loss = clipped_value_loss(v.double(), old, returns, mask)
    loss.backward()
    clipped = ((v.double() - old).abs() > CLIP).double().mean()
    print(f"{arch}: values {v.min():.3f} to {v.max():.3f}, loss {loss:.4f}, {clipped:.2f} of the values outside the clip")
    out = {**packed(seqs), "first": torch.tensor(FIRST).int(), "values": v.detach(), "old": old, "returns": returns,
           "mask": mask.to(torch.uint8), "loss": loss.detach()[None], "dvalue": v.grad}
    out |= {f"grad.{plain(k)}": p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {k: x.contiguous() for k, x in out.items()}


def plain(name):
    return name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")


def adapter(arch, out):
    gen = torch.Generator().manual_seed(3)
    model = get_peft_model(critic(arch), LoraConfig(task_type="TOKEN_CLS", **LORA[arch])).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:  # the head too, away from that of the base
                p.copy_(0.4 * torch.randn(p.shape, generator=gen) / p.shape[-1] ** 0.5)
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    os.remove(f"{out}/README.md")
    config = json.load(open(f"{out}/adapter_config.json"))
    config["base_model_name_or_path"] = arch
    config["target_modules"].sort()
    json.dump(config, open(f"{out}/adapter_config.json", "w"), indent=1, sort_keys=True)
    save_file(golden(f"lora_{arch}", model), f"{out}/golden.safetensors")


def make(out):
    torch.set_num_threads(1)
    os.makedirs(out, exist_ok=True)
    for arch in ARCHS:
        model = critic(arch)
        head = {f"score.{k}": p.detach().clone() for k, p in model.score.named_parameters()}
        tensors = golden(arch, model) | head
        save_file(tensors, f"{out}/{arch}.safetensors")
        if arch == "qwen2":
            shutil.rmtree(f"{out}/{arch}", ignore_errors=True)
            model.save_pretrained(f"{out}/{arch}")
    for arch in LORA:
        adapter(arch, f"{out}/lora_{arch}")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../tests/fixtures/critic"))
