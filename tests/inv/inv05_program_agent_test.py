"""Invariant 5 with agent programs: after kill -9 those that were over are not started again, tokens and rewards are taken from the
journal; one that ran is started again and told so, or dropped, as agent.on_restart says. The bits are those of an unbroken run."""

import json
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from agent_program import AGENT, CLIENT, REWARD, args_of, samples, without_restarts  # noqa: E402
from verlc_test import Scratch, Tests, run, start, state  # noqa: E402

RESTARTED = CLIENT + """
import pathlib
here = pathlib.Path(sys.argv[1])
name = f"{os.environ['VERLC_STEP']}-{ROW['extra_info']['index']}-{os.environ['VERLC_SAMPLE']}"
with open(here / "starts", "a") as f:
    f.write(f"{name} {os.environ['VERLC_RESTARTED']}\\n")
talk = list(ROW["prompt"])
for turn in range(2):
    talk += [ask(talk, max_tokens=6), {"role": "user", "content": "More?"}]
ask([{"role": "system", "content": "Count."}, talk[-1]], max_tokens=6)  # a sample of its own
while name == "2-1-0" and (here / "hold").exists():
    time.sleep(0.01)
"""


def restarted(s, test):
    """Killed in step 2, while one program holds and the others are over."""
    def args(name, **keys):
        (s.dir / name).mkdir()
        command = f"{sys.executable} {s.dir / name}.py {s.dir / name}"
        return args_of(s, name, ["fn"] * 2, RESTARTED, **{AGENT + "command": command, **keys})

    def starts(name):
        return (s.dir / name / "starts").read_text().split("\n")[:-1]

    run(*args("whole"))
    for name, choice in (("again", "run"), ("dropped", "drop")):
        words = args(name, **{AGENT + "on_restart": choice})
        (s.dir / name / "hold").touch()
        p = start(words)
        ended = s.dir / name / "tool_journal/2.jsonl"
        while p.poll() is None and not (ended.exists() and ended.read_text().count("/-3/program/") == 3):
            time.sleep(0.01)
        p.send_signal(signal.SIGKILL)
        p.communicate()
        (s.dir / name / "hold").unlink()
        before = starts(name)
        run(*words)
        after = starts(name)[len(before):]
        want = ["2-1-0 1"] if choice == "run" else []
        test(f"{choice}: programs that were over are not started again", after == want, (before, after))
    same = [samples(s.dir / d) for d in ("whole", "again")]
    test("run: the same bits as unbroken", without_restarts(same[0]) == without_restarts(same[1]) and
         state(s.dir / "whole", 2) == state(s.dir / "again", 2))
    test("each episode gives two samples", all(len(rows) == 2 * 2 * 2 * 2 for rows in same), [len(rows) for rows in same])
    test("run: an episode says that it was started again", [json.loads(r[9]).get("restarted") for r in same[1]].count(1) == 1,
         [json.loads(r[9]) for r in same[1]])
    bad = [r for r in samples(s.dir / "dropped") if r[7] != "score"]
    test("drop: one episode without a score, and it says why", len(bad) == 1 and "on_restart=drop" in bad[0][8], bad)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "reward.py").write_text(REWARD)
        restarted(s, test)
    test.end()


main()
