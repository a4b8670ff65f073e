"""GRPO in a plain torch loop, for comparison with `verlc ppo` from the same start (make learn-gpu).

Group-normalised advantages (Shao et al. 2024), one optimizer step a batch, so that the ratio
is 1 and clipping does nothing; token mean; the low-variance KL estimator against the start;
AdamW as verl sets it.  Sampling by transformers' generate at temperature 1, greedy for the
accuracy.  Nothing here is fast.  Needs torch with CUDA, transformers, pyarrow.

  python tools/learn_torch.py MODEL TRAIN.parquet TEST.parquet OUT.jsonl [--steps N] [--seed S]

Writes {"step", "data": {"reward", "accuracy"}} lines."""

import argparse
import json
import random
import re
import time

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, NEW, MICRO = 64, 8, 192, 64
LR, KL, CLIP = 2e-5, 0.001, 1.0


def score(text, truth):
    """GSM8K's strict rule: the last number after ####."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", text[-300:])
    return float(bool(found) and found[-1].replace(",", "").replace("$", "").rstrip(".") == str(truth))


def rows(path):
    return [(r["prompt"], r["reward_model"]["ground_truth"]) for r in pq.read_table(path).to_pylist()]


@torch.no_grad()
def sample(model, tok, prompts, n, greedy):
    """Ids (rows, prompt + response), the mask of response tokens up to the end token, texts."""
    texts = [tok.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
    batch = tok(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.eval()
    with torch.autocast("cuda", torch.bfloat16):
        ids = model.generate(**batch, max_new_tokens=NEW, num_return_sequences=n, pad_token_id=tok.pad_token_id,
                             eos_token_id=[tok.eos_token_id, tok.pad_token_id], **how)
    width = batch.input_ids.shape[1]
    response = ids[:, width:]
    ended = (response == tok.eos_token_id) | (response == tok.pad_token_id)
    mask = (ended.cumsum(1) - ended.long()) == 0  # the end token counts, what follows does not
    attention = torch.cat([batch.attention_mask.repeat_interleave(n, 0), mask.long()], 1)
    return ids, attention, mask, width, tok.batch_decode(response, skip_special_tokens=True)


def log_probs(model, ids, attention, width):
    position = (attention.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=attention, position_ids=position).logits[:, width - 1:-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, width:, None]).squeeze(-1)


def update(model, reference, opt, batch, advantages):
    ids, attention, mask, width, _ = batch
    tokens = mask.sum()
    model.train()
    opt.zero_grad(set_to_none=True)
    for lo in range(0, len(ids), MICRO):
        s = slice(lo, lo + MICRO)
        logp = log_probs(model, ids[s], attention[s], width)
        with torch.no_grad():
            ref = log_probs(reference, ids[s], attention[s], width)
        ratio = torch.exp(logp - logp.detach())
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        loss = ((-advantages[s, None] * ratio + KL * kl) * mask[s]).sum() / tokens
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    opt.step()


def accuracy(model, tok, test):
    right = 0.0
    for lo in range(0, len(test), 250):
        part = test[lo:lo + 250]
        *_, texts = sample(model, tok, [p for p, _ in part], 1, True)
        right += sum(score(t, truth) for t, (_, truth) in zip(texts, part))
    return right / len(test)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model"), p.add_argument("train"), p.add_argument("test"), p.add_argument("out")
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    tok = AutoTokenizer.from_pretrained(a.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).cuda()
    reference = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).cuda().eval()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    train, test, order = rows(a.train), rows(a.test), random.Random(a.seed)
    order.shuffle(train)
    start = time.time()
    with open(a.out, "w") as out:
        def log(step, data):
            out.write(json.dumps({"step": step, "data": data}) + "\n")
            out.flush()
            print(f"step {step}: {data} after {time.time() - start:.0f} s", flush=True)

        log(0, {"accuracy": accuracy(model, tok, test)})
        for step in range(1, a.steps + 1):
            part = [train[(step * PROMPTS + i) % len(train)] for i in range(PROMPTS)]
            batch = sample(model, tok, [q for q, _ in part], SAMPLES, False)
            reward = torch.tensor([score(t, part[i // SAMPLES][1]) for i, t in enumerate(batch[4])]).view(PROMPTS, SAMPLES)
            advantages = ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1).cuda()
            update(model, reference, opt, batch, advantages)
            data = {"reward": reward.mean().item()}
            if step % 20 == 0 or step == a.steps:
                data["accuracy"] = accuracy(model, tok, test)
            log(step, data)


main()
