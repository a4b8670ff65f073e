"""The man pages and the shell completion, both made from the program's own help."""

import os
import pathlib
import pty
import select
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from verlc_test import VERLC, Scratch, Tests, run  # noqa: E402

PATH = f"{pathlib.Path(VERLC).resolve().parent}:{os.environ['PATH']}"


def complete(line):
    """What bash offers at the end of a line."""
    words = line.split(" ")
    script = f'''PATH={PATH}; source {ROOT}/share/verlc.bash
COMP_LINE="{line}" COMP_POINT={len(line)} COMP_CWORD={len(words) - 1}
COMP_WORDS=({" ".join(f'"{w}"' for w in words)})
_verlc; printf '%s\\n' "${{COMPREPLY[@]}}"'''
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def complete_fish(line):
    """What fish offers, whole words."""
    script = f"source {ROOT}/share/verlc.fish; complete -C '{line}'"
    p = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True,
                       env={**os.environ, "PATH": PATH})
    return [w.split("\t")[0] for w in p.stdout.splitlines()]


def complete_zsh(line):
    """The line that zsh makes of it with one tab; the marks around it are typed."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(PATH=PATH, TERM="dumb")
        os.execvp("zsh", ["zsh", "-f", "-i"])

    def until(mark, seconds=20):
        text, end = b"", time.monotonic() + seconds
        while mark not in text and time.monotonic() < end:
            if select.select([fd], [], [], 0.1)[0]:
                text += os.read(fd, 65536)
        return text.decode(errors="replace")

    os.write(fd, f"fpath=({ROOT}/share $fpath); autoload -Uz compinit; compinit -u -D; echo REA''DY\n".encode())
    until(b"READY")
    os.write(fd, line.encode() + b"\t\x01echo '<\x05>' EN''D\n")
    text = until(b"END\r")
    os.close(fd)
    os.waitpid(pid, 0)
    return text.rpartition("\n<")[2].partition(">")[0].rstrip()


def shells(test):
    """The same words in the other shells, where they are installed."""
    if shutil.which("fish"):
        test("fish: values of a key", "algorithm.adv_estimator=grpo" in complete_fish("verlc ppo algorithm.adv_estimator=g"))
        got = complete_fish(f"verlc ppo data.train_files={ROOT}/READ")
        test("fish: a value is a file name", f"data.train_files={ROOT}/README.md" in got, str(got))
        test("fish: a run is a file name", f"{ROOT}/README.md" in complete_fish(f"verlc show {ROOT}/READ"))
    if shutil.which("zsh"):
        got = [complete_zsh("verlc ppo algorithm.adv_estimator=grpo_v"), complete_zsh("verlc ppo actor_rollout_ref.mod"),
               complete_zsh(f"verlc ppo data.train_files={ROOT}/READ")]
        test("zsh: a value, a group of keys, a file name", got[0] == "verlc ppo algorithm.adv_estimator=grpo_vectorized" and
             got[1] == "verlc ppo actor_rollout_ref.model." and got[2] == f"verlc ppo data.train_files={ROOT}/README.md", str(got))


def words(test):
    test("groups of keys first", complete("verlc ppo actor_rollout_ref.") ==
         [f"actor_rollout_ref.{g}." for g in ("actor", "ref", "rollout", "model")], str(complete("verlc ppo actor_rollout_ref.")))
    got = complete("verlc ppo algorithm.adv_estimator=g")
    test("values of a key", got[:2] == ["gae", "grpo"] and all(w.startswith("g") for w in got), str(got))
    test("values of an enumeration", complete("verlc sft data.truncation=") == ["error", "left", "right"])
    test("values of a switch", complete("verlc ppo ++trainer.val_before_train=") == ["True", "False"])
    test("a key that is added", complete("verlc ppo +trainer.total_e") == ["+trainer.total_epochs="])
    test("keys of eval and of generate", complete("verlc eval data.pa") == ["data.path="] and
         complete("verlc generate model.pa") == ["model.path="])
    test("plan: of its program", complete("verlc plan sft data.max_le") == ["data.max_length="])
    test("explain: keys, warnings", complete("verlc explain trainer.total_e") == ["trainer.total_epochs"] and
         complete("verlc explain entropy_c") == ["entropy_collapse"])
    test("help: commands", complete("verlc help netc") == ["netcheck"])
    test("values of an option", complete("verlc show --color-by ent") == ["entropy"])
    test("nothing of a command that is none", not complete("verlc nothing --"))


def metrics_of_a_run(test):
    with Scratch(n_train=4, n_test=2) as s:
        run(*s.ppo("run", trainer__total_training_steps=1, trainer__save_freq=0))
        got = complete(f"verlc show {s.dir / 'run'} --metric response_length/")
        test("show --metric: those that the run has", {"response_length/mean", "response_length/clip_ratio"} <= set(got), str(got))
        with sqlite3.connect(s.dir / "run/run.db") as db:
            db.executemany("INSERT INTO metrics(step, name, value) VALUES (1, ?, 1)",
                           [["zz/plain"], ["zz/$(touch x)"], ["zz/\x1b[31m"]])
        test("show --metric: no name that a shell would run", complete(f"verlc show {s.dir / 'run'} --metric zz/") == ["zz/plain"])
    test("show --metric: without a run those of the table", "actor/grad_norm" in complete("verlc show --metric actor/gra"))


def main():
    test = Tests()
    words(test)
    metrics_of_a_run(test)
    shells(test)
    test("commands", "ppo" in complete("verlc p") and "plan" in complete("verlc p"), str(complete("verlc p")))
    test("keys of ppo", "trainer.total_epochs=" in complete("verlc ppo trainer.total_"), str(complete("verlc ppo trainer.total_")))
    test("keys of sft", "data.max_length=" in complete("verlc sft data.max_l"))
    test("options", "--device" in complete("verlc generate --de") and "--preset" in complete("verlc model init --pre"))
    test("a value is a file name", f"{ROOT}/README.md" in complete(f"verlc ppo data.train_files={ROOT}/READ"))
    test("a run is a file name", f"{ROOT}/README.md" in complete(f"verlc show {ROOT}/READ"))
    test("sync, or a run", complete("verlc trackers s")[:1] == ["sync"] and
         f"{ROOT}/README.md" in complete(f"verlc trackers sync {ROOT}/READ") and "--dry-run" in complete("verlc trackers sync --d"))
    test("options of show", "--color-by" in complete("verlc show --co"))
    test("metrics", "actor/grad_norm" in complete("verlc explain actor/gr"))
    with tempfile.TemporaryDirectory() as d:
        subprocess.run([sys.executable, ROOT / "tools/man_pages.py", VERLC, d], check=True)
        pages = {p.name: p.read_text() for p in pathlib.Path(d).iterdir()}
        commands = [line.split()[0] for line in run("--help").stdout.splitlines() if line.startswith("  ")]
        test("a page for each command", {f"verlc-{c}.1" for c in commands} | {"verlc.1"} == set(pages), str(sorted(pages)))
        test("every key of ppo", "trainer.early_stopping.patience" in pages["verlc-ppo.1"].replace("\\-", "-"))
        if shutil.which("groff"):
            groff = ["groff", "-k", "-man", "-Tutf8", "-ww"]
            bad = [n for n in pages if subprocess.run([*groff, pathlib.Path(d) / n], capture_output=True).stderr]
            test("groff has no warning", not bad, str(bad))
    test.end()


main()
