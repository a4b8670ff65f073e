"""The disk of a run before its first step: the plan's size of a checkpoint is that of the files; a run whose one checkpoint does
not fit is refused before a model is read, one that may fill the disk later is warned with the numbers; `verlc plan` has them."""

import json
import pathlib
import re
import sqlite3
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, run  # noqa: E402

MODEL, ACTOR = "actor_rollout_ref.model.", "actor_rollout_ref.actor."
SHORT = {"data.max_response_length": 4, "trainer.logger": "[file]"}


def size(d):
    return sum(f.stat().st_size for f in d.rglob("*") if f.is_file())


def plan_of(args):
    return json.loads(run("plan", "--json", *args).stdout)["disk"]


def sizes(s, test):
    """Of every kind of run, within the headers: 2 % and 64 KiB a part. An optimizer of two kinds of state counts as its largest."""
    kinds = {"whole": {}, "lora": {MODEL + "lora_rank": 8}, "8 bits": {ACTOR + "optim.optimizer": "AdamW8bit"},
             "sgd": {ACTOR + "optim.optimizer": "SGD"},
             "critic": {"algorithm.adv_estimator": "gae", "critic.model.path": s.dir / "model",
                        "critic.ppo_micro_batch_size_per_gpu": 4}}
    for name, keys in kinds.items():
        args = s.ppo(name, **{**SHORT, "trainer.total_training_steps": 1, **keys})
        disk = plan_of(args[1:])
        run(*args)
        real = size(s.dir / name / "global_step_1")
        test(f"{name}: a checkpoint's size", real <= disk["checkpoint"] <= real * 1.02 + 2 * 65536, (real, disk))
        logs = size(s.dir / name) - real
        test(f"{name}: run.db and logs are at most what is planned", logs <= disk["logs"], (logs, disk))
    args = s.ppo("many", **{**SHORT, "trainer.total_training_steps": 10, "trainer.save_freq": 3})
    for keep, most in (("null", 4), (1, 2), (2, 3), (7, 4)):
        disk = plan_of([*args[1:], f"trainer.max_actor_ckpt_to_keep={keep}"])
        test(f"4 checkpoints, {keep} kept: at a time", (disk["saves"], disk["at_a_time"]) == (4, most) and disk["fits"], disk)
    test("none with save_freq=0", plan_of([*args[1:], "trainer.save_freq=0"])["saves"] == 0)
    url = {"actor_rollout_ref.rollout.engine_url": "http://localhost:9"}
    whole = (s.dir / "model/model.safetensors").stat().st_size
    sent = [plan_of(s.ppo("sends", **url, **dir)[1:])["sent"]
            for dir in ({}, {"actor_rollout_ref.rollout.engine_weights_dir": "/tmp"})]
    test("weights for servers: two at a time in the run's directory", 2 * whole - 65536 <= sent[0] <= 2 * whole and sent[1] == 0,
         (sent, whole))
    line = r"^  disk: \d+ MB: 4 checkpoints at a time of \d+ MB \(trainer.save_freq=3, .*=null\), run.db .*; .* free in /"
    test("the table has a line", re.search(line, run("plan", *args[1:]).stdout, re.M))
    sft = ["sft", f"model.path={s.dir / 'model'}", f"data.train_files={s.dir / 'train.jsonl'}", "trainer.total_training_steps=5"]
    test("verlc plan sft has it", plan_of([*sft, f"trainer.default_local_dir={s.dir / 'sft'}"])["checkpoint"] > 10**7)


def narrow(s, test):
    """On file systems of a size of their own, in a mount namespace."""
    one = size(s.dir / "whole/global_step_1") // 1024
    at = s.dir / "disk"
    at.mkdir()

    def on(kib, args):
        words = subprocess.list2cmdline([VERLC, *map(str, args)])
        script = f"mount -t tmpfs -o size={kib}k none {at} || exit 77; {words}; rc=$?; " \
                 f"cp {at}/run/run.db {s.dir}/copy.db; exit $rc"
        return subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=ENV, timeout=120)

    keys = {**SHORT, "trainer.total_training_steps": 3, "trainer.save_freq": 1}
    p = on(one // 2, s.ppo("disk/run", **keys))
    if p.returncode in (1, 77) and ("Operation not permitted" in p.stderr or "must be superuser" in p.stderr):
        print("skipped: no mount namespace here")
        return
    test.refused("not even one checkpoint fits", p, 4, "trainer.default_local_dir=", "a checkpoint takes 27 MB",
                 "has 13 MB free", "trainer.save_freq=0")
    test("before the first step", not re.search(r"^done", p.stderr, re.M), p.stderr)
    p = on(one // 2, s.ppo("disk/run", **{**keys, "trainer.save_freq": 0}))
    test("without a checkpoint it runs", p.returncode == 0 and "disk: " not in p.stderr, p.stderr[-600:])
    p = on(one * 5 // 2, s.ppo("disk/run", **keys))
    line = re.search(r"^warning: (disk: \S+ has \d+ MB free, and this run may write 81 MB: 3 checkpoints at a time of 27 MB .*)$",
                     p.stderr, re.M)
    test("room for two of three: a warning with the numbers, and with what would fit",
         line and "trainer.max_actor_ckpt_to_keep=1 it is 54 MB" in line[1], p.stderr[-1500:])
    with sqlite3.connect(s.dir / "copy.db") as db:
        events = [m for m, in db.execute("SELECT message FROM events WHERE kind='warning'")]
    test("which run.db has too", line and line[1] in events, events)
    p = on(one * 5 // 2, s.ppo("disk/run", **{**keys, "trainer.max_actor_ckpt_to_keep": 1}))
    test("and it does fit", p.returncode == 0 and "disk: " not in p.stderr, p.stderr[-800:])
    rows = s.write("chats.jsonl", [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]}] * 4)
    p = on(one // 2, ["sft", f"model.path={s.dir / 'model'}", f"data.train_files={rows}", "data.val_files=[]",
                      "data.train_batch_size=4", "trainer.total_training_steps=1", f"trainer.default_local_dir={at}/run"])
    test.refused("sft: not even one", p, 4, "a checkpoint takes", "the disk has")


def main():
    test = Tests()
    with Scratch(n_train=8, n_test=2) as s:
        sizes(s, test)
        narrow(s, test)
    test.end()


main()
