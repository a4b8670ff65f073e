#!/usr/bin/env bash
# A tiny model learns to calculate on one GPU, from random weights: supervised training until it copies
# numbers and writes the answer's form but seldom calculates, then GRPO; the reward is the right number.
# Exit status 1: a GRPO run starts above 30 % or ends below 90 % of the held-out problems (greedy).
#   scripts/learn_gpu.sh [grpo|ppo|rloo|dapo|torch]...
# Each name is one run a seed from the same start (default: grpo). torch is the recipe in a plain torch loop,
# tools/learn_torch.py. A run that is there is made again; the others stay. Tables and picture show all.
# LEARN_DIR (build/learn), LEARN_SEEDS (1 2 3), LEARN_STEPS (1000), LEARN_KEYS (more keys of verlc ppo),
# LEARN_SHUFFLE (True; False: both programs take the problems in the file's order),
# LEARN_TORCH_STEPS (the torch loop ends after so many, on the same schedule), LEARN_PICTURE, LEARN_DOC (a
# document for the tables), VERLC, DEVICE (cuda), PYTHON; LEARN_SFT_STEPS, LEARN_PROMPTS for a small machine.
set -eu
cd "$(dirname "$0")/.."
verlc=${VERLC:-$PWD/build/release/verlc} out=${LEARN_DIR:-build/learn} device=${DEVICE:-cuda}
python=${PYTHON:-python3} picture=${LEARN_PICTURE:-$out/learn_gpu.png}
steps=${LEARN_STEPS:-1000} sft_steps=${LEARN_SFT_STEPS:-170} prompts=${LEARN_PROMPTS:-512}
shuffle=${LEARN_SHUFFLE:-True}
samples=16 temperature=1.2 new=48 lr=3e-4 floor=0.1 clip=0.28 entropy=0.003 every=20

start_model() { # DIR SEED
    local dir=$1 seed=$2
    "$verlc" model init --preset tiny --out "$dir/model" --seed "$seed"
    "$verlc" data arith --out "$dir/data" --level 1 --sft-marked 1 --n-train 16384 --n-test 1000 \
        --seed "$seed" --format jsonl
    "$verlc" sft model.path="$dir/model" engine.dtype=bfloat16 model.enable_gradient_checkpointing=False \
        data.train_files="$dir/data/sft_train.jsonl" data.val_files="$dir/data/sft_test.jsonl" \
        data.train_batch_size=64 data.max_length=256 data.max_token_len_per_gpu=8192 \
        optim.lr=3e-3 optim.lr_warmup_steps_ratio=0.1 optim.lr_scheduler_type=cosine \
        trainer.total_training_steps="$sft_steps" trainer.test_freq=-1 trainer.save_freq=100000 \
        trainer.default_local_dir="$dir/sft" trainer.seed="$seed" trainer.device="$device" \
        trainer.logger='["file"]'
}

actor=actor_rollout_ref.actor rollout=actor_rollout_ref.rollout
run() { # DIR SEED NAME KEYS...
    local dir=$1 seed=$2 name=$3
    shift 3
    rm -rf "${dir:?}/$name"
    "$verlc" ppo data.train_files="$dir/data/train.jsonl" data.val_files="$dir/data/test.jsonl" \
        data.train_batch_size="$prompts" data.shuffle="$shuffle" \
        data.max_prompt_length=96 data.max_response_length="$new" \
        actor_rollout_ref.model.path="$dir/sft/global_step_$sft_steps/actor" \
        actor_rollout_ref.model.enable_gradient_checkpointing=False \
        $actor.optim.lr=$lr $actor.optim.lr_scheduler_type=cosine $actor.optim.min_lr_ratio=$floor \
        $actor.optim.betas='[0.9,0.95]' $actor.ppo_mini_batch_size=$((prompts / 2)) \
        $actor.clip_ratio_high=$clip $actor.entropy_coeff=$entropy $actor.use_kl_loss=False \
        $actor.use_dynamic_bsz=True $actor.ppo_max_token_len_per_gpu=65536 \
        actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=65536 \
        $rollout.name=verlc $rollout.n=$samples $rollout.temperature=$temperature $rollout.max_num_seqs=4096 \
        trainer.total_epochs=100000 trainer.total_training_steps="$steps" trainer.test_freq=$every \
        trainer.save_freq=-1 trainer.default_local_dir="$dir/$name" \
        trainer.validation_data_dir="$dir/$name/validation" \
        trainer.n_gpus_per_node=1 trainer.seed="$seed" trainer.device="$device" trainer.logger='["file"]' \
        "$@" ${LEARN_KEYS:-}
    rm -f "$dir/$name"/run.db* # every sample with its tokens: gigabytes here
}

algorithm() { # DIR SEED NAME
    case $3 in
    grpo) run "$@" algorithm.adv_estimator=grpo ;;
    rloo) run "$@" algorithm.adv_estimator=rloo ;;
    dapo) run "$@" algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True ;;
    ppo) run "$@" algorithm.adv_estimator=gae critic.model.path="$1/sft/global_step_$sft_steps/actor" \
        critic.optim.lr=5e-4 critic.ppo_max_token_len_per_gpu=65536 \
        critic.model.enable_gradient_checkpointing=False ;;
    torch) "$python" tools/learn_torch.py "$1/sft/global_step_$sft_steps/actor" "$1/data/train.jsonl" \
        "$1/data/test.jsonl" "$1/torch" --seed "$2" --shuffle "$shuffle" --steps "$steps" \
        --stop "${LEARN_TORCH_STEPS:-0}" --prompts "$prompts" --samples $samples --new $new \
        --lr $lr --floor $floor --clip-high $clip --entropy $entropy --temperature $temperature \
        --test-every $every ;;
    *) echo "$3: grpo, ppo, rloo, dapo or torch" >&2; return 2 ;;
    esac
}

for seed in ${LEARN_SEEDS:-1 2 3}; do
    dir=$out/seed_$seed begin=$(date +%s)
    if [ ! -f "$dir/seconds" ]; then
        rm -rf "$dir"
        start_model "$dir" "$seed"
        echo $(($(date +%s) - begin)) >"$dir/seconds"
    fi
    for name in "${@:-grpo}"; do
        begin=$(date +%s)
        echo "== seed $seed: $name"
        algorithm "$dir" "$seed" "$name"
        echo $(($(date +%s) - begin)) >"$dir/$name/seconds"
    done
done
"$python" tools/learn_plot.py "$out" "$picture" ${LEARN_DOC:-}
