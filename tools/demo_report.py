"""The end of `make demo`: how the reward rose, the same problems before and after,
and what to do next. Reads what the run wrote; exits 1 when it did not learn."""

import json
import pathlib
import sys


def rewards(path):
    rows = [json.loads(line) for line in open(path)]
    return [(r["step"], r["data"]["critic/rewards/mean"]) for r in rows if "critic/rewards/mean" in r["data"]]


def bar(value, width=40):
    return "#" * round(value * width)


def main():
    out, last = pathlib.Path(sys.argv[1]), sys.argv[2]
    curve = rewards(out / "grpo/metrics.jsonl")
    print("\nmean reward of the training samples")
    pick = sorted({round(i * (len(curve) - 1) / 12) for i in range(13)})
    for step, value in (curve[i] for i in pick):
        print(f"  step {step:4d}  {value:5.2f}  {bar(value)}")
    dumps = sorted(out.glob("validation/*.jsonl"), key=lambda p: int(p.stem))
    before, after = ([json.loads(line) for line in open(p)] for p in (dumps[0], dumps[-1]))
    wrong = [i for i, (b, a) in enumerate(zip(before, after)) if b["score"] < a["score"]]
    print("\nthe same problems before and after GRPO (greedy)")
    for i in (wrong + list(range(len(before))))[:3]:
        question = before[i]["input"].split("user\n")[-1].split("\nassistant")[0].strip()
        print(f"  problem   {question}")
        print(f"    before  {before[i]['output'].strip()!r}  score {before[i]['score']:g}")
        print(f"    after   {after[i]['output'].strip()!r}  score {after[i]['score']:g}")
    score = [sum(r["score"] for r in d) / len(d) for d in (before, after)]
    print(f"\nheld-out accuracy {score[0]:.2f} -> {score[1]:.2f};"
          f" training reward {sum(v for _, v in curve[:3]) / 3:.2f} -> {sum(v for _, v in curve[-5:]) / 5:.2f}")
    print(f"checkpoint      {out}/grpo/global_step_{last}   (training goes on from here with the same command)")
    print(f"Hugging Face    {out}/export   (AutoModelForCausalLM.from_pretrained loads it)")
    print(f"curves          tensorboard --logdir {out}/grpo/tensorboard, or sqlite3 {out}/grpo/run.db")
    print("next            train a real model on GSM8K: README.md, 'Your own model and data'")
    return 0 if sum(v for _, v in curve[-5:]) / 5 > sum(v for _, v in curve[:3]) / 3 else 1


sys.exit(main())
