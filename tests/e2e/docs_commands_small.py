"""`verlc` as the pages of docs_commands_test.py find it: the command in a size that runs in a moment. It imports next to nothing,
for it starts with each of their commands.

  docs_commands_small.py VERLC ARGUMENT..."""

import os
import sys

GRPO = ["algorithm.adv_estimator=grpo", "data.train_files=train.jsonl", "data.val_files=test.jsonl", "data.train_batch_size=4",
        "data.max_prompt_length=64", "data.max_response_length=8", "actor_rollout_ref.model.path=DIR",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.name=verlc", "actor_rollout_ref.rollout.n=2", "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]"]
SFT = ["data.train_files=chats.jsonl", "data.train_batch_size=4", "data.max_length=64", "model.path=DIR"]


def small(args):
    """The command in a size that runs in a moment."""
    keys = SFT if args[0] == "sft" or any("sft_trainer" in a for a in args) else GRPO
    args = [b for a in args for b in (keys if a in ("...", "KEYS", "KEY=VALUE...") else [a.replace("{...}", "{}")])]
    program, rest = args[0], args[1:]
    if program in ("ppo", "sft") and not {"--help", "--cfg"} & set(rest):
        return ["plan", program, *rest]
    if program == "exec" and any(a.endswith("data_preprocessing.py") for a in rest) or program == "data":
        return [*args, "--local_dataset_path", "raw"]
    if program == "exec" and "--plan" not in rest:
        return ["exec", "--plan", *rest]
    if program == "generate" and any("=" in a for a in rest):
        server = any(a.startswith("actor_rollout_ref.") for a in rest)
        return [*args, ("actor_rollout_ref." if server else "") + "rollout.response_length=4"]
    if program == "show":  # the run here has one step, and prompts of its own
        import sqlite3
        uid, k = sqlite3.connect("RUN/run.db").execute("SELECT uid, sample FROM samples WHERE validation=0").fetchone()
        return [{"12": "1", "33.1": f"{uid}.{k}"}.get(a, a) for a in args]
    if program == "netcheck" and "--seconds" not in rest:
        return [*args, "--seconds", "0.005"]
    if program == "selftest":  # run by make test
        return [program, "--help"]
    return args


if __name__ == "__main__":
    os.execv(sys.argv[1], ["verlc", *small(sys.argv[2:])])
