"""Invariant 11, with a reward model or a judge that ranks have together: a classifier, a generative judge with a template and a
served one, beside ranks that generate alone or together, and in a pool of their own, give the scores and files of one rank. What
cannot be split is said; the plan splits what does not fit."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import ASK, first_difference
from verlc_test import Scratch, Tests, reward_dir, run

STEPS = 2
A, RM = "actor_rollout_ref.", "reward.reward_model."
TOGETHER = RM + "rollout.tensor_model_parallel_size"


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "ask.py").write_text(ASK)
        model = {RM + "enable": True, "reward.num_workers": 1}
        pool = {RM + "enable_resource_pool": True}
        judge = {**model, RM + "model_path": s.dir / "model", RM + "rollout.response_length": 12}
        cases = {
            "classifier": ({**model, RM + "model_path": reward_dir(s, "rm"), RM + "micro_batch_size_per_gpu": 2},
                           ((3, 3, {}), (4, 2, {A + "rollout.tensor_model_parallel_size": 2, "trainer.layout": "sharded"}))),
            "judge": ({**judge, RM + "prompt_template": "'Q {question} A {response}'", RM + "rollout.response_length": 64,
                       "data.max_response_length": 120},
                      ((2, 2, {}), (4, 4, {A + "rollout.tensor_model_parallel_size": 2, "trainer.layout": "sharded"}),
                       (1, 2, {RM + "ranks": 2, **pool}))),
            "served judge": ({**judge, "reward.custom_reward_function.path": s.dir / "ask.py"},
                             ((2, 2, {}), (1, 3, {RM + "ranks": 3, **pool}))),
        }
        for name, (keys, runs) in cases.items():
            keys = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.device": "cpu",
                    A + "actor.ppo_micro_batch_size_per_gpu": 1, **keys}
            one = s.dir / name.replace(" ", "_")
            go = lambda d, more: run(*s.ppo(d, **{k.replace(".", "__"): v for k, v in {**keys, **more}.items()}), check=False)
            p = go(one, {"trainer.ranks": 1})
            test(f"{name}: one rank", p.returncode == 0, p.stderr[-800:])
            for i, (n, together, more) in enumerate(runs):
                d = pathlib.Path(f"{one}_{i}")
                p = go(d, {"trainer.ranks": n, TOGETHER: together, **more})
                said = f"reward model: {together} ranks have it together" in p.stdout + p.stderr
                why = p.stderr[-1200:] if p.returncode or not said else first_difference(one, d, STEPS)
                test(f"{name}: {together} ranks have it, {n} train, {more}: as one", not why, why)
        check_plan(s, test, cases["judge"][0])
    test.end()


def check_plan(s, test, judge):
    """A judge of 70B: whole where it fits, else over as few GPUs as do."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128}
    shutil.copytree(s.dir / "model", s.dir / "wide", ignore=shutil.ignore_patterns("*.safetensors"))
    (s.dir / "wide/config.json").write_text(json.dumps(json.loads((s.dir / "model/config.json").read_text()) | wide))
    keys = {**judge, RM + "model_path": s.dir / "wide", A + "actor.fsdp_config.dtype": "bfloat16", "trainer.n_gpus_per_node": 4,
            A + "actor.ppo_micro_batch_size_per_gpu": 1}
    for gpu, asked, said in (("200GB", None, None), ("100GB", None, "2 ranks have it together: with 1 a rank needs"),
                             ("60GB", None, "4 ranks have it together: with "),
                             ("80GB", 3, "whole on each rank, not the 3 asked for: it does not divide the ranks")):
        args = [f"{k}={v}" for k, v in {**keys, **({TOGETHER: asked} if asked else {})}.items()]
        p = run("plan", "--gpu", gpu, "--gpus", 4, *s.ppo(s.dir / "plan")[1:], *args, check=False)
        lines = [x.strip() for x in p.stdout.splitlines() if x.startswith("  reward model: ")]
        test(f"plan: {gpu}, {asked}: {said}", len(lines) == (said is not None) and (not said or said in lines[0]),
             p.stdout[-1500:] + p.stderr[-300:])


main()
