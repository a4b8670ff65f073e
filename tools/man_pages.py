"""Man pages from the program's own help: verlc.1 and one page a command.

  python tools/man_pages.py VERLC DIR      writes DIR/verlc.1, DIR/verlc-ppo.1, ...; changes nothing else"""

import pathlib
import re
import subprocess
import sys

SEE = "The README and the pages of docs/ say more: training, checkpoints, metrics, differences from verl."
# What a command's help does not list by itself.
PARTS = {"model": ["init", "info", "export", "merge"], "model_merger": ["merge", "test"], "data": ["gsm8k", "arith"],
         "trackers": ["sync"]}


def text_of(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.rstrip("\n")


def roff(text):
    """Plain text as it stands."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def page(name, about, sections, version):
    head = f'.TH {roff(name.upper())} 1 "" "verlc {version}"\n.SH NAME\n{roff(name)} \\- {roff(about)}\n'
    return head + "".join(f".SH {title}\n.nf\n{roff(body)}\n.fi\n" for title, body in sections) + f".SH SEE ALSO\n{roff(SEE)}\n"


def main(program, directory):
    out = pathlib.Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    top = text_of(program, "--help")
    version = top.split()[1]
    commands = re.findall(r"^  ([a-z_]+) +(.*)$", top, flags=re.M)
    whole = page("verlc", "reinforcement learning for language models", [("SYNOPSIS AND COMMANDS", top)], version)
    (out / "verlc.1").write_text(whole)
    for name, about in commands:
        sections = [("DESCRIPTION", text_of(program, name, "--help"))]
        sections += [(f"{name} {part}".upper(), text_of(program, name, part, "--help")) for part in PARTS.get(name, [])]
        if name in ("ppo", "sft"):
            sections.append(("ALL KEYS", text_of(program, name, "--help", "all").split("\n\n", 1)[1]))
        (out / f"verlc-{name}.1").write_text(page(f"verlc-{name}", about, sections, version))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
