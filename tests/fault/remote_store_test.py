"""trainer.default_hdfs_dir: checkpoints in another store. The newest of both places is resumed to the same bits; a copy that fails
delays nothing and is tried again; whatever moment kills a copy, the store has no half checkpoint that a resume would take; another
program's is never written over. Models and rows from there. hdfs:// by tests/fake_hdfs.py, fsspec by its own local and memory
stores."""

import functools
import json
import os
import pathlib
import shutil
import sys
import time

TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "python")]
from verlc_test import ENV, Scratch, at_once, patience, run, start, state  # noqa: E402


class Store:
    """A fake hdfs, and the environment of a program that uses it."""

    def __init__(self, s, name):
        self.dir, self.url = s.dir / name, "hdfs://nn/runs/x"
        (self.dir / "bin").mkdir(parents=True)
        (self.dir / "root").mkdir()
        self.root, self.log = self.dir / "root/runs/x", self.dir / "log"
        (self.dir / "bin/hdfs").write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{TESTS}/fake_hdfs.py" "$@"\n')
        (self.dir / "bin/hdfs").chmod(0o755)
        self.env = {"PATH": f"{self.dir}/bin:{os.environ['PATH']}", "HDFS_ROOT": str(self.dir / "root"), "HDFS_LOG": str(self.log),
                    "HOME": str(self.dir)}


def ppo(s, name, url, steps, **keys):
    return s.ppo(name, trainer__default_hdfs_dir=url, trainer__total_training_steps=steps, **keys)


def same(a, b):
    """Two directories, file by file."""
    files = [{str(f.relative_to(d)): f.read_bytes() for f in d.rglob("*") if f.is_file()} for d in (a, b)]
    return files[0] == files[1] and len(files[0]) > 5


def both_places(test, s, what, url, root, env=None):
    """Copies, and resumes of the newest of both places."""
    name = f"run_{what}"
    p = run(*ppo(s, name, url, 2), env=env)
    steps = [d.name for d in sorted(root.glob("global_step_*"))]
    test(f"{what}: what is saved is there, byte for byte", steps == ["global_step_1", "global_step_2"] and
         (root / "latest_checkpointed_iteration.txt").read_text() == "2" and
         all(same(root / d, s.dir / name / d) for d in steps), p.stderr[-600:])
    test(f"{what}: nothing of the copies is left", not (s.dir / name / ".remote").exists() and
         not list(root.rglob("verlc_upload.txt")))
    shutil.rmtree(s.dir / name)
    p = run(*ppo(s, name, url, 3), env=env)
    test(f"{what}: another machine goes on to the same bits", f"fetching global_step_2 from {url}" in p.stderr and
         state(s.dir / name, 3) == state(s.dir / "unbroken", 3), p.stderr[-600:])
    if not env:
        return
    shutil.rmtree(root / "global_step_3")
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    p = run(*ppo(s, name, url, 3), env=env)
    test(f"{what}: a newer one of this machine is gone on from, and copied", "fetching" not in p.stderr and
         same(root / "global_step_3", s.dir / name / "global_step_3"), p.stderr[-600:])
    weights = root / "global_step_3/actor/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    (root / "global_step_7/actor").mkdir(parents=True)  # broken off: no manifest
    (root / "global_step_7/verlc_upload.txt").write_text("")
    shutil.rmtree(s.dir / name)
    p = run(*ppo(s, name, url, 3), env=env)
    test(f"{what}: a damaged one is named, and the one before it taken", "global_step_3 is not usable" in p.stderr and
         "differ from the manifest's checksum" in p.stderr and state(s.dir / name, 3) == state(s.dir / "unbroken", 3) and
         same(root / "global_step_3", s.dir / name / "global_step_3"), p.stderr[-900:])
    p = run(*ppo(s, name, url, 1, trainer__resume_mode="disable"), env=env)
    test(f"{what}: a new start is the newest from then on", (root / "latest_checkpointed_iteration.txt").read_text() == "1" and
         (root / "global_step_3/manifest.json").exists(), p.stderr[-600:])


def failures(test, s):
    store = Store(s, "failing")
    p = run(*ppo(s, "failing_run", store.url, 3), env={**store.env, "HDFS_FAIL": "2"})
    test("a copy that fails is said once, tried again, and arrives", p.stderr.count("was not copied") == 1 and
         "Connection refused" in p.stderr and "is in hdfs://nn/runs/x now" in p.stderr and
         same(store.root / "global_step_3", s.dir / "failing_run/global_step_3"), p.stderr[-900:])
    began = time.time()
    p = run(*ppo(s, "never", store.url + "2", 2), env={**store.env, "HDFS_FAIL": "1000000"})
    test("one that never arrives ends no run", p.stderr.count("was not copied") == 1 and "starts again" not in p.stderr and
         "global_step_2 is in" in p.stderr and "step:2 - " in p.stdout and time.time() - began < patience(60), p.stderr[-900:])
    p = run(*ppo(s, "nowhere", "", 1))
    test("an empty name is none", ".remote" not in os.listdir(s.dir / "nowhere"), p.stderr)
    p = run(*ppo(s, "never", store.url + "2", 2), env=store.env)
    test("the next start copies it", same(store.dir / "root/runs/x2/global_step_2", s.dir / "never/global_step_2"), p.stderr[-600:])
    none = {**store.env, "PATH": str(store.dir / "empty")}
    test.refused("no client", run(*ppo(s, "no_client", store.url, 1), env=none, check=False), 1, "'hdfs' in PATH")
    p = run(*ppo(s, "no_package", "s3://bucket/x", 1), check=False)
    test.refused("no package", p, 1, "trainer.default_hdfs_dir=s3://bucket/x", "pip install fsspec s3fs")
    p = run(*ppo(s, "no_scheme", "nothing://bucket/x", 1), check=False)
    test.refused("no such store", p, 3, "nothing")
    p = run(*ppo(s, "own_dir", s.dir / "own_dir", 1), check=False)
    test.refused("the run's own directory", p, 2, "trainer.default_local_dir")
    (store.dir / "root/closed").write_text("a file")
    p = run(*ppo(s, "closed", "hdfs://nn/closed/x", 1), env=store.env, check=False)
    test.refused("a store that takes no file", p, 4, "a run does not start without its store")
    verl = store.dir / "root/runs/verl/global_step_4/actor"
    verl.mkdir(parents=True)
    (verl / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    (verl.parents[1] / "latest_checkpointed_iteration.txt").write_text("4")
    p = run(*ppo(s, "verl", "hdfs://nn/runs/verl", 1), env=store.env, check=False)
    test.refused("another program's", p, 3, "global_step_4", "not written by verlc")
    (verl.parents[1] / "latest_checkpointed_iteration.txt").unlink()
    verl.parent.rename(verl.parents[1] / "global_step_1")
    p = run(*ppo(s, "verl", "hdfs://nn/runs/verl", 1), env=store.env, check=False)
    test("another program's is never written over", "never writes over such a one" in p.stderr and
         [f.name for f in verl.parents[1].rglob("*") if f.is_file()] == ["model_world_size_1_rank_0.pt"], p.stderr[-600:])


def killed(test, s):
    """kill -9 in the middle of a copy of step 2."""
    store = Store(s, "killed")
    run(*ppo(s, "killed_run", store.url, 1), env=store.env)
    for name in ("latest_checkpointed_iteration.txt", "model.safetensors", "manifest.json"):
        p = start(ppo(s, "killed_run", store.url, 2), env={**store.env, "HDFS_SLOW": name})
        half, deadline = None, time.time() + 60
        while half is None and time.time() < deadline:
            half = next((f for f in store.root.rglob(f"{name}._COPYING_")), None)
            time.sleep(0.01)
        p.kill()
        p.wait()
        p.stderr.close()
        shutil.rmtree(s.dir / "killed_run")
        p = run(*ppo(s, "killed_run", store.url, 1), env=store.env)
        test(f"killed in the copy of {name}: the one before it is resumed", half is not None and
             "fetching global_step_1 " in p.stderr and "is not usable" not in p.stderr, p.stderr[-600:])
    named = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": store.url + "/global_step_1"}
    p = run(*s.ppo("named", trainer__total_training_steps=2, **named), env=store.env)
    test("resume_from_path of the store", state(s.dir / "named", 2) == state(s.dir / "unbroken", 2), p.stderr[-600:])
    named["trainer__resume_from_path"] = store.url + "/global_step_2"
    for _ in range(2):
        p = run(*s.ppo("named_half", trainer__total_training_steps=2, **named), env=store.env, check=False)
        test("half of one is refused, and not kept", p.returncode == 3 and "fetching" in p.stderr, p.stderr[-600:])
    p = run(*ppo(s, "killed_run", store.url, 2), env=store.env)
    test("and the next copy replaces what was left", same(store.root / "global_step_2", s.dir / "killed_run/global_step_2"),
         p.stderr[-600:])


def inputs(test, s):
    store = Store(s, "inputs")
    there = store.dir / "root/in put"
    shutil.copytree(s.dir / "model", there / "model")
    shutil.copy(s.dir / "train.jsonl", there)
    keys = {"trainer__total_training_steps": 3, "trainer__save_freq": 3}
    for what, root in (("hdfs", "hdfs://nn/in put"), ("file", f"file://{there}"), ("fsspec", f"local://{there}")):
        p = run(*s.ppo(f"from_{what}", **keys, actor_rollout_ref__model__path=f"{root}/model/",
                       data__train_files=f"{root}/train.jsonl"), env=store.env)
        test(f"{what}: model and rows from there", p.stderr.count("fetching ") == 2 and
             state(s.dir / f"from_{what}", 3) == state(s.dir / "unbroken", 3), p.stderr[-600:])
    before = store.log.read_text()
    p = run(*s.ppo("again", **keys, actor_rollout_ref__model__path="hdfs://nn/in put/model",
                   data__train_files="hdfs://nn/in put/train.jsonl"), env=store.env)
    test("what is in the cache is not fetched again", store.log.read_text() == before and "fetching" not in p.stderr,
         p.stderr[-600:])
    for url, status in (("hdfs://nn/nothing", 1), (f"file://{there}/nothing", 3), ("s3://bucket/x", 1), ("hdfs://", 3),
                        ("hdfs://x/..", 3)):
        p = run("model", "info", "--model", url, env=store.env, check=False)
        test.refused(f"not there: {url}", p, status)
    test("nothing half is in the cache", [f.name for f in (store.dir / ".cache/verl/rlhf").glob("*/*")
                                          if f.name not in ("model", "train.jsonl")] == [])


def every_moment(test, s):
    """A put that is broken off before each single call of the store: what a resume would take is whole."""
    import fsspec
    from verlc_helpers import remote_store as module

    class Broken(Exception):
        pass

    class Counted(module.Fsspec):
        left = None

        def call(self, name, *args):
            if Counted.left is not None:
                Counted.left -= 1
                if Counted.left < 0:
                    raise Broken
            return getattr(super(), name)(*args)

        def put(self, pairs):
            for pair in pairs:
                self.call("put", [pair])

        def remove(self, paths):
            for path in paths:
                self.call("remove", [path])

    module.Fsspec = Counted
    url, source, notes = "memory://runs/m", s.dir / "unbroken", str(s.dir / "notes")
    whole = {}
    for step in (1, 2, 3):
        d = source / f"global_step_{step}"
        whole[step] = {str(f.relative_to(d)): f.read_bytes() for f in d.rglob("*") if f.is_file()}

    def put(step):
        return module.put({"url": url, "step": step, "from": str(source / f"global_step_{step}"), "notes": notes})

    put(1)
    put(2)
    fs = fsspec.filesystem("memory")
    fs.pipe("/runs/m/global_step_2/actor/model-00009-of-00009.safetensors", b"of another run")
    n = bad = 0
    for step in (2, 3):  # over one that is there, and a new one
        for n in range(1000):
            Counted.left = n
            try:
                put(step)
                break
            except Broken:
                pass
            Counted.left = None
            found = module.newest({"url": url, "after": -1})
            for entry in found["steps"]:
                to = s.dir / "taken"
                shutil.rmtree(to, ignore_errors=True)
                module.take({"url": url, "step": entry["step"], "to": str(to)})
                got = {str(f.relative_to(to)): f.read_bytes() for f in to.rglob("*") if f.is_file()}
                bad += got != whole[entry["step"]]
            bad += 1 not in [e["step"] for e in found["steps"]]
        Counted.left = None
        root = f"/runs/m/global_step_{step}"
        files = {p.removeprefix(root + "/") for p in fs.find(root)}
        test(f"step {step}: broken off before each of {n} calls", bad == 0 and n > 10 and files == set(whole[step]),
             f"{bad} {files}")
    for text in (b"short", None):
        fs.rm_file("/runs/m/global_step_3/trainer.json")
        if text:
            fs.pipe("/runs/m/global_step_3/trainer.json", text)
        try:
            module.take({"url": url, "step": 3, "to": str(s.dir / "lacking")})
            code = "taken"
        except module.HelperError as error:
            code = error.code
        test(f"a file that is {'short' if text else 'missing'} there is damage, for which the one before it is tried",
             code == "FORMAT", code)
    outside = s.dir.parent / f"{s.dir.name}-outside"
    for text in (b"", b"[]", b"{}", b"nope", json.dumps({"verlc": 1, "files": {f"../../{outside.name}": {"bytes": 1}}}).encode(),
                 b'{"verlc": 1, "files": {"/x": {}}}', b'{"verlc": 1, "files": 3}', b"\xff\xfe",
                 b'{"verlc": 1, "files": {"a": 3}}'):
        fs.pipe("/runs/m/global_step_3/manifest.json", text)
        try:
            steps = [e["step"] for e in module.newest({"url": url, "after": 2})["steps"]]
        except module.HelperError:
            steps = []
        test(f"a manifest {text[:24]} is no checkpoint", steps == [] and not outside.exists(), steps)


def main():
    """Copies and their clients are waited for more than computed."""
    with Scratch(small=True) as s:
        run(*s.ppo("unbroken", trainer__total_training_steps=3))
        store = Store(s, "hdfs")
        test = at_once(lambda test: both_places(test, s, "hdfs", store.url, store.root, store.env),
                       lambda test: both_places(test, s, "directory", str(s.dir / "a store"), s.dir / "a store"),
                       lambda test: both_places(test, s, "fsspec", f"local://{s.dir}/by_fsspec", s.dir / "by_fsspec"),
                       *[functools.partial(part, s=s) for part in (failures, killed, inputs, every_moment)])
    test.end()


main()
