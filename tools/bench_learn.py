"""make bench-learn: every algorithm learns the same small task on the CPU, from the same start.

A model of 620 thousand parameters reads arithmetic word problems. Supervised training, one run a seed, leaves it
writing the answer line that the reward asks for in less than four of ten answers. Then each algorithm goes on from
there: 8 problems x 8 answers a step, two updates, one learning rate, until the reward of one sampled answer to each of
200 held-out problems has reached STOP (trainer.early_stopping). The table is the first validation at BAR.

  python tools/bench_learn.py [ALGORITHM...]

Environment: LEARN_DIR (build/bench-learn), LEARN_SEEDS ("1 2 3"), LEARN_JOBS (runs side by side, one thread each: 2), VERLC.
Writes LEARN_DIR/table.md and, where matplotlib is there, LEARN_DIR/learning.png; with every algorithm also docs/learning.md
(the part between its markers) and docs/learning.png. Started again it goes on: a run that has ended is not made again.
Exit status 1: a run has not reached the bar.

Seconds are processor seconds of the run's one thread, so that other work on the machine does not count; start-up,
validations and checkpoints do."""

import concurrent.futures
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERLC = os.environ.get("VERLC", ROOT / "build/release/verlc")
OUT = pathlib.Path(os.environ.get("LEARN_DIR", ROOT / "build/bench-learn")).resolve()
SEEDS = [int(s) for s in os.environ.get("LEARN_SEEDS", "1 2 3").split()]
JOBS = int(os.environ.get("LEARN_JOBS", "2"))
BAR, STOP, MAX_STEPS, SFT_STEPS = 0.8, 0.85, 200, 1500
METRIC = "val-core/openai/gsm8k/acc/mean@1"

SHAPE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 128, "intermediate_size": 352,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
         "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 457, "bos_token_id": None, "torch_dtype": "float32"}

# The same with 8 experts of half the width, 2 a token: a token meets as many weights as above.
EXPERTS = SHAPE | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 8,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 176, "norm_topk_prob": True}
BALANCE = {"override_config.output_router_logits": True, "override_config.router_aux_loss_coef": 0.01}

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
COMMON = {
    "data.train_batch_size": 8, "data.max_prompt_length": 128, "data.max_response_length": 48,
    ACTOR + "fsdp_config.dtype": "float32", ROLLOUT + "dtype": "float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False, ACTOR + "optim.lr": 2e-4, ACTOR + "ppo_mini_batch_size": 4,
    ACTOR + "use_dynamic_bsz": True, ACTOR + "ppo_max_token_len_per_gpu": 4096, ROLLOUT + "name": "verlc", ROLLOUT + "n": 8,
    ROLLOUT + "val_kwargs.temperature": 1.0, ROLLOUT + "val_kwargs.do_sample": True,
    "trainer.total_training_steps": MAX_STEPS, "trainer.val_before_train": True, "trainer.test_freq": 2, "trainer.save_freq": 20,
    "trainer.max_actor_ckpt_to_keep": 1, "trainer.n_gpus_per_node": 1, "trainer.device": "cpu", "trainer.logger": "[file]",
    "trainer.early_stopping.enable": True, "trainer.early_stopping.metric": METRIC,
    "trainer.early_stopping.stopping_threshold": STOP, "trainer.early_stopping.patience": 30,
}
# What each algorithm is: its own keys and no more.
KL_LOSS = {ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_coef": 0.001}
KL_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.001}
ALGORITHMS = {
    "PPO": {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3, "critic.ppo_max_token_len_per_gpu": 4096, **KL_REWARD},
    "GRPO": {"algorithm.adv_estimator": "grpo", **KL_LOSS},
    "RLOO": {"algorithm.adv_estimator": "rloo", **KL_REWARD},
    "REINFORCE++": {"algorithm.adv_estimator": "reinforce_plus_plus", **KL_REWARD},
    "ReMax": {"algorithm.adv_estimator": "remax", **KL_REWARD},
    "DAPO": {"algorithm.adv_estimator": "grpo",
             "algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10,
             ACTOR + "clip_ratio_low": 0.2, ACTOR + "clip_ratio_high": 0.28, ACTOR + "loss_agg_mode": "token-mean",
             "reward.reward_manager.name": "dapo", "+reward.reward_kwargs.max_resp_len": 48,
             "+reward.reward_kwargs.overlong_buffer_cfg.enable": True, "+reward.reward_kwargs.overlong_buffer_cfg.len": 16,
             "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0},
    "GSPO": {"algorithm.adv_estimator": "grpo",
             ACTOR + "policy_loss.loss_mode": "gspo", ACTOR + "loss_agg_mode": "seq-mean-token-mean",
             ACTOR + "clip_ratio_low": 3e-4, ACTOR + "clip_ratio_high": 4e-4},
    "LoRA-GRPO": {"algorithm.adv_estimator": "grpo", **KL_LOSS, ACTOR + "optim.lr": 1e-3, "actor_rollout_ref.model.lora_rank": 16,
                  "actor_rollout_ref.model.lora_alpha": 32, "actor_rollout_ref.model.target_modules": "all-linear"},
    "MoE-GRPO": {"algorithm.adv_estimator": "grpo", **KL_LOSS, "trainer.early_stopping.stopping_threshold": 0.9,
                 **{f"actor_rollout_ref.model.{k}": v for k, v in BALANCE.items()}},
}


def shape_of(algorithm):
    return "experts" if algorithm.startswith("MoE") else "dense"


children, stopping, printing = set(), threading.Event(), threading.Lock()


def say(line):
    with printing:
        print(line, flush=True)


def stop(*_):
    """A signal ends every run; each saves its state."""
    stopping.set()
    for p in list(children):
        p.terminate()


def values(keys):
    def text(v):
        return str(v) if isinstance(v, (str, bool)) or v is None else f"{v:g}" if isinstance(v, float) else str(v)
    return [f"{k}={text(v)}" for k, v in keys.items()]


def processor_seconds(pid):
    """Of a process that has not been waited for; its helpers are other processes and not counted."""
    try:
        f = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(f[11]) + int(f[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def records(path):
    """The whole lines of a JSONL file that another process may be writing."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def verlc(args, name, watch=None):
    """Runs the program with one thread, its output in OUT/logs/NAME.log; False after a signal to this program."""
    (OUT / "logs").mkdir(parents=True, exist_ok=True)
    if stopping.is_set():
        return False
    with open(OUT / "logs" / f"{name}.log", "a") as log:
        p = subprocess.Popen([VERLC, *map(str, args)], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                             env={**os.environ, "VERLC_THREADS": "1"})
        children.add(p)
        while p.poll() is None:
            time.sleep(0.1)
            if watch:
                watch(p.pid)
        children.discard(p)
    if p.returncode != 0 and not stopping.is_set():
        sys.exit(f"{name}: exit status {p.returncode}; {OUT}/logs/{name}.log says why")
    return p.returncode == 0


def start_dir(seed, shape):
    return OUT / (f"start{seed}" if shape == "dense" else f"start{seed}-{shape}")


def start_model(seed, shape):
    """The data and the model that every algorithm of this seed and shape starts from; None after a signal."""
    d = start_dir(seed, shape)
    model = d / f"sft/global_step_{SFT_STEPS}/actor"
    if (d / "sft/latest_checkpointed_iteration.txt").exists() and model.exists():
        return model
    d.mkdir(parents=True, exist_ok=True)
    (d / "shape.json").write_text(json.dumps(EXPERTS if shape == "experts" else SHAPE))
    sft = {
        "model.path": d / "model", "engine.dtype": "float32", "model.enable_gradient_checkpointing": False,
        "data.train_files": d / "data/sft_train.jsonl", "data.val_files": d / "data/sft_test.jsonl",
        "data.train_batch_size": 16, "data.max_length": 256, "data.max_token_len_per_gpu": 4096,
        "optim.lr": 2e-3, "optim.lr_warmup_steps_ratio": 0.1, "optim.lr_scheduler_type": "cosine",
        "trainer.total_epochs": 10, "trainer.total_training_steps": SFT_STEPS, "trainer.test_freq": -1, "trainer.save_freq": 250,
        "trainer.max_ckpt_to_keep": 1, "trainer.default_local_dir": d / "sft", "trainer.seed": seed, "trainer.device": "cpu",
        "trainer.logger": "[file]",
        **({f"model.{k}": v for k, v in BALANCE.items()} if shape == "experts" else {}),
    }
    at = ["--seed", seed, "--out"]
    steps = [["model", "init", "--preset", "tiny", "--force", *at, d / "tiny"],
             ["model", "init", "--arch", d / "shape.json", "--tokenizer", d / "tiny", "--force", *at, d / "model"],
             ["data", "arith", "--n-train", 4096, "--n-test", 200, "--level", 1, "--sft-marked", 0.4, *at, d / "data"],
             ["sft", *values(sft)]]
    if (d / "sft").exists():
        steps = steps[-1:]  # interrupted while it trained
    return model if all(verlc(args, d.name) for args in steps) else None


def learn(algorithm, seed, model):
    """One run to its end; the processor seconds at each step go to seconds.jsonl beside its metrics."""
    name = f"{algorithm.lower()}-{seed}"
    d, data = OUT / name, start_dir(seed, shape_of(algorithm)) / "data"
    if (d / "ended").exists():
        return
    d.mkdir(parents=True, exist_ok=True)
    clock = records(d / "seconds.jsonl")
    before, seen = clock[-1][1] if clock else 0.0, {len(records(d / "metrics.jsonl"))}

    def watch(pid):
        now = records(d / "metrics.jsonl")
        if len(now) in seen or not now:
            return
        seen.add(len(now))
        with open(d / "seconds.jsonl", "a") as f:
            f.write(json.dumps([now[-1]["step"], round(before + processor_seconds(pid), 2)]) + "\n")

    keys = {"actor_rollout_ref.model.path": model,
            "data.train_files": data / "train.parquet", "data.val_files": data / "test.parquet",
            "trainer.default_local_dir": d, "trainer.seed": seed, **COMMON, **ALGORITHMS[algorithm]}
    if keys["algorithm.adv_estimator"] == "gae":
        keys["critic.model.path"] = model
    if verlc(["ppo", *values(keys)], name, watch):
        (d / "ended").touch()
        steps, seconds, best = reached(name)
        load = [r["data"].get("actor/router/load_entropy") for r in records(d / "metrics.jsonl")]
        load = [v for v in load if v is not None]
        say(f"{algorithm} seed {seed}: " +
            (f"best {best:.2f}" if steps is None else f"{BAR} after {steps} steps, {seconds:.0f} s") +
            (f"; entropy of the experts' load {load[0]:.3f} to {load[-1]:.3f} of an even one" if load else ""))


def curve(name):
    """[(step, reward of the held-out problems)]"""
    return [(r["step"], r["data"][METRIC]) for r in records(OUT / name / "metrics.jsonl") if METRIC in r["data"]]


def reached(name):
    """(step, processor seconds) of the first validation at BAR, or None twice; the best reward."""
    points, clock = curve(name), records(OUT / name / "seconds.jsonl")
    first = next((s for s, v in points if v >= BAR), None)
    seconds = next((t for s, t in clock if first is not None and s >= first), None)
    return first, seconds, max((v for _, v in points), default=0.0)


def table(names):
    def each(values, form):
        return ", ".join("-" if v is None else format(v, form) for v in values)

    rows = [f"| algorithm | steps to {BAR} | seconds to {BAR} | seconds a step | reward before | reward at the end |",
            "|---|---|---|---|---|---|"]
    good = True
    for a in names:
        runs = [f"{a.lower()}-{s}" for s in SEEDS]
        got = [reached(r) for r in runs]
        good = good and all(g[0] is not None for g in got)
        first, last = ([c[i][1] if c else None for c in map(curve, runs)] for i in (0, -1))
        clocks = [c for c in (records(OUT / r / "seconds.jsonl") for r in runs) if len(c) > 1]
        pace = statistics.median((c[-1][1] - c[0][1]) / (c[-1][0] - c[0][0]) for c in clocks) if clocks else None
        rows.append(f"| {a} | {each([g[0] for g in got], 'd')} | {each([g[1] for g in got], '.0f')} | {each([pace], '.2f')} | "
                    f"{each(first, '.2f')} | {each(last, '.2f')} |")
    return "\n".join(rows) + "\n", good


def draw(names, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.6 * rows), sharex=True, sharey=True, squeeze=False)
    longest = 1 + max((s for n in names for seed in SEEDS for s, _ in curve(f"{n.lower()}-{seed}")), default=1)
    for ax, name in zip(axes.flat, names):
        for seed in SEEDS:
            points = curve(f"{name.lower()}-{seed}")
            if points:
                ax.plot(*zip(*points), linewidth=1.4, marker=".", markersize=4, label=f"seed {seed}")
        ax.axhline(BAR, color="0.5", linestyle=":", linewidth=1)
        ax.set(title=name, ylim=(0, 1), xlim=(0, longest))
        ax.grid(alpha=0.2)
    for ax in axes.flat[len(names):]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("step")
    for row in axes:
        row[0].set_ylabel("reward, held out")
    axes.flat[0].legend(fontsize=8, loc="lower right")
    fig.tight_layout()
    fig.savefig(path, dpi=100)


def publish(text):
    """The table into docs/learning.md, between its markers."""
    page = ROOT / "docs/learning.md"
    head, rest = page.read_text().split("<!-- table -->\n")
    page.write_text(head + "<!-- table -->\n" + text + "<!-- end of table -->\n" + rest.split("<!-- end of table -->\n")[1])


def main():
    names = sys.argv[1:] or list(ALGORITHMS)
    for n in names:
        if n not in ALGORITHMS:
            sys.exit(f"no algorithm {n}; there are {', '.join(ALGORITHMS)}")
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    whole = names == list(ALGORITHMS) and len(SEEDS) >= 3
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        starts = {(s, k): pool.submit(start_model, s, k) for s in SEEDS for k in sorted({shape_of(n) for n in names})}
        models = {at: f.result() for at, f in starts.items()}
        runs = [pool.submit(learn, n, s, models[s, shape_of(n)]) for s in SEEDS for n in names if models[s, shape_of(n)]]
        concurrent.futures.wait(runs)
        for r in runs:
            r.result()
    if stopping.is_set():
        sys.exit("stopped; the same command goes on")
    text, good = table(names)
    (OUT / "table.md").write_text(text)
    print(text, end="")
    if whole:
        publish(text)
    try:
        draw(names, ROOT / "docs/learning.png" if whole else OUT / "learning.png")
    except ImportError:
        print("no curves: this Python has no matplotlib")
    sys.exit(0 if good else f"a run has not reached {BAR}")


if __name__ == "__main__":
    main()
