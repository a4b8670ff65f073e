"""Every advantage estimator in the trainer: the formulas are tested against verl's in
algo, here it is what the trainer hands them. Advantages of recorded samples are computed
again from their scores; ReMax's baseline is the score of the greedy answer; estimators
that need more than rewards get it; rollout correction changes nothing where rollout and
training agree, and works on the policy's drift in bypass mode; refusals."""

import json
import math
import pathlib
import sqlite3
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, state  # noqa: E402

REWARD = '''
import hashlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    h = hashlib.sha256(solution_str.encode()).digest()
    return {"score": (1 + h[0]) / 64, "a": h[1] / 100, "b": h[2] % 2 == 1}
'''
# scores the first sample of each prompt alone
LONE = '''
seen = set()
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] in seen:
        raise ValueError("scored already")
    seen.add(extra_info["index"])
    return 1.5 + extra_info["index"]
'''
N = 4
ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."


def metrics(run_dir, step=-1):
    return json.loads((pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()[step])["data"]


def samples(run_dir, columns, validation=0, step=1):
    db = sqlite3.connect(pathlib.Path(run_dir) / "run.db")
    return db.execute(f"SELECT {columns} FROM samples WHERE validation = ? AND step = ? ORDER BY id", (validation, step)).fetchall()


def groups(run_dir):
    """[[(score, advantage of the first token, tokens)]] of the first step."""
    rows = samples(run_dir, "score, advantage, length(ids) / 4")
    return [rows[i:i + N] for i in range(0, len(rows), N)]


def leave_one_out(g):
    return [s - sum(x[0] for j, x in enumerate(g) if j != i) / (N - 1) for i, (s, _, _) in enumerate(g)]


def passk(g):
    s = sorted((x[0] for x in g), reverse=True)
    return [(s[0] - s[1]) / (statistics.stdev(s) + 1e-6) if x[0] == s[0] else 0 for x in g]


def opo(g):
    return [x[0] - sum(y[0] * y[2] for y in g) / sum(y[2] for y in g) for x in g]


def mean_baseline(g):
    return [x[0] - statistics.mean(y[0] for y in g) for x in g]


def grpo(g):
    return [a / (statistics.stdev(x[0] for x in g) + 1e-6) for a in mean_baseline(g)]


FORMULAS = {"grpo": grpo, "grpo_vectorized": grpo, "rloo": leave_one_out, "rloo_vectorized": leave_one_out, "grpo_passk": passk,
            "opo": opo, "gpg": mean_baseline}  # no score is 0 here, so gpg's factor is 1


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "score.py").write_text(REWARD)
        base = {"reward.custom_reward_function.path": s.dir / "score.py", "reward.num_workers": 1, "actor_rollout_ref.rollout.n": N,
                "actor_rollout_ref.actor.use_kl_loss": False, "trainer.total_training_steps": 1,
                "data.val_files": s.dir / "train.jsonl"}

        def step(estimator, name=None, **keys):
            d = name or estimator
            run(*s.ppo(d, **{**base, "algorithm.adv_estimator": estimator, **keys}))
            return s.dir / d

        for name, formula in FORMULAS.items():
            off = max(abs(a - x[1]) for g in groups(step(name)) for a, x in zip(formula(g), g))
            test(f"{name}: advantages from these scores", off < 1e-5, f"off by {off}")
        for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
            m = metrics(step(name))
            test(f"{name}: advantages whitened over the batch",
                 abs(m["critic/advantages/mean"]) < 1e-6 < m["critic/advantages/max"], str(m))

        d = step("remax", **{"trainer.val_before_train": True})
        greedy = dict(samples(d, "uid, score", validation=1, step=0))
        rows = samples(d, "uid, score, advantage")
        off = max(abs(score - greedy[uid] - a) for uid, score, a in rows)
        test("remax: the baseline is the greedy answer's score", off < 1e-9 and len(rows) == 4 * N, f"off by {off}")

        for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
            d = step(name)
            # weights are positive: a baseline lies between the scores it averages
            between = all(min(a) < 0 < max(a) for a in ([x[1] for x in g] for g in groups(d)))
            m = metrics(d)
            test(f"{name}: a baseline between the scores, from the old pass", between and m["timing_s/old_log_prob"] > 0 and
                 m["training/rollout_probs_diff_max"] == 0)
            proxy = [m[f"variance_proxy/{k}"] for k in ("proxy1_signal_strength", "proxy2_total_power", "proxy3_pure_noise",
                                                        "expected_w")]
            test(f"{name}: variance_proxy", all(v > 0 for v in proxy) and math.isclose(proxy[0], m["actor/grad_norm"] ** 2),
                 str(proxy))

        for by_std in (True, False):
            name = "gdpo" if by_std else "gdpo without std"
            d = step("gdpo", name, **{"+algorithm.gdpo_reward_keys": "[a,b]", "+algorithm.gdpo_reward_weights": "[1.0,0.5]",
                                      "algorithm.norm_adv_by_std_in_grpo": by_std})
            extra = [json.loads(e[0]) for e in samples(d, "extra")]
            want = []
            for i in range(0, len(extra), N):
                for j in range(N):
                    total = 0
                    for key, w in (("a", 1.0), ("b", 0.5)):
                        x = [float(e[key]) for e in extra[i:i + N]]
                        total += w * (x[j] - statistics.mean(x)) / (statistics.stdev(x) + 1e-6 if by_std else 1)
                    want.append(total)
            have = [x[1] for g in groups(d) for x in g]
            scale = (max(have) - min(have)) / (max(want) - min(want))  # whitening is a shift and a scale
            shift = have[0] - scale * want[0]
            off = max(abs(h - scale * w - shift) for h, w in zip(have, want))
            test(f"{name}: each reward of the dict by itself, weighted, whitened", scale > 0 and off < 1e-6, f"off by {off}")

        # std-flag-everywhere (docs/differences.md)
        for name in ("grpo", "grpo_vectorized"):
            d = step(name, f"{name} without std", **{"algorithm.norm_adv_by_std_in_grpo": False})
            off = max(abs(a - x[1]) for g in groups(d) for a, x in zip(mean_baseline(g), g))
            test(f"{name}: norm_adv_by_std_in_grpo=False takes the mean away and does not divide", off < 1e-9, f"off by {off}")

        # lone-survivor, short-mini-batch: one sample of each prompt is left, 4 of a mini-batch of 16
        (s.dir / "lone.py").write_text(LONE)
        d = step("grpo", "lone", **{"reward.custom_reward_function.path": s.dir / "lone.py", "reward.on_error": "drop_sample",
                                    ACTOR + "ppo_mini_batch_size": 4, ACTOR + "loss_agg_mode": "seq-mean-token-mean"})
        rows, m = [r for r in samples(d, "score, advantage") if r[1] is not None], metrics(d)
        test("a lone survivor: a group of one, whose advantage is its score", len(rows) == 4 and m["reward/num_errors"] == 12 and
             all(math.isclose(a, score / (1 + 1e-6), rel_tol=1e-9) for score, a in rows), str(rows))
        want = -statistics.mean(a for _, a in rows)  # the ratio is 1: a sample's loss is its advantage
        test("a short mini-batch: the loss is the mean over its own samples",
             len(rows) == 4 and math.isclose(m["actor/pg_loss"], want, rel_tol=1e-5), f"{m['actor/pg_loss']}, want {want}")

        # norm-by-limit: without loss_scale_factor the divisor is max_response_length, whatever the responses are long
        keys = {"data.max_response_length": 200, ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm",
                ACTOR + "ppo_micro_batch_size_per_gpu": 1}
        d = step("grpo", "by limit", **keys)
        given = step("grpo", "by 200", **keys, **{ACTOR + "loss_scale_factor": 200})
        longest = max(n for (n,) in samples(d, "length(ids) / 4"))
        test("seq-mean-token-sum-norm: loss_scale_factor=null is max_response_length",
             min(n for (n,) in samples(d, "length(ids) / 4")) < longest <= 200 and
             metrics(d)["actor/grad_norm"] == metrics(given)["actor/grad_norm"] > 0 and state(d, 1) == state(given, 1))

        # steps-over-epochs: an epoch is two steps
        d = step("grpo", "over", **{"data.train_batch_size": 32, ACTOR + "ppo_mini_batch_size": 32, "trainer.total_epochs": 1,
                                    "trainer.total_training_steps": 3, "trainer.save_freq": 5, "trainer.test_freq": 5})
        test("total_training_steps beyond total_epochs: goes on, validates and saves at its end", metrics(d)["training/epoch"] == 1
             and (d / "global_step_3").is_dir() and any(k.startswith("val-core/") for k in metrics(d)))

        plain = state(step("grpo", "plain"), 1)
        d = step("grpo", "corrected", **{CORRECTION + "rollout_is": "sequence", CORRECTION + "rollout_is_threshold": "0.5_2.0",
                                         CORRECTION + "rollout_rs": "'token_k1,seq_max_k3'",
                                         CORRECTION + "rollout_rs_threshold": "'0.9_1.1,0.01'"})
        m = metrics(d)
        test("rollout correction: all weights are 1 and nothing is rejected", m["rollout_corr/rollout_is_min"] == 1 ==
             m["rollout_corr/rollout_is_max"] and m["rollout_corr/rollout_rs_masked_fraction"] == 0 and m["rollout_corr/kl"] == 0)
        test("so the update is the same bits", state(d, 1)["actor/model.safetensors"] == plain["actor/model.safetensors"])
        # a truncated sampler draws from more than the full softmax says: a weight is the mass that top-p leaves
        top_p = {"actor_rollout_ref.rollout.top_p": 0.7, CORRECTION + "rollout_is": "token"}
        m = metrics(step("grpo", "top-p", **top_p))
        test("rollout correction with top_p=0.7: weights from 0.7 to 1", 0.7 <= m["rollout_corr/rollout_is_min"] < 0.8 and
             m["rollout_corr/rollout_is_mean"] < m["rollout_corr/rollout_is_max"] < 1.00001 and m["rollout_corr/kl"] > 0.1,
             str({k: v for k, v in m.items() if "rollout_corr" in k}))
        test("its rollout and update agree on the full softmax", m["training/rollout_probs_diff_max"] == 0)
        m = metrics(step("grpo", "top-p in bypass", **top_p,
                         **{CORRECTION + "bypass_mode": True, ACTOR + "ppo_mini_batch_size": 4}))
        test("in bypass mode PPO's ratio begins at that weight", 0.1 < m["actor/ppo_kl"] < -math.log(0.7), str(m["actor/ppo_kl"]))
        fast = {"actor_rollout_ref.actor.ppo_epochs": 3, "actor_rollout_ref.actor.optim.lr": 3e-3}
        d = step("grpo", "bypass", **fast, **{CORRECTION + "bypass_mode": True, CORRECTION + "rollout_is": "token",
                                              CORRECTION + "loss_type": "reinforce", CORRECTION + "rollout_rs": "seq_mean_k1",
                                              CORRECTION + "rollout_rs_threshold": "0.99_1.01"})
        m = metrics(d)
        of_update = {k: v for k, v in m.items() if "rollout_corr" in k} # the loss's own, under verl's names for it
        test("bypass mode: the drift of the policy is weighted and rejected",
             m["actor/rollout_corr/rollout_rs_seq_masked_fraction"] > 0.1 and m["actor/rollout_corr/rollout_is_max"] > 1.001 and
             m["actor/rollout_corr/rollout_is_min"] < 1 and all(k.startswith("actor/") for k in of_update), str(of_update))

        # the loss of a mini-batch is one, however it is cut; geo_mean has a divisor of its own
        for loss in ("vanilla", "geo_mean", "gspo"):
            keys = {ACTOR + "policy_loss.loss_mode": loss, ACTOR + "loss_agg_mode": "seq-mean-token-mean"}
            cut = [metrics(step("grpo", f"{loss}-{n}", **keys, **{ACTOR + "ppo_micro_batch_size_per_gpu": n})) for n in (1, 4)]
            a, b = ([m[k] for k in ("actor/grad_norm", "actor/pg_loss")] for m in cut)
            test(f"{loss}: micro-batches change nothing", a[0] > 1e-4 and all(math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-7)
                                                                             for x, y in zip(a, b)), f"{a} and {b}")

        def refused(name, *words, **keys):
            test.refused(name, run(*s.ppo("refused", **{**base, **keys}), check=False), 2, *words)

        refused("gae without a critic's model", "critic.model.path", algorithm__adv_estimator="gae",
                critic__ppo_micro_batch_size_per_gpu=4)
        refused("an unknown estimator", "did you mean grpo?", algorithm__adv_estimator="grp0")
        refused("an unknown loss", "did you mean gspo?", actor_rollout_ref__actor__policy_loss__loss_mode="gsp0")
        refused("an unknown mode", "did you mean token-mean?", actor_rollout_ref__actor__loss_agg_mode="tokenmean")
        p = run(*s.ppo("said", **{**base, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 1,
                                  "critic.optim.lr": 1e-4, "algorithm.use_kl_in_reward": True, ACTOR + "use_kl_loss": True,
                                  ACTOR + "ppo_micro_batch_size_per_gpu": 2,
                                  "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4}))
        for words in ("rollout.n=1: algorithm.adv_estimator=grpo compares the samples of one prompt",
                      "the same penalty counts twice",
                      "critic.optim.lr: no effect, as algorithm.adv_estimator=grpo has no critic"):
            test(f"said: {words}", words in p.stderr, p.stderr[-1500:])
        refused("gae with critic.enable=False", "critic.enable=False", algorithm__adv_estimator="gae", critic__enable=False)
        refused("a warm-up without a critic", "trainer.critic_warmup=5", "grpo", trainer__critic_warmup=5)
        refused("gdpo without its rewards", "algorithm.gdpo_reward_keys", algorithm__adv_estimator="gdpo")
        refused("PF-PPO with grpo", "algorithm.use_pf_ppo", "grpo", algorithm__use_pf_ppo=True)
        refused("an unknown rejection", "rollout_rs", "seq_mean_k1", **{CORRECTION + "rollout_rs": "seq_k1"})
        p = run(*s.ppo("refused", **{**base, "algorithm.adv_estimator": "gdpo", "+algorithm.gdpo_reward_keys": "[a,c]"}),
                check=False)
        test.refused("gdpo with a reward that the scorer does not give", p, 3, '"c"')
    test.end()


main()
