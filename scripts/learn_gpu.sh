#!/usr/bin/env bash
# A Qwen2.5-shaped model of 124 M parameters learns from random weights on one GPU, in minutes: supervised
# training on generated word problems and GSM8K, then GRPO on generated problems.  Prints the accuracy on
# held-out generated problems and on the GSM8K test before and after GRPO, and draws both curves.
# Exit status 1: GRPO raised the accuracy on generated problems by less than 15 points.
#   SHARED_DATA=DIR scripts/learn_gpu.sh [torch]
# DIR has gsm8k/ and tokenizers/qwen2_5/.  torch: afterwards the same GRPO run from the same start in a plain
# torch loop (tools/learn_torch.py), into the same picture.  LEARN_DIR (build/learn), LEARN_SEED, LEARN_STEPS,
# LEARN_SFT_STEPS, DEVICE, PYTHON.
set -eu
cd "$(dirname "$0")/.."
verlc=${VERLC:-$PWD/build/release/verlc} out=${LEARN_DIR:-build/learn} data=${SHARED_DATA:-$PWD/../shared/data}
seed=${LEARN_SEED:-1} steps=${LEARN_STEPS:-600} sft_steps=${LEARN_SFT_STEPS:-1200} device=${DEVICE:-cuda}
python=${PYTHON:-python3} start=$(date +%s)
[ -d "$data/gsm8k" ] && [ -d "$data/tokenizers/qwen2_5" ] || { echo "no $data/gsm8k and tokenizers/qwen2_5: set SHARED_DATA" >&2; exit 1; }
rm -rf "$out"
mkdir -p "$out/tokenizer"

echo "== 1/4 model and data"
for f in "$data"/tokenizers/qwen2_5/*.xz; do xz -dc "$f" >"$out/tokenizer/$(basename "$f" .xz)"; done
cat >"$out/arch.json" <<'JSON'
{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 512, "intermediate_size": 2048,
 "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 151936,
 "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true,
 "hidden_act": "silu", "initializer_range": 0.02, "bos_token_id": 151643, "eos_token_id": 151645,
 "torch_dtype": "bfloat16"}
JSON
"$verlc" model init --arch "$out/arch.json" --out "$out/model" --tokenizer "$out/tokenizer" --seed "$seed" --dtype fp32
"$verlc" data arith --out "$out/data" --n-train 16384 --n-sft 24000 --n-test 500 --seed "$seed" --level 3 --sft-marked 0.5
"$verlc" data gsm8k --local_dataset_path "$data/gsm8k" --local_save_dir "$out/gsm8k"
"$python" - "$data/gsm8k/train.jsonl" "$out/data/sft_train.jsonl" <<'PY'
"""GSM8K's training answers as conversations, after the generated ones; the sampler shuffles."""
import json, sys
rows = [json.loads(x) for x in open(sys.argv[1])]
with open(sys.argv[2], "a") as f:
    for r in rows:
        ask = r["question"] + ' Let\'s think step by step and output the final answer after "####".'
        f.write(json.dumps({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": r["answer"]}]}) + "\n")
PY

echo "== 2/4 supervised training"
"$verlc" sft model.path="$out/model" engine.dtype=bfloat16 model.enable_gradient_checkpointing=False \
    data.train_files="$out/data/sft_train.jsonl" data.val_files="$out/data/sft_test.jsonl" \
    data.train_batch_size=128 data.max_length=512 data.truncation=right data.max_token_len_per_gpu=32768 \
    optim.lr=1e-3 optim.lr_warmup_steps_ratio=0.05 optim.lr_scheduler_type=cosine \
    trainer.total_epochs=20 trainer.total_training_steps="$sft_steps" trainer.test_freq=100 trainer.save_freq=100000 \
    trainer.default_local_dir="$out/sft" trainer.seed="$seed" trainer.device="$device" trainer.logger='["file"]'
sft=$(ls -d "$out"/sft/global_step_*/actor | tail -1)

ppo() { # MODEL NAME VAL_FILES KEYS...
    local model=$1 name=$2 val=$3
    shift 3
    "$verlc" ppo algorithm.adv_estimator=grpo data.train_files="$out/data/train.parquet" data.val_files="$val" \
        data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=192 data.filter_overlong_prompts=True \
        actor_rollout_ref.model.path="$model" actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr=2e-5 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
        actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=32768 \
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
        actor_rollout_ref.rollout.name=verlc actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.max_num_seqs=1024 \
        trainer.total_training_steps="$steps" trainer.test_freq=20 trainer.save_freq=100000 \
        trainer.default_local_dir="$out/$name" trainer.n_gpus_per_node=1 trainer.seed="$seed" trainer.device="$device" \
        trainer.logger='["file"]' "$@"
}
echo "== 3/4 GRPO"
ppo "$sft" gsm8k_before "$out/gsm8k/test.parquet" trainer.val_only=True
ppo "$sft" grpo "$out/data/test.parquet"
grpo=$(ls -d "$out"/grpo/global_step_*/actor | tail -1)
ppo "$grpo" gsm8k_after "$out/gsm8k/test.parquet" trainer.val_only=True
echo "training took $(($(date +%s) - start)) s"

echo "== 4/4 the result"
if [ "${1:-}" = torch ]; then
    "$python" tools/learn_torch.py "$sft" "$out/data/train.parquet" "$out/data/test.parquet" "$out/torch.jsonl" --steps "$steps" --seed "$seed"
fi
"$python" tools/learn_plot.py "$out" docs/learn_gpu.png
