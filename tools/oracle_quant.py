#!/usr/bin/env python3
"""Golden numbers for 4- and 8-bit weights from bitsandbytes, and for QLoRA's gradients from torch.

  oracle_quant.py [DIR]     writes DIR/codes.safetensors (tests/fixtures/quant)

  w f32 (n, k)              rows of very different size, one of zeros, exact entries of the code book
  book f32                  bitsandbytes' NF4 map; nf4.code u8, nf4.absmax f32, nf4.w f32: its codes and what they stand for
  int8.code i8, int8.absmax f32   bitsandbytes' vector-wise quantisation of rows

and DIR/bnb_single, DIR/bnb_double: tests/fixtures/model/qwen2 as transformers saves it with BitsAndBytesConfig in NF4, without and
with double quantisation; weights.safetensors in them: what bitsandbytes makes of the codes (f32).
"""
import os
import shutil
import sys

import bitsandbytes.functional as F
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

HERE = os.path.dirname(os.path.abspath(__file__))


def matrix():
    gen = torch.Generator().manual_seed(3)
    w = torch.randn(24, 192, generator=gen)
    w *= torch.logspace(-6, 3, 24)[torch.randperm(24, generator=gen)][:, None]
    w[7] = 0
    w[9, :64] = 0.37 * F.get_4bit_type("nf4", device="cpu").repeat(4)
    return w


def make(out):
    w = matrix()
    code, state = F.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=False)
    back = F.dequantize_4bit(code, state)
    code8, absmax8, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(w)
    os.makedirs(out, exist_ok=True)
    save_file({"w": w, "book": F.get_4bit_type("nf4", device="cpu"), "nf4.code": code.flatten(), "nf4.absmax": state.absmax.float(),
               "nf4.w": back.float().contiguous(), "int8.code": code8.view(torch.uint8), "int8.absmax": absmax8.float().flatten()},
              f"{out}/codes.safetensors")
    print(f"NF4 of {tuple(w.shape)}: mean |error| {(back - w).abs().mean() / w.abs().mean():.3f} of the mean |w|; "
          f"INT8: {(code8 * absmax8[:, None] / 127 - w).abs().mean() / w.abs().mean():.4f}")


def saved(out, double):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, "../tests/fixtures/model/qwen2"), quantization_config=config,
                                                 dtype=torch.float32, device_map="cpu")
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    files = load_file(f"{out}/model.safetensors")
    whole = load_file(os.path.join(HERE, "../tests/fixtures/model/qwen2/model.safetensors"))
    weights = {}
    for name in [n.removesuffix(".absmax") for n in files if n.endswith("_proj.weight.absmax")]:
        state = F.QuantState.from_dict({k: v for k, v in files.items() if k.startswith(name + ".")}, device="cpu")
        shape, state.shape = state.shape, torch.Size([state.shape.numel() // 64, 64])  # its CPU kernel wants rows of whole blocks
        weights[name] = F.dequantize_4bit(files[name], state).float().reshape(shape).contiguous()
        off = (weights[name] - whole[name]).abs().mean() / whole[name].abs().mean()
        assert off < 0.12, f"{name}: {off}"  # what four bits leave of normal weights
    save_file(weights, f"{out}/weights.safetensors")
    print(f"{out}: {len(weights)} matrices in 4 bits")


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../tests/fixtures/quant")
    for name, double in (("bnb_single", False), ("bnb_double", True)):
        saved(os.path.join(target, name), double)
    make(target)
