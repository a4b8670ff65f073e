#!/usr/bin/env python3
"""Golden numbers of a layer for multi-token prediction, from torch in fp32: the case `mimo` next to those of oracle_model.py.

  oracle_mtp.py DIR    writes DIR/mimo (tests/fixtures/model)

The base is transformers' Qwen2, which MiMo's class derives from. transformers has no class for the layer; the one here is its
published formula with transformers' Qwen2 decoder layer inside: of row t, from the state h after the final norm and the embedding
e of token t + 1, norm(layer(proj [norm h; norm e])), and the model's head for token t + 2.
golden.safetensors has what oracle_model.py's cases have, and
  mtp_logits              (rows, vocab); the last row of a sequence reads token 0
  mtp_row, mtp_target     a log-prob per row with two successors
  mtp_logp, mtp_dlogp     at temperature 1; random d loss / d logp
  mtp_grad.NAME           of the loss of both, the head's weights held constant in the second
"""
import os
import sys

import torch
from oracle_model import SHAPE, golden_pass, randomize, write_json
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

CONFIG = dict(SHAPE, tie_word_embeddings=False, rope_theta=640000.0, use_sliding_window=False, rms_norm_eps=1e-5)
NORMS = "token_layernorm", "hidden_layernorm", "final_layernorm"


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        for name in NORMS:
            setattr(self, name, Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Qwen2DecoderLayer(config, 0)
        self.config = config

    def forward(self, model, ids, states):
        """States for the tokens after the next, of one sequence."""
        following = torch.cat([ids[1:], torch.zeros(1, dtype=ids.dtype)])[None]
        e = model.model.embed_tokens(following)
        x = self.input_proj(torch.cat([self.hidden_layernorm(states), self.token_layernorm(e)], -1))
        pos = torch.arange(len(ids))[None]
        mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None,
                                  position_ids=pos)
        out = self.layer(x, attention_mask=mask, position_ids=pos, position_embeddings=model.model.rotary_emb(x, pos))
        return self.final_layernorm(out[0] if isinstance(out, tuple) else out)[0]


def file_names(name):
    """layer.mlp.up_proj.weight -> model.mtp_layers.0.mlp.up_proj.weight"""
    return "model.mtp_layers.0." + name.removeprefix("layer.")


def make(out):
    os.makedirs(out, exist_ok=True)
    write_json(f"{out}/config.json", dict(CONFIG, model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1))
    gen = torch.Generator().manual_seed(sum(map(ord, "mimo")))
    config = Qwen2Config(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    config._attn_implementation = "eager"
    mtp = Head(config).float().eval()
    randomize(model, gen)
    mtp.config.model_type = "mimo"
    randomize(mtp, gen)
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    state |= {file_names(k): v.contiguous() for k, v in mtp.state_dict().items()}
    save_file(state, f"{out}/model.safetensors", metadata={"format": "pt"})
    seqs, golden = golden_pass(model, gen)
    golden |= {f"grad.{k}": p.grad.clone() for k, p in model.named_parameters()}

    row, target, at = [], [], 0
    for s in seqs:
        row += range(at, at + len(s) - 2)
        target += s[2:].tolist()
        at += len(s)
    row, target = torch.tensor(row, dtype=torch.int32), torch.tensor(target, dtype=torch.int32)
    dlogp = 0.3 * torch.randn(len(row), generator=gen)
    logits = []
    for s in seqs:
        states = model.model(input_ids=s[None]).last_hidden_state
        logits.append(mtp(model, s, states) @ model.lm_head.weight.detach().T)
    logp = torch.log_softmax(torch.cat(logits)[row.long()], -1).gather(1, target.long()[:, None])[:, 0]
    (dlogp @ logp).backward()  # onto the gradients of the pass before
    golden |= {"mtp_logits": torch.cat(logits).detach(), "mtp_row": row, "mtp_target": target, "mtp_logp": logp.detach(),
               "mtp_dlogp": dlogp}
    golden |= {f"mtp_grad.{k}": p.grad for k, p in model.named_parameters()}
    golden |= {f"mtp_grad.{file_names(k)}": p.grad for k, p in mtp.named_parameters()}
    save_file({k: v.contiguous() for k, v in golden.items()}, f"{out}/golden.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    make(f"{sys.argv[1]}/mimo")
