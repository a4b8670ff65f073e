"""Makes tests/fixtures/algo/distill.jsonl from verl's own distillation losses (trainer/distillation): value, gradient by
autograd and metrics of every loss mode, both ways of training on it, all clamps and aggregation modes. The losses that
verl lacks (reverse_kl_topk, jsd_topk) come from torch's distributions over the list and the rest of the vocabulary.

Each line is a request of `verlc algo` plus "expect"; verl's list losses are computed in float32 and carry a "tol".
distill_MODE.safetensors beside it is a whole model: the gradient of every parameter of a tiny student (tests/fixtures/model/
qwen2) under a tiny teacher (llama), in fp32, by transformers and verl's loss.  Its tensors: ids, q_start, first (i32) of
packed sequences and where the responses begin; mask (u8) of their tokens; top_id (i32), teacher (f32), the teacher's list or
its log-prob of the token; loss (f64); grad.NAME (f32).

With --verlc BIN nothing is written: the program answers every case, and ten times as many, and each number is compared.
Run: python tools/oracle_distill.py [--verl DIR] [--out DIR | --verlc BIN]; needs torch, omegaconf and verl 0.9.1.
"""
import argparse
import json
import math
import random
import subprocess
import sys
import types
from pathlib import Path

import oracle_verl
import torch
from oracle_model import load as load_model
from safetensors.torch import save_file

a = argparse.ArgumentParser(description=__doc__)
a.add_argument("--verl", help="an unpacked verl wheel, if verl is not installed")
a.add_argument("--verlc", help="compare this program's answers instead of writing the fixture")
a.add_argument("--out", default=Path(__file__).parent.parent / "tests/fixtures/algo", type=Path)
ARGS = a.parse_args()
oracle_verl.load(ARGS.verl)

import verl.trainer.distillation.fsdp.losses as fsdp_losses  # noqa: E402
import verl.trainer.distillation.losses as losses  # noqa: E402
from verl.workers.config import ActorConfig, DistillationLossConfig, PolicyLossConfig  # noqa: E402

losses.no_padding_2_padding = lambda x, data: x  # every tensor here is padded already
torch.set_default_dtype(torch.float64)
RNG = random.Random(20261121)
LINES = []
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def num(lo, hi):
    return round(RNG.uniform(lo, hi), 3)


def tidy(x):
    return 0.0 if x == 0 else float(f"{x:.12g}")


class Batch:
    """B rows of at most T tokens with masks that have holes; null stands in JSON where the mask is 0."""

    def __init__(self, empty=False):
        self.B, self.T = RNG.randint(2, 6), RNG.randint(2, 6)
        lens = [RNG.randint(1, self.T) for _ in range(self.B)]
        keep = RNG.randrange(self.B)
        lens[keep] = self.T  # verl's width is that of the longest row
        self.mask = [[int(t < n and not (t < n - 1 and RNG.random() < 0.15)) for t in range(self.T)] for n in lens]
        if empty:
            self.mask[(keep + 1) % self.B] = [0] * self.T
        self.width = [self.T if i == keep or RNG.random() < 0.5 else n for i, n in enumerate(lens)]

    def m(self):
        return torch.tensor(self.mask)

    def full(self, lo, hi):
        return torch.tensor([[num(lo, hi) for _ in range(self.T)] for _ in range(self.B)])

    def rows(self, x, garbage=False):
        x = x.tolist() if torch.is_tensor(x) else x
        return [[None if garbage and not self.mask[i][t] else x[i][t] for t in range(self.width[i])] for i in range(self.B)]

    def expect(self, x):
        return [[tidy(v) for v in row] for row in self.rows(x)]


def global_info(b, k):
    info = dict(dp_size=1, batch_num_tokens=sum(map(sum, b.mask)), global_batch_size=b.B)
    if k % 2:
        info = dict(dp_size=RNG.choice([1, 2]), batch_num_tokens=RNG.randint(20, 40), global_batch_size=RNG.randint(8, 16))
    return dict(info, loss_scale_factor=RNG.randint(2, 20)) if k % 4 == 1 else info


ESTIMATORS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
LIST_TOL = 2e-6  # verl's kl_divergence is float32: its rounding of terms as large as the clamp


class Nested:
    """What compute_forward_kl_topk reads of a jagged tensor: all tokens in a row."""

    is_nested = True

    def __init__(self, x):
        self.x = x.flatten(0, 1)

    def values(self):
        return self.x


def plain(v):
    return float(v.aggregate() if hasattr(v, "aggregate") else v)


class Case:
    def __init__(self, mode, k, adversarial=None):
        self.b, self.mode, self.k = Batch(empty=k % 7 == 3), mode, k
        b = self.b
        self.agg = MODES[k % len(MODES)]
        self.pg = mode in ("kl", "k1") or k % 5 == 2
        self.options = dict(loss_mode=mode, use_policy_gradient=self.pg)
        if k % 3 == 1:
            self.options["loss_max_clamp"] = num(0.05, 0.6)
        if k % 4 == 2:
            self.options["log_prob_min_clamp"] = num(-4, -1)
        if self.pg:
            self.options.update(clip_ratio_low=num(0.1, 0.3), clip_ratio_high=num(0.1, 0.4))
        self.info = global_info(b, k)
        self.old = b.full(-3, 0)
        self.logp = (self.old + b.full(-0.6, 0.6)).round(decimals=3)
        self.weights = b.full(0.2, 2) if self.pg and k % 2 else None
        self.request = dict(op="distillation_loss", loss_agg_mode=self.agg, response_mask=b.rows(b.mask), config=dict(
            {n: v for n, v in self.options.items()}, global_batch_info=self.info))
        if self.pg or mode in ESTIMATORS:
            self.request["log_prob"] = b.rows(self.logp, True)
        if self.pg:
            self.request["old_log_prob"] = b.rows(self.old, True)
        if self.weights is not None:
            self.request["rollout_is_weights"] = b.rows(self.weights, True)
        if mode not in ESTIMATORS:
            self.lists(adversarial)

    def lists(self, adversarial):
        """Student and teacher distributions, and the teacher's list of the most probable tokens."""
        b, V = self.b, RNG.randint(6, 20)
        self.V, self.K = V, RNG.randint(1, V)
        if adversarial == "whole":
            self.K = V
        g = torch.Generator().manual_seed(self.k)
        spread = {"sharp": 12.0, "flat": 0.01}.get(adversarial, 2.0)
        z, zt = (torch.randn(b.B, b.T, V, generator=g) * spread for _ in range(2))
        self.lp, self.lt = (x.log_softmax(-1).round(decimals=6) for x in (z, zt))
        if adversarial == "equal":
            self.lt = self.lp.clone()
        self.top_lp, self.ids = self.lt.topk(self.K, dim=-1)
        self.student_ids = self.lp.topk(self.K, dim=-1).indices
        triple = lambda x: [[x[i, t].tolist() for t in range(b.width[i])] for i in range(b.B)]  # noqa: E731
        self.request.update(teacher_topk_ids=triple(self.ids), student_topk_ids=triple(self.student_ids), vocab_size=V,
                            teacher_topk_log_probs=triple(self.top_lp), student_topk_log_probs=triple(self.lp.gather(-1, self.ids)))

    def verl_loss(self, output, config):
        data = dict(response_mask=self.b.m(), old_log_probs=self.old, rollout_is_weights=self.weights, **self.info)
        data["teacher_logprobs"] = self.teacher if self.mode in ESTIMATORS else None
        actor = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(),
                            loss_agg_mode=self.agg)
        if "loss_scale_factor" in self.info:
            object.__setattr__(actor, "loss_scale_factor", self.info["loss_scale_factor"])
        loss, metrics = losses.distillation_loss(actor, types.SimpleNamespace(distillation_loss=config), output, data)
        return loss, dict(metrics, **{"distillation/loss": loss.item()})

    def emit(self, loss, metrics, logp, leaf, tol=None):
        b, expect = self.b, dict(loss=tidy(loss.item()), metrics={n: tidy(plain(v)) for n, v in metrics.items()})
        if self.mode in ESTIMATORS or self.pg:
            expect["dlogp"] = b.expect(logp.grad)
        else:
            g = leaf.grad.gather(-1, self.ids)
            assert leaf.grad.abs().sum() - g.abs().sum() < 1e-9  # nothing outside the list
            expect["dlist"] = [[[tidy(x) for x in g[i, t].tolist()] for t in range(b.width[i])] for i in range(b.B)]
        LINES.append(dict(self.request, expect=expect, **({"tol": tol} if tol else {})))

    def config(self, **more):
        given = dict(topk=getattr(self, "K", None), loss_max_clamp=None, log_prob_min_clamp=None, **more)
        return DistillationLossConfig(**dict(given, **self.options))


def estimator_case(mode, k):
    c = Case(mode, k)
    c.teacher = c.b.full(-3, 0)
    c.request["teacher_logprobs"] = c.b.rows(c.teacher, True)
    c.teacher = c.teacher.unsqueeze(-1)
    logp = c.logp.clone().requires_grad_()
    loss, metrics = c.verl_loss({"log_probs": logp}, c.config())
    loss.backward()
    c.emit(loss, metrics, logp, None)


def forward_case(k, adversarial=None):
    c = Case("forward_kl_topk", k, adversarial)
    config, b = c.config(), c.b
    leaf, logp = c.lp.clone().requires_grad_(), c.logp.clone().requires_grad_()
    functional, fsdp_losses.F = fsdp_losses.F, types.SimpleNamespace(log_softmax=lambda x, dim: leaf.flatten(0, 1).unsqueeze(0))
    out = fsdp_losses.compute_forward_kl_topk(c.lp.flatten(0, 1).unsqueeze(0), Nested(c.top_lp), Nested(c.ids),
                                              types.SimpleNamespace(distillation_loss=config), "thd")
    fsdp_losses.F = functional
    output = {n: v.reshape(b.B, b.T) for n, v in out.items()}
    loss, metrics = c.verl_loss(dict(output, log_probs=logp), config)
    loss.backward()
    c.emit(loss, metrics, logp, leaf, LIST_TOL)


def divergence(c, leaf):
    """(B, T): reverse KL or JSD between the two distributions over the list and, as one more entry, the rest."""
    least = c.options.get("log_prob_min_clamp", -torch.inf)
    lq, lp = leaf.gather(-1, c.ids), c.lt.gather(-1, c.ids)
    rest_q, rest_p = ((1 - x.exp().sum(-1, keepdim=True)).clamp_min(1e-7).log() for x in (lq, lp))
    lq, lp = lq.clamp_min(least), lp.clamp_min(least)
    if c.K < c.V:
        lq, lp = torch.cat([lq, rest_q], -1), torch.cat([lp, rest_p], -1)
    if c.mode == "reverse_kl_topk":
        return torch.nn.functional.kl_div(lp, lq, reduction="none", log_target=True).sum(-1)
    mean = ((lq.exp() + lp.exp()) / 2).log()
    return sum(torch.nn.functional.kl_div(mean, x, reduction="none", log_target=True).sum(-1) for x in (lp, lq)) / 2


def own_case(mode, k, adversarial=None):
    """verl's distillation_loss around a divergence that it lacks."""
    c = Case(mode, k, adversarial)
    leaf, logp = c.lp.clone().requires_grad_(), c.logp.clone().requires_grad_()
    mat = divergence(c, leaf).clamp_min(0)
    registry = losses.DISTILLATION_LOSS_REGISTRY
    saved, registry["forward_kl_topk"] = registry["forward_kl_topk"], lambda **_: (mat, {})
    c.options["loss_mode"] = "forward_kl_topk"
    loss, metrics = c.verl_loss({"log_probs": logp}, c.config())
    c.options["loss_mode"] = mode
    registry["forward_kl_topk"] = saved
    loss.backward()
    c.emit(loss, metrics, logp, leaf, 1e-9)


def cases(per_mode):
    for mode in ESTIMATORS:
        for k in range(per_mode):
            estimator_case(mode, k)
    for k in range(2 * per_mode):
        kind = [None, "whole", "sharp", None, "flat", "equal" if k % 10 != 2 else None][k % 6]
        forward_case(k, kind)
        for mode in ("reverse_kl_topk", "jsd_topk"):
            own_case(mode, k, None if kind == "equal" else kind)


# ---- a whole model ----

LENS, FIRST, TOPK, TEMPERATURE = (23, 70, 12), (10, 31, 8), 7, 0.8  # test_ppo_distillation.c has the last two


def response_logits(model, seqs):
    """The row before each response token, all in one."""
    return torch.cat([model(input_ids=s[None]).logits[0, f - 1:n - 1] for s, f, n in zip(seqs, FIRST, LENS)])


def model_case(mode):
    torch.set_default_dtype(torch.float32)
    models = Path(__file__).parent.parent / "tests/fixtures/model"
    student, teacher = (load_model(str(models / name)) for name in ("qwen2", "llama"))
    gen = torch.Generator().manual_seed(7)
    seqs = [torch.randint(3, 100, (n,), generator=gen) for n in LENS]
    tokens = torch.cat([s[f:] for s, f in zip(seqs, FIRST)])
    mask = (torch.rand(len(tokens), generator=gen) > 0.1).to(torch.int64)
    lp = response_logits(student, seqs).div(TEMPERATURE)
    with torch.no_grad():
        lt = response_logits(teacher, seqs).log_softmax(-1)
    logp = lp.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    c = types.SimpleNamespace(mode=mode, agg="token-mean",
                              info=dict(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=3),
                              b=types.SimpleNamespace(m=lambda: mask[None]), old=None, weights=None)
    config = DistillationLossConfig(loss_mode=mode, topk=TOPK, use_policy_gradient=False, loss_max_clamp=None,
                                    log_prob_min_clamp=None)
    output, given = {"log_probs": logp[None]}, {}
    if mode in ESTIMATORS:
        given["teacher"] = lt.gather(-1, tokens[:, None])[:, 0]
        c.teacher = given["teacher"][None, :, None]
    else:
        given["teacher"], ids = lt.topk(TOPK, dim=-1)
        given["top_id"] = ids.int()
        output |= fsdp_losses.compute_forward_kl_topk(lp[None], Nested(given["teacher"][None]), Nested(ids[None]),
                                                      types.SimpleNamespace(distillation_loss=config), "thd")
    loss, _ = Case.verl_loss(c, output, config)
    loss.backward()
    print(f"{mode}: loss {loss:.4f} over {int(mask.sum())} tokens")
    out = {"ids": torch.cat(seqs).int(), "q_start": torch.tensor([0, *torch.tensor(LENS).cumsum(0)]).int(),
           "first": torch.tensor(FIRST).int(), "mask": mask.to(torch.uint8), "loss": loss.detach().double()[None], **given}
    out |= {f"grad.{k}": p.grad for k, p in student.named_parameters()}
    return {k: x.contiguous() for k, x in out.items()}


def differences(got, want, tol, path):
    """(text, error) of every number beyond tol, relative to the number or 1."""
    if isinstance(want, dict):
        for n, w in want.items():
            yield from differences(got.get(n) if isinstance(got, dict) else None, w, tol, f"{path}.{n}")
    elif isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            yield f"{path}: {got!r} where verl has {len(want)} values", math.inf
            return
        for n, w in enumerate(want):
            yield from differences(got[n], w, tol, f"{path}[{n}]")
    else:
        e = abs(got - want) / max(1.0, abs(want)) if isinstance(got, (int, float)) else math.inf
        yield (f"{path}: {got!r} where verl has {want!r}" if not e <= tol else None), e


def compare(program):
    text = "".join(json.dumps({n: v for n, v in line.items() if n not in ("expect", "tol")}) + "\n" for line in LINES)
    done = subprocess.run([program, "algo"], input=text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(LINES), f"{len(LINES)} requests, {len(answers)} answers"
    found = [x for got, line in zip(answers, LINES)
             for x in differences(got, line["expect"], line.get("tol", 1e-10), line["config"]["loss_mode"])]
    bad = [t for t, _ in found if t]
    for t in bad[:5]:
        print("DIFFERS " + t)
    print(f"{len(LINES)} batches, {len(found)} numbers, {len(bad)} differences; "
          f"largest relative error {max(e for _, e in found):.1e}")
    return 1 if bad else 0


def main():
    cases(60 if ARGS.verlc else 3)
    if ARGS.verlc:
        return compare(ARGS.verlc)
    ARGS.out.mkdir(parents=True, exist_ok=True)
    (ARGS.out / "distill.jsonl").write_text("".join(json.dumps(x, separators=(",", ":")) + "\n" for x in LINES))
    print(f"{len(LINES)} batches")
    for mode in ("forward_kl_topk", "k3"):
        save_file(model_case(mode), ARGS.out / f"distill_{mode}.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
