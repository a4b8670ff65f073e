#!/usr/bin/env python3
"""The reference for src/text: Hugging Face `tokenizers`, `transformers` and Jinja2.

  oracle_text.py tables   rewrite src/text/text_tables.h (needs unicodedata2, a
                          recent one; and a Python whose unicodedata is 14.0.0)
  oracle_text.py fixtures rewrite tests/fixtures/text
  oracle_text.py compare --verlc PROGRAM --data DIR [--lines N] [--only NAME]
                          encode and decode GSM8K and N hostile lines with every
                          tokenizer under DIR/tokenizers; differences end in exit 1

Everything is seeded: the same packages write the same files.
"""
import argparse
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CODEPOINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CATEGORIES = ("Cc Cf Cn Co Ll Lm Lo Lt Lu Mc Me Mn Nd Nl No Pc Pd Pe Pf Pi Po Ps "
              "Sc Sk Sm So Zl Zp Zs").split()


# ---- tables ------------------------------------------------------------------

def removed_by(pre_tokenizer):
    """The code points that a Split(..., "removed") or alike takes away."""
    gone = set()
    for i in range(0, len(CODEPOINTS), 4096):
        part = CODEPOINTS[i:i + 4096]
        text = "".join(map(chr, part))
        kept = {ord(ch) for piece, _ in pre_tokenizer.pre_tokenize_str(text) for ch in piece}
        gone.update(c for c in part if c not in kept)
    return gone


def isolated_by(pre_tokenizer):
    """The code points that become pieces of their own between two letters."""
    found = set()
    for i in range(0, len(CODEPOINTS), 2048):
        text = "a".join(map(chr, CODEPOINTS[i:i + 2048]))
        for piece, _ in pre_tokenizer.pre_tokenize_str(text):
            if len(piece) == 1 and piece != "a":
                found.add(ord(piece))
    return found


def ranges(keyed):
    """[(lo, hi, key)] of {code point: key}."""
    out = []
    for c in sorted(keyed):
        if out and out[-1][1] == c - 1 and out[-1][2] == keyed[c]:
            out[-1][1] = c
        else:
            out.append([c, c, keyed[c]])
    return out


def frozen_code_points(norm):
    """Those that Unicode gives a combining class, a decomposition or a composition
    today and that the reference's normalizer does not know yet."""
    import unicodedata2 as new
    nfd, nfc, nfkd = norm.NFD(), norm.NFC(), norm.NFKD()
    frozen = set()
    for c in CODEPOINTS:
        s = chr(c)
        if new.combining(s):
            before, after = "\u0345" + s, s + "\u0334"  # classes 240 and 1
            if nfd.normalize_str(before) == before and nfd.normalize_str(after) == after \
                    and new.combining(s) not in (1, 240):
                frozen.add(c)
        plain = new.decomposition(s)
        if plain and nfkd.normalize_str(s) == s:
            frozen.add(c)
            if not plain.startswith("<"):
                parts = [int(x, 16) for x in plain.split()]
                pair = "".join(map(chr, parts))
                if len(parts) == 2 and new.normalize("NFC", pair) == s and nfc.normalize_str(pair) == pair:
                    frozen.add(parts[0])
    return frozen


def tables():
    from tokenizers import Regex, normalizers, pre_tokenizers as pre
    if unicodedata.unidata_version != "14.0.0":
        sys.exit("tables: needs a Python with unicodedata 14.0.0 (3.11), this one has " + unicodedata.unidata_version)
    category = {}
    for name in CATEGORIES:
        for c in removed_by(pre.Split(Regex(r"\p{%s}" % name), "removed")):
            category[c] = name
    han = removed_by(pre.Split(Regex(r"\p{Han}"), "removed"))
    newer = {c: (category[c], c in han) for c in CODEPOINTS if unicodedata.category(chr(c)) != category[c]}
    punct = {c: "" for c in isolated_by(pre.Punctuation()) ^
             {c for c in CODEPOINTS if category[c][0] == "P" or c < 128 and chr(c) in "$+<=>^`|~"}}
    digit = {c: "" for c in isolated_by(pre.Digits(True)) ^ {c for c in CODEPOINTS if category[c][0] == "N"}}
    lower = {}
    down = normalizers.Lowercase()
    for c in CODEPOINTS:
        t = down.normalize_str(chr(c))
        if len(t) == 1 and t != chr(c).lower():
            lower[c] = ord(t) - c
    frozen = {c: "" for c in frozen_code_points(normalizers)}

    with open(os.path.join(ROOT, "src/text/text_tables.h"), "w", encoding="ascii") as f:
        f.write("/* text_tables.h - where the reference's Unicode tables differ from this machine's libraries.\n"
                " *\n"
                " * Written by tools/oracle_text.py tables from the behaviour of Hugging Face tokenizers;\n"
                " * text_unicode.c says how each table is used.  Included by that file only. */\n"
                "#ifndef VERLC_TEXT_TABLES_H\n#define VERLC_TEXT_TABLES_H\n\n"
                "#include \"text/text_int.h\"\n\n#include <utf8proc.h>\n\n")

        def table(name, what, rows):
            f.write("/* %s */\nstatic const struct text__range %s[] = {\n" % (what, name))
            for i in range(0, len(rows), 4):
                f.write("    " + " ".join(rows[i:i + 4]) + "\n")
            f.write("};\n\n")

        cat = lambda name: "UTF8PROC_CATEGORY_" + name.upper()
        table("text_newer", "general category where it is not that of Unicode 14; 100 is added for Han",
              ["{0x%x, 0x%x, %s%s}," % (lo, hi, cat(k[0]), " + 100" if k[1] else "") for lo, hi, k in ranges(newer)])
        table("text_frozen", "inert in the reference's normal forms",
              ["{0x%x, 0x%x, 0}," % (lo, hi) for lo, hi, _ in ranges(frozen)])
        table("text_punct_flip", "punctuation exactly where the category says otherwise",
              ["{0x%x, 0x%x, 0}," % (lo, hi) for lo, hi, _ in ranges(punct)])
        table("text_digit_flip", "numeric exactly where the category says otherwise",
              ["{0x%x, 0x%x, 0}," % (lo, hi) for lo, hi, _ in ranges(digit)])
        table("text_lower", "distance to the lower-case letter where Unicode 14 has none",
              ["{0x%x, 0x%x, %d}," % (lo, hi, k) for lo, hi, k in ranges(lower)])
        f.write("#endif\n")
    print("text_tables.h: %d newer, %d frozen, %d + %d flipped, %d lower" %
          (len(newer), len(frozen), len(punct), len(digit), len(lower)))


# ---- hostile text ------------------------------------------------------------

SNIPPETS = [
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * 2.5e-3;\n}\n", "def f(x):\n    return x**2  # squared\n\n",
    "<|im_start|>user\n", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST] ", " [/INST]", "<unk>",
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<tool_call>", "<think>", "</think>\n", "<0x0A>", "<|",
    "|>", "I'll we've IT'S they'RE 'S \u017f's 'D", "https://example.org/a?b=c&d=%20#e", "\r\n", "\r", "\t\t",
    "$1,234.56", "3.14159265358979", "1/2", "100000000000000", "\u0661\u0662\u0663", "\u00bd\u00b2\u2167\u3007",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u3053\u3093\u306b\u3061\u306f", "\uc548\ub155\ud558\uc138\uc694",
    "\u1112\u1161\u11ab\u1100\u1173\u11af", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643", "\u05e9\u05dc\u05d5\u05dd", "caf\u00e9 cafe\u0301 \u00c5\u212b\u00e5",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f1eb\U0001f1f7",
    "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\u200b\u200c\u200d\u2060\ufeff", "\u00a0\u1680\u2003\u202f\u3000",
    "\u0085\u2028\u2029", "\u180e", "\ufb01\ufb06\u00df\u1e9e", "\u0130\u0131", "\x00", "\x00\x01\x7f\x80\x9f",
    "\u2581", "\u2581\u2581a", "\u0120\u010a", "\ufffd", "\U0010ffff\ue000", "-" * 40, "=" * 77, "...", "!?!?", "''\"\"``",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]
MARKS = [c for c in CODEPOINTS if unicodedata.combining(chr(c))]


def hostile_piece(r):
    kind = r.randrange(14)
    if kind == 0:  # any assigned or unassigned code point
        return "".join(chr(r.choice(CODEPOINTS)) for _ in range(r.randrange(1, 12)))
    if kind == 1:
        return "".join(chr(r.randrange(0x20, 0x7F)) for _ in range(r.randrange(1, 40)))
    if kind == 2:
        return "".join(chr(r.randrange(0xA0, 0x590)) for _ in range(r.randrange(1, 20)))
    if kind == 3:
        return "".join(chr(r.randrange(0x4E00, 0x9FFF)) for _ in range(r.randrange(1, 20)))
    if kind == 4:
        return "".join(chr(r.randrange(0x1F300, 0x1FAFF)) + r.choice(["", "\u200d", "\ufe0f", "\U0001f3fb"])
                       for _ in range(r.randrange(1, 8)))
    if kind == 5:  # stacks of marks
        return r.choice("aeiouAKo\u1100\u0928\u11935 ") + "".join(chr(r.choice(MARKS)) for _ in range(r.randrange(1, 60)))
    if kind == 6:
        return r.choice([" ", " ", " ", "\t", "\n", "\r\n", "\u00a0", "\u3000"]) * r.choice([1, 2, 3, 7, 16, 100, 1000])
    if kind == 7:
        return "".join(r.choice("0123456789") for _ in range(r.randrange(1, 30)))
    if kind == 8:  # bytes that are not UTF-8, as bytes.decode replaces them
        return bytes(r.randrange(256) for _ in range(r.randrange(1, 30))).decode("utf-8", "replace")
    if kind == 9:
        return "".join(chr(r.choice([r.randrange(0x600, 0x1000), r.randrange(0x1000, 0x2C00)])) for _ in range(r.randrange(1, 16)))
    if kind == 10:  # the astral planes, young scripts among them
        return "".join(chr(r.randrange(0x10000, 0x20000)) for _ in range(r.randrange(1, 10)))
    return r.choice(SNIPPETS)


def hostile_lines(n, seed=20240607):
    r = random.Random(seed)
    lines = []
    for _ in range(n):
        text = "".join(hostile_piece(r) + r.choice(["", "", " "]) for _ in range(r.randrange(1, 10)))
        if r.random() < 0.2:  # every character once more may meet every other
            chars = list(text)
            r.shuffle(chars)
            text = "".join(chars)
        lines.append(text)
    return lines


# ---- compare -----------------------------------------------------------------

def run_verlc(program, args, requests):
    data = "".join(json.dumps(q) + "\n" for q in requests).encode()
    done = subprocess.run([program, "tokenize"] + args, input=data, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.split(b"\n") if line]


def report(name, what, inputs, got, want):
    bad = [i for i in range(len(want)) if i >= len(got) or got[i] != want[i]]
    for i in bad[:3]:
        print(f"  {name} {what}: {ascii(inputs[i])[:300]}\n    want {ascii(want[i])[:300]}\n    got  "
              f"{ascii(got[i])[:300] if i < len(got) else 'nothing'}")
    return len(bad) + max(0, len(got) - len(want))


def compare_one(program, name, folder, texts, seed):
    from tokenizers import Tokenizer
    ref = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    ref.no_truncation()
    ref.no_padding()
    model = ["--model", folder]
    differ, tokens = 0, 0
    for special in (True, False):
        want = [e.ids for e in ref.encode_batch(texts, add_special_tokens=special)]
        got = [a["ids"] for a in run_verlc(program, model, [{"text": t, "add_special_tokens": special} for t in texts])]
        differ += report(name, f"encode, special {special}", texts, got, want)
        tokens += sum(map(len, want))
    r = random.Random(seed)
    size = ref.get_vocab_size()
    sequences = want + [[r.randrange(size + 3) for _ in range(r.randrange(0, 24))] for _ in range(len(texts) // 4)]
    for skip in (False, True):
        want = ref.decode_batch(sequences, skip_special_tokens=skip)
        got = [a["text"] for a in run_verlc(program, model + ["--decode"],
                                            [{"ids": s, "skip_special_tokens": skip} for s in sequences])]
        differ += report(name, f"decode, skip {skip}", sequences, got, want)
    print(f"{name}: {len(texts)} texts, {tokens} tokens encoded, {2 * len(sequences)} sequences decoded, "
          f"{differ} differences", flush=True)
    return differ


def gsm8k(data):
    texts = []
    for part in ("train", "test"):
        with open(os.path.join(data, "gsm8k", part + ".jsonl"), encoding="utf-8") as f:
            for line in f:
                row = json.loads(line)
                texts += [row["question"], row["answer"]]
    return texts


def compare(args):
    texts = gsm8k(args.data) + hostile_lines(args.lines)
    differ = 0
    for name in sorted(os.listdir(os.path.join(args.data, "tokenizers"))):
        if args.only and name != args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(args.data, "tokenizers", name)
            for packed in os.listdir(source):
                with lzma.open(os.path.join(source, packed)) as f, open(os.path.join(folder, packed[:-3]), "wb") as out:
                    out.write(f.read())
            differ += compare_one(args.verlc, name, folder, texts, 7)
    sys.exit(1 if differ else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tables")
    commands.add_parser("fixtures")
    p = commands.add_parser("compare")
    p.add_argument("--verlc", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--lines", type=int, default=20000)
    p.add_argument("--only")
    args = parser.parse_args()
    if args.command == "tables":
        tables()
    elif args.command == "fixtures":
        fixtures()
    else:
        compare(args)


if __name__ == "__main__":
    main()
