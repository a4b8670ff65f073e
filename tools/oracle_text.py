#!/usr/bin/env python3
"""The reference for src/text: Hugging Face `tokenizers`, `transformers` and Jinja2.

  oracle_text.py tables   rewrite src/text/unicode_tables.h (needs unicodedata2, a
                          recent one; and a Python whose unicodedata is 14.0.0)
  oracle_text.py fixtures rewrite tests/fixtures/text
  oracle_text.py compare  encode and decode GSM8K and hostile lines with every tokenizer
                          under DATA/tokenizers, and render their chat templates;
                          differences end in exit 1
  oracle_text.py          fixtures, then compare

--out DIR writes the tables or the fixtures there instead.

DATA is --data, $SHARED_DATA or ../shared/data; the program --verlc, $VERLC or
build/release/verlc.

Everything is seeded: the same packages write the same files.  The small models of
the fixtures are trained once; delete models.jsonl to train them again.
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


def tables(out):
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

    with open(os.path.join(out or os.path.join(ROOT, "src/text"), "unicode_tables.h"), "w", encoding="ascii") as f:
        f.write("/* unicode_tables.h - where the reference's Unicode tables differ from this machine's libraries.\n"
                " *\n"
                " * Written by tools/oracle_text.py tables from the behaviour of Hugging Face tokenizers;\n"
                " * unicode.c says how each table is used.  Included by that file only. */\n"
                "/* clang-format off */\n#ifndef VERLC_TEXT_TABLES_H\n#define VERLC_TEXT_TABLES_H\n\n"
                "#include \"text/text_int.h\"\n\n#include <utf8proc.h>\n\n")

        def table(name, what, rows):
            f.write("/* %s */\nstatic const struct text__range %s[] = {\n" % (what, name))
            wide = next(n for n in (4, 3, 2) if max(len(" ".join(rows[i:i + n])) for i in range(0, len(rows), n)) <= 128)
            for i in range(0, len(rows), wide):
                f.write("    " + " ".join(rows[i:i + wide]) + "\n")
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
    print("unicode_tables.h: %d newer, %d frozen, %d + %d flipped, %d lower" %
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
    differ, done = 0, 0
    for name in sorted(os.listdir(os.path.join(args.data, "tokenizers"))):
        if args.only and name != args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(args.data, "tokenizers", name)
            for packed in os.listdir(source):
                with lzma.open(os.path.join(source, packed)) as f, open(os.path.join(folder, packed[:-3]), "wb") as out:
                    out.write(f.read())
            differ += compare_one(args.verlc, name, folder, texts, 7)
            differ += compare_chat(args.verlc, name, folder)
        done += 1
    print(f"{done} tokenizers, {len(texts)} texts: {differ} differences")
    sys.exit(1 if differ else 0)


# ---- fixtures ----------------------------------------------------------------

QWEN = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
        "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
NEMO = ("[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
        "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}| "
        "?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
CODER = ["[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[\\u4e00-\\u9fa5\u3040-\u30ff]+", "\\s+$"]
LLAMA3 = QWEN.replace("p{N}|", "p{N}{1,3}|")
QWEN35 = QWEN.replace("?\\p{L}+", "?[\\p{L}\\p{M}]+").replace("[^\\s\\p{L}", "[^\\s\\p{L}\\p{M}")
SEED = QWEN.replace("p{N}|", "p{N}{1}|").replace("\\p{N}]+[\\r\\n]*", "\\p{N}\r\n]+")
UPPER, LOWER = "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}", "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"


def cased(less, after):
    """Words of capitals and of small letters, without those of `less`."""
    head, suffix, upper, lower = "[^\\r\\n\\p{L}\\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", UPPER + less, LOWER + less
    return (f"{head}[{upper}]*[{lower}]+{suffix}|{head}[{upper}]+[{lower}]*{suffix}|\\p{{N}}{{1,3}}"
            f"| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n{after}]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")


O200K, KIMI = cased("", "/"), "[\\p{Han}]+|" + cased("&&[^\\p{Han}]", "")
DEEPSEEK3 = ["\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
             "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
             "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = dict(BYTES, use_regex=True)


def training_text():
    r = random.Random(5)
    names = "Anna Bob Chidi Dana Émile Farid Gül Hana Ivan 李雷 मीरा".split()
    for _ in range(400):
        a, b = r.randrange(2, 99), r.randrange(2, 99)
        yield (f"{r.choice(names)} has {a} apples and buys {b} more. How many apples are there now?\n"
               f"There are {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}")
    yield "    if (x == 1) {\n        return y;  // 你好，世界\n    }\n" * 20


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts, key="pretokenizers"):
    return {"type": "Sequence", key: list(parts)}


def norms(*parts):
    return sequence(*parts, key="normalizers")


def replace(a, b, kind="String"):
    return {"type": "Replace", "pattern": {kind: a}, "content": b}


def metaspace(scheme, cut=True):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": cut}


def template(before, after=()):
    pieces = [{"SpecialToken": {"id": t, "type_id": 0}} for t in before] + [{"Sequence": {"id": "A", "type_id": 0}}] + \
             [{"SpecialToken": {"id": t, "type_id": 0}} for t in after]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [{"<s>": 1, "</s>": 2}[t]], "tokens": [t]} for t in (*before, *after)}}


def added(content, **flags):
    base = dict(id=0, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    return dict(base, **flags)


def small_models():
    """name -> the "model" section of a tokenizer.json, trained here."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    special = ["<unk>", "<s>", "</s>"]

    def train(model, pre, size, norm=None, **options):
        tok = Tokenizer(model)
        if pre:
            tok.pre_tokenizer = pre
        if norm:
            tok.normalizer = norm
        tok.train_from_iterator(list(training_text()), trainers.BpeTrainer(
            vocab_size=size, special_tokens=options.pop("first", special), show_progress=False, **options))
        return json.loads(tok.to_str())["model"]

    byte = train(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), 520,
                 initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    fallback = special + ["<0x%02X>" % i for i in range(256)]
    sp = train(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), pre_tokenizers.Metaspace(), 560, first=fallback)
    unk = dict(sp, byte_fallback=False)
    affix = train(models.BPE(unk_token="<unk>", continuing_subword_prefix="##", end_of_word_suffix="</w>"),
                  pre_tokenizers.Whitespace(), 400, continuing_subword_prefix="##", end_of_word_suffix="</w>")
    return {"byte": byte, "sp": sp, "unk": unk, "affix": affix}


def variants():
    """(name, model, sections): every feature that src/text claims, in some combination."""
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    llama = {"normalizer": norms({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
             "decoder": sequence(replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                                 {"type": "Strip", "content": " ", "start": 1, "stop": 0}, key="decoders"),
             "post_processor": template(["<s>"])}
    flags = [added("<s>", special=True), added("<unk>", special=True, normalized=True), added("</s>", special=True),
             added("<tool>", lstrip=True), added("<Left>", lstrip=True, rstrip=True, special=True),
             added("<right>", rstrip=True), added("Word", single_word=True), added("APPLE", normalized=True),
             added("how many", normalized=True, single_word=True), added("appl"), added("<tool>x"), added("\n\n\n")]
    specials = [added(t, special=True) for t in ("<unk>", "<s>", "</s>")]
    b = lambda **k: dict({"decoder": level, "added_tokens": specials}, **k)
    yield "gpt2", "byte", b(pre_tokenizer=GPT2, post_processor=level)
    yield "gpt2_prefix_space", "byte", b(pre_tokenizer=level)
    yield "qwen", "byte", b(normalizer={"type": "NFC"}, pre_tokenizer=sequence(split(QWEN), BYTES))
    yield "llama3", "byte", b(pre_tokenizer=sequence(split(LLAMA3), BYTES), ignore_merges=True,
                              post_processor=sequence(level, template(["<s>"]), key="processors"))
    yield "nemo", "byte", b(pre_tokenizer=sequence(split(NEMO), BYTES), post_processor=template(["<s>"], ["</s>"]))
    yield "coder", "byte", b(pre_tokenizer=sequence(*[split(p) for p in CODER], {"type": "Digits", "individual_digits": True},
                                                    BYTES))
    yield "digits", "byte", b(pre_tokenizer=sequence({"type": "Digits", "individual_digits": False}, GPT2))
    for i, behavior in enumerate(("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")):
        yield "split_" + behavior, "byte", b(pre_tokenizer=sequence(split("\\d|\\s", behavior, i % 2 == 1), BYTES))
        yield "punct_" + behavior, "byte", b(pre_tokenizer=sequence({"type": "Punctuation", "behavior": behavior}, BYTES))
    yield "split_string", "byte", b(pre_tokenizer=sequence(split("a", "MergedWithNext", False, "String"), BYTES))
    yield "split_empty", "byte", b(pre_tokenizer=sequence(split("\\d*|(?<=x)[a-f]{2,3}?|^\\w+$", "MergedWithPrevious"), BYTES))
    yield "whitespace", "byte", b(pre_tokenizer=sequence({"type": "Whitespace"}, BYTES))
    yield "whitespace_split", "byte", b(pre_tokenizer=sequence({"type": "WhitespaceSplit"}, BYTES))
    yield "bert", "byte", b(pre_tokenizer=sequence({"type": "BertPreTokenizer"}, BYTES),
                            post_processor={"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]})
    yield "delimiter", "byte", b(pre_tokenizer=sequence({"type": "CharDelimiterSplit", "delimiter": "e"}, BYTES))
    yield "nfkc_lower", "byte", b(pre_tokenizer=GPT2, normalizer=norms({"type": "NFKC"}, {"type": "Lowercase"}))
    yield "nfd_strip", "byte", b(pre_tokenizer=GPT2,
                                 normalizer=norms({"type": "NFD"}, {"type": "Strip", "strip_left": True, "strip_right": False}))
    yield "nfkd_replace", "byte", b(pre_tokenizer=GPT2, normalizer=norms(
        {"type": "NFKD"}, {"type": "Strip", "strip_left": True, "strip_right": True}, replace("\\s{2,}|\\p{Mn}", "_", "Regex")))
    yield "added", "byte", b(pre_tokenizer=GPT2, normalizer={"type": "Lowercase"}, added_tokens=flags,
                             post_processor={"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1],
                                             "trim_offsets": True, "add_prefix_space": False})
    yield "no_decoder", "byte", b(pre_tokenizer=GPT2, decoder=None)
    yield "llama2", "sp", dict(llama, added_tokens=specials)
    yield "llama2_added", "sp", dict(llama, added_tokens=flags)
    for scheme in ("always", "first", "never"):
        for cut in (True, False):
            yield f"metaspace_{scheme}_{cut}", "sp", {"pre_tokenizer": metaspace(scheme, cut), "decoder": metaspace(scheme, cut),
                                                      "added_tokens": specials}
    yield "metaspace_fallback", "sp", {"pre_tokenizer": metaspace("first"), "added_tokens": flags, "decoder": sequence(
        {"type": "ByteFallback"}, metaspace("first"), {"type": "Fuse"}, replace("  ", "\u00b7"), key="decoders")}
    yield "unk_fused", "unk", dict(llama, added_tokens=specials, fuse_unk=True)
    yield "unk_single", "unk", dict(llama, added_tokens=specials, fuse_unk=False)
    yield "affix", "affix", {"pre_tokenizer": {"type": "Whitespace"}, "added_tokens": specials,
                             "decoder": {"type": "Strip", "content": "#", "start": 2, "stop": 1}}
    yield "gemma", "sp", {"normalizer": replace(" ", "\u2581"), "pre_tokenizer": split(" ", "MergedWithPrevious", False, "String"),
                          "added_tokens": specials + [added("\n" * n) for n in (1, 2, 3)] + [added("\u2581" * n) for n in (2, 3)],
                          "decoder": sequence(replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, key="decoders"),
                          "post_processor": template(["<s>"])}
    for name, patterns in (("o200k", [O200K]), ("kimi", [KIMI]), ("qwen3_5", [QWEN35]), ("deepseek_v3", DEEPSEEK3),
                           ("seed", [SEED])):
        yield name, "byte", b(pre_tokenizer=sequence(*[split(p) for p in patterns], BYTES))
    yield "split_inverted", "byte", b(pre_tokenizer=sequence(split(LLAMA3, "Removed", True), BYTES))


FIXTURES = os.path.join(ROOT, "tests/fixtures/text")


def write_jsonl(out, name, rows):
    path = os.path.join(out, name)
    with open(path, "w", encoding="ascii") as f:
        for row in rows:
            f.write(json.dumps(row, separators=(",", ":")) + "\n")
    print(f"{name}: {len(rows)} lines, {os.path.getsize(path)} bytes")


def variant_rows(models):
    from tokenizers import Tokenizer
    plain = ["", " ", "Anna has 12 apples and buys 30 more.", "  How many  apples? <s>Word Words <tool>  x <Left>  y",
             "a\u0301ppl\u00e9 APPLE apple HOW MANY \n\n\n\n <right>  <tool>x</s>",
             "'S 'll don't WE'VE \u017f <right>  <tool> y  <Left>   <tool>"]
    hostile = [t for t in hostile_lines(4000, 11) if len(t) < 40]
    rows = []
    for k, (name, model, sections) in enumerate(variants()):
        sections = dict(sections)
        body = dict(models[model])
        for key in ("ignore_merges", "fuse_unk"):
            if key in sections:
                body[key] = sections.pop(key)
        parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": None, "post_processor": None, "decoder": None}
        parts.update(sections)
        parts = json.loads(json.dumps(parts))  # the variants share their pieces
        next_id = len(body["vocab"])
        for t in parts["added_tokens"]:
            t["id"] = body["vocab"].get(t["content"], next_id)
            next_id += t["id"] == next_id
        tok = Tokenizer.from_str(json.dumps(dict(parts, model=body)))
        cases = []
        for text in plain + hostile[k * 7:k * 7 + 7]:
            with_special, ids = tok.encode(text).ids, tok.encode(text, add_special_tokens=False).ids
            r = random.Random(k)
            mixed = with_special + [r.randrange(tok.get_vocab_size()) for _ in range(4)]
            cases.append({"text": text, "special": with_special, "ids": ids, "mixed": mixed,
                          "decoded": tok.decode(mixed, skip_special_tokens=False),
                          "skipped": tok.decode(mixed, skip_special_tokens=True)})
        rows.append({"name": name, "model": model, "options": {k: body[k] for k in ("ignore_merges", "fuse_unk") if k in body},
                     "sections": parts, "cases": cases})
    return rows


def fnv(data):
    """FNV-1a, 64 bits: simple enough to be written again in the test."""
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return "%016x" % h


def unicode_rows():
    """A digest over every code point for each table that src/text relies on."""
    from tokenizers import Regex, normalizers, pre_tokenizers as pre
    rows = []
    bits = lambda found: bytes(c in found for c in CODEPOINTS)
    for pattern in ("\\p{L}", "\\p{N}", "\\p{M}", "\\p{P}", "\\p{S}", "\\p{Lu}", "\\p{Ll}", "\\p{Lt}", "\\p{Lm}", "\\p{Lo}",
                    "\\s", "\\w", "\\d", "(?i:s)", "(?i:k)", "\\p{Han}", "\\p{Cn}", "[^\\s\\p{L}\\p{N}]",
                    "[\\p{L}\\p{M}&&[^\\p{Han}]]"):
        found = removed_by(pre.Split(Regex(pattern), "removed"))
        rows.append({"regex": pattern, "count": len(found), "digest": fnv(bits(found))})
    for name, found in (("space", removed_by(pre.WhitespaceSplit())), ("punct", isolated_by(pre.Punctuation())),
                        ("digit", isolated_by(pre.Digits(True)))):
        rows.append({"class": name, "count": len(found), "digest": fnv(bits(found))})
    for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        n = getattr(normalizers, form)()
        data = bytearray()
        for c in CODEPOINTS:
            for text in (chr(c), "\u0345" + chr(c), chr(c) + "\u0334", "A" + chr(c), chr(c) + "\u0301\u3099"):
                out = n.normalize_str(text)
                if out != text:
                    data += out.encode()
        rows.append({"form": form, "count": len(data), "digest": fnv(data)})
    return rows


def repair_rows():
    r = random.Random(3)
    parts = [b"a", b"\x00", b"\x80", b"\xbf", b"\xc0", b"\xc1", b"\xc2", b"\xc3\xa9", b"\xdf", b"\xe0", b"\xe0\x80", b"\xe0\xa0",
             b"\xe2\x82", b"\xe2\x82\xac", b"\xed\xa0\x80", b"\xed\x9f\xbf", b"\xef\xbf\xbd", b"\xf0\x80", b"\xf0\x9f",
             b"\xf0\x9f\x98", b"\xf0\x9f\x98\x80", b"\xf4\x8f\xbf\xbf", b"\xf4\x90", b"\xf5", b"\xff"]
    rows = []
    for i in range(400):
        raw = parts[i] if i < len(parts) else b"".join(r.choice(parts) for _ in range(r.randrange(1, 9)))
        rows.append({"hex": raw.hex(), "text": raw.decode("utf-8", "replace")})
    return rows


def shared_rows(data):
    """Digests of the ids that the real tokenizers give, for the test that has them at hand."""
    from tokenizers import Tokenizer
    texts = gsm8k(data)
    rows = []
    for name in sorted(os.listdir(os.path.join(data, "tokenizers"))):
        with lzma.open(os.path.join(data, "tokenizers", name, "tokenizer.json.xz")) as f:
            tok = Tokenizer.from_str(f.read().decode())
        tok.no_truncation()
        tok.no_padding()
        row = {"name": name}
        for key, lines in (("gsm8k", texts), ("hostile", hostile_sample())):
            ids = [i for e in tok.encode_batch(lines, add_special_tokens=True) for i in e.ids]
            row[key] = {"count": len(ids), "digest": fnv(b"".join(i.to_bytes(4, "little") for i in ids))}
        rows.append(row)
    return rows


def hostile_sample():
    return [t for t in hostile_lines(3000, 23) if len(t) < 120][:400]


def fixtures(data, out):
    os.makedirs(out, exist_ok=True)
    path = os.path.join(FIXTURES, "models.jsonl")
    if not os.path.exists(path):  # kept otherwise: the trainer breaks ties by chance
        write_jsonl(FIXTURES, "models.jsonl", [{"name": k, "model": v} for k, v in small_models().items()])
    with open(path, encoding="ascii") as f:
        models = {row["name"]: row["model"] for row in map(json.loads, f)}
    write_jsonl(out, "variants.jsonl", variant_rows(models))
    write_jsonl(out, "unicode.jsonl", unicode_rows())
    write_jsonl(out, "repair.jsonl", repair_rows())
    write_jsonl(out, "hostile.jsonl", [{"text": t} for t in hostile_sample()])
    write_jsonl(out, "chat.jsonl", chat_rows())
    if data:
        write_jsonl(out, "shared.jsonl", shared_rows(data))


# ---- chat templates ----------------------------------------------------------

CHAT_TEMPLATE = """{%- set ns = namespace(n=0, last='') %}
{%- if tools %}
    {{- '<tools>' + (tools | tojson) + '</tools>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if m.role == 'stop' %}{% break %}{% endif %}
    {%- if m.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + m.role) }}
    {%- endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- bos_token if loop.first else '' }}<|{{ m['role'] }}|>
{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}\
{% else %}{{ m.content }}{% endif %}

    {%- if m.thinking is defined %}[{{ m.reasoning_content }}]{% endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
{%- if extra is defined %}{{ extra | tojson(indent=2) }}{{ dict(a=1) }}{% endif %}
{{- ns.n }}{{ documents | length if documents else '' }}{{ pad_token is defined }}"""
CHAT_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def chat_requests():
    say = lambda role, content, **more: dict(role=role, content=content, **more)
    hello = [say("system", "Be <brief> & \"exact\"."), say("user", "Hé 你好 \U0001f600\n")]
    yield {"messages": hello}
    yield {"messages": hello, "add_generation_prompt": True}
    yield {"messages": hello + [say("assistant", "  Yes.  "), say("user", "\x00<s>")], "add_generation_prompt": True}
    yield {"messages": [say("skip", "x"), say("user", "a"), say("stop", ""), say("user", "b")]}
    yield {"messages": hello, "tools": [{"type": "function", "function": {"name": "f<x>", "description": "é"}}]}
    yield {"messages": hello, "documents": [{"title": "t", "text": "d"}], "extra": {"k": [1, None, True, 0.5, "é"]}}
    yield {"messages": [say("user", "a", name=None), say("assistant", "b", reasoning="why")]}
    yield {"messages": hello + [say("assistant", "So far ")], "continue_final_message": True}
    yield {"messages": [say("robot", "x")]}
    yield {"messages": []}


def transformers_render(template, request, special):
    """What apply_chat_template does around render_jinja_template, without a tokenizer."""
    from transformers.utils.chat_template_utils import render_jinja_template
    request = dict(request)
    messages = [{k: v for k, v in m.items() if v is not None} for m in request.pop("messages")]
    if not messages:
        raise ValueError("empty")
    rendered, _ = render_jinja_template(conversations=[messages], tools=request.pop("tools", None),
                                        documents=request.pop("documents", None), chat_template=template,
                                        continue_final_message=request.pop("continue_final_message", False),
                                        add_generation_prompt=request.pop("add_generation_prompt", False),
                                        **{**special, **request})
    return rendered[0]


def chat_rows():
    rows = [{"template": CHAT_TEMPLATE, "special": CHAT_SPECIAL}]
    for request in chat_requests():
        try:
            rows.append({"request": request, "text": transformers_render(CHAT_TEMPLATE, request, CHAT_SPECIAL)})
        except Exception:  # the template's own refusal: its words are not compared
            rows.append({"request": request, "text": None})
    return rows


def compare_chat(program, name, folder):
    """The model's own template through the helper, against transformers; ids as well."""
    from tokenizers import Tokenizer
    with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as f:
        config = json.load(f)
    template = config.get("chat_template")
    if not isinstance(template, str):
        return 0
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        if value:
            special[key] = value["content"] if isinstance(value, dict) else value
    ref = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    say = lambda role, content: {"role": role, "content": content}
    requests, want = [], []
    r = random.Random(9)
    for text in hostile_lines(60, 31):
        turns = [say("user", text), say("assistant", text[::-1]), say("user", "and?")][:r.choice([1, 3])]
        if r.random() < 0.5:
            turns.insert(0, say("system", text[:40]))
        request = {"messages": turns, "add_generation_prompt": r.random() < 0.5}
        try:
            rendered = transformers_render(template, request, special)
        except Exception:
            continue  # the template refuses; refusals have a test of their own
        requests.append(request)
        want.append({"text": rendered, "ids": ref.encode(rendered, add_special_tokens=False).ids})
    got = run_verlc(program, ["--model", folder, "--chat"], requests)
    differ = report(name, "chat", requests, got, want)
    print(f"{name}: {len(want)} chats, {differ} differences", flush=True)
    return differ

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="all", choices=["all", "tables", "fixtures", "compare"])
    parser.add_argument("--verlc", default=os.environ.get("VERLC", os.path.join(ROOT, "build/release/verlc")))
    parser.add_argument("--data", default=os.environ.get("SHARED_DATA", os.path.join(ROOT, "../shared/data")))
    parser.add_argument("--lines", type=int, default=20000)
    parser.add_argument("--only", help="one tokenizer's name")
    parser.add_argument("--out", help="a directory to write into")
    args = parser.parse_args()
    if args.command == "tables":
        return tables(args.out)
    has_data = os.path.isdir(os.path.join(args.data, "tokenizers"))
    if not has_data:
        print(f"{args.data}/tokenizers is not there: nothing real to compare with (--data or SHARED_DATA)")
    if args.command in ("all", "fixtures"):
        fixtures(args.data if has_data else None, args.out or FIXTURES)
    if args.command in ("all", "compare") and has_data:
        compare(args)


if __name__ == "__main__":
    main()
