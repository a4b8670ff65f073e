"""Attacks a run with values: rewards of every kind and size through small runs, locks on run.db of random lengths at random moments,
and hostile responses to every native grader under a bound of CPU time. Nothing may end by a signal, hang, lose a record, or train a
weight that is not finite.

  python3 tools/attack/values.py [--seed N] [--rewards N] [--locks N] [--graders N]      (VERLC: the program, else build/release/verlc)"""

import argparse
import json
import math
import os
import pathlib
import random
import resource
import sqlite3
import struct
import subprocess
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
os.environ.setdefault("VERLC", str(TOP / "build/release/verlc"))
os.environ.setdefault("SOURCE_DIR", str(TOP))
sys.path.insert(0, str(TOP / "tests"))
from verlc_test import VERLC, Scratch, Tests, run, start, tensors  # noqa: E402

BIG = 1.7976931348623157e308
NUMBERS = ["math.nan", "math.inf", "-math.inf", "1e308", "-1e308", str(BIG), str(-BIG), "3.4028234663852886e38", "3.4028235677973366e38",
           "-3.5e38", "1e39", "1e30", "-1e30", "1e19", "5e-324", "-5e-324", "2.2250738585072014e-308", "1e-300", "-0.0", "0", "1", "-1",
           "0.5", "2**53", "2**63", "-2**63", "2**64", "10**30", "10**38", "10**39", "10**308", "10**400", "10**5000", "True", "False"]
OTHERS = ["None", "'1'", "''", "'nan'", "b'1'", "[]", "[1.0]", "{}", "{'acc': 1}", "(1, 2)", "1j", "object()", "lambda: 1", "print",
          "[[[[1]]]]", "{'score': {'score': 1}}", "{'score': [1]}", "{'score': 'x'}", "{'score': None}", "range(3)",
          "__import__('decimal').Decimal('1e400')", "__import__('fractions').Fraction(1, 3)", "'\\ud800'", "{'score': 1, '\\ud800': 1}"]
KEYS = ["acc", "pred", "extra/x", "\u00e9", "a b", "reward", "score_2", "", "step"]
ESTIMATORS = ["grpo", "reinforce_plus_plus", "rloo", "remax", "opo", "reinforce_plus_plus_baseline", "grpo_passk", "gpg"]


def reward_file(r, path):
    """A reward function that returns a few values of a kind in turn, some in a dict beside more."""
    values = []
    for _ in range(r.randrange(1, 6)):
        value = r.choice(NUMBERS if r.random() < 0.75 else OTHERS)
        if r.random() < 0.4:
            more = ", ".join(f"{k!r}: {r.choice(NUMBERS + OTHERS)}" for k in r.sample(KEYS, r.randrange(1, 4)))
            value = f"{{'score': {value}, {more}}}"
        values.append(value)
    if r.random() < 0.3:
        values.append("1.0")
    path.write_text("import math\nVALUES = [lambda v=v: eval(v) for v in " + repr(values) + "]\nN = 0\n"
                    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    global N\n    N += 1\n"
                    "    return VALUES[N % len(VALUES)]()\n")
    return values


def not_finite(path):
    out = []
    for name, (dtype, _, raw) in tensors(path).items():
        if dtype == "F32" and not all(map(math.isfinite, struct.unpack(f"<{len(raw) // 4}f", raw))):
            out.append(name)
    return out


def attack_rewards(r, s, test, cases):
    for i in range(cases):
        d = f"reward{i}"
        values = reward_file(r, s.dir / f"{d}.py")
        estimator = r.choice(ESTIMATORS)
        keys = {"reward.custom_reward_function.path": s.dir / f"{d}.py", "reward.num_workers": 1, "trainer.total_training_steps": 2,
                "trainer.save_freq": 2, "algorithm.adv_estimator": estimator, "actor_rollout_ref.rollout.n": r.choice([2, 4]),
                "reward.on_error": r.choice(["drop_sample", "drop_group", "stop"]), "trainer.test_freq": r.choice([-1, 1]),
                "algorithm.use_kl_in_reward": r.random() < 0.2, "algorithm.norm_adv_by_std_in_grpo": r.random() < 0.5,
                "data.max_response_length": 8}
        if r.random() < 0.2:
            keys |= {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": r.choice(["pow", "max_min"]),
                     "algorithm.pf_ppo.weight_pow": r.choice([2.0, 200.0])}
        p = run(*s.ppo(d, **keys), check=False, timeout=120)
        weights = s.dir / d / "global_step_2/actor/model.safetensors"
        optim = s.dir / d / "global_step_2/optim/actor.safetensors"
        bad = [f for w in (weights, optim) if w.exists() for f in not_finite(w)]
        errors = [line for line in p.stderr.splitlines() if line.startswith("error: ")]
        rows = [json.loads(line) for f in (s.dir / d).glob("metrics.jsonl") for line in f.read_text().splitlines()]
        shown = run("show", s.dir / d, check=False) if (s.dir / d / "run.db").exists() else None
        ok = (p.returncode in (0, 1, 2, 3, 5) and (p.returncode == 0) == (not errors) and not bad and "CHECK" not in p.stderr and
              (p.returncode != 0 or len(rows) >= 2) and (shown is None or shown.returncode in (0, 3)))
        test(f"reward {i} {estimator} {values}"[:150], ok, (p.returncode, errors, bad, p.stderr[-300:]))


def locks(r, path, p, log):
    """Write locks on run.db until its run ends."""
    while p.poll() is None:
        time.sleep(r.uniform(0, 0.8))
        if not path.exists():
            continue
        try:
            db = sqlite3.connect(path, timeout=0.3, isolation_level=None)
            db.execute(r.choice(["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"]))
            length = r.choice([0.02, 0.3, 1.5, 4, 7])
            until = time.monotonic() + length
            while time.monotonic() < until and p.poll() is None:
                time.sleep(0.02)
            if p.poll() is None or r.random() < 0.5:
                db.execute(r.choice(["COMMIT", "ROLLBACK"]))
            db.close()
            log.append(length)
        except sqlite3.Error:
            pass


def steps_of(path):
    db = sqlite3.connect(path)
    metrics = [x for x, in db.execute("SELECT DISTINCT step FROM metrics WHERE step > 0 ORDER BY step")]
    samples = dict(db.execute("SELECT step, COUNT(*) FROM samples WHERE step > 0 AND validation = 0 GROUP BY step"))
    twice = db.execute("SELECT COUNT(*) FROM (SELECT 1 FROM samples WHERE validation = 0 GROUP BY step, uid, sample HAVING COUNT(*) > 1)")
    twice = twice.fetchone()[0]
    whole = db.execute("PRAGMA integrity_check").fetchone()[0]
    db.close()
    return metrics, samples, twice, whole


def attack_locks(r, s, test, cases):
    rule = s.dir / "slow.py"
    rule.write_text("import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                    "    time.sleep(0.03)\n    return float(len(solution_str))\n")
    for i in range(cases):
        d, steps = s.dir / f"lock{i}", 12
        keys = {"reward.custom_reward_function.path": rule, "reward.num_workers": 1, "trainer.total_training_steps": steps,
                "trainer.save_freq": 6, "data.max_response_length": 8}
        kill_at, log = r.uniform(1, 4) if r.random() < 0.35 else None, []
        p = start(s.ppo(d.name, **keys))
        if kill_at:
            begin = time.monotonic()
            while p.poll() is None and time.monotonic() < begin + kill_at:
                time.sleep(0.01)
                if (d / "run.db").exists() and r.random() < 0.3:
                    try:
                        db = sqlite3.connect(d / "run.db", timeout=0, isolation_level=None)
                        db.execute("BEGIN IMMEDIATE")
                        time.sleep(r.uniform(0, 1.5))
                        db.close()
                    except sqlite3.Error:
                        pass
            p.kill()
            p.communicate()
            p = start(s.ppo(d.name, **keys))
        locks(r, d / "run.db", p, log)
        err = p.communicate()[1]
        shown = run("show", d, check=False)
        metrics, samples, twice, whole = steps_of(d / "run.db")
        test(f"locks {i} {log} {'killed' if kill_at else ''}", p.returncode == 0 and metrics == list(range(1, steps + 1)) and
             samples == {k: 8 for k in metrics} and twice == 0 and whole == "ok" and shown.returncode == 0 and
             not (d / "run.kept.db").exists(), (p.returncode, metrics, samples, twice, whole, err[-500:], sorted(d.iterdir())))


UNITS = ["{", "}", "{}", "\\boxed{", "}}", "\\frac", "\\frac{", "\\frac1", "\\sqrt", "\\text{", "\\pi", "1", "1,", ",234", "1,234,", "0", ".", "-",
         "- ", "7 3/4 ", "1/2", "^", "^{", "^\\circ", "cm", "a", "the ", " ", "\n", "\t", "\u00a0", "\u3000", "\u00e9", "\u4e00", "\U0001f600",
         "\u03a3", "\u0130", "\u212a", "\u0663", "\u0301", "$", "%", "=", "is ", "answer is", "is the answer", "Answer:", "Answer: ", "#### ", "<answer>",
         "</answer>", "<think>", "</think>", "(", "[", ")", "]", "_", "inf", "e", "\\!", ",\\!", "\\\\", " or ", "million", "Interval(", "Point(", "\0"]
FORMS = [("", ""), ("\\boxed{", "}"), ("Answer: ", ""), ("<answer>", "</answer>"), ("<think></think> \\boxed{", "}"), ("is ", ". "), ("#### ", "")]
GRADERS = ["gsm8k", "gsm8k_flexible", "math_reward", "math_dapo", "math_dapo_strict_box", "prime_math", "geo3k", "gpqa",
           "search_r1_like_qa_em", "search_r1_like_qa_subem"]
BYTES = 400_000
CPU_S, HELPER_S = 0.3, 0.7  # of one response, with the start of the program; of a helper that has no sympy to answer with


def attack_graders(r, test, cases):
    """`verlc algo` alone: no sympy is asked for where texts decide; a question without its packages is an error, not a score."""
    for i in range(cases):
        grader, (before, behind) = r.choice(GRADERS), r.choice(FORMS)
        body, units = "", r.sample(UNITS, r.randrange(1, 4))
        while len(body.encode()) < BYTES:
            body += "".join(r.choice(units) for _ in range(2000))
        truth = r.choice(["12", "1,234", "\\frac{1}{2}", "(1,2)", "A", "[0,1)", "2\\pi", "10%"])
        q = {"op": "reward", "grader": grader, "solution_str": before + body + behind,
             "ground_truth": {"target": [truth, "x"]} if grader.startswith("search") else truth}
        a = resource.getrusage(resource.RUSAGE_CHILDREN)
        p = subprocess.run([VERLC, "algo"], input=json.dumps(q) + "\n", capture_output=True, text=True, timeout=120)
        b = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = b.ru_utime - a.ru_utime
        try:
            answer = json.loads(p.stdout.splitlines()[0])
        except (IndexError, ValueError):
            answer = None
        ok = p.returncode in (0, 1) and isinstance(answer, dict) and ("error" in answer or math.isfinite(answer["score"]))
        bound = CPU_S + (HELPER_S if answer and "error" in answer else 0)
        test(f"{grader} {before}{units}{behind} for {truth}: {cpu:.2f} s", ok and cpu < bound, (p.returncode, answer, p.stderr[-300:]))


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--seed", type=int, default=int(time.time()))
    a.add_argument("--rewards", type=int, default=40)
    a.add_argument("--locks", type=int, default=10)
    a.add_argument("--graders", type=int, default=60)
    a = a.parse_args()
    print(f"seed {a.seed}", flush=True)
    test = Tests()
    with Scratch(n_train=48) as s:
        attack_graders(random.Random(a.seed), test, a.graders)
        attack_rewards(random.Random(a.seed + 1), s, test, a.rewards)
        attack_locks(random.Random(a.seed + 2), s, test, a.locks)
    test.end()


main()
