"""The GRPO recipe of scripts/learn_gpu.sh in a plain torch loop, from the same start, beside `verlc ppo`.

Group-normalised advantages (Shao et al. 2024), the clipped loss with its dual clip, token mean, an entropy
bonus, the low-variance KL estimator against the start (verl's low_var_kl); AdamW and cosine schedule as verl's.
Sampling by transformers' generate from a copy of the weights in the compute type; the accuracy is greedy.
fp32 master weights; products in bf16 on a GPU, fp32 on a CPU.
Nothing here is fast. Needs torch and transformers.

  python tools/learn_torch.py MODEL TRAIN.jsonl TEST.jsonl OUT_DIR [--steps N] [--seed S] ...

Writes OUT_DIR/metrics.jsonl: {"step", "data"} lines under verl's names."""

import argparse
import collections
import contextlib
import copy
import json
import math
import pathlib
import random
import re
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CLIP_GRAD, CLIP_LOW, DUAL_CLIP, MINI_BATCHES = 1.0, 0.2, 3.0, 2


def score(text, truth):
    """GSM8K's strict rule: the last number after ####, compared as text."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", text[-300:])
    return float(bool(found) and found[-1].replace(",", "").replace("$", "") == truth)


class Loop:
    def __init__(self, a):
        self.a = a
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tok = AutoTokenizer.from_pretrained(a.model, padding_side="left")
        # eager: the first positions of a prompt padded on the left see nothing, and sdpa may make NaN of that
        load = lambda: AutoModelForCausalLM.from_pretrained(  # noqa: E731
            a.model, dtype=torch.float32, attn_implementation="eager").to(self.device)
        self.policy, self.reference = load(), load().eval() if a.kl else None
        half = self.device == "cuda"
        self.sampler = copy.deepcopy(self.policy).to(torch.bfloat16 if half else torch.float32).eval()
        self.autocast = lambda: torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()
        self.opt = torch.optim.AdamW(self.policy.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.01)

    def rows(self, path):
        """[(prompt in the chat template, ground truth)]"""
        found = [json.loads(line) for line in open(path)]
        return [(self.tok.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=False),
                 r["reward_model"]["ground_truth"]) for r in found]

    @torch.no_grad()
    def sample(self, prompts, n, greedy):
        """(ids of prompts and responses, attention mask, mask of response tokens, prompts' width), texts.
        A response's end token counts, what follows it does not."""
        for to, source in zip(self.sampler.parameters(), self.policy.parameters()):
            to.copy_(source)
        batch = self.tok(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(self.device)
        how = {"do_sample": False}
        if not greedy:
            how = {"do_sample": True, "temperature": self.a.temperature, "top_k": 0, "top_p": 1.0}
        ids = self.sampler.generate(**batch, **how, max_new_tokens=self.a.new, num_return_sequences=n,
                                    pad_token_id=self.tok.pad_token_id, eos_token_id=self.tok.eos_token_id)
        width = batch.input_ids.shape[1]
        ended = ids[:, width:] == self.tok.eos_token_id
        mask = (ended.cumsum(1) - ended.long()) == 0
        attention = torch.cat([batch.attention_mask.repeat_interleave(n, 0), mask.long()], 1)
        return (ids, attention, mask, width), self.tok.batch_decode(ids[:, width:], skip_special_tokens=True)

    def log_probs(self, model, ids, attention, width):
        """Log-probs of the response tokens and the entropies of what they were drawn from."""
        position = (attention.cumsum(1) - 1).clamp(min=0)
        with self.autocast():
            out = model(input_ids=ids, attention_mask=attention, position_ids=position,
                        logits_to_keep=ids.shape[1] - width + 1)
        logp = torch.log_softmax(out.logits[:, :-1].float() / self.a.temperature, -1)
        return logp.gather(-1, ids[:, width:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)

    def update(self, batch, advantages):
        """One optimizer step a mini-batch; losses are token means of the mini-batch."""
        (ids, attention, mask, width), a = batch, self.a
        cuts = [slice(lo, lo + a.micro) for lo in range(0, len(ids), a.micro)]
        with torch.no_grad():
            old, ref = (torch.cat([self.log_probs(m, ids[s], attention[s], width)[0] for s in cuts])
                        if m else None for m in (self.policy, self.reference))
        sums = collections.Counter()  # of the mini-batches' numbers
        for part in torch.arange(len(ids), device=self.device).chunk(MINI_BATCHES):
            tokens = mask[part].sum()
            self.opt.zero_grad(set_to_none=True)
            for s in part.split(a.micro):
                logp, entropy = self.log_probs(self.policy, ids[s], attention[s], width)
                ratio, adv = torch.exp((logp - old[s]).clamp(-20, 20)), advantages[s, None]
                loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - CLIP_LOW, 1 + a.clip_high))
                loss = torch.where(adv < 0, torch.minimum(loss, -adv * DUAL_CLIP), loss)
                terms = [(1.0, "actor/pg_loss", loss), (-a.entropy, "actor/entropy", entropy)]
                if a.kl:
                    gap = (ref[s] - logp).clamp(-20, 20)
                    terms.append((a.kl, "actor/kl_loss", (torch.exp(gap) - gap - 1).clamp(-10, 10)))
                terms = [(factor, name, (x * mask[s]).sum() / tokens) for factor, name, x in terms]
                sum(factor * mean for factor, _, mean in terms).backward()
                for _, name, mean in terms:
                    sums[name] += mean.item()
            norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP_GRAD)
            sums["actor/grad_norm"] += norm.item()
            self.opt.step()
        return {name: value / MINI_BATCHES for name, value in sums.items()}

    def accuracy(self, test):
        _, texts = self.sample([p for p, _ in test], 1, True)
        return sum(score(t, truth) for t, (_, truth) in zip(texts, test)) / len(test)


def train(loop, log):
    a = loop.a
    problems, test, order, shuffle = loop.rows(a.train), loop.rows(a.test), [], random.Random(a.seed)
    log(0, {"val/accuracy": loop.accuracy(test)})
    for step in range(1, min(a.steps, a.stop or a.steps) + 1):
        begin = time.time()
        if len(order) < a.prompts:
            order = shuffle.sample(range(len(problems)), len(problems)) if a.shuffle else range(len(problems))
        part, order = [problems[i] for i in order[:a.prompts]], order[a.prompts:]
        cosine = (1 + math.cos(math.pi * (step - 1) / a.steps)) / 2
        for group in loop.opt.param_groups:
            group["lr"] = a.lr * (a.floor + (1 - a.floor) * cosine)
        batch, texts = loop.sample([p for p, _ in part], a.samples, False)
        generated = time.time() - begin
        reward = torch.tensor([score(t, part[i // a.samples][1]) for i, t in enumerate(texts)])
        reward = reward.view(a.prompts, a.samples)
        advantages = (reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-6)
        data = {"critic/rewards/mean": reward.mean().item()}
        data |= loop.update(batch, advantages.view(-1).to(loop.device))
        data |= {"timing_s/gen": generated, "timing_s/step": time.time() - begin}
        if step % a.test_every == 0 or step == a.steps:
            data["val/accuracy"] = loop.accuracy(test)
        log(step, data)


def main():
    p = argparse.ArgumentParser()
    for name, kind in (("model", str), ("train", str), ("test", str), ("out", pathlib.Path)):
        p.add_argument(name, type=kind)
    for name, value in (("steps", 400), ("stop", 0), ("seed", 1), ("prompts", 1024), ("samples", 8),
                        ("new", 48), ("micro", 4096), ("test-every", 20)):
        p.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("lr", 3e-4), ("floor", 0.1), ("clip-high", 0.28), ("entropy", 0.003), ("kl", 0.0),
                        ("temperature", 1.0)):
        p.add_argument(f"--{name}", type=float, default=value)
    p.add_argument("--shuffle", type=lambda word: word == "True", default=True)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    with open(a.out / "metrics.jsonl", "w") as out:
        def log(step, data):
            out.write(json.dumps({"step": step, "data": data}) + "\n")
            out.flush()

        train(Loop(a), log)


main()
