"""Whole training steps beside verl's own trainers, on random mixes of features.

For each mix `verlc ppo` runs two steps on a tiny random model in fp32. Its samples (ids, rollout log-probs,
scores) are read back from run.db and go through verl 0.9.1's trainer in fp64 (oracle_verl_trainer.py), with
the same keys through verl's own YAML. Compared are each step's updates of actor and critic,
|dw - dw_verl| / |dw_verl|, and every metric by its name. A step of verl begins from verlc's weights, so that
differences do not add up; its optimizer's state is its own. SFT mixes likewise, with verl's dataset.

verl's values are demanded. What differs on purpose is in the tables DIFFERENT, ABSENT and OURS, in
named_differences and in Mix.batches, each with its reason.

  oracle_steps.py VERLC [--mixes N] [--sft N] [--seed S] [--only NAME,...] [--keep DIR]

--keep DIR leaves the runs there. A mix that fails runs alone with --only (17, sft2) and the same --seed.
"""
import argparse
import fnmatch
import json
import os
import pathlib
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle_verl_trainer as verl_trainer
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from oracle_verl_trainer import quiet
from safetensors.torch import load_file

STEPS = 2
UPDATE_TOL = 5e-3  # of an update's norm: fp32's own noise, which Adam's division spreads over small gradients
METRIC_TOL = 1e-3  # relative
# absolute, for what is 0 but for rounding: sums over a response, over a batch (token-sum), means
FLOOR = {"*rollout_corr/*": 1e-4, "actor/pg_loss": 5e-5, "*": 5e-6}

DIFFERENT = {  # the name is demanded, its value is not verl's
    "*perf/*": "seconds, memory and FLOPS of a machine",
    "timing_*": "as perf/*",
    "*_length*/clip_ratio": "clip-ratio-by-limit: V1 counts those as long as the longest",
}
MEANS = {  # update-micro-batches: means over micro-batches, which are other ones here
    n: "of other micro-batches"
    for n in ("actor/pg_clipfrac*", "actor/ppo_kl", "actor/rollout_corr/*", "actor/distillation/abs_loss",
              "actor/distillation/ppo_kl", "actor/distillation/overlap_*", "actor/distillation/*_mass",
              "critic/vf_clipfrac", "critic/vpred_mean")
}
ABSENT = {  # verl's, not demanded
    "critic/perf/*": "perf/*, one device",
    "training/num_turns/*": "num_turns/* again",
    "training/off_policy/*": "a synchronous trainer has none: spans 1, staleness 0",
    "actor/loss": "pg_loss, entropy_loss and kl_loss",
    "critic/loss": "vf_loss again",
    "train/mfu": "SFT has the losses, norms, rates and tokens of verl, not its figures of the machine",
    "actor/entropy": "entropy-from-update: demanded in Mix.replay where nothing has moved the policy before",
}
OURS = [
    "actor/skipped_steps", "critic/skipped_steps", "*/no_valid_tokens", "reward/*", "rollout/*", "data/*",
    "*perf/*", "timing_*", "training/*", "val-*", "val/*", "global_seqlen/*", "response/*", "train/*",
    "actor/entropy"
]


def named_differences():
    """Changes of verl where docs/differences.md says that verlc does otherwise."""
    import verl.workers.utils.losses as losses
    from verl.utils.metric import AggregationType, Metric

    class Extremes(Metric):  # bypass-extremes: verl takes the mean of the micro-batches' maxima
        @classmethod
        def from_dict(cls, data, aggregation):
            kinds = {"max": AggregationType.MAX, "min": AggregationType.MIN}
            of = lambda name: next((kinds[k] for k in kinds if k in name), aggregation)  # noqa: E731
            return {k: Metric(of(k), v) for k, v in data.items()}

    losses.Metric = Extremes


def matches(name, patterns):
    return next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
REF, CORRECTION = "actor_rollout_ref.ref.", "algorithm.rollout_correction."
LOSS, TEACHER = "distillation.distillation_loss.", "distillation.teacher_models.teacher_model."
ARCHS = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "tie_word_embeddings": False, "sliding_window": None}
}
SHAPE = {  # tiny, and with weights wide enough that the tokens' probabilities differ
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512, "max_position_embeddings": 512, "rope_theta":
    10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.2, "torch_dtype": "float32"
}
REWARD = '''
import hashlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    h = hashlib.sha256(solution_str.encode()).digest()
    return {"score": h[0] / 64, "a": h[1] / 100, "b": h[2] % 2 == 1}
'''
ESTIMATORS = [
    "grpo", "gae", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo",
    "grpo_passk", "gpg", "grpo_vectorized", "rloo_vectorized", "gdpo"
]
LOSSES = [
    "vanilla", "bypass", "gspo", "sapo", "geo_mean", "cispo", "clip_cov", "kl_cov", "gpg", "dppo_tv",
    "dppo_kl", "dro", "vanilla"
]
CUT_THRESHOLDS = {  # log-ratios are the logarithm of the mass that top-p and top-k leave
    "token_k1": ["'0.9_1.1'", "'0.95_1.5'"], "seq_sum_k1": ["'0.3_1.1'", "'0.6_2'"], "seq_mean_k3": [0.003, 0.01],
    "seq_max_k2": [0.01, 0.02]
}
WHITEN = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
KL_TYPES = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "low_var_kl+", "k3+", "k1+", "kl+", "abs+"]
AGG = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]


class Run:
    """A run of the program with these keys, in its directory."""
    def __init__(self, name, seed, scratch):
        self.name, self.dir, self.r = name, scratch / name, random.Random(f"{seed} {name}")
        self.arch = self.r.choice(list(ARCHS))
        self.different = {}  # more of DIFFERENT, of a step
        self.keys, self.fixed = {}, {
            "trainer.default_local_dir": self.dir, "trainer.logger": "[file]", "trainer.save_freq": 1,
            "trainer.test_freq": 1
        }

    def optimizer(self, prefix, *rates):
        r, k = self.r, self.keys
        k[prefix + "lr"], k[prefix + "weight_decay"] = r.choice(rates), r.choice([0.0, 0.01, 0.1])
        k[prefix + "betas"] = r.choice(["[0.9,0.999]", "[0.9,0.95]", "[0.8,0.9]"])
        k[prefix + "clip_grad"] = r.choice([0.05, 1.0, 10.0])
        k[prefix + "lr_warmup_steps_ratio"] = r.choice([0.0, 0.0, 0.5])
        k[prefix + "lr_scheduler_type"] = r.choice(["constant", "cosine"])
        if k[prefix + "lr_scheduler_type"] == "cosine":
            k[prefix + "min_lr_ratio"] = r.choice([0.0, 0.1])

    def run(self, verlc):
        shutil.rmtree(self.dir, ignore_errors=True)
        args = [verlc, self.command] + [f"{k}={v}" for k, v in {**self.fixed, **self.keys}.items()]
        p = subprocess.run([str(a) for a in args], capture_output=True, text=True,
                           env={**os.environ, "VERLC_THREADS": "1"})
        self.error = f"exit {p.returncode}: {p.stderr.strip().splitlines()[-1:]}" if p.returncode else ""
        return self

    def judge(self):
        """(distances, lines of what differs) of the whole run."""
        try:
            if "whitened over the batch" in self.error:  # no token is left: verl's masked_var raises too
                return [0.0], []
            return ([], [self.error]) if self.error else self.replay()
        except Exception:  # of verl on this mix: one line of it, and where
            return [], traceback.format_exc().splitlines()[-3:]

    def metrics(self, step):
        lines = map(json.loads, (self.dir / "metrics.jsonl").read_text().splitlines())
        of_step = {k: v for d in lines if d["step"] == step for k, v in d["data"].items()}
        return {k: np.nan if v is None else v for k, v in of_step.items()}

    def weights(self, step):
        """{part: {name: tensor in float64}} after a step, 0: before the first."""
        out = {}
        for part, path in self.models().items():
            w = load_file((self.dir / f"global_step_{step}" / part if step else path) / "model.safetensors")
            out[part] = {n: t.double() for n, t in w.items()}
        return out

    def compare(self, step, theirs, dw):
        """(distances of the updates, lines of what differs)."""
        before, after, distances, bad = self.weights(step - 1), self.weights(step), [], []
        for part, update in dw.items():
            ours = {n: after[part][n] - before[part][n] for n in update}
            off, size = (sum((x**2).sum() for x in xs)
                         for xs in ([ours[n] - update[n] for n in update], update.values()))
            distances.append(float((off / size)**0.5) if off > 0 else 0.0)
            if not distances[-1] < UPDATE_TOL:
                bad.append(f"step {step} {part}: the update is {distances[-1]:.2e} of verl's away from it")
        return distances, bad + [
            f"step {step} {line}" for line in compare_metrics(self.metrics(step), theirs, DIFFERENT | self.different)
        ]

    def __str__(self):
        short = {
            k.replace("actor_rollout_ref.", "").replace("algorithm.", ""): v
            for k, v in self.keys.items()
        }
        return f"{self.name}: " + " ".join(f"{k}={v.name if isinstance(v, pathlib.Path) else v}"
                                           for k, v in short.items())


class Mix(Run):
    """One random configuration of PPO."""

    command = "ppo"

    def __init__(self, number, seed, scratch):
        super().__init__(str(number), seed, scratch)
        r, k = self.r, self.keys
        self.estimator, self.loss = ESTIMATORS[number % len(ESTIMATORS)], LOSSES[number % len(LOSSES)]
        self.distill = number % 7 == 5
        prompts, n = r.choice([4, 6]), r.choice([2, 3, 4])
        mini = prompts // r.choice([c for c in (1, 2, 3) if prompts % c == 0])
        self.one_mini_batch, self.micro_batches = mini == prompts, False
        k["algorithm.adv_estimator"], k[MODEL + "path"] = self.estimator, scratch / self.arch
        k["data.train_batch_size"], k[ROLLOUT + "n"], k[ACTOR + "ppo_mini_batch_size"] = prompts, n, mini
        k[ACTOR + "ppo_epochs"] = r.choice([1, 1, 2])
        k[ROLLOUT + "temperature"] = 1.0 if self.distill else r.choice([1.0, 0.7, 1.3])
        self.policy_loss()
        self.batches(ACTOR, mini * n)
        self.rewards()
        if self.estimator == "gae":
            self.critic(mini, mini * n)
        self.optimizer(ACTOR + "optim.", 3e-4, 1e-3, 3e-3)
        if self.distill:
            self.distillation()
        weighs, rejects = k.get(CORRECTION + "rollout_is", "null") != "null", CORRECTION + "rollout_rs" in k
        self.truncated = (weighs or rejects) and r.random() < (0.8 if rejects else 0.5)
        self.truncated &= not (self.distill and rejects)  # verl raises at a micro-batch without a token
        if self.truncated and rejects and self.estimator in WHITEN:  # both end where no token is left
            k[CORRECTION + "rollout_rs"], k[CORRECTION + "rollout_rs_threshold"] = "token_k1", r.choice(
                ["'0.4_2'", "'0.4_4'"])
        elif self.truncated and rejects:  # of a sampler's cut: those of correction() would reject every token
            k[CORRECTION + "rollout_rs_threshold"] = r.choice(CUT_THRESHOLDS[k[CORRECTION + "rollout_rs"]])
        if self.truncated:
            k[ROLLOUT + "top_p"], k[ROLLOUT + "top_k"] = r.choice([0.8, 0.95, 1.0]), r.choice([20, 100])
        rows = scratch / f"rows{prompts}.jsonl"
        self.fixed.update({
            "data.train_files": rows, "data.val_files": rows, "data.max_prompt_length": 64,
            "data.max_response_length": 12, "data.shuffle": False, "reward.custom_reward_function.path":
            scratch / "score.py", "reward.num_workers": 1, "trainer.total_training_steps": STEPS,
            "trainer.val_before_train": self.estimator == "remax", "trainer.n_gpus_per_node": 1,
            "trainer.nnodes": 1, ACTOR + "fsdp_config.dtype": "float32", ROLLOUT + "name": "verlc"
        })

    def batches(self, prefix, sequences):
        """Fixed micro-batches, or as many as a token budget needs; the passes without gradient are cut alike.

        geo_mean gets one (geo-mean-once): verl sums the means of micro-batches, so that its update grows with
        their number. clip_cov gets one: its covariances are about the means of one call. kl_cov gets one: within
        a sequence of one advantage all covariances are equal (kl-cov-ties).
        Where |log-ratio| is differentiated, which is 0 in the first update, verl's passes must have the same
        micro-batches: else its rounding chooses the sign."""
        r, k = self.r, self.keys
        sizes = [s for s in range(1, sequences + 1) if sequences % s == 0]
        cut = r.random() < 0.5, r.choice([96, 160, 4096]), r.choice(sizes)
        if self.loss in ("geo_mean", "kl_cov", "clip_cov"):
            cut = False, 4096, sequences
        elif k.get(ACTOR + "kl_loss_type") == "abs":
            cut = False, *cut[1:]
        self.micro_batches |= cut[0] or cut[2] < sequences
        names = [(prefix, "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")]
        if prefix == ACTOR:
            names += [(p + "log_prob_", "use_dynamic_bsz", "max_token_len_per_gpu",
                       "micro_batch_size_per_gpu") for p in (ROLLOUT, REF)]
        for p, *keys in names:
            k.update({p + key: v for key, v in zip(keys, cut)})

    def policy_loss(self):
        r, k, p = self.r, self.keys, ACTOR + "policy_loss."
        k[ACTOR + "loss_agg_mode"] = r.choice(AGG)
        if k[ACTOR + "loss_agg_mode"] == "seq-mean-token-sum-norm":
            k[ACTOR + "loss_scale_factor"] = r.choice([7, 12])
        k[ACTOR + "clip_ratio_low"], k[ACTOR + "clip_ratio_high"] = r.choice([0.2, 0.05, 0.002
                                                                              ]), r.choice([0.2, 0.28, 0.003])
        k[ACTOR + "clip_ratio_c"] = r.choice([3.0, 1.05])
        k[ACTOR + "entropy_coeff"], k[ACTOR + "calculate_entropy"] = r.choice([0, 0, 0.01,
                                                                               -0.02]), r.random() < 0.3
        k[ROLLOUT + "calculate_log_probs"] = self.loss == "bypass" or r.random() < 0.6
        if self.loss != "bypass":
            k[p + "loss_mode"] = self.loss
        if self.loss == "sapo":
            k[ACTOR + "tau_pos"], k[ACTOR + "tau_neg"] = r.choice([1.0, 1.5]), r.choice([1.05, 2.0])
        elif self.loss == "clip_cov":  # the share of all tokens: no draw
            k[p + "clip_cov_ratio"], k[p + "clip_cov_lb"], k[p + "clip_cov_ub"] = 1.0, r.choice([0.01,
                                                                                                 0.2]), 5.0
        elif self.loss == "kl_cov":
            k[p + "kl_cov_ratio"], k[p + "ppo_kl_coef"] = r.choice([0.05, 0.2]), r.choice([0.1, 1.0])
        elif self.loss == "dro":
            k[p + "dro_beta"] = r.choice([0.1, 1.0])
        if self.loss == "bypass" or k[ROLLOUT + "calculate_log_probs"] and r.random() < 0.6:
            self.correction()
        elif not k[ROLLOUT + "calculate_log_probs"] and r.random() < 0.4:
            k[ROLLOUT + "top_p"], k[ROLLOUT + "top_k"] = r.choice([0.9, 1.0]), r.choice([20, 100])
        k[ACTOR + "use_kl_loss"] = r.random() < 0.5
        if k[ACTOR + "use_kl_loss"]:
            k[ACTOR + "kl_loss_type"], k[ACTOR + "kl_loss_coef"] = r.choice(KL_TYPES), r.choice([0.001, 0.2])

    def correction(self):
        r, k = self.r, self.keys
        if self.loss == "bypass":
            k[CORRECTION + "bypass_mode"], k[CORRECTION + "loss_type"] = True, r.choice(
                ["ppo_clip", "reinforce"])
        k[CORRECTION + "rollout_is"] = r.choice(["token", "sequence", "null"])
        k[CORRECTION + "rollout_is_threshold"] = r.choice([2.0, 1.01])
        if r.random() < 0.5:
            k[CORRECTION + "rollout_rs"] = rs = r.choice(
                ["token_k1", "seq_sum_k1", "seq_mean_k3", "seq_max_k2"])
            k[CORRECTION + "rollout_rs_threshold"] = "'0.9_1.1'" if rs.endswith("k1") else 0.01

    def rewards(self):
        r, k = self.r, self.keys
        if r.random() < 0.4:
            k["algorithm.use_kl_in_reward"], k["algorithm.kl_penalty"] = True, r.choice(KL_TYPES[:7])
            k["algorithm.kl_ctrl.type"], k["algorithm.kl_ctrl.kl_coef"] = r.choice(["fixed", "adaptive"
                                                                                    ]), r.choice([0.01, 0.3])
            k["algorithm.kl_ctrl.horizon"], k["algorithm.kl_ctrl.target_kl"] = 100, 0.05
        if self.estimator in ("gae", "reinforce_plus_plus"):
            k["algorithm.gamma"] = r.choice([1.0, 0.9])
        if self.estimator == "grpo":
            k["algorithm.norm_adv_by_std_in_grpo"] = r.random() < 0.6
        if self.estimator == "gdpo":
            k["+algorithm.gdpo_reward_keys"] = "[a,b]"
            if r.random() < 0.5:
                k["+algorithm.gdpo_reward_weights"] = "[1.0,0.5]"

    def critic(self, mini, sequences):
        r, k = self.r, self.keys
        k["algorithm.lam"], k["critic.cliprange_value"] = r.choice([1.0, 0.9]), r.choice([0.5, 0.1])
        k["critic.model.path"] = k[MODEL + "path"].parent / f"critic_{self.arch}"
        k["critic.ppo_mini_batch_size"], k["critic.ppo_epochs"] = mini, r.choice([1, 2])
        k["trainer.critic_warmup"] = r.choice([0, 0, 2])
        self.batches("critic.", sequences)
        self.optimizer("critic.optim.", 1e-3, 3e-3)

    def distillation(self):
        r, k = self.r, self.keys
        k["distillation.enabled"], k[TEACHER +
                                     "model_path"] = True, k[MODEL + "path"].parent / f"teacher_{self.arch}"
        k[LOSS + "loss_mode"] = mode = r.choice(
            ["k1", "k3", "k2", "abs", "forward_kl_topk", "forward_kl_topk"])
        k[LOSS + "use_policy_gradient"], k[LOSS + "use_task_rewards"] = mode == "k1", r.random() < 0.6
        k[LOSS + "topk"], k[LOSS + "loss_max_clamp"] = r.choice([4, 16]), r.choice(["null", 1.0])
        self.topk = k[LOSS + "topk"] if mode == "forward_kl_topk" else 1
        if mode == "k1" and CORRECTION + "rollout_is" in k:  # verl fails: its weights are jagged there
            k[CORRECTION + "rollout_is"] = "null"

    def for_verl(self):
        k = {
            **self.fixed, **self.keys, ROLLOUT + "name": "vllm", "trainer.device": "cpu",
            ACTOR + "calculate_entropy": True, ACTOR + "fsdp_config.use_torch_compile": False
        }
        for model in (MODEL, "critic.model."):
            k[model + "use_remove_padding"] = k[model + "enable_gradient_checkpointing"] = False
            k[f"+{model}override_config.attn_implementation"] = "sdpa"
        k.setdefault("critic.model.path", k[MODEL + "path"])
        if self.loss == "bypass":  # verl 0.9.1's trainers do not tell their workers
            k[ACTOR + "policy_loss.loss_mode"] = "bypass_mode"
            k.update({
                f"+{ACTOR}policy_loss.rollout_correction." + n.removeprefix(CORRECTION): v
                for n, v in self.keys.items() if n.startswith(CORRECTION) and not n.endswith("bypass_mode")
            })
        if self.distill:
            k["distillation.nnodes"] = k["distillation.n_gpus_per_node"] = k[TEACHER + "num_replicas"] = 1
            k[TEACHER + "inference.tensor_model_parallel_size"] = 1
        return k

    def models(self):
        paths = {"actor": self.keys[MODEL + "path"], "critic": self.keys.get("critic.model.path")}
        return {part: path for part, path in paths.items() if path}

    def samples(self, step, teacher):
        db = sqlite3.connect(self.dir / "run.db")
        db.row_factory = sqlite3.Row
        rows = [
            dict(r)
            for r in db.execute("SELECT * FROM samples WHERE validation = 0 AND step = ? ORDER BY id", (
                step, ))
        ]
        greedy = dict(
            map(tuple,
                db.execute("SELECT uid, score FROM samples WHERE validation = 1 AND step = ?", (step - 1, ))))
        for s in rows:
            s["prompt_ids"], s["ids"] = (np.frombuffer(s[c], np.int32).astype(np.int64)
                                         for c in ("prompt_ids", "ids"))
            s["logp"] = np.frombuffer(s["logp"], np.float32).astype(np.float64)
            s["extra"], s["baseline"] = json.loads(s["extra"] or "{}"), greedy.get(s["uid"], np.nan)
            s["teacher"] = teacher(s) if teacher else {}
        if self.truncated:
            sampled = self.sampled(step)
            for s in rows:
                s["logp"] = sampled(s)
        return rows

    def sampled(self, step):
        """Log-probs as vLLM's sampler gives them to verl: over what temperature, top-k and top-p leave."""
        from transformers import AutoModelForCausalLM

        path = self.dir / f"global_step_{step - 1}/actor" if step > 1 else self.keys[MODEL + "path"]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        top_k, top_p = self.keys[ROLLOUT + "top_k"], self.keys[ROLLOUT + "top_p"]

        def of(s):
            ids = torch.tensor(np.concatenate([s["prompt_ids"], s["ids"]]))
            with torch.no_grad():
                z = model(input_ids=ids[None]).logits[0, len(s["prompt_ids"]) - 1:-1]
            z, token = (z / self.keys[ROLLOUT + "temperature"]).sort(-1, descending=True)
            z[:, top_k:] = -torch.inf
            p = z.softmax(-1)
            z[p.cumsum(-1) - p >= top_p] = -torch.inf
            at = (token == torch.tensor(s["ids"])[:, None]).nonzero()[:, 1:]
            return z.double().log_softmax(-1).gather(-1, at)[:, 0].numpy()

        return of

    def teacher(self):
        """The teacher's log-probs as verl's manager returns them: of the next token, or the topk largest."""
        from transformers import AutoModelForCausalLM

        path = self.keys[TEACHER + "model_path"]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32,
                                                     attn_implementation="sdpa").double()

        def of(s):
            ids = torch.tensor(np.concatenate([s["prompt_ids"], s["ids"]]))
            with torch.no_grad():
                logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            chosen = ids.roll(-1)[:, None] if self.topk == 1 else logp.topk(self.topk, -1).indices
            return {"teacher_ids": chosen, "teacher_logprobs": logp.gather(-1, chosen)}

        return of

    def replay(self):
        distances, bad = [], []
        with quiet():
            trainer, teacher = verl_trainer.Trainer(self), self.teacher() if self.distill else None
        for step in range(1, STEPS + 1):
            with quiet():
                theirs, dw = trainer.step(self.samples(step, teacher), self.weights(step - 1))
            if self.truncated:  # probs-diff-full
                for name in [n for n in theirs if n.startswith("training/rollout_")]:
                    theirs.pop(name)
            entropy, warmup = theirs.get("actor/entropy"), "actor/grad_norm" not in theirs
            self.different = MEANS if self.micro_batches else {}
            if np.isnan(theirs.get("actor/grad_norm", 0)):
                self.different |= {"actor/grad_norm": "no-valid-token"}
                dw.pop("actor")  # verl skips the step
            if warmup:  # critic_warmup: what comes from the update's own pass
                theirs = {n: v for n, v in theirs.items() if not n.startswith("training/rollout_")}
            if not self.keys[ACTOR + "calculate_entropy"] and not self.keys[ACTOR + "entropy_coeff"]:
                theirs.pop("actor/entropy_loss", None)  # for_verl asks for it
            more = self.compare(step, theirs, dw)
            distances, bad = distances + more[0], bad + more[1]
            ours = self.metrics(step).get("actor/entropy", np.nan)
            if entropy is not None and not warmup and self.one_mini_batch and differ("actor/entropy", ours, entropy):
                bad.append(f"step {step} actor/entropy: {ours:.9g}, verl {entropy:.9g}")
        return distances, bad

    def title(self):
        return f"{self.estimator}, {self.loss}{', distillation' if self.distill else ''}, {self.arch}"


class Sft(Run):
    """One random configuration of SFT. A batch is the whole data: the sampler's order does not matter."""

    command = "sft"

    def __init__(self, number, seed, scratch):
        super().__init__(f"sft{number}", seed, scratch)
        r, k = self.r, self.keys
        k["model.path"], self.steps = scratch / self.arch, 3
        k["data.use_dynamic_bsz"], k["data.max_token_len_per_gpu"] = r.random() < 0.5, r.choice([160, 4096])
        k["data.micro_batch_size_per_gpu"] = r.choice([1, 2, 4, 8])
        k["data.max_length"], k["data.truncation"] = r.choice([(512, "error"), (40, "right")])
        self.optimizer("optim.", 3e-4, 1e-3, 3e-3)
        self.fixed.update({
            "data.train_files": scratch / "chats.parquet", "data.val_files": scratch / "chats.parquet",
            "data.train_batch_size": 8, "data.num_workers": 0, "engine.dtype": "float32",
            "trainer.total_epochs": self.steps, "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1
        })

    def models(self):
        return {"actor": self.keys["model.path"]}

    def replay(self):
        log, distances, bad = {}, [], []

        def note(metrics, step, weights):
            log.setdefault(step, ({}, weights))[0].update(metrics)

        with quiet():
            verl_trainer.sft_steps({
                **self.fixed, **self.keys, "trainer.device": "cpu", "model.use_remove_padding": False,
                "model.enable_gradient_checkpointing": False, "engine.use_torch_compile": False,
                "+model.override_config.attn_implementation": "sdpa"
            }, note)
        before = self.weights(0)["actor"]
        for step in range(1, self.steps + 1):
            metrics, after = log[step]
            metrics = {k: v for k, v in metrics.items() if not k.startswith("perf/")}  # as train/mfu
            more = self.compare(step, metrics, {"actor": {n: after[n] - before[n] for n in after}})
            distances, bad, before = distances + more[0], bad + more[1], after
        return distances, bad

    def title(self):
        return f"SFT, {self.arch}"


def differ(name, ours, theirs):
    if not np.isfinite(ours) or not np.isfinite(theirs):
        return np.isnan(ours) != np.isnan(theirs)
    return abs(ours - theirs) > METRIC_TOL * abs(theirs) + FLOOR[matches(name, FLOOR)]


def compare_metrics(ours, theirs, different):
    """Lines, one for each metric that does not agree."""
    bad = []
    for name, v in sorted(theirs.items()):
        if name not in ours:
            if not matches(name, ABSENT):
                bad.append(f"{name}: absent, verl {float(v):.9g}")
        elif name not in ABSENT and not matches(name, different) and differ(name, float(ours[name]),
                                                                            float(v)):
            bad.append(f"{name}: {ours[name]:.9g}, verl {float(v):.9g}")
    return bad + [
        f"{n}: {v:.9g}, verl has none"
        for n, v in sorted(ours.items()) if n not in theirs and not matches(n, OURS)
    ]


def prepare(verlc, scratch):
    """Models of every architecture with the tiny preset's tokenizer, critics, teachers, data, reward."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    def init(out, *args):
        cmd = [verlc, "model", "init", "--out", scratch / out, "--force", *map(str, args)]
        subprocess.run(cmd, check=True, capture_output=True)

    init("tiny", "--preset", "tiny")
    tiny = json.loads((scratch / "tiny/config.json").read_text())
    special = {n: tiny.get(n) for n in ("eos_token_id", "bos_token_id", "pad_token_id")}
    for i, (arch, keys) in enumerate(ARCHS.items()):
        shape = scratch / f"{arch}.json"
        shape.write_text(json.dumps({**SHAPE, "model_type": arch, **keys, **special}))
        for name, seed in ((arch, i), (f"teacher_{arch}", 10 + i)):
            init(name, "--arch", shape, "--tokenizer", scratch / "tiny", "--seed", seed)
        config = AutoConfig.from_pretrained(scratch / arch, num_labels=1, classifier_dropout=0.0)
        critic = AutoModelForTokenClassification.from_pretrained(scratch / arch, config=config,
                                                                 dtype=torch.float32)
        torch.manual_seed(20 + i)
        critic.score.weight.data.normal_(0, 0.3)
        critic.save_pretrained(scratch / f"critic_{arch}")
        for f in (scratch / "tiny").glob("tokenizer*"):
            shutil.copy(f, scratch / f"critic_{arch}")
    ask = lambda i: {"role": "user", "content": f"What is {i % 7} + {i}{i % 5 * '?'}"}  # noqa: E731
    for prompts in (4, 6):
        rows = [{
            "data_source": "sums", "prompt": [ask(i)], "ability": "math", "extra_info": {"index": i},
            "reward_model": {"style": "rule", "ground_truth": str(i)}
        } for i in range(prompts * STEPS)]
        (scratch / f"rows{prompts}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    answer = lambda i: {"role": "assistant", "content": f"{i % 7 + i}" + " so it is." * (i % 3)}  # noqa: E731
    chats = [[ask(i), answer(i)] + ([ask(i + 1), answer(i + 1)] if i % 3 == 0 else []) for i in range(8)]
    pq.write_table(pa.Table.from_pylist([{"messages": c} for c in chats]), scratch / "chats.parquet")
    (scratch / "score.py").write_text(REWARD)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("verlc", type=pathlib.Path)
    a.add_argument("--mixes", type=int, default=12)
    a.add_argument("--sft", type=int, default=3)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--only", help="names of mixes, with commas")
    a.add_argument("--keep", type=pathlib.Path, help="leave the runs there")
    args = a.parse_args()
    scratch = (args.keep or pathlib.Path(tempfile.mkdtemp(prefix="oracle-steps-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    verlc = args.verlc.resolve()
    runs = [Mix(i, args.seed, scratch)
            for i in range(args.mixes)] + [Sft(i, args.seed, scratch) for i in range(args.sft)]
    runs = [m for m in runs if not args.only or m.name in args.only.split(",")]
    torch.set_num_threads(1)
    with quiet():
        verl_trainer.stand_in()
        prepare(verlc, scratch)
        named_differences()
        verl_trainer.widen(ARCHS)
    failed, all_distances = 0, []
    with ThreadPoolExecutor(1) as pool:  # the program runs the next mix while verl replays this one
        for m in pool.map(lambda m: m.run(verlc), runs):
            distances, bad = m.judge()
            all_distances += distances
            failed += bool(bad)
            if bad:
                print(f"DIFFERS {m}", *bad, sep="\n    ", flush=True)
            else:
                print(f"ok {m.name}: {m.title()}: updates within {max(distances, default=0):.1e}", flush=True)
    if not args.keep:
        shutil.rmtree(scratch)
    print(f"{len(runs)} mixes, {len(all_distances)} updates through verl's trainers, {failed} mixes differ; "
          f"updates: median {np.median(all_distances):.1e}, largest {max(all_distances, default=0):.1e}")
    return failed > 0 or not all_distances


if __name__ == "__main__":
    sys.exit(main())
