"""`verlc algo` beside verl 0.9.1's own functions: advantages, policy losses with their
gradients by autograd, aggregation, KL, value loss, rollout correction, PF-PPO's weights,
the micro-batches of dynamic batching.

Each function below has batches that are a pure function of (function, number): ragged
masks with holes, empty responses, groups of one, groups without variance, log-probs from
certain to -80 and ratios beyond every clamp, ties on the bounds, batches all masked.
Inputs are multiples of 2^-12, so that fp32 holds them. null stands where the mask is 0.

  oracle_algo.py [--out DIR]                a few batches of each function with verl's answers
                                            in float64: tests/fixtures/algo/algo.jsonl
  oracle_algo.py --verlc BIN [--batches N]  N (1000) batches of each: a line a function

A number is compared relative to the largest of its array; VALUE and GRADIENT below are the
bars.  An intended difference has a name, which docs/differences.md explains.
Needs torch, omegaconf and verl 0.9.1 (--verl DIR: an unpacked wheel).
"""
import argparse
import importlib
import json
import math
import random
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import oracle_verl
import torch

ROOT = Path(__file__).resolve().parent.parent
VALUE, GRADIENT = 1e-6, 1e-5  # of float64 against float64: what is left is the order of sums and the exp of two libraries
# of the fixture: batches of a function (else 4), bytes of a batch
SAMPLE, SMALL = {"advantage": 6, "policy_loss": 6, "kl": 1, "rollout_correction": 2}, 2500
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
FUNCTIONS = {}


def function(name):
    def add(make):
        FUNCTIONS[name] = make
        return make
    return add


class Refused(Exception):
    """verl raises on this batch, and so must verlc."""


class Differs(Exception):
    """An intended difference: its name in docs/differences.md, and what verlc answers."""

    def __init__(self, name, expect):
        super().__init__(name)
        self.name, self.expect = name, expect


# ---- random ragged batches ----


class Batch:
    """Rows of at most T tokens in groups."""

    def __init__(self, r, groups=None):
        big = r.random() < 0.03
        sizes = groups or [r.choice([1, 1, 2, 3, 4, 5]) for _ in range(r.choice([1, 2, 3, 8] if big else [1, 2, 3]))]
        self.r, self.uid = r, [g for g, n in enumerate(sizes) for _ in range(n)]
        r.shuffle(self.uid)
        self.B, self.T = len(self.uid), r.randint(20, 60) if big else r.choice([1, 2, 3, 4, 5, 6, 7, 8])
        holes, empty = r.choice([0, 0, 0.15, 0.6]), r.choice([0, 0, 0.3])
        lens = [0 if r.random() < empty else r.randint(1, self.T) for _ in self.uid]
        lens[r.randrange(self.B)] = self.T  # verl's width is that of the longest row
        keep = lens.index(self.T)
        self.mask = [[int(t < n and not r.random() < holes) for t in range(self.T)] for n in lens]
        if r.random() < 0.25:
            self.mask = [turns(r, n, self.T) for n in lens]
        if r.random() < 0.02:
            self.mask = [[0] * self.T for _ in lens]
        # other rows may end at their last token, but the longest keeps the width
        self.width = [self.T if i == keep or r.random() < 0.5 else n for i, n in enumerate(lens)]
        self.n = sum(map(sum, self.mask))

    def draw(self, lo, hi):
        return [[num(self.r, lo, hi) for _ in range(self.T)] for _ in range(self.B)]

    def choose(self, values):
        return [[self.r.choice(values) for _ in range(self.T)] for _ in range(self.B)]

    def rows(self, x, garbage=False):
        """For JSON: each row at its own width; null where masked, if garbage."""
        x = x.tolist() if torch.is_tensor(x) else x
        return [[None if garbage and not self.mask[i][t] else x[i][t] for t in range(self.width[i])] for i in range(self.B)]

    def m(self):
        return torch.tensor(self.mask)

    def log_probs(self):
        """(old, new): near, equal, far apart on either side, certain, impossible."""
        kind = self.r.choice(["near", "near", "near", "same", "far", "certain", "rare", "wide"])
        old = self.draw(*{"certain": (-2 ** -7, 0), "rare": (-80, -20)}.get(kind, (-3, 0)))
        step = {"near": 0.6, "wide": 6.0, "certain": 0.6, "rare": 3.0}.get(kind, 0)
        if kind == "far":
            jump = self.choose([-30.0, -25.0, -20.0, -5.0, 0.0, 0.5, 5.0, 20.0, 25.0, 30.0])
            old = [[-40.0] * self.T for _ in range(self.B)]
            return old, add(old, jump)
        new = add(old, self.draw(-step, step))
        return old, [[min(x, 0.0) for x in row] for row in new] if kind == "certain" else new

    def advantages(self):
        kind = self.r.choice(["plain", "plain", "plain", "row", "zero", "some", "large", "small", "one sign"])
        if kind == "row":
            return [[a] * self.T for a in (num(self.r, -2, 2) for _ in range(self.B))]
        if kind == "some":
            return self.choose([0.0, 0.0, 1.0, -1.0])
        lo, hi = {"plain": (-2, 2), "zero": (0, 0), "large": (-1e4, 1e4), "small": (-2e-3, 2e-3), "one sign": (0, 2)}[kind]
        return self.draw(lo, hi)

    def rewards(self):
        """On the last token or on every one; equal, all zero, large and small ones."""
        kind = self.r.choice(["outcome", "outcome", "binary", "dense", "equal", "zero", "large", "small"])
        out = [[0.0] * self.T for _ in range(self.B)]
        for i in range(self.B):
            valid = [t for t in range(self.T) if self.mask[i][t]]
            if kind == "dense":
                for t in range(self.width[i]):  # masked tokens too: a row's sum counts them
                    out[i][t] = num(self.r, -1, 1)
            else:
                out[i][valid[-1] if valid else 0] = {
                    "outcome": num(self.r, -1, 2), "binary": float(self.r.random() < 0.5), "equal": 0.75, "zero": 0.0,
                    "large": num(self.r, -1e4, 1e4), "small": num(self.r, 0, 2e-3)}[kind]
            for t in range(self.width[i], self.T):
                out[i][t] = 0.0
        for i in range(self.B):
            if self.width[i] == 0:
                out[i] = [0.0] * self.T
        return out


def turns(r, n, width):
    """A row's mask where policy and environment take turns; now and then the environment has the first or the last word."""
    most, kind, mask = r.choice([1, 2, 4, 12]), int(r.random() > 0.05), []
    while len(mask) < n:
        mask += [kind] * r.randint(1, most)
        kind = 1 - kind
    mask = mask[:n]
    if mask and r.random() > 0.1:
        mask[-1] = 1
    return mask + [0] * (width - n)


def num(r, lo, hi):
    return round(r.uniform(lo, hi) * 4096) / 4096


def add(a, b):
    return [[x + y for x, y in zip(p, q)] for p, q in zip(a, b)]


def T(x):
    return torch.tensor(x, dtype=torch.get_default_dtype())


def grad(x):
    return T(x).requires_grad_()


def zeros(b):
    return torch.zeros(b.B, b.T)


# ---- advantages ----

GROUPED = ["grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk", "gdpo"]
WHITENED = ["gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def advantage(name):
    def make(r):
        b = Batch(r, [r.randint(2, 5) for _ in range(r.randint(1, 3))] if name == "grpo_passk" and r.random() < 0.95 else None)
        rewards, flag = b.rewards(), r.random() < 0.5
        q = dict(op="advantage", estimator=name, token_level_rewards=b.rows(rewards), response_mask=b.rows(b.mask),
                 uid=[f"u{u}" for u in b.uid])
        plus, more = EXTRA.get(name, lambda *_: ({}, lambda: {}))(r, b, flag)
        q.update(plus)
        if name in ("grpo", "grpo_vectorized", "gdpo"):
            q["norm_adv_by_std_in_grpo"] = flag

        def verl():
            kw = dict(token_level_rewards=T(rewards), response_mask=b.m(), **more())
            if name in GROUPED:
                kw["index"] = np.array(q["uid"], dtype=object)
            if "norm_adv_by_std_in_grpo" in q:
                kw["norm_adv_by_std_in_grpo"] = flag
            if name in WHITENED and b.n < 2 or name == "grpo_passk" and min(map(b.uid.count, b.uid)) < 2:
                try:
                    ca.get_adv_estimator_fn(name)(**kw)
                except ValueError:
                    raise Refused
            adv, ret = ca.get_adv_estimator_fn(name)(**kw)
            if name == "opo" and adv.isnan().any():  # a group of empty responses has no length to weigh by
                rows = adv.isnan().any(1)
                assert not b.m()[rows].any()
                adv = ret = adv.nan_to_num(0.0)
                raise Differs("opo-empty-group", dict(advantages=b.rows(adv), returns=b.rows(ret)))
            return dict(advantages=b.rows(adv), returns=b.rows(ret))

        return q, verl
    return make


def extra_gae(r, b, flag):
    values, gamma, lam = b.draw(-1, 1), r.choice([1.0, num(r, 0, 1)]), r.choice([1.0, 0.0, num(r, 0, 1)])
    return dict(values=b.rows(values), gamma=gamma, lam=lam), lambda: dict(values=T(values), gamma=gamma, lam=lam)


def extra_passk(r, b, flag):
    return dict(config=dict(norm_adv_by_std_in_grpo=flag)), lambda: dict(config=config.AlgoConfig(norm_adv_by_std_in_grpo=flag))


def extra_gamma(r, b, flag):
    gamma = r.choice([1.0, num(r, 0, 1)])
    return dict(gamma=gamma), lambda: dict(config=config.AlgoConfig(gamma=gamma))


def extra_remax(r, b, flag):
    base = [num(r, -1, 1) for _ in b.uid]
    return dict(reward_baselines=base), lambda: dict(reward_baselines=T(base))


def extra_gdpo(r, b, flag):
    if r.random() < 0.3:
        return {}, lambda: {}
    keys = ["format", "accuracy", "length"][:r.randint(1, 3)]
    q = {k: [r.choice([0.0, 1.0, num(r, 0, 1)]) for _ in b.uid] for k in keys}
    q["config"] = dict(gdpo_reward_keys=keys, gdpo_reward_weights=r.choice([None, [num(r, 0.2, 2) for _ in keys]]))
    # one prompt token; a row without tokens puts its score in the last column, which no row sum minds
    attention = torch.cat([torch.ones(b.B, 1, dtype=torch.long), b.m()], 1)
    return q, lambda: dict(config=q["config"], non_tensor_batch={k: np.array(q[k]) for k in keys},
                           batch=dict(prompts=torch.zeros(b.B, 1), attention_mask=attention))


def extra_otb(r, b, flag):
    old, sum_pi, w = b.draw(-3, 0), b.draw(0.05, 0.9), b.draw(0.3, 2) if r.random() < 0.5 else None
    q = dict(old_log_probs=b.rows(old, True), sum_pi_squared=b.rows(sum_pi, True), handle_zero_tail=flag)
    if w:
        q["rollout_is_weights"] = b.rows(w, True)
    return q, lambda: dict(index=np.array(b.uid), old_log_probs=T(old), sum_pi_squared=T(sum_pi), handle_zero_tail=flag,
                           **(dict(rollout_is_weights=T(w)) if w else {}))


EXTRA = dict(gae=extra_gae, grpo_passk=extra_passk, reinforce_plus_plus=extra_gamma, remax=extra_remax, gdpo=extra_gdpo,
             optimal_token_baseline=extra_otb, tir_optimal_token_baseline=extra_otb)
for _name in GROUPED + ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"]:
    FUNCTIONS[f"advantage {_name}"] = advantage(_name)


class Rows:
    """Stands in for DataProto."""

    def __init__(self, batch, uid):
        self.batch, self.non_tensor_batch = batch, {"uid": uid}

    def __len__(self):
        return len(self.non_tensor_batch["uid"])

    def select_idxs(self, rows):
        return Rows({k: v[rows] for k, v in self.batch.items()}, self.non_tensor_batch["uid"][rows])


def grpo_of(data, norm_adv_by_std_in_grpo, **_):
    """verl.trainer.ppo.ray_trainer.compute_advantage of grpo (the module needs Ray)."""
    b = data.batch
    b["advantages"], b["returns"] = ca.compute_grpo_outcome_advantage(
        token_level_rewards=b["token_level_rewards"], response_mask=b["response_mask"], index=data.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    return data


@function("advantage grpo, several samples an episode")
def sessions(r):
    b, flag = Batch(r), r.random() < 0.5
    rewards, order, key = b.rewards(), sorted(range(b.B), key=lambda i: b.uid[i]), {}
    session = 0
    for at, i in enumerate(order):  # neighbours of one prompt
        if at and (b.uid[i] != b.uid[order[at - 1]] or r.random() < 0.5):
            session += 1
        key[i] = session
    sort = lambda x: [x[i] for i in order]  # noqa: E731
    b.uid, b.mask, b.width, rewards = sort(b.uid), sort(b.mask), sort(b.width), sort(rewards)
    session = [key[i] for i in order]
    q = dict(op="advantage", estimator="grpo", token_level_rewards=b.rows(rewards), response_mask=b.rows(b.mask),
             uid=[f"u{u}" for u in b.uid], session=session, norm_adv_by_std_in_grpo=flag)

    def verl():
        data = Rows(dict(token_level_rewards=T(rewards), response_mask=b.m()), np.array(q["uid"], dtype=object))
        keys = [f"{u}_{s}_{session[:i].count(s)}" for i, (u, s) in enumerate(zip(q["uid"], session))]
        v1.compute_advantage_for_multi_trajectories(data, keys, "grpo", norm_adv_by_std_in_grpo=flag)
        return dict(advantages=b.rows(data.batch["advantages"]), returns=b.rows(data.batch["returns"]))

    return q, verl


# ---- losses ----


def global_info(r):
    if r.random() < 0.4:
        return {}
    info = dict(dp_size=r.choice([1, 2, 8]), batch_num_tokens=r.randint(20, 400), global_batch_size=r.randint(8, 160))
    if r.random() < 0.5:
        info["loss_scale_factor"] = r.randint(2, 200)
    return info


def no_valid_token(loss, names, q):
    """Where no token is valid, verl divides by zero unless the count is given; verlc's loss is 0, and a metric says so."""
    assert not math.isfinite(loss) or loss == 0, loss
    raise Differs("no-valid-token", nothing(names, q))


def nothing(names, q):
    """A loss of 0 with gradients of 0, shaped like the inputs that `names` gives for them."""
    return dict(loss=0.0, **{n: [[0.0] * len(row) for row in q[k]] for n, k in names.items()})


def actor_config(options, policy_loss, info):
    c = config_actor.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True,
                                 policy_loss=config_actor.PolicyLossConfig(**policy_loss), **options)
    c.global_batch_info.update(info)
    return c


CLIPS = [dict(clip_ratio_low=0.2, clip_ratio_high=0.28), dict(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None),
         dict(clip_ratio_low=0.1, clip_ratio_high=0.4, clip_ratio_c=1.3), dict(clip_ratio_low=0.0, clip_ratio_high=0.0),
         dict(clip_ratio_low=0.25, clip_ratio_high=0.5, clip_ratio_c=10.0)]


def policy(name):
    def make(r):
        b = Batch(r)
        options, info, mode = dict(r.choice(CLIPS)), global_info(r), r.choice(MODES)
        (old, lp), adv = b.log_probs(), b.advantages()
        if name not in ("gspo", "kl_cov") and r.random() < 0.05:  # the ratio is exactly 1 + high = c (a mean would round)
            lp, old = [[math.log(2.0)] * b.T for _ in range(b.B)], [[0.0] * b.T for _ in range(b.B)]
            options = dict(clip_ratio_low=0.5, clip_ratio_high=1.0, clip_ratio_c=2.0)
        if name == "geo_mean" and r.random() < 0.2:  # log-ratios on the bounds
            options, lp = dict(clip_ratio_low=0.25, clip_ratio_high=0.5), add(old, b.choose([-0.5, -0.25, 0.0, 0.25, 0.5, 0.75]))
        if name == "sapo":
            options.update(tau_pos=num(r, 0.5, 3), tau_neg=num(r, 0.5, 3))
        w = b.draw(0, 2) if r.random() < 0.4 else None
        special = POLICY.get(name, lambda *_: {})(r, b, lp, adv)
        q = dict(op="policy_loss", loss_mode=name, loss_agg_mode=mode, old_log_prob=b.rows(old, True), log_prob=b.rows(lp, True),
                 advantages=b.rows(adv, True), response_mask=b.rows(b.mask))
        if w:
            q["rollout_is_weights"] = b.rows(w, True)
        q["config"] = dict(options, policy_loss=special, global_batch_info=info)

        def verl():
            rc = special.get("rollout_correction")
            given = dict(special, **({"rollout_correction": config.RolloutCorrectionConfig(**rc)} if rc else {}))
            x, names = grad(lp), dict(dlogp="log_prob")
            if b.n == 0 and name in ("bypass_mode", "kl_cov"):  # verl raises, or has no largest covariance to find
                no_valid_token(math.nan, names, q)
            if name == "kl_cov":
                unique_top(b, lp, adv, special["kl_cov_ratio"])
            def run(given):
                return ca.get_policy_loss_fn(name)(
                    old_log_prob=T(old), log_prob=x, advantages=T(adv), response_mask=b.m(), loss_agg_mode=mode,
                    config=actor_config(options, given, info), rollout_is_weights=T(w) if w else None)
            try:
                loss, metrics = run(given)
            except ZeroDivisionError:  # in a metric of weights that are all 0
                if rc["loss_type"] == "reinforce":
                    raise Differs("icepop-nothing-kept", nothing(names, q))
                loss, metrics = run(dict(special, rollout_correction=config.RolloutCorrectionConfig(**dict(rc, rollout_is=None))))
                if not math.isfinite(loss.item()):
                    raise Differs("no-valid-token", nothing(names, q))
                loss.backward()
                raise Differs("icepop-nothing-kept", dict(loss=loss.item(), dlogp=b.rows(x.grad), metrics=finite(metrics)))
            rejected = metrics.get("rollout_corr/rollout_rs_masked_fraction", 0)
            if b.n == 0 or not math.isfinite(loss.item()) and rejected > 1 - 1e-6:
                no_valid_token(loss.item(), names, q)
            loss.backward()
            return dict(loss=loss.item(), dlogp=b.rows(x.grad), metrics=finite(metrics))

        return q, verl
    return make


def finite(metrics):
    return {k: float(v) for k, v in metrics.items() if math.isfinite(float(v))}


def correction(r, b, *_):
    rs = r.choice([None, "token_k1", "token_k2", "seq_mean_k3,token_k2", "seq_max_k2", "seq_sum_k1"])
    level = r.choice([None, "token", "sequence"])
    rc = dict(rollout_is=level, loss_type=r.choice(["ppo_clip", "reinforce"]), rollout_is_batch_normalize=r.random() < 0.4,
              rollout_is_threshold=r.choice([1.2, 2.0, "0.6_1.5"]))
    if rs:
        rc.update(rollout_rs=rs, rollout_rs_threshold="0.2,0.15" if "," in rs else "0.7_1.4" if rs.endswith("k1") else 0.3)
    return dict(rollout_correction=rc)


def clip_cov(r, b, *_):
    # every candidate is taken, so that the random choice has one outcome (docs/differences.md, clip-cov-choice)
    lb, ub = r.choice([(-0.2, 0.6), (1.0, 5.0), (9.0, 10.0), (-1e30, 1e30)])
    return dict(clip_cov_ratio=1.0, clip_cov_lb=lb, clip_cov_ub=ub)


def kl_cov(r, b, *_):
    return dict(kl_cov_ratio=r.choice([0.01, 0.3, 0.6, 1.0]), ppo_kl_coef=r.choice([0.5, 1.0]))


class Tie(Exception):
    pass


def unique_top(b, lp, adv, ratio):
    """Which of equal covariances torch.topk takes is not said (docs/differences.md, kl-cov-ties): such a batch is drawn again."""
    m = b.m().bool()
    a, x = torch.tensor(adv, dtype=torch.float64)[m], torch.tensor(lp, dtype=torch.float64)[m]
    cov = ((a - a.mean()) * (x - x.mean())).sort(descending=True).values
    k = max(1, int(len(cov) * ratio))
    if k < len(cov) and cov[k - 1] - cov[k] <= 1e-9 * a.abs().max() * x.abs().max():
        raise Tie


POLICY = dict(bypass_mode=correction, clip_cov=clip_cov, kl_cov=kl_cov, dro=lambda r, *_: dict(dro_beta=num(r, 0.1, 2)))
for _name in ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro",
              "bypass_mode"]:
    FUNCTIONS[f"policy_loss {_name}"] = policy(_name)


@function("actor_loss (ppo_loss)")
def actor(r):
    """verl.workers.utils.losses.ppo_loss, from its parts (the function itself needs tensordict)."""
    b = Batch(r)
    (old, lp), ref, entropy, adv = b.log_probs(), b.draw(-3, 0), b.draw(0, 3), b.advantages()
    info, mode, kl = global_info(r), r.choice(MODES), r.choice(["low_var_kl", "k1", "k3+", "abs", "k2", "kl+"])
    c = dict(entropy_coeff=num(r, 0, 0.1), kl_loss_coef=num(r, 0, 0.1), kl_loss_type=kl, global_batch_info=info)
    q = dict(op="actor_loss", loss_agg_mode=mode, old_log_prob=b.rows(old, True), log_prob=b.rows(lp, True),
             advantages=b.rows(adv, True), entropy=b.rows(entropy, True), ref_log_prob=b.rows(ref, True),
             response_mask=b.rows(b.mask), config=c)

    def verl():
        x, e = grad(lp), grad(entropy)
        pg, metrics = ca.get_policy_loss_fn("vanilla")(T(old), x, T(adv), b.m(), mode, actor_config({}, {}, info), None)
        metrics["actor/pg_loss"] = pg.item()
        ent = ca.agg_loss(e, b.m(), mode, **info)
        kld = ca.agg_loss(ca.kl_penalty(x, T(ref), kl), b.m(), mode, **info)
        metrics.update({"actor/entropy_loss": ent.item(), "actor/kl_loss": kld.item(), "actor/kl_coef": c["kl_loss_coef"]})
        total = pg - c["entropy_coeff"] * ent + c["kl_loss_coef"] * kld
        if b.n == 0:
            no_valid_token(total.item(), dict(dlogp="log_prob", dentropy="entropy"), q)
        total.backward()
        return dict(loss=total.item(), dlogp=b.rows(x.grad), dentropy=b.rows(e.grad), metrics=finite(metrics))

    return q, verl


def agg(mode):
    def make(r):
        b = Batch(r)
        info, mat = global_info(r), b.advantages()
        q = dict(op="agg_loss", loss_mat=b.rows(mat, True), loss_mask=b.rows(b.mask), loss_agg_mode=mode, **info)

        def verl():
            x = grad(mat)
            loss = ca.agg_loss(x, b.m(), mode, **info)
            if b.n == 0:
                no_valid_token(loss.item(), dict(dloss_mat="loss_mat"), q)
            loss.backward()
            return dict(loss=loss.item(), dloss_mat=b.rows(x.grad))

        return q, verl
    return make


for _name in MODES:
    FUNCTIONS[f"agg_loss {_name}"] = agg(_name)


@function("value_loss")
def value(r):
    b = Batch(r)
    values, returns, vpreds, eps = b.draw(-1, 1), b.draw(-2, 2), b.draw(-2, 2), r.choice([0.25, 0.5, 0.0, 0.2])
    if r.random() < 0.3:  # exactly on the bounds
        vpreds = add(values, b.choose([-eps, eps, 0.0]))
    if r.random() < 0.1:
        returns = [row[:] for row in vpreds]
    info, mode = global_info(r), r.choice(MODES)
    q = dict(op="value_loss", vpreds=b.rows(vpreds, True), values=b.rows(values, True), returns=b.rows(returns, True),
             response_mask=b.rows(b.mask), cliprange_value=eps, loss_agg_mode=mode, **info)

    def verl():
        v = grad(vpreds)
        loss, frac = ca.compute_value_loss(v, T(returns), T(values), b.m(), eps, mode, **info)
        if b.n == 0:
            no_valid_token(loss.item(), dict(dvpreds="vpreds"), q)
        loss.backward()
        return dict(loss=loss.item(), dvpreds=b.rows(v.grad), vf_clipfrac=frac.item())

    return q, verl


# ---- KL ----


def kl_type(name):
    def make(r):
        n = r.randint(1, 12)
        ref = [num(r, -3, 0) for _ in range(n)]
        lp = [x + r.choice([0.0, num(r, -0.5, 0.5), num(r, -5, 5), r.choice([-25.0, -20.0, 20.0, 25.0, 2.5, -2.5])]) for x in ref]
        q = dict(op="kl", type=name, logp=[lp], ref_logp=[ref])

        def verl():
            x = grad([lp])
            kl = ca.kl_penalty(x, T([ref]), name)
            kl.sum().backward()
            return dict(kl=kl.tolist(), dlogp=x.grad.tolist())

        return q, verl
    return make


for _name in ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]:
    for _plus in ["", "+"]:
        FUNCTIONS[f"kl {_name}{_plus}"] = kl_type(_name + _plus)


@function("kl_in_reward (apply_kl_penalty)")
def kl_reward(r):
    b = Batch(r)
    name, scores, ref = r.choice(["kl", "abs", "mse", "low_var_kl"]), b.rewards(), b.draw(-3, 0)
    old = add(ref, b.draw(-2, 2))
    ctrl = dict(type=r.choice(["fixed", "adaptive"]), kl_coef=num(r, 0, 0.5), target_kl=r.choice([0.125, 1.0]),
                horizon=r.choice([100, 10000]))
    q = dict(op="kl_in_reward", token_level_scores=b.rows(scores), old_log_probs=b.rows(old, True), ref_log_prob=b.rows(ref, True),
             response_mask=b.rows(b.mask), kl_penalty=name, kl_ctrl=ctrl)

    def verl():
        c = ca.get_kl_controller(types.SimpleNamespace(**ctrl))
        beta, kld = c.value, ca.kl_penalty(T(old), T(ref), name) * b.m()
        current = torch.mean(ca.verl_F.masked_mean(kld, b.m(), axis=-1)).item()
        c.update(current_kl=current, n_steps=b.B)
        return dict(token_level_rewards=b.rows(T(scores) - beta * kld), value=float(c.value),
                    metrics={"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta})

    return q, verl


def controller(kind):
    def make(r):
        kls = [r.choice([0.0, num(r, -1, 1), num(r, 0, 0.3), 50.0]) for _ in range(r.randint(1, 8))]
        ctrl = dict(type=kind, kl_coef=num(r, 0.001, 1), target_kl=r.choice([0.1, 6.0]), horizon=r.choice([100, 10000]))
        q = dict(op="kl_controller", current_kl=kls, n_steps=r.choice([1, 64, 1024]), **ctrl)

        def verl():
            c = ca.get_kl_controller(types.SimpleNamespace(**ctrl))
            values = []
            for k in kls:
                c.update(k, q["n_steps"])
                values.append(float(c.value))
            return dict(values=values, value=values[-1])

        return q, verl
    return make


for _name in ["fixed", "adaptive"]:
    FUNCTIONS[f"kl_controller {_name}"] = controller(_name)


# ---- rollout correction ----


def rollout(level, option):
    def make(r):
        b = Batch(r)
        old, other = b.log_probs()
        spec = dict(rollout_is=level, rollout_is_threshold=r.choice([1.3, 2.0, "0.3_3.0", "1.5", "0.9_1.1"]),
                    rollout_is_batch_normalize=r.random() < 0.5, rollout_rs=option)
        if option:
            bounds = ["0.7_1.3,0.05"] if "," in option else ["0.8_1.4", "0.5_2.0",
                                                             1.25] if option.endswith("k1") else [0.12, 1.0, 1e-3]
            spec["rollout_rs_threshold"] = r.choice(bounds)
        q = dict(op="rollout_correction", old_log_prob=b.rows(old, True), rollout_log_prob=b.rows(other, True),
                 response_mask=b.rows(b.mask), **spec)

        def verl():
            def run():
                return rch.compute_rollout_correction_and_rejection_mask(old_log_prob=T(old), rollout_log_prob=T(other),
                                                                         response_mask=b.m(), **spec)
            if b.n == 0:
                try:
                    run()
                except ValueError:
                    none = [[0] * w for w in b.width]
                    raise Differs("no-valid-token", dict(rollout_is_weights=level and none, response_mask=none,
                                                         metrics={"rollout_corr/no_valid_tokens": 1.0}))
            try:
                weights, mask, metrics = run()
            except ZeroDivisionError:  # 1 / E[w^2] of weights that are all 0
                raise Differs("icepop-nothing-kept", dict(rollout_is_weights=[[0.0] * w for w in b.width],
                                                          metrics={"rollout_corr/rollout_is_eff_sample_size": 0.0}))
            w = weights.batch["rollout_is_weights"] if weights else None
            return dict(rollout_is_weights=None if w is None else b.rows(w), response_mask=b.rows(mask), metrics=finite(metrics))

        return q, verl
    return make


for _level in [None, "token", "sequence"]:
    FUNCTIONS[f"rollout_correction is={_level}"] = rollout(_level, None)
for _k, _name in enumerate(["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
                            "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "token_k1,seq_mean_k3,token_k1"]):
    FUNCTIONS[f"rollout_correction rs={_name}"] = rollout([None, "token", "sequence"][_k % 3], _name)


# ---- PF-PPO ----


def pf_ppo(method):
    def make(r):
        scores = [r.choice([0.0, 1.0, num(r, -2, 2), num(r, -1e3, 1e3)]) for _ in range(r.randint(1, 20))]
        q = dict(op="pf_ppo_weights", scores=scores, reweight_method=method, weight_pow=r.choice([2.0, 1.0, 0.5, 3.0]))

        def verl():
            kept, draw = [], torch.multinomial
            torch.multinomial = lambda w, n, replacement: kept.append(w) or torch.arange(n)
            try:
                data = oracle_verl.Tensors({"token_level_scores": T([[s] for s in scores])})
                data.batch = TensorMap(data.batch)
                ca.compute_pf_ppo_reweight_data(data, method, q["weight_pow"])
            finally:
                torch.multinomial = draw
            return dict(weights=kept[0].tolist())

        return q, verl
    return make


class TensorMap(dict):
    batch_size = None


for _name in ["pow", "max_min", "max_random"]:
    FUNCTIONS[f"pf_ppo_weights {_name}"] = pf_ppo(_name)


# ---- micro-batches of dynamic batching ----


@function("rearrange_micro_batches")
def micro_batches(r):
    n = r.randint(60, 120) if r.random() < 0.05 else r.choice([1, 2, 3, 5, 8, 12, 20, 33])
    kind = r.choice(["plain", "plain", "equal", "few sizes", "halves", "skewed", "zeros"])
    high = r.choice([4, 100, 4096])
    draw = {"plain": lambda: r.randint(1, high), "equal": lambda: high, "few sizes": lambda: r.choice([1, high // 2, high]),
            "halves": lambda: high // 2 + r.randint(0, 2), "skewed": lambda: 1 + int(high * r.random() ** 4),
            "zeros": lambda: r.choice([0, 0, r.randint(1, high)])}[kind]
    lens = [draw() for _ in range(n)]
    if not any(lens):
        lens[0] = 1  # verl divides by the number of micro-batches, 0 of them here
    q = dict(op="rearrange_micro_batches", seqlen=lens, max_token_len=max(lens) * r.choice([1, 1, 2, 3, 10]) + r.randint(0, high))

    def verl():
        mask = torch.zeros(n, max(lens), dtype=torch.int64)
        for i, length in enumerate(lens):
            mask[i, :length] = 1
        batch = {"input_ids": mask, "attention_mask": mask}
        return dict(micro_batches=balancing.rearrange_micro_batches(batch, q["max_token_len"])[1])

    return q, verl


# ---- comparing ----


def build(name, k):
    """Batch k of a function: the request, verl's answer in float64, the name of an intended difference or None, and the thunk."""
    for again in range(100):
        r = random.Random(f"{name}/{k}/{again}")
        q, verl = FUNCTIONS[name](r)
        oracle_verl.precision(torch.float64)
        try:
            return q, verl(), None, verl
        except Refused:
            return q, {"error": True}, None, None
        except Differs as d:
            return q, d.expect, d.name, None
        except Tie:
            pass
    raise RuntimeError(f"{name}: no batch without ties")


def flat(x):
    if isinstance(x, list):
        return [v for e in x for v in flat(e)]
    return [x]


GRADIENTS = ("dlogp", "dentropy", "dvpreds", "dloss_mat")


def shape(x):
    return [shape(e) for e in x] if isinstance(x, list) else None


def errors(got, want):
    """{name: relative error} of every array and metric of `want`; inf where the shapes differ."""
    if want.get("error"):
        return {"error": 0.0 if "error" in got else math.inf}
    found = {k: relative(flat(got.get(k)), flat(w)) if shape(got.get(k)) == shape(w) else math.inf
             for k, w in want.items() if k != "metrics"}
    w = want.get("metrics", {})
    return found | {k: metric_error(k, got.get("metrics", {}).get(k), w) for k in w}


def metric_error(name, g, metrics):
    w = metrics[name]
    if name.endswith("_seq_std") and isinstance(g, float):  # of equal numbers: the rounding of their mean
        return abs(g - w) / max(abs(w), abs(metrics[name.removesuffix("_std") + "_mean"]), 1e-6)
    if name.endswith("_std") and isinstance(g, float):
        # sqrt(E[x^2] - E[x]^2): what rounding leaves is relative to E[x]^2
        size = max(w * w, metrics[name.removesuffix("_std") + "_mean"] ** 2, 1e-6)
        return abs(g * g - w * w) / size
    return relative([g], [w])


def relative(g, w):
    if w == [None]:
        return 0.0 if g == [None] else math.inf
    if len(g) != len(w) or any(x is None or isinstance(x, bool) for x in g):
        return math.inf
    size = max(max(map(abs, w), default=0), 1e-6)  # below, the rounding of the inputs' own size shows
    return max((abs(x - y) / size for x, y in zip(g, w)), default=0.0)


def ask(program, requests):
    text = "".join(json.dumps(q) + "\n" for q in requests)
    done = subprocess.run([program, "algo"], input=text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(program, name, n):
    """One row of the table; the number of batches beyond the bars."""
    start, rows = time.time(), [build(name, k) for k in range(n)]
    answers = ask(program, [q for q, *_ in rows])
    assert len(answers) == n, f"{name}: {n} requests, {len(answers)} answers"
    worst, bad, values, named, fp32 = [0.0, 0.0], [], 0, {}, []
    oracle_verl.precision(torch.float32)
    for (q, want, difference, verl), got in zip(rows, answers):
        found = errors(got, want)
        values += len(flat([list(v.values()) if isinstance(v, dict) else v for v in want.values()]))
        for key, e in found.items():
            worst[key in GRADIENTS] = max(worst[key in GRADIENTS], e)
        beyond = [f"{key} by {e:.1e}" for key, e in found.items() if not e <= (GRADIENT if key in GRADIENTS else VALUE)]
        if beyond:
            texts = [json.dumps(x)[:n_chars] for x, n_chars in ((got, 300), (want, 300), (q, 700))]
            bad.append("DIFFERS {}: {}: verlc {}; verl {}; {}".format(name, ", ".join(beyond), *texts))
        if difference:
            named[difference] = named.get(difference, 0) + 1
        elif verl:
            try:
                fp32.append(max(errors(got, verl()).values(), default=0.0))
            except Differs:  # rounding alone may reject every token
                pass
    for text in bad[:2]:
        print(text)
    tags = ", ".join(f"{c} {d}" for d, c in named.items())
    gradient = f"{worst[1]:8.1e}" if any(k in GRADIENTS for _, w, *_ in rows for k in w) else "       -"
    print(f"{name:44} {n:7} {values:8} {worst[0]:8.1e} {gradient} {statistics.median(fp32 or [0]):8.1e} {len(bad):4} "
          f"{time.time() - start:5.0f} s  {tags}", flush=True)
    return len(bad), worst, set(named)


def table(program, n, only):
    text = (ROOT / "docs/differences.md").read_text()
    print(f"{'function':44} batches  numbers    value gradient    fp32  bad  time   intended differences (docs/differences.md)")
    total, worst, names = 0, [0.0, 0.0], set()
    chosen = [f for f in FUNCTIONS if f.startswith(tuple(only))]
    for name in chosen:
        bad, w, named = compare(program, name, n)
        total, worst, names = total + bad, [max(a, b) for a, b in zip(worst, w)], names | named
    for name in names:
        if f"`{name}`" not in text:
            total += 1
            print(f"DIFFERS docs/differences.md has no row `{name}`")
    print(f"{len(chosen)} functions, {n} batches each: largest difference {worst[0]:.1e} (bar {VALUE:.0e}), "
          f"of gradients {worst[1]:.1e} (bar {GRADIENT:.0e}); {total} beyond")
    return 1 if total else 0


# ---- the committed sample ----


def tidy(x):
    if isinstance(x, dict):
        return {k: tidy(v) for k, v in x.items()}
    if isinstance(x, list):
        return [tidy(v) for v in x]
    if isinstance(x, float):
        return 0.0 if x == 0 else float(f"{x:.12g}")
    return x


def sample(path):
    """The first batches of each function, and the first batch of it on which each intended difference acts."""
    lines = []
    for name in FUNCTIONS:
        seen = set()
        for k in range(60):
            q, expect, difference, _ = build(name, k)
            line = json.dumps(dict(q, expect=tidy(expect), **({"difference": difference} if difference else {})),
                              allow_nan=False, separators=(",", ":"))
            if len(line) > SMALL or k >= SAMPLE.get(name.split()[0], 4) and (not difference or difference in seen):
                continue
            lines.append(line)
            seen.add(difference)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} batches of {len(FUNCTIONS)} functions, {path.stat().st_size / 1024:.0f} KiB")


def load_v1(directory):
    """verl.trainer.ppo.v1.utils without its package, which needs Ray, vLLM's clients and PIL."""
    stand_ins = {"": dict(__path__=[str(directory)]), ".replay_buffer": dict(DAPO_FILTERED_REWARD_COUNTS_KEY="")}
    for name, content in stand_ins.items():
        module = types.ModuleType("verl.trainer.ppo.v1" + name)
        vars(module).update(content)
        sys.modules[module.__name__] = module
    trainer = types.ModuleType("verl.trainer.ppo.ray_trainer")
    trainer.compute_advantage = grpo_of
    sys.modules[trainer.__name__] = trainer
    return importlib.import_module("verl.trainer.ppo.v1.utils")


def main():
    global ca, rch, config, config_actor, balancing, v1
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--verl", help="an unpacked verl wheel, if verl is not installed")
    p.add_argument("--verlc", help="compare this program's answers instead of writing the fixture")
    p.add_argument("--batches", type=int, default=1000, help="batches of each function")
    p.add_argument("--only", nargs="*", default=[""], help="functions whose name starts so")
    p.add_argument("--out", default=ROOT / "tests/fixtures/algo", type=Path)
    a = p.parse_args()
    oracle_verl.load(a.verl)
    from verl.trainer import config
    from verl.trainer.ppo import core_algos as ca
    from verl.trainer.ppo import rollout_corr_helper as rch
    from verl.utils import seqlen_balancing as balancing
    from verl.workers.config import actor as config_actor
    v1 = load_v1(Path(ca.__file__).parent / "v1")

    balancing.tu.index_select_tensor_dict = lambda batch, rows: rows  # which rows is what is compared

    torch.set_num_threads(1)
    if a.verlc:
        sys.exit(table(a.verlc, a.batches, a.only))
    sample(a.out / "algo.jsonl")


if __name__ == "__main__":
    main()
