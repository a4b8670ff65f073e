"""Measured figures as JSON: what `make bench` and `make bench-gpu` write, and what docs/performance.md is made from.

A file holds {"machine": {...}, "rows": [...]}.  The machine has its name, versions and two measured ceilings: `memory`
(bytes/s that can be read) and `gemm` (FLOP/s of large GEMMs).  A row has

  id     stable name, such as decode/qwen2.5-0.5b/16x5/128+1024; the part before the first slash is its table
  what   the same in words;  unit, lower (less is better)
  ours   the figure;  note: text for the table
  bar    what it must reach, or bar_ratio: how many times better than the first peer it must be; or null
  peers  [{"name", "value", "same_run"}]
  work   what the roofline is computed from, or null: {"op": "generate", "decode" (without
         the prompts' pass), "train" or "logprob", "model", sizes}

The roofline is the time that the work takes at the machine's ceilings: each GEMM pass the longer of its arithmetic and its
reading of the weights, the KV cache at the rate of memory, attention's arithmetic at the rate of GEMMs.  Work that a program
adds (recomputation, the optimizer) does not count."""

import json
import pathlib

# layers, hidden, heads, KV heads, head size, MLP, vocabulary
SHAPES = {"qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151936), "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936)}
# Every fourth layer is attention with an output gate, the others are gated delta nets: the same, then their heads and head size
HYBRIDS = {"qwen3.5-2b": ((24, 2048, 8, 2, 256, 6144, 248320), 16, 128)}
# Each MLP is a mixture of experts: the same with an expert's MLP, then the experts and those of a token
EXPERTS = {"qwen3-30b-a3b": ((48, 2048, 32, 4, 128, 768, 151936), 128, 8)}
BYTES = 2  # of a bf16 number


def sizes(model):
    """Elements of the layers' matrices (those that a token uses) and of the LM head; KV cache bytes of a token; attention's FLOP
    for a query and a key; FLOP of the delta rule for a token, and bytes of its f32 states, which a decoding step reads."""
    if model in HYBRIDS:
        (layers, hidden, heads, kv, size, mlp, vocabulary), rules, width = HYBRIDS[model]
        deep, full = layers - layers // 4, layers // 4
        matrices = hidden * (layers * 3 * mlp + full * (3 * heads + 2 * kv) * size + deep * rules * (5 * width + 2))
        state = deep * rules * width * width  # k S, q S, and its outer product: three products
        return matrices, hidden * vocabulary, 2 * full * kv * size * BYTES, 4 * full * heads * size, 6 * state, 4 * state
    (layers, hidden, heads, kv, size, mlp, vocabulary), experts, chosen = EXPERTS.get(model) or (SHAPES[model], 0, 1)
    matrices = layers * hidden * (2 * heads * size + 2 * kv * size + 3 * mlp * chosen + experts)
    return matrices, hidden * vocabulary, 2 * layers * kv * size * BYTES, 4 * layers * heads * size, 0, 0


def more_experts(model, rows):
    """Elements of the layers' matrices that a pass of so many rows reads beyond those of one row: of experts that any row chose,
    each as likely as another."""
    if model not in EXPERTS:
        return 0
    (layers, hidden, *_, mlp, _), experts, chosen = EXPERTS[model]
    return 3 * layers * hidden * mlp * (experts * (1 - (1 - chosen / experts) ** rows) - chosen)


def roofline(work, machine):
    """In the unit of the row: tokens/s."""
    matrices, head, token, attention, rule, state = sizes(work["model"])
    memory, gemm = machine["memory"], machine["gemm"]
    if work["op"] in ("train", "logprob"):
        length = work["length"]
        flop = 2 * (matrices + head) + rule + attention * (length + 1) / 2
        return gemm / (flop * (3 if work["op"] == "train" else 1))  # backward: twice forward's
    prompts, n, length, new = (work[k] for k in ("prompts", "n", "prompt", "new"))
    rows = prompts * n
    prefill = prompts * (2 * (matrices * length + head) + rule * length + attention * length * (length + 1) / 2)
    model = work["model"]
    first = max(prefill / gemm, (matrices + more_experts(model, prompts * length) + head) * BYTES / memory)
    seconds = first if work["op"] == "generate" else 0
    pass_over_weights = max(2 * rows * (matrices + head) / gemm,
                            (matrices + more_experts(model, rows) + head) * BYTES / memory)
    for t in range(1, new):  # the first token is the prefill's; a prompt's KV blocks are shared by its samples
        seconds += pass_over_weights + (token * (prompts * length + rows * t) + state * rows) / memory
    return rows * (new if work["op"] == "generate" else new - 1) / seconds


def ratio(row, value):
    """How many times better ours is."""
    return value / row["ours"] if row["lower"] else row["ours"] / value


def met(row):
    if row["bar_ratio"]:
        return ratio(row, row["peers"][0]["value"]) >= row["bar_ratio"]
    return row["bar"] is None or (row["ours"] <= row["bar"] if row["lower"] else row["ours"] >= row["bar"])


def bar_text(row):
    if row["bar_ratio"]:
        return f"ratio at least {row['bar_ratio']:g}"
    return "" if row["bar"] is None else f"at {'most' if row['lower'] else 'least'} {number(row['bar'], row['unit'])}"


def number(value, unit=""):
    if unit == "tokens/s" and value >= 1e3:
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.1f} k"
    if unit == "tokens/s":
        return f"{value:.1f}"
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}" if value >= 1 else f"{value:.2g}"


class Figures:
    def __init__(self, machine, rows=()):
        self.machine, self.rows = machine, list(rows)

    @classmethod
    def read(cls, path):
        j = json.loads(pathlib.Path(path).read_text())
        return cls(j["machine"], j["rows"])

    def add(self, name, what, ours, unit="tokens/s", peers=(), bar=None, lower=False, work=None, note="", bar_ratio=None):
        """peers: (name, value, whether it is of this run); those without a value are left out."""
        peers = [{"name": n, "value": float(f"{v:.5g}"), "same_run": same} for n, v, same in peers if v]
        self.rows.append({"id": name, "what": what, "unit": unit, "ours": float(f"{ours:.5g}"), "lower": lower, "bar": bar,
                          "bar_ratio": bar_ratio, "peers": peers, "work": work, "note": note})

    def share(self, row):
        """Of the roofline, or None."""
        return row["ours"] / roofline(row["work"], self.machine) if row["work"] and "gemm" in self.machine else None

    def text(self):
        return json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n"

    def show(self):
        """The table on standard output; how many bars were missed."""
        print(f"{'what':70s} {'verlc':>10s} {'peer':>10s} {'ratio':>6s} {'roofline':>8s} bar")
        for r in self.rows:
            peer = r["peers"][0]["value"] if r["peers"] else None
            beside = f"{peer:10.4g} {ratio(r, peer):6.2f}" if peer else f"{'-':>10s} {'-':>6s}"
            share = self.share(r)
            verdict = f"{bar_text(r)}: {'ok' if met(r) else 'MISSED'}" if bar_text(r) else "none"
            what = f"{r['what']}, {r['unit']}".rstrip(", ")
            print(f"{what:70s} {r['ours']:10.4g} {beside} {f'{share:.0%}' if share else '-':>8s} {verdict}")
        return sum(not met(r) for r in self.rows)
