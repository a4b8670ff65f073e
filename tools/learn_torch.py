"""GRPO in a plain torch loop, for comparison with `verlc ppo` from the same start (make learn-gpu).

Group-normalised advantages (Shao et al. 2024), one optimizer step a batch, so that the ratio
is 1 and clipping does nothing; token mean over the batch; the low-variance KL estimator
against the start (verl's low_var_kl); AdamW as verl sets it.  The prompts come in the file's
order.  Sampling by transformers' generate from a copy of the weights in the compute type, at
temperature 1; the accuracy is greedy.  fp32 master weights; products in bf16 on a GPU (--fp32: not), fp32 on a CPU.
Nothing here is fast.  Needs torch, transformers, pyarrow.

  python tools/learn_torch.py MODEL TRAIN.parquet TEST.parquet OUT.jsonl [--steps N] [--seed S] [sizes]
  python tools/learn_torch.py MODEL - - OUT.jsonl --replay RUN/run.db [--final CHECKPOINT/actor] [--fp32]

Writes {"step", "data"} lines under verl's names.  With --replay the samples and scores are those
that a run of verlc has recorded, and each step's metrics stand beside the run's own (`verlc/NAME`);
--final compares the weights after the last step with a checkpoint's.  Exit status 1: in fp32 a metric or the
weights' way differ by 1 % or more (in bf16 the numbers are there to be read: AdamW makes steps of one size of gradients
that differ by rounding)."""

import argparse
import contextlib
import copy
import json
import pathlib
import re
import sqlite3
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CLIP = 1.0
METRICS = ("critic/rewards/mean", "critic/advantages/max", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm")


def score(text, truth):
    """GSM8K's strict rule: the last number after ####, compared as text."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", text[-300:])
    return float(bool(found) and found[-1].replace(",", "").replace("$", "") == str(truth))


def rows(path):
    import pyarrow.parquet as pq

    return [(r["prompt"], r["reward_model"]["ground_truth"]) for r in pq.read_table(path).to_pylist()]


class Loop:
    def __init__(self, a):
        self.a = a
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tok = AutoTokenizer.from_pretrained(a.model, padding_side="left")
        load = lambda: AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).to(self.device)  # noqa: E731
        self.policy, self.reference = load(), load().eval()
        half = self.device == "cuda" and not a.fp32
        self.sampler = copy.deepcopy(self.policy).to(torch.bfloat16 if half else torch.float32).eval()
        self.autocast = lambda: torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()
        self.opt = torch.optim.AdamW(self.policy.parameters(), lr=a.lr, betas=(0.9, 0.999), weight_decay=0.01)

    @torch.no_grad()
    def sample(self, prompts, n, greedy):
        """(ids of prompts and responses, attention mask, mask of response tokens, prompts' width), texts.
        A response's end token counts, what follows it does not."""
        for to, source in zip(self.sampler.parameters(), self.policy.parameters()):
            to.copy_(source)
        texts = [self.tok.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
        batch = self.tok(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(self.device)
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids = self.sampler.generate(**batch, max_new_tokens=self.a.new, num_return_sequences=n, pad_token_id=self.tok.pad_token_id,
                                    eos_token_id=self.tok.eos_token_id, **how)
        width = batch.input_ids.shape[1]
        ended = ids[:, width:] == self.tok.eos_token_id
        mask = (ended.cumsum(1) - ended.long()) == 0
        attention = torch.cat([batch.attention_mask.repeat_interleave(n, 0), mask.long()], 1)
        return (ids, attention, mask, width), self.tok.batch_decode(ids[:, width:], skip_special_tokens=True)

    def log_probs(self, model, ids, attention, width):
        position = (attention.cumsum(1) - 1).clamp(min=0)
        with self.autocast():
            out = model(input_ids=ids, attention_mask=attention, position_ids=position, logits_to_keep=ids.shape[1] - width + 1)
        return torch.log_softmax(out.logits[:, :-1].float(), -1).gather(-1, ids[:, width:, None]).squeeze(-1)

    def update(self, batch, advantages):
        """One optimizer step; the metrics are sums over tokens divided by the batch's tokens."""
        ids, attention, mask, width = batch
        tokens, pg_sum, kl_sum = mask.sum(), 0.0, 0.0
        self.policy.train()
        self.opt.zero_grad(set_to_none=True)
        for lo in range(0, len(ids), self.a.micro):
            s = slice(lo, lo + self.a.micro)
            logp = self.log_probs(self.policy, ids[s], attention[s], width)
            with torch.no_grad():
                ref = self.log_probs(self.reference, ids[s], attention[s], width)
            ratio = torch.exp(logp - logp.detach())
            gap = (ref - logp).clamp(-20, 20)
            kl = ((torch.exp(gap) - gap - 1).clamp(-10, 10) * mask[s]).sum() / tokens
            pg = (-advantages[s, None] * ratio * mask[s]).sum() / tokens
            (pg + self.a.kl * kl).backward()
            pg_sum, kl_sum = pg_sum + pg.item(), kl_sum + kl.item()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP)
        self.opt.step()
        return {"actor/pg_loss": pg_sum, "actor/kl_loss": kl_sum, "actor/grad_norm": norm.item()}

    def step(self, batch, reward):
        """reward: (prompts, samples)."""
        advantages = (reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-6)
        data = {"critic/rewards/mean": reward.mean().item(), "critic/advantages/max": advantages.max().item(),
                "response_length/mean": batch[2].sum(1).float().mean().item()}
        return data | self.update(batch, advantages.view(-1).to(self.device))

    def accuracy(self, test):
        right = 0.0
        for lo in range(0, len(test), 500):
            part = test[lo:lo + 500]
            _, texts = self.sample([p for p, _ in part], 1, True)
            right += sum(score(t, truth) for t, (_, truth) in zip(texts, part))
        return right / len(test)


def train(loop, log):
    a = loop.a
    problems, test = rows(a.train), rows(a.test)
    log(0, {"val/accuracy": loop.accuracy(test)})
    for step in range(1, a.steps + 1):
        begin = time.time()
        part = [problems[((step - 1) * a.prompts + i) % len(problems)] for i in range(a.prompts)]
        batch, texts = loop.sample([q for q, _ in part], a.samples, False)
        generated = time.time() - begin
        reward = torch.tensor([score(t, part[i // a.samples][1]) for i, t in enumerate(texts)]).view(a.prompts, a.samples)
        data = loop.step(batch, reward)
        data |= {"timing_s/gen": generated, "timing_s/step": time.time() - begin}
        if step % a.test_every == 0 or step == a.steps:
            data["val/accuracy"] = loop.accuracy(test)
        log(step, data)


def recorded(db, step, pad):
    """The samples of a step of a verlc run as sample() gives them, prompts padded on the left, and their scores."""
    lists = lambda blob: torch.frombuffer(bytearray(blob), dtype=torch.int32).long()  # noqa: E731
    found = db.execute("SELECT uid, sample, prompt_ids, ids, score FROM samples WHERE step = ? AND validation = 0 "
                       "ORDER BY uid, sample",
                       (step,)).fetchall()
    groups = len({r[0] for r in found})
    prompts, responses = [lists(r[2]) for r in found], [lists(r[3]) for r in found]
    width, longest = max(map(len, prompts)), max(map(len, responses))
    ids = torch.full((len(found), width + longest), pad)
    attention = torch.zeros_like(ids)
    for i, (p, r) in enumerate(zip(prompts, responses)):
        ids[i, width - len(p):width + len(r)] = torch.cat([p, r])
        attention[i, width - len(p):width + len(r)] = 1
    return (ids, attention, attention[:, width:].bool(), width), torch.tensor([r[4] for r in found]).view(groups, -1)


def replay(loop, log):
    """Steps of a recorded run; the greatest relative difference of a metric from the run's own."""
    db, worst = sqlite3.connect(loop.a.replay), 0.0
    for (step,) in db.execute("SELECT DISTINCT step FROM samples WHERE validation = 0 ORDER BY step").fetchall():
        batch, reward = recorded(db, step, loop.tok.pad_token_id)
        data = loop.step(tuple(x.to(loop.device) if torch.is_tensor(x) else x for x in batch), reward)
        own = dict(db.execute("SELECT name, value FROM metrics WHERE step = ?", (step,)))
        for name in METRICS:
            data[f"verlc/{name}"] = own[name]
            worst = max(worst, abs(data[name] - own[name]) / max(1e-3, abs(own[name])))
        log(step, data)
    return worst


def weights_differ(loop, path):
    """||ours - theirs|| / ||ours - start|| over all weights: the part of the way that the two do not share."""
    from safetensors.torch import load_file

    final, start = load_file(pathlib.Path(path) / "model.safetensors"), loop.reference.state_dict()
    apart = way = 0.0
    for name, w in loop.policy.state_dict().items():
        if name in final:
            apart += (w.cpu().float() - final[name].float()).square().sum().item()
            way += (w - start[name]).square().sum().item()
    return (apart / way) ** 0.5


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model"), p.add_argument("train"), p.add_argument("test"), p.add_argument("out")
    for name, value in (("steps", 60), ("seed", 1), ("prompts", 64), ("samples", 8), ("new", 64), ("micro", 128),
                        ("test-every", 10)):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--lr", type=float, default=2e-5)
    p.add_argument("--kl", type=float, default=0.001)
    p.add_argument("--replay"), p.add_argument("--final"), p.add_argument("--fp32", action="store_true")
    a = p.parse_args()
    torch.manual_seed(a.seed)
    loop, start = Loop(a), time.time()
    with open(a.out, "w") as out:
        def log(step, data):
            out.write(json.dumps({"step": step, "data": data}) + "\n")
            out.flush()
            shown = ", ".join(f"{k} {v:.6g}" for k, v in data.items())
            print(f"step {step}: {shown} ({time.time() - start:.0f} s)", flush=True)

        if not a.replay:
            train(loop, log)
            return 0
        worst, apart = replay(loop, log), weights_differ(loop, a.final) if a.final else 0.0
        print(f"largest relative difference of a metric {worst:.2g}; of the weights' way {apart:.2g}")
        return int((a.fp32 or loop.device == "cpu") and not (worst < 0.01 and apart < 0.01))


raise SystemExit(main())
