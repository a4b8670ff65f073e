"""SFT as a user runs it: conversations of several turns from JSONL and Parquet, the loss on
the assistant's words alone, batches cut in any way, every schedule.  That its loss falls, that
LoRA and resume work and which checkpoint stays are in learn_test, lora_test, signals_test and
early_stop_test; `make oracle` compares its masks with verl's."""

import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run, series, state  # noqa: E402

STEPS = 6


def chats(last=None):
    """Two turns each, some longer than others; `last`: words of the user's that nobody answers."""
    rows = []
    for i in range(24):
        a, b = i % 7, i % 5 + 1
        turns = [("user", f"What is {a} + {b}?"), ("assistant", f"It is {a + b}." + " Yes." * (i % 4)),
                 ("user", "And one more?"), ("assistant", str(a + b + 1))] + ([("user", last)] if last else [])
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    return rows


def sft(s, run_dir, **keys):
    args = {"model.path": s.dir / "model", "data.train_files": s.dir / "chats.jsonl", "data.val_files": s.dir / "chats.jsonl",
            "data.train_batch_size": 4, "data.max_length": 256, "data.max_token_len_per_gpu": 1024, "engine.dtype": "float32",
            "optim.lr": 1e-3, "trainer.total_training_steps": STEPS, "trainer.test_freq": STEPS, "trainer.save_freq": STEPS,
            "trainer.logger": "[console,file]", "trainer.default_local_dir": s.dir / run_dir}
    args.update({k.replace("__", "."): v for k, v in keys.items()})
    return run("sft", *[f"{k}={v}" for k, v in args.items()])


def near(a, b, bound):
    return len(a) == len(b) and all(abs(x - y) <= bound * max(abs(x), abs(y)) for x, y in zip(a, b))


def check_formats(s, test):
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        print("skipped: parquet (pyarrow is not installed)")
        return
    pq.write_table(pa.Table.from_pylist(chats()), s.dir / "chats.parquet")
    sft(s, "parquet", data__train_files=s.dir / "chats.parquet", data__val_files=s.dir / "chats.parquet")
    test("parquet and JSONL: the same bits", state(s.dir / "parquet", STEPS) == state(s.dir / "whole", STEPS))


def check_mask(s, test):
    """The loss is the assistant's words alone: unanswered words of the user's change nothing in it, however many."""
    s.write("short.jsonl", chats("Thanks."))
    s.write("long.jsonl", chats("Thank you very much, that is all that I wanted to know about these two numbers."))
    at = {}
    for name in ("chats", "short", "long"):
        sft(s, f"mask-{name}", data__train_files=s.dir / f"{name}.jsonl", data__val_files=s.dir / f"{name}.jsonl",
            trainer__total_training_steps=1, trainer__test_freq=1)
        at[name] = [series(s.dir / f"mask-{name}", m)[0]
                    for m in ("train/loss", "train/grad_norm", "val/loss", "train/global_tokens")]
    test("what the user says last has no loss and no gradient", near(at["chats"][:3], at["short"][:3], 1e-6) and
         near(at["chats"][:3], at["long"][:3], 1e-6) and at["chats"][3] < at["short"][3] < at["long"][3], at)


def check_batches(s, test):
    want = series(s.dir / "whole", "train/loss")
    for name, keys in {"one conversation at a time": {"data__use_dynamic_bsz": False, "data__micro_batch_size_per_gpu": 1},
                       "packed to 256 tokens": {"data__max_token_len_per_gpu": 256}}.items():
        sft(s, name.replace(" ", "-"), **keys)
        got = series(s.dir / name.replace(" ", "-"), "train/loss")
        test(f"{name}: the same losses", near(got, want, 1e-5), (got, want))


def rates(kind, warmup, peak=1e-3, low=0.1, steps=STEPS):
    """What the steps report, which as in verl is the rate of the next one, by the schedule's formula (torch's LambdaLR)."""
    out = []
    for step in range(1, STEPS + 1):
        if step < warmup:
            out.append(peak * step / warmup)
        elif kind == "constant":
            out.append(peak)
        else:
            at = min(1, (step - warmup) / (steps - warmup))
            out.append(peak * (low + (1 - low) * (0.5 * (1 + math.cos(math.pi * at)))))
    return out


def check_schedules(s, test):
    for kind in ("constant", "cosine"):
        sft(s, kind, optim__lr_scheduler_type=kind, optim__lr_warmup_steps=2, optim__min_lr_ratio=0.1)
        got = series(s.dir / kind, "train/lr")
        test(f"{kind}: warm-up over 2 steps, then its curve", near(got, rates(kind, 2), 1e-6), (got, rates(kind, 2)))
    sft(s, "shorter", engine="megatron", optim__lr_decay_style="cosine", optim__lr_warmup_steps=2, optim__min_lr=1e-4,
        optim__lr_decay_steps=STEPS - 1)
    got, want = series(s.dir / "shorter", "train/lr"), rates("cosine", 2, steps=STEPS - 1)
    test("lr_decay_steps: the curve ends before the run", near(got, want, 1e-6) and got[-1] == got[-2], (got, want))


def check_epochs(s, test):
    """steps-over-epochs (docs/differences.md): an epoch has 6 steps."""
    sft(s, "over", trainer__total_epochs=1, trainer__total_training_steps=8, trainer__test_freq=100, trainer__save_freq=100)
    test("total_training_steps beyond total_epochs: goes on, validates and saves at its end",
         len(series(s.dir / "over", "train/loss")) == 8 and len(series(s.dir / "over", "val/loss")) == 1 and
         (s.dir / "over/global_step_8").is_dir())


def check_no_target(s, test):
    """no-valid-token (docs/differences.md): a batch in which truncation has left nothing to learn costs a step, not the run."""
    long = {"messages": [{"role": "user", "content": "Say yes. " * 40}, {"role": "assistant", "content": "Yes."}]}
    s.write("cut.jsonl", [long] * 3 + chats()[:3])
    sft(s, "cut", data__train_files=s.dir / "cut.jsonl", data__val_files=s.dir / "cut.jsonl", data__max_length=96,
        data__truncation="right", data__train_batch_size=1)
    loss, norm = series(s.dir / "cut", "train/loss"), series(s.dir / "cut", "train/grad_norm")
    test("batches without a token to learn: no loss, gradient 0, and on", len(loss) == norm.count(0) == 3 and
         len(norm) == STEPS and min(loss) > 0, (loss, norm))


def main():
    test = Tests()
    with Scratch(small=True) as s:
        s.write("chats.jsonl", chats())
        sft(s, "whole")
        check_formats(s, test)
        check_mask(s, test)
        check_batches(s, test)
        check_schedules(s, test)
        check_epochs(s, test)
        check_no_target(s, test)
    test.end()


main()
