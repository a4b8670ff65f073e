"""Invariant 6: memory is planned before step 1, printed, refused if it does not fit, and
then it is what the run takes. The peak of a real GRPO run (VmHWM) within 5 % of the
plan's total, a device peak that no step raises, and refusals of what does not fit.

The model has 25 M parameters: with a smaller one the plan's rounding to pages of 2 MiB
and its estimates for the program itself are more than 5 % of the whole."""

import json
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, big_model, run, sft_refusals  # noqa: E402

UNITS = {"MiB": 1, "GiB": 1024}


def planned(text):
    return next(float(m[1]) * UNITS[m[2]] for m in re.finditer(r"^ *total +([0-9.]+) ([MG]iB)", text, re.M))


def peak_of(args):
    """Runs to the end; (exit status, stderr, VmHWM in MiB)."""
    peak = 0
    with subprocess.Popen([VERLC, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV) as p:
        while p.poll() is None:
            try:
                text = pathlib.Path(f"/proc/{p.pid}/status").read_text()
            except OSError:
                break
            if m := re.search(r"VmHWM:\s+(\d+) kB", text):
                peak = max(peak, int(m[1]) / 1024)
            time.sleep(0.02)
        return p.wait(), p.stderr.read(), peak


def second_models(s, test):
    """A judge is in the plan; a refusal proposes what makes the critic or the judge smaller."""
    big, one = s.dir / "big", {"trainer.total_training_steps": 1, "trainer.save_freq": 0, "trainer.threads": 1}
    rm = "reward.reward_model."
    judge = {**one, rm + "enable": True, rm + "model_path": big, rm + "prompt_template": "'{response} {question} 1'",
             rm + "rollout.prompt_length": 256, rm + "rollout.response_length": 64, "reward.on_error": "drop_sample"}
    args = s.ppo("run_judge", **judge)
    plan = planned(run("plan", *args[1:]).stdout)
    _, errors, peak = peak_of(args)
    off = (peak - plan) / plan
    print(f"        judge: plan {plan:.0f} MiB, peak {peak:.0f} MiB: {100 * off:+.1f} %")
    test("judge: peak within 5 % of the plan", abs(off) <= 0.05, f"plan {plan:.0f} MiB, peak {peak:.0f} MiB {errors[-300:]}")
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model", "actor_rollout_ref.actor.use_kl_loss": False,
              "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
              "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
              "data.train_batch_size": 64, "data.max_response_length": 192, "critic.forward_micro_batch_size_per_gpu": 1,
              "actor_rollout_ref.rollout.max_num_seqs": 1}
    cases = (("critic.ppo_micro_batch_size_per_gpu", {**critic, "critic.ppo_mini_batch_size": 64,
                                                      "actor_rollout_ref.actor.ppo_mini_batch_size": 64}, 64),
             (rm + "rollout.max_num_seqs", {**judge, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1}, 16))
    for key, keys, most in cases:
        total = [planned(run("plan", *s.ppo("x", **{**keys, key: n})[1:]).stdout) for n in (most, 1)]
        p = run(*s.ppo("refused2", **{**keys, key: most, "trainer.device_memory_limit": f"{sum(total) / 2:.0f}MiB"}), check=False)
        test.refused(f"the refusal proposes a smaller {key}", p, 4, f"{key}=", "fits")


def recompute_choices(s, test):
    """What the updates recompute is chosen by the limit of a GPU (of one that is not there) or by the keys."""
    keys = {"actor_rollout_ref__model__path": s.dir / "big", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
            "data.max_prompt_length": 2048, "data.max_response_length": 2048, "actor_rollout_ref.rollout.max_num_seqs": 1,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1}

    def plan(check=True, gpu="40GB", **more):
        return run("plan", "--gpu", gpu, *s.ppo("x", **{**keys, **more})[1:], check=check)

    def logits(p):
        m = re.search(r"kept logits +([\d.]+) ([MG]iB)  fp32, of (\d+) tokens", p.stdout)
        return (float(m[1]) * UNITS[m[2]], int(m[3])) if m else (0, 0)

    whole = {how: planned(plan(trainer__recompute=how).stdout) for how in ("none", "mlp", "layer")}
    test("a GPU's plan: the less is recomputed, the more memory", whole["layer"] < whole["mlp"] < whole["none"], whole)
    auto = plan()
    test("where all fits, nothing is recomputed", planned(auto.stdout) == whole["none"] and "all activations kept" in auto.stdout)
    config = json.loads((s.dir / "big/config.json").read_text())
    (s.dir / "wide.json").write_text(json.dumps(config | {"vocab_size": 8192}))
    run("model", "init", "--arch", s.dir / "wide.json", "--out", s.dir / "wide", "--tokenizer", s.dir / "model", "--config-only")
    bf16 = {"gpu": "80GB", "actor_rollout_ref__actor__fsdp_config__dtype": "bfloat16",
            "actor_rollout_ref__model__path": s.dir / "wide"}
    kept = plan(**bf16)
    size, tokens = logits(kept)
    test("on a GPU that has a use for them, all logits of a micro-batch are kept", tokens == 4096 and logits(auto) == (0, 0),
         kept.stdout)
    rest = planned(kept.stdout) - size
    for limit, some in ((rest + size / 2, True), (rest - 16, False)):
        p = plan(**bf16, trainer__device_memory_limit=f"{limit:.0f}MiB")
        test(f"{limit:.0f} MiB: logits take what is left behind all activations, and go first",
             (0 < logits(p)[1] < tokens and "all activations kept" in p.stdout if some else logits(p) == (0, 0)) and
             planned(p.stdout) <= limit + 6, p.stdout)
    test("with layers recomputed none are kept", logits(plan(**bf16, trainer__recompute="mlp")) == (0, 0))
    layer = (whole["none"] - whole["layer"]) / 7  # of the 8 layers the last one is never recomputed
    for low, high in (("layer", "mlp"), ("mlp", "none")):
        limit = (whole[low] + whole[high]) / 2
        some = plan(trainer__device_memory_limit=f"{limit:.0f}MiB")
        test(f"between {low} and {high}: as much is kept as fits the limit", limit - layer < planned(some.stdout) <= limit + 1 and
             "kept: what fits the limit" in some.stdout, some.stdout[-500:])
    limit = f"{(whole['layer'] + whole['none']) / 2:.0f}MiB"
    for key, value, change in (("trainer.recompute", "none", "trainer.recompute=auto"),
                               ("actor_rollout_ref.model.enable_gradient_checkpointing", False,
                                "enable_gradient_checkpointing=True")):
        p = plan(check=False, trainer__device_memory_limit=limit, **{key: value})
        test(f"{key}={value} above the limit: the nearest change is {change}", p.returncode == 4 and f"{change} fits" in p.stdout,
             p.stdout[-300:])
    for bad in (("--gpu",), ("--gpu", "much"), ("--gpu=0",)):
        p = run("plan", *bad, check=False)
        test(f"plan {' '.join(bad)}: one line", p.returncode == 2 and "--gpu" in p.stderr and p.stderr.count("\n") == 1, p.stderr)


def recompute_on_cpu(s, test):
    """On a CPU auto takes the room that the block has anyway; no choice changes a bit."""
    keys = {"trainer__total_training_steps": 1, "trainer__threads": 1, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1,
            "data__max_response_length": 32,
            "actor_rollout_ref__rollout__n": 7}  # the KV cache is larger than an update that keeps nothing
    weights, total, text, said = {}, {}, {}, {}
    for how in ("auto", "none", "mlp", "layer"):
        said[how] = run(*s.ppo(f"recompute_{how}", **keys, trainer__recompute=how)).stderr
        weights[how] = (s.dir / f"recompute_{how}/global_step_1/actor/model.safetensors").read_bytes()
        p = run("plan", *s.ppo("x", **keys, trainer__recompute=how, actor_rollout_ref__model__path=s.dir / "big")[1:])
        total[how], text[how] = planned(p.stdout), p.stdout
    test("recompute none, mlp, layer, auto: one result", len(set(weights.values())) == 1)
    test("auto on a CPU plans no more than layer", total["auto"] == total["layer"] < total["none"], total)
    for made in (text, said):
        test("and keeps what the block has room for", ", layers recomputed\n" not in made["auto"] and
             ", layers recomputed\n" in made["layer"], made["auto"][:1500])


def main():
    test = Tests()
    with Scratch(n_train=16) as s:
        big_model(s)
        for dtype, recompute in (("bfloat16", True), ("float32", False)):
            keys = {"actor_rollout_ref__model__path": s.dir / "big", "actor_rollout_ref__actor__fsdp_config__dtype": dtype,
                    "actor_rollout_ref__model__enable_gradient_checkpointing": recompute, "trainer__threads": 1,
                    "trainer__total_training_steps": 3, "trainer__save_freq": 0}
            args = s.ppo(f"run_{dtype}", **keys)
            plan = planned(run("plan", *args[1:]).stdout)
            status, errors, peak = peak_of(args)
            test(f"{dtype}: the run ends well", status == 0, errors[-600:])
            off = (peak - plan) / plan
            print(f"        plan {plan:.0f} MiB, peak {peak:.0f} MiB: {100 * off:+.1f} %")
            test(f"{dtype}: peak within 5 % of the plan", abs(off) <= 0.05, f"plan {plan:.0f} MiB, peak {peak:.0f} MiB")
            log = next((s.dir / f"run_{dtype}").glob("**/*.jsonl"))
            steps = [json.loads(x)["data"] for x in log.read_text().splitlines()]
            device = [x["perf/max_memory_allocated_gb"] for x in steps]
            test(f"{dtype}: no step raises the device's peak", len(device) == 3 and len(set(device)) == 1 and device[0] > 0, device)
            asked = [x["perf/device_allocations"] for x in steps]
            test(f"{dtype}: no step asks for device memory", asked == [0, 0, 0], asked)
        limit = {"trainer__device_memory_limit": "200MiB", "actor_rollout_ref__model__path": s.dir / "big"}
        p = run(*s.ppo("refused", **limit), check=False)
        test.refused("a plan above the limit is refused", p, 4, "GiB")
        test("before anything is loaded", not list((s.dir / "refused").glob("**/*.safetensors")))
        sft_refusals(s, test, s.dir / "big", "cpu", 8192)
        second_models(s, test)
        recompute_choices(s, test)
        recompute_on_cpu(s, test)
    test.end()


main()
