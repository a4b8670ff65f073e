"""What somebody meets who comes with data, a reward and no checkpoint of verl's documentation in mind: rows of one's
own, the reward function's Python and prints, names of metrics, adapters, what is missing."""

import json
import sys
import pathlib

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


def main():
    test = Tests()
    with Scratch(n_train=8, n_test=4) as s:
        own_rows(s, test)
    test.end()


main()
