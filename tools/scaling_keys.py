#!/usr/bin/env python3
"""The table in docs/scaling.md of what keys of verl about ranks, shards and pools do here, from the tables of keys themselves
(`verlc ... --help all`): honoured, noted with what holds instead, or refused.

    python3 tools/scaling_keys.py VERLC [--write]    prints the table, or writes it into docs/scaling.md
"""

import pathlib
import re
import subprocess
import sys

DOC = pathlib.Path(__file__).resolve().parents[1] / "docs/scaling.md"
BEGIN, END = "<!-- tools/scaling_keys.py -->\n", "<!-- end -->\n"
PROGRAMS = [["ppo"], ["ppo", "model_engine=megatron"], ["ppo", "model_engine=veomni"],
            ["ppo", "--config-name=one_step_off_ppo_trainer"], ["sft"], ["sft", "engine=megatron"],
            ["sft", "engine=veomni"], ["sft", "engine=automodel"], ["generate", "model.path=M"]]
# Of a path: what is asked for of ranks; how state is sharded; how a model or a sequence is split; what a micro-batch is; pools.
ABOUT = [
    r"trainer\.(nnodes|n_gpus_per_node|ranks|device|layout|max_restarts|controller)", r"(critic|actor_rollout_ref)\.nccl_timeout",
    r"ray_kwargs\..*", r"trainer\.ray_wait_register_center_timeout",
    r".*\.(param_offload|optimizer_offload|offload_policy|enable_fsdp_offload|grad_offload|cpu_offload|offload_params)",
    r".*\.(fsdp_size|reshard_after_forward|forward_prefetch|enable_full_shard|use_distributed_optimizer|use_megatron_fsdp)",
    r".*\.(use_no_sync_for_gradient_accumulation|defer_fsdp_grad_sync|use_orig_params|override_ddp_config|dp_replicate_size)",
    r".*\.(strategy|distributed_strategy|fully_shard_parallel_size|expert_fully_shard_parallel_size)",
    r".*\.num_to_(forward|backward)_prefetch",
    r".*\.[a-z_]*(ulysses|tensor|pipeline|context|expert|data|sequence)(_model|_sequence)?_parallel(_size)?",
    r".*\.ulysses_parallel_size", r".*\.(tp|pp|cp|ep)_size", r".*\.max_seqlen_per_dp_cp_rank", r"ulysses_sequence_parallel_size",
    r".*\.(use_dist_checkpointing|dist_checkpointing_\w+|dist_ckpt_\w+|distrib_optim_\w+)",
    r".*\.(use_remove_padding|pad_mode|use_dynamic_bsz|log_prob_use_dynamic_bsz|ppo_mini_batch_size)",
    r".*micro_batch_size(_per_gpu)?", r".*\.grad_chunk", r".*max_token_len_per_gpu", r".*\.(balance_batch|balance_dp_token)",
    r"actor_rollout_ref\.rollout\.(nnodes|n_gpus_per_node|gpu_memory_utilization|max_num_seqs|disaggregation\.enabled)",
    r"actor_rollout_ref\.hybrid_engine", r"reward\.reward_model\.enable_resource_pool",
    r"(reward\.reward_model|distillation|critic|rollout)\.(nnodes|n_gpus_per_node|ranks)",
    r"distillation\.teacher_models\.teacher_model\.num_replicas", r"transfer_queue\.enable",
]
ABOUT = re.compile("|".join(f"(?:{a})" for a in ABOUT))


def rows(verlc, program):
    """{key: (default, type, status, text)} of what is about ranks; status used, noted or refused."""
    out = subprocess.run([verlc, *program, "--help", "all"], capture_output=True, text=True, check=True).stdout
    found = {}
    for m in re.finditer(r"^\+?([\w.-]+)=(.*)\n    ([^;\n]*); (.*)$", out, re.M):
        key, default, kind, text = m.groups()
        status, text = next(((s, text.removeprefix(p)) for p, s in (("noted: ", "noted"), ("fixed: ", "refused"),
                                                                   ("older name of ", "older")) if text.startswith(p)),
                            ("used", text))
        if status != "older" and not text.startswith("removed in verl") and ABOUT.fullmatch(key):
            found[key] = default, kind, status, text
    return found


ENGINES = re.compile(r"(actor|ref|critic)(\.(fsdp_config|fsdp|megatron|veomni))?|engine")


def places(groups):
    """" of `a`, `b`": where the names of a cell stand; several engines' groups by one word."""
    if not all(g.startswith("ref.") for g in groups) and len(groups) > 2 and all(
            ENGINES.fullmatch(g.split(".turbo_config")[0]) for g in groups):
        more = {g.partition(".turbo_config")[2] for g in groups} - {""}
        return " of the engines' groups" + (", there in `turbo_config" + more.pop() + "` too" if more else "")
    return " of " + ", ".join(f"`{g}`" for g in groups) if groups[0] else ""


def table(verlc):
    """Rows of Markdown: keys of the same meaning together, their groups behind the name."""
    meaning = {}  # (status, text) -> {leaf: groups}
    for program in PROGRAMS:
        for key, (_, _, status, text) in rows(verlc, program).items():
            group, _, leaf = key.removeprefix("actor_rollout_ref.").rpartition(".")
            if key.startswith("rollout."):
                leaf = key  # the pool's, not actor_rollout_ref.rollout
                group = ""
            groups = meaning.setdefault((status, text), {}).setdefault(leaf, [])
            if group not in groups:
                groups.append(group)
    lines = ["| keys | here |\n", "|---|---|\n"]
    for status in ("used", "noted", "refused"):
        for (s, text), leaves in meaning.items():
            if s != status:
                continue
            by_groups = {}
            for leaf, groups in leaves.items():
                by_groups.setdefault(places(groups), []).append(leaf)
            cell = "; ".join(" ".join(f"`{leaf}`" for leaf in names) + where for where, names in by_groups.items())
            text = text.replace("|", "\\|")
            lines.append(f"| {cell} | {'' if status == 'used' else f'**{status}**: '}{text} |\n")
    return "".join(lines)


def main():
    text = table(sys.argv[1])
    if sys.argv[2:] != ["--write"]:
        print(text, end="")
        return
    before, rest = DOC.read_text().split(BEGIN)
    DOC.write_text(before + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
