"""Makes tests/fixtures/algo/graders.jsonl: generated responses (oracle_answers.py) with the scores that verl 0.9.1's graders
give, and what its sympy and pylatexenc answered on the way.
With --verlc BIN nothing is written: the program grades 5,000 such responses with each grader, and a thousand batches under
DAPO's reward manager with its penalty on long answers, beside verl's own. Differences with a name are those of
docs/differences.md. GSM8K's own solutions are used where SHARED_DATA has them.
Run: python tools/oracle_graders.py [--verl DIR] [--out DIR | --verlc BIN]. Deterministic.
"""
import argparse
import collections
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import oracle_answers
import oracle_verl

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "python"))
from verlc_helpers import graders as helper  # noqa: E402

def gsm8k_strings(rng, n):
    """Final answers as GSM8K writes them, bent in every way that the grader is sensitive to."""
    for k in range(n):
        gold = str(rng.choice([rng.randint(0, 20), rng.randint(0, 10**6), -rng.randint(1, 500)]))
        shown = rng.choice([gold, f"{int(gold):,}", "$" + gold, gold + ".", gold + ".0", gold + ",", gold + "%", "- " + gold,
                            "٣", str(int(gold) + 1), "", ".", ",", gold + " apples", "−" + gold, "0" + gold])
        mark = rng.choice(["#### ", "#### ", "#### ", "####", "### ", "##### ", "####  ", "####\n", "#### #### ", "The answer is "])
        text = rng.choice(["", "So 3 * 4 = 12.\n", "日本語 12 \n", "x" * rng.choice([280, 290, 296, 300, 310]), "é" * 295,
                           "😀" * 298 + "\n", "#### 7\n", "#### " + gold + "\n then ", "12, 13. 14 "])
        tail = rng.choice(["", "", ".", "\n", " and so on", "\n#### 5", "\n####", "z" * rng.choice([280, 290, 299, 300]), "ü" * 297,
                           " .", " ,"])
        yield text + mark + shown + tail, gold


MATH_PIECES = [r"\frac{1}{2}", r"\frac12", r"\frac1{72}", r"\dfrac{3}{4}", r"\tfrac 1 2", "0.5", ".5", "1/2", "-3/4", "a/b",
               r"\sqrt3", r"\sqrt{3}",
               r"x=5", "k = 7", "long=7", r"10\%", r"45^\circ", r"45^{\circ}", r"12\text{ cm}", r"\left(1,2\right)", r"\$5",
               "1,000",
               r"\text{A}", "x^2+1", r"\!3", r"\\frac{1}{2}", "{.5}", " .5", r"\frac{a}{b}", "1/2/3", r"\frac1", "007/2", "日本", "½",
               r"\sqrt", r"3\text{ m}\text{ s}", "", "a=b=c", r"\frac", r"12\mbox{ dollars}", "a cat", "an 5", "5 students", "$5$",
               "$x=3$ and",
               r"\boxed{7}", r"\overline{AB}", r"\textbf{9}", r"3,\text{and} 4", "12 ways", "{,}", r"1{,}000", '"7"', r"\frac ab",
               "fracab", "sqrt2", "1,2,3", r"\ldots", "1 000", "10^{\circ}", "7 \\dots", "²", "٣", "１２", "\u2003 5", "5\u00a0"]


def math_strings(rng, n):
    for k in range(n):
        gold = rng.choice(MATH_PIECES)
        shown = rng.choice([gold, rng.choice(MATH_PIECES)])
        yield rng.choice(["The answer is $\\boxed{%s}$.", "\\boxed{%s} so \\boxed{%s}", "\\boxed %s$ end", "\\fbox{%s}",
                          "no box %s",
                          "\\boxed{%s", "\\boxed{{%s}}", "Answer: %s", "answer :\u2003%s\nmore", "Answer: 1\nANSWER:  %s ",
                          "an\u017fwer: %s", "Answer:\n\n%s", "Answer:", "\\boxed{a} Answer: \n",
                          "x" * 290 + "Answer: %s", "y" * 250 + "\\boxed{%s}"]).replace("%s", shown), gold


SOLUTIONS = []  # for comparisons; the fixture is the same without the data


def gsm8k_solutions():
    """The texts of GSM8K's training answers; none without the data."""
    path = Path(os.environ.get("SHARED_DATA", "")) / "gsm8k/train.jsonl"
    return [json.loads(x)["answer"] for x in path.read_text().splitlines()] if path.exists() else []


class Asked:
    """What verl's prime_math and mathruler ask of pylatexenc, sympy and eval, as questions to the helper."""

    def __init__(self):
        self.answers = {}

    def watch(self, module):
        """Its are_equal_under_sympy stays in this process: with verl's, each call forks."""
        equal = getattr(module.are_equal_under_sympy, "__wrapped__", module.are_equal_under_sympy)

        def watched(truth, given):
            same, expr = equal(truth, given), f"({truth})-({given})"
            if module.should_allow_eval(expr):
                self.answers[json.dumps({"zero": expr})] = {"zero": same}
            return same

        module.are_equal_under_sympy = watched
        module.latex2text = types.SimpleNamespace(LatexNodes2Text=lambda: types.SimpleNamespace(latex_to_text=self.latex))

    def latex(self, text):
        from pylatexenc import latex2text
        self.answers[json.dumps({"latex": text})] = answer = helper.latex(text)
        if answer["text"] is None:
            return latex2text.LatexNodes2Text().latex_to_text(text)
        return answer["text"]

    def evaluate(self, text, *scopes):
        self.answers[json.dumps({"value": text})] = helper.value(text)
        return eval(text, {})  # noqa: S307 - verl's, on our own texts

    def take(self):
        answers, self.answers = self.answers, {}
        return answers


ASKED = Asked()


def verl_graders():
    """name -> verl's function of (response, ground truth)."""
    import mathruler.grader
    from verl.utils.reward_score import geo3k, gsm8k, math_dapo, math_reward, prime_math, search_r1_like_qa_em

    ASKED.watch(prime_math)
    ASKED.watch(mathruler.grader)
    prime_math.grader.eval = ASKED.evaluate

    def gpqa(text, gold):  # verl-recipe, r1/tasks/gpqa.py
        found = re.search(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?", text)
        return 1.0 if found and found.group(1) == gold else 0.0

    return {"gsm8k": gsm8k.compute_score, "gsm8k_flexible": lambda s, g: gsm8k.compute_score(s, g, method="flexible"),
            "math_reward": math_reward.compute_score, "math_dapo": math_dapo.compute_score,
            "math_dapo_strict_box": lambda s, g: math_dapo.compute_score(s, g, strict_box_verify=True),
            "prime_math": lambda s, g: prime_math.compute_score(s, g)[0], "geo3k": geo3k.compute_score,
            "search_r1_like_qa_em": search_r1_like_qa_em.compute_score,
            "search_r1_like_qa_subem": search_r1_like_qa_em.compute_score_subem, "gpqa": gpqa}


def math_verify(text, gold):
    """verl's own, but for its pool of processes."""
    from verl.utils.reward_score.math_verify import _verify_in_subprocess
    return _verify_in_subprocess(f"\\boxed{{{gold}}}", text)


def pairs_of(name, rng, n):
    if name.startswith("gsm8k"):
        half = n // 2
        return [*gsm8k_strings(rng, half), *oracle_answers.gsm8k_pairs(rng, n - half, SOLUTIONS)]
    if name.startswith("search"):
        return list(oracle_answers.search_pairs(rng, n))
    if name == "gpqa":
        return list(oracle_answers.choice_pairs(rng, n))
    third = n // 3
    return [*math_strings(rng, third), *oracle_answers.math_pairs(rng, n - third)]


def expected(grade, text, gold):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            result = grade(text, gold)
        except Exception as error:
            return {"raises": type(error).__name__}
    return result if isinstance(result, dict) else {"score": float(result)}


def named_difference(name, text, gold, expect):
    """The name in docs/differences.md under which this answer may differ; None: it may not."""
    if name == "prime_math" and "Matrix(" in text and "pmatrix" in gold:
        return "no-eval"
    return None


def cases(name, grade, n, seed=20260101):
    rng = random.Random(f"{seed} {name}")
    for text, gold in pairs_of(name, rng, n):
        ASKED.take()
        expect = expected(grade, text, gold)
        yield dict(grader=name, text=text, gold=gold, expect=expect, asked=ASKED.take())


def differs(answer, expect):
    return any(answer.get(k) != v for k, v in expect.items())


def compare(program, name, grade, n):
    lines = list(cases(name, grade, n))
    requests = "".join(json.dumps(dict(op="reward", grader=name, solution_str=x["text"],
                                       ground_truth=x["gold"])) + "\n" for x in lines)
    done = subprocess.run([program, "algo"], input=requests, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          check=True,
                          env={**os.environ, "VERLC_PYTHON": sys.executable})
    bad, named = 0, collections.Counter()
    for x, answer in zip(lines, map(json.loads, done.stdout.splitlines()), strict=True):
        if not differs(answer, x["expect"]):
            continue
        why = named_difference(name, x["text"], x["gold"], x["expect"])
        named[why] += why is not None
        bad += why is None
        if why is None and bad <= 5:
            print(f"DIFFERS {name} {answer} where verl has {x['expect']}: {x['text'][-200:]!r}, gold {x['gold']!r}")
    right = sum(x["expect"].get("score", 0) > 0 for x in lines)
    print(f"{name}: {len(lines)} answers, {right} scores above 0, {sum(bool(x['asked']) for x in lines)} asked, {bad} differences"
          + "".join(f", {n} {why}" for why, n in named.items() if n))
    return bad


class Characters:
    """A tokenizer whose ids are code points: only the numbers of tokens matter here."""

    eos_token = "\0"

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids.tolist()))


class Rows(list):
    def __init__(self, items, batch):
        super().__init__(items)
        self.batch = batch


def dapo_batch(rng, lines):
    """(requests, rewards, extras): random answers, lengths at and around the buffer's ends, a config."""
    import torch
    from verl.workers.reward_manager.dapo import DAPORewardManager

    width = max(len(x["text"]) for x in lines) + 1
    limit, masks = rng.randint(1, width), []
    buffer = types.SimpleNamespace(enable=rng.random() < 0.9, len=rng.randint(1, limit),
                                   penalty_factor=rng.choice([1.0, 0.5, 2, 0.0, -1.0]), log=rng.random() < 0.5)
    responses = torch.zeros(len(lines), width, dtype=torch.int64)
    for i, x in enumerate(lines):
        responses[i, :len(x["text"])] = torch.tensor([ord(c) for c in x["text"]])
        masks.append(torch.tensor([1] + [1] * len(x["text"]) + [0] * (width - len(x["text"]))))  # a prompt of one token
    source = {"gsm8k": "openai/gsm8k", "math": "math_dapo"}
    items = [types.SimpleNamespace(batch=dict(prompts=torch.tensor([7]), responses=responses[i], attention_mask=masks[i]),
                                   non_tensor_batch=dict(reward_model=dict(ground_truth=x["gold"]), data_source=source[x["kind"]],
                                                         extra_info={})) for i, x in enumerate(lines)]
    manager = DAPORewardManager(Characters(), 0, max_resp_len=limit, overlong_buffer_cfg=buffer)
    requests = [dict(op="reward", data_source=source[x["kind"]], solution_str=x["text"], ground_truth=x["gold"],
                     response_length=len(x["text"]), reward_kwargs=dict(max_resp_len=limit, overlong_buffer_cfg=vars(buffer)))
                for x in lines]
    with contextlib.redirect_stdout(io.StringIO()):
        found = manager(Rows(items, dict(responses=responses)), return_dict=True)
    assert all(found["reward_tensor"][i].count_nonzero() <= 1 for i in range(len(lines)))
    return requests, found["reward_tensor"].sum(-1).tolist(), found["reward_extra_info"]


def compare_dapo(program, lines, n_batches=1000):
    rng, requests, rewards, penalties = random.Random(5), [], [], []
    lines = [x for x in lines if x["text"]]  # verl puts the reward of an empty answer on the last padding
    for _ in range(n_batches):
        kind = rng.choice(["gsm8k", "math"])  # verl's lists of extras are of one source
        q, r, extra = dapo_batch(rng, rng.choices([x for x in lines if x["kind"] == kind], k=rng.randint(1, 6)))
        requests, rewards = requests + q, rewards + r
        penalties += [float(x) for x in extra["overlong_reward"]] or [None] * len(q)
    text = "".join(json.dumps(x) + "\n" for x in requests)
    done = subprocess.run([program, "algo"], input=text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    bad, worst, n_penal = 0, 0.0, 0
    for q, answer, reward, penalty in zip(requests, map(json.loads, done.stdout.splitlines()), rewards, penalties, strict=True):
        error = abs(answer["score"] - reward) / max(1, abs(reward))  # verl computes the penalty, and adds it, in float32
        if penalty is not None:
            error = max(error, abs(answer["overlong_reward"] - penalty) / max(1, abs(penalty)),
                        float(answer["overlong"] != (penalty < 0)))
            n_penal += penalty < 0
        if "overlong_reward" in answer and penalty is None or error > 1e-6:
            bad += 1
            print(f"DIFFERS {answer} where verl has {reward}, {penalty} in {json.dumps(q)[-200:]}")
        worst = max(worst, error)
    print(f"DAPORewardManager: {n_batches} batches, {len(requests)} rewards, {n_penal} logged penalties, {bad} differences; "
          f"largest {worst:.1e}")
    return 1 if bad or not n_penal else 0


def dapo_lines(n):
    rng = random.Random(3)
    return ([dict(kind="gsm8k", text=t, gold=g) for t, g in gsm8k_strings(rng, n)] +
            [dict(kind="math", text=t, gold=g) for t, g in math_strings(rng, n)])


def small(line):
    """Whether the fixture takes it: short, and of no named difference."""
    return len(line["text"]) < 700 and "raises" not in line["expect"] and not named_difference(
        line["grader"], line["text"], str(line["gold"]), line["expect"])


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--verl", help="an unpacked verl wheel, if verl is not installed")
    p.add_argument("--verlc", help="compare this program's answers instead of writing the fixture")
    p.add_argument("--only", help="one grader")
    p.add_argument("--answers", type=int, default=5000, help="for each grader")
    p.add_argument("--out", default=ROOT / "tests/fixtures/algo", type=Path)
    a = p.parse_args()
    oracle_verl.load(a.verl)
    table = verl_graders()
    if a.verlc:
        SOLUTIONS.extend(gsm8k_solutions())
        table["math_verify"] = math_verify
        bad = sum(compare(a.verlc, name, grade, a.answers) for name, grade in table.items() if a.only in (None, name))
        sys.exit(1 if bad or (not a.only and compare_dapo(a.verlc, dapo_lines(1000))) else 0)
    a.out.mkdir(parents=True, exist_ok=True)
    lines = [x for name, grade in table.items() for x in [x for x in cases(name, grade, 400, seed=1) if small(x)][::3][:60]]
    (a.out / "graders.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


if __name__ == "__main__":
    main()
