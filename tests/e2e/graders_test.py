"""Graders as a user meets them: by data source and by name, in `verlc eval` and in a run; what is said before a run where a
grader or its packages are missing; a question that takes too long or kills its helper; and verl.utils.reward_score in a user's
file. Packages that setup does not install are small ones made here: what sympy says is the oracle's subject, not this test's."""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

PACKAGES = {
    "sympy/__init__.py": """
def simplify(value):
    return value
""",
    "sympy/parsing/__init__.py": "from . import sympy_parser\n",
    "sympy/parsing/sympy_parser.py": """
import os, time
standard_transformations = ()
def implicit_multiplication_application():
    pass
def parse_expr(text, transformations):
    if "77" in text:
        time.sleep(60)
    if "88" in text:
        os._exit(3)
    a, b = text[1:-1].split(")-(")
    return 0 if sorted(a.split("+")) == sorted(b.split("+")) else 1
""",
    "pylatexenc/__init__.py": "",
    "pylatexenc/latex2text.py": """
class LatexNodes2Text:
    def latex_to_text(self, text):
        return text.replace("\\\\cdot", "*")
""",
    "math_verify/__init__.py": "",
    "math_verify/errors.py": "class TimeoutException(BaseException):\n    pass\n",
    "math_verify/parser.py": """
from math_verify.errors import TimeoutException
class LatexExtractionConfig: pass
class ExprExtractionConfig: pass
def parse(text, targets, raise_on_error=False):
    if "slow" in text:
        raise TimeoutException("too long")
    return [w.strip("{}.") for w in text.replace("boxed", " ").split() if w.strip("{}.").isdigit()]
""",
    "math_verify/grader.py": "def verify(gold, answer, raise_on_error=False):\n    return gold == answer\n",
}


def row(source, gold, *responses):
    return {"data_source": source, "prompt": "?", "reward_model": {"ground_truth": gold}, "responses": list(responses)}


def evaluate(s, rows, *more, env=None):
    p = run("eval", f"data.path={s.write('rows.jsonl', rows)}", *more, check=False, env=env)
    return (json.loads(p.stdout) if p.returncode == 0 else {}), p


def check_router(s, test, env):
    qa, sums = {"target": ["The Eiffel Tower"]}, "(\\cdot+1)"
    rows = [row("openai/gsm8k", "1234", "so #### 1,234"), row("HuggingFaceH4/MATH-500", "\\frac12", "\\boxed{0.5}"),
            row("aime25", "7", "Answer: 7"), row("searchR1_nq", qa, "<answer>eiffel tower!</answer>"),
            row("Idavidrein/gpqa", "B", "Answer: B"),
            row("hiyouga/geometry3k", "5", "<think>x</think> \\boxed{5}"), row("numina_cn_k12", "x+2", "The answer is 2+x"),
            row("numina_olympiads", "x" + sums, "\\boxed{x(*+1)}"), row("Maxwell-Jia/AIME_2024", "42", "it is 42 .")]
    got, p = evaluate(s, rows, env=env)
    wrong = [x["data_source"] for x in rows if got.get(f"test_score/{x['data_source']}") != 1]
    test("every data source of the router has its grader", not wrong, f"{wrong} {p.stderr[-600:]}")
    for grader, gold, response, score in [("gsm8k_flexible", "5", "it is 5", 1), ("math_dapo_strict_box", "5", "Answer: 5", -1),
                                          ("math_dapo_strict_box", "5", "\\boxed{5}", 1), ("math_verify", "5", "it is 5 .", 1),
                                          ("search_r1_like_qa_subem", {"target": "eiffel"}, "<answer>eiffel tower</answer>", 1)]:
        got, p = evaluate(s, [row("my/data", gold, response)], f"reward.grader={grader}", env=env)
        test(f"reward.grader={grader} scores rows of any data source", got.get("test_score/my/data") == score,
             f"{got} {p.stderr[-300:]}")
    _, p = evaluate(s, [row("my/data", "5", "5")], "reward.grader=gsm9k")
    test.refused("a grader that is not there", p, 2, "gsm9k", "math_verify", "gsm8k_flexible")


def check_questions(s, test, env):
    """One response that hangs sympy, one that kills its process, one over math-verify's own limit: each alone has no score."""
    rows = [row("numina_cn_k12", "x+1", "The answer is 1+x", "The answer is x+88", "The answer is 1+x", "The answer is x+77")]
    start = time.monotonic()
    got, p = evaluate(s, rows, "+reward.timeout=3", env=env)
    test("a question that hangs or kills costs its own response", got.get("errors") == 2 and got["test_score/numina_cn_k12"] == 1
         and time.monotonic() - start < 30, f"{got} {p.stderr[-600:]}")
    asked = "".join(json.dumps({"op": "reward", "grader": g, "solution_str": text, "ground_truth": gold}) + "\n" for g, text,
                    gold in [
        ("prime_math", "The answer is x+88", "x+1"), ("math_verify", "slow 5", "5")])
    said = [json.loads(x) for x in run("algo", input=asked, env=env).stdout.splitlines()]
    test("and says what went wrong: never a score of 0", [x.get("status") for x in said] == ["crash", "timeout"] and
         not any("score" in x for x in said), str(said))


def check_before_a_run(s, test):
    def tried(source, **more):
        rows = [{**s.row(i), "data_source": source if i == 5 else "openai/gsm8k"} for i in range(16)]
        return run(*s.ppo("tried", **{"data.train_files": s.write("tried.jsonl", rows), "trainer.total_training_steps": 1, **more}),
                   check=False)

    p = tried("my/data")
    test.refused("a data source that no grader is for, before step 1", p, 3, "'my/data'", "openai/gsm8k", "reward.grader=NAME",
                 "custom_reward_function.path")
    test("so before step 1", "step:1" not in p.stdout + p.stderr and not (s.dir / "tried/global_step_1").exists())
    test.refused("packages that are missing, before step 1", tried("numina_olympiads"), 1, "'numina_olympiads'", "prime_math",
                 "pip install sympy pylatexenc")
    test.refused("those of a grader by name", tried("my/data", **{"reward.grader": "math_verify"}), 1, "pip install math-verify")
    test.refused("a grader beside a function", tried("x", **{"reward.grader": "gsm8k",
                                                             "reward.custom_reward_function.path": "f.py"}), 2,
                 "reward.grader", "custom_reward_function.path")
    p = tried("my/data", **{"reward.grader": "gsm8k"})
    test("a run with reward.grader", p.returncode == 0, p.stderr[-600:])


USER = """
from verl.utils.reward_score import default_compute_score, geo3k, gsm8k, math_dapo, math_reward, math_verify, search_r1_like_qa_em
from verl.utils.reward_score.math_dapo import last_boxed_only_string, normalize_final_answer, remove_boxed

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    qa = {"target": ["the Tower"]}
    return {"score": 1.0,
        "gsm8k": gsm8k.compute_score("it is 5", "5", method="flexible", score=2.0),
        "format": gsm8k.compute_score("#### 6", "5", format_score=0.5),
        "boxed": math_dapo.compute_score("\\\\boxed{5}", "5", strict_box_verify=True)["score"],
        "normal": normalize_final_answer("x = 1,000 dollars"), "inner": remove_boxed(last_boxed_only_string("a \\\\boxed{7} b")),
        "equiv": math_reward.is_equiv("0.5", "\\\\frac12"), "verify": math_verify.compute_score("it is 5 .", "5"),
        "late": math_verify.compute_score("slow", "5", timeout_score=-3), "geo3k": geo3k.compute_score("\\\\boxed{5}", "5"),
        "qa": search_r1_like_qa_em.compute_score("<answer>Tower.</answer>", qa),
        "sub": search_r1_like_qa_em.compute_score_subem("</answer>" * 12 + "<answer>a tower of X</answer>", qa, score=4.0),
        "none": search_r1_like_qa_em.compute_score("Tower", qa, format_score=0.1),
        "default": default_compute_score("searchR1_nq", "<answer>tower</answer>", qa)}
"""


def check_user_file(s, test, env):
    (s.dir / "user.py").write_text(USER)
    asked = json.dumps({"op": "reward", "data_source": "x", "solution_str": "", "ground_truth": ""}) + "\n"
    p = run("algo", "--reward", s.dir / "user.py", input=asked, env=env)
    got, want = json.loads(p.stdout), {
        "gsm8k": 2.0, "format": 0.5, "boxed": 1.0, "normal": "1000", "inner": "7", "equiv": True, "verify": 1.0, "late": -3,
                                       "geo3k": 0.9,
        "qa": 1.0, "sub": 4.0, "none": 0, "default": 1.0}
    test("a user's file imports verl.utils.reward_score", {k: got.get(k) for k in want} == want, f"{got} {p.stderr[-600:]}")


def check_bench(test):
    """The bar is 10,000 a second on one core; a shared machine may be slow, so a tenth of it is asked here."""
    lines = [json.loads(x) for x in run("bench", "grade", "--min-time", "0.05").stdout.splitlines()]
    slow = [x for x in lines if x["right"] != 0.5 or x["per_s"] < 1000]
    test("verlc bench grade: half of the responses right, thousands a second", len(lines) == 14 and not slow, str(slow or lines))


def main():
    test = Tests()
    with Scratch() as s:
        for name, text in PACKAGES.items():
            (s.dir / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
            (s.dir / "packages" / name).write_text(text)
        env = {"PYTHONPATH": str(s.dir / "packages")}
        check_router(s, test, env)
        check_questions(s, test, env)
        check_before_a_run(s, test)
        check_user_file(s, test, env)
    check_bench(test)
    test.end()


main()
