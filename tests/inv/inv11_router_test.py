"""Routers in updates: load-balancing losses and the z-loss on one rank and two give the same weights, metrics; router replay does
something where it should and nothing elsewhere; frozen routers stay as they are, with any optimizer. Small GRPO and SFT runs on CPU
ranks."""

import pathlib
import shutil
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import experts_model, files, first_difference
from verlc_test import Scratch, Tests, reward_dir, run, series, tensors

A = "actor_rollout_ref."
BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
SHARED_GATE = "model.layers.0.mlp.shared_expert_gate.weight"
ROUTER, EXPERT = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.up_proj.weight"


def grpo(s, name, steps=2, **keys):
    keys = {A + "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.save_freq": steps, "trainer.device": "cpu", **keys}
    p = run(*s.ppo(name, **{k.replace(".", "__"): v for k, v in keys.items()}, trainer__total_training_steps=steps), check=False)
    return s.dir / name, p.stderr[-1500:] if p.returncode else ""


def balance_over_ranks(s, test, model):
    keys = {A + "model.path": model, **{A + "model.override_config." + k: v for k, v in BALANCE.items()}}
    one, why = grpo(s, "one", **keys)
    test("load-balancing loss: one rank", not why, why)
    for layout in ("auto", "sharded"):
        two, why = grpo(s, "two_" + layout, **keys, **{"trainer.ranks": 2, "trainer.layout": layout})
        test(f"two ranks, {layout}: the same", not why and not first_difference(one, two, 2), why or first_difference(one, two, 2))
        for m in ("aux_loss", "load_entropy", "load_max_over_mean"):
            a, b = (series(d, "actor/router/" + m) for d in (one, two))
            test(f"and the same {m}", len(a) == 2 and a == b, (a, b))
    none, _ = grpo(s, "none", **{A + "model.path": model})
    test("without it others", not series(none, "actor/router/aux_loss") and first_difference(one, none, 2))
    test("but a metric of the load", len(series(none, "actor/router/load_entropy")) == 2)


def megatron_over_ranks(s, test, model):
    """Megatron's losses, which verl switches on by the type alone; z-loss alone needs no count of the load."""
    engine = A + "actor.megatron.override_transformer_config.moe_"
    base = {A + "model.path": model, "model_engine": "megatron", A + "actor.ppo_mini_batch_size": 4}
    z, coefficient = {engine + "z_loss_coeff": 0.05}, {engine + "aux_loss_coeff": 0.1}
    both = z | coefficient | {engine + "router_load_balancing_type": "aux_loss"}
    cases = {"none": {}, "coefficient": coefficient, "z": z, "both": both}
    runs = {}
    for name, more in cases.items():
        runs[name], why = grpo(s, "megatron_" + name, **base, **more)
        test(f"Megatron's keys: {name}", not why, why)
        have = [len(series(runs[name], "actor/router/" + m)) for m in ("aux_loss", "z_loss")]
        test(f"{name}: metrics", have == [2 * (name == "both"), 2 * (name in ("z", "both"))], have)
    test("a coefficient without the type does nothing", not first_difference(runs["none"], runs["coefficient"], 2))
    test("others do", all(first_difference(runs[a], runs[b], 2) for a, b in (("none", "z"), ("z", "both"))))
    two, why = grpo(s, "megatron_two", **base, **cases["both"], **{"trainer.ranks": 2})
    test("two ranks: the same", not why and not first_difference(runs["both"], two, 2), why)
    for m in ("aux_loss", "z_loss"):
        a, b = (series(d, "actor/router/" + m) for d in (runs["both"], two))
        test(f"and the same {m}", a == b, (a, b))


def replay(s, test, model):
    """R2 and R3 have the same choices, which matter from the second mini-batch on."""
    keys = {A + "model.path": model, A + "actor.optim.lr": 0.02}
    r2, r3 = {"+" + A + "actor.router_replay.mode": "R2"}, {"+" + A + "actor.router_replay.mode": "R3",
                                                            A + "rollout.enable_rollout_routing_replay": True}
    runs = {}
    for name, more in (("plain", {}), ("R2", r2), ("R3", r3), ("R2 on two ranks", r2 | {"trainer.ranks": 2}),
                       ("R2 with all sharded", r2 | {"trainer.ranks": 2, "trainer.layout": "sharded"})):
        runs[name], why = grpo(s, name.replace(" ", "_"), **keys, **more)
        test(f"router replay: {name}", not why, why)
    test("R2 has other weights than no replay", first_difference(runs["plain"], runs["R2"], 2))
    for other in ("R3", "R2 on two ranks", "R2 with all sharded"):
        why = first_difference(runs["R2"], runs[other], 2)
        test(f"{other}: the weights of R2", not why, why)
    recorded = [[r[0] for r in sqlite3.connect(runs[n] / "run.db").execute("SELECT routed_experts FROM samples ORDER BY id")]
                for n in ("plain", "R2", "R3")]
    test("run.db has the choices: 2 of 6 experts in 3 layers", len(recorded[1]) == 16 and recorded[1] == recorded[2] and
         all(r is None for r in recorded[0]) and all(x < 6 for r in recorded[1] for i, x in enumerate(r) if i % 8 < 6))
    for name, mini in (("one", {}), ("one_R3", r3)):
        runs[name], why = grpo(s, name + "_mini", **keys, **mini, **{A + "actor.ppo_mini_batch_size": 4})
        test(f"one mini-batch: {name}", not why, why)
    why = first_difference(runs["one"], runs["one_R3"], 2)
    test("with one optimizer step replay changes nothing", not why, why)


def algorithms(s, test, model):
    """GSPO, a critic with experts and one with adapters on them, a reward model with experts."""
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": model, "critic.ppo_micro_batch_size_per_gpu": 1,
              "critic.optim.lr": 1e-3}
    cases = {
        "GSPO": {A + "actor.policy_loss.loss_mode": "gspo", A + "actor.loss_agg_mode": "seq-mean-token-mean"},
        "critic": critic,
        "adapters": {**critic, A + "model.lora_rank": 4, "critic.model.lora_rank": 4},
        "reward model": {"reward.reward_model.enable": True, "reward.reward_model.model_path": reward_dir(s, "rm", model=model)},
    }
    for name, more in cases.items():
        run_dir, why = grpo(s, name.replace(" ", "_"), **{A + "model.path": model, "trainer.force_old_log_prob": True, **more})
        diff = series(run_dir, "training/rollout_probs_diff_max")
        test(f"{name}: runs, and rollout and training agree", not why and diff == [0, 0], why or diff)
        test(f"{name}: the load of the critic's experts", len(series(run_dir, "critic/router/load_entropy")) ==
             (2 if "critic.model.path" in more else 0))


def one_step_off(s, test, model):
    """R3 of samples whose weights have moved when they are trained: one optimizer step is enough; resumed with the same bits."""
    keys = {A + "model.path": model, A + "actor.optim.lr": 0.02, "trainer.device": "cpu", A + "actor.ppo_mini_batch_size": 4,
            "trainer.save_freq": 1, A + "actor.ppo_micro_batch_size_per_gpu": 1, A + "rollout.dtype": "float32"}
    r3 = {"+" + A + "actor.router_replay.mode": "R3", A + "rollout.enable_rollout_routing_replay": True}
    again = {"algorithm.rollout_correction.bypass_mode": False}

    def go(name, steps, **more):
        args = s.ppo(name, **{k.replace(".", "__"): v for k, v in (keys | more).items()}, trainer__total_training_steps=steps)
        p = run("ppo", "--config-name=one_step_off_ppo_trainer", *args[1:], check=False)
        test(f"one step off: {name}, {steps} steps", p.returncode == 0, p.stderr[-1500:])
        return s.dir / name

    plain, three = go("off", 3), go("off_R3", 3, **r3)
    test("R3 has other weights than no replay", first_difference(plain, three, 3))
    shutil.copytree(three, s.dir / "resumed")
    shutil.rmtree(s.dir / "resumed/global_step_3")
    (s.dir / "resumed/latest_checkpointed_iteration.txt").write_text("2")
    test("a resumed run has the same bits", files(three, 3) == files(go("resumed", 3, **r3), 3))
    one, two = go("off_old", 3, **r3, **again), go("off_old_2", 3, **r3, **again, **{"trainer.ranks": 2})
    test("with an old log-probs' pass on one rank and two", files(one, 3) == files(two, 3))


def sft(s, name, model, steps, **keys):
    rows = s.write("sums.jsonl", [{"messages": [{"role": "user", "content": f"{i} + {i}?"},
                                                {"role": "assistant", "content": f"{2 * i}"}]} for i in range(16)])
    keys = {"model.path": model, "data.train_files": rows, "data.train_batch_size": 8, "data.max_length": 64,
            "data.micro_batch_size_per_gpu": 4, "data.use_dynamic_bsz": False, "optim.lr": 0.001, "trainer.logger": "[file]",
            "trainer.total_training_steps": steps, "trainer.save_freq": steps, "trainer.default_local_dir": s.dir / name,
            "engine.model_dtype": "fp32", **keys}
    p = run("sft", *[f"{k}={v}" for k, v in keys.items()], check=False)
    return s.dir / name, p.stderr[-1500:] if p.returncode else ""


def main():
    test = Tests()
    with Scratch() as s:
        model = experts_model(s)
        balance_over_ranks(s, test, model)
        megatron_over_ranks(s, test, model)
        replay(s, test, model)
        algorithms(s, test, model)
        one_step_off(s, test, model)
        run_dir, why = sft(s, "sft", model, 2, **{"model.override_config." + k: v for k, v in BALANCE.items()})
        loss, load = (series(run_dir, "train/router/" + m) for m in ("aux_loss", "load_entropy"))
        test("SFT has it", not why and all(0.1 < v < 0.6 for v in loss) and all(0 < v <= 1 for v in load), why or (loss, load))
        of_megatron = {"router_load_balancing_type": "aux_loss", "aux_loss_coeff": 0.1, "z_loss_coeff": 0.01}
        run_dir, why = sft(s, "sft_megatron", model, 2, engine="megatron", **{
            "engine.override_transformer_config.moe_" + k: v for k, v in of_megatron.items()})
        loss = series(run_dir, "train/router/aux_loss") + series(run_dir, "train/router/z_loss")
        test("SFT has Megatron's", not why and len(loss) == 4 and all(v > 0 for v in loss), why or loss)
        shared = experts_model(s, "qwen2_moe", {
            "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 32})
        frozen = {"model.override_config.moe_config.freeze_moe_router": True, "optim.weight_decay": 0.1}
        for optim, start, routers in (("AdamW", shared, (ROUTER, SHARED_GATE)), ("Muon", model, (ROUTER,)),
                                      ("SGD", model, (ROUTER,))):
            run_dir, why = sft(s, "frozen" + optim, start, 1, **{"optim.optimizer": optim, **frozen})
            before = tensors(start / "model.safetensors")
            after = before if why else tensors(run_dir / "global_step_1/actor/model.safetensors")
            test(f"{optim}: frozen routers stay, experts are trained",
                 not why and all(before[k][2] == after[k][2] for k in routers) and before[EXPERT][2] != after[EXPERT][2], why)
    test.end()


main()
