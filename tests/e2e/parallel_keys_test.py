"""What verl's keys about ranks, shards and pools do here: docs/scaling.md has the table that the key tables make; each key that
is noted says so once, each that is refused is refused with its reason; the rules about batch sizes count as verl does."""

import os
import pathlib
import sys

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
import scaling_keys  # noqa: E402
from verlc_test import VERLC, Scratch, Tests, reward_dir, run  # noqa: E402


def another(default, kind):
    """A value of this type that is not the default."""
    if kind.startswith("bool"):
        return "false" if default == "true" else "true"
    if "dict" in kind:
        return "{a: 1}"
    if kind.startswith("list"):
        return "[1]"
    return "no_padding_at_all" if kind == "str" else "3"


def check_notes(test, program):
    rows = scaling_keys.rows(VERLC, program)
    noted = {k: r for k, r in rows.items() if r[2] == "noted"}
    keys = [f"++{k}={another(d, kind)}" for k, (d, kind, _, _) in noted.items()]
    p = run(*program, "--cfg", "job", *keys, check=False)
    said = [line for line in p.stderr.splitlines() if line.startswith("note: ")]
    bad = []
    for key, (_, _, _, text) in noted.items():
        mine = [line for line in said if {key, key + ".a"} & set(line.removeprefix("note: ").removesuffix(text)[:-2].split(", "))]
        if len(mine) != 1 or not mine[0].endswith(text):
            bad.append(f"{key}: {mine}")
    name = " ".join(program)
    test(f"{name}: {len(noted)} keys are noted, each in one line", p.returncode == 0 and noted and not bad,
         "\n".join(bad[:3]) + p.stderr[-300:])
    for key, (default, kind, status, text) in rows.items():
        if status == "refused":
            p = run("plan", *program, f"{key}={another(default, kind)}", check=False)
            test.refused(f"{name}: {key}", p, 2, key, text)


def check_rules(s, test):
    """Sizes that verl takes with a split, and one that neither takes; a size of all GPUs is one of each rank."""
    keys = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.rollout.n": 1,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4, "trainer.n_gpus_per_node": 8, "trainer.device": "cpu"}
    base = [a for a in s.ppo("plan")[1:] if a.split("=")[0] not in keys]

    def plan(*more, **change):
        given = {**keys, **{k.replace("__", "."): v for k, v in change.items()}}
        return run("plan", *base, *[f"{k}={v}" for k, v in given.items() if v is not None], *more, check=False)

    test.refused("a mini-batch of 8 on 8 GPUs, micro-batches of 4", plan(), 2, "must be divisible by", "(4)")
    for group in ("", "fsdp_config."):
        p = plan(f"actor_rollout_ref.actor.{group}ulysses_sequence_parallel_size=4")
        ok = p.returncode == 0 and "context parallel: 1, there is one rank; gradients are summed in 4 parts" in p.stdout
        test(f"the same with sequences over 4 GPUs ({group or 'actor.'})", ok, p.stderr[-600:])
    p = plan("model_engine=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
             "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2")
    test("the same with a model over 2 x 2", p.returncode == 0 and "ranks take micro-batches in turn" in p.stderr, p.stderr[-600:])
    p = plan(trainer__n_gpus_per_node=2, actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=None,
             actor_rollout_ref__actor__ppo_micro_batch_size=4)
    said = "note: actor_rollout_ref.actor.ppo_micro_batch_size=4: each rank's micro-batches have so many samples, whatever"
    test("a size of all GPUs is one of each rank", p.returncode == 0 and p.stderr.count(said) == 1, p.stderr[-600:])


def check_pools(s, test):
    """A pool that does not come about is said."""
    rm = "reward.reward_model."
    model = {rm + "enable": True, rm + "model_path": reward_dir(s, "rm")}
    for keys, said in (({"distillation.ranks": 1}, "distillation.ranks=1: no effect without distillation.enabled=True"),
                       ({rm + "ranks": 1}, f"{rm}ranks: no effect without {rm}enable=True"),
                       ({**model, rm + "ranks": 1}, f"{rm}ranks=1: no effect without {rm}enable_resource_pool=True"),
                       ({**model, rm + "enable_resource_pool": True}, f"{rm}enable_resource_pool=True: no effect, as"),
                       ({**model, rm + "enable_resource_pool": True, rm + "ranks": 1}, "")):
        p = run("plan", *s.ppo("plan", **{"trainer.device": "cpu", **keys})[1:])
        notes = [line for line in p.stderr.splitlines() if "no effect" in line]
        test(f"said: {said or 'nothing'}", len(notes) == (said != "") and said in p.stderr, p.stderr[-500:])


def check_megatron_offload(s, test):
    """Megatron's options for an optimizer in host memory, in whose place optimizer_offload stands."""
    options = "actor_rollout_ref.actor.optim.override_optimizer_config"
    keys = [f"+{options}.{k}" for k in ("optimizer_offload_fraction=1", "overlap_cpu_optimizer_d2h_h2d=True",
                                        "use_precision_aware_optimizer=True")]
    plans = [run("plan", "--gpu", "24GB", *s.ppo("plan")[1:], "model_engine=megatron", *more) for more in
             (["actor_rollout_ref.actor.megatron.optimizer_offload=True"], [*keys, f"+{options}.optimizer_cpu_offload=True"],
              [*keys, f"+{options}.optimizer_cpu_offload=False"])]
    test("Megatron's optimizer_cpu_offload is optimizer_offload", plans[0].stdout == plans[1].stdout and
         "; in host memory" in plans[0].stdout and "; in host memory" not in plans[2].stdout, plans[1].stdout)
    test("its other options are said", plans[1].stderr.count("optimizer_cpu_offload holds") == 1, plans[1].stderr)


def main():
    test = Tests()
    table = scaling_keys.DOC.read_text().split(scaling_keys.BEGIN)[1].split(scaling_keys.END)[0]
    test("docs/scaling.md has the table of now (tools/scaling_keys.py writes it)", table == scaling_keys.table(VERLC))
    for program in scaling_keys.PROGRAMS:
        check_notes(test, program)
    with Scratch() as s:
        check_rules(s, test)
        check_pools(s, test)
        check_megatron_offload(s, test)
    test.end()


main()
