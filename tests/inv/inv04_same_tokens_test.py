"""Invariant 4: a request's samples are a function of the request alone. The same
requests through `verlc generate` in other orders, with other --max-seqs and --threads,
and one process each: the same lines, log-probs included, to the last digit."""

import json
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

WORDS = "how many apples are left when three of them roll away from seven baskets".split()


def requests():
    rng = random.Random(3)
    out = []
    for i in range(14):
        text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 30])))
        q = {"messages": [{"role": "user", "content": text}]} if i % 3 == 0 else {"prompt": "Question: " + text}
        q |= {"n": rng.choice([1, 2, 5]), "max_tokens": rng.choice([1, 8, 33]), "seed": i // 2,
              "temperature": rng.choice([0, 0.7, 1, 1.5])}
        if i % 4 == 1:
            q |= {"top_p": 0.8, "top_k": 12}
        if i % 5 == 2:
            q |= {"repetition_penalty": 1.3, "min_p": 0.01}
        if i % 7 == 3:
            q |= {"stop": ["a", "the"]}
        if i % 2:
            q["ignore_eos"] = True
        out.append(q)
    out[9] = dict(out[8])  # the same request twice: the same samples
    return out


def generate(model, dtype, asked, order, *options):
    """Samples by request, as the program printed them but for the line number."""
    lines = "".join(json.dumps(asked[i]) + "\n" for i in order)
    got = [json.loads(x) for x in run("generate", "--model", model, "--dtype", dtype, *options, input=lines).stdout.split("\n")
           if x]
    out = {i: {} for i in order}
    for g in got:
        request = order[g.pop("index")]
        out[request][g["sample"]] = json.dumps(g, sort_keys=True)
    return out


def main():
    test = Tests()
    asked = requests()
    order = list(range(len(asked)))
    rng = random.Random(4)
    with Scratch() as s:
        for dtype in ("fp32", "bf16"):
            model = s.dir / "model"
            want = generate(model, dtype, asked, order, "--threads", "1")
            tokens = sum(len(json.loads(x)["ids"]) for r in want.values() for x in r.values())
            test(f"{dtype}: every sample is there", all(len(want[i]) == asked[i]["n"] for i in order) and tokens > 200)
            test(f"{dtype}: equal requests, equal samples", want[8] == want[9])
            spread = next(i for i in order if asked[i]["n"] == 5 and asked[i]["temperature"] > 0.5 and asked[i]["max_tokens"] > 1)
            test(f"{dtype}: samples of a request differ",
                 len({json.dumps(json.loads(x)["ids"]) for x in want[spread].values()}) > 1)
            for max_seqs, threads in ((1, 1), (3, 2), (7, 1), (256, 2)):
                rng.shuffle(order)
                got = generate(model, dtype, asked, order, "--max-seqs", max_seqs, "--threads", threads)
                wrong = [i for i in order if got[i] != want[i]]
                test(f"{dtype}: shuffled, --max-seqs {max_seqs} --threads {threads}", not wrong, f"requests {wrong}")
            alone = [generate(model, dtype, asked, [i])[i] == want[i] for i in order[:5]]
            test(f"{dtype}: each in a process of its own", all(alone))
    test.end()


main()
