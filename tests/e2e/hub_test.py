"""Models by their name on the hub, against a small hub on loopback: download, progress, a broken connection, a killed program,
checksums, tokens, the local cache without a network, and what is said when it cannot be had."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from verlc_test import VERLC, Scratch, at_once, run  # noqa: E402


class Hub:
    """fake_hub.py in one of its modes, and an empty cache."""

    def __init__(self, s, mode, keep_cache=False):
        self.home = s.dir / "hf"
        if not keep_cache:
            shutil.rmtree(self.home, ignore_errors=True)
        self.p = subprocess.Popen([sys.executable, ROOT / "tests/unit/fake_hub.py", s.dir / "hub", mode], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True)
        self.env = {"HF_ENDPOINT": f"http://127.0.0.1:{self.p.stdout.readline().strip()}", "HF_HOME": str(self.home),
                    "HF_HUB_CACHE": "", "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "VERLC_PYTHON": sys.executable}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.p.kill()
        self.log = self.p.communicate()[1]


def answers(s, hub, model="user/tiny", **env):
    return run("generate", f"model.path={model}", f"data.path={s.dir / 'ask.jsonl'}", f"data.output_path={s.dir / 'out.jsonl'}",
               "rollout.response_length=4", check=False, env={**hub.env, **env})


def check_fetch(s, test):
    with Hub(s, "ok") as hub:
        p = answers(s, hub)
        test("a model by its name: fetched, used", p.returncode == 0 and "fetching model user/tiny" in p.stderr, p.stderr[-400:])
    p = answers(s, hub)
    test("afterwards without a network", p.returncode == 0 and "fetching" not in p.stderr, p.stderr[-400:])
    p = answers(s, hub, HF_HUB_OFFLINE="1")
    test("and with HF_HUB_OFFLINE", p.returncode == 0, p.stderr[-400:])
    with Hub(s, "flaky") as hub:
        test("HTTP 503 passes", answers(s, hub).returncode == 0)
    large = s.dir / "hub/user/tiny/large.json"  # huggingface_hub keeps pieces of 10 MB
    large.write_bytes(b"{}" + b" " * (24 << 20))
    with Hub(s, "cut") as hub:
        p = answers(s, hub)
    large.unlink()
    begun = [int(n) for n in re.findall(r"range (\d+)", hub.log)]
    broke = p.returncode == 0 and begun and min(begun) > 0
    test("a connection that broke goes on in the middle of the file", broke, hub.log[-300:])


def check_killed(s, test):
    """kill -9 in the middle: the files that were whole are not fetched again."""
    with Hub(s, "slow") as hub:
        files = f"data.path={s.dir / 'ask.jsonl'}", f"data.output_path={s.dir / 'o.jsonl'}"
        p = subprocess.Popen([VERLC, "generate", "model.path=user/tiny", *files], stderr=subprocess.PIPE, text=True,
                             env={**os.environ, **hub.env})
        for line in p.stderr:
            if "fetching" in line:
                first = int(re.search(r"(\d+) files", line)[1])
                break
        while not [*(hub.home / "hub/models--user--tiny").glob("snapshots/*/*")]:
            time.sleep(0.01)
        p.kill()
        p.communicate()
        p = answers(s, hub)
        again = re.search(r"(\d+) files", p.stderr)
        test("kill -9 in the middle: it goes on with the other files", p.returncode == 0 and again and int(again[1]) < first,
             f"{first} {p.stderr[-300:]}")


def check_plan(s, test):
    with Hub(s, "ok") as hub:
        args = [a for a in s.ppo("run", actor_rollout_ref__model__path="user/tiny")[1:]]
        p = run("plan", *args, env=hub.env)
        files = [f.name for f in (hub.home / "hub").glob("models--user--tiny/snapshots/*/*")]
        test("plan fetches the configuration alone", "config.json" in files and "model.safetensors" not in files, str(files))
        p = run("ppo", *args, "trainer.total_training_steps=1", check=False, env=hub.env)
        test("the run fetches the weights", p.returncode == 0 and "fetching model user/tiny" in p.stderr, p.stderr[-400:])


def check_errors(s, test):
    for mode, env, model, status, words in (
        ("damaged", {}, "user/tiny", 3, ("tokenizer.json arrived damaged",)),
        ("escape", {}, "user/tiny", 3, ("..",)),
        ("junk", {}, "user/tiny", 3, ("does not answer as the hub does", "HF_ENDPOINT")),
        ("gated", {}, "user/tiny", 3, ("its owner grants access", "HF_TOKEN")),
        ("token", {}, "user/tiny", 3, ("HF_TOKEN may not read it",)),
        ("huge", {}, "user/tiny", 4, ("GiB free", "HF_HUB_CACHE")),
        ("ok", {}, "user/none", 3, ("no such model on the hub", "nor is there a directory")),
        ("ok", {"HF_HUB_OFFLINE": "1"}, "user/tiny", 3, ("HF_HUB_OFFLINE is set",)),
        ("ok", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "user/tiny", 3, ("cannot reach http://127.0.0.1:1",)),
    ):
        with Hub(s, mode) as hub:
            test.refused(f"{mode} {model} {env or ''}", answers(s, hub, model, **env), status, *words)
    with Hub(s, "token") as hub:
        test("a token opens it", answers(s, hub, HF_TOKEN="secret").returncode == 0)


def apart(s, check, test):
    """With files, hub and cache of its own."""
    own = types.SimpleNamespace(dir=s.dir / check.__name__, ppo=s.ppo)
    (own.dir / "hub/user").mkdir(parents=True)
    shutil.copytree(s.dir / "model", own.dir / "hub/user/tiny")
    shutil.copy(s.dir / "ask.jsonl", own.dir)
    check(own, test)


def main():
    with Scratch(n_train=4) as s:
        s.write("ask.jsonl", [{"prompt": [{"role": "user", "content": "1 + 1?"}]}])
        test = at_once(*[functools.partial(apart, s, check) for check in (check_errors, check_fetch, check_killed, check_plan)])
    test.end()


main()
