#!/usr/bin/env python3
"""Golden numbers for reward models from Hugging Face's ForSequenceClassification, in fp32.

  oracle_reward.py [DIR]     writes DIR/ARCH/ and DIR/ARCH/golden.safetensors (tests/fixtures/reward)

The bodies are the tiny random models of tools/oracle_model.py; the head is random.  DIR/ARCH is a directory as
transformers itself saves it.  Some sequences end in pad tokens, and one has a pad token
inside: transformers reads the score at the last token that is not the pad token.

Tensors of golden.safetensors
  ids, q_start (N) i32     N packed sequences, padding at their ends included
  pad i32                  config.pad_token_id
  score, weight f32 (N)    the scores, and the weights of their sum, which is the loss
  grad.NAME f32            of every parameter
"""
import os
import shutil
import sys

import torch
from oracle_critic import ARCHS, packed, with_head
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

HERE = os.path.dirname(os.path.abspath(__file__))
LENS, PADS, PAD = (23, 70, 9, 31), (0, 3, 1, 0), 5


def golden(arch):
    model = with_head(AutoModelForSequenceClassification, arch, 12, False, pad_token_id=PAD)
    model.get_input_embeddings().padding_idx = None  # else torch leaves the pad token out of the embedding's gradient
    gen = torch.Generator().manual_seed(6)
    seqs = [torch.randint(PAD + 1, model.config.vocab_size, (n,), generator=gen) for n in LENS]
    for s, n in zip(seqs, PADS):
        s[len(s) - n :] = PAD
    seqs[3][10] = PAD
    score = torch.cat([model(input_ids=s[None]).logits[0] for s in seqs])
    weight = torch.randn(len(LENS), generator=gen)
    (score * weight).sum().backward()
    print(f"{arch}: scores {', '.join(f'{x:.3f}' for x in score.tolist())}")
    out = {**packed(seqs), "pad": torch.tensor([PAD]).int(), "score": score.detach(), "weight": weight}
    out |= {f"grad.{k}": p.grad for k, p in model.named_parameters()}
    return model, {k: x.contiguous() for k, x in out.items()}


def make(out):
    torch.set_num_threads(1)
    os.makedirs(out, exist_ok=True)
    for arch in ARCHS:
        model, tensors = golden(arch)
        shutil.rmtree(f"{out}/{arch}", ignore_errors=True)
        model.save_pretrained(f"{out}/{arch}")
        save_file(tensors, f"{out}/{arch}/golden.safetensors")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../tests/fixtures/reward"))
