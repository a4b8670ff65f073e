"""Makes tests/fixtures/algo/distill.jsonl from verl's own distillation losses (trainer/distillation): value, gradient by
autograd and metrics of every loss mode, both ways of training on it, all clamps and aggregation modes. The losses that
verl lacks (reverse_kl_topk, jsd_topk) come from torch's distributions over the list and the rest of the vocabulary.

Each line is a request of `verlc algo` plus "expect"; verl's list losses are computed in float32 and carry a "tol".
With --verlc BIN nothing is written: the program answers every case, and ten times as many, and each number is compared.
Run: python tools/oracle_distill.py [--verl DIR] [--out DIR | --verlc BIN]; needs what oracle_algo.py needs.
"""
import sys
import types

import oracle_algo as oa
import torch
from oracle_algo import ARGS, LINES, MODES, RNG, Batch, emit, num, tidy

import verl.trainer.distillation.fsdp.losses as fsdp_losses
import verl.trainer.distillation.losses as losses
from verl.workers.config import DistillationLossConfig

losses.no_padding_2_padding = lambda x, data: x  # every tensor here is padded already
torch.set_default_dtype(torch.float64)

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
        self.info = oa.global_info(b, k) or dict(dp_size=1, batch_num_tokens=sum(map(sum, b.mask)), global_batch_size=b.B)
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
        actor = oa.actor_config({"loss_agg_mode": self.agg}, {}, {})
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
        emit(self.request, expect, tol)

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


if __name__ == "__main__":
    cases(60 if ARGS.verlc else 3)
    if ARGS.verlc:
        sys.exit(oa.compare(ARGS.verlc, LINES, []))
    oa.write(ARGS.out / "distill.jsonl", LINES)
