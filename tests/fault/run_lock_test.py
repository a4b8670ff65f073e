"""One run per directory: of two that start in one, one runs and the other changes nothing and says who has it.

ROUNDS (10): how often two runs start within 50 ms."""

import fcntl
import os
import pathlib
import random
import shutil
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, start, state  # noqa: E402

BUSY = 4
LONG = {"trainer.total_training_steps": 400, "trainer.total_epochs": 100, "trainer.max_actor_ckpt_to_keep": 2,
        "data.max_response_length": 4}


def sft(s, run_dir, **keys):
    s.write("chats.jsonl", [{"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}]}
                            for i in range(16)])
    keys = {"model.path": s.dir / "model", "data.train_files": s.dir / "chats.jsonl", "data.train_batch_size": 4,
            "data.max_length": 64, "trainer.total_training_steps": 3, "trainer.save_freq": 1, "trainer.logger": "[file]",
            "trainer.default_local_dir": s.dir / run_dir, **keys}
    return ["sft", *(f"{k}={v}" for k, v in keys.items())]


def tree(d):
    return {str(f.relative_to(d)): f.read_bytes() if f.is_file() else None for f in sorted(d.rglob("*"))}


def until(done, p, limit=200):
    end = time.time() + limit
    while not done() and p.poll() is None and time.time() < end:
        time.sleep(0.005)
    return done()


def saved(d):
    """The step that was saved last."""
    try:
        return int((d / "latest_checkpointed_iteration.txt").read_text())
    except FileNotFoundError:
        return None


def names_holder(text, p):
    return "in use by another run" in text and f"pid {p.pid} on {os.uname().nodename}, started 20" in text and "verlc ppo" in text


def races(test, s, rounds):
    """Each round goes on where the last one ended, so the end has the bits of one run if no checkpoint was ever harmed."""
    rng = random.Random(5)
    ends, named, problems = 0, 0, []
    for i in range(1, rounds + 1):
        keys = {"trainer.total_training_steps": 2 * i, "trainer.total_epochs": rounds, "trainer.max_actor_ckpt_to_keep": 2}
        first = start(s.ppo("raced", **keys))
        time.sleep(rng.choice((0, 0, rng.uniform(0, 0.05))))
        runs = [first, start(s.ppo("raced", **keys))]
        said = [p.communicate(timeout=120)[1] for p in runs]
        codes = [p.returncode for p in runs]
        ends += sorted(codes) == [0, BUSY]
        if sorted(codes) == [0, BUSY]:
            loser = codes.index(BUSY)
            named += names_holder(said[loser], runs[1 - loser])
        else:
            problems.append((codes, [t[-300:] for t in said]))
        if i % 25 == 0:
            print(f"{i} rounds, in {ends} exactly one ran", flush=True)
    test(f"two runs started {rounds} times: exactly one runs", ends == rounds, f"{ends} of {rounds}: {problems[:2]}")
    test("the other one names it", named == rounds, f"{named} of {rounds}")
    steps = 2 * rounds
    run(*s.ppo("alone", **{"trainer.total_training_steps": steps, "trainer.total_epochs": rounds,
                           "trainer.max_actor_ckpt_to_keep": 2}))
    test("no checkpoint was harmed: the bits of one unbroken run",
         all(state(s.dir / "raced", n) == state(s.dir / "alone", n) for n in (steps - 1, steps)))
    left = sorted(f.name for f in (s.dir / "raced").iterdir())
    test("nothing is left of the others", left == sorted(f.name for f in (s.dir / "alone").iterdir()), left)


def refused(test, s):
    """Under the lock of somebody else nothing is touched."""
    d = s.dir / "held"
    source = s.dir / "mine.c"
    source.write_text('#include "verlc_algo.h"\nint f(const struct verlc_adv *a, double *x, double *y) {\n'
                      "    for (long i = 0; i < a->off[a->n]; i++) x[i] = y[i] = 1;\n    return 0;\n}\n")
    own = {"algorithm.adv_estimator": f"{source}:f"}
    logger = {"trainer.logger": "[console,file,tensorboard]"}
    run(*s.ppo("held", **{"trainer.total_training_steps": 2}))
    (d / "global_step_9.tmp/actor").mkdir(parents=True)
    (d / "metrics.jsonl.12-0123456789abcdef.tmp").write_text("x")
    with open(d / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        was = tree(d)
        for name, args in {"ppo": s.ppo("held", **logger), "ppo with a C function": s.ppo("held", **own),
                           "ppo, starting anew": s.ppo("held", **{"trainer.resume_mode": "disable"}),
                           "sft": sft(s, "held")}.items():
            test.refused(f"{name}: refused", run(*args, check=False), BUSY, "trainer.default_local_dir", str(d), "in use")
            test(f"{name}: nothing was touched", tree(d) == was, sorted(set(tree(d)) ^ set(was)))
        p = run("plan", *s.ppo("held", **own)[1:])
        test("plan needs no lock and writes nothing", "GiB" in p.stdout + p.stderr and tree(d) == was, p.stderr[-300:])
        p = run("model", "export", "--model", d, "--out", s.dir / "exported")
        test("export of a run needs no lock", (s.dir / "exported/model.safetensors").exists())
    p = run(*s.ppo("held", **{"trainer.total_training_steps": 3}))
    test("the next run removes what killed ones left", not list(d.glob("*.tmp")) and (d / "global_step_3").is_dir())
    test("a run that has ended holds nothing", (d / "run.lock").read_bytes() == b"")


def killed(test, s):
    """The lock dies with its process, though its Python helper may live a moment longer."""
    score = s.dir / "score.py"
    score.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n")
    keys = {**LONG, "reward.custom_reward_function.path": score, "reward.num_workers": 1}
    p = start(s.ppo("killed", **keys))
    test("a long run is under way", until((s.dir / "killed/global_step_1").is_dir, p))
    again = run(*s.ppo("killed", **keys), check=False)
    test.refused("a second one is refused", again, BUSY, f"pid {p.pid} on", "stop it")
    p.kill()
    p.wait()
    again = run(*s.ppo("killed", **{**keys, "trainer.total_training_steps": 1}), check=False)
    test("after kill -9 the next one starts at once", again.returncode == 0, again.stderr[-400:])


def stopped_between_saves(d, p):
    """The process stands still, and no save is under way."""
    while until(lambda: (saved(d) or 0) >= 2, p):
        p.send_signal(signal.SIGSTOP)
        names = [f.name for f in d.iterdir()]
        if not any(".tmp" in n for n in names) and f"global_step_{saved(d)}" == max(
                (n for n in names if n.startswith("global_step_")), key=lambda n: int(n[12:])):
            return True
        p.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    return False


def moved(test, s):
    """A directory that is taken away in mid-run, between two saves."""
    keys = {**LONG, "trainer.save_freq": 2}
    d = s.dir / "removed"
    p = start(s.ppo("removed", **keys))
    test("a run between two saves", stopped_between_saves(d, p))
    shutil.rmtree(d)
    p.send_signal(signal.SIGCONT)
    test("removed in mid-run: made again, and saved to", until(lambda: saved(d), p))
    p.send_signal(signal.SIGINT)
    said = p.communicate(timeout=300)[1]
    test("and it says so", p.returncode == 130 and "was removed while this run writes there" in said, said[-400:])
    d = s.dir / "taken"
    p = start(s.ppo("taken", **keys))
    test("another run between two saves", stopped_between_saves(d, p))
    os.rename(d, s.dir / "mine")
    other = start(s.ppo("taken", **LONG))
    until(lambda: saved(d), other)
    p.send_signal(signal.SIGCONT)
    said = p.communicate(timeout=300)[1]
    test("a run has begun in its place: it ends", p.returncode == BUSY and f"pid {other.pid} on" in said, said[-400:])
    was = saved(d)
    test("the other one goes on", until(lambda: saved(d) > was, other))
    other.send_signal(signal.SIGINT)
    other.communicate(timeout=300)
    steps = saved(s.dir / "mine") + 1
    run(*s.ppo("mine", **{**keys, "trainer.total_training_steps": steps}))
    test("what it had saved resumes", saved(s.dir / "mine") == steps)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        refused(test, s)
        killed(test, s)
        moved(test, s)
        races(test, s, int(os.environ.get("ROUNDS", "10")))
    test.end()


main()
