#!/usr/bin/env bash
# The memory plan of one GRPO step beside its measured peak (VmHWM of the process).
# Default: the main job, Qwen2.5-0.5B, 16 prompts x 5 samples x (512 + 1024) tokens,
# which takes an hour on two cores. Smaller: ARCH=tiny RESPONSE=64 scripts/measure_plan.sh
# Fails where plan and peak differ by more than 5 %.
set -eu
cd "$(dirname "$0")/.."
verlc=${VERLC:-$PWD/build/release/verlc}
arch=${ARCH:-qwen2.5-0.5b} prompts=${PROMPTS:-16} n=${N:-5} prompt=${PROMPT:-512} response=${RESPONSE:-1024} micro=${MICRO:-4}
dtype=${DTYPE:-bfloat16} data=${SHARED_DATA:-$PWD/../shared/data}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

if [ "$arch" = tiny ]; then
    "$verlc" model init --preset tiny --out "$tmp/model"
else
    mkdir "$tmp/tokenizer"
    for f in "$data/tokenizers/${TOKENIZER:-qwen2_5}"/*.xz; do xz -dc "$f" >"$tmp/tokenizer/$(basename "$f" .xz)"; done
    "$verlc" model init --arch "$arch" --out "$tmp/model" --tokenizer "$tmp/tokenizer"
fi >&2
"$verlc" data gsm8k --local_dataset_path "$data/gsm8k" --local_save_dir "$tmp/data" >&2

args="algorithm.adv_estimator=grpo data.train_files=$tmp/data/train.parquet data.val_files=$tmp/data/test.parquet
    data.train_batch_size=$prompts data.max_prompt_length=$prompt data.max_response_length=$response
    data.filter_overlong_prompts=True
    actor_rollout_ref.model.path=$tmp/model actor_rollout_ref.actor.fsdp_config.dtype=$dtype actor_rollout_ref.rollout.dtype=$dtype
    actor_rollout_ref.actor.ppo_mini_batch_size=$prompts actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$micro
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=verlc actor_rollout_ref.rollout.n=$n
    trainer.total_training_steps=1 trainer.val_before_train=False trainer.save_freq=${SAVE_FREQ:-0} trainer.test_freq=-1
    trainer.n_gpus_per_node=1 trainer.default_local_dir=$tmp/run trainer.logger=[file] ${EXTRA:-}"
# shellcheck disable=SC2086 # one word an argument
"$verlc" plan $args | tee "$tmp/plan" >&2
# shellcheck disable=SC2086
python3 - "$verlc" ppo $args >"$tmp/peak" <<'PY'
"""Runs the command and prints its VmHWM and the peak of its anonymous memory, in MiB."""
import os, subprocess, sys, time
p = subprocess.Popen(sys.argv[1:])
hwm = anon = 0
while p.poll() is None:
    try:
        status = dict(x.split(":", 1) for x in open(f"/proc/{p.pid}/status") if ":" in x)
        hwm, anon = max(hwm, int(status["VmHWM"].split()[0])), max(anon, int(status["RssAnon"].split()[0]))
    except (OSError, KeyError):
        pass
    time.sleep(0.02)
print(f"{hwm / 1024:.1f} {anon / 1024:.1f}")
sys.exit(p.returncode)
PY
awk -v what="$arch, $prompts x $n x ($prompt + $response), $dtype" '
    FNR == NR { if ($1 == "total") plan = $2 * ($3 == "GiB" ? 1024 : 1); next }
    { off = ($1 - plan) / plan * 100
      printf "%s: plan %.0f MiB, peak %.0f MiB (%.0f anonymous): %+.1f %%\n", what, plan, $1, $2, off
      exit off > 5 || off < -5 }' "$tmp/plan" "$tmp/peak"
