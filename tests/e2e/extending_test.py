"""User-defined estimators and losses, in C and in Python, through `verlc algo` and in runs:
the code of docs/extending.md as it stands there, and what goes wrong, in one line each."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, run, series, state  # noqa: E402

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(VERLC).resolve().parent
ACTOR = "actor_rollout_ref.actor."
ADV, LOSS = "algorithm.adv_estimator", ACTOR + "policy_loss.loss_mode"


def blocks(s):
    """Writes the named code blocks of the page beside the data."""
    found = re.findall(r"^```(?:c|python) (\S+)\n(.*?)^```", (ROOT / "docs/extending.md").read_text(), re.M | re.S)
    for name, text in found:
        (s.dir / name).write_text(text)
    return [name for name, _ in found]


def algo(args, *requests, status=0):
    p = run("algo", *args, check=False, input="".join(json.dumps(r) + "\n" for r in requests))
    if p.returncode != status:
        raise AssertionError(f"exit {p.returncode}: {p.stderr}")
    return [json.loads(line) for line in p.stdout.splitlines()], p


BATCH = {"token_level_rewards": [[0, 0, 1], [0.25], [0, 0.5], [0, 0, 0, 2]],
         "response_mask": [[1, 1, 1], [1], [1, 1], [1, 1, 0, 1]], "uid": ["a", "a", "b", "b"]}
POLICY = {"op": "policy_loss", "log_prob": [[-1.0, -2.0, -0.3], [-0.7]], "old_log_prob": [[-1.4, -1.9, -0.8], [-0.1]],
          "advantages": [[1.0, 0.5, 0.7], [-0.3]], "response_mask": [[1, 0, 1], [1]], "loss_agg_mode": "seq-mean-token-mean"}


def near(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(near(x, y) for x, y in zip(a, b))
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15)


def one_line(s, test):
    """verlc algo with the page's functions, against the built-in ones of the same formula."""
    c, py = f"{s.dir}/my_adv.c:shorter", f"{s.dir}/my_adv.py:centred"
    (own, paced, rloo), _ = algo(["--adv", c], {"op": "advantage", "estimator": c, **BATCH},
                                 {"op": "advantage", "estimator": c, "kwargs": {"pace": 0.5}, **BATCH},
                                 {"op": "advantage", "estimator": "rloo", **BATCH})
    test("C estimator: RLOO's numbers", near(own["advantages"], rloo["advantages"]) and near(own["returns"], rloo["returns"]), own)
    test("C estimator: its parameter", near(paced["advantages"][0], [x - 1.5 for x in rloo["advantages"][0]]), paced)
    (own, scaled, grpo), _ = algo(["--adv", py], {"op": "advantage", "estimator": py, **BATCH},
                                  {"op": "advantage", "estimator": py, "kwargs": {"scale": 3}, **BATCH},
                                  {"op": "advantage", "estimator": "grpo", "norm_adv_by_std_in_grpo": False, **BATCH})
    test("Python estimator: Dr.GRPO's numbers", near(own["advantages"], grpo["advantages"]), own)
    test("Python estimator: its parameter", near(scaled["advantages"][3], [3 * x for x in own["advantages"][3]]), scaled)
    c, py = f"{s.dir}/my_loss.c:held", f"{s.dir}/my_loss.py:clipped"
    wide = {"clip_ratio_low": 1, "clip_ratio_high": 1}
    (own, cispo), _ = algo(["--loss", c], {**POLICY, "loss_mode": c}, {**POLICY, "loss_mode": "cispo", "config": wide})
    test("C loss: CISPO's numbers", near(own["loss"], cispo["loss"]) and near(own["dlogp"], cispo["dlogp"]), f"{own} {cispo}")
    (own, weighted, ppo), _ = algo(["--loss", py], {**POLICY, "loss_mode": py},
                                   {**POLICY, "loss_mode": py, "rollout_is_weights": [[2, 2, 2], [2]]},
                                   {**POLICY, "loss_mode": "vanilla"})
    test("Python loss: PPO's numbers", near(own["loss"], ppo["loss"]) and near(own["dlogp"], ppo["dlogp"]), f"{own} {ppo}")
    test("importance weights are in weight", near(weighted["dlogp"][0], [2 * x for x in ppo["dlogp"][0]]), weighted)
    (answer,), _ = algo([], {**POLICY, "loss_mode": c})
    test("a request alone starts no code", "--loss" in answer.get("error", ""), answer)


def runs(s, test):
    """Training with them: the built-in's bits where the formula is the built-in's to the bit, else that it runs."""
    two = {"trainer.total_training_steps": 2, "trainer.save_freq": 2}
    keys = {ADV: f"{s.dir}/my_adv.c:shorter", "+algorithm.adv_kwargs": "{pace:0.01}", LOSS: f"{s.dir}/my_loss.c:held",
            "+" + ACTOR + "policy_loss.kwargs": "{bound:1.5}"}
    run(*s.ppo("c", **{**keys, **two}))
    run(*s.ppo("c_cut", **{**keys, **two, "trainer.total_training_steps": 1}))
    run(*s.ppo("c_cut", **{**keys, **two}))
    test("C: cut in two and resumed to the same bits", state(s.dir / "c", 2) == state(s.dir / "c_cut", 2))
    test("C: compiled into the run's directory", sorted(f.name for f in (s.dir / "c/custom").iterdir()) ==
         ["held.so", "shorter.so", "verlc_algo.h"], list((s.dir / "c/custom").iterdir()))
    run(*s.ppo("c_micro", **{**keys, **two, ACTOR + "ppo_micro_batch_size_per_gpu": 1}))
    a, b = (series(s.dir / d, "actor/pg_loss") for d in ("c", "c_micro"))
    test("C: the loss does not depend on micro-batches", all(math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-6) for x, y in zip(a, b)),
         f"{a} {b}")
    run(*s.ppo("py", **{ADV: f"{s.dir}/my_adv.py:centred", LOSS: f"{s.dir}/my_loss.py:clipped", **two}))
    run(*s.ppo("built_in", **{ADV: "grpo", "algorithm.norm_adv_by_std_in_grpo": False, ACTOR + "clip_ratio_c": 1e6, **two}))
    names = ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max")
    a, b = ([series(s.dir / d, n) for n in names] for d in ("py", "built_in"))
    test("Python: the run of the built-in formulas", all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-7) for p, q in zip(a, b)
                                                         for x, y in zip(p, q)) and len(a[0]) == 2, f"{a} {b}")
    (s.dir / "td.py").write_text("def td(token_level_rewards, values, response_mask):\n"
                                 "    return (token_level_rewards - values) * response_mask, token_level_rewards\n")
    critic = {"critic.model.path": s.dir / "model", "critic.ppo_micro_batch_size_per_gpu": 4, ADV: f"{s.dir}/td.py:td", **two}
    run(*s.ppo("td", **critic))
    test("Python: naming values asks for a critic", len(series(s.dir / "td", "critic/vf_loss")) == 2)
    p = run(*s.ppo("td3", **{**critic, "critic.ppo_micro_batch_size_per_gpu": 3}), check=False)
    test.refused("Python: the critic's keys are checked", p, 2, "critic.ppo_mini_batch_size",
                 "must be divisible by critic.ppo_micro")
    p = run(*s.ppo("no_critic", **{ADV: f"{s.dir}/td.py:td", **two}), check=False)
    test.refused("Python: values without a critic's model", p, 2, "critic.model.path", "td.py:td")


def program(s, test):
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", BUILD / "verlc.pc"], capture_output=True, text=True,
                           check=True).stdout.split()
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", s.dir / "positive.c", "-o", s.dir / "positive", *flags], check=True)
    keys = {ACTOR + "use_kl_loss": False, "trainer.total_training_steps": 2, "trainer.save_freq": 2}
    args = [str(a) for a in s.ppo("positive_run", **keys)[1:] if not a.startswith(ADV)]
    p = subprocess.run([s.dir / "positive", *args], capture_output=True, text=True, timeout=300, env=ENV)
    test("the page's program runs", p.returncode == 0 and len(state(s.dir / "positive_run", 2)) == 3, p.stderr[-500:])


HEAD = "#include <verlc_algo.h>\n"
BAD_C = [  # name, kind, file, words, status
    ("a compile error", "--adv", HEAD + "int f(const struct verlc_adv *a, double *x, double *y) {\n    return a->m;\n}\n",
     ["does not compile", "bad0.c:3", "no member named", "m"], 3),
    ("a function that is not there", "--adv", HEAD + "int g(const struct verlc_adv *a, double *x, double *y) { return 0; }\n",
     ["no function 'f'", "verlc_adv_fn"], 3),
    ("a function of another type", "--loss", HEAD + "int f(const struct verlc_adv *a, double *x, double *y) { return 0; }\n",
     ["no function 'f'", "verlc_loss_fn"], 3),
    ("a call to nothing", "--adv", HEAD + "int f(const struct verlc_adv *a, double *x, double *y) { return g(); }\n",
     ["does not compile", "implicit declaration", "g"], 3),
    ("a symbol that is nowhere", "--adv",
     HEAD + "int g(void);\nint f(const struct verlc_adv *a, double *x, double *y) { return g(); }\n",
     ["cannot be loaded", "undefined symbol"], 3),
    ("NaN", "--adv", HEAD + "int f(const struct verlc_adv *a, double *x, double *y) { x[5] = NAN; return 0; }\n",
     ["the advantage of sample 2 token 0 is not a finite number"], 5),
    ("a refusal", "--adv", HEAD + "int f(const struct verlc_adv *a, double *x, double *y) { return 7; }\n", ["gave 7"], 3),
    ("a wrong derivative", "--loss", HEAD + "int f(const struct verlc_loss *a, double *l, double *d) {\n"
     "    for (int64_t t = 0; t < a->off[a->n]; t++) l[t] = -a->logp[t] * a->advantages[t], "
     "d[t] = -a->weight[t] * a->advantages[t];\n"
     "    d[6] *= 1.01;\n    return 0;\n}\n", ["dlogp of sample 2 token 1 is", "finite differences"], 3),
    ("a derivative without its weight", "--loss", HEAD + "int f(const struct verlc_loss *a, double *l, double *d) {\n"
     "    for (int64_t t = 0; t < a->off[a->n]; t++) l[t] = -a->logp[t] * a->advantages[t], d[t] = -a->advantages[t];\n"
     "    return 0;\n}\n", ["dlogp of sample 0 token 0 is", "sum of weight * loss"], 3),
    ("a constant that is not one", "--loss", HEAD + "int f(const struct verlc_loss *a, double *l, double *d) {\n"
     "    for (int64_t t = 0; t < a->off[a->n]; t++) {\n        double r = exp(a->logp[t] - a->old_logp[t]);\n"
     "        l[t] = -r * a->logp[t]; d[t] = -a->weight[t] * r;\n    }\n    return 0;\n}\n", ["logp_fixed"], 3),
]
BAD_PY = [
    ("a syntax error", "--adv", "def f(:\n", ["does not load", "SyntaxError"], 3),
    ("a function that is not there", "--adv", "def g(response_mask):\n    return response_mask\n", ["has no function 'f'"], 3),
    ("an unknown parameter", "--adv", "def f(rewards):\n    return rewards\n", ["asks for 'rewards'", "token_level_rewards"], 3),
    ("an exception", "--adv", "def f(response_mask):\n    return 1 / 0\n", ["f raised ZeroDivisionError", "bad3.py:2"], 3),
    ("a wrong length", "--adv", "def f(response_mask):\n    return response_mask[:, :-1]\n", ["shape (4, 5)", "(4, 6)"], 3),
    ("no numbers", "--adv", "def f(response_mask):\n    return 'many'\n", ["not an array of numbers"], 3),
    ("one value of two", "--loss", "def f(log_prob):\n    return log_prob\n", ["must return loss and dlog_prob"], 3),
    ("NaN", "--loss", "def f(log_prob):\n    return log_prob * float('nan'), log_prob\n",
     ["the loss of sample 0 token 0 is not a finite number"], 5),
    ("a wrong derivative", "--loss", "def f(log_prob, weight):\n    return log_prob ** 2, weight * log_prob\n",
     ["dlogp of sample 0 token 0"], 3),
    ("death", "--adv", "import os\n\n\ndef f(response_mask):\n    os._exit(3)\n", ["exit code 3"], 1),
]
SPECS = [("a file that is not there", "--adv", "nowhere.c:f", 3, ["nowhere.c does not exist"]),
         ("no function named", "--loss", "my_loss.c", 2, ["my_loss.c", "FILE.c:NAME"]),
         ("a name that is none", "--adv", "my_adv.c:f+g", 2, ["f+g", "not the name of a function"])]


def bad(s, test):
    for suffix, cases in ((".c", BAD_C), (".py", BAD_PY)):
        for i, (name, option, text, words, status) in enumerate(cases):
            (s.dir / f"bad{i}{suffix}").write_text(text)
            p = run("algo", option, f"{s.dir}/bad{i}{suffix}:f", check=False, input="")
            test.refused(f"{suffix[1:]}: {name}", p, status, *words)
    for name, option, spec, status, words in SPECS:
        test.refused(name, run("algo", option, s.dir / spec, check=False, input=""), status, *words)
    p = run("algo", "--adv", f"{s.dir}/my_adv.c:shorter", check=False, input="", env={"CC": "/nowhere/cc", "PATH": "/nowhere"})
    test.refused("no compiler", p, 3, "C compiler", "install")
    for name, keys, status, words in [
            ("parameters of a built-in", {"+algorithm.adv_kwargs": "{a:1}"}, 2, ["algorithm.adv_kwargs", "grpo"]),
            ("a parameter that is no number", {ADV: f"{s.dir}/my_adv.c:shorter", "+algorithm.adv_kwargs": "{pace:fast}"}, 2,
             ["pace", "number"]),
            ("a parameter that Python has not", {ADV: f"{s.dir}/my_adv.py:centred", "+algorithm.adv_kwargs": "{sclae:1}"}, 3,
             ["sclae"]),
            ("bypass_mode beside a user-defined loss",
             {LOSS: f"{s.dir}/my_loss.c:held", "algorithm.rollout_correction.bypass_mode": True}, 2, ["bypass_mode"])]:
        test.refused(name, run(*s.ppo("bad", **keys), check=False), status, *words)
    (s.dir / "slow.py").write_text("import time\n\n\ndef f(response_mask):\n    if len(response_mask) == 8:\n"
                                   "        time.sleep(1000)\n    return response_mask\n")
    p = run(*s.ppo("slow", **{ADV: f"{s.dir}/slow.py:f", "+algorithm.custom_timeout": 2}), check=False)
    test.refused("Python that hangs in a step", p, 6, "algorithm.adv_estimator", "slow.py:f", "2 s")
    (s.dir / "hangs.c").write_text(HEAD + "int f(const struct verlc_adv *a, double *x, double *y) {\n"
                                   "    volatile int n = 8;\n    while (a->n == n) {}\n    return 0;\n}\n")
    p = run(*s.ppo("hangs", **{ADV: f"{s.dir}/hangs.c:f", "trainer.deadline": 10}), check=False)
    test("C that hangs in a step: the watchdog names the stage", p.returncode == 6 and "adv" in p.stderr.splitlines()[-1],
         p.stderr[-400:])
    (s.dir / "dies.py").write_text("import os\nimport pathlib\n\nMARK = pathlib.Path(__file__).with_name('died')\n\n\n"
                                   "def f(response_mask):\n    if len(response_mask) == 8 and not MARK.exists():\n"
                                   "        MARK.touch()\n        os._exit(9)\n"
                                   "    return response_mask\n")
    p = run(*s.ppo("dies", **{ADV: f"{s.dir}/dies.py:f", "trainer.total_training_steps": 2}))
    test("Python that dies once is started again", p.stderr.count("called once more") == 1 and
         len(series(s.dir / "dies", "actor/lr")) == 2, p.stderr[-500:])


def main():
    test = Tests()
    with Scratch(small=True) as s:
        test("the page's code", blocks(s) == ["my_adv.c", "my_loss.c", "my_adv.py", "my_loss.py", "positive.c"])
        one_line(s, test)
        bad(s, test)
        runs(s, test)
        program(s, test)
    test.end()


main()
