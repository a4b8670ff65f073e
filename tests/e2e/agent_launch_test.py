"""A launch of tool_agent as users of verl have them, from the rows to two steps of training, under `verlc exec`: verl's name of the
preparation script, a YAML of the user over ppo_trainer, verl's tool by its old class path. And the keys of older launches."""

import json
import pathlib
import sqlite3
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import calling_model  # noqa: E402
from verlc_test import ENV, VERLC, Scratch, Tests, series  # noqa: E402

TOOL = "calc_gsm8k_reward"
CALLS = [f'<tool_call>{{"name": "{TOOL}", "arguments": {{"answer": "{x}"}}}}</tool_call>' for x in range(1, 5)]
CONFIG = """hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_prompt_length: 768
  max_response_length: 512
  return_raw_chat: True

actor_rollout_ref:
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 3
"""
OLD = """      format: qwen
    sglang_rollout_mode: server
    server:
      timeout: 60
      max_start_wait_time: 300.0
"""
TOOLS = f"""tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: {TOOL}
        description: The reward of an answer.
        parameters:
          type: object
          properties:
            answer: {{type: string, description: a number}}
          required: [answer]
"""
LAUNCH = r"""set -x
HERE="$(pwd)"
python3 -m verl.trainer.main_ppo \
    --config-path="$HERE/config" --config-name=${CONFIG:-multiturn} \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/${ROWS_OF:-agent}/train.parquet \
    data.val_files=$HOME/data/${ROWS_OF:-agent}/test.parquet \
    data.train_batch_size=2 data.filter_overlong_prompts=True data.truncation=error data.shuffle=False \
    actor_rollout_ref.model.path=$CALLS \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.over_sample_rate=0.1 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/config/tools.yaml" \
    global_profiler.tool=torch_memory \
    trainer.logger='["console","file"]' trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.device=cpu trainer.save_freq=-1 \
    trainer.val_before_train=False trainer.total_training_steps=2 trainer.default_local_dir=$HERE/${ROWS_OF:-agent} "$@"
"""


def verlc_exec(s, command, *options, **env):
    env = {**ENV, "HOME": str(s.dir / "home"), "CALLS": str(s.dir / "calls"), **env}
    return subprocess.run([str(pathlib.Path(VERLC).resolve()), "exec", *options, *map(str, command)], cwd=s.dir / "launch", env=env,
                          capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def episodes(run_dir):
    """(prompt, record or None) of each sample."""
    with sqlite3.connect(run_dir / "run.db") as db:
        return [(p, e and json.loads(e)) for p, e in db.execute("SELECT prompt, episode FROM samples ORDER BY step, uid, sample")]


def prepare(s):
    """The rows, by both scripts' names; False: no pyarrow."""
    for split in ("train", "test"):
        s.write(f"raw/{split}.jsonl", [{"question": f"{x} + 1?", "answer": f"#### {x + 1}"} for x in range(1, 5)])
    for name, script in (("agent", "gsm8k_tool_agent_loop.py"), ("plain", "gsm8k.py")):
        p = verlc_exec(s, ["python3", f"examples/data_preprocess/{script}", "--local_dataset_path", s.dir / "raw",
                                     "--local_save_dir", f"~/data/{name}"])
        if p.returncode != 0 and "pyarrow" in p.stderr:
            return False
        assert p.returncode == 0, p.stderr
    return True


def trains(s, test, launch):
    p = verlc_exec(s, launch)
    test("the launch trains", p.returncode == 0, p.stderr[-900:])
    got = episodes(s.dir / "launch/agent")
    calls = [(r, c) for r in got for c in r[-1]["calls"]]
    test("every episode of both steps calls the tool twice", len(got) == 8 and len(calls) == 16 and
         all(r["turns"] == 6 and r["end"] == "max_assistant_turns" for _, r in got), [r for _, r in got if r["turns"] != 6][:2])
    right = {c["arguments"]: set() for _, c in calls}
    for r, c in calls:
        right[c["arguments"]].add((r[0].split("user\n")[1].split(" +")[0], c["result"], c["reward"]))
    want = {f'{{"answer": "{n}"}}': (n, x) for n in range(1, 5) for x in range(1, 5)}
    test("the tool is verl's, with the row's ground truth", calls and all(
        result == f"Current parsed answer='{want[arguments][0]}' reward={float(int(x) + 1 == want[arguments][0])}" and
        reward == (0.0 if int(x) + 1 == want[arguments][0] else -0.05)
        for arguments, found in right.items() for x, result, reward in found), right)
    turns = series(s.dir / "launch/agent", "num_turns/mean")
    test("in the metrics", turns == [6, 6], turns)


def without_agent_name(s, test, launch):
    p = verlc_exec(s, launch, "--set", "trainer.total_training_steps=1", ROWS_OF="plain")
    test("rows without agent_name: one turn, and the cure is said", p.returncode == 0 and
         "default_agent_loop=tool_agent, or give rows a column agent_name with tool_agent" in p.stderr and
         [r[-1] for r in episodes(s.dir / "launch/plain")] == [None] * 4, p.stderr[-900:])


def old_keys(s, test, launch):
    p = verlc_exec(s, launch, "--plan", CONFIG="server")
    notes = [line for line in p.stderr.splitlines() if line.startswith("note: ")]
    test("keys of older launches: a note each", p.returncode == 0 and "memory plan" in p.stdout and
         not any("nothing reads" in line for line in notes) and all(
             any(key in line and what in line for line in notes) for key, what in (
                 ("sglang_rollout_mode", "verlc's own engine"), ("server.timeout", "verlc's own engine"),
                 ("over_sample_rate", "verlc's own engine"), ("multi_turn.format=qwen", "hermes"))), p.stderr)


def main():
    test = Tests()
    with Scratch() as s:
        calling_model(s.dir / "model", s.dir / "calls", calls=30.0, texts=CALLS)
        (s.dir / "launch/config").mkdir(parents=True)
        (s.dir / "raw").mkdir()
        if not prepare(s):
            print("skipped: parquet needs pyarrow, which scripts/setup.sh installs")
            sys.exit(77)
        for name, text in (("config/multiturn.yaml", CONFIG), ("config/server.yaml", CONFIG + OLD), ("config/tools.yaml", TOOLS),
                           ("run.sh", LAUNCH)):
            (s.dir / "launch" / name).write_text(text)
        launch = ["bash", "run.sh"]
        trains(s, test, launch)
        without_agent_name(s, test, launch)
        old_keys(s, test, launch)
    test.end()


main()
