#!/usr/bin/env python3
"""Losses of an update after rejection sampling, by verl 0.9.1's own functions: what tests/golden/test_ppo_rejection.c
must reproduce.

  oracle_rejection.py [DIR]     writes DIR/rejection.json (tests/fixtures/train)

Recorded samples, rollout log-probs, values and reference log-probs; the policy is the tiny Qwen2.5 of tests/fixtures/model/qwen2,
the critic that of tests/fixtures/critic/qwen2, both in fp64. verl's rollout correction rejects tokens, its gae estimates, its
ppo_loss and value_loss aggregate. Its default trainer changes response_mask alone and counts loss_mask, which is as before;
the trainer that its asynchronous ones are made of counts response_mask (left_right_2_no_padding): both are here, by `counts`.
"""
import json
import os
import sys

import oracle_grpo
import oracle_verl
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

sys.meta_path.append(oracle_verl.Absent())  # last: only what is really missing
import verl.trainer.ppo.rollout_corr_helper as corr  # noqa: E402
import verl.workers.utils.losses as losses  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
CRITIC = os.path.join(HERE, "../tests/fixtures/critic/qwen2")
# test_ppo_rejection.c has the same numbers.
V = dict(seed=4, steps=1, groups=3, n=3, temperature=0.8)
KEYS = dict(rollout_is="token", rollout_is_threshold=1.1, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.3")
KL_COEF, ENTROPY_COEF, CLIP, SCALE = 0.1, 0.02, 0.5, 16
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Data(dict):
    """A padded TensorDict."""
    def select(self, *names):
        return Data({n: self[n] for n in names})

    def to_padded_tensor(self):
        return self


def padded(rows, mask):
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i, :len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def rows_of(x, mask):
    return [x[i, :int(mask[i].sum())].tolist() for i in range(len(x))]


def values_of(model, batch, mask):
    """The critic's value of the state before each response token."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    rows = []
    for i, (p, r, _, _) in enumerate(batch):
        v = model(input_ids=torch.cat((p, r))[None]).logits[0, len(p) - 1:-1, 0]
        rows.append(torch.nn.functional.pad(v, (0, out.shape[1] - len(r))))
    return torch.stack(rows)


def grad_norm(model, loss):
    model.zero_grad()
    loss.backward(retain_graph=True)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30).item()


def actor_case(agg, batch, logp, entropy, mask, model, count):
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(), loss_agg_mode=agg,
                         use_kl_loss=True, kl_loss_coef=KL_COEF, entropy_coeff=ENTROPY_COEF, clip_ratio_low=0.2,
                         clip_ratio_high=0.28)
    if agg.endswith("norm"):
        object.__setattr__(config, "loss_scale_factor", SCALE)
    data = Data(batch, dp_size=1, batch_num_tokens=count, global_batch_size=len(mask))
    loss, m = losses.ppo_loss(config, {"log_probs": logp, "entropy": entropy}, data)
    plain = {k: float(v.aggregate() if hasattr(v, "aggregate") else v) for k, v in m.items()}
    of_batch = core_algos.agg_loss(entropy.detach(), mask, agg, loss_scale_factor=SCALE if agg.endswith("norm") else None)
    return {"actor/pg_loss": plain["actor/pg_loss"], "actor/entropy_loss": plain["actor/entropy_loss"],
            "actor/kl_loss": plain["kl_loss"], "actor/grad_norm": grad_norm(model, loss), "actor/entropy": of_batch.item()}


def critic_case(agg, batch, values, mask, model, count):
    config = CriticConfig(strategy="fsdp", loss_agg_mode=agg, cliprange_value=CLIP, ppo_micro_batch_size_per_gpu=1)
    if agg.endswith("norm"):
        object.__setattr__(config, "loss_scale_factor", SCALE)
    data = Data(batch, dp_size=1, batch_num_tokens=count, global_batch_size=len(mask))
    loss, m = losses.value_loss(config, {"values": values}, data)
    return {"critic/vf_loss": loss.item(), "critic/grad_norm": grad_norm(model, loss)}


def main(out):
    torch.set_num_threads(1)
    oracle_verl.precision(torch.float64)
    losses.no_padding_2_padding = lambda x, _: x
    losses.torch = core_algos.torch
    actor = AutoModelForCausalLM.from_pretrained(oracle_grpo.MODEL, dtype=torch.float64, attn_implementation="eager").eval()
    critic = AutoModelForTokenClassification.from_pretrained(CRITIC, dtype=torch.float64, attn_implementation="eager").eval()
    samples = oracle_grpo.rollouts(V)[0]
    logp, entropy, mask = oracle_grpo.token_logp(actor, samples, V["temperature"])
    mask, now = mask.long(), values_of(critic, samples, mask)
    gen = torch.Generator().manual_seed(9)
    noise = lambda scale: torch.randn(mask.shape, generator=gen) * scale  # noqa: E731
    floats = lambda x: rows_of(x.detach().float(), mask)  # noqa: E731  what the fixture hands over is fp32
    given = {"rollout_log_probs": floats((logp + noise(0.2)).clamp(max=-1e-3)), "ref_log_prob": floats(logp + noise(0.1)),
             "values": floats(now + noise(0.5))}
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for i, (_, r, _, score) in enumerate(samples):
        rewards[i, len(r) - 1] = score
    batch = {k: padded(x, mask) for k, x in given.items()}
    batch |= {"old_log_probs": logp.detach(), "response_mask": mask}
    data, _ = corr.compute_rollout_correction_and_add_to_batch(
        DataProto.from_dict(batch), OmegaConf.create(dict(KEYS, bypass_mode=False, rollout_is_batch_normalize=False)))
    batch, left = data.batch, data.batch["response_mask"]
    batch["advantages"], batch["returns"] = core_algos.compute_gae_advantage_return(rewards, batch["values"], left, 1.0, 0.95)
    cases = []
    for agg in MODES:
        for counts, n in (("all", int(mask.sum())), ("left", int(left.sum()))):
            want = actor_case(agg, batch, logp, entropy, mask, actor, n)
            cases.append({"agg": agg, "counts": counts, "want": want | critic_case(agg, batch, now, mask, critic, n)})
    fixture = {"samples": [{"prompt": p.tolist(), "response": r.tolist(), "uid": u, "score": s, "left": left[i, :len(r)].tolist(),
                            **{k: x[i] for k, x in given.items()}} for i, (p, r, u, s) in enumerate(samples)], "cases": cases}
    path = f"{out}/rejection.json"
    with open(path, "w") as f:
        f.write(json.dumps(fixture, separators=(",", ":")) + "\n")
    print(f"{path}: {len(samples)} samples, {int(left.sum())} of {int(mask.sum())} tokens left, {len(cases)} cases, "
          f"{os.path.getsize(path)} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../tests/fixtures/train"))
