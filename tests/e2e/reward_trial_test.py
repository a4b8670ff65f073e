"""A reward function is called once before a run generates anything: what no call can do is refused with file and line before the
model is read; what only this answer may have done is a warning. A signal ends that call. Missing data and reward files are named
before the memory plan."""

import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, patience, run, series, start, waited  # noqa: E402

FUNCTION, MANAGER = "reward.custom_reward_function.path", "reward.reward_manager."
SHORT = {"data.max_response_length": 4, "trainer.total_training_steps": 1, "trainer.save_freq": 0, "trainer.logger": "[file]",
         "reward.num_workers": 1, "reward.custom_reward_function.name": "compute_score"}
GIVEN = "data_source, solution_str, ground_truth, extra_info=None"


def files_first(s, test):
    """What is not there is said before the plan, and before a model is read."""
    gone = s.dir / "gone"
    for key in ("data.train_files", "data.val_files", FUNCTION, MANAGER + "module.path"):
        more = {MANAGER + "source": "importlib", MANAGER + "name": "Mine"} if key == MANAGER + "module.path" else {}
        p = run(*s.ppo("files", **{**SHORT, **more, key: gone}), check=False)
        test.refused(f"{key} that is not there", p, 3, key, str(gone))
        test(f"{key}: before the plan", "memory plan" not in p.stderr, p.stderr)
    for key in ("data.train_files", "data.val_files"):
        keys = {"model.path": s.dir / "model", "data.train_files": s.dir / "train.jsonl", "data.val_files": "[]", key: gone,
                "trainer.default_local_dir": s.dir / "sft"}
        p = run("sft", *[f"{k}={v}" for k, v in keys.items()], check=False)
        test.refused(f"sft: {key} that is not there", p, 3, key, str(gone))
        test(f"sft: {key}: before the plan", "memory plan" not in p.stderr, p.stderr)


def stopped(s, test):
    """A signal while the file is loaded, and in its trial call: neither is waited for."""
    file, begun = s.dir / "slow.py", s.dir / "begun"
    slow = f"open({str(begun)!r}, 'w').close()\nimport time\ntime.sleep(120)\n"
    for name, text in (("its file", slow), ("its trial call", f"def compute_score({GIVEN}):\n" + "".join(
            f"    {line}\n" for line in slow.splitlines()))):
        file.write_text(text)
        begun.unlink(missing_ok=True)
        p = start(s.ppo("slow", **{**SHORT, FUNCTION: file}))
        waited(lambda: begun.exists() or p.poll() is not None)  # noqa: B023
        p.send_signal(signal.SIGTERM)
        began = time.monotonic()
        err = p.communicate(timeout=300)[1]
        took = time.monotonic() - began
        test(f"SIGTERM in {name}: the end at once", p.returncode == 143 and took < patience(5) and "stopped by SIGTERM" in err and
             "a trial call" not in err, (p.returncode, took, err[-500:]))


def main():
    test, n = Tests(), iter(range(99))
    with Scratch(n_train=8, n_test=2) as s:
        files_first(s, test)
        stopped(s, test)

        def ppo(text, **more):
            path = s.dir / f"f{next(n)}.py"
            path.write_text(text)
            return run(*s.ppo(path.stem, **{**SHORT, FUNCTION: path, **more}), check=False)

        def refused(name, text, *words, **more):
            p = ppo(text, **more)
            test.refused(name, p, 3, "before the run", *words)
            test(f"{name}: the model is not read", "done:" not in p.stderr and "tok/s" not in p.stderr, p.stderr)

        refused("two parameters", "\ndef compute_score(solution, truth):\n    return 1\n", "compute_score(solution, truth)",
                ".py:2)", "data_source", "**kwargs")
        refused("one too many", f"def compute_score({GIVEN.replace('=None', '')}, level):\n    return 1\n", "'level'", ".py:1)")
        refused("a keyword that it does not take", f"def compute_score({GIVEN}):\n    return 1\n", "'level'",
                **{"+reward.custom_reward_function.reward_kwargs.level": 1})
        refused("an import in the function", f"def compute_score({GIVEN}):\n    import no_such_package\n    return 1\n",
                "no_such_package", ".py:2)", "-m pip install no_such_package")
        refused("a text", f"def compute_score({GIVEN}):\n    return 'good'\n", "'good'", "not a finite number")
        refused("a dict without score", f"def compute_score({GIVEN}):\n    return {{'acc': 1}}\n", "'acc'", '"score"')
        refused("async, a list", f"async def compute_score({GIVEN}):\n    return [1]\n", "[1]")
        refused("batch: not as many",
                "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return []\n", "0 values",
                **{MANAGER + "name": "batch"})
        refused("batch: the arguments of one", f"def compute_score({GIVEN}):\n    return 1\n", "data_sources", "with lists",
                **{MANAGER + "name": "batch"})
        refused("prime: by position", "def compute_score(*, solution_str, **more):\n    return 1\n", "by position",
                **{MANAGER + "name": "prime"})

        doubts = [("a real answer is needed", "    return float(solution_str.split('=')[1])\n", "IndexError", ".py:2)"),
                  ("None for what it cannot judge", "    return None if len(solution_str) < 2 else 1.0\n", "None", "score"),
                  ("not a number for now", "    return float('nan') if len(solution_str) < 2 else 1.0\n", "nan", "finite"),
                  ("a process that ends", "    import os, sys\n    os._exit(3) if 'VERLC_REWARD_TRIAL' in os.environ else None\n"
                   "    return 1\n", "trial_call")]
        for name, body, *words in doubts:
            p = ppo(f"def compute_score({GIVEN}):\n{body}", **{"reward.on_error": "drop_sample"})
            lines = [x for x in p.stderr.splitlines() if x.startswith("warning: reward: ") and "a trial call" in x]
            test(f"{name}: a warning, and the run goes on", len(lines) == 1 and all(w in lines[0] for w in words) and
                 "before the run" not in p.stderr, p.stderr[-1500:])

        counter = s.dir / "calls"
        text = (f"import os\nN = 0\ndef compute_score({GIVEN}):\n    global N\n    N += 1\n"
                f"    open({str(counter)!r}, 'a').write('VERLC_REWARD_TRIAL' in os.environ and 't' or 'r')\n"
                "    return {'score': N, 'given': f'{solution_str} {ground_truth} {sorted(extra_info)}'}\n")
        p = ppo(text)
        calls = counter.read_text()
        test("one call, marked, in a process of its own: the run's own calls begin anew",
             p.returncode == 0 and calls.count("t") == 1 and calls[0] == "t" and calls.count("r") == 8 and
             series(s.dir / "f14", "critic/score/min") == [1], (calls, p.stderr[-500:]))
        counter.unlink()
        p = ppo(text, **{"reward.trial_call": False})
        test("reward.trial_call=False: none", p.returncode == 0 and "t" not in counter.read_text(), p.stderr[-500:])

        (s.dir / "manager.py").write_text("class Mine:\n    def __init__(self, config, tokenizer, compute_score, **given):\n"
                                          "        pass\n    async def run_single(self):\n        return {'reward_score': 1}\n")
        keys = {**SHORT, MANAGER + "source": "importlib", MANAGER + "name": "Mine", MANAGER + "module.path": s.dir / "manager.py"}
        p = run(*s.ppo("manager", **keys), check=False)
        test.refused("a manager's run_single without data", p, 3, "run_single(self)", "manager.py:4)", "run_single(data)")
        text = (s.dir / "manager.py").read_text().replace("(self):", "(self, data):")
        (s.dir / "manager.py").write_text(text.replace(": 1}", ": 'x'}"))
        test.refused("a manager's value", run(*s.ppo("manager", **keys), check=False), 3, "run_single returned", "'x'")
        (s.dir / "manager.py").write_text(text.replace(": 1}", ": len(data.batch['responses'][0])}"))
        p = run(*s.ppo("manager", **keys), check=False)
        test("a manager that is right", p.returncode == 0 and "trial" not in p.stderr, p.stderr[-800:])
    test.end()


main()
