"""The two command lines that the program must take as they are (spec Appendix B), as a
shell script has them: every key and every value but the paths, the length of the
responses and, in the second, the number of steps. The model is tiny and random, the
data are arithmetic problems in verl's parquet rows. Then what the runs leave: dumps
with verl's fields, step lines that verl's own check reads."""

import json
import math
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, run  # noqa: E402

FIRST = r"""
$VERLC ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA/train.parquet \
    data.val_files=$DATA/test.parquet \
    data.train_batch_size=16 \
    data.max_prompt_length=512 \
    data.max_response_length=$RESPONSE \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.trace.backend=mlflow \
    actor_rollout_ref.rollout.trace.token2text=True \
    actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=2 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console","mlflow"]' \
    trainer.project_name='verl_grpo_gsm8k' \
    trainer.experiment_name='qwen25_05b' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.default_local_dir=$RUN \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=5"""

SECOND = r"""
$VERLC ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$DATA/train.parquet \
    data.val_files=$DATA/test.parquet \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=$RESPONSE \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=80 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=20 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=3 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger=['console'] \
    trainer.project_name='verl_grpo_example_gsm8k' \
    trainer.experiment_name='qwen3_1_7b_function_rm' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15"""


def shell(s, name, command, response, *more):
    """Runs the command by the shell in an empty directory of its own; more keys follow it."""
    d = s.dir / name
    d.mkdir()
    env = {**ENV, "VERLC": str(pathlib.Path(VERLC).resolve()), "DATA": str(s.dir / "data"), "MODEL": str(s.dir / "model"),
           "RUN": str(d / "run"), "RESPONSE": str(response)}
    return subprocess.run(["bash", "-c", command.strip() + " " + " ".join(more)], capture_output=True, text=True, env=env, cwd=d,
                          timeout=800)


def reward_of_line(line):
    """What verl's tests/special_e2e/check_results.py reads from a step line."""
    for key_val in line.split(" - "):
        key, val = key_val.split(":")
        if key == "critic/rewards/mean":
            return float(val)
    return -math.inf


def check_lines(test, name, p, steps):
    lines = [line for line in p.stdout.splitlines() if line.startswith("step")]
    test(f"{name}: validation before the first step, then a line a step", [line.split(" - ")[0] for line in lines] ==
         ["step:0"] + [f"step:{i}" for i in range(1, steps + 1)], str([line[:40] for line in lines]) + p.stderr[-600:])
    trained = [dict(kv.split(":") for kv in line.split(" - ")) for line in lines[1:]]
    test(f"{name}: verl's check reads a reward in each", all(reward_of_line(line) > -1 for line in lines[1:]))
    test(f"{name}: the values are numbers", all(float(v) is not None for t in trained for v in t.values()))
    want = ["actor/pg_loss", "actor/kl_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr", "actor/entropy",
            "critic/score/mean", "critic/advantages/max", "critic/returns/min", "response_length/mean", "prompt_length/max",
            "training/global_step", "training/epoch", "timing_s/gen", "timing_s/update_actor", "timing_s/step", "perf/throughput",
            "perf/total_num_tokens", "global_seqlen/mean"]
    missing = [k for k in want if not trained or k not in trained[0]]
    test(f"{name}: verl's metrics under verl's names", not missing, str(missing))
    test(f"{name}: the validation accuracy under its name", "val-core/arith/acc/mean@1:" in lines[0] or
         any("val-core/" in line and "mean@1:" in line for line in lines[:1]), lines[0] if lines else "")
    return trained


def check_dump(test, name, path, rows, step):
    dump = [json.loads(line) for line in path.read_text().splitlines()]
    test(f"{name}: one line a sample", len(dump) == rows, str(len(dump)))
    test(f"{name}: verl's fields first and in order", all(list(d)[:5] == ["input", "output", "gts", "score", "step"] for d in dump),
         str(list(dump[0])) if dump else "")
    test(f"{name}: text, ground truth, score and step are what they say", all(
        isinstance(d["output"], str) and d["input"] and isinstance(d["gts"], str) and d["score"] in (0.0, 1.0) and d["step"] == step
        for d in dump))


def main():
    test = Tests()
    with Scratch(small=True) as s:
        made = run("data", "arith", "--out", s.dir / "data", "--n-train", 1100, "--n-test", 32, "--format", "parquet", check=False)
        if made.returncode != 0 and "pyarrow" in made.stderr:
            print("skipped: parquet needs pyarrow, which scripts/setup.sh installs")
            sys.exit(77)
        dumps = (f"trainer.rollout_data_dir={s.dir}/dump", f"trainer.validation_data_dir={s.dir}/val_dump")

        p = shell(s, "first", FIRST, 32, "trainer.total_training_steps=2", *dumps)
        test("first command: runs to its end", p.returncode == 0, p.stderr[-800:])
        t = check_lines(test, "first command", p, 2)
        test("first command: one optimizer step a step, on policy", bool(t) and float(t[0]["actor/ppo_kl"]) == 0 and
             float(t[0]["actor/pg_clipfrac"]) == 0)
        test("first command: what stands in for vllm is said in one line",
             sum(line.startswith("note: actor_rollout_ref.rollout.name") and
             "verlc's own engine" in line for line in p.stderr.splitlines()) == 1, p.stderr[:1500])
        test("first command: where mlflow's numbers are is said", "mlflow" in p.stderr and "run.db" in p.stderr, p.stderr[:1500])
        test("first command: the last step is saved", (s.dir / "first/run/global_step_2/manifest.json").exists())
        check_dump(test, "rollout dump", s.dir / "dump/1.jsonl", 16 * 5, 1)
        check_dump(test, "validation dump", s.dir / "val_dump/0.jsonl", 32, 0)

        p = shell(s, "second", SECOND, 8, "trainer.total_training_steps=1", f"trainer.rollout_data_dir={s.dir}/dump2")
        test("second command: runs to its end", p.returncode == 0, p.stderr[-800:])
        t = check_lines(test, "second command", p, 1)
        test("second command: a step of 3072 samples", bool(t) and float(t[0]["response_length/max"]) == 8 and
             float(t[0]["perf/total_num_tokens"]) > 3072 * 8)
        check_dump(test, "second command's rollout dump", s.dir / "dump2/1.jsonl", 1024 * 3, 1)
        test("second command: saves its last step alone, in verl's default place",
             [f.relative_to(s.dir / "second").as_posix() for f in (s.dir / "second").rglob("run.db")] ==
             ["checkpoints/verl_grpo_example_gsm8k/qwen3_1_7b_function_rm/run.db"] and
             [d.name for d in (s.dir / "second").rglob("global_step_*")] == ["global_step_1"],
             str([str(f) for f in (s.dir / "second").rglob("*")][:8]))
        for name, command in (("first", FIRST), ("second", SECOND)):
            p = shell(s, name + "-cfg", command, 1024, "--cfg job")
            test(f"{name} command: --cfg job prints the configuration and stops", p.returncode == 0 and
                 "adv_estimator: grpo" in p.stdout and
                 not list((s.dir / (name + "-cfg")).iterdir()), p.stderr[-300:])
            p = subprocess.run(["bash", "-c", command.strip().replace("$VERLC ppo", "$VERLC plan")], capture_output=True, text=True,
                               timeout=60,
                               env={**ENV, "VERLC": str(pathlib.Path(VERLC).resolve()), "DATA": "/no",
                                    "MODEL": str(s.dir / "model"), "RUN": "/no", "RESPONSE": "1024"})
            test(f"{name} command: verlc plan takes it as well", p.returncode == 0 and "memory plan" in p.stdout, p.stderr[-300:])
    test.end()


main()
