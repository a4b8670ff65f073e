#!/usr/bin/env bash
# Inside a bare system, called by dist_test.sh: tries the wheel and the tarball that lie beside this file.
set -u
cd "$(dirname "$0")"
system=$1
wheel=$(echo "$PWD"/verlc-*.whl)
tarball=$(echo verlc-*.tar.gz)
version=${tarball#verlc-}
version=${version%-linux-*}
export PIP_DISABLE_PIP_VERSION_CHECK=1

# check NAME COMMAND...: a line, and the end of what a failure printed
check() {
    name=$1
    shift
    if "$@" >check.log 2>&1; then
        echo "ok      $system: $name"
    else
        echo "FAILED  $system: $name"
        tail -5 check.log | sed 's/^/        /'
    fi
}

nothing_there() {
    ! command -v cc gcc g++ clang make &&
        ! find / -xdev \( -name 'libjansson*' -o -name 'libyaml-0*' -o -name 'libutf8proc*' -o -name 'libsqlite3.a' \) | grep .
}

# first_step VERLC DIR: a tiny model and problems; one step of GRPO from Parquet and with a reward in Python, in DIR
first_step() {
    mkdir "$2"
    echo 'def compute_score(data_source, solution_str, ground_truth, extra_info=None): return len(set(solution_str)) / 32' \
        >"$2/reward.py"
    "$1" model init --preset tiny --out "$2/model" --seed 1 &&
        "$1" data arith --out "$2/data" --level 1 --n-train 64 --n-test 8 --n-sft 8 --seed 1 &&
        step "$1" "$2" | tee /dev/stderr | grep 'actor/grad_norm:0*\.*0*[1-9]' >/dev/null &&
        [ -s "$2/run/global_step_1/actor/model.safetensors" ]
}
step() {
    "$1" ppo algorithm.adv_estimator=grpo data.train_files="$2/data/train.parquet" data.val_files="$2/data/test.parquet" \
        data.train_batch_size=8 data.max_prompt_length=128 data.max_response_length=32 \
        actor_rollout_ref.model.path="$2/model" actor_rollout_ref.actor.ppo_mini_batch_size=8 \
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.name=verlc actor_rollout_ref.rollout.n=4 \
        reward.custom_reward_function.path="$2/reward.py" actor_rollout_ref.actor.optim.lr=1e-3 \
        trainer.total_training_steps=1 trainer.save_freq=1 trainer.test_freq=-1 trainer.val_before_train=False \
        trainer.n_gpus_per_node=1 trainer.device=cpu trainer.default_local_dir="$2/run"
}
install_and_step() {
    python3 -m venv env && env/bin/pip install -q --no-cache-dir "$wheel" && first_step env/bin/verlc wheel
}
says() { # says TEXT COMMAND...
    text=$1
    shift
    "$@" 2>&1 | tee /dev/stderr | grep -F -- "$text" >/dev/null
}

check "bare: no compiler and none of the libraries" nothing_there

TIMEFORMAT='%R %U %S'
{ time check "wheel: installed, and a first GRPO step" install_and_step; } 2>time.log
read -r wall user sys <time.log
check "wheel: $wall s from the bare system to the first GRPO step, at most 60 ($user s of CPU, $sys s in the kernel)" \
    [ "${wall%.*}" -lt 60 ]
check "wheel: --version" says "verlc $version" env/bin/verlc --version
check "wheel: pip check" env/bin/pip check
check "wheel: self-test" env/bin/verlc selftest --device cpu
if [ -e env/lib/verlc/libverlc_cuda.so ]; then
    check "wheel: the CUDA backend opens and misses the driver alone" says "no NVIDIA driver" env/bin/verlc selftest --device cuda
fi
check "wheel: verl's command through verlc exec" says "did you mean trainer.total_epochs" \
    env/bin/verlc exec python3 -m verl.trainer.main_ppo trainer.total_epoch=3
check "wheel: pip uninstall" env/bin/pip uninstall -q -y verlc
check "wheel: nothing of it is left" test -z "$(find env -path '*verlc*' -type f)"

tar xzf "$tarball"
dir=$PWD/${tarball%.tar.gz}
check "tarball: the library of users' programs" ls "$dir/lib/libverlc.a" "$dir/include/verlc.h" "$dir/examples/grpo.c"
check "tarball: --version" says "verlc $version" "$dir/verlc" --version
first_step "$dir/verlc" tarball >missing.log 2>&1
line=$(sed -n "s/.*run 'apt-get install python3-venv && \(.*\)' (or set.*/\1/p" missing.log | head -1)
check "tarball: without its Python packages it says what to run" says "pip install -r python/requirements.txt" cat missing.log
check "tarball: the line that it says" bash -c "$line"
rm -rf tarball
check "tarball: a first GRPO step" first_step "$dir/verlc" tarball
weights=run/global_step_1/actor/model.safetensors
check "tarball: the wheel's weights, bit for bit" cmp wheel/$weights tarball/$weights
echo "end"
