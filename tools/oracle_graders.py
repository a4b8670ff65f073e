"""Makes tests/fixtures/algo/reward.jsonl: answers bent in every way that verl 0.9.1's
graders of GSM8K and MATH are sensitive to, with the scores that these graders give.
With --verlc BIN nothing is written: the program grades thousands of such strings, and a thousand batches of them under
DAPO's reward manager with its penalty on long answers, beside verl's own DAPORewardManager.
Run: python tools/oracle_graders.py [--verl DIR] [--out DIR | --verlc BIN]. Deterministic.
"""
import argparse
import contextlib
import io
import json
import random
import subprocess
import sys
import types
from pathlib import Path

import oracle_verl

RNG = random.Random(20260101)


def gsm8k_strings(n):
    """Final answers as GSM8K writes them, bent in every way that the grader is sensitive to."""
    for k in range(n):
        gold = str(RNG.choice([RNG.randint(0, 20), RNG.randint(0, 10**6), -RNG.randint(1, 500)]))
        shown = RNG.choice([gold, f"{int(gold):,}", "$" + gold, gold + ".", gold + ".0", gold + ",", gold + "%", "- " + gold,
                            "٣", str(int(gold) + 1), "", ".", ",", gold + " apples", "−" + gold, "0" + gold])
        mark = RNG.choice(["#### ", "#### ", "#### ", "####", "### ", "##### ", "####  ", "####\n", "#### #### ", "The answer is "])
        text = RNG.choice(["", "So 3 * 4 = 12.\n", "日本語 12 \n", "x" * RNG.choice([280, 290, 296, 300, 310]), "é" * 295,
                           "😀" * 298 + "\n", "#### 7\n", "#### " + gold + "\n then ", "12, 13. 14 "])
        tail = RNG.choice(["", "", ".", "\n", " and so on", "\n#### 5", "\n####", "z" * RNG.choice([280, 290, 299, 300]), "ü" * 297,
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


def math_strings(n):
    for k in range(n):
        gold = RNG.choice(MATH_PIECES)
        shown = RNG.choice([gold, RNG.choice(MATH_PIECES)])
        yield RNG.choice(["The answer is $\\boxed{%s}$.", "\\boxed{%s} so \\boxed{%s}", "\\boxed %s$ end", "\\fbox{%s}",
                          "no box %s",
                          "\\boxed{%s", "\\boxed{{%s}}", "Answer: %s", "answer :\u2003%s\nmore", "Answer: 1\nANSWER:  %s ",
                          "an\u017fwer: %s", "Answer:\n\n%s", "Answer:", "\\boxed{a} Answer: \n",
                          "x" * 290 + "Answer: %s", "y" * 250 + "\\boxed{%s}"]).replace("%s", shown), gold


def reward_lines(n_gsm8k, n_math):
    from verl.utils.reward_score import gsm8k, math_dapo, math_reward

    lines = []
    for text, gold in gsm8k_strings(n_gsm8k):
        lines.append(dict(kind="gsm8k", text=text, gold=gold, strict=float(gsm8k.compute_score(text, gold)),
                          flexible=float(gsm8k.compute_score(text, gold, method="flexible")),
                          answer=gsm8k.extract_solution(text), loose=gsm8k.extract_solution(text, "flexible")))
    for text, gold in math_strings(n_math):
        dapo = math_dapo.compute_score(text, gold)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its exceptions
            score = float(math_reward.compute_score(text, gold))
        lines.append(dict(kind="math", text=text, gold=gold, math=score, dapo=float(dapo["score"]), pred=dapo["pred"]))
    return lines


def reward_requests(line):
    """(request, expected answer) pairs of a line of reward.jsonl."""
    base = dict(op="reward", solution_str=line["text"], ground_truth=line["gold"])
    if line["kind"] == "gsm8k":
        for method in ("strict", "flexible"):
            yield dict(base, data_source="openai/gsm8k", method=method), dict(score=line[method])
    else:
        yield dict(base, data_source="lighteval/MATH"), dict(score=line["math"])
        yield dict(base, data_source="math_dapo"), dict(score=line["dapo"], pred=line["pred"])


def compare(program, lines):
    pairs = [pair for line in lines for pair in reward_requests(line)]
    text = "".join(json.dumps(request) + "\n" for request, _ in pairs)
    done = subprocess.run([program, "algo"], input=text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [(r, a, e) for (r, e), a in zip(pairs, answers, strict=True) if any(a.get(k) != v for k, v in e.items())]
    for request, answer, expect in bad[:5]:
        print(f"DIFFERS {answer} where verl has {expect} in {json.dumps(request)[:200]}")
    print(f"{len(lines)} strings, {len(pairs)} graded answers, {len(bad)} differences")
    return 1 if bad else 0


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


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--verl", help="an unpacked verl wheel, if verl is not installed")
    p.add_argument("--verlc", help="compare this program's answers instead of writing the fixture")
    p.add_argument("--out", default=Path(__file__).parent.parent / "tests/fixtures/algo", type=Path)
    a = p.parse_args()
    oracle_verl.load(a.verl)
    if a.verlc:
        lines = reward_lines(2000, 3000)
        sys.exit(compare(a.verlc, lines) or compare_dapo(a.verlc, lines))
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "reward.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in reward_lines(250, 350)))


if __name__ == "__main__":
    main()
