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
"""

import datetime
import decimal
import os
import re
import sys
import tempfile

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
    rows = [verl_row({"question": f"What is {i} + {i}? \u00e9\u65e5", "answer": f"It is.\n#### 1,{i:03d}"}, i, "train") for i in range(5)]
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


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "compare":
        compare(sys.argv[2], sys.argv[3])
    elif len(sys.argv) == 3 and sys.argv[1] == "fixtures":
        fixtures(sys.argv[2])
    else:
        sys.exit(__doc__)
