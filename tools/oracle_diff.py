"""Compares fixtures that were made again with the committed ones.

  python tools/oracle_diff.py NEW_DIR COMMITTED_DIR [NAME...]

Of every file under NEW_DIR (or the named ones): the same bytes; or the same content,
where numbers may differ as fp32 sums of another machine do (each tensor's NMSE at most
1e-9, each JSON number by 1e-9 relative), and Parquet by its rows and schema.  Prints one
line, and the first differences; exits 1 when a file differs or only one side has it.
"""

import json
import math
import sys
from pathlib import Path


def numbers_agree(a, b):
    if type(a) is not type(b) and not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(numbers_agree(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(numbers_agree, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return a == b


def json_lines(path):
    text = path.read_text()
    return list(map(json.loads, text.splitlines())) if path.suffix == ".jsonl" else json.loads(text)


def tensors_agree(new, old):
    from safetensors.torch import load_file

    a, b = load_file(new), load_file(old)
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape or a[k].dtype != b[k].dtype for k in a):
        return False
    nmse = lambda x, y: float((x.double() - y.double()).square().sum()) <= 1e-9 * float(y.double().square().sum())
    return all(nmse(a[k], b[k]) if a[k].is_floating_point() else a[k].equal(b[k]) for k in a)


def tables_agree(new, old):
    import pyarrow.parquet as pq

    a, b = pq.read_table(new), pq.read_table(old)
    return a.schema.equals(b.schema) and repr(a.to_pylist()) == repr(b.to_pylist())  # NaN equals NaN


def compare(new, old):
    """"equal", "close" or None."""
    if new.read_bytes() == old.read_bytes():
        return "equal"
    if new.suffix in (".json", ".jsonl"):
        return "close" if numbers_agree(json_lines(new), json_lines(old)) else None
    if new.suffix == ".safetensors":
        return "close" if tensors_agree(new, old) else None
    if new.suffix == ".parquet":
        return "close" if tables_agree(new, old) else None
    return None


def main(new, old, names):
    found = sorted(names or {str(p.relative_to(new)) for p in new.rglob("*") if p.is_file()})
    bad, counts = [], {"equal": 0, "close": 0}
    for name in found:
        if not (new / name).exists() or not (old / name).exists():
            bad.append(f"{name} is only {'committed' if (old / name).exists() else 'new'}")
            continue
        how = compare(new / name, old / name)
        if how:
            counts[how] += 1
        else:
            bad.append(f"{name} differs")
    close = f", {counts['close']} but for rounding" if counts["close"] else ""
    print(f"{len(found)} fixtures: {counts['equal']} the same bytes{close}, {len(bad)} differ" + "".join(f"; {b}" for b in bad[:5]))
    return 1 if bad or not found else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
