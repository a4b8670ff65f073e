"""Checks verlc's GSM8K rows against the ones verl's recipe makes, and makes the
fixtures of tests/unit/test_data*.c.  Needs the PyPI packages datasets, pyarrow,
transformers (run by `make oracle`).

  python tools/oracle_data.py compare RAW_DIR VERLC_DIR
      RAW_DIR holds train.jsonl and test.jsonl, VERLC_DIR what
      `verlc data gsm8k --local_dataset_path RAW_DIR` wrote.  The rows are made anew
      with the `datasets` library the way verl's examples/data_preprocess/gsm8k.py
      does it (load_dataset, map with indices, to_parquet), then rows, schema and
      what `datasets` reads back are compared.
  python tools/oracle_data.py fixtures OUT_DIR
      Small Parquet files with verl's nesting and with column types that are not JSON.
  python tools/oracle_data.py sets OUT_DIR
      What verl's own MultiTurnSFTDataset and RLHFDataset make of small conversations,
      with the tokenizers in OUT_DIR/tok_plain and OUT_DIR/tok_system (the tiny
      tokenizer; the second one's template adds a default system turn).  Needs verl
      0.9.1 with torch, too.
"""

import datetime
import decimal
import json
import os
import re
import sys
import tempfile
import types

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def ground_truth(answer):
    return re.search(r"#### (\-?[0-9\.\,]+)", answer).group(1).replace(",", "")


def verl_row(example, index, split):
    question, answer = example["question"], example["answer"]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question + " " + INSTRUCTION}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def verl_parquet(raw_dir, out_dir):
    """What verl's script writes, by the library it writes with."""
    import datasets

    files = {split: os.path.join(raw_dir, split + ".jsonl") for split in ("train", "test")}
    data = datasets.load_dataset("json", data_files=files, cache_dir=os.path.join(out_dir, "cache"))
    for split in files:
        rows = data[split].map(
            lambda example, i, split=split: verl_row(example, i, split),
            with_indices=True,
            remove_columns=["question", "answer"],
        )
        rows.to_parquet(os.path.join(out_dir, split + ".parquet"))


def compare(raw_dir, verlc_dir):
    import datasets

    with tempfile.TemporaryDirectory() as tmp:
        verl_parquet(raw_dir, tmp)
        for split in ("train", "test"):
            theirs = pq.read_table(os.path.join(tmp, split + ".parquet"))
            ours = pq.read_table(os.path.join(verlc_dir, split + ".parquet"))
            assert theirs.schema.equals(ours.schema, check_metadata=False), (theirs.schema, ours.schema)
            a, b = theirs.to_pylist(), ours.to_pylist()
            assert a == b, next((x, y) for x, y in zip(a, b) if x != y)
            loaded = datasets.load_dataset(
                "parquet", data_files=os.path.join(verlc_dir, split + ".parquet"), cache_dir=os.path.join(tmp, "c2")
            )["train"]
            assert list(loaded) == a
            print(f"{split}: {len(a)} rows equal, schema equal")


def fixtures(out_dir):
    os.makedirs(out_dir, exist_ok=True)
    rows = [verl_row({"question": f"What is {i} + {i}? \u00e9\u65e5", "answer": f"It is.\n#### 1,{i:03d}"}, i, "train")
            for i in range(5)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, os.path.join(out_dir, "verl.parquet"), row_group_size=2)
    odd = {
        "bytes": [b"\x00\xff", None],
        "day": [datetime.date(2024, 2, 29), None],
        "price": [decimal.Decimal("1.50"), None],
        "x": [float("nan"), 0.1],
        "big": pa.array([2**64 - 1, 1], pa.uint64()),
        "nested": [[{"k": float("inf")}], []],
    }
    pq.write_table(pa.table(odd), os.path.join(out_dir, "odd.parquet"))
    large(out_dir, "rows_600k", ["x" * 600_000] * 520, row_group_size=200)
    large(out_dir, "rows_2m", ["\u00e9" * 1_000_000] * 20)
    large(out_dir, "row_300m", ["x", "x" * (300 << 20)])


def large(out_dir, name, texts, **kw):
    """Small files of large rows: each text is there once, and compresses well."""
    rows = {"i": list(range(len(texts))), "prompt": [[{"role": "user", "content": x}] for x in texts],
            "answer": ["ok"] * len(texts)}
    pq.write_table(pa.table(rows), os.path.join(out_dir, f"{name}.parquet"), compression="zstd", **kw)


CONVERSATIONS = [
    [("user", "Tom has 3 apples. How many apples are there?"), ("assistant", "There are 3 apples.\n#### 3")],
    [
        ("system", "You are a helpful assistant."),
        ("user", "2 + 2?"),
        ("assistant", "4"),
        ("user", "And 3 more?"),
        ("assistant", "4 + 3 = 7\n#### 7"),
    ],
    [("user", "\u00e9\u65e5 \U0001f389"), ("assistant", ""), ("user", " "), ("assistant", "x\n\n")],
]
PROMPTS = ["Hi", "How many apples does Tom have now?", "Zoe buys 7 boxes with 9 shells in each box. " * 4, "\u65e5\u672c"]


def verl_datasets():
    """verl's classes; a vision module that newer transformers cannot load is left out."""
    vision = types.ModuleType("verl.models.transformers.qwen2_vl")
    vision.get_rope_index = None
    sys.modules[vision.__name__] = vision
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return MultiTurnSFTDataset, RLHFDataset


def messages_of(turns):
    return [{"role": role, "content": content} for role, content in turns]


def sft_cases(cls, tokenizer, path):
    """verl's ids and masks, unpadded, under several limits."""
    cases = []
    for max_length, truncation, pad_mode in ((512, "error", "no_padding"), (30, "right", "no_padding"), (30, "left", "right")):
        config = {"max_length": max_length, "truncation": truncation, "pad_mode": pad_mode}
        data = cls(path, tokenizer, config)
        rows = []
        for i in range(len(data)):
            item = data[i]
            n = int(item["attention_mask"].sum()) if "attention_mask" in item else len(item["input_ids"])
            rows.append({"ids": item["input_ids"][:n].tolist(), "loss_mask": item["loss_mask"][:n].tolist()})
        cases.append({"max_length": max_length, "truncation": truncation, "rows": rows})
    return cases


def pair_cases(tokenizer):
    """verl's SFTDataset (spec 5.6; gone in 0.9.1) by its formula, as target positions."""
    rows = []
    for turns in CONVERSATIONS[:1]:
        prompt = tokenizer.apply_chat_template(messages_of(turns[:1]), add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids = tokenizer(turns[1][1] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        ids = prompt_ids + response_ids
        predicts = [1] * len(ids)  # SFTDataset's mask: position t predicts token t + 1
        predicts[: len(prompt_ids) - 1] = [0] * (len(prompt_ids) - 1)
        predicts[-1] = 0
        rows.append({"ids": ids, "loss_mask": [0] + predicts[:-1]})
    return rows


def sets(out_dir):
    import datasets
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    datasets.disable_caching()
    sft_class, rl_class = verl_datasets()
    sft_path, rl_path = os.path.join(out_dir, "chats.parquet"), os.path.join(out_dir, "prompts.parquet")
    pq.write_table(pa.Table.from_pylist([{"messages": messages_of(c)} for c in CONVERSATIONS]), sft_path)
    rows = [verl_row({"question": q, "answer": "#### 1"}, i, "train") for i, q in enumerate(PROMPTS)]
    for row, q in zip(rows, PROMPTS):
        row["prompt"][0]["content"] = q
    pq.write_table(pa.Table.from_pylist(rows), rl_path)
    result = {}
    for name in ("tok_plain", "tok_system"):
        tokenizer = AutoTokenizer.from_pretrained(os.path.join(out_dir, name))
        ids = [
            tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
            for r in rows
        ]
        limit = sorted(len(x) for x in ids)[2]
        with tempfile.TemporaryDirectory() as tmp:
            config = OmegaConf.create(
                {"max_prompt_length": limit, "filter_overlong_prompts": True, "filter_overlong_prompts_workers": None,
                 "cache_dir": tmp}
            )
            kept = [r["index"] for r in (rl_class([rl_path], tokenizer, config)[i] for i in range(3))]
        result[name] = {
            "sft": sft_cases(sft_class, tokenizer, sft_path),
            "pair": pair_cases(tokenizer),
            "rl": {"prompts": [list(x) for x in ids], "limit": limit, "kept": kept},
        }
    with open(os.path.join(out_dir, "sets.json"), "w") as f:
        json.dump(result, f)
        f.write("\n")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "compare":
        compare(sys.argv[2], sys.argv[3])
    elif len(sys.argv) == 3 and sys.argv[1] == "fixtures":
        fixtures(sys.argv[2])
    elif len(sys.argv) == 3 and sys.argv[1] == "sets":
        sets(sys.argv[2])
    else:
        sys.exit(__doc__)
