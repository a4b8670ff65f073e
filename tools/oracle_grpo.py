#!/usr/bin/env python3
"""GRPO in plain torch: what src/train must reproduce, step by step.

  oracle_grpo.py [DIR]     writes DIR/NAME.safetensors (tests/fixtures/train)

Starts from the tiny random Qwen2.5 of tools/oracle_model.py (tests/fixtures/model/qwen2) and trains it on recorded
rollouts: seeded random prompts and responses of ragged lengths, and scores.  Padded batches, one forward of the whole
mini-batch, autograd, torch.optim.AdamW; nothing of verlc and no code of verl.  The formulas are verl 0.9.1's:
compute_grpo_outcome_advantage, compute_policy_loss_vanilla, kl_penalty(low_var_kl), agg_loss.

The same run in fp64 tells how far fp32 itself is from the exact result; test_ppo_grpo.c compares with the fp32 run.

Tensors (S training steps, B samples a step, U optimizer steps a training step):
  prompt_len, response_len (S*B) i32   prompts, responses i32, flat in sample order   uid (S*B) i64   score (S*B) f64
  loss, pg_loss, kl_loss, entropy, grad_norm, clipfrac, clipfrac_lower (S*U) f64   lr (S) f64
  advantage (S*B) f64                  of each sample (the same for all its tokens)
  old_logp, ref_logp f32, flat         of the responses' tokens; old_logp is another policy's where noise is not 0
  weights.STEP.NAME                    three tensors after each training step; all after the last: final.NAME
"""
import copy
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "../tests/fixtures/model/qwen2")
VOCAB, PAD = 100, 0
WATCHED = ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias", "model.layers.1.mlp.down_proj.weight")

# test_ppo_grpo.c has the same numbers.
COMMON = dict(n=4, temperature=0.8, clip_low=0.2, clip_high=0.28, clip_c=3.0, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.01)
VARIANTS = {
    # ten optimizer steps, one a training step, on log-probs of another policy: every branch of the clip is taken
    "token_mean": dict(COMMON, seed=1, steps=10, groups=4, mini=4, epochs=1, agg="token-mean", by_std=True, kl_coef=0.2,
                       entropy_coeff=0.0, noise=0.4, lr=1e-3, warmup=2, grad_clip=0.5),
    # Dr.GRPO: two mini-batches, two epochs; the ratio leaves 1 by the updates alone
    "seq_norm": dict(COMMON, seed=2, steps=3, groups=4, mini=2, epochs=2, agg="seq-mean-token-sum-norm", by_std=False, kl_coef=0.1,
                     entropy_coeff=0.02, noise=0.0, lr=4e-3, warmup=0, grad_clip=1.0, width=24),
}


def rollouts(v):
    """Samples of all steps: prompt of its group, response, score."""
    gen = torch.Generator().manual_seed(v["seed"])
    steps = []
    for s in range(v["steps"]):
        batch = []
        for g in range(v["groups"]):
            n = int(torch.randint(1, 30, (1,), generator=gen))
            prompt = torch.randint(3, VOCAB, (n,), generator=gen)
            for i in range(v["n"]):
                n = int(torch.randint(1, 25, (1,), generator=gen))
                response = torch.randint(3, VOCAB, (n,), generator=gen)
                score = float(torch.randint(0, 2, (1,), generator=gen))
                if g == 1:  # no spread: advantage 0, but its tokens count
                    score = 1.0
                batch.append((prompt, response, s * v["groups"] + g, score))
        steps.append(batch)
    return steps


def advantages(batch, v):
    groups = {}
    for _, _, uid, score in batch:
        groups.setdefault(uid, []).append(score)
    out = []
    for _, _, uid, score in batch:
        x = torch.tensor(groups[uid], dtype=torch.float64)
        a = score - x.mean()
        out.append(float(a / (x.std() + 1e-6) if v["by_std"] else a))
    return out


def token_logp(model, batch, temperature):
    """log-probs and entropies (B, T) of the responses, right-padded, and their mask."""
    full = [torch.cat((p, r)) for p, r, _, _ in batch]
    width, t_max = max(map(len, full)), max(len(r) for _, r, _, _ in batch)
    ids = torch.full((len(full), width), PAD)
    att = torch.zeros(len(full), width, dtype=torch.long)
    for i, x in enumerate(full):
        ids[i, : len(x)], att[i, : len(x)] = x, 1
    logits = model(input_ids=ids, attention_mask=att).logits / temperature
    lsm = torch.log_softmax(logits, -1)
    all_logp = lsm[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    all_entropy = -(lsm.exp() * lsm).sum(-1)[:, :-1]
    logp, entropy, mask = [], [], torch.zeros(len(full), t_max)
    for i, (p, r, _, _) in enumerate(batch):
        at = slice(len(p) - 1, len(p) - 1 + len(r))
        fill = (0, t_max - len(r))
        logp.append(torch.nn.functional.pad(all_logp[i, at], fill))
        entropy.append(torch.nn.functional.pad(all_entropy[i, at], fill))
        mask[i, : len(r)] = 1
    return torch.stack(logp), torch.stack(entropy), mask.to(logits.dtype)


def agg_loss(x, mask, v):
    if v["agg"] == "token-mean":
        return (x * mask).sum() / mask.sum()
    rows = (mask.sum(-1) > 0).sum()
    return (x * mask).sum(-1).sum() / rows / v["width"]  # seq-mean-token-sum-norm


def losses(logp, entropy, mask, old, ref, adv, v):
    ratio = (logp - old).clamp(-20, 20).exp()
    plain = -adv * ratio
    clipped = -adv * ratio.clamp(1 - v["clip_low"], 1 + v["clip_high"])
    upper = torch.maximum(plain, clipped)
    lower = torch.minimum(-adv * v["clip_c"], upper)  # dual clip, for advantages below 0
    pg = agg_loss(torch.where(adv < 0, lower, upper), mask, v)
    d = (ref - logp).clamp(-20, 20)
    kl = agg_loss((d.exp() - d - 1).clamp(-10, 10), mask, v)
    ent = agg_loss(entropy, mask, v)
    frac = ((clipped > plain) * mask).sum() / mask.sum()
    frac_lower = ((upper > -adv * v["clip_c"]) * (adv < 0) * mask).sum() / mask.sum()
    # how near a token is to a corner of the clip, where rounding would decide the branch
    corners = torch.tensor([1 - v["clip_low"], 1 + v["clip_high"], v["clip_c"]])
    margin = ((ratio[..., None] - corners).abs() + 9 * (1 - mask[..., None]) + 9 * (adv[..., None] == 0)).min()
    return dict(loss=pg - v["entropy_coeff"] * ent + v["kl_coef"] * kl, pg_loss=pg, kl_loss=kl, entropy=ent, clipfrac=frac,
                clipfrac_lower=frac_lower, margin=margin)


def lr_at(step, v):
    """constant with linear warmup, verl's schedule; step counts from 0"""
    return v["lr"] * min(1.0, step / v["warmup"]) if v["warmup"] else v["lr"]


def flat(x, mask):
    return x[mask > 0]


def train(v, dtype):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation="eager").eval()
    reference = copy.deepcopy(model)
    names = [k for k, _ in model.named_parameters()]
    opt = torch.optim.AdamW(model.parameters(), lr=v["lr"], betas=v["betas"], eps=v["eps"], weight_decay=v["weight_decay"])
    gen = torch.Generator().manual_seed(v["seed"] + 100)
    rec = {k: [] for k in ("loss", "pg_loss", "kl_loss", "entropy", "clipfrac", "clipfrac_lower", "margin", "grad_norm", "lr",
                           "advantage", "old_logp", "ref_logp")}
    out = {}
    for step, batch in enumerate(rollouts(v)):
        with torch.no_grad():
            old, _, mask = token_logp(model, batch, v["temperature"])
            ref = token_logp(reference, batch, v["temperature"])[0]
        noise = torch.randn(old.shape, generator=gen) * v["noise"]
        if v["noise"]:
            # float(): what the fixture hands to the other side is fp32
            old = (old.float() + noise).clamp(max=-1e-3).to(dtype)
        adv = advantages(batch, v)
        rec["advantage"] += adv
        rec["old_logp"].append(flat(old, mask).float())
        rec["ref_logp"].append(flat(ref, mask).float())
        adv = torch.tensor(adv, dtype=dtype)[:, None].expand_as(mask)
        for group in opt.param_groups:
            group["lr"] = lr_at(step, v)
        rec["lr"].append(lr_at(step, v))
        for _ in range(v["epochs"]):
            size = v["mini"] * v["n"]
            for lo in range(0, len(batch), size):
                at = slice(lo, lo + size)
                logp, entropy, m = token_logp(model, batch[at], v["temperature"])
                t = m.shape[1]
                r = losses(logp, entropy, m, old[at, :t], ref[at, :t], adv[at, :t], v)
                opt.zero_grad()
                r["loss"].backward()
                rec["grad_norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), v["grad_clip"]).item())
                opt.step()
                for k, x in r.items():
                    rec[k].append(x.item())
        state = model.state_dict()
        for name in WATCHED:
            out[f"weights.{step}.{name}"] = state[name].clone()
    out |= {f"final.{k}": model.state_dict()[k].clone() for k in names}
    return rec, out


def nmse(a, b):
    a, b = a.double(), b.double()
    return ((a - b).square().sum() / b.square().sum()).item()


def make(out):
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(1)
    for name, v in VARIANTS.items():
        rec, weights = train(v, torch.float32)
        exact, exact_weights = train(v, torch.float64)
        steps = rollouts(v)
        flat_batch = [s for b in steps for s in b]
        scalars = ("loss", "pg_loss", "kl_loss", "entropy", "grad_norm", "clipfrac", "clipfrac_lower", "lr", "advantage")
        fixture = {k: torch.tensor(rec[k], dtype=torch.float64) for k in scalars}
        fixture |= {k: torch.cat(rec[k]).float() for k in ("old_logp", "ref_logp")}
        fixture |= {
            "prompt_len": torch.tensor([len(p) for p, _, _, _ in flat_batch], dtype=torch.int32),
            "response_len": torch.tensor([len(r) for _, r, _, _ in flat_batch], dtype=torch.int32),
            "prompts": torch.cat([p for p, _, _, _ in flat_batch]).int(),
            "responses": torch.cat([r for _, r, _, _ in flat_batch]).int(),
            "uid": torch.tensor([u for _, _, u, _ in flat_batch]),
            "score": torch.tensor([s for _, _, _, s in flat_batch], dtype=torch.float64),
        }
        save_file({k: x.contiguous() for k, x in (fixture | weights).items()}, f"{out}/{name}.safetensors")
        start = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
        finals = [k for k in weights if k.startswith("final.")]
        print(f"{name}: {len(rec['loss'])} optimizer steps, clipped {min(rec['clipfrac']):.3f} to {max(rec['clipfrac']):.3f}, dual "
              f"{max(rec['clipfrac_lower']):.3f}, nearest to a corner {min(rec['margin']):.1e}, kl {max(rec['kl_loss']):.2e}, "
              f"grad norm {min(rec['grad_norm']):.3f} to {max(rec['grad_norm']):.3f}")
        print("  fp32 against fp64: loss %.1e, grad norm %.1e, weights NMSE %.1e (they moved by %.1e)" % (
            max(abs(a - b) for a, b in zip(rec["loss"], exact["loss"])),
            max(abs(a - b) / b for a, b in zip(rec["grad_norm"], exact["grad_norm"])),
            max(nmse(weights[k], exact_weights[k]) for k in finals), max(nmse(weights[k], start[k[6:]]) for k in finals)))
        if min(rec["margin"]) < 1e-5:
            sys.exit(f"{name}: a token stands on a corner of the clip; choose another seed")
    print(f"{out}: {sum(os.path.getsize(os.path.join(out, f)) for f in os.listdir(out))} bytes")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../tests/fixtures/train"))
