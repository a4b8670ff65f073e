"""Model directories as they are read and written: no file is read through a link that leaves its directory, permissions are
kept, a directory that is moved away in mid-run costs no checkpoint, and one that --force replaces is whole at any moment,
even after kill -9."""

import os
import pathlib
import random
import shutil
import stat
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, start  # noqa: E402

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def whole(d, versions):
    """Whether the model that is there now is one of these, read through one handle so that it cannot change in between."""
    try:
        fd = os.open(d, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        found = []
        for name in FILES:
            with open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=fd)) as f:
                found.append(f.read())
        return found in versions
    except FileNotFoundError:
        return os.fstat(fd).st_nlink == 0 or not os.path.samestat(os.fstat(fd), os.stat(d))  # replaced since it was opened
    finally:
        os.close(fd)


def replaced(test, s):
    out, other = s.dir / "out", s.dir / "other"
    run("model", "init", "--preset", "tiny", "--out", other, "--seed", "2")
    commands = {"export": ["model", "export", "--model", s.dir / "model"], "merge": ["model", "merge", "--model", s.dir / "model"],
                "init": ["model", "init", "--preset", "tiny", "--seed", "1"]}
    rng = random.Random(3)
    for name, command in commands.items():
        args = [*command, "--out", out, "--force"]
        run("model", "export", "--model", other, "--out", out, "--force")
        versions = [[(out / f).read_bytes() for f in FILES]]
        began = time.time()
        run(*args)
        length = time.time() - began
        versions.append([(out / f).read_bytes() for f in FILES])
        test(f"{name} --force: another model takes the place", versions[0] != versions[1])
        for i in range(4000):  # removing what was there takes a while
            (out / f"note{i}").write_text("x")
        out.chmod(0o700)
        p, looks, good = start(args), 0, 0
        while p.poll() is None:
            looks += 1
            good += whole(out, versions)
        test(f"{name} --force: whole at every look while it is replaced", looks == good and p.returncode == 0, f"{good} of {looks}")
        test(f"{name} --force: the directory's mode is kept", stat.S_IMODE(out.stat().st_mode) == 0o700)
        test(f"{name} --force: nothing else is left", sorted(f.name for f in out.parent.glob("out*")) == ["out"])
        good = 0
        for _ in range(10):
            p = start(args)
            time.sleep(rng.uniform(0, length))
            p.kill()
            p.wait()
            good += whole(out, versions)
        run(*args)
        test(f"{name} --force: whole after kill -9", good == 10, f"{good} of 10")
        test(f"{name} --force: what the killed ones left is removed", sorted(f.name for f in out.parent.glob("out*")) == ["out"],
             os.listdir(s.dir))


# ---- a directory that goes away in mid-run ----

STEPS = 8
RUN = {"trainer.total_training_steps": STEPS, "data.max_response_length": 4}


def sft(s, run_dir, **keys):
    s.write("chats.jsonl", [{"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}]}
                            for i in range(64)])
    keys = {"data.train_files": s.dir / "chats.jsonl", "data.train_batch_size": 4, "data.max_length": 64,
            "trainer.total_training_steps": STEPS, "trainer.save_freq": 1, "trainer.logger": "[file]",
            "trainer.default_local_dir": s.dir / run_dir, **keys}
    return ["sft", *(f"{k}={v}" for k, v in keys.items())]


def moved(test, s):
    arr = "actor_rollout_ref.model."
    run(*s.ppo("adapter", **{"trainer.total_training_steps": 1, arr + "lora_rank": 4}))
    critic = {"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 4}
    runs = {"grpo": (lambda d: s.ppo("grpo", **RUN, **{arr + "path": d / "model"}), ["actor"]),
            "critic": (lambda d: s.ppo("critic", **RUN, **critic, **{arr + "path": d / "model", "critic.model.path": d / "critic"}),
                       ["actor", "critic"]),
            "lora": (lambda d: s.ppo("lora", **RUN, **{arr + "path": d / "model", arr + "lora_adapter_path": d / "adapter"}), []),
            "sft": (lambda d: sft(s, "sft", **{"model.path": d / "model"}), ["actor"])}
    for name, (args, parts) in runs.items():
        d, away = s.dir / f"{name}-models", s.dir / f"{name}-away"
        for part in ("model", "critic"):
            shutil.copytree(s.dir / "model", d / part)
        shutil.copytree(s.dir / "adapter/global_step_1/actor", d / "adapter")
        p = start(args(d))
        end = time.time() + 60
        while not (s.dir / name / "global_step_1").is_dir() and p.poll() is None and time.time() < end:
            time.sleep(0.001)
        d.rename(away)
        going = p.poll() is None
        said = p.communicate(timeout=120)[1]
        test(f"{name}: its model directories are moved away after step 1, and it ends", going and p.returncode == 0, said[-500:])
        whole_files = {f.name: f.read_bytes() for f in (away / "model").iterdir() if f.suffix != ".safetensors"}
        loads = same = 0
        for step in range(2, STEPS + 1):
            c = s.dir / name / f"global_step_{step}"
            out = s.dir / "loaded"
            ok = run("model", "export", "--model", c, "--out", out, "--force", check=False).returncode == 0 if parts else run(
                "model", "merge", "--model", away / "model", "--adapter", c / "actor", "--out", out, "--force",
                check=False).returncode == 0
            ok &= all(run("score", "--model", c / part, check=False, input='{"ids": [5, 9, 7]}\n').returncode in (0, 3)
                      for part in parts)
            loads += ok
            same += all((c / part / f).exists() and (c / part / f).read_bytes() == b for part in parts
                        for f, b in whole_files.items() if part == "actor" or f != "config.json")
        test(f"{name}: all later checkpoints load", loads == STEPS - 1, f"{loads} of {STEPS - 1}")
        test(f"{name}: with the configuration and tokenizer that the directory had", same == STEPS - 1, f"{same} of {STEPS - 1}")


# ---- links and permissions ----

def linked(s, name, target, base="model"):
    """A copy of the model in which one file is a link."""
    d = s.dir / f"link{len(list(s.dir.glob('link*')))}"
    shutil.copytree(s.dir / base, d)
    (d / name).unlink(missing_ok=True)
    (d / name).symlink_to(target)
    return d


def links(test, s):
    secret = s.dir / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    out, n = s.dir / "links-out", 0
    for name in ("merges.txt", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
                 "generation_config.json", "model.safetensors"):
        for target in (secret, "../secret", name, "/proc/self/environ"):
            d = linked(s, name, target)
            p = run("model", "export", "--model", d, "--out", out, check=False)
            ok = p.returncode == 3 and str(d) in p.stderr and not out.exists()
            n += ok
            if not ok:
                print(name, target, p.stderr)
                shutil.rmtree(out, ignore_errors=True)
    test("a link out of the directory is refused, whatever the file", n == 28, f"{n} of 28")
    d = linked(s, "merges.txt", "../secret")
    p = run(*s.ppo("secret-run", **{"actor_rollout_ref.model.path": d}), check=False)
    test.refused("ppo: refused before the first step", p, 3, "merges.txt", str(secret), "out of the model directory")
    test.refused("init --tokenizer: refused", run("model", "init", "--preset", "tiny", "--tokenizer", d, "--out", out,
                                                  check=False), 3, "merges.txt")
    adapter = linked(s, "adapter_model.safetensors", s.dir / "adapter/global_step_1/actor/adapter_model.safetensors",
                     "adapter/global_step_1/actor")
    test.refused("merge: an adapter's link", run("model", "merge", "--model", s.dir / "model", "--adapter", adapter, "--out", out,
                                                 check=False), 3, "adapter_model.safetensors")
    d = linked(s, "merges.txt", "loop.txt")
    (d / "loop.txt").symlink_to("merges.txt")
    test.refused("a loop of links", run("model", "export", "--model", d, "--out", out, check=False), 3, "merges.txt")

    hub, rev = s.dir / "hub", "models--user--name/snapshots/0a1b"
    (hub / rev).mkdir(parents=True)
    blobs = hub / "models--user--name/blobs"
    blobs.mkdir()
    for i, f in enumerate(sorted((s.dir / "model").iterdir())):
        shutil.copy(f, blobs / f"{i:040x}")
        (hub / rev / f.name).symlink_to(f"../../blobs/{i:040x}")
    (s.dir / "dir-link").symlink_to(hub / rev)
    inside = linked(s, "tokenizer.json", "real.json")
    shutil.copy(s.dir / "model/tokenizer.json", inside / "real.json")
    absolute = linked(s, "tokenizer.json", s.dir / "dir-link2/real.json", inside.name)
    (s.dir / "dir-link2").symlink_to(absolute.name)
    for what, path in {"a snapshot of the hub cache": hub / rev, "a link to a directory": s.dir / "dir-link",
                       "a link within the directory": inside, "an absolute one, by another way": absolute}.items():
        shutil.rmtree(s.dir / "linked-run", ignore_errors=True)
        run(*s.ppo("linked-run", **{"actor_rollout_ref.model.path": path, "trainer.total_training_steps": 1}))
        actor = s.dir / "linked-run/global_step_1/actor"
        test(f"{what}: read, and saved as files", not any(f.is_symlink() for f in actor.iterdir()) and
             (actor / "tokenizer.json").read_bytes() == (s.dir / "model/tokenizer.json").read_bytes())
    (blobs / f"{0:040x}").unlink()
    (blobs / f"{0:040x}").symlink_to(secret)
    test.refused("a blob that is itself a link out", run("model", "export", "--model", hub / rev, "--out", out, check=False), 3,
                 str(secret))


def modes(test, s):
    d = s.dir / "private"
    shutil.copytree(s.dir / "model", d)
    (d / "tokenizer.json").chmod(0o600)
    (d / "tokenizer_config.json").chmod(0o640)
    wanted = {"tokenizer.json": 0o600, "tokenizer_config.json": 0o640}
    for mask, most in ((0o022, 0o777), (0o077, 0o700)):
        out, actor = s.dir / f"modes-{mask:o}", s.dir / f"modes-run-{mask:o}/global_step_1/actor"
        run("model", "export", "--model", d, "--out", out, preexec_fn=lambda: os.umask(mask))
        run(*s.ppo(actor.parent.parent.name, **{"actor_rollout_ref.model.path": d, "trainer.total_training_steps": 1}),
            preexec_fn=lambda: os.umask(mask))
        for what, at in {"export": out, "a checkpoint": actor}.items():
            got = {f: stat.S_IMODE((at / f).stat().st_mode) for f in wanted}
            kept = {f: m & most for f, m in wanted.items()}
            test(f"{what}, umask {mask:o}: a tokenizer's permissions are kept", got == kept, got)


def main():
    test = Tests()
    with Scratch() as s:
        moved(test, s)
        links(test, s)
        modes(test, s)
        replaced(test, s)
    test.end()


main()
