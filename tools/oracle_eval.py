"""`verlc eval` beside verl's process_validation_metrics: 200 random sets of responses, with other numbers of samples,
variables and kinds of votes (texts, whole numbers, fractions, truth values) each; every statistic is compared.
`verlc generate` beside what verl's main_generation_server writes: the rows and columns of the data set with one column more,
"responses", a list of n texts for each row; greedy, these are transformers' texts.

  python tools/oracle_eval.py VERLC [VERL_DIR]     needs numpy, torch, transformers, pyarrow and verl 0.9.1's files
"""

import collections
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from oracle_train import load, val_case

SCORER = '''import json


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return json.loads(solution_str)
'''


def random_set(rng, source):
    """Rows of one data source: some prompts with some responses each, other variables and kinds of votes each time."""
    votes = [lambda: str(rng.integers(0, 3)), lambda: int(rng.integers(-1, 2)), lambda: float(rng.integers(0, 4)) / 2,
             lambda: bool(rng.integers(0, 2))][rng.integers(0, 4)]
    names = [n for n in ("acc", "pred", "length", "overlong") if rng.random() < 0.6]
    rows, n_same = [], int(rng.integers(1, 10))
    for u in range(int(rng.integers(1, 5))):
        for _ in range(n_same if rng.random() < 0.7 else int(rng.integers(1, 10))):
            of = {"acc": bool(rng.integers(0, 2)), "pred": votes(), "length": int(rng.integers(1, 99)),
                  "overlong": bool(rng.random() < 0.1)}
            rows.append((source, f"{source} {u}", float(np.round(rng.normal(), 3)), {n: of[n] for n in names}))
    return rows


def compare_eval(space, program, n_sets=200):
    rng = np.random.default_rng(17)
    sets = [random_set(rng, f"set/{i}") for i in range(n_sets)]
    prompts = collections.defaultdict(list)
    for r in (r for rows in sets for r in rows):
        prompts[r[0], r[1]].append(json.dumps({"score": r[2], **r[3]}))
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "scorer.py").write_text(SCORER)
        lines = [{"prompt": [{"role": "user", "content": "?"}], "data_source": source, "reward_model": {"ground_truth": ""},
                  "responses": texts}
                 for (source, _), texts in prompts.items()]
        (tmp / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = subprocess.run([program, "eval", f"data.path={tmp / 'rows.jsonl'}",
                               f"custom_reward_function.path={tmp / 'scorer.py'}"],
                              stdout=subprocess.PIPE, text=True, check=True)
    got, n, bad, worst = json.loads(done.stdout), 0, [], 0.0
    for rows in sets:
        for name, want in val_case(space, "", rows)["metrics"].items():
            n += 1
            error = abs(got[name] - want) / max(1, abs(want)) if name in got else np.inf
            worst = max(worst, error)
            if not error <= 1e-12:
                bad.append(f"{name}: {got.get(name)}, verl has {want}")
    for text in bad[:5]:
        print("DIFFERS " + text)
    print(f"{n_sets} random sets, {n} statistics, {len(bad)} differences; largest relative error {worst:.1e}")
    return 1 if bad else 0


def transformers_greedy(model_dir, conversations, n_tokens):
    """The texts of the most probable tokens, one conversation at a time, in fp32; None where two tokens are as probable but for
    rounding, so that either may follow."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tok = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    end = model.generation_config.eos_token_id
    end = {end} if isinstance(end, int) else set(end or [])
    texts = []
    for messages in conversations:
        ids = tok(tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
                  add_special_tokens=False)["input_ids"]
        n, sure = len(ids), True
        while len(ids) < n + n_tokens and not (len(ids) > n and ids[-1] in end):
            with torch.no_grad():
                best = model(input_ids=torch.tensor([ids])).logits[0, -1].topk(2)
            sure &= bool(best.values[0] - best.values[1] > 1e-5 * best.values[0].abs())
            ids.append(int(best.indices[0]))
        texts.append(tok.decode(ids[n:], skip_special_tokens=True) if sure else None)
    return texts


def compare_generate(program, n_tokens=24):
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)

        def run(*args):
            subprocess.run([program, *map(str, args)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        run("model", "init", "--preset", "tiny", "--out", tmp / "model", "--seed", 3)
        run("data", "arith", "--out", tmp / "data", "--n-train", 48, "--n-test", 1)
        given = pq.read_table(tmp / "data/train.parquet")
        want, bad = transformers_greedy(tmp / "model", given.column("prompt").to_pylist(), n_tokens), 0
        for n, temperature in ((1, 0), (3, 1)):
            run("generate", f"data.path={tmp / 'data/train.parquet'}", f"data.output_path={tmp / 'out.parquet'}",
                f"data.n_samples={n}",
                f"model.path={tmp / 'model'}", f"rollout.temperature={temperature}", f"rollout.response_length={n_tokens}",
                "rollout.prompt_length=64", "rollout.dtype=float32")
            got = pq.read_table(tmp / "out.parquet")
            texts = got.column("responses").to_pylist()
            bad += got.column_names != [*given.column_names, "responses"]
            bad += got.select(given.column_names).to_pylist() != given.to_pylist()
            bad += [len(x) for x in texts] != [n] * len(given)
            if temperature == 0:
                compared = [(g[0], w) for g, w in zip(texts, want) if w is not None]
                bad += sum(g != w for g, w in compared)
    print(f"generate: {len(given)} rows, {len(compared)} greedy texts beside transformers', "
          f"{len(set(w for _, w in compared))} of them distinct, {bad} differences")
    return 1 if bad or len(compared) < len(given) / 2 else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    found = sys.argv[2] if len(sys.argv) == 3 else importlib.util.find_spec("verl").submodule_search_locations[0]
    sys.exit(compare_eval(load(pathlib.Path(found)), sys.argv[1]) or compare_generate(sys.argv[1]))
