"""Makes tests/fixtures/algo/*.jsonl from verl's own functions: advantages, losses
with their gradients by autograd, rollout correction, GSM8K and MATH scores.

Each line of algo.jsonl is a request of `verlc algo` plus "expect", what verl
computes in float64 (the places where verl falls back to float32 carry a "tol").
reward.jsonl holds strings with the scores of verl's graders.
With --verlc BIN nothing is written: the program answers every case through `verlc algo`,
and thousands of strings more, and each number is compared.
Run: python tools/oracle_algo.py [--verl DIR] [--out DIR | --verlc BIN]; needs torch, omegaconf
and verl 0.9.1 from PyPI (its other dependencies may be missing). Deterministic: the
same versions write the same bytes.
"""
import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import math
import random
import subprocess
import sys
import types
from pathlib import Path

ABSENT = {"ray", "orjson", "tensordict", "codetiming", "torchdata", "datasets", "pandas", "peft"}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets verl import where a dependency that the algorithms do not use is missing."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        class Stub(types.ModuleType):
            __path__ = []

            def __getattr__(self, attr):
                if attr.startswith("__"):
                    raise AttributeError(attr)
                return type(attr, (), {})

        return Stub(spec.name)

    def exec_module(self, module):
        pass


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--verl", help="an unpacked verl wheel, if verl is not installed")
    p.add_argument("--full", action="store_true", help="every string of the graders' test, not the committed few hundred")
    p.add_argument("--verlc", help="compare this program's answers instead of writing fixtures")
    p.add_argument("--out", default=Path(__file__).parent.parent / "tests/fixtures/algo", type=Path)
    return p.parse_args()


ARGS = parse_args()
if ARGS.verl:
    sys.path.insert(0, ARGS.verl)
sys.meta_path.append(Absent())  # last: only what is really missing

import numpy as np  # noqa: E402
import torch  # noqa: E402
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo import core_algos as ca  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper as rch  # noqa: E402
from verl.workers.config.actor import ActorConfig, PolicyLossConfig  # noqa: E402


class Tensors:
    """Stands in for DataProto, which needs tensordict."""

    def __init__(self, tensors):
        self.batch = tensors

    from_dict = classmethod(lambda cls, tensors: cls(tensors))


rch.DataProto = Tensors
torch.set_default_dtype(torch.float64)
RNG = random.Random(20260101)


# ---- random ragged batches ----


def num(lo, hi):
    return round(RNG.uniform(lo, hi), 3)


class Batch:
    """B rows of at most T tokens; garbage (NaN) stands where the mask is 0."""

    def __init__(self, sizes=None, holes=True, empty=False):
        self.uid = [g for g, n in enumerate(sizes or [RNG.choice([1, 2, 3, 4]) for _ in range(2)]) for _ in range(n)]
        RNG.shuffle(self.uid)
        self.B, self.T = len(self.uid), RNG.randint(2, 6)
        lens = [RNG.randint(1, self.T) for _ in self.uid]
        lens[RNG.randrange(self.B)] = self.T  # so that the longest row is the padded width
        self.mask = [[int(t < n and not (holes and t < n - 1 and RNG.random() < 0.15)) for t in range(self.T)] for n in lens]
        if empty and self.B > 2:
            self.mask[lens.index(min(lens)) if min(lens) < self.T else 0] = [0] * self.T
        if not any(map(sum, self.mask)):
            self.mask[0][0] = 1
        # rows may stop at their last valid token, but one keeps the width
        keep = max(range(self.B), key=lambda i: lens[i])
        self.width = [self.T if i == keep or RNG.random() < 0.5 else n for i, n in enumerate(lens)]

    def m(self):
        return torch.tensor(self.mask)

    def full(self, lo, hi):
        return torch.tensor([[num(lo, hi) for _ in range(self.T)] for _ in range(self.B)])

    def rows(self, x, garbage=False):
        """To JSON: cut to each row's width; null where masked, if garbage."""
        x = x.tolist() if torch.is_tensor(x) else x
        return [[None if garbage and not self.mask[i][t] else x[i][t] for t in range(self.width[i])] for i in range(self.B)]

    def expect(self, x):
        return [[tidy(v) for v in row] for row in self.rows(x)]


def tidy(x):
    if isinstance(x, bool) or not isinstance(x, float):
        return x
    return 0.0 if x == 0 else float(f"{x:.12g}")


LINES = []


def emit(request, expect, tol=None):
    line = dict(request, expect=expect)
    if tol:
        line["tol"] = tol
    LINES.append(line)


def metrics_json(m):
    return {k: tidy(float(v)) for k, v in m.items() if math.isfinite(float(v))}


# ---- advantages ----


def rewards_for(b, kind):
    """Outcome rewards on the last token, rewards on every token, or all equal."""
    r = torch.zeros(b.B, b.T)
    for i in range(b.B):
        last = max([t for t in range(b.T) if b.mask[i][t]] or [0])
        if kind == "dense":
            for t in range(b.width[i]):  # masked tokens too: a row's sum counts them
                r[i, t] = num(-1, 1)
        else:
            r[i, last] = 0.75 if kind == "equal" else RNG.choice([0.0, 1.0, num(-1, 2)])
    return r


def advantage_cases():
    group = ["grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo", "gpg"]
    for name in group + ["grpo_passk", "reinforce_plus_plus", "remax", "gae", "gdpo"]:
        for k, kind in enumerate(["outcome", "dense", "equal", "outcome"]):
            sizes = [RNG.randint(2, 4), RNG.randint(2, 3)] + ([] if name == "grpo_passk" else [1])
            b = Batch(sizes, empty=k == 3)
            advantage_case(name, b, rewards_for(b, kind), RNG.random() < 0.5)
    b = Batch([1])
    for name in group + ["reinforce_plus_plus"]:
        if sum(map(sum, b.mask)) > 1:
            advantage_case(name, b, rewards_for(b, "outcome"), True)
    for name in ["optimal_token_baseline", "tir_optimal_token_baseline"]:
        for k in range(6):
            b = Batch([3, 2, 1], holes=k > 1, empty=k == 5)
            token_baseline_case(name, b, rewards_for(b, "dense" if k % 2 else "outcome"), k)


def advantage_case(name, b, r, flag):
    uid = np.array([f"u{u}" for u in b.uid], dtype=object)
    request = dict(op="advantage", estimator=name, token_level_rewards=b.rows(r), response_mask=b.rows(b.mask),
                   uid=uid.tolist())
    kw = dict(token_level_rewards=r.clone(), response_mask=b.m())
    tol = None
    if name not in ("reinforce_plus_plus", "remax", "gae"):
        kw["index"] = uid
    if name in ("grpo", "grpo_vectorized", "gdpo"):
        kw["norm_adv_by_std_in_grpo"] = request["norm_adv_by_std_in_grpo"] = flag
    if name == "grpo_passk":
        kw["config"] = AlgoConfig(norm_adv_by_std_in_grpo=flag)
        request["config"] = dict(norm_adv_by_std_in_grpo=flag)
    if name in ("grpo_vectorized", "gdpo"):
        tol = 2e-5  # verl takes these scores through float32, and divides by their spread
    if name == "reinforce_plus_plus":
        request["gamma"] = num(0.5, 1)
        kw["config"] = AlgoConfig(gamma=request["gamma"])
    if name == "remax":
        request["reward_baselines"] = [num(-1, 1) for _ in b.uid]
        kw["reward_baselines"] = torch.tensor(request["reward_baselines"])
    if name == "gae":
        values = b.full(-1, 1)
        request.update(values=b.rows(values), gamma=num(0.8, 1), lam=num(0.5, 1))
        kw.update(values=values, gamma=request["gamma"], lam=request["lam"])
    if name == "gdpo" and flag:
        keys = ["format", "accuracy"]
        request.update({k: [RNG.choice([0.0, 1.0, num(0, 1)]) for _ in b.uid] for k in keys})
        request["config"] = dict(gdpo_reward_keys=keys, gdpo_reward_weights=[num(0.2, 2), num(0.2, 2)])
        kw["config"] = request["config"]
        kw["non_tensor_batch"] = {k: np.array(request[k]) for k in keys}
        # one prompt token; a row without tokens puts its score in the last column, which no row sum minds
        kw["batch"] = dict(prompts=torch.zeros(b.B, 1), attention_mask=torch.cat([torch.ones(b.B, 1, dtype=torch.long), b.m()], 1))
    adv, ret = ca.get_adv_estimator_fn(name)(**kw)
    emit(request, dict(advantages=b.expect(adv.double()), returns=b.expect(ret.double())), tol)


def token_baseline_case(name, b, r, k):
    uid = np.array(b.uid)
    old, sum_pi = b.full(-3, 0), b.full(0.05, 0.9)
    request = dict(op="advantage", estimator=name, token_level_rewards=b.rows(r), response_mask=b.rows(b.mask),
                   uid=b.uid, old_log_probs=b.rows(old, True), sum_pi_squared=b.rows(sum_pi, True))
    kw = dict(token_level_rewards=r, response_mask=b.m(), index=uid, old_log_probs=old, sum_pi_squared=sum_pi)
    if k % 2:
        w = b.full(0.3, 2)
        request["rollout_is_weights"] = b.rows(w, True)
        kw["rollout_is_weights"] = w
    if k in (2, 3):
        kw["handle_zero_tail"] = request["handle_zero_tail"] = False
    adv, ret = ca.get_adv_estimator_fn(name)(**kw)
    emit(request, dict(advantages=b.expect(adv), returns=b.expect(ret)))


# ---- losses ----

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def global_info(b, k):
    if k % 2 == 0:
        return {}
    info = dict(dp_size=RNG.choice([1, 2]), batch_num_tokens=RNG.randint(20, 40), global_batch_size=RNG.randint(8, 16))
    if k % 4 == 1:
        info["loss_scale_factor"] = RNG.randint(2, 20)
    return info


def actor_config(options, policy_loss, info):
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(**policy_loss), **options)
    config.global_batch_info.update(info)
    return config


def policy_case(name, b, k, lp=None, old=None, adv=None, weights=False, options=None, policy_loss=None):
    options, policy_loss, info = options or {}, policy_loss or {}, global_info(b, k)
    old = b.full(-3, 0) if old is None else old
    lp = (old + b.full(-0.6, 0.6)).round(decimals=3) if lp is None else lp
    adv = b.full(-2, 2) if adv is None else adv
    w = b.full(0.2, 2) if weights else None
    mode = MODES[k % len(MODES)]
    request = dict(op="policy_loss", loss_mode=name, loss_agg_mode=mode, old_log_prob=b.rows(old, True),
                   log_prob=b.rows(lp, True), advantages=b.rows(adv, True), response_mask=b.rows(b.mask))
    if weights:
        request["rollout_is_weights"] = b.rows(w, True)
    request["config"] = dict(options, policy_loss=policy_loss, global_batch_info=info)
    lp = lp.clone().requires_grad_()
    rc = policy_loss.get("rollout_correction")
    given = dict(policy_loss, **({"rollout_correction": RolloutCorrectionConfig(**rc)} if rc else {}))
    loss, metrics = ca.get_policy_loss_fn(name)(old_log_prob=old, log_prob=lp, advantages=adv, response_mask=b.m(),
                                                loss_agg_mode=mode, config=actor_config(options, given, info),
                                                rollout_is_weights=w)
    loss.backward()
    emit(request, dict(loss=tidy(loss.item()), dlogp=b.expect(lp.grad), metrics=metrics_json(metrics)))


def policy_cases():
    clips = [dict(clip_ratio_low=0.2, clip_ratio_high=0.28), dict(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None),
             dict(clip_ratio_low=0.1, clip_ratio_high=0.4, clip_ratio_c=1.3)]
    extra = dict(dro=[dict(dro_beta=0.4)], kl_cov=[dict(kl_cov_ratio=0.3, ppo_kl_coef=0.5), dict(kl_cov_ratio=0.01)],
                 # every candidate is taken, so that the random choice has one outcome
                 clip_cov=[dict(clip_cov_ratio=1.0, clip_cov_lb=-0.2, clip_cov_ub=0.6), dict(clip_cov_ratio=1.0, clip_cov_lb=9.0, clip_cov_ub=10.0)])
    for name in ["vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "dro", "geo_mean", "clip_cov", "kl_cov"]:
        for k in range(7):
            options = dict(clips[k % 3], **(dict(tau_pos=1.5, tau_neg=2.0) if name == "sapo" else {}))
            policy_loss = extra.get(name, [{}])
            policy_case(name, Batch(empty=k % 3 == 2), k, weights=k % 2 == 1, options=options,
                        policy_loss=policy_loss[k % len(policy_loss)])
    for name in ["vanilla", "gspo", "sapo", "cispo", "geo_mean", "dppo_tv", "dppo_kl"]:
        edge_policy_cases(name)
    for k, rc in enumerate([dict(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4"),
                            dict(rollout_is="sequence", loss_type="reinforce", rollout_is_threshold=1.2),
                            dict(rollout_is="token", rollout_is_batch_normalize=True, loss_type="reinforce",
                                 rollout_rs="seq_mean_k3,token_k2", rollout_rs_threshold="0.2,0.15"),
                            dict(rollout_is=None, rollout_rs="seq_max_k2", rollout_rs_threshold=0.1, loss_type="ppo_clip"),
                            dict(rollout_is="token", rollout_is_threshold="0.6_1.5", loss_type="reinforce")]):
        policy_case("bypass_mode", Batch([3, 2]), k, policy_loss=dict(rollout_correction=rc))


def edge_policy_cases(name):
    """On the clip bounds, at zero advantage, at equal policies, beyond the clamp of the exponent."""
    b = Batch([3, 2], holes=False)
    old = b.full(-3, 0)
    policy_case(name, b, 0, lp=old.clone(), old=old)
    policy_case(name, b, 0, lp=old.clone(), old=old, options=dict(clip_ratio_low=0.0, clip_ratio_high=0.0))
    policy_case(name, b, 1, adv=torch.zeros(b.B, b.T))
    jump = torch.tensor([[RNG.choice([-25.0, -20.0, 0.0, 20.0, 25.0, 0.5]) for _ in range(b.T)] for _ in range(b.B)])
    policy_case(name, b, 4, lp=torch.full((b.B, b.T), -30.0) + jump, old=torch.full((b.B, b.T), -30.0))
    # every log-ratio 12: a whole sequence beyond gspo's bound of 10
    policy_case(name, b, 4, lp=torch.full((b.B, b.T), -3.0), old=torch.full((b.B, b.T), -15.0))
    # ratio exactly 2 = 1 + high = c
    two = torch.full((b.B, b.T), math.log(2.0))
    policy_case(name, b, 0, lp=two.clone(), old=torch.zeros(b.B, b.T), options=dict(clip_ratio_low=0.5, clip_ratio_high=1.0, clip_ratio_c=2.0))


def kl_cases():
    for name in ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]:
        for plus in ["", "+"]:
            x = torch.tensor([[num(-2, 2) for _ in range(6)] + [0.0, 20.0, -20.0, 25.0, -25.0, 2.5]])
            ref = torch.tensor([[num(-2, 2) for _ in range(6)] + [0.0] * 6])
            lp = x.clone().requires_grad_()
            kl = ca.kl_penalty(lp, ref, name + plus)
            kl.sum().backward()
            emit(dict(op="kl", type=name + plus, logp=x.tolist(), ref_logp=ref.tolist()),
                 dict(kl=[[tidy(v) for v in kl[0].tolist()]], dlogp=[[tidy(v) for v in lp.grad[0].tolist()]]))


def agg_cases():
    for k in range(10):
        b = Batch(empty=k > 4)
        mode, info = MODES[k % 5], global_info(b, k)
        mat = b.full(-2, 2).requires_grad_()
        loss = ca.agg_loss(mat, b.m(), mode, **info)
        loss.backward()
        emit(dict(op="agg_loss", loss_mat=b.rows(mat.detach(), True), loss_mask=b.rows(b.mask), loss_agg_mode=mode, **info),
             dict(loss=tidy(loss.item()), dloss_mat=b.expect(mat.grad)))


def value_cases():
    for k in range(8):
        b = Batch(empty=k > 5)
        values, returns = b.full(-1, 1), b.full(-2, 2)
        vpreds = b.full(-2, 2)
        eps = RNG.choice([0.25, 0.5])
        if k in (1, 2):  # exactly on the bounds, in binary
            values = (values * 4).round() / 4
            vpreds = values + torch.tensor([[RNG.choice([-eps, eps, 0.0]) for _ in range(b.T)] for _ in range(b.B)])
        mode, info = MODES[k % 5], global_info(b, k)
        v = vpreds.clone().requires_grad_()
        loss, frac = ca.compute_value_loss(v, returns, values, b.m(), eps, mode, **info)
        loss.backward()
        emit(dict(op="value_loss", vpreds=b.rows(vpreds, True), values=b.rows(values, True), returns=b.rows(returns, True),
                  response_mask=b.rows(b.mask), cliprange_value=eps, loss_agg_mode=mode, **info),
             dict(loss=tidy(loss.item()), dvpreds=b.expect(v.grad), vf_clipfrac=tidy(frac.item())))


def actor_cases():
    """verl.workers.utils.losses.ppo_loss, from its parts (the function itself needs tensordict)."""
    for k in range(6):
        b = Batch()
        old, ref, entropy, adv = b.full(-3, 0), b.full(-3, 0), b.full(0, 3), b.full(-2, 2)
        lp = (old + b.full(-0.6, 0.6)).round(decimals=3)
        info, mode, kl = global_info(b, k), MODES[k % 5], ["low_var_kl", "k1", "k3+", "abs", "k2", "kl+"][k]
        config = dict(entropy_coeff=num(0, 0.1), kl_loss_coef=num(0, 0.1), kl_loss_type=kl, global_batch_info=info)
        lpg, eg = lp.clone().requires_grad_(), entropy.clone().requires_grad_()
        pg, metrics = ca.get_policy_loss_fn("vanilla")(old, lpg, adv, b.m(), mode, actor_config({}, {}, info), None)
        metrics["actor/pg_loss"] = pg.item()
        ent = ca.agg_loss(eg, b.m(), mode, **info)
        kll = ca.agg_loss(ca.kl_penalty(lpg, ref, kl), b.m(), mode, **info)
        metrics.update({"actor/entropy_loss": ent.item(), "actor/kl_loss": kll.item(), "actor/kl_coef": config["kl_loss_coef"]})
        total = pg - config["entropy_coeff"] * ent + config["kl_loss_coef"] * kll
        total.backward()
        emit(dict(op="actor_loss", loss_agg_mode=mode, old_log_prob=b.rows(old, True), log_prob=b.rows(lp, True),
                  advantages=b.rows(adv, True), entropy=b.rows(entropy, True), ref_log_prob=b.rows(ref, True),
                  response_mask=b.rows(b.mask), config=config),
             dict(loss=tidy(total.item()), dlogp=b.expect(lpg.grad), dentropy=b.expect(eg.grad), metrics=metrics_json(metrics)))


# ---- rollout correction, KL in the reward ----


def correction_cases():
    rs = [None, "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
          "seq_mean_k3", "seq_max_k2", "seq_max_k3", "token_k1,seq_mean_k3,token_k1"]
    for k, option in enumerate(rs):
        b = Batch([3, 2], empty=k % 4 == 3)
        rollout = b.full(-3, 0)
        old = (rollout + b.full(-0.8, 0.8)).round(decimals=3)
        spec = dict(rollout_is=[None, "token", "sequence"][k % 3], rollout_is_threshold=[1.3, "0.3_3.0", 2.0, "1.5"][k % 4],
                    rollout_is_batch_normalize=k % 2 == 0, rollout_rs=option)
        if option:
            spec["rollout_rs_threshold"] = "0.7_1.3,0.05" if "," in option else ("0.8_1.4" if k % 2 else 1.25) if "k1" in option else 0.12
        weights, mask, metrics = rch.compute_rollout_correction_and_rejection_mask(
            old_log_prob=old, rollout_log_prob=rollout, response_mask=b.m(), **spec)
        w = weights.batch["rollout_is_weights"] if weights else None
        emit(dict(op="rollout_correction", old_log_prob=b.rows(old, True), rollout_log_prob=b.rows(rollout, True),
                  response_mask=b.rows(b.mask), **spec),
             dict(rollout_is_weights=None if w is None else b.expect(w), response_mask=b.rows(mask), metrics=metrics_json(metrics)))


def kl_reward_cases():
    for k, name in enumerate(["kl", "abs", "mse", "low_var_kl"]):
        b = Batch(empty=k == 3)
        scores, old, ref = b.full(-1, 1), b.full(-3, 0), b.full(-3, 0)
        ctrl = dict(type=["fixed", "adaptive"][k % 2], kl_coef=0.1, target_kl=0.1, horizon=100)
        c = ca.get_kl_controller(types.SimpleNamespace(**ctrl))
        beta, kld = c.value, ca.kl_penalty(old, ref, name) * b.m()
        current = torch.mean(ca.verl_F.masked_mean(kld, b.m(), axis=-1)).item()
        c.update(current_kl=current, n_steps=b.B)
        emit(dict(op="kl_in_reward", token_level_scores=b.rows(scores), old_log_probs=b.rows(old, True), ref_log_prob=b.rows(ref, True),
                  response_mask=b.rows(b.mask), kl_penalty=name, kl_ctrl=ctrl),
             dict(token_level_rewards=b.expect(scores - beta * kld), value=tidy(c.value),
                  metrics={"actor/reward_kl_penalty": tidy(current), "actor/reward_kl_penalty_coeff": tidy(beta)}))
    for kls in [0.5, 0.01, -0.3, 0.1, 0.11]:
        c = ca.AdaptiveKLController(0.2, 0.1, 1000)
        c.update(kls, 64)
        emit(dict(op="kl_controller", type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=1000, current_kl=kls, n_steps=64),
             dict(value=tidy(float(c.value))))


# ---- graders ----


def gsm8k_strings(n):
    """Final answers as GSM8K writes them, bent in every way that the grader is sensitive to."""
    for k in range(n):
        gold = str(RNG.choice([RNG.randint(0, 20), RNG.randint(0, 10**6), -RNG.randint(1, 500)]))
        shown = RNG.choice([gold, f"{int(gold):,}", "$" + gold, gold + ".", gold + ".0", gold + ",", gold + "%", "- " + gold,
                            "٣", str(int(gold) + 1), "", ".", ",", gold + " apples", "−" + gold, "0" + gold])
        mark = RNG.choice(["#### ", "#### ", "#### ", "####", "### ", "##### ", "####  ", "####\n", "#### #### ", "The answer is "])
        text = RNG.choice(["", "So 3 * 4 = 12.\n", "日本語 12 \n", "x" * RNG.choice([280, 290, 296, 300, 310]), "é" * 295, "😀" * 298 + "\n",
                           "#### 7\n", "#### " + gold + "\n then ", "12, 13. 14 "])
        tail = RNG.choice(["", "", ".", "\n", " and so on", "\n#### 5", "\n####", "z" * RNG.choice([280, 290, 299, 300]), "ü" * 297, " .", " ,"])
        yield text + mark + shown + tail, gold


MATH_PIECES = [r"\frac{1}{2}", r"\frac12", r"\frac1{72}", r"\dfrac{3}{4}", r"\tfrac 1 2", "0.5", ".5", "1/2", "-3/4", "a/b", r"\sqrt3", r"\sqrt{3}",
               r"x=5", "k = 7", "long=7", r"10\%", r"45^\circ", r"45^{\circ}", r"12\text{ cm}", r"\left(1,2\right)", r"\$5", "1,000",
               r"\text{A}", "x^2+1", r"\!3", r"\\frac{1}{2}", "{.5}", " .5", r"\frac{a}{b}", "1/2/3", r"\frac1", "007/2", "日本", "½",
               r"\sqrt", r"3\text{ m}\text{ s}", "", "a=b=c", r"\frac", r"12\mbox{ dollars}", "a cat", "an 5", "5 students", "$5$", "$x=3$ and",
               r"\boxed{7}", r"\overline{AB}", r"\textbf{9}", r"3,\text{and} 4", "12 ways", "{,}", r"1{,}000", '"7"', r"\frac ab", "fracab",
               "sqrt2", "1,2,3", r"\ldots", "1 000", "10^{\circ}", "7 \\dots", "²", "٣", "１２", "\u2003 5", "5\u00a0"]


def math_strings(n):
    for k in range(n):
        gold = RNG.choice(MATH_PIECES)
        shown = RNG.choice([gold, RNG.choice(MATH_PIECES)])
        yield RNG.choice(["The answer is $\\boxed{%s}$.", "\\boxed{%s} so \\boxed{%s}", "\\boxed %s$ end", "\\fbox{%s}", "no box %s",
                          "\\boxed{%s", "\\boxed{{%s}}", "Answer: %s", "answer :\u2003%s\nmore", "Answer: 1\nANSWER:  %s ", "an\u017fwer: %s", "Answer:\n\n%s", "Answer:", "\\boxed{a} Answer: \n",
                          "x" * 290 + "Answer: %s", "y" * 250 + "\\boxed{%s}"]).replace("%s", shown), gold


def reward_lines(n_gsm8k, n_math):
    from verl.utils.reward_score import gsm8k, math_dapo, math_reward

    lines = []
    for text, gold in gsm8k_strings(n_gsm8k):
        lines.append(dict(kind="gsm8k", text=text, gold=gold, strict=float(gsm8k.compute_score(text, gold)),
                          flexible=float(gsm8k.compute_score(text, gold, method="flexible")),
                          answer=gsm8k.extract_solution(text), loose=gsm8k.extract_solution(text, "flexible")))
    for text, gold in math_strings(n_math):
        dapo = math_dapo.compute_score(text, gold)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its exceptions
            score = float(math_reward.compute_score(text, gold))
        lines.append(dict(kind="math", text=text, gold=gold, math=score, dapo=float(dapo["score"]), pred=dapo["pred"]))
    return lines


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines))
    print(f"{path}: {len(lines)} cases, {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


# ---- the program's answers ----

TOLERANCE = 1e-10  # sums of a few tens of float64 in another order, and 12 printed digits
TOLERANCE_METRIC = 1e-7  # shares of tokens are float32 in verl


def differences(got, want, tol, path=""):
    """(error beyond its tolerance: a text or None, relative error) of every number of `want`."""
    if isinstance(want, dict):
        for k, w in want.items():
            metric = "/" in k or k == "vf_clipfrac"
            yield from differences(got.get(k) if isinstance(got, dict) else None, w, max(tol, TOLERANCE_METRIC) if metric else tol, f"{path}.{k}")
    elif isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            yield f"{path}: {got!r} where verl has {len(want)} values", 0.0
        else:
            for k, w in enumerate(want):
                yield from differences(got[k], w, tol, f"{path}[{k}]")
    elif isinstance(want, (int, float)) and not isinstance(want, bool):
        number = isinstance(got, (int, float)) and not isinstance(got, bool)
        e = abs(got - want) / max(1.0, abs(want)) if number else math.inf
        yield (None if e <= tol else f"{path}: {got!r} where verl has {want!r}"), e if tol <= TOLERANCE else 0.0
    else:
        yield (None if got == want else f"{path}: {got!r} where verl has {want!r}"), 0.0


def reward_requests(line):
    """(request, expected answer) pairs of a line of reward.jsonl."""
    base = dict(op="reward", solution_str=line["text"], ground_truth=line["gold"])
    if line["kind"] == "gsm8k":
        for method in ("strict", "flexible"):
            yield dict(base, data_source="openai/gsm8k", method=method), dict(score=line[method])
    else:
        yield dict(base, data_source="lighteval/MATH"), dict(score=line["math"])
        yield dict(base, data_source="math_dapo"), dict(score=line["dapo"], pred=line["pred"])


def compare(program, lines, rewards):
    requests = [{k: v for k, v in line.items() if k not in ("expect", "tol")} for line in lines]
    want = [(line["expect"], line.get("tol", TOLERANCE)) for line in lines]
    for request, expect in (pair for line in rewards for pair in reward_requests(line)):
        requests.append(request)
        want.append((expect, TOLERANCE))
    text = "".join(json.dumps(r) + "\n" for r in requests)
    done = subprocess.run([program, "algo"], input=text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    got = [json.loads(line) for line in done.stdout.splitlines()]
    if len(got) != len(want):
        sys.exit(f"{len(want)} requests, {len(got)} answers")
    n, bad, worst = 0, [], 0.0
    for request, g, (expect, tol) in zip(requests, got, want):
        for text, e in differences(g, expect, tol, request["op"]):
            n += 1
            worst = max(worst, e)
            if text:
                bad.append(f"{text} in {json.dumps(request)[:200]}")
    for text in bad[:5]:
        print("DIFFERS " + text)
    print(f"{len(lines)} requests and {len(requests) - len(lines)} graded answers, {n} values, {len(bad)} differences; largest relative error {worst:.1e}")
    return 1 if bad else 0


def main():
    for cases in [advantage_cases, policy_cases, kl_cases, agg_cases, value_cases, actor_cases, correction_cases, kl_reward_cases]:
        cases()
    if ARGS.verlc:
        sys.exit(compare(ARGS.verlc, LINES, reward_lines(2000, 3000)))
    write(ARGS.out / "algo.jsonl", LINES)
    write(ARGS.out / "reward.jsonl", reward_lines(*((2000, 3000) if ARGS.full else (250, 350))))


if __name__ == "__main__":
    main()
