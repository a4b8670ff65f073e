"""Adapters as a user has them: GRPO and SFT that train one and nothing else, killed and resumed to the same
bits; its directory loaded, merged and scored; a warm start; what is refused. Seeded: the same numbers each time."""

import json
import pathlib
import random
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import DIGITS_REWARD, Scratch, Tests, run, series, start, waited  # noqa: E402

STEPS = 30
MODEL = "actor_rollout_ref.model."

def state(run_dir, step):
    d = pathlib.Path(run_dir) / f"global_step_{step}"
    names = ("actor/adapter_model.safetensors", "actor/adapter_config.json", "optim/actor.safetensors", "trainer.json")
    return {f: (d / f).read_bytes() for f in names}


def tensors(path):
    """Names and shapes of a safetensors file."""
    raw = path.read_bytes()
    head = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    return {k: v["shape"] for k, v in head.items() if k != "__metadata__"}


def base(s):
    """model/ becomes a model that answers in random letters and digits: the embedding of a random one, frozen, could
    say nothing."""
    rng = random.Random(3)
    rows = [{"messages": [{"role": "user", "content": f"What is {a} + {b}?"},
                          {"role": "assistant", "content": "".join(rng.choice("abcdefgh0123") for _ in range(8))}]}
            for a in range(20) for b in range(20)]
    run("sft", f"data.train_files={s.write('letters.jsonl', rows)}", "data.train_batch_size=20", "data.max_length=64",
        "data.max_token_len_per_gpu=2048", f"model.path={s.dir / 'model'}", "engine.dtype=float32", "optim.lr=2e-3",
        "trainer.total_training_steps=40", "trainer.test_freq=-1", "trainer.save_freq=40", "trainer.logger=[file]",
        f"trainer.default_local_dir={s.dir / 'letters'}")
    shutil.rmtree(s.dir / "model")
    shutil.move(s.dir / "letters/global_step_40/actor", s.dir / "model")


def grpo_keys(s):
    (s.dir / "digits.py").write_text(DIGITS_REWARD)
    return {"reward.custom_reward_function.path": s.dir / "digits.py", "reward.num_workers": 1, "data.train_batch_size": 8,
            "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 64,
            "actor_rollout_ref.actor.optim.lr": 1e-2, "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS,
            MODEL + "lora_rank": 8, MODEL + "lora_alpha": 16, "trainer.force_old_log_prob": True}


def learn(s, test):
    p = run(*s.ppo("grpo", **grpo_keys(s)))
    reward, kl, diff = (series(s.dir / "grpo", n) for n in ("critic/rewards/mean", "actor/kl_loss",
                                                            "training/rollout_probs_diff_max"))
    first, last = sum(reward[:3]) / 3, sum(reward[-3:]) / 3
    print(f"LoRA-GRPO: mean reward {first:.3f} -> {last:.3f} in {STEPS} steps; kl {kl[0]:.4f} -> {kl[-1]:.4f}")
    test("LoRA-GRPO raises the mean reward", last > 0.7 and last > first + 0.3, f"{first} -> {last}")
    test("rollout and training log-probs are equal in every step", len(diff) == STEPS and max(diff) == 0, str(max(diff)))
    test("the reference is the base without the adapter", kl[0] < 1e-6 < kl[-1], f"{kl[0]} -> {kl[-1]}")
    test("the plan shows the adapter and no reference weights", "adapter" in p.stderr and "reference weights" not in p.stderr)
    actor = s.dir / f"grpo/global_step_{STEPS}/actor"
    test("a checkpoint holds the adapter, no model", not (actor / "model.safetensors").exists() and
         (actor / "tokenizer.json").exists())
    return actor


def same_scores(a, b, limit):
    return max(abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p["logp"], q["logp"], strict=True)) <= limit


def score(*args):
    ask = "".join(json.dumps({"ids": [5, 9, 40 + i, 7, 12, 300], "response_start": 2}) + "\n" for i in range(3))
    return [json.loads(x) for x in run("score", *args, input=ask).stdout.splitlines()]


def files(s, test, actor):
    base = s.dir / "model"
    config = json.loads((actor / "adapter_config.json").read_text())
    test("adapter_config.json names the base and the modules", config["base_model_name_or_path"] == str(base.resolve()) and
         config["r"] == 8 and
         config["lora_alpha"] == 16 and sorted(config["target_modules"]) == sorted(
             ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]), str(config))
    shapes = tensors(actor / "adapter_model.safetensors")
    test("it has peft's tensor names", len(shapes) == 2 * 7 * 4 and
         shapes["base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"] == [192, 8])
    run("model", "merge", "--model", base, "--adapter", actor, "--out", s.dir / "merged")
    run("model", "export", "--model", s.dir / "grpo", "--out", s.dir / "exported")
    test("export from a checkpoint merges as merge does",
         (s.dir / "merged/model.safetensors").read_bytes() == (s.dir / "exported/model.safetensors").read_bytes())
    test("a merged model is a model", tensors(s.dir / "merged/model.safetensors") == tensors(base / "model.safetensors"))
    adapted, merged, plain = score("--model", base, "--adapter", actor), score("--model", s.dir / "merged"), score("--model", base)
    test("score: adapter and merged weights agree", same_scores(adapted, merged, 1e-4) and not same_scores(adapted, plain, 0.1))
    ask = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 8}) + "\n"
    texts = [json.loads(run("generate", *a, "--dtype", "fp32", input=ask).stdout)["text"]
             for a in (("--model", base, "--adapter", actor), ("--model", s.dir / "merged"))]
    test("generate: adapter and merged weights answer alike, in digits", texts[0] == texts[1] and
         sum(c.isdigit() for c in texts[0]) >= 6, str(texts))


def resume(s, test):
    keys = {MODEL + "lora_rank": 3, MODEL + "lora_alpha": 5, MODEL + "target_modules": "[q_proj,v_proj,down_proj]",
            MODEL + "exclude_modules": "[layers.0.mlp.down_proj]"}
    run(*s.ppo("whole", **keys))
    want = state(s.dir / "whole", 6)
    test("exclude_modules takes a module out", len(tensors(s.dir / "whole/global_step_6/actor/adapter_model.safetensors")) ==
         2 * 11)
    p = start(s.ppo("broken", **keys))
    waited(lambda: p.poll() is not None or (s.dir / "broken/global_step_2").exists())
    p.kill()
    p.wait()
    p.stderr.close()
    run(*s.ppo("broken", **keys))
    test("killed and resumed, an adapter's run ends in the bits of an unbroken one", state(s.dir / "broken", 6) == want)
    test.refused("resumed with another rank it is refused", run(*s.ppo("broken", **{**keys, MODEL + "lora_rank": 4,
                 "trainer.total_training_steps": 8}), check=False), 3, "of rank ", "rank 4")


def policy_mib(p):
    return next(float(line.split()[2]) for line in p.stderr.splitlines() if line.strip().startswith("policy weights"))


def quantised(s, test):
    p = run(*s.ppo("qlora", **{**grpo_keys(s), MODEL + "quantization": "nf4", "trainer.total_training_steps": STEPS // 2}))
    reward, diff = (series(s.dir / "qlora", n) for n in ("critic/rewards/mean", "training/rollout_probs_diff_max"))
    first, last = sum(reward[:3]) / 3, sum(reward[-3:]) / 3
    print(f"NF4 QLoRA-GRPO: mean reward {first:.3f} -> {last:.3f} in {STEPS // 2} steps; policy weights {policy_mib(p)} MiB")
    test("QLoRA-GRPO raises the mean reward", last > first + 0.2, f"{first} -> {last}")
    test("in 4 bits rollout and training log-probs are equal too", len(diff) == STEPS // 2 and max(diff) == 0, str(max(diff)))
    plain, int8 = ({MODEL + "lora_rank": 4, "trainer.total_training_steps": 1, **q} for q in ({}, {MODEL + "quantization": "int8"}))
    mib = [policy_mib(x) for x in (p, run(*s.ppo("int8", **int8)), run(*s.ppo("plain", **plain)))]
    test("the plan counts the codes", mib[0] <= mib[1] < mib[2], f"{mib} MiB")
    p = run(*s.ppo("bad", **{MODEL + "quantization": "nf4"}), check=False)
    test.refused("a quantised model without an adapter", p, 2, "quantization=nf4", "lora_rank")
    test.refused("an unknown quantisation", run(*s.ppo("bad", **{MODEL + "quantization": "fp4"}), check=False), 2, "quantization",
                 "nf4")


def sft(s, test):
    rows = [{"messages": [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]}
            for a in range(10) for b in range(10)]
    train = s.write("sft.jsonl", rows)
    args = ["sft", f"data.train_files={train}", "data.train_batch_size=20", "data.max_length=64", "data.max_token_len_per_gpu=2048",
            f"model.path={s.dir / 'model'}", "engine.dtype=float32", "optim.lr=1e-2", "trainer.total_training_steps=30",
            "trainer.test_freq=-1", "trainer.save_freq=15", "trainer.logger=[file]"]
    run(*args, "model.lora_rank=8", "model.target_modules='.*(self_attn|mlp).*'", f"trainer.default_local_dir={s.dir / 'sft'}")
    loss = series(s.dir / "sft", "train/loss")
    print(f"LoRA-SFT: loss {loss[0]:.3f} -> {loss[-1]:.3f}")
    test("LoRA-SFT lowers the loss", loss[-1] < loss[0] / 2, f"{loss[0]} -> {loss[-1]}")
    want = state(s.dir / "sft", 30)
    shutil.rmtree(s.dir / "sft/global_step_30")
    run(*args, "model.lora_rank=8", "model.target_modules='.*(self_attn|mlp).*'", f"trainer.default_local_dir={s.dir / 'sft'}")
    test("resumed from the middle it ends in the same bits", state(s.dir / "sft", 30) == want)
    adapter = s.dir / "sft/global_step_30/actor"
    run(*args, f"model.lora_adapter_path={adapter}", f"trainer.default_local_dir={s.dir / 'warm'}")
    warm = series(s.dir / "warm", "train/loss")
    test("lora_adapter_path goes on from where an adapter is", warm[0] < (loss[0] + loss[-1]) / 2, f"{warm[0]}, after {loss[-1]}")


def refusals(s, test, actor):
    def ppo(**keys):
        return run(*s.ppo("bad", **{MODEL + k: v for k, v in keys.items()}), check=False)

    test.refused("an unknown module", ppo(lora_rank=4, target_modules="[q_proj,fc1]"), 2, "fc1", "q_proj, k_proj, v_proj")
    test.refused("lm_head", ppo(lora_rank=4, target_modules="[lm_head]"), 3, "lm_head", "unsupported")
    test.refused("a broken expression", ppo(lora_rank=4, target_modules="'(q_proj'"), 2, "regular expression")
    test.refused("a negative rank", ppo(lora_rank=-1), 2, "lora_rank")
    test.refused("a rank wider than the model", ppo(lora_rank=500), 2, "500", "192")
    test.refused("no such adapter", ppo(lora_adapter_path=s.dir / "nowhere"), 3, "adapter_config.json")
    run("model", "init", "--preset", "tiny", "--out", s.dir / "other", "--seed", "2")
    ask = json.dumps({"ids": [1, 2, 3], "response_start": 1}) + "\n"
    test.refused("an adapter of another base", run("score", "--model", s.dir / "other", "--adapter", actor, input=ask, check=False),
                 3, "another base model", str(s.dir / "model"))


def main():
    test = Tests()
    with Scratch() as s:
        base(s)
        actor = learn(s, test)
        files(s, test, actor)
        resume(s, test)
        quantised(s, test)
        sft(s, test)
        refusals(s, test, actor)
    test.end()


main()
