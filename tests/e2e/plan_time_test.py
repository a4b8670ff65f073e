"""`verlc plan --probe`: the time of a run from real steps of it. It counts what the run would do, leaves nothing behind, goes
on from the run's checkpoint without touching it, and measures a change of a key; ppo and sft."""

import hashlib
import json
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, start  # noqa: E402


def tree(d):
    """Every file below d with its bytes."""
    return {str(f.relative_to(d)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(d.rglob("*")) if f.is_file()}


def probe(args, *options, check=True):
    return run("plan", "--probe", *options, *args, check=check)


def changes(plan):
    return {c["change"]: c for c in plan["changes"]}


def ppo(s, test):
    keys = {"data__max_response_length": 16, "trainer__save_freq": 4, "trainer__test_freq": 3, "trainer__val_before_train": True,
            "trainer__total_training_steps": 20, "trainer__logger": "[console,file,tensorboard]",
            "trainer__rollout_data_dir": s.dir / "dump"}
    args = s.ppo("run", **keys)
    before = tree(s.dir)
    p = probe(args, "--json")
    plan = json.loads(p.stdout)
    test("nothing is left of a probe", tree(s.dir) == before and not (s.dir / "run").exists() and not (s.dir / "dump").exists())
    test("no step line, no tracker", "step:" not in p.stdout and "tensorboard" not in p.stderr, p.stdout[:300])
    test("three steps, each told on stderr", len(plan["steps"]) == 3 and p.stderr.count("probe: step ") == 3, p.stderr)
    mean = sum(plan["steps"][1:]) / 2
    test("the first step is in no mean", abs(plan["step"] - mean) < 1e-9, plan)
    phases = sum(x["mean"] for x in plan["phases"].values())
    test("the phases are the step", abs(phases - plan["step"]) < 1e-6
         and {"gen", "ref", "update_actor"} < set(plan["phases"]), plan)
    test("the memory plan is there too", 0 < plan["memory"]["total"] <= plan["memory"]["limit"] and plan["memory"]["parts"], plan)
    test("validations and checkpoints at their frequency", plan["validation"]["passes"] == 1 + 7
         and plan["checkpoint"]["count"] == 5 and plan["checkpoint"]["bytes"] > 1 << 20, plan)
    whole = (plan["start"] + max(plan["steps"][0] - mean, 0) + 20 * mean + 8 * plan["validation"]["seconds"]
             + plan["checkpoint"]["seconds"] + 4 * max(plan["checkpoint"]["waits"], plan["checkpoint"]["seconds"] - 4 * mean))
    test("the whole run is their sum", abs(plan["run"]["seconds"] - whole) < 1e-6, (plan["run"], whole))
    c = changes(plan)
    test("a validation less often saves its passes", abs(c["trainer.test_freq=6"]["run"] + 3 * plan["validation"]["seconds"]) < 1e-9
         and c["trainer.test_freq=6"]["step"] == 0, c)
    test("shorter responses save, more samples cost",
         c["data.max_response_length=8"]["step"] < 0 < c["actor_rollout_ref.rollout.n=3"]["step"], c)

    text = probe(args, "--try", "actor_rollout_ref.rollout.n=4").stdout
    test("the table has memory and time", all(x in text for x in ("memory plan:", "the whole run:", "assumed: responses as long")),
         text)
    test("a change is measured", any("rollout.n=4" in x and "measured" in x for x in text.splitlines()), text)
    test("what was measured is not predicted", "rollout.n=3" not in text, text)
    test.refused("a change that is none, before anything is measured", probe(args, "--try", "trainer.epoch=3", check=False), 2,
                 "--try trainer.epoch=3")
    test.refused("no probe of a GPU that is not there", probe(args, "--gpu", "24GB", check=False), 2, "--gpu", "--probe")

    run(*s.ppo("run", **{**keys, "trainer__total_training_steps": 4}))
    before = tree(s.dir)
    plan = json.loads(probe(args, "--json").stdout)
    test("with a checkpoint: what is left of the run", plan["run"]["done_steps"] == 4 and plan["validation"]["passes"] == 1 + 6
         and plan["checkpoint"]["count"] == 4, plan["run"])
    test("and the run's directory stays as it is", tree(s.dir) == before)
    warm = json.loads(probe(s.ppo("warm", **{**keys, "algorithm__adv_estimator": "gae", "critic__model__path": s.dir / "model",
                                             "critic__ppo_micro_batch_size_per_gpu": 4, "trainer__critic_warmup": 11,
                                             "trainer__save_freq": 0, "trainer__test_freq": -1,
                                             "trainer__val_before_train": False}), "--json").stdout)
    update = warm["phases"]["update_actor"]["mean"]
    whole = warm["start"] + max(warm["steps"][0] - warm["step"], 0) + 20 * warm["step"] - 10 * update
    test("critic_warmup: steps without the policy's update", update > 0 and abs(warm["run"]["seconds"] - whole) < 1e-6, warm)
    test("what is off is not measured", warm["validation"]["seconds"] is None and warm["checkpoint"]["seconds"] is None)


def full_length(s, test):
    """Responses that end early: the range goes to the full length, which one step measures."""
    args = s.ppo("full", data__max_response_length=96, actor_rollout_ref__rollout__n=8, trainer__save_freq=0,
                 trainer__total_training_steps=50)
    plan = json.loads(probe(args, "--json").stdout)
    r = plan["responses"]
    test("lengths are the probe's", 0 < r["mean"] <= r["longest"] <= 96 and r["share_at_limit"] < 0.95, r)
    test("a step at full length was made, and the range is wider", plan["step_at_full_length"] is not None
         and plan["run"]["seconds_at_full_length"] > 0, plan)


def stopped(s, test):
    """SIGINT ends a probe as it ends a run, but for what is left: nothing. In a directory whose name needs quotes."""
    d = s.dir / "it's ${a} [name]=1"
    d.mkdir()
    quoted = str(d / "run").replace("'", "\\'").replace("${", "\\${")
    args = s.ppo("x", data__max_response_length=64, actor_rollout_ref__rollout__n=8)
    args = [a for a in args if not a.startswith("trainer.default_local_dir=")]
    p = start(["plan", "--probe", *args, f"trainer.default_local_dir='{quoted}'"])
    there = []
    for line in p.stderr:
        if "probe: step 1 of 3" in line:
            there = [x.name for x in d.iterdir()]
            p.send_signal(signal.SIGINT)
    test("it runs beside the run's directory", len(there) == 1 and there[0].startswith(".verlc-probe-"), there)
    test("SIGINT: status 130, nothing left", p.wait() == 130 and not list(d.iterdir()), (p.returncode, list(d.iterdir())))


def several_ranks(s, test):
    """The run's ranks are probed; nothing of theirs is left."""
    keys = {"trainer__device": "cpu", "trainer__ranks": 2, "trainer__save_freq": 2, "trainer__test_freq": 2}
    before = tree(s.dir)
    p = probe(s.ppo("ranks", **keys), "--json")
    plan = json.loads(p.stdout)
    test("two ranks: steps, a pass and a checkpoint are measured", plan["device"].startswith("2 ranks, each on cpu") and
         len(plan["steps"]) == 3 and plan["validation"]["seconds"] > 0 and plan["checkpoint"]["seconds"] > 0 and
         plan["memory"]["ranks"]["n"] == 2, plan)
    test("two ranks: nothing is left", tree(s.dir) == before)


def sft(s, test):
    rows = [{"messages": [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]}
            for a in range(10) for b in range(8)]
    data = s.write("sft.jsonl", rows)
    args = ["sft", f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=16", "data.max_length=64",
            f"model.path={s.dir / 'model'}", "engine.dtype=float32", "trainer.total_epochs=4", "trainer.test_freq=after_each_epoch",
            "trainer.save_freq=-1", f"trainer.default_local_dir={s.dir / 'sft'}", "trainer.logger=[file]"]
    before = tree(s.dir)
    plan = json.loads(probe(args, "--json").stdout)
    test("sft: nothing is left", tree(s.dir) == before)
    test("sft: steps, passes after each epoch, the last checkpoint", plan["run"]["total_steps"] == 20
         and plan["validation"]["passes"] == 4 and plan["checkpoint"]["count"] == 1 and "responses" not in plan, plan)
    plan = json.loads(probe([*args, "trainer.device=cpu", "trainer.ranks=2"], "--json").stdout)
    test("sft on two ranks", plan["device"].startswith("2 ranks, each on cpu") and len(plan["steps"]) == 3 and plan["step"] > 0 and
         tree(s.dir) == before, plan)


def main():
    test = Tests()
    with Scratch() as s:
        ppo(s, test)
        full_length(s, test)
        stopped(s, test)
        several_ranks(s, test)
        sft(s, test)
        test.refused("generate makes no steps", run("plan", "--probe", "generate", "model.path=x", check=False), 2, "no steps")
        test.refused("options of a probe without one", run("plan", "--choices", *s.ppo("x"), check=False), 2, "--probe")
    test.end()


main()
