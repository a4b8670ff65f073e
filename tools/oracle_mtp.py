#!/usr/bin/env python3
"""Golden numbers of layers for multi-token prediction, from torch in fp32: cases next to those of oracle_model.py.

  oracle_mtp.py DIR [NAME ...]    writes DIR/NAME (tests/fixtures/model): mimo, qwen3_5_mtp, ...

MiMo's class derives from transformers' Qwen2; the others' leave the layer's tensors out as they load. transformers has no class for
the layer; the one here is its published formula with transformers' decoder layer of full attention inside: of row t, from the
state h after the final norm and the embedding e of token t + 1, norm(layer(proj [norm h; norm e])) in MiMo,
norm(layer(proj [norm e; norm h])) in Qwen3.5 and Qwen3-Next, and the model's head for token t + 2. The
files have a matrix of each expert there, whatever the model's layers have.
golden.safetensors has what oracle_model.py's cases have, and
  mtp_logits              (rows, vocab); the last row of a sequence reads token 0
  mtp_row, mtp_target     a log-prob per row with two successors
  mtp_logp, mtp_dlogp     at temperature 1; random d loss / d logp
  mtp_grad.NAME           of the loss of both, the head's weights held constant in the second
"""
import os
import sys

import torch
from oracle_model import CASES, SHAPE, golden_pass, randomize, released, write_json
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe, modeling_qwen3_5_moe
from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

MIMO = dict(SHAPE, tie_word_embeddings=False, rope_theta=640000.0, use_sliding_window=False, rms_norm_eps=1e-5)


class Family:
    """What the layer is made of, and the names of its tensors: token_norm, hidden_norm, proj, norm, and its layer's."""

    def __init__(self, config, layer, norm, names, token_first, prefix="mtp.", layer_prefix="mtp.layers.0."):
        self.config, self.layer, self.norm, self.names, self.token_first = config, layer, norm, names, token_first
        self.prefix, self.layer_prefix = prefix, layer_prefix

    def file_name(self, name):
        """layer.mlp.up_proj.weight -> mtp.layers.0.mlp.up_proj.weight"""
        first, _, rest = name.partition(".")
        return self.layer_prefix + rest if first == "layer" else f"{self.prefix}{self.names[first]}.{rest}"


QWEN_NAMES = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "proj": "fc", "norm": "norm"}
FAMILIES = {
    "mimo": Family(Qwen2Config, modeling_qwen2.Qwen2DecoderLayer, modeling_qwen2.Qwen2RMSNorm,
                   {"token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "proj": "input_proj",
                    "norm": "final_layernorm"}, False, "model.mtp_layers.0.", "model.mtp_layers.0."),
    "qwen3_5_text": Family(configuration_qwen3_5.Qwen3_5TextConfig, modeling_qwen3_5.Qwen3_5DecoderLayer,
                           modeling_qwen3_5.Qwen3_5RMSNorm, QWEN_NAMES, True),
    "qwen3_5_moe_text": Family(configuration_qwen3_5_moe.Qwen3_5MoeTextConfig, modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer,
                               modeling_qwen3_5_moe.Qwen3_5MoeRMSNorm, QWEN_NAMES, True),
    "qwen3_next": Family(configuration_qwen3_next.Qwen3NextConfig, modeling_qwen3_next.Qwen3NextDecoderLayer,
                         modeling_qwen3_next.Qwen3NextRMSNorm, QWEN_NAMES, True),
}
MTP_CASES = {
    "mimo": dict(MIMO, model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1),
    "qwen3_5_mtp": dict(CASES["qwen3_5"], num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=1),
    "qwen3_5_mtp_experts": dict(CASES["qwen3_5_experts"], mtp_num_hidden_layers=1),
    # config.json does not say that there is one
    "qwen3_next_mtp": dict(CASES["qwen3_next"], num_hidden_layers=2, full_attention_interval=2, mlp_only_layers=[], num_experts=4),
}


class Head(nn.Module):
    def __init__(self, config, family):
        super().__init__()
        for name in ("token_norm", "hidden_norm", "norm"):
            setattr(self, name, family.norm(config.hidden_size, eps=config.rms_norm_eps))
        self.proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        self.layer = family.layer(config, kinds.index("full_attention"))
        self.config, self.family = config, family

    def forward(self, model, ids, states):
        """States for the tokens after the next, of one sequence."""
        following = torch.cat([ids[1:], torch.zeros(1, dtype=ids.dtype)])[None]
        e, h = self.token_norm(model.model.embed_tokens(following)), self.hidden_norm(states)
        x = self.proj(torch.cat([e, h] if self.family.token_first else [h, e], -1))
        pos = torch.arange(len(ids))[None]
        mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None,
                                  position_ids=pos)
        out = self.layer(x, attention_mask=mask, position_ids=pos, position_embeddings=model.model.rotary_emb(x, pos))
        return self.norm(out[0] if isinstance(out, tuple) else out)[0]


def make(name, out):
    case, kind = MTP_CASES[name], MTP_CASES[name]["model_type"]
    family = FAMILIES[kind]
    os.makedirs(out, exist_ok=True)
    write_json(f"{out}/config.json", case)
    gen = torch.Generator().manual_seed(sum(map(ord, name)))
    config = family.config(**{k: v for k, v in case.items() if k not in ("model_type", "architectures")})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    config._attn_implementation = "eager"
    mtp = Head(config, family).float().eval()
    randomize(model, gen)
    mtp.config.model_type = kind
    randomize(mtp, gen)
    tied = {"lm_head.weight"} if case["tie_word_embeddings"] else set()
    state = released({k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}, kind)
    state |= released({family.file_name(k): v.contiguous() for k, v in mtp.state_dict().items()}, kind, True)
    save_file(state, f"{out}/model.safetensors", metadata={"format": "pt"})
    seqs, golden = golden_pass(model, gen)

    def keep(prefix, parameters, rename=lambda k: k):
        grads = {rename(k): p.grad.clone() for k, p in parameters.named_parameters() if k not in tied}
        golden.update({f"{prefix}.{k}": v for k, v in released(grads, kind, True).items()})

    keep("grad", model)
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
    keep("mtp_grad", model)
    keep("mtp_grad", mtp, family.file_name)
    save_file({k: v.contiguous() for k, v in golden.items()}, f"{out}/golden.safetensors")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MTP_CASES:
        make(name, f"{sys.argv[1]}/{name}")
