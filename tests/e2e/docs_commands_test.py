"""Every command of README.md and docs/*.md runs. In fenced blocks without a language, or with `sh`, each command line goes to
bash in a directory that has what the pages name: models, rows, a run, adapters, shards, all tiny. `verlc` and `sqlite3` there
are wrappers: what would train or download becomes a plan or takes local files (`small`), the rest runs as it stands. Lines of
KEY=VALUE alone are parsed by `verlc ppo --cfg job`. SKIPPED names what cannot run here, and why; a command that is neither
run nor named fails. Blocks of another kind (output, layouts, code) have a language: ```text, ```c, ```python."""

import ast
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from docs_commands_small import GRPO  # noqa: E402
from verlc_test import ENV, VERLC, Scratch, Tests, run  # noqa: E402

ROOT = pathlib.Path(os.environ.get("SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
SHARDS = ROOT / "tests/fixtures/verl_ckpt"
SKIPPED = [  # the beginning of a command, and why it does not run here
    ("pip install ", "installs from a package index"),
    ("python3 -m venv ", "an environment of its own: scripts/dist_test.sh"),
    ("make demo", "minutes, and apt: CI runs it"),
    ("make test", "these tests"),
    ("cc positive.c ", "tests/e2e/examples_test.py builds a program of one's own"),
    ("./positive ", "tests/e2e/examples_test.py"),
    ("mlflow ui ", "MLflow's own program"),
    ("verlc view ", "serves until Ctrl-C; view_test.py runs it"),
    ("python3 tools/run_plot.py ", "needs matplotlib"),
    ('export PATH="$VERLC_EXEC_DIR', "two lines of a user's script: exec_test.py has them in one"),
    ("VLLM_SERVER_DEV_MODE=1 vllm serve ", "vLLM's own server; external_engine_test.py has one of its interface"),
    ("srun ", "tests/fault/ranks_test.py has the environments of launchers"),
    ("mpirun ", "tests/fault/ranks_test.py"),
    ("torchrun ", "tests/fault/ranks_test.py"),
    ("ray job submit --address=http://head", "needs a Ray cluster: tools/oracle_ray_ranks.py"),
    ("verlc bench decode --model DIR --ranks 2 --graph ", "needs GPUs"),
    ("verlc exec ray job submit --address=http://head", "needs a Ray cluster: tools/oracle_ray_ranks.py"),
]
PROGRAMS = {"verlc", "echo", "sqlite3", "python3"}

WRAPPER = """#!/bin/sh
exec {python} -S -E {here}/docs_commands_small.py {verlc} "$@"
"""
SQLITE = """#!{python} -S
import sqlite3, sys
for row in sqlite3.connect(f"file:{{sys.argv[1]}}?mode=ro", uri=True).execute(sys.argv[2]):
    print("|".join(map(str, row)))
"""


def commands(text):
    """(line number, command) of the blocks that are the shell's, continued lines joined, and (line number, code) of JSON and
    Python that stands in such a block."""
    found, code, block, language = [], [], [], None
    for n, line in enumerate(text.splitlines(), 1):
        if line.startswith("```") and language is None:
            language, block = line[3:].strip(), []
        elif line.startswith("```"):
            if language in ("", "sh"):
                (code if block and block[0][1].startswith(("{", "def ")) else found).extend(joined(block))
            language = None
        elif language is not None:
            block.append((n, line))
    return found, code


def joined(block):
    """Lines that end in a backslash or a pipe go on; a block of Python is one."""
    if block and block[0][1].startswith("def "):
        return [(block[0][0], "\n".join(line for _, line in block))]
    out, open_line, quote = [], False, False
    for n, line in block:
        if open_line or quote:
            out[-1] = (out[-1][0], out[-1][1] + "\n" + line)
        elif line.strip():
            out.append((n, line))
        open_line = line.endswith(("\\", "|"))
        quote = bool(out) and out[-1][1].count("'") % 2 == 1
    return out


def programs(command):
    """The first words of a command line's parts, assignments left out."""
    lexer = shlex.shlex(command.replace("\\\n", " ").replace("|\n", "| "), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    first, names = True, []
    for word in lexer:
        if set(word) <= set("|&;"):
            first = True
        elif first and not re.match(r"\w+=", word):
            names.append(word)
            first = False
    return names


def prepare(s):
    """What the pages name, in s.dir."""
    d = s.dir
    sums = [s.row(i) for i in range(8)]
    for name in ("val.jsonl", "test.jsonl"):
        s.write(name, sums[:2])
    chats = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]} for i in range(8)]
    s.write("chats.jsonl", chats)
    s.write("requests.jsonl", [{"prompt": "2 + 3?", "max_tokens": 2}])
    (d / "raw").mkdir()
    for name in ("train", "test"):
        rows = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(20)]
        s.write(f"raw/{name}.jsonl", rows)
    made = run("data", "gsm8k", "--local_dataset_path", d / "raw", "--local_save_dir", d / "data/gsm8k", check=False)
    if made.returncode != 0 and "pyarrow" in made.stderr:
        print("skipped: parquet needs pyarrow, which scripts/setup.sh installs")
        sys.exit(77)
    assert made.returncode == 0, made.stderr
    for name in ("test", "held_out"):
        os.link(d / "data/gsm8k/test.parquet", d / f"{name}.parquet")
    for name in ("DIR", "BASE", "TEACHER", "Qwen/Qwen2.5-0.5B-Instruct", "data/gsm8k/checkpoints/global_step_20/actor"):
        shutil.copytree(d / "model", d / name, copy_function=os.link)
    run(*s.ppo("RUN", actor_rollout_ref__model__lora_rank=2, trainer__total_training_steps=1))
    (d / "OTHER").mkdir()
    for name in ("DIR", "OTHER", "data/gsm8k/checkpoints"):
        os.link(d / "RUN/run.db", d / name / "run.db")
    (d / "global_step_20").mkdir()
    os.rename(d / "RUN/global_step_1/actor", d / "global_step_20/actor")
    shards = next(p for p in sorted(SHARDS.iterdir()) if not p.name.startswith("lora"))
    shutil.copytree(shards, d / "checkpoints/run/global_step_20/actor")
    shutil.copytree(SHARDS.parent / "megatron_ckpt/tp2_pp2", d / "checkpoints/megatron/global_step_20")
    (d / "run_qwen.sh").write_text(shlex.join(["python3", "-m", "verl.trainer.main_ppo", *GRPO]) + ' "$@"\n')
    function = re.search(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)[1]
    (d / "my_reward.py").write_text(function)
    (d / "examples").symlink_to(ROOT / "examples")
    (d / "SFT/global_step_400").mkdir(parents=True)
    (d / "SFT/global_step_400/actor").symlink_to(d / "model")
    (d / "RUN/global_step_40").mkdir()
    (d / "RUN/global_step_40/actor").symlink_to(d / "model")
    (d / "TOOLS.py").symlink_to(ROOT / "examples/calculator_tool.py")
    (d / "python").symlink_to(ROOT / "python")
    for name, text in (("verlc", WRAPPER), ("sqlite3", SQLITE)):
        (d / "bin").mkdir(exist_ok=True)
        (d / "bin" / name).write_text(text.format(python=sys.executable, here=str(pathlib.Path(__file__).parent), verlc=VERLC))
        (d / "bin" / name).chmod(0o755)


def bash(d, command):
    path = [p for p in os.environ["PATH"].split(os.pathsep)
            if not any(os.path.exists(os.path.join(p, tool)) for tool in ("torchrun", "uv", "ray"))]  # exec stands in for them
    env = {**ENV, "PATH": os.pathsep.join([str(d / "bin"), *path]), "HOME": str(d), "HF_HUB_OFFLINE": "1",
           "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=d, env=env, capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)


def local(command, d):
    """With the tutorial's /data/gsm8k in d; ~/data/gsm8k is there by HOME."""
    return re.sub(r"(?<![\w~])/data/gsm8k", str(d / "data/gsm8k"), command)


def check_page(test, d, page):
    """Runs the page's commands in order; the reasons of SKIPPED that it used."""
    used, overrides = set(), []
    found, code = commands(page.read_text())
    for n, text in code:
        json.loads(text) if text.startswith("{") else ast.parse(text)
    for n, command in found:
        where = f"{page.name}:{n}"
        skipped = [begin for begin, _ in SKIPPED if command.startswith(begin)]
        used.update(skipped)
        if skipped:
            continue
        if re.match(r'"?[a-z_]+(\.\w+)+=', command):
            overrides += [(where, word) for word in shlex.split(command.replace("\\\n", " "), comments=True)]
            continue
        if command.startswith("ray job submit"):  # a script that a later line runs
            (d / "run_grpo.sh").write_text(local(command, d) + "\n")
            command = "verlc exec bash run_grpo.sh"
        unknown = [name for name in programs(command) if name not in PROGRAMS]
        if unknown:
            test(f"{where}: {command[:60]}", False, f"{unknown}: neither run nor in SKIPPED")
            continue
        p = bash(d, local(command, d))
        test(f"{where}: {' '.join(command.split())[:70]}", p.returncode == 0, f"exit {p.returncode}: {p.stderr[-600:]}")
    if overrides:
        p = subprocess.run([VERLC, "ppo", *GRPO, *dict.fromkeys(word for _, word in overrides), "--cfg", "job"], cwd=d, env=ENV,
                           capture_output=True, text=True, timeout=60)
        test(f"{page.name}: {len(overrides)} overrides are parsed", p.returncode == 0, p.stderr[-600:])
    return used


def main():
    test = Tests()
    with Scratch(n_train=8, n_test=2) as s:
        prepare(s)
        used = set()
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
            d = s.dir / "pages" / page.stem
            shutil.copytree(s.dir, d, copy_function=os.link, symlinks=True, ignore=shutil.ignore_patterns("pages"))
            used |= check_page(test, d, page)
        stale = [begin for begin, _ in SKIPPED if begin not in used]
        test("what is skipped is in a page", not stale, str(stale))
    test.end()


if __name__ == "__main__":
    main()
