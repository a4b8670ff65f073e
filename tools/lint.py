"""Checks what DESIGN.md promises of the tree: a module includes and calls only those that src/modules.list gives it, no
more files than CIRCLE call each other, DESIGN has the modules in that order, private headers stay private, every source
file opens with a comment, no line is longer than .clang-format's limit, no function longer than 300 lines; that functions
have 6 parameters at most, but for WIDE of them; that clang-format leaves the tree as it is; that texts use the field's words
(WORDS); that NCCL adds nothing; that files which the pages name are there; that every fuzz target is in the table of readers;
and that the tables of docs/performance.md are those of docs/figures. C and CUDA files alike. Exits 1 on a violation; prints the
20 longest functions."""

import pathlib
import re
import subprocess
import sys

import modules

TOP = pathlib.Path(__file__).resolve().parent.parent
ROOT = TOP / "src"
CALLS = modules.calls()
CIRCLE = 5  # files that call each other, at most
WIDE = 19  # functions with more than 6 parameters, most of them kernels; the number only falls
COLUMNS = int(re.search(r"ColumnLimit: (\d+)", (TOP / ".clang-format").read_text())[1])
GENERATED = {ROOT / "text/unicode_tables.h"}
SOURCES = ("*.c", "*.h", "*.cu", "*.cuh")
WORDS = {  # a regular expression (a space is any space, a comment's new line too): what the field says
    "few rows": "small M",
    r"matri(x|ces) products?|products? of (few|matri\w*)": "GEMM",
    "keys and values": "KV cache; K and V",
    "key/value": "KV",
    "pages of (%|keys|tokens|a sequence)": "KV blocks",
    r"recorded (work|steps?|decod\w*|calls?|launch\w*)|a recording": "CUDA graph",
    "copy engine": "TMA",
    r"warps? that (cop|weigh|add)\w*": "producer warp, softmax warps, PV warps",
    "(shared memory|smem) rings?|rings? of (stages|slots|tiles)": "shared-memory pipeline",
    "time chooses|chosen by time": "autotuned among bitwise-identical kernels",
    "(its|in|the) company": "batch-invariant",
    "how far from the limit": "roofline",
    "what a (product|gemm) may end with": "epilogue",
    "(copy|transfer) lanes?|lanes? (of transfers|beside)": "copy streams",
    "st(and|ood)s? still": "idles",
    "way back": "backward",
    "what gained": "speed-up",
    "what is left": "remaining",
    "rests? in host memory": "offloaded to host memory",
    "of one.s own": "user-defined",
    "opinions?": "judgement",
    "kin": "related",
    "working space": "scratch",
}

# Private words, in comments and in names, and how often src has them at most: lower it with each that is replaced.
FALLING = re.compile(r"(?<![a-z])(beside|told|gone|ahead|apart|doors?|dealing|pulses?|anew|spares?)(?![a-z])", re.I)
FALLING_LEFT = 0


def sources(*folders):
    found = (p for folder in folders for kind in SOURCES for p in (TOP / folder).rglob(kind))
    return sorted(p for p in found if p not in GENERATED)


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        m = re.match(r'\s*#include "(\w+)/([\w/]+\.(?:h|cuh|def))"', line)
        if m:
            yield number, m[1], m[2]


def long_lines():
    """Of code and scripts; tables (*.def) and documents have lines of their own."""
    kinds = ["tests/**/*.py", "tools/*.py", "python/**/*.py", "scripts/*.sh", "cmake/*.cmake", "CMakeLists.txt", "Makefile"]
    scripts = [p for kind in kinds for p in TOP.glob(kind)]
    for path in sorted([*sources("src", "include", "examples", "tests"), *scripts]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > COLUMNS:
                yield f"{path.relative_to(TOP)}:{number}: {len(line)} columns; at most {COLUMNS}"


def private_words():
    paths = [p for kind in (*SOURCES, "*.def") for p in ROOT.rglob(kind)] + [*TOP.glob("docs/**/*.md"), *TOP.glob("*.md")]
    words = [(re.compile(rf"\b({w})".replace(" ", r"[\s*]+") + r"\b"), field) for w, field in WORDS.items()]
    for path in sorted(paths):
        text = path.read_text().lower()  # to ignore case takes three times as long
        for word, field in words:
            for m in word.finditer(text):
                number = text.count("\n", 0, m.start()) + 1
                yield f"{path.relative_to(TOP)}:{number}: '{' '.join(m[0].split())}'; the field says: {field}"


def falling_words():
    found = sum(len(FALLING.findall(p.read_text())) for kind in (*SOURCES, "*.def") for p in ROOT.rglob(kind))
    return [f"src: {found} times one of {FALLING.pattern}; at most {FALLING_LEFT}"] if found > FALLING_LEFT else []


def reductions():
    """NCCL calls that add: on its way between ranks nothing is summed, so that every sum has one order."""
    call = re.compile(r"\bnccl\w*(Reduce|Sum|Prod|Avg|PreMulSum)\w*|X\((AllReduce|Reduce\w*)\b")
    for path in sources("src"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for m in call.finditer(line):
                yield f"{path.relative_to(TOP)}:{number}: {m[0]}: NCCL sends and receives here, and adds nothing"


def unformatted():
    tool = TOP / ".venv/bin/clang-format"  # scripts/setup.sh installs version 14.0.6: versions differ in what they do
    if not tool.exists():
        return ["no .venv/bin/clang-format: run scripts/setup.sh"]
    p = subprocess.run([tool, "--dry-run", *sources("src", "include", "examples", "tests")], capture_output=True, text=True)
    bad = re.findall(r"^(\S+?):(\d+):\d+: warning: code should be clang-formatted", p.stderr, re.M)
    return sorted({f"{pathlib.Path(f).relative_to(TOP)}:{n}: not formatted; run make format" for f, n in bad})


def stale_tables():
    p = subprocess.run([sys.executable, TOP / "tools/performance_tables.py", "--check"], capture_output=True, text=True)
    return [p.stderr.strip()] if p.returncode else []


def missing_files():
    """Files that a page names and that are not there; X and * stand for a name."""
    folders = "|".join(p.name for p in [*TOP.iterdir(), *ROOT.iterdir(), *(TOP / "tests").iterdir()]
                       if p.is_dir() and p.name[0] != "." and p.name != "build")
    pages = [p for p in [*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")] if p.name != "verl_examples.md"]  # its files are verl's
    for page in pages:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for name in re.findall(rf"(?<![\w/.$-])((?:{folders})/[\w/.*-]*\.\w+)", line):
                tries = [top.glob(re.sub("X", "*", name) + end) for top in (TOP, ROOT, TOP / "tests") for end in ("", "*")]
                if not any(found for t in tries for found in t):
                    yield f"{page.relative_to(TOP)}:{number}: {name} is not there"


def unlisted_readers():
    """Fuzz targets that the table of readers does not have."""
    page = (TOP / "docs/reliability.md").read_text()
    targets = (f"tests/fuzz/{p.name}" for p in (TOP / "tests/fuzz").glob("fuzz_*.c") if p.stem != "fuzz_main")
    return [f"docs/reliability.md: the readers' table lacks {name}" for name in sorted(targets) if f"`{name}`" not in page]


def calls_between_files():
    """Calls of the built objects: none up, and small circles."""
    graph = modules.edges(modules.symbols(TOP / "build/release"))
    for name, others in sorted(graph.items()):
        module = name.split("/")[0]
        for other in sorted(others):
            if other.split("/")[0] not in {module} | CALLS.get(module, set()):
                yield f"src/{name}: calls src/{other}, which src/modules.list does not give to {module}"
    for circle in modules.circles(graph):
        if len(circle) > CIRCLE:
            yield f"{len(circle)} files call each other; at most {CIRCLE}: {' '.join(circle)}"


def design_order():
    """The table of modules in DESIGN.md."""
    rows = re.findall(r"^\| `(\w+)` \|", (TOP / "DESIGN.md").read_text(), re.M)
    return [] if rows == list(CALLS) else [f"DESIGN.md: the modules are {', '.join(rows)}; src/modules.list has {', '.join(CALLS)}"]


def functions(path):
    start = name = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if start is None and line and not line[0].isspace() and line.endswith("{") and "(" in line and "=" not in line:
            start, name = number, line.split("(")[0].split()[-1].lstrip("*")
        elif line == "}" and start is not None:
            yield number - start, name, f"{path.relative_to(ROOT)}:{start}"
            start = None


def wide_functions():
    """Functions of src with more than 6 parameters, by their definitions; comments and template arguments left out."""
    head = re.compile(r"\b(?!if\b|for\b|while\b|switch\b)(\w+)\(((?:[^(){};]|\([^()]*\))*)\)\s*\{")
    for path in sources("src"):
        text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", "", m[0]), path.read_text(), flags=re.S)
        text = re.sub(r"<[\w ,]*>", "", text)
        for m in head.finditer(text):
            n = re.sub(r"\([^()]*\)", "", m[2]).count(",") + 1
            if n > 6 and re.match(r"[\w ]+([ *&]+\w+,|\(&\w+\))", m[2]):
                yield f"{path.relative_to(TOP)}:{text.count(chr(10), 0, m.start()) + 1}: {m[1]} has {n} parameters"


def main():
    bad, lengths = [], []
    for path in sources("src"):
        if path.parent == ROOT:
            continue
        module = path.relative_to(ROOT).parts[0]
        if module not in CALLS:
            bad.append(f"{path}: module {module} is not in src/modules.list")
            continue
        if not path.read_text().startswith("/*"):
            bad.append(f"{path}: does not open with a comment")
        for number, other, header in includes(path):
            if other not in {module} | CALLS[module]:
                bad.append(f"{path}:{number}: {module} must not include {other}/{header} (src/modules.list)")
            if other != module and header.endswith("_int.h"):
                bad.append(f"{path}:{number}: {other}/{header} is private")
        lengths += functions(path)
    lengths.sort(reverse=True)
    for n, name, place in lengths[:20]:
        print(f"{n:5d} {name:40s} {place}")
    bad += [*calls_between_files(), *design_order(), *long_lines(),
            *private_words(), *falling_words(), *reductions(), *missing_files(), *unlisted_readers(), *unformatted(),
            *stale_tables()]
    wide = list(wide_functions())
    if len(wide) != WIDE:
        bad += [*wide, f"{len(wide)} functions have more than 6 parameters; WIDE is {WIDE}, take a struct or lower it"]
    bad += [f"{place}: {name} has {n} lines" for n, name, place in lengths if n > 300]
    for line in bad:
        print(line, file=sys.stderr)
    print(f"lint: {len(bad)} violations in {len(lengths)} functions")
    return 1 if bad else 0


sys.exit(main())
