"""Invariant 9: no configuration key is silently ignored. Each key whose status is USED,
in a schema that a command loads, is read by the program of that schema; each key that
a program reads is in the table. Reads conf/keys.def and the sources, runs nothing."""

import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Tests  # noqa: E402

SRC = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2])) / "src"
ROW = re.compile(r'K\("([^"]+)", (?:"(?:[^"\\]|\\.)*"|[A-Z]+), (.+?), (USED|NOTED|REJECTED|MOVED), ')
# What a program is made of. train/ppo/validate_config.c checks batch sizes for both.
PROGRAMS = {"ppo": ["train/ppo/*.c", "train/run/early_stopping.c", "train/run/sampler_keys.c", "train/run/activation_recompute.c",
                    "cmd/train.c", "train/ppo/validate_config.c"],
            "sft": ["train/sft/*.c", "train/run/early_stopping.c", "train/run/sampler_keys.c", "train/run/activation_recompute.c",
                    "cmd/train.c", "train/ppo/validate_config.c"],
            "evaluation": ["train/offline/eval.c"], "generation": ["train/offline/generate.c"]}
# A reader of one section's keys, called with the section's path: read_SECTION(c, "path", ...) { ... KEY("name") ... }.
SECTION_READERS = {"train_read_optim": "train/run/optimizer_keys.c", "train_read_lora": "train/run/lora_keys.c"}


def table():
    """{schema: {key: (default, status)}}, rows as written."""
    rows, schema, unread = {}, None, []
    for line in (SRC / "conf/keys.def").read_text().splitlines():
        if m := re.match(r'SCHEMA\("(\w+)"', line):
            schema = m[1]
            rows[schema] = {}
        elif m := ROW.match(line):
            rows[schema][m[1]] = (m[2], m[3])
        elif line.startswith("K("):
            unread.append(line)
    return rows, unread


def strings(files):
    """Every string of these files, adjacent literals and string macros joined as the compiler does."""
    out = set()
    for f in files:
        text = re.sub(r"/\*.*?\*/", "", f.read_text(), flags=re.S)
        macros = dict(re.findall(r'#define (\w+) "([^"\n]*)"', text))
        text = re.sub(r"#define .*", "", text)
        for run in re.findall(r'(?:(?:"(?:[^"\\]|\\.)*"|\b[A-Z]+\b)\s*)+', text):
            joined = ""
            for part in re.findall(r'"(?:[^"\\]|\\.)*"|\b[A-Z]+\b', run):
                joined += part[1:-1] if part[0] == '"' else macros.get(part, "\0")
            out.add(joined)
    return out


def section_keys(files):
    """The keys that a reader of sections takes, below each path that these files give it."""
    out = set()
    for reader, source in SECTION_READERS.items():
        keys = re.findall(r'KEY\("(\w+)"\)', (SRC / source).read_text())
        for f in files:
            text = f.read_text()
            macros = dict(re.findall(r'#define (\w+) "([^"\n]*)"', text))
            for macro, section in re.findall(reader + r'\(c, (\w+)? ?"([^"]*)"', text):
                out |= {macros.get(macro, "") + section + "." + k for k in keys}
    return out


def is_read(key, names, rows):
    """By name, through one of its children, or by the default of a key that is."""
    if key in names or any(n.startswith(key + ".") for n in names):
        return True
    taken = re.compile(r"\$\{(oc\.select:)?" + re.escape(key) + "[,}]")
    return any(taken.search(default) for other, (default, _) in rows.items() if other in names)


def main():
    test = Tests()
    rows, unread = table()
    test("every row of the table is understood", not unread and sum(map(len, rows.values())) > 1400, unread[:3])
    loaded = set(re.findall(r'"((?:ppo|sft)_\w+|evaluation|generation)"', (SRC / "cmd/train.c").read_text()))
    test("the commands load schemas of the table", loaded and loaded <= set(rows), loaded)
    loaded.add("ppo_megatron_trainer")  # model_engine=megatron, conf/compose.c
    everything = {k for r in rows.values() for k in r}
    for program, globs in PROGRAMS.items():
        files = [f for g in globs for f in sorted(SRC.glob(g))]
        names = strings(files) | section_keys(files)
        keys = {n for n in names if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", n)}
        for schema in sorted(s for s in loaded if s.startswith(program)):
            # a schema's rows stand over those of its base
            known = {k: v for s in rows if s.startswith(program) for k, v in rows[s].items()}
            used = [k for k, (_, status) in rows[schema].items() if status == "USED"]
            ignored = [k for k in used if not is_read(k, names, known)]
            test(f"{schema}: its {len(used)} USED keys are read by {program}", not ignored, ", ".join(ignored))
        # sections have no row of their own, nor have the children of a free-form dict
        missing = [k for k in keys if k not in everything and not k.endswith(".json")
                   and not any(k.startswith(p + ".") or p.startswith(k + ".") for p in everything)]
        test(f"{program}: the {len(keys)} dotted names it reads are in the table", not missing, ", ".join(missing))
        names = strings(f for g in globs for f in sorted(SRC.glob(g)) if f.name != "validate_config.c")
        wrong = [k for k in keys & names if any(rows[s].get(k, ("", ""))[1] in ("NOTED", "MOVED") for s in loaded
                                                if s.startswith(program))]
        test(f"{program}: it reads no key that the table calls noted or moved", not wrong, ", ".join(wrong))
    test.end()


main()
