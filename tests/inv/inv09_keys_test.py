"""Invariant 9: no configuration key is silently ignored. A used key is one whose row names the member of the program's
struct that it fills (the compiler checks that there is such a member, of a fitting type). Here: each such member is read
by the program, not only by its configuration; keys that are noted, rejected or moved have no member. The preprocessor
expands the tables as the programs do; nothing is run."""

import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Tests  # noqa: E402

SRC = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2])) / "src"
PRINT = r"""
#define ABSENT
#define ABSENT_IS(v)
#define NULL_IS(v)
#define SCHEMA(name, base, inherited) @SCHEMA name
#define U(path, type, def, text, binding) @USED path @@ def @@ binding @@ type
#define C(path, list, more, def, text, member) @USED path @@ def @@ AT(member) @@ more
#define B(path, binding) @USED path @@ @@ binding @@
#define BC(path, list, member) @USED path @@ @@ AT(member) @@
#define N(path, type, def, text) @OTHER path @@ def
#define R(path, type, def, text) @OTHER path
#define M(path, type, def, now) @OTHER path
#define D(path, def) @OTHER path
"""
# The tables of a program, and where a member that it fills may be read: its own sources and those that it shares, of members
# that are structs of theirs (optimizer, sampler, reward). Raw values are what the configuration alone derives others from.
TRAIN = ["train/*.c", "run/*.c", "ranks/*.c", "plan/*.c", "reward_model/*.c",
         "model/**/*.c", "data/*.c", "algo/**/*.c", "reward/**/*.c"]
PROGRAMS = {"ppo": (["ppo", "megatron", "veomni", "async"], ["ppo/**/*.c", *TRAIN], "ppo/config*.c"),
            "sft": (["sft"], ["sft/*.c", "supervised/*.c", *TRAIN], "supervised/config.c"),
            "generate": (["generate"], ["generate/gener*.c", "generate/episodes.c", "ppo/stages/*_loop.c", "ppo/stages/agents.c",
                                        "ppo/stages/program/*.c", "ranks/rank_count.c",
                                        "ranks/restart.c"], "generate/generate_config.c"),
            "eval": (["eval"], ["generate/eval.c", "reward/**/*.c"], "")}


def rows(table):
    """(key, default, binding or None, type) of each row, sections expanded; strings joined as the compiler does."""
    text = PRINT + f'#include "conf/keys/shared_groups.def"\n#include "conf/keys/{table}.def"\n'
    out = subprocess.run([os.environ.get("CC", "cc"), "-E", "-P", "-iquote", str(SRC), "-x", "c", "-"], input=text,
                         capture_output=True, text=True, check=True).stdout
    for row in re.split(r"@(?=USED |OTHER |SCHEMA )", re.sub(r'"\s*"', "", out))[1:]:
        kind, rest = row.split(" ", 1)
        parts = [p.strip() for p in rest.split("@@")]
        key = re.match(r'"([^"]*)"', parts[0])[1]
        if kind != "SCHEMA":
            used = kind == "USED"
            yield key, parts[1] if len(parts) > 1 else "", re.sub(r"\s+", " ", parts[2]) if used else None, parts[3] if used else ""


def readers(globs, config):
    """The text of the files without comments, and of those of the configuration itself."""
    own = sorted(SRC.glob(config)) if config else []
    others = sorted({f for g in globs for f in SRC.glob(g)} - set(own))
    return tuple("".join(re.sub(r"/\*.*?\*/", "", f.read_text(), flags=re.S) for f in files) for files in (others, own))


def main():
    test, base = Tests(), {}
    for program, (tables, globs, config) in PROGRAMS.items():
        all_rows = [r for t in tables for r in rows(t)]
        used = [(k, d, b) for k, d, b, _ in all_rows if b]
        defaults = dict(base) | {k: d for k, d, _, _ in all_rows if d}
        base = base or defaults  # ppo's, which other tables may have as theirs
        endless = [f"{k} ({t})" for k, _, b, t in all_rows
                   if b and re.search(r"\bint(?!\[-?[\d^]+,-?[\d^]+[\])])|\bfloat(?![\[(]-?[\w.^-]+,-?[\w.^]+[\])])", t)]
        test(f"{program}: every number that is used has a lower and an upper bound", not endless, ", ".join(endless))
        elsewhere, own = readers(globs, config)
        unread, via = [], []
        for key, _, binding in used:
            kind, inside = re.match(r"(\w+) ?\((.*)\)$", binding).groups()
            if kind == "VIA":
                via.append((key, inside.strip('"')))
                continue
            for member in inside.replace(" ", "").split(","):
                leaf = re.escape(member.split(".")[-1])
                text = own if member.startswith("raw.") else elsewhere
                if member.startswith("raw.") and member.count(".") > 1:
                    text = own + elsewhere  # a struct that train or algo takes over as a whole
                if not re.search(rf"(->|\.){leaf}\b(?! =[^=])", text):
                    unread.append(f"{key} ({member})")
        test(f"{program}: the members of its {len(used)} used keys are read", used and not unread, ", ".join(unread))
        gone = [k for k, target in via if "${" not in defaults.get(target, "") or k not in defaults[target]]
        test(f"{program}: a key that acts through another stands in that one's default", not gone, ", ".join(gone))
    code = "".join(f.read_text() for m in ("run", "train", "ranks", "plan", "reward_model", "ppo", "supervised", "sft", "generate")
                   for f in SRC.glob(f"{m}/**/*.c")) + (SRC / "cmd/train.c").read_text()
    left = re.findall(r"\bconf_(?:i64|f64|bool|str|strs|f64s)(?:_opt)?\(", code)
    test("no program reads a key by its name into a value", not left, left[:3])
    test.end()


main()
