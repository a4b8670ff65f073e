"""Invariant 11 for SFT: files and metrics are the same on any number of CPU ranks, also where a gradient is not finite, and where
a run that was killed goes on with another number."""

import json
import os
import pathlib
import re
import shutil
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from ranks import below, files, first_difference
from verlc_test import Scratch, Tests, met, run, start, waited

STEPS = 4


def chats():
    """Two turns each, some longer than others."""
    return [{"messages": [{"role": "user", "content": f"What is {i} + 1?"},
                          {"role": "assistant", "content": f"It is {i + 1}." + " Yes." * (i % 4)},
                          {"role": "user", "content": "And one more?"}, {"role": "assistant", "content": str(i + 2)}]}
            for i in range(24)]


def sft(s, run_dir, ranks, keys):
    args = {"model.path": s.dir / "model", "data.train_files": s.dir / "chats.jsonl", "data.val_files": s.dir / "chats.jsonl",
            "data.train_batch_size": 8, "data.max_length": 128, "data.max_token_len_per_gpu": 256, "optim.lr": 1e-3,
            "trainer.total_training_steps": STEPS, "trainer.test_freq": 2, "trainer.save_freq": STEPS, "trainer.device": "cpu",
            "trainer.logger": "[console,file]", "trainer.default_local_dir": s.dir / run_dir, "trainer.ranks": ranks, **keys}
    return ["sft", *[f"{k}={v}" for k, v in args.items()]]


def check_cases(s, test):
    cases = {
        "bf16, tokens": ((2, 3), {}),
        "fp32, samples": ((2,), {"engine.dtype": "float32", "data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 2}),
        "chunks of micro-batches": ((3,), {"data.grad_chunk": 2, "data.use_dynamic_bsz": False,
                                           "data.micro_batch_size_per_gpu": 1}),
        "lora": ((2,), {"model.lora_rank": 4}),
        "context parallel": ((3,), {"engine.ulysses_sequence_parallel_size": 4}),
        "checkpoints in the foreground": ((2,), {"trainer.async_save": False}),
    }
    for name, (ranks, keys) in cases.items():
        dirs = {n: s.dir / f"{name} {n}".replace(" ", "_").replace(",", "") for n in (1, *ranks)}
        for n, d in dirs.items():
            p = run(*sft(s, d, n, keys), check=False)
            if p.returncode != 0:
                test(f"{name}: {n} ranks", False, p.stderr[-1500:])
            elif n > 1:
                why = first_difference(dirs[1], d, STEPS)
                test(f"{name}: {n} ranks as 1", not why, why)


def check_bad_gradient(s, test):
    """Rates that throw the weights away, a factor of a million each step: soon no gradient is finite."""
    keys = {"optim.lr": 1e3, "optim.weight_decay": 1e3, "trainer.max_bad_steps": 100, "engine.dtype": "float32",
            "trainer.save_freq": 0, "trainer.test_freq": -1}
    found = {}
    for n in (1, 2):
        run(*sft(s, f"bad_{n}", n, keys))
        found[n] = sorted((f.name, f.read_text()) for f in (s.dir / f"bad_{n}/bad_batches").glob("*"))
    why = first_difference(s.dir / "bad_1", s.dir / "bad_2", 0)
    test("gradients that are not finite: 2 ranks as 1", not why and 1 <= len(found[1]) < STEPS and found[1] == found[2],
         f"{why} {[name for name, _ in found[1]]} {[name for name, _ in found[2]]}")
    p = [run(*sft(s, f"ended_{n}", n, {**keys, "trainer.max_bad_steps": 1}), check=False) for n in (1, 2)]
    last = [[line for line in x.stderr.splitlines() if line.startswith("error: ")] for x in p]
    said = re.search(r"the state of step (\d+) is in ", "".join(last[0]))
    test("trainer.max_bad_steps ends both alike, the step before is saved",
         p[0].returncode == p[1].returncode == 5 and last[0] == [line.replace("ended_2", "ended_1") for line in last[1]] and
         said and files(s.dir / "ended_1", said[1]) == files(s.dir / "ended_2", said[1]) != {}, f"{last}")


def kill_a_rank(s, args, d):
    """SIGKILL to the last rank, or the only process, when there is a checkpoint and the run has not ended: the process and its
    errors, None where it never came in time."""
    def one(_):
        shutil.rmtree(d, ignore_errors=True)
        p = start(args)
        waited(lambda: p.poll() is not None or (d / "global_step_2").is_dir())
        ranks = [pid for pid, name in below(p.pid).items() if name.endswith(" worker")]
        try:
            os.kill(ranks[-1] if ranks else p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        err = p.communicate(timeout=300)[1]
        return None if p.returncode == 0 and "restart 1 of 1" not in err else (p, err)

    return met(one)


def check_resume(s, test):
    keys = {"trainer.save_freq": 1, "trainer.total_training_steps": 10, "trainer.test_freq": -1, "optim.lr": 1e-4}
    run(*sft(s, "whole", 1, keys))
    whole = files(s.dir / "whole", 10)
    for first, then in ((1, 2), (2, 1)):
        d = s.dir / f"from_{first}_to_{then}"
        broken = kill_a_rank(s, sft(s, d, first, keys), d)
        run(*sft(s, d, then, keys))
        test(f"kill -9 on {first}, then {then}: the bits of one run", broken and files(d, 10) == whole)
    for chunk, said in ((1, False), (2, True)):
        p = run(*sft(s, "whole", 1, {**keys, "trainer.total_training_steps": 11, "trainer.save_freq": 0, "data.grad_chunk": chunk}))
        test(f"resumed with data.grad_chunk={chunk}", said == ("made with data.grad_chunk=1, this run has 2" in p.stderr), p.stderr)
    d = s.dir / "restarted"
    p, err = kill_a_rank(s, sft(s, d, 2, {**keys, "trainer.max_restarts": 1}), d) or (None, "never in time")
    test("trainer.max_restarts: a killed rank, and the bits of one run",
         p and p.returncode == 0 and "restart 1 of 1" in err and files(d, 10) == whole, f"{p and p.returncode} {err[-500:]}")


def check_plan(s, test):
    p = run("plan", "--probe", "--json", *sft(s, "probed", 2, {}), check=False)
    device = json.loads(p.stdout)["device"] if p.returncode == 0 else ""
    test("verlc plan --probe on 2 ranks", device.startswith("2 ranks, each on "), f"{p.returncode} {device} {p.stderr[-500:]}")


def check_stop(s, test):
    keys = {"trainer.save_freq": -1, "trainer.total_training_steps": 100000, "trainer.total_epochs": 100000,
            "trainer.test_freq": -1, "optim.lr": 1e-4}
    many = {"data.val_files": s.write("many.jsonl", chats() * 100), "trainer.test_freq": 2}
    for name, more in {"an update": {}, "a validation": many}.items():
        d = s.dir / f"stopped_{len(more)}"
        p = start(sft(s, d, 2, {**keys, **more}))
        log = d / "metrics.jsonl"
        waited(lambda: p.poll() is not None or log.is_file() and log.stat().st_size)  # noqa: B023
        time.sleep(0.1)
        p.send_signal(signal.SIGTERM)
        _, err = p.communicate(timeout=300)
        saved = [f.name for f in d.glob("global_step_*")]
        test(f"SIGTERM in {name}: the step is saved", p.returncode == 143 and len(saved) == 1,
             f"{p.returncode} {saved} {err[-500:]}")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        s.write("chats.jsonl", chats())
        check_cases(s, test)
        check_bad_gradient(s, test)
        check_resume(s, test)
        check_stop(s, test)
        check_plan(s, test)
    test.end()


main()
