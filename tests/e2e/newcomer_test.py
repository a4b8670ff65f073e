"""What somebody meets who comes with data, a reward and no checkpoint of verl's documentation in mind: rows of one's
own, the reward function's Python and prints, names of metrics, adapters, what is missing."""

import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from verlc_test import Scratch, Tests, run

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "custom" and ground_truth is None, (data_source, ground_truth)
    return float(len(solution_str) % 5) + float(extra_info["answer"])
"""


def own_rows(s, test):
    rows = s.write("own.jsonl", [{"prompt": f"{i}+2?", "answer": str(i + 2)} for i in range(8)])
    plain = run(*s.ppo("refused", data__train_files=rows, trainer__total_training_steps=1), check=False)
    test("own rows: all missing columns at once, those there are, and an example",
         plain.returncode == 3 and "there are no columns 'data_source', 'reward_model'; it has: prompt, answer" in plain.stderr
         and '"reward_model": {"ground_truth": "4"}' in plain.stderr, plain.stderr)
    reward = s.dir / "reward.py"
    reward.write_text(REWARD)
    p = run(*s.ppo("own", data__train_files=rows, data__val_files=rows, trainer__total_training_steps=2, trainer__test_freq=2,
                   reward__custom_reward_function__path=reward))
    steps = [json.loads(line)["data"] for line in (s.dir / "own/metrics.jsonl").read_text().splitlines()]
    test("own rows: a reward function of one's own takes them", steps[0]["critic/score/mean"] > 2
         and steps[0]["reward/num_errors"] == 0 and "val-core/custom/acc/mean@1" in steps[-1], steps[-1])
    test("own rows: said where ground_truth is None", "8 rows have no reward_model" in p.stderr, p.stderr)


def reward_python(s, test):
    venv = s.dir / "venv"
    bare = venv / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", venv], check=True)
    lib = next(venv.glob("lib/python3*/site-packages"))
    (lib / "verlc_only_here.py").write_text("NAME = 'only here'\n")
    reward = s.dir / "imports.py"
    reward.write_text("import verlc_only_here\n\ndef compute_score(solution_str, **others):\n"
                      "    print(verlc_only_here.NAME, flush=True)\n    return 1.0\n")
    keys = {"reward__custom_reward_function__path": reward, "trainer__total_training_steps": 1}
    p = run(*s.ppo("lacks", **keys), check=False)
    test.refused("reward: a failed import names the interpreter and the install line", p, 3, "No module named 'verlc_only_here'",
                 "bin/python", "-m pip install verlc_only_here", "reward.python=PYTHON")
    p = run(*s.ppo("has", reward__python=bare, **keys))
    test("reward: reward.python chooses the interpreter, and prints go to the log", "reward: only here" in p.stderr, p.stderr)
    p = run(*s.ppo("none", reward__python="/no/such/python", **keys), check=False)
    test.refused("reward: reward.python that is none", p, 1, "reward.python: /no/such/python is not a program")
    reward.write_text("def compute_score(solution_str, **others):\n    for i in range(10000): print('line', i)\n    return 1.0\n")
    p = run(*s.ppo("prints", **keys))
    n = p.stderr.count("reward: line")
    test("reward: prints without end are bounded, and it is said", 20 <= n < 2000 and " more lines (at most 20" in p.stderr, n)


def main():
    test = Tests()
    with Scratch(n_train=8, n_test=4) as s:
        own_rows(s, test)
        reward_python(s, test)
    test.end()


main()
