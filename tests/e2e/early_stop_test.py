"""Early stopping of ppo and sft: when it ends a run, which checkpoint it keeps and names,
that a resumed run ends where an unbroken one does; and every optimizer resumed to the
bits of an unbroken run."""

import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, state  # noqa: E402


def saved(d):
    return sorted(f.name for f in pathlib.Path(d).glob("global_step_*"))


def best(d):
    return json.loads((pathlib.Path(d) / "best_checkpoint.json").read_text())


def sft(s, run_dir, **keys):
    args = {"model.path": s.dir / "model", "data.train_files": s.dir / "chats.jsonl", "data.val_files": s.dir / "val.jsonl",
            "data.train_batch_size": 4, "data.max_length": 128, "data.micro_batch_size_per_gpu": 4, "data.use_dynamic_bsz": False,
            "engine.dtype": "float32", "optim.lr": 1e-3, "trainer.total_training_steps": 12, "trainer.total_epochs": 2,
            "trainer.test_freq": 1, "trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 1, "trainer.logger": "[console,file]",
            "trainer.default_local_dir": s.dir / run_dir}
    args.update({k.replace("__", "."): v for k, v in keys.items()})
    return run("sft", *[f"{k}={v}" for k, v in args.items()], check=False)


STOP = {"trainer__early_stopping__enable": True, "trainer__early_stopping__patience": 2, "trainer__early_stopping__min_delta": 100}


def check_sft(s, test):
    p = sft(s, "stop", **STOP)
    test("sft: ends after two validations that are not better", p.returncode == 0 and "stopped early after step 3" in p.stderr,
         p.stderr[-500:])
    test("sft: the best checkpoint stays besides the newest", saved(s.dir / "stop") == ["global_step_1", "global_step_3"],
         saved(s.dir / "stop"))
    b = best(s.dir / "stop")
    test("sft: and is named, in a file and in the closing line", b["step"] == 1 and b["checkpoint"] == "global_step_1" and
         b["metric"] == "val/loss" and b["mode"] == "min" and "best: val/loss" in p.stderr and "global_step_1/actor" in p.stderr, b)
    p = sft(s, "stop", **STOP)
    test("sft: started again it stays ended", p.returncode == 0 and "stopped early after step 3" in p.stderr and
         saved(s.dir / "stop") == ["global_step_1", "global_step_3"], p.stderr[-300:])
    sft(s, "two", trainer__total_training_steps=2, **STOP)
    p = sft(s, "two", **STOP)
    test("sft: resumed after step 2 it ends with the bits of an unbroken run", p.returncode == 0 and
         "stopped early after step 3" in p.stderr and state(s.dir / "two", 3) == state(s.dir / "stop", 3), p.stderr[-300:])
    p = sft(s, "on", trainer__early_stopping__enable=True, trainer__early_stopping__patience=3, trainer__save_freq=-1)
    losses = {r["step"]: r["data"]["val/loss"] for r in map(json.loads, (s.dir / "on/metrics.jsonl").read_text().splitlines())
              if "val/loss" in r["data"]}
    b = best(s.dir / "on")
    test("sft: without save_freq the best is saved all the same, and it is the lowest", losses and
         b["value"] == min(losses.values()) and
         losses[b["step"]] == b["value"] and f"global_step_{b['step']}" in saved(s.dir / "on"), (b, losses))
    goal = sorted(losses.values(), reverse=True)[5]
    want = min(k for k, v in losses.items() if v <= goal)
    p = sft(s, "goal", **{**STOP, "trainer__early_stopping__patience": 12}, trainer__early_stopping__stopping_threshold=goal)
    test("sft: ends with the first validation that reaches stopping_threshold, which is the best", p.returncode == 0 and
         f"stopped early after step {want}: val/loss has reached" in p.stderr and best(s.dir / "goal")["step"] == want,
         p.stderr[-500:])
    p = sft(s, "goal", **{**STOP, "trainer__early_stopping__patience": 12}, trainer__early_stopping__stopping_threshold=goal)
    test("sft: started again it stays ended there", p.returncode == 0 and f"stopped early after step {want}" in p.stderr,
         p.stderr[-300:])
    p = sft(s, "x", trainer__early_stopping__enable=True, trainer__test_freq=-1)
    test.refused("sft: no validation to look at", p, 2, "early_stopping.enable", "trainer.test_freq")
    p = sft(s, "x", **STOP, trainer__early_stopping__metric="val/lose")
    test.refused("sft: no such metric", p, 2, "val/lose", "val/loss")


def check_ppo(s, test):
    keys = {**STOP, "trainer__test_freq": 1, "trainer__max_actor_ckpt_to_keep": 1}
    for name in ("val-core/openai/gsm8k/reward/mean@2", "val-core/gsm8k/acc/mean@1"):
        p = run(*s.ppo("x", **keys, trainer__early_stopping__metric=name), check=False)
        test.refused(f"ppo: {name} is refused before step 1", p, 2, name, "val-core/openai/gsm8k/acc/mean@1")
    name = "val-core/openai/gsm8k/reward/mean@1"
    p = run(*s.ppo("x", **keys, trainer__early_stopping__metric=name, trainer__val_before_train=True), check=False)
    test.refused("ppo: a name that the scorer does not give ends the run at step 0", p, 2, "val-core/openai/gsm8k/acc/mean@1")
    two = s.write("two.jsonl", [{**s.row(i), "data_source": ["openai/gsm8k", "math_dapo"][i % 2]} for i in range(4)])
    p = run(*s.ppo("x", **keys, data__val_files=two), check=False)
    test.refused("ppo: of several sources one must be named", p, 2, "trainer.early_stopping.metric is not set",
                 "val-core/openai/gsm8k/acc/mean@1, val-core/math_dapo/acc/mean@1")
    p = run(*s.ppo("chosen", **keys), check=False)
    want = "val-core/openai/gsm8k/acc/mean@1"
    test("ppo: of one source its mean is chosen, and said", p.returncode == 0 and
         f"metric is not set: it is {want}" in p.stderr and best(s.dir / "chosen")["metric"] == want, p.stderr[-500:])
    p = run(*s.ppo("chosen", **keys), check=False)
    test("ppo: a resumed run keeps the choice", p.returncode == 0 and "stopped early after step 3" in p.stderr, p.stderr[-500:])
    keys["trainer__early_stopping__metric"] = want
    p = run(*s.ppo("ppo", **keys), check=False)
    test("ppo: stops, keeps and names the best", p.returncode == 0 and
         saved(s.dir / "ppo") == ["global_step_1", "global_step_3"] and
         best(s.dir / "ppo")["step"] == 1 and best(s.dir / "ppo")["mode"] == "max", p.stderr[-500:])


def check_optimizers(s, test):
    for name, more in [("SGD", "{momentum: 0.9}"), ("Muon", "null"), ("AdamW8bit", "{eps: 1e-7}"), ("Adam", "{amsgrad: true}"),
                       ("RMSprop", "{momentum: 0.5, centered: true, foreach: true}")]:
        keys = {"optim__optimizer": name, "optim__override_optimizer_config": more, "optim__lr_scheduler_type": "wsd",
                "optim__lr_warmup_steps": 2, "trainer__test_freq": -1}
        p = sft(s, f"{name}", trainer__total_training_steps=4, **keys)
        lines = [json.loads(x)["data"]
                 for x in (s.dir / name / "metrics.jsonl").read_text().splitlines()] if p.returncode == 0 else []
        test(f"{name}: the loss falls", len(lines) == 4 and lines[-1]["train/loss"] < lines[0]["train/loss"], p.stderr[-300:])
        sft(s, f"{name}2", trainer__total_training_steps=4, trainer__max_ckpt_to_keep=4, **keys)
        for step in (3, 4):
            shutil.rmtree(s.dir / f"{name}2/global_step_{step}")
        (s.dir / f"{name}2/latest_checkpointed_iteration.txt").write_text("2")
        sft(s, f"{name}2", trainer__total_training_steps=4, **keys)
        test(f"{name}: resumed to the bits of an unbroken run", state(s.dir / f"{name}2", 4) == state(s.dir / name, 4))
    p = sft(s, "SGD", trainer__total_training_steps=6, trainer__test_freq=-1)
    test.refused("another optimizer's checkpoint is refused", p, 3, "exp_avg is missing", "optimizer that saved it")
    p = sft(s, "AdamW8bit", trainer__total_training_steps=6, trainer__test_freq=-1, optim__optimizer="SGD")
    test.refused("a checkpoint with state that this optimizer lacks is refused", p, 3, "is of another optimizer", "that saved it")
    p = sft(s, "SGD2", trainer__total_training_steps=6, trainer__test_freq=-1, optim__optimizer="AdamW",
            optim__override_optimizer_config="{amsgrad: true}")
    test.refused("amsgrad needs its own state", p, 3, "exp_avg is missing", "optimizer that saved it")
    p = sft(s, "x", optim__override_optimizer_config="{momentum: 0.9}")
    test.refused("an option of another optimizer", p, 2, "momentum", "AdamW has no such option")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        chats = [{"messages": [{"role": "user", "content": f"What is {i % 7} + {i % 5}?"},
                               {"role": "assistant", "content": f"#### {i % 7 + i % 5}"}]} for i in range(40)]
        s.write("chats.jsonl", chats[:32])
        s.write("val.jsonl", chats[32:])
        check_sft(s, test)
        check_ppo(s, test)
        check_optimizers(s, test)
    test.end()


main()
