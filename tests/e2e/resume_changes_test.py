"""A resume says what is otherwise than before: one line a key on the console and an event in run.db, for `verlc show` too; a
second try in a directory says that it continues; another model, and an adapter on a whole checkpoint or the other way, is refused
in words."""

import ctypes
import json
import pathlib
import re
import shutil
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, state  # noqa: E402

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
SHORT = {"data.max_response_length": 4, "trainer.save_freq": 1, "trainer.logger": "[file]"}


def told(text):
    return re.findall(r"^changed since step (\d+): (\S+) (.*) -> (.*)$", text, re.M)


def events(s, name):
    with sqlite3.connect(s.dir / name / "run.db") as db:
        return [m for m, in db.execute("SELECT message FROM events WHERE kind='changed' ORDER BY id")]


def ppo(s, name, steps, **keys):
    return run(*s.ppo(name, **{**SHORT, "trainer.total_training_steps": steps, **keys}), check=False)


def keys_are_told(s, test):
    p = ppo(s, "first", 3)
    test("a run that starts says nothing of changes", p.returncode == 0 and not told(p.stderr) and "continuing" not in p.stderr,
         p.stderr)
    whole = state(s.dir / "first", 3)
    shutil.rmtree(s.dir / "first/global_step_3")
    (s.dir / "first/latest_checkpointed_iteration.txt").write_text("2")
    p = ppo(s, "first", 3)
    test("the same command again: it says that it continues, since when, and no change",
         re.search(r"^continuing from step 2 of the run in \S+/first that began 20\d\d-\S+ \d\d:\d\d, saved 20.*=disable", p.stderr,
                   re.M) and not told(p.stderr) and not events(s, "first"), p.stderr)
    test("and its state is the unbroken run's, bit for bit", state(s.dir / "first", 3) == whole)

    more = {ACTOR + "optim.lr": "1e-5", "actor_rollout_ref.rollout.n": 4, "trainer.threads": 2, "trainer.experiment_name": "b c",
            ACTOR + "use_torch_compile": False, "+data.apply_chat_template_kwargs.enable_thinking": True,
            "reward_model.num_workers": 2}
    p = ppo(s, "first", 5, **more)
    want = [("3", ACTOR + "optim.lr", "0.0001", "1e-05"), ("3", "actor_rollout_ref.rollout.n", "2", "4"),
            ("3", "data.apply_chat_template_kwargs.enable_thinking", "null", "true"), ("3", "reward.num_workers", "8", "2"),
            ("3", "trainer.total_training_steps", "3", "5"), ("3", "trainer.experiment_name", "gsm8k", "'b c'"),
            ("3", "trainer.threads", "null", "2")]
    test("each key that has changed is told, and nothing else: no noted key, none that follows another by default",
         p.returncode == 0 and sorted(told(p.stderr)) == sorted(want), p.stderr)
    lines = re.findall(r"^changed since .*$", p.stderr, re.M)
    test("run.db has the lines as events", events(s, "first") == lines, events(s, "first"))
    shown = run("show", s.dir / "first").stdout
    test("and `verlc show` has them", all(line.split(": ")[1].split(" ->")[0] in shown for line in lines[:3]), shown)
    p = ppo(s, "first", 6, **{**more, "trainer.resume_mode": "resume_path",
                              "trainer.resume_from_path": s.dir / "first/global_step_3"})
    test("how to resume is no change; resume_path is compared with its own checkpoint",
         ("3", "trainer.total_training_steps", "3", "6") in told(p.stderr) and
         not any("resume" in k for _, k, _, _ in told(p.stderr)), p.stderr)


def models(s, test):
    ppo(s, "model", 1)
    run("model", "init", "--preset", "tiny", "--out", s.dir / "other", "--seed", "2")
    p = ppo(s, "model", 2, **{MODEL + "path": s.dir / "other"})
    test.refused("another model is refused", p, 3, MODEL + "path=", "other", "trainer.resume_other_model=True", "global_step_1")
    test("and told", ("1", MODEL + "path", str(s.dir / "model"), str(s.dir / "other")) in told(p.stderr), p.stderr)
    p = ppo(s, "model", 2, **{MODEL + "path": s.dir / "other", "trainer.resume_other_model": True})
    test("unless the key allows it", p.returncode == 0 and re.search(r"^warning: .*another model", p.stderr, re.M), p.stderr)
    p = ppo(s, "model", 3, **{MODEL + "path": s.dir / "other"})
    test("then it is the run's model", p.returncode == 0, p.stderr)
    shutil.copytree(s.dir / "other", s.dir / "moved")
    config = json.loads((s.dir / "moved/config.json").read_text())
    (s.dir / "moved/config.json").write_text(json.dumps({**config, "_name_or_path": "x"}, indent=1))
    p = ppo(s, "model", 4, **{MODEL + "path": s.dir / "moved"})
    test("a directory that moved is the same model", p.returncode == 0 and "another model" not in p.stderr, p.stderr)
    shutil.copy(s.dir / "model/model.safetensors", s.dir / "moved")
    p = ppo(s, "model", 5, **{MODEL + "path": s.dir / "moved"})
    line = [t for t in told(p.stderr) if t[1] == MODEL + "path"]
    test.refused("other weights under the same name are another model", p, 3, MODEL + "path=")
    test("told by their fingerprints", len(line) == 1 and line[0][2] != line[0][3] and
         all(re.search(r"moved \([0-9a-f]{8}\)$", x) for x in line[0][2:]), p.stderr)
    change_trainer(s.dir / "model/global_step_4", lambda t: (t.pop("models"), t.pop("config_name")))
    p = ppo(s, "model", 5, **{MODEL + "path": s.dir / "moved"})
    test("a checkpoint without fingerprints still resumes", p.returncode == 0 and "continuing from step 4" in p.stderr, p.stderr)


def change_trainer(checkpoint, change):
    """Its trainer.json otherwise, as if a run had written it so."""
    trainer, manifest = (json.loads((checkpoint / f).read_text()) for f in ("trainer.json", "manifest.json"))
    change(trainer)
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    del manifest["files"]["trainer.json"]
    manifest["files"]["trainer.json"] = hash_of(checkpoint / "trainer.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def date(s, test):
    """A template that writes the date, of a run that began on another day."""
    shutil.copytree(s.dir / "model", s.dir / "dated_model")
    (s.dir / "dated_model/chat_template.jinja").write_text(
        "{{ strftime_now('%Y%m%d') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    more = {MODEL + "path": s.dir / "dated_model", "data.max_prompt_length": 512}
    p = ppo(s, "dated", 1, **more)
    test("a template with the date", p.returncode == 0, p.stderr)
    change_trainer(s.dir / "dated/global_step_1", lambda t: t.update(template_date=20240229))
    p = ppo(s, "dated", 2, **more)
    with sqlite3.connect(s.dir / "dated/run.db") as db:
        prompts = [(step, p[:8]) for step, p in db.execute("SELECT step, prompt FROM samples WHERE validation=0")]
    days = {step: {day for k, day in prompts if k == step} for step in (1, 2)}
    test("a resumed run's prompts have that of its beginning", p.returncode == 0 and days[2] == {"20240229"} and
         len(days[1]) == 1 and days[1] != days[2], f"{days} {p.stderr}")


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def hash_of(path):
    """As a manifest has it, by the library that the program has too."""
    xxh = ctypes.CDLL("libxxhash.so.0").XXH3_128bits
    xxh.argtypes, xxh.restype = [ctypes.c_char_p, ctypes.c_size_t], Hash128
    h = xxh(path.read_bytes(), path.stat().st_size)
    return {"bytes": path.stat().st_size, "xxh3_128": f"{h.high:016x}{h.low:016x}"}


def adapters(s, test):
    lora = {MODEL + "lora_rank": 4, MODEL + "target_modules": "[q_proj]"}
    ppo(s, "whole", 1)
    ppo(s, "lora", 1, **lora)
    key = MODEL + "lora_rank"
    test.refused("an adapter on a whole checkpoint", ppo(s, "whole", 2, **lora), 3, "all weights", "rank 4", key + "=0")
    test.refused("all weights on an adapter's", ppo(s, "lora", 2), 3, "rank 4, alpha 16", "all weights", key + "=4")
    test.refused("another rank", ppo(s, "lora", 2, **{**lora, key: 8}), 3, "rank 4", "rank 8", key + "=4")
    test.refused("another alpha", ppo(s, "lora", 2, **lora, **{MODEL + "lora_alpha": 32}), 3, "alpha 16", "alpha 32")
    for modules in ("[o_proj]", "[q_proj,v_proj]"):
        test.refused(f"other modules {modules}", ppo(s, "lora", 2, **{**lora, MODEL + "target_modules": modules}), 3, "modules",
                     "target_modules")
    p = ppo(s, "lora", 2, **{**lora, MODEL + "target_modules": "[q_proj]"})
    test("the same adapter goes on", p.returncode == 0, p.stderr)


def sft(s, test):
    rows = s.write("sums.jsonl", [{"messages": [{"role": "user", "content": f"{i} + 1?"},
                                                {"role": "assistant", "content": str(i + 1)}]} for i in range(8)])

    def tune(steps, **more):
        keys = {"model.path": s.dir / "model", "data.train_files": rows, "data.val_files": "[]", "data.train_batch_size": 4,
                "data.max_length": 64, "trainer.total_training_steps": steps, "trainer.save_freq": 1, "trainer.logger": "[file]",
                "trainer.default_local_dir": s.dir / "sft", **more}
        return run("sft", *[f"{k}={v}" for k, v in keys.items()], check=False)

    tune(1)
    p = tune(2, **{"optim.lr": "1e-4", "data.max_token_len_per_gpu": 4096})
    test("sft tells its keys", sorted(k for _, k, _, _ in told(p.stderr)) ==
         ["data.max_token_len_per_gpu", "optim.lr", "trainer.total_training_steps"] and "continuing from step 1" in p.stderr,
         p.stderr)
    test.refused("and refuses another model", tune(3, **{"model.path": s.dir / "other"}), 3, "model.path=",
                 "trainer.resume_other_model=True")
    test.refused("and an adapter on a whole checkpoint", tune(3, **{"model.lora_rank": 4}), 3, "all weights", "model.lora_rank=0")


def main():
    test = Tests()
    with Scratch(n_train=16, n_test=2) as s:
        keys_are_told(s, test)
        models(s, test)
        date(s, test)
        adapters(s, test)
        sft(s, test)
    test.end()


main()
