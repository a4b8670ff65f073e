"""Model directories as they are read and written: one that --force replaces is whole at any moment, even after kill -9."""

import os
import pathlib
import random
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


def main():
    test = Tests()
    with Scratch() as s:
        replaced(test, s)
    test.end()


main()
