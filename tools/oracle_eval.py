"""`verlc eval` beside verl's process_validation_metrics: 200 random sets of responses, with other numbers of samples,
variables and kinds of votes (texts, whole numbers, fractions, truth values) each; every statistic is compared.

  python tools/oracle_eval.py VERLC [VERL_DIR]     needs numpy, torch and verl 0.9.1's files
"""

import collections
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from oracle_train import load, val_case

SCORER = '''import json


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return json.loads(solution_str)
'''


def random_set(rng, source):
    """Rows of one data source: some prompts with some responses each, other variables and kinds of votes each time."""
    votes = [lambda: str(rng.integers(0, 3)), lambda: int(rng.integers(-1, 2)), lambda: float(rng.integers(0, 4)) / 2,
             lambda: bool(rng.integers(0, 2))][rng.integers(0, 4)]
    names = [n for n in ("acc", "pred", "length", "overlong") if rng.random() < 0.6]
    rows, n_same = [], int(rng.integers(1, 10))
    for u in range(int(rng.integers(1, 5))):
        for _ in range(n_same if rng.random() < 0.7 else int(rng.integers(1, 10))):
            of = {"acc": bool(rng.integers(0, 2)), "pred": votes(), "length": int(rng.integers(1, 99)), "overlong": bool(rng.random() < 0.1)}
            rows.append((source, f"{source} {u}", float(np.round(rng.normal(), 3)), {n: of[n] for n in names}))
    return rows


def compare_eval(space, program, n_sets=200):
    rng = np.random.default_rng(17)
    sets = [random_set(rng, f"set/{i}") for i in range(n_sets)]
    prompts = collections.defaultdict(list)
    for r in (r for rows in sets for r in rows):
        prompts[r[0], r[1]].append(json.dumps({"score": r[2], **r[3]}))
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "scorer.py").write_text(SCORER)
        lines = [{"prompt": [{"role": "user", "content": "?"}], "data_source": source, "reward_model": {"ground_truth": ""}, "responses": texts}
                 for (source, _), texts in prompts.items()]
        (tmp / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = subprocess.run([program, "eval", f"data.path={tmp / 'rows.jsonl'}", f"custom_reward_function.path={tmp / 'scorer.py'}"],
                              stdout=subprocess.PIPE, text=True, check=True)
    got, n, bad, worst = json.loads(done.stdout), 0, [], 0.0
    for rows in sets:
        for name, want in val_case(space, "", rows)["metrics"].items():
            n += 1
            error = abs(got[name] - want) / max(1, abs(want)) if name in got else np.inf
            worst = max(worst, error)
            if not error <= 1e-12:
                bad.append(f"{name}: {got.get(name)}, verl has {want}")
    for text in bad[:5]:
        print("DIFFERS " + text)
    print(f"{n_sets} random sets, {n} statistics, {len(bad)} differences; largest relative error {worst:.1e}")
    return 1 if bad else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    found = sys.argv[2] if len(sys.argv) == 3 else importlib.util.find_spec("verl").submodule_search_locations[0]
    sys.exit(compare_eval(load(pathlib.Path(found)), sys.argv[1]))
