"""The man pages and the shell completion, both made from the program's own help."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from verlc_test import VERLC, Tests, run  # noqa: E402


def complete(line):
    """What bash offers at the end of a line."""
    words = line.split(" ")
    script = f'''PATH={pathlib.Path(VERLC).resolve().parent}:$PATH; source {ROOT}/share/verlc.bash
COMP_LINE="{line}" COMP_POINT={len(line)} COMP_CWORD={len(words) - 1}
COMP_WORDS=({" ".join(f'"{w}"' for w in words)})
_verlc; printf '%s\\n' "${{COMPREPLY[@]}}"'''
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def main():
    test = Tests()
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
