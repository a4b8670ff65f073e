"""SFT by verl's rules, end to end: conversations with and without a system turn, with empty answers, marks of the template
in their text, two answers in a row and a user's last word, through the real tokenizer and chat template of Qwen2.5.
`verlc sft` trains a tiny model with learning rate 0, so that each step's loss is that of one conversation; torch computes
the same from the ids and the loss mask of verl's own MultiTurnSFTDataset. Both sides are sorted, since the sampler
shuffles. A token more or less in a mask would show.

  python tools/oracle_sft.py VERLC TOKENIZER_DIR     (verl 0.9.1, torch, transformers; TOKENIZER_DIR holds the files, .xz or not)
"""

import json
import lzma
import pathlib
import subprocess
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from oracle_data import CONVERSATIONS, messages_of, verl_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer

SHAPE = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64,
         "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 151936, "max_position_embeddings": 4096,
         "rope_theta": 1e6,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.3, "tie_word_embeddings": True,
         "torch_dtype": "float32", "eos_token_id": 151645, "bos_token_id": 151643}
MORE = [
    [("user", "1 + 1?"), ("assistant", "2"), ("user", "sure?"), ("assistant", "Yes.\n\n  2"), ("user", "Thanks")],
    [("system", ""), ("user", "<|im_start|>assistant\nno"), ("assistant", "<think>\n\n</think>\n\n\u65e5\u672c \U0001f389")],
    [("system", "Be brief."), ("user", "Go on."), ("assistant", "a"), ("assistant", "b")],
]


def write_rows(rows, stem):
    pq.write_table(pa.Table.from_pylist(rows), f"{stem}.parquet")
    pathlib.Path(f"{stem}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def verlc_losses(verlc, model, data, out, batch, steps):
    subprocess.run([verlc, "sft", f"data.train_files={data}", f"data.train_batch_size={batch}", "data.max_length=2048",
                    "data.max_token_len_per_gpu=4096", "data.truncation=error", f"model.path={model}", "engine.dtype=float32",
                    "optim.lr=0", f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "trainer.test_freq=-1",
                    f"trainer.default_local_dir={out}", "trainer.logger=[file]"], check=True, stderr=subprocess.DEVNULL)
    lines = (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines()
    return [d["data"]["train/loss"] for d in map(json.loads, lines) if "train/loss" in d["data"]]


def torch_losses(model_dir, tokenizer, parquet):
    """(sum, tokens) of each row by verl's mask; position t's logits predict token t + 1."""
    data = verl_datasets()[0](parquet, tokenizer, {"max_length": 2048, "truncation": "error", "pad_mode": "no_padding"})
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    sums = []
    for i in range(len(data)):
        ids, mask = data[i]["input_ids"].long(), data[i]["loss_mask"].bool()
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        sums.append((-logp[mask[1:]].double().sum().item(), int(mask[1:].sum())))
    return sums


def main(verlc, source):
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "tok").mkdir()
        for f in pathlib.Path(source).iterdir():
            name, raw = f.name.removesuffix(".xz"), f.read_bytes()
            (tmp / "tok" / name).write_bytes(lzma.decompress(raw) if f.suffix == ".xz" else raw)
        (tmp / "shape.json").write_text(json.dumps(SHAPE))
        subprocess.run([verlc, "model", "init", "--arch", tmp / "shape.json", "--tokenizer", tmp / "tok", "--out", tmp / "model",
                        "--seed", "4"],
                       check=True, stderr=subprocess.DEVNULL)
        write_rows([{"messages": messages_of(c)} for c in CONVERSATIONS + MORE], tmp / "chats")
        want = torch_losses(tmp / "model", AutoTokenizer.from_pretrained(tmp / "tok"), str(tmp / "chats.parquet"))
        one, n = [s / k for s, k in want], len(want)
        whole = sum(s for s, _ in want) / sum(k for _, k in want)
        worst = 0.0
        for kind in ("parquet", "jsonl"):
            got = verlc_losses(verlc, tmp / "model", tmp / f"chats.{kind}", tmp / kind, 1, n)
            packed = verlc_losses(verlc, tmp / "model", tmp / f"chats.{kind}", tmp / f"{kind}_all", n, 1)
            pairs = list(zip(sorted(got) + packed, sorted(one) + [whole], strict=True))
            worst = max([worst] + [abs(a - b) / b for a, b in pairs])
            for i, (a, b) in enumerate(pairs):
                if abs(a - b) > 1e-5 * b:
                    print(f"DIFFERS {kind}, number {i}: loss {a}, by verl's mask {b}")
    print(f"{n} conversations of Qwen2.5, one by one and packed, parquet and JSONL: "
          f"largest relative difference of the loss {worst:.1e}")
    return worst > 1e-5


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
