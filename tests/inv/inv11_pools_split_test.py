"""Invariant 11, with pools whose ranks generate together (tensor parallel): one step off, with the trainer's weights whole and
sharded, of other families and with an adapter, every file, metric and sample is that of one rank. A fully asynchronous run draws as
time has it; its record replays bitwise on one rank. A rank that is lost ends the run by name; what cannot be split is said.
And with a critic or a teacher sharded over the ranks of its pool."""

import json
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ranks import below, experts_model, family_model, first_difference  # noqa: E402
from verlc_test import Scratch, Tests, patience, run, series, start, state, waited  # noqa: E402

A = "actor_rollout_ref."
TOGETHER = A + "rollout.tensor_model_parallel_size"


def one_off(s, name, **keys):
    keys = {A + "actor.use_kl_loss": True, A + "actor.optim.lr": 1e-3, "trainer.total_training_steps": 3, "trainer.save_freq": 3,
            "trainer.test_freq": 3, "trainer.device": "cpu", A + "actor.ppo_micro_batch_size_per_gpu": 1, **keys}
    args = s.ppo(name, **keys)
    return [args[0], "--config-name=one_step_off_ppo_trainer", *args[1:]]


def pools(train, rollout, together, layout="auto"):
    return {"trainer.ranks": train, "rollout.ranks": rollout, TOGETHER: together, "trainer.layout": layout}


def schedule(s, test):
    bf16 = {A + "model.path": family_model(s, "gemma3"), A + "actor.fsdp_config.dtype": "bfloat16", A + "actor.use_kl_loss": False}
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
               "norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": False}
    cases = {"f32": ({}, ((1, 2, 2, "whole"), (2, 3, 3, "sharded"), (2, 4, 2, "ref"))),
             "bf16": (bf16, ((2, 2, 2, "sharded"),)),
             "experts": ({A + "model.path": experts_model(s, keys=experts)}, ((1, 2, 2, "whole"), (2, 2, 2, "sharded"))),
             "an adapter": ({A + "model.lora_rank": 4}, ((2, 2, 2, "sharded"), (1, 3, 3, "whole")))}
    for name, (keys, runs) in cases.items():
        one = s.dir / name.replace(" ", "_")
        run(*one_off(s, one, **keys))
        for shape in runs:
            d = pathlib.Path("_".join(map(str, (one, *shape))))
            p = run(*one_off(s, d, **keys, **pools(*shape)), check=False)
            said = f"{shape[2]} ranks generate together" in p.stdout + p.stderr and (
                shape[3] != "sharded" or "layout sharded: " in p.stdout + p.stderr)
            why = p.stderr[-1200:] if p.returncode or not said else first_difference(one, d, 3)
            if not p.returncode and set(series(d, "perf/device_allocations")) != {0}:
                why = "device memory is allocated after the start"
            test(f"{name}: {shape[0]} train, {shape[3]}, and {shape[1]} generate, {shape[2]} together: as one rank", not why, why)


def fully(s, test):
    def args(name, **keys):
        keys = {A + "actor.use_kl_loss": False, "data.train_batch_size": 0, "data.max_response_length": 24,
                "async_training.trigger_parameter_sync_step": 2, "async_training.staleness_threshold": 1,
                "rollout.total_rollout_steps": 24, "async_training.partial_rollout": True, A + "actor.optim.lr": 1e-3,
                "trainer.device": "cpu", A + "actor.ppo_micro_batch_size_per_gpu": 1, **keys}
        line = [a for a in s.ppo(name, **keys) if not a.startswith("trainer.total_training_steps")]
        return [line[0], "--config-name=fully_async_ppo_trainer", *line[1:]]

    run(*args("async", **pools(1, 2, 2)))
    run(*args("replayed", **{"async_training.replay": s.dir / "async"}))
    test("a fully asynchronous run's record, replayed on one rank: the same tokens, log-probs and weights",
         state(s.dir / "async", 6) == state(s.dir / "replayed", 6))


def said(s, test):
    for keys, why in (({**pools(1, 2, 3)}, "not the 3 asked for: it does not divide the ranks"),
                      ({**pools(1, 2, 2), A + "model.lora_rank": 4, A + "model.quantization": "nf4"},
                       "not the 2 asked for: the base is quantised")):
        p = run("plan", *one_off(s, "plan", **keys), check=False)
        test(f"plan: {why}", f"tensor parallel: 1, {why}" in p.stdout, p.stdout[-1500:] + p.stderr[-300:])


def refused(s, test):
    """A pool that is too small for its model is told how many ranks would have room."""
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
              "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
              "vocab_size": 152064, "tie_word_embeddings": False, "eos_token_id": 1}
    (s.dir / "7b").mkdir()
    (s.dir / "7b/config.json").write_text(json.dumps(config))
    bf16 = {A + "actor.use_kl_loss": False, A + "actor.fsdp_config.dtype": "bfloat16", "trainer.n_gpus_per_node": 1}
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "7b"}
    teacher = {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": s.dir / "7b"}
    for group, gpu, keys in (("critic", "80GB", critic), ("distillation", "16GB", teacher)):
        fits, said = {}, ""
        for gpus in (1, 2, 3):
            own = {f"{group}.nnodes": 1, f"{group}.n_gpus_per_node": gpus}
            p = run("plan", "--gpu", gpu, *s.ppo("plan", **bf16, **keys, **own)[1:], check=False)
            fits[gpus] = p.returncode == 0
            said = said or p.stdout
        least = min((n for n in fits if fits[n]), default=0)
        test(f"{group}: a pool that is too small is told which fits, and it does",
             least > 1 and f"a pool of {least} GPUs ({group}.nnodes x {group}.n_gpus_per_node) fits" in said,
             f"{fits} {said[-1500:]}")


def sharded(s, test):
    """Critics, with an adapter too, and teachers whose weights are shares in their pool; and in another one at a resume."""
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 1,
              "critic.optim.lr": 1e-3, A + "actor.use_kl_loss": False}
    teacher = {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": family_model(s, "glm4"),
               A + "actor.use_kl_loss": False, "distillation.distillation_loss.loss_mode": "forward_kl_topk",
               "distillation.distillation_loss.topk": 4}
    cases = {"critic": (critic, (({"critic.ranks": 3}, "sharded"), ({"critic.ranks": 2, "trainer.ranks": 2}, "sharded"))),
             "critic_lora": ({**critic, "critic.model.lora_rank": 4, A + "actor.fsdp_config.dtype": "bfloat16"},
                             (({"critic.ranks": 2}, "sharded"),)),
             "teacher": (teacher, (({"distillation.ranks": 2}, "ref"), ({"distillation.ranks": 3}, "sharded")))}
    both = {A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.total_training_steps": 2, "trainer.save_freq": 1,
            "trainer.device": "cpu", "reward.num_workers": 1}
    for name, (own, runs) in cases.items():
        keys, one, model = {**both, **own}, s.dir / name, name.split("_")[0]
        run(*s.ppo(one, **keys))
        for i, (ranks, layout) in enumerate(runs):
            d = pathlib.Path(f"{one}_{i}")
            p = run(*s.ppo(d, **keys, **ranks, **{"trainer.layout": layout}), check=False)
            said = f"the weights of the {model} sharded over" in p.stdout + p.stderr
            why = p.stderr[-1200:] if p.returncode or not said else first_difference(one, d, 2)
            test(f"{name}: {ranks}, layout {layout}: as one rank", not why, why)
    again = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": s.dir / "critic_0/global_step_1"}
    run(*s.ppo(s.dir / "again", **both, **critic, **again, **{"critic.ranks": 2, "trainer.layout": "sharded"}))
    test("resumed on another pool: as one rank",
         state(s.dir / "again", 2, ("actor", "critic")) == state(s.dir / "critic", 2, ("actor", "critic")))


def lost(s, test):
    p = start(one_off(s, "lost", **pools(1, 2, 2), **{"trainer.total_training_steps": 500, "trainer.save_freq": 1}))
    waited(lambda: (s.dir / "lost/global_step_2").exists() or p.poll() is not None)
    ranks = sorted(pid for pid, command in below(p.pid).items() if command.endswith(" worker"))
    os.kill(ranks[-1], signal.SIGKILL)
    begun = time.monotonic()
    err = p.communicate(timeout=300)[1]
    took = time.monotonic() - begun
    gone = waited(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks), 10)
    test("a rank of the pool is killed: the run ends within 10 s by its name",
         p.returncode == 1 and "error: rank " in err and took < patience(10) and gone, (p.returncode, took, err[-300:]))


def main():
    test = Tests()
    with Scratch(small=True) as s:
        schedule(s, test)
        fully(s, test)
        sharded(s, test)
        said(s, test)
        refused(s, test)
        lost(s, test)
    test.end()


main()
