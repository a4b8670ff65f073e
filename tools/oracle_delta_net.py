#!/usr/bin/env python3
"""Golden numbers of a gated delta net layer from Hugging Face transformers (Qwen3.5's), in fp32, for tests/golden.

  oracle_delta_net.py DIR    writes DIR/layer.safetensors

One layer with random weights, on two sequences that the layer gets one by one:
  q_start, x, y      rows of both, packed: input and output by chunks (torch_chunk_gated_delta_rule)
  y.recurrent        the output token by token, from the cache (torch_recurrent_gated_delta_rule)
  dy, dx             random d loss / d y, and d loss / d x
  w.NAME, grad.NAME  each parameter, and its gradient
"""
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

LENS = (17, 130)  # within a chunk of 64, and over three
CONFIG = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
    vocab_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
    linear_conv_kernel_dim=4, rms_norm_eps=1e-6, layer_types=["linear_attention"],
)


def main(out):
    torch.set_num_threads(1)
    os.makedirs(out, exist_ok=True)
    gen = torch.Generator().manual_seed(35)
    config = Qwen3_5TextConfig(**CONFIG)
    layer = Qwen3_5GatedDeltaNet(config, 0).float().eval()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            r = torch.randn(p.shape, generator=gen)
            if name == "norm.weight":
                p.copy_(1 + 0.2 * r)
            elif name in ("A_log", "dt_bias"):
                p.copy_(0.5 * r)
            else:
                p.copy_(r / p[0].numel() ** 0.5)
    x = torch.randn(sum(LENS), CONFIG["hidden_size"], generator=gen).requires_grad_()
    dy = torch.randn(sum(LENS), CONFIG["hidden_size"], generator=gen)
    y = torch.cat([layer(s[None])[0] for s in x.split(LENS)])
    y.backward(dy)
    steps = []
    with torch.no_grad():
        for s in x.split(LENS):
            cache = DynamicCache(config=config)
            steps += [layer(t[None, None], cache_params=cache)[0] for t in s]
    golden = {
        "q_start": torch.tensor([0, LENS[0], sum(LENS)], dtype=torch.int32), "x": x.detach(), "y": y.detach(),
        "y.recurrent": torch.cat(steps), "dy": dy, "dx": x.grad,
    }
    for name, p in layer.named_parameters():
        golden |= {f"w.{name}": p.detach().contiguous(), f"grad.{name}": p.grad}
    save_file(golden, f"{out}/layer.safetensors")
    size = os.path.getsize(f"{out}/layer.safetensors")
    apart = (golden["y"] - golden["y.recurrent"]).abs().max() / golden["y"].abs().max()
    print(f"{out}/layer.safetensors: {size} bytes; chunks against recurrence: {apart:.1e} of the largest output")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
