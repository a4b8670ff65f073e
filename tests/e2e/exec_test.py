"""`verlc exec`: launchers written for verl, as they stand. Small scripts with the syntax of verl's own: arrays, "$@", line
continuations, torchrun, uv, ray job submit; the stand-in goes before a verl in the working directory; rewards that import
verl.utils.reward_score; what is not there is refused by name; a verl that is installed never runs in silence. And `verlc plan` as
--plan calls it."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ranks import below  # noqa: E402
from verlc_test import ENV, VERLC, Scratch, Tests, waited  # noqa: E402

GRPO = r"""#!/usr/bin/env bash
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-$MODEL}
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$ROWS/train.jsonl']"
    data.val_files="['$ROWS/test.jsonl']"
    data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=8
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=2
)
EXTRA=()
LAUNCH=(python3)
RAY=(ray_kwargs.ray_init.runtime_env.py_executable=null)
if [ "${VERL_USE_UV:-1}" != 0 ]; then
    LAUNCH=(uv run --frozen --all-packages --extra vllm --extra fsdp python3)
    RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv -v run --frozen --extra vllm")
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    trainer.logger='["console", "file"]' \
    trainer.experiment_name='two words' \
    trainer.total_training_steps=1 trainer.val_before_train=False trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.default_local_dir="$PWD/run" \
    "${EXTRA[@]}" "${RAY[@]}" "$@"
"""

SFT = r"""set -x
nproc_per_node=$1
shift
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \
     -m verl.trainer.sft_trainer \
    data.train_files=$ROWS/sft.jsonl data.train_batch_size=4 data.max_length=64 \
    optim.lr=1e-4 \
    engine=fsdp \
    model.path=$MODEL \
    trainer.default_local_dir=$PWD/sft \
    trainer.logger='["console","file"]' \
    trainer.total_training_steps=1 $@
"""

RAY = r"""
unset RAY_ADDRESS
ray job submit --address="http://127.0.0.1:8265" --submission-id=first --no-wait \
    --runtime-env-json='{"env_vars": {"MLFLOW_TRACKING_URI": "sqlite:////tmp/a b.db", "RATE": "2"}}' \
    -- python3 -c 'import os, sys; print(os.environ["MLFLOW_TRACKING_URI"], os.environ["RATE"], sys.argv[1:])' "two words" 'a="b"'
"""

# A cluster of one machine: the job starts as Ray starts it, in the machine's environment and the job's env_vars, by a shell.
# OTHER_MACHINE: the files of the caller's verlc are not there.
FAKE_RAY = r"""#!/usr/bin/env python3
import json, os, shlex, subprocess, sys
words = sys.argv[1:]
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "words.json"), "w") as f:
    json.dump(words, f)
machine = {"PATH": os.path.join(here, "machine") + ":" + os.environ["MACHINE_PATH"], "HOME": os.environ["HOME"]}
env_vars = json.loads(words[words.index("--runtime-env-json") + 1])["env_vars"]
assert all(type(v) is str for v in env_vars.values()), env_vars
if os.environ.get("OTHER_MACHINE"):
    env_vars = {k: v.replace("/", "/none/") if k == "VERLC" else v.replace("verlc_standin", "none") for k, v in env_vars.items()}
env_vars = {k: v.replace("${PATH}", machine["PATH"]) for k, v in env_vars.items()}
rc = subprocess.call(shlex.join(words[words.index("--") + 1:]), shell=True, env=machine | env_vars, cwd="/")
sys.exit(1 if rc else 0)
"""

REWARD = r'''
from verl.utils.reward_score import default_compute_score, gsm8k
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = gsm8k.compute_score("so #### 1,234", "1234") + default_compute_score("openai/gsm8k", "#### 7", "7")
    boxed = remove_boxed(last_boxed_only_string("it is \\boxed{\\frac{1}{2}}."))
    return {"score": right, "boxed": boxed == "\\frac{1}{2}", "none": gsm8k.extract_solution("7") is None}
'''


def verlc_exec(s, name, command, *options, **env):
    """In a directory of its own."""
    d = s.dir / name
    d.mkdir(exist_ok=True)
    # no torchrun, uv or ray that this machine may have
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep)
                           if not any(os.path.exists(os.path.join(p, tool)) for tool in ("torchrun", "uv", "ray")))
    env = {**ENV, "PATH": path, "HOME": str(s.dir / "home"), "MODEL": str(s.dir / "model"), "ROWS": str(s.dir), **env}
    return subprocess.run([str(pathlib.Path(VERLC).resolve()), "exec", *options, *command], capture_output=True, text=True, cwd=d,
                          env=env, timeout=300, stdin=subprocess.DEVNULL)


def check_ppo(s, test):
    script = s.dir / "run_grpo.sh"
    script.write_text(GRPO)
    p = verlc_exec(s, "grpo", ["bash", script, "trainer.seed=3", "+data.apply_chat_template_kwargs.enable_thinking=False"])
    made = s.dir / "grpo/run/global_step_1"
    config = (made / "config.yaml").read_text() if made.exists() else ""
    test("a script with arrays and uv trains", p.returncode == 0 and "step:1 - " in p.stdout, p.stderr[-800:])
    test("quotes and spaces arrive", "experiment_name: 'two words'" in config or
         "experiment_name: two words" in config, config[-600:])
    test('"$@" arrives', "seed: 3" in config and "enable_thinking: false" in config, config[-600:])

    real = s.dir / "checkout"
    (real / "verl/trainer").mkdir(parents=True)
    for file in (real / "verl/__init__.py", real / "verl/trainer/__init__.py", real / "verl/trainer/main_ppo.py"):
        file.write_text("raise SystemExit('the verl of the working directory ran')\n")
    p = verlc_exec(s, "checkout", ["bash", script], "--plan", VERL_USE_UV="0")
    test("--plan: the command line and the memory plan, not the verl beside",
         p.returncode == 0 and "note: verl.trainer.main_ppo: verlc plan ppo algorithm.adv_estimator=grpo" in p.stderr and
         "memory plan" in p.stdout and not (real / "run").exists(), p.stderr[-800:])
    p = verlc_exec(s, "checkout", ["bash", script], "--plan", "--gpu", "A100-40GB", VERL_USE_UV="0")
    test("--plan --gpu: for that card", p.returncode == 0 and "verlc plan --gpu A100-40GB ppo" in p.stderr and
         "37.33 GiB" in p.stdout, p.stdout[-300:] + p.stderr[-300:])
    test.refused("--gpu without --plan", verlc_exec(s, "no", ["true"], "--gpu=24"), 2, "--plan")
    test.refused("--gpu of no card", verlc_exec(s, "no", ["true"], "--plan", "--gpu", "H1000"), 2, "H1000", "A100-40GB")
    p = verlc_exec(s, "checkout", ["bash", script], "--plan", "--set", "data.train_batch_size=3", VERL_USE_UV="0")
    test.refused("--set reaches verl's program", p, 2, "data.train_batch_size")
    p = verlc_exec(s, "checkout", ["python3", "verl/trainer/main_ppo.py", "nope=1"])
    test.refused("a program by its path", p, 2, "there is no key nope")
    p = verlc_exec(s, "checkout", ["bash", "-c", "PYTHONPATH=/nowhere python3 -m verl.trainer.main_ppo nope=1"])
    test.refused("a PYTHONPATH that a script sets anew", p, 2, "there is no key nope")


def check_config_file(s, test):
    d = s.dir / "yaml/config"
    d.mkdir(parents=True)
    (d / "mine.yaml").write_text("hydra:\n  searchpath:\n    - file://verl/trainer/config\ndefaults:\n  - ppo_trainer\n  - _self_\n"
                                 "data:\n  train_batch_size: 12\n")
    p = verlc_exec(s, "yaml", ["python3", "-m", "verl.trainer.main_ppo", f"--config-path={d}", "--config-name=mine", "--cfg",
                               "job"])
    test("a YAML file of verl's", p.returncode == 0 and "train_batch_size: 12" in p.stdout, p.stderr[-500:])


def check_sft(s, test):
    s.write("sft.jsonl", [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
                          for i in range(8)])
    script = s.dir / "run_sft.sh"
    script.write_text(SFT)
    p = verlc_exec(s, "sft", ["bash", script, "1", "model.lora_rank=4"])
    test("torchrun trains in one process", p.returncode == 0 and (s.dir / "sft/sft/global_step_1/actor").exists(), p.stderr[-800:])
    p = verlc_exec(s, "sft", ["bash", script, "8"])
    test.refused("torchrun's processes are devices asked for", p, 2, "data.train_batch_size (4)", "trainer.n_gpus_per_node (8)")
    p = verlc_exec(s, "sft", ["bash", script, "4"], "--plan")
    planned = p.returncode == 0 and "memory plan: sft" in p.stdout and "not the 4 GPUs asked for" in p.stderr
    test("--plan of sft", planned, p.stderr[-500:])
    p = verlc_exec(s, "sft", ["python3", "-m", "verl.trainer.sft_trainer", "nope=1"], RANK="1", WORLD_SIZE="2",
                   LOCAL_WORLD_SIZE="2")
    test("rank 1 of a torchrun that is installed ends at once", p.returncode == 0 and "rank 1" in p.stderr, p.stderr[-300:])


def check_ray(s, test):
    p = verlc_exec(s, "ray", ["bash", "-c", RAY])
    test("ray job submit without ray: env_vars and quoting", p.returncode == 0 and
         p.stdout == "sqlite:////tmp/a b.db 2 ['two words', 'a=\"b\"']\n", p.stdout + p.stderr)
    odd = ("[1]", '"x"', "null", "{", "1e999", "[" * 100000, '{"env_vars": [1]}', '{"env_vars": "A=1"}',
           '{"env_vars": {"A": null}}', '{"env_vars": {"A=B": "1"}}', '{"env_vars": {"": "1"}}', r'{"env_vars": {"A": "\u0000"}}',
           r'{"env_vars": {"A\u0000": "1"}}', r'{"env_vars": {"A": "\ud800"}}', '{"env_vars": {"A": {"b": 1}}}',
           '{"working_dir": 5}', '{"working_dir": ["."]}', r'{"working_dir": "\u0000"}', '{"working_dir": "/no/such"}',
           '{"working_dir": "' + "x" * 5000 + '"}')
    for text in odd:
        p = verlc_exec(s, "ray", ["ray", "job", "submit", f"--runtime-env-json={text}", "--", "echo", "on"])
        test.refused(f"ray job submit: an odd runtime environment {text[:40]}", p, 2, "ray job submit")
    p = verlc_exec(s, "ray", ["bash", "-c", "ray stop && ray start --head && ray status && echo on"])
    test("ray start, status and stop do nothing", p.returncode == 0 and p.stdout == "on\n", p.stderr)
    for text in ('[1]', '{"env_vars": ["A"]}', '{"env_vars": {"A=B": "1"}}', '{"env_vars": {"A": "\\u0000"}}', '{', '[' * 100000,
                 '{"env_vars": {"A": "\\ud800"}}', '{"env_vars": {"A": null}}', '{"env_vars": {"": "1"}}', '{"working_dir": 5}'):
        p = verlc_exec(s, "ray", ["ray", "job", "submit", f"--runtime-env-json={text}", "--", "true"])
        test.refused(f"a runtime environment {text[:40]}", p, 2, "ray job submit")
    check_cluster(s, test)


def check_cluster(s, test):
    cluster = s.dir / "cluster"
    (cluster / "machine").mkdir(parents=True)
    fake = cluster / "ray"
    fake.write_text(FAKE_RAY)
    fake.chmod(0o755)

    def submit(command, *options, **env):
        p = verlc_exec(s, "ray", ["bash", "-c", f'MACHINE_PATH="$PATH"; export MACHINE_PATH; PATH="$PATH:{cluster}"; ' + command],
                       *options, MACHINE_PATH=os.environ["PATH"], **env)
        words = json.loads((cluster / "words.json").read_text()) if (cluster / "words.json").exists() else ["--"]
        return p, words[:words.index("--")], words[words.index("--") + 1:]

    want = "sqlite:////tmp/a b.db 2 ['two words', 'a=\"b\"']\n"
    p, options, command = submit(RAY)
    env = json.loads(options[options.index("--runtime-env-json") + 1])["env_vars"] if options else {}
    test("a ray that is installed gets the job, under verlc exec", p.stdout == want and command[:3] == ["verlc", "exec", "python3"]
         and {"--address=http://127.0.0.1:8265", "--submission-id=first", "--no-wait"} <= set(options), p.stdout + p.stderr)
    test("a job that is stopped has time to save, and the machine keeps its PATH", env.get("RAY_JOB_STOP_WAIT_TIME_S") == "600"
         and env["PATH"].endswith(":${PATH}") and "PYTHONPATH" not in env, str(env))
    (cluster / "machine/verlc").symlink_to(pathlib.Path(VERLC).resolve())
    p, _, _ = submit(RAY, OTHER_MACHINE="1")
    test("on another machine it is the verlc that is installed there", p.stdout == want, p.stdout + p.stderr)
    p, options, command = submit("ray job submit --runtime-env-json='{\"env_vars\": {\"RAY_JOB_STOP_WAIT_TIME_S\": \"9\"}}' "
                                 '-- OK="1 2" python3 -m verl.trainer.main_ppo no_such_key=1', "--set", "trainer.seed=[1, 2]")
    test("a job that is refused: its message and its exit status", p.returncode == 1 and "no_such_key" in p.stderr, p.stderr)
    test("--set and assignments go with the job", command[:5] == ["verlc", "exec", "--set=trainer.seed=[1, 2]", "env", "OK=1 2"]
         and '"RAY_JOB_STOP_WAIT_TIME_S": "9"' in options[-1], str(command))


def check_reward(s, test):
    file = s.dir / "my_reward.py"
    file.write_text(REWARD)
    script = s.dir / "run_grpo.sh"
    more = [f"custom_reward_function.path={file}", "trainer.default_local_dir=" + str(s.dir / "rewarded"),
            "trainer.rollout_data_dir=" + str(s.dir / "dump"), "reward.num_workers=1"]
    p = verlc_exec(s, "reward", ["bash", script, *more])
    rows = [json.loads(line) for line in (s.dir / "dump/1.jsonl").read_text().splitlines()] if p.returncode == 0 else []
    test("a reward file's verl.utils.reward_score", len(rows) == 8 and all(r["score"] == 2 and r["boxed"] and r["none"]
                                                                        for r in rows), p.stderr[-800:])


def check_prepare(s, test):
    p = verlc_exec(s, "data", ["python3", "recipes/gsm8k/data_preprocessing.py", "--local_save_dir", "~/data/gsm8k", "--help"])
    test("a preparation script that is not there", p.returncode == 0 and "verlc data gsm8k" in p.stdout, p.stderr)
    raw = s.dir / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"}) + "\n")
    p = verlc_exec(s, "data", ["python3", "examples/data_preprocess/gsm8k.py", "--local_dataset_path", raw, "--local_dir",
                               "~/data/gsm8k"])
    if p.returncode != 0 and "pyarrow" in p.stderr:
        print("skipped: parquet needs pyarrow, which scripts/setup.sh installs")
    else:
        test("verl's command makes the files", p.returncode == 0 and (s.dir / "home/data/gsm8k/train.parquet").exists(), p.stderr)
    p = verlc_exec(s, "data", ["python3", "examples/data_preprocess/geo3k.py", "--local_save_dir", "x"])
    test.refused("another that is not there", p, 2, "examples/data_preprocess/geo3k.py", "gsm8k alone")
    here = s.dir / "data/examples/data_preprocess"
    here.mkdir(parents=True)
    (here / "gsm8k.py").write_text("print('my own')\n")
    p = verlc_exec(s, "data", ["python3", "-S", "examples/data_preprocess/gsm8k.py"])
    test("a script that is there stays the user's", p.stdout == "my own\n", p.stdout + p.stderr)
    tools = here / "gsm8k_tool_agent_loop.py"
    tools.write_text(r"# openai/gsm8k calc_gsm8k_reward #### (\\-?[0-9\\.\\,]+)" + "\nimport datasets\n")
    p = verlc_exec(s, "data", ["python3", tools, "--help"])
    if p.returncode != 0 or p.stdout:  # the package datasets is not installed: the script cannot run
        test("verl's script for tools, where it cannot run", "usage: verlc data gsm8k" in p.stdout and
             "a system message of its own" in p.stderr, p.stdout + p.stderr)


def check_dapo(s, test):
    keys = ["data.gen_batch_size=8", "reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=4", "reward_model.overlong_buffer.penalty_factor=1.0",
            "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
            "+actor_rollout_ref.model.override_config.attention_dropout=0.",
            "+actor_rollout_ref.model.override_config.max_position_embeddings=32768", "--config-name=dapo_trainer"]
    args = [a for a in s.ppo("dapo") if a != "ppo"]
    p = verlc_exec(s, "dapo", ["python3", "-m", "recipe.dapo.main_dapo", *map(str, args), *keys], "--plan")
    test("DAPO's recipe with the keys of its scripts", p.returncode == 0 and "memory plan" in p.stdout, p.stderr[-500:])


def check_asynchronous(s, test):
    """The modules of verl's asynchronous trainers, with the keys of its scripts (shell/*.sh beside them)."""
    split = {"actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 4,
             "actor_rollout_ref.actor.strategy": "fsdp2", "critic.strategy": "fsdp2",
             "actor_rollout_ref.rollout.calculate_log_probs": True, "actor_rollout_ref.rollout.mode": "async"}
    args = s.ppo("one", **split)[1:]
    p = verlc_exec(s, "one", ["python3", "-m", "verl.experimental.one_step_off_policy.main_ppo", *map(str, args)], "--plan")
    test("one step off, with the keys of its scripts", p.returncode == 0 and "memory plan" in p.stdout, p.stderr[-500:])
    p = verlc_exec(s, "one", ["python3", "-m", "recipe.one_step_off_policy.async_main_ppo", "--config-path=config",
                              "--config-name=one_step_off_ppo_megatron_trainer.yaml", "--cfg", "job", *map(str, args)])
    test("its Megatron configuration", p.returncode == 0 and "model_engine: megatron" in p.stdout and
         "bypass_mode: true" in p.stdout, p.stderr[-500:])
    keys = {**split, "data.train_batch_size": 0, "data.gen_batch_size": 1, "data.return_raw_chat": True,
            "rollout.total_rollout_steps": 51200, "rollout.total_epochs": 10, "rollout.test_freq": 10,
            "async_training.staleness_threshold": 0.1,
            "async_training.trigger_parameter_sync_step": 4, "async_training.require_batches": 4,
            "async_training.partial_rollout": True,
            "async_training.use_rollout_log_probs": True}
    args = [a for a in s.ppo("fully", **keys)[1:] if not a.startswith("trainer.test_freq")]
    p = verlc_exec(s, "fully", ["python", "-m", "verl.experimental.fully_async_policy.fully_async_main", *map(str, args)],
                   "--plan")
    test("fully asynchronous, with the keys of its scripts",
         p.returncode == 0 and "memory plan" in p.stdout and "32 prompts" in p.stdout, p.stdout[-500:] + p.stderr[-500:])


def check_merger(s, test):
    p = verlc_exec(s, "merge", ["python3", "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", "nowhere",
                                "--target_dir", "out"])
    test("verl.model_merger with its arguments", p.returncode in (2, 3) and "nowhere" in p.stderr, p.stderr)


def check_refusals(s, test):
    p = verlc_exec(s, "no", ["python3", "-m", "recipe.async_flow.grpo_main", "a=b"])
    test.refused("a trainer that is not built", p, 2, "its transfer queue is not built")
    p = verlc_exec(s, "no", ["python3", "-m", "recipe.spo.spo_main_ppo", "a=b"])
    test.refused("a recipe with a loop of its own", p, 2, "spo_tool_agent")
    p = verlc_exec(s, "no", ["python3", "-m", "recipe.prime.main_prime", "a=b"])
    test.refused("a recipe's trainer", p, 2, "recipe.prime.main_prime", "not built")
    p = verlc_exec(s, "no", ["python3", "-c", "import verl.workers.engine"])
    test("Python on verl's insides",
         p.returncode == 1 and "verl.workers.engine: `verlc exec` stands in for verl" in p.stderr, p.stderr)
    p = verlc_exec(s, "no", ["python3", "-c", "import verl.trainer.main_ppo"])
    test("a program is nothing to import", p.returncode == 1 and "no Python in it to import" in p.stderr, p.stderr)
    test.refused("no command", verlc_exec(s, "no", []), 2, "no command")
    test.refused("a command that is not there", verlc_exec(s, "no", ["no-such-launcher"]), 2, "no-such-launcher")
    test.refused("an unknown option", verlc_exec(s, "no", ["--pln", "bash"]), 2, "--pln", "--plan")
    p = verlc_exec(s, "no", ["bash", "-c", "exit 7"])
    test("the command's exit status", p.returncode == 7)


# A machine with a verl in an environment's site-packages; {} passes the stand-in by.
INSTALLED = r"""
mkdir -p 'my env/bin' site/verl/trainer
echo 'print("the installed verl ran")' > site/verl/trainer/main_ppo.py
: > site/verl/__init__.py; : > site/verl/trainer/__init__.py
printf '#!/bin/sh\nexec "%s" "$@"\n' "$PYTHON" > 'my env/bin/python3'; chmod +x 'my env/bin/python3'
{}
"""
RESET = 'export PYTHONPATH="$PWD/site" PATH="$PWD/my env/bin:$PATH"\n'
REPAIR = 'export PATH="$VERLC_EXEC_DIR/bin:$PATH" PYTHONPATH="$VERLC_EXEC_DIR:$PYTHONPATH"\n'
PPO = "python3 -m verl.trainer.main_ppo nope=1"


def check_passed_by(s, test):
    """A verl that is installed never runs in silence."""
    real = os.path.realpath(sys.executable)
    clean = f'env -i PATH="${{PATH#*:}}" PYTHONPATH="$PWD/site" {PPO}'
    for what, script in (("PYTHONPATH and an environment", RESET + PPO), ("env -i", clean),
                         ("an interpreter by its path", f'PYTHONPATH="$PWD/site" "{real}" -m verl.trainer.main_ppo'),
                         ("python -I", 'python3 -I -c "import sys; sys.path.insert(0, \'site\'); import verl.trainer.main_ppo"')):
        p = verlc_exec(s, "passed", ["bash", "-c", INSTALLED.replace("{}", script)], PYTHON=real)
        test(f"{what}: said, and the status is not 0", p.returncode == 2 and p.stdout == "the installed verl ran\n" and
             p.stderr.count("error: nothing of verl was started through `verlc exec`") == 1, p.stdout + p.stderr)
    p = verlc_exec(s, "passed", ["bash", "-c", INSTALLED.replace("{}", RESET + REPAIR + PPO)], PYTHON=real)
    test.refused("what --help says to put into the script", p, 2, "there is no key nope")
    p = verlc_exec(s, "passed", ["bash", "-c", f'. "$PWD/my env/activate" 2>/dev/null; PATH="$PWD/my env/bin:$PATH" {PPO}'])
    test.refused("an environment alone passes nothing by", p, 2, "there is no key nope")
    p = verlc_exec(s, "passed", ["true"], "--allow-nothing")
    test("--allow-nothing", p.returncode == 0 and p.stderr == "", p.stderr)
    p = verlc_exec(s, "passed", ["bash", "-c", "exit 7"])
    test("a command that failed keeps its status", p.returncode == 7 and "note: nothing of verl" in p.stderr, p.stderr)
    p = verlc_exec(s, "passed", ["python3", "-c", "import verl.utils.reward_score"])
    test("Python that imports verl is no program of it", p.returncode == 0 and "note: no program of verl" in p.stderr, p.stderr)
    p = verlc_exec(s, "passed", ["bash", "-c", f"{{ sleep 0.5; {PPO}; }} & exit 0"])
    test("what a script leaves in the background counts", p.returncode == 0 and "nothing of verl" not in p.stderr, p.stderr)
    p = verlc_exec(s, "passed", ["bash", "-c", f"{VERLC} exec {PPO} || true"])
    test("one in another is told", p.returncode == 0 and "nothing of verl" not in p.stderr, p.stderr)


def check_shims(s, test):
    """The stand-ins on PATH need no program, and never start themselves."""
    d = s.dir / "shims"
    (d / "only").mkdir(parents=True)
    (d / "only/python3").symlink_to(os.path.realpath(sys.executable))
    (d / "only/torchrun").write_text('#!/bin/sh\necho "real torchrun" "$@"\n')
    (d / "only/torchrun").chmod(0o755)
    (d / "back").mkdir()
    (d / "back/python3").write_text('#!/bin/sh\nexec python3 "$@"\n')
    (d / "back/python3").chmod(0o755)
    print5 = 'python3 -c "print(5)"'
    other = 'ln -sfn "$VERLC_EXEC_DIR/bin" link; mkdir -p copy; cp "$VERLC_EXEC_DIR/bin/"* copy; ln -sf "$VERLC_EXEC_DIR/bin/"* .;'
    bin = "$VERLC_EXEC_DIR/bin"
    for what, script, want in (
            ("PATH without dirname", f'PATH="{bin}:{d}/only"; {print5}', "5\n"),
            ("python is python3 where there is no other", f'PATH="{bin}:{d}/only"; python -c "print(5)"', "5\n"),
            ("a trailing slash, //, .", f'PATH="{bin}/:$VERLC_EXEC_DIR//bin:$VERLC_EXEC_DIR/./bin:{d}/only"; {print5}', "5\n"),
            ("a link to the directory", f'{other} PATH="$PWD/link:{d}/only"; {print5}', "5\n"),
            ("a relative one, and the empty name of the current directory", f'{other} PATH="link::copy:{d}/only"; {print5}', "5\n"),
            ("links to the files, copies of them", f'{other} PATH="$PWD:$PWD/copy:{bin}:{d}/only"; {print5}', "5\n"),
            ("a launcher by another spelling", f'{other} PATH="{bin}:link:copy:$PWD:{d}/only:$PATH"; torchrun --version',
             "real torchrun --version\n"),
            ("a wrapper that leads back", f'PATH="{bin}:{d}/back:{d}/only"; {print5}', "5\n")):
        p = verlc_exec(s, "shims", ["bash", "-c", script], "--allow-nothing")
        test(what, p.stdout == want, p.stdout + p.stderr)
    p = verlc_exec(s, "shims", ["bash", "-c", f'PATH="{bin}:{d}/back"; {print5}'])
    test("nothing else on PATH", p.returncode == 127 and p.stdout == "" and "again and again" in p.stderr, p.stderr)
    p = verlc_exec(s, "shims", ["bash", "-c", f"PYTHONPATH=$PWD/mine:$PYTHONPATH {PPO}"])
    (d / "mine").mkdir()
    (d / "mine/sitecustomize.py").write_text("print('hidden')\n")
    p = verlc_exec(s, "shims", ["bash", "-c", f"PYTHONPATH=$PWD/mine:$PYTHONPATH {PPO}"])
    test.refused("a sitecustomize in front of the stand-in's", p, 2, "there is no key nope")
    p = verlc_exec(s, "shims", ["python3", "-m", "verl.trainer.main_ppo", b"data.x=\xff\xfe"])
    test("an argument that is not UTF-8", p.returncode == 2 and "Traceback" not in p.stderr, p.stderr)


def check_signals(s, test):
    """One request to stop is one, on whatever ways it comes: the step is saved."""
    args = [a for a in s.ppo("stopped", trainer__total_training_steps=100000, trainer__save_freq=-1) if a != "ppo"]
    for what, send in (("the process", lambda p: os.kill(p.pid, signal.SIGTERM)),
                       ("its whole group", lambda p: os.killpg(p.pid, signal.SIGTERM))):
        shutil.rmtree(s.dir / "stopped", ignore_errors=True)
        p = subprocess.Popen([VERLC, "exec", "python3", "-m", "verl.trainer.main_ppo", *map(str, args)], env=ENV, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        for line in p.stdout:
            if line.startswith("step:1 "):
                break
        send(p)
        _, err = p.communicate(timeout=120)
        test(f"SIGTERM to {what}", p.returncode == 143 and list((s.dir / "stopped").glob("global_step_*")) != [],
             f"{p.returncode} {err[-500:]}")
    p = subprocess.Popen([VERLC, "exec", "sleep", "60"], env=ENV, stderr=subprocess.DEVNULL)
    waited(lambda: "sleep 60" in below(p.pid).values())
    p.send_signal(signal.SIGINT)
    test("ends by the signal that ended the command", p.wait(timeout=300) == -signal.SIGINT)


def main():
    test = Tests()
    with Scratch(n_train=8, n_test=4) as s:
        (s.dir / "home").mkdir()
        check_ppo(s, test)
        check_config_file(s, test)
        check_sft(s, test)
        check_ray(s, test)
        check_reward(s, test)
        check_prepare(s, test)
        check_dapo(s, test)
        check_asynchronous(s, test)
        check_merger(s, test)
        check_refusals(s, test)
        check_passed_by(s, test)
        check_shims(s, test)
        check_signals(s, test)
    test.end()


main()
