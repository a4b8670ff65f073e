#!/usr/bin/env python3
"""Makes a model of random weights count, for timing speculative decoding where every draft is right.

  verlc model init --arch CONFIG.json --out DIR && python3 tools/counting_model.py DIR
  verlc bench generate --model DIR --batch 16 --draft N

Layers add nothing, the head reads token t + 1 from token t, and so does the MTP layer. The sizes, and so the time of a step, are
those of the configuration; its embeddings must not be tied. Writes DIR/model.safetensors again."""
import sys

import torch
from safetensors.torch import load_file, save_file


def main(path):
    t = load_file(path)
    for name, w in t.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            t[name] = torch.zeros_like(w)
        if name.endswith(("input_proj.weight", "mtp.fc.weight")):  # the embedding's half
            n = len(w)
            halves = [torch.zeros(n, n), torch.eye(n)]
            t[name] = torch.cat(halves[::-1] if name.startswith("mtp.") else halves, 1).to(w.dtype)
    embed = next(w for name, w in t.items() if name.endswith("embed_tokens.weight"))
    t["lm_head.weight"] = torch.roll(embed, 1, 0).clone()
    save_file(t, path, metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(f"{sys.argv[1]}/model.safetensors")
