#!/usr/bin/env bash
# GRPO at full size on this machine: recipe 1 of docs/performance.md on GSM8K with the
# Qwen2.5 tokenizer and the Qwen2.5-0.5B shape in random weights; responses cut to 128 tokens, 3 steps,
# stopped after step 2 by SIGTERM and resumed.  Writes OUT/log, with the time of each phase.
#   scripts/full_size.sh TOKENIZER_DIR GSM8K_DIR [OUT]
set -eu
cd "$(dirname "$0")/.."
verlc=$PWD/build/release/verlc
tokenizer=$1 gsm8k=$2 out=${3:-build/full_size}
mkdir -p "$out"
[ -f "$out/model/config.json" ] || "$verlc" model init --arch qwen2.5-0.5b --tokenizer "$tokenizer" --out "$out/model" --seed 1
[ -f "$out/data/train.parquet" ] || "$verlc" data gsm8k --local_dataset_path "$gsm8k" --local_save_dir "$out/data"
run() { # in a subshell: the program takes its place, so that $! is the program
    exec "$verlc" ppo \
        algorithm.adv_estimator=grpo data.train_files="$out/data/train.parquet" data.val_files="$out/data/test.parquet" \
        data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=128 \
        data.filter_overlong_prompts=True data.truncation='error' \
        actor_rollout_ref.model.path="$out/model" actor_rollout_ref.actor.optim.lr=1e-6 \
        actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True \
        actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
        actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True \
        actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.n=5 \
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.ref.fsdp_config.param_offload=True \
        actor_rollout_ref.rollout.trace.backend=mlflow actor_rollout_ref.rollout.trace.token2text=True \
        actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=2 \
        algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","mlflow"]' \
        trainer.project_name=verl_grpo_gsm8k trainer.experiment_name=qwen25_05b trainer.n_gpus_per_node=1 trainer.nnodes=1 \
        trainer.default_local_dir="$out/run" trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=5 \
        trainer.total_training_steps=3 data.val_max_samples=16 "$@"
}
log=$out/log
exec > >(tee "$log") 2>&1
date -u
run trainer.val_before_train=True &
pid=$!
while ! grep -q "^step:1 " "$log" 2>/dev/null; do sleep 2; kill -0 $pid || exit 1; done
peak=$(awk '/VmHWM/ {print $2 / 1048576}' /proc/$pid/status)
kill -TERM $pid # in the middle of step 2: its update is finished, or its rollout made again
wait $pid || echo "first part ended with status $?; its peak resident memory was $peak GiB"
date -u
(run trainer.val_before_train=False)
date -u
