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
                "#include \"text/text_int.h\"\n\n")

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


if __name__ == "__main__":
    if sys.argv[1:] == ["tables"]:
        tables()
