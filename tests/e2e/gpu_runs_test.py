"""Whole runs on a GPU beside the same runs on the CPU: GRPO with an adapter, PPO with a critic, both with
adapters and 4-bit bases, a directory saved in 4 bits, the optimizers, a teacher, a reward model, SFT with
what it recomputes, and host offload.  In fp32, so that both devices draw the same tokens: the
metrics of the first steps then differ by roundings alone.  Then rollout beside training, bit for bit, on models of the
recipes' shapes.  Does nothing where there is no GPU."""

import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import (DIGITS_REWARD, Scratch, Tests, big_model, has_gpu, reward_dir, run, save_tensors, series,  # noqa: E402
                        sft_refusals, state, tensors)

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
STEPS = 4


def keys(s, device, **more):
    return {"trainer.device": device, "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "data.train_batch_size": 8,
            "data.max_response_length": 12, "actor_rollout_ref.rollout.n": 4, ACTOR + "ppo_mini_batch_size": 4,
            ACTOR + "ppo_micro_batch_size_per_gpu": 8, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
            "reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "trainer.force_old_log_prob": True,
            **more}


def start(s, pool, name, device, **more):
    """A run under way; its result when it is asked for."""
    args = s.ppo(name, **keys(s, device, **more))
    return pool.submit(lambda: run(*args))


def compare(s, test, pool, what, names, **more):
    """The same run on both devices; what is to be done when they have ended. Steps after the first start from
    weights that differ by roundings."""
    dirs = {d: f"{what.replace(' ', '_')}_{d}" for d in ("cpu", "cuda")}
    under_way = [start(s, pool, name, d, **more) for d, name in dirs.items()]

    def look():
        for u in under_way:
            u.result()
        for d, name in dirs.items():
            diff = series(s.dir / name, "training/rollout_probs_diff_max")
            test(f"{what} on {d}: rollout and training log-probs are equal in every step", len(diff) == STEPS and max(diff) == 0,
                 str(diff))
        for n in names:
            a, b = (series(s.dir / dirs[d], n) for d in ("cpu", "cuda"))
            print(f"        {n}: cpu {' '.join(f'{x:.6g}' for x in a)} | cuda {' '.join(f'{x:.6g}' for x in b)}")
            size = max(map(abs, a))
            test(f"{what}: {n} is the CPU's", len(a) == len(b) == STEPS and size > 0 and
                 all(abs(x - y) <= 2e-3 * size for x, y in zip(a, b)), f"{a} {b}")

    return look


def critic(s):
    return {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4,
            "critic.ppo_mini_batch_size": 4, "critic.optim.lr": 1e-3, ACTOR + "use_kl_loss": False}


def adapters(lr):
    """Of policy and critic, which read one frozen base."""
    keys = {"lora_rank": 8, "lora_alpha": 16}
    return {**{MODEL + k: v for k, v in keys.items()}, **{"critic.model." + k: v for k, v in keys.items()}, ACTOR + "optim.lr": lr}


def saved_in_4_bits(s):
    """The tiny model with matrices of random codes, as bitsandbytes saves NF4."""
    d, r = s.dir / "saved_nf4", random.Random(4)
    shutil.copytree(s.dir / "model", d)
    fixture = pathlib.Path(__file__).resolve().parents[1] / "fixtures/quant/bnb_single"
    config = json.loads((d / "config.json").read_text())
    config["quantization_config"] = json.loads((fixture / "config.json").read_text())["quantization_config"]
    (d / "config.json").write_text(json.dumps(config))
    book = next(v for k, v in tensors(fixture / "model.safetensors").items() if k.endswith(".quant_map"))
    parts = {}
    for name, (dtype, shape, data) in tensors(d / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            parts[name] = (dtype, shape, data)
            continue
        n = shape[0] * shape[1]
        about = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": shape}).encode()
        scales = [r.uniform(0.02, 0.06) for _ in range((n + 63) // 64)]
        parts |= {name: ("U8", [n // 2, 1], r.randbytes(n // 2)), name + ".quant_map": book,
                  name + ".absmax": ("F32", [len(scales)], struct.pack(f"{len(scales)}f", *scales)),
                  name + ".quant_state.bitsandbytes__nf4": ("U8", [len(about)], about)}
    save_tensors(d / "model.safetensors", parts)
    return d


def distillation(s):
    run("model", "init", "--preset", "tiny", "--out", s.dir / "teacher", "--seed", "2")
    return {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": s.dir / "teacher",
            "distillation.distillation_loss.loss_mode": "forward_kl_topk", "distillation.distillation_loss.topk": 16,
            "distillation.distillation_loss.use_task_rewards": False, ACTOR + "use_kl_loss": False, ACTOR + "optim.lr": 1e-3}


def reward_model(s):
    return {"reward.reward_model.enable": True, "reward.reward_model.model_path": reward_dir(s, "rm"),
            "reward.custom_reward_function.path": "null", ACTOR + "use_kl_loss": False}


def runs(s, test, pool):
    common = ["critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "response_length/mean"]
    looks = [compare(s, test, pool, "GRPO", common + ["actor/kl_loss"]),
             compare(s, test, pool, "LoRA GRPO", common + ["actor/kl_loss"],
                     **{MODEL + "lora_rank": 8, MODEL + "lora_alpha": 16, ACTOR + "optim.lr": 1e-3}),
             compare(s, test, pool, "PPO", common + ["critic/vf_loss", "critic/values/mean", "critic/grad_norm",
                                                     "critic/vf_explained_var"],
                     **critic(s))]
    both = common + ["critic/vf_loss", "critic/values/mean", "critic/grad_norm"]
    looks += [compare(s, test, pool, "PPO with adapters", both, **critic(s), **adapters(1e-3)),
              compare(s, test, pool, "PPO with adapters on 4 bits", both, **critic(s), **adapters(1e-3),
                      **{MODEL + "quantization": "nf4", "critic.model.quantization": "nf4"}),
              compare(s, test, pool, "GRPO of a directory saved in 4 bits", common + ["actor/kl_loss"],
                      **{"actor_rollout_ref.model.path": saved_in_4_bits(s), MODEL + "quantization": "nf4", MODEL + "lora_rank": 8,
                         MODEL + "lora_alpha": 16, ACTOR + "optim.lr": 1e-3}),
              compare(s, test, pool, "distillation",
                      ["actor/grad_norm", *(f"actor/distillation/{n}" for n in ("loss", "student_mass", "teacher_mass"))],
                      **distillation(s)),
              compare(s, test, pool, "GRPO with a reward model", common, **reward_model(s))]
    for kind, lr in (("AdamW8bit", 1e-4), ("SGD", 1e-1), ("Muon", 1e-4)):
        looks.append(compare(s, test, pool, f"GRPO with {kind}", ["critic/rewards/mean", "actor/grad_norm", "actor/kl_loss"],
                             **{ACTOR + "optim.optimizer": kind, ACTOR + "optim.lr": lr}))
    return looks


def sft(s, test, pool):
    """The CPU's losses; and what is recomputed, by the keys or by a limit, changes no bit."""
    rows = s.write("sft.jsonl", [{"messages": [{"role": "user", "content": f"{i % 10} plus {i // 10}?"},
                                               {"role": "assistant", "content": str(i % 10 + i // 10)}]} for i in range(100)])

    def args(name, device, **more):
        keys = {"model.path": s.dir / "model", "data.train_files": rows, "data.val_files": rows, "data.train_batch_size": 20,
                "data.max_length": 64, "data.max_token_len_per_gpu": 1024, "engine.dtype": "float32", "optim.lr": 1e-3,
                "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.test_freq": STEPS,
                "trainer.logger": "[file]", "trainer.device": device, "trainer.default_local_dir": s.dir / name, **more}
        return ["sft", *[f"{k}={v}" for k, v in keys.items()]]

    ways = {f"sft_{how}": ("cuda", {"trainer.recompute": how}) for how in ("auto", "none", "mlp", "layer")}
    ways |= {"sft_cpu": ("cpu", {}), "sft_lora_cpu": ("cpu", {"model.lora_rank": 8}), "sft_lora": ("cuda", {"model.lora_rank": 8})}
    under_way = {name: pool.submit(lambda a: run(*a), args(name, device, **more)) for name, (device, more) in ways.items()}

    def look():
        for u in under_way.values():
            u.result()
        for ours, theirs in (("sft_auto", "sft_cpu"), ("sft_lora", "sft_lora_cpu")):
            for n in ("train/loss", "train/grad_norm", "val/loss"):
                a, b = series(s.dir / theirs, n), series(s.dir / ours, n)
                print(f"        {n}: cpu {' '.join(f'{x:.6g}' for x in a)} | cuda {' '.join(f'{x:.6g}' for x in b)}")
                test(f"{ours}: {n} is the CPU's", len(a) == len(b) > 0 and all(abs(x - y) <= 2e-3 * max(map(abs, a))
                                                                              for x, y in zip(a, b)), f"{a} {b}")
        kept = state(s.dir / "sft_none", STEPS)
        for how in ("auto", "mlp", "layer"):
            test(f"sft, recompute {how}: the bits of none", state(s.dir / f"sft_{how}", STEPS) == kept)

    return [look]


def refusals(s, test):
    sft_refusals(s, test, big_model(s), "cuda", 65536)


def offload(s, test, pool):
    """Where arrays rest changes no bit of weights and optimizer state; the plan says where they are."""
    bf16 = {ACTOR + "fsdp_config.dtype": "bfloat16"}
    ways = {"kept": bf16,
            "all": {**bf16, ACTOR + "fsdp_config.optimizer_offload": True, ACTOR + "fsdp_config.param_offload": True,
                    "actor_rollout_ref.ref.fsdp_config.param_offload": True},
            "master": {**bf16, ACTOR + "fsdp_config.param_offload": True},
            "critic_kept": critic(s), "critic_far": {**critic(s), "critic.fsdp.optimizer_offload": True}}
    under_way = {name: start(s, pool, name, "cuda", **more) for name, more in ways.items()}
    first = start(s, pool, "part", "cuda", **{**bf16, "trainer.save_freq": 2, "trainer.total_training_steps": 2})

    def look():
        plans = {name: u.result().stderr for name, u in under_way.items()}
        first.result()
        run(*s.ppo("part", **keys(s, "cuda", **ways["all"])))
        for name, text in plans.items():
            test(f"{name}: the plan {'has no' if 'kept' in name else 'shows'} host memory",
                 ("offloaded: pinned host memory" in text) != ("kept" in name), text[-1500:])
        kept = state(s.dir / "kept", STEPS)
        test("GRPO with optimizer, master and reference in host memory ends in the same bits", state(s.dir / "all", STEPS) == kept)
        test("GRPO with the master in host memory ends in the same bits", state(s.dir / "master", STEPS) == kept)
        test("begun without and resumed with offload it ends in the same bits", state(s.dir / "part", STEPS) == kept)
        both = ("actor", "critic")
        test("PPO with the critic's optimizer in host memory ends in the same bits",
             state(s.dir / "critic_far", STEPS, both) == state(s.dir / "critic_kept", STEPS, both))

    return [look]


# model, then samples, samples of a prompt, longest prompt, tokens sampled
SHAPES = (("qwen2.5-0.5b", (80, 5, 512, 128), (1280, 5, 128, 32)), ("qwen3-1.7b", (80, 5, 512, 128), (720, 3, 128, 32)))


def true_shapes(s, test, device="cuda", shapes=SHAPES):
    """Invariant 1 at the shapes and batches of the seed's recipes, thousands of tokens each."""
    for arch, *sizes in shapes:
        run("model", "init", "--arch", arch, "--out", s.dir / arch, "--seed", 1)
        for batch, n, prompt, new in sizes:
            p = run("selftest", "--device", device, "--model", s.dir / arch, "--batch", batch, "--n", n, "--prompt", prompt,
                    "--len", new, check=False)
            print("       ", "\n        ".join(p.stdout.splitlines()[1:-1]))
            test(f"{arch}, {batch} samples: a rollout's log-probs are training's, bit for bit",
                 p.returncode == 0 and p.stdout.count(" 0 of ") == 3, p.stdout + p.stderr)
        shutil.rmtree(s.dir / arch)


def main():
    test = Tests()
    with Scratch() as s:
        if has_gpu(s.dir / "model"):
            (s.dir / "digits.py").write_text(DIGITS_REWARD)
            with concurrent.futures.ThreadPoolExecutor(max(6, (os.cpu_count() or 1) // 2)) as pool:
                for look in runs(s, test, pool) + sft(s, test, pool) + offload(s, test, pool):
                    look()
            refusals(s, test)
            true_shapes(s, test)
        else:
            print("skip: no GPU that works")
            test("nothing to compare without a GPU", not os.environ.get("VERLC_TEST_BACKENDS", "").startswith("cuda"))
    test.end()


main()
