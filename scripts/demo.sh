#!/usr/bin/env bash
# The main job in miniature, on this machine's CPU: a tiny Qwen2.5-shaped model with
# random weights learns to answer word problems - supervised warm-up, then GRPO.
# Everything lands in .demo/ (or $DEMO_DIR); nothing is downloaded.
set -eu
cd "$(dirname "$0")/.."
verlc=$PWD/build/release/verlc
out=${DEMO_DIR:-.demo}
seed=${DEMO_SEED:-1}
start=$(date +%s)
rm -rf "$out"
mkdir -p "$out"

echo "== 1/4 a tiny model and its data"
"$verlc" model init --preset tiny --out "$out/model" --seed "$seed"
"$verlc" data arith --out "$out/data" --level 1 --n-train 8192 --n-test 800 --n-sft 12288 --seed "$seed" \
    --format jsonl
for f in train test; do # the sums alone: a row's answer shows the calculation
    grep -F ' + ' "$out/data/$f.jsonl" >"$out/data/${f}_sums.jsonl"
done

echo "== 2/4 supervised warm-up: it learns to copy the numbers and an answer's form, but seldom calculates"
"$verlc" sft \
    model.path="$out/model" engine.dtype=float32 model.enable_gradient_checkpointing=False \
    data.train_files="$out/data/sft_train.jsonl" data.val_files="$out/data/sft_test.jsonl" \
    data.train_batch_size=64 data.max_length=256 data.max_token_len_per_gpu=4096 \
    optim.lr=3e-3 optim.lr_warmup_steps_ratio=0.1 optim.lr_scheduler_type=cosine \
    trainer.total_training_steps="${DEMO_SFT_STEPS:-170}" trainer.test_freq=-1 trainer.save_freq=1000 \
    trainer.default_local_dir="$out/sft" trainer.project_name=demo trainer.experiment_name=sft \
    trainer.seed="$seed" trainer.logger='["console","file","tensorboard"]'
sft_model=$(ls -d "$out"/sft/global_step_*/actor | tail -1)

echo "== 3/4 GRPO: 8 answers to each of 32 sums a step, the reward is the right number after ####;" \
    "a sum whose answers are all right or all wrong is replaced"
"$verlc" ppo \
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True \
    data.train_files="$out/data/train_sums.jsonl" data.val_files="$out/data/test_sums.jsonl" \
    data.train_batch_size=32 data.max_prompt_length=96 data.max_response_length=48 \
    actor_rollout_ref.model.path="$sft_model" \
    actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.rollout.dtype=float32 \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr="${DEMO_LR:-2e-4}" actor_rollout_ref.actor.optim.betas='[0.9,0.95]' \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.entropy_coeff=0.003 \
    actor_rollout_ref.rollout.name=verlc actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps="${DEMO_STEPS:-160}" trainer.test_freq=20 trainer.save_freq=80 \
    trainer.validation_data_dir="$out/validation" trainer.default_local_dir="$out/grpo" \
    trainer.project_name=demo trainer.experiment_name=grpo trainer.n_gpus_per_node=1 \
    trainer.seed="$seed" trainer.logger='["console","file","tensorboard"]'

echo "== 4/4 the result"
last=$(cat "$out/grpo/latest_checkpointed_iteration.txt")
"$verlc" model export --model "$out/grpo/global_step_$last" --out "$out/export"
.venv/bin/python tools/demo_report.py "$out" "$last"
echo "The whole demo took $(($(date +%s) - start)) s."
