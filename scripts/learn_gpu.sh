#!/usr/bin/env bash
# A Qwen2.5-shaped model of 123 M parameters learns from random weights on one GPU, in minutes: supervised
# training on generated word problems and GSM8K, then GRPO on generated problems.  Prints the accuracy on
# held-out generated problems and on the GSM8K test before and after GRPO, and draws the curves.
# Exit status 1: GRPO raised the accuracy on generated problems by less than 15 points.
#   SHARED_DATA=DIR scripts/learn_gpu.sh [torch]
# DIR has gsm8k/ and tokenizers/qwen2_5/.  torch: beside it the same GRPO run from the same start in a plain torch
# loop (tools/learn_torch.py), its seeds side by side on the GPU LEARN_TORCH_GPU (0), and verlc's other seeds; then
# three steps in fp32, which the loop repeats on the very samples of verlc.
# LEARN_DIR (build/learn), LEARN_SEED, LEARN_STEPS and LEARN_SFT_STEPS; of the comparison LEARN_SEEDS (2 3),
# LEARN_TORCH_SEEDS (1 2), LEARN_SHORT_STEPS; LEARN_SFT_ROWS, LEARN_ARCH (a config.json), LEARN_PROMPTS to try it on
# a small machine; LEARN_PICTURE, DEVICE, PYTHON.
set -eu
cd "$(dirname "$0")/.."
verlc=${VERLC:-$PWD/build/release/verlc} out=${LEARN_DIR:-build/learn} data=${SHARED_DATA:-$PWD/../shared/data}
seed=${LEARN_SEED:-1} steps=${LEARN_STEPS:-300} sft_steps=${LEARN_SFT_STEPS:-1000} device=${DEVICE:-cuda}
seeds=${LEARN_SEEDS:-2 3} torch_seeds=${LEARN_TORCH_SEEDS:-1 2} short=${LEARN_SHORT_STEPS:-80} torch_gpu=${LEARN_TORCH_GPU:-0}
python=${PYTHON:-python3} picture=${LEARN_PICTURE:-docs/learn_gpu.png} start=$(date +%s)
prompts=${LEARN_PROMPTS:-64} samples=8 new=64 lr=${LEARN_LR:-1e-5} kl=0.001 test_every=10
[ -d "$data/gsm8k" ] && [ -d "$data/tokenizers/qwen2_5" ] ||
    { echo "no $data/gsm8k and tokenizers/qwen2_5: set SHARED_DATA" >&2; exit 1; }
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
"$verlc" model init --arch "${LEARN_ARCH:-$out/arch.json}" --out "$out/model" --tokenizer "$out/tokenizer" --seed "$seed" \
    --dtype fp32
"$verlc" data arith --out "$out/data" --n-train 16384 --n-sft "${LEARN_SFT_ROWS:-48000}" --n-test 500 --seed "$seed" --level 3 \
    --sft-marked 0.5 # half of the answers end without the line that the reward reads: GRPO shall find out
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
    trainer.total_epochs=20 trainer.total_training_steps="$sft_steps" trainer.test_freq=200 trainer.save_freq=100000 \
    trainer.default_local_dir="$out/sft" trainer.seed="$seed" trainer.device="$device" trainer.logger='["file"]'
sft=$(ls -d "$out"/sft/global_step_*/actor | tail -1)
echo "model, data and supervised training took $(($(date +%s) - start)) s"

ppo() { # MODEL NAME SEED VAL_FILES RESPONSE_LENGTH KEYS...
    local model=$1 name=$2 seed=$3 val=$4 length=$5
    shift 5
    "$verlc" ppo algorithm.adv_estimator=grpo data.train_files="$out/data/train.parquet" data.val_files="$val" data.shuffle=False \
        data.train_batch_size="$prompts" data.max_prompt_length=256 data.max_response_length="$length" \
        data.filter_overlong_prompts=True \
        actor_rollout_ref.model.path="$model" actor_rollout_ref.model.enable_gradient_checkpointing=False \
        actor_rollout_ref.actor.optim.lr="$lr" actor_rollout_ref.actor.ppo_mini_batch_size="$prompts" \
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
        actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=32768 \
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef="$kl" \
        actor_rollout_ref.rollout.name=verlc actor_rollout_ref.rollout.n="$samples" actor_rollout_ref.rollout.max_num_seqs=1024 \
        trainer.test_freq="$test_every" trainer.default_local_dir="$out/$name" trainer.n_gpus_per_node=1 trainer.seed="$seed" \
        trainer.device="$device" trainer.logger='["file"]' "$@"
}
torch_runs() { # all seeds side by side
    local s pids=()
    for s in $torch_seeds; do
        CUDA_VISIBLE_DEVICES=$torch_gpu "$python" tools/learn_torch.py "$sft" "$out/data/train.parquet" "$out/data/test.parquet" \
            "$out/torch_$s.jsonl" --steps "$short" --seed "$s" --prompts "$prompts" --samples "$samples" --new "$new" --lr "$lr" \
            --kl "$kl" --test-every "$test_every" >"$out/torch_$s.log" 2>&1 &
        pids+=($!)
    done
    for s in "${pids[@]}"; do wait "$s" || { echo "a torch run failed: $out/torch_*.log" >&2; return 1; }; done
}

echo "== 3/4 GRPO"
torch= replay=0
[ "${1:-}" != torch ] || [ "$torch_gpu" = 0 ] || { torch_runs & torch=$!; }
begin=$(date +%s)
ppo "$sft" gsm8k_before "$seed" "$out/gsm8k/test.parquet" 256 trainer.val_only=True
ppo "$sft" grpo "$seed" "$out/data/test.parquet" "$new" trainer.total_training_steps="$steps" trainer.save_freq=100000
grpo=$(ls -d "$out"/grpo/global_step_*/actor | tail -1)
ppo "$grpo" gsm8k_after "$seed" "$out/gsm8k/test.parquet" 256 trainer.val_only=True
echo "GRPO and three evaluations took $(($(date +%s) - begin)) s, all of it $(($(date +%s) - start)) s"

if [ "${1:-}" = torch ]; then
    for s in $seeds; do
        ppo "$sft" "grpo_$s" "$s" "$out/data/test.parquet" "$new" trainer.total_training_steps="$short" trainer.save_freq=-1
    done
    ppo "$sft" replay "$seed" "$out/data/test.parquet" "$new" trainer.total_training_steps=3 trainer.save_freq=100000 \
        trainer.test_freq=-1 trainer.val_before_train=False actor_rollout_ref.actor.fsdp_config.dtype=float32 \
        actor_rollout_ref.rollout.dtype=float32
    "$python" tools/learn_torch.py "$sft" - - "$out/replay.jsonl" --replay "$out/replay/run.db" --fp32 --lr "$lr" --kl "$kl" \
        --final "$out/replay/global_step_3/actor" || replay=1
    if [ -n "$torch" ]; then wait "$torch"; else torch_runs; fi
fi
echo "== 4/4 the result"
"$python" tools/learn_plot.py "$out" "$picture"
exit $replay
