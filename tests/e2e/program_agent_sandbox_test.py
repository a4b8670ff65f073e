"""Agent programs in the sandbox (agent.sandbox): they reach the model at their address, and nothing else of this machine."""

import json
import os
import pathlib
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from agent_program import AGENT, CLIENT, REWARD, ROLLOUT, args_of, samples  # noqa: E402
from verlc_test import Scratch, Tests, run, series  # noqa: E402

PROGRAM = CLIENT + r"""
import pathlib, socket, threading
kind, here = ROW["extra_info"]["kind"], pathlib.Path(sys.argv[1])
ask(ROW["prompt"], max_tokens=4)
assert json.load(sys.stdin) == ROW and "SECRET_OF_THE_RUN" not in os.environ

def refused(f):
    try:
        f()
    except OSError:
        return
    raise SystemExit(f"{kind}: not refused")

if kind == "files":
    pathlib.Path("/tmp/mine").write_text("x")
    refused(lambda: (here / "stolen").write_text("x"))
    refused(lambda: os.listdir("/proc/1"))
    refused(lambda: os.listdir(os.path.dirname(here)) and os.listdir("/var"))
    assert os.getuid() != 0 and not os.path.exists("/etc/passwd")
if kind == "network":
    port = int(BASE.split(":")[2].split("/")[0])
    for at in (("127.0.0.1", int(ROW["extra_info"]["other"])), ("10.0.0.1", 80), ("1.1.1.1", 53)):
        refused(lambda: socket.create_connection(at, timeout=5))
    refused(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
    threads = [threading.Thread(target=ask, args=([{"role": "user", "content": str(i)}],), kwargs={"max_tokens": 2})
               for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
if kind == "hangs":
    time.sleep(600)
if kind == "memory":
    x = bytearray(5 << 30)
print(json.dumps({"reward": 1}))
"""
IDLE = 5  # seconds; a busy machine starts a program in less
KINDS = {"good": "", "files": "", "network": "", "hangs": f"agent.idle_timeout={IDLE}", "memory": "exit code 1: MemoryError"}


def main():
    test = Tests()
    if run("sandbox", "--check", check=False).returncode != 0:
        print("skipped: no sandbox on this machine")
        return
    with Scratch() as s:
        s.dir.chmod(0o755)  # the program is another user
        (s.dir / "reward.py").write_text(REWARD)
        other = socket.create_server(("127.0.0.1", 0))
        python = os.path.realpath(sys.executable)
        args = args_of(s, "box", list(KINDS), PROGRAM, **{
            AGENT + "command": f"{python} {s.dir / 'box.py'} {s.dir}", AGENT + "sandbox": True,
            AGENT + "sandbox_read": f"[{s.dir},{sys.base_prefix}]", AGENT + "idle_timeout": IDLE, ROLLOUT + "n": 1,
            "trainer.total_training_steps": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": len(KINDS),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1})
        rows = [json.loads(line) for line in (s.dir / "box.jsonl").read_text().splitlines()]
        for row in rows:
            row["extra_info"]["other"] = other.getsockname()[1]
        s.write("box.jsonl", rows)
        run(*args, env={"SECRET_OF_THE_RUN": "x"})
        of = {}
        for r in samples(s.dir / "box"):
            of.setdefault(r[1], []).append(r)
        for (kind, why), (_, got) in zip(KINDS.items(), sorted(of.items())):
            status, message = got[-1][7:9]
            test(kind, status == ("crash" if why else "score") and why in (message or ""), (status, message))
        test("the log-probs of training are the rollout's", series(s.dir / "box", "training/rollout_probs_diff_max") == [0])
        test("nothing was written here", not (s.dir / "stolen").exists())
        test.refused("a directory that there is not", run(*args, AGENT + "sandbox_read=[/nowhere]", check=False), 2, "sandbox_read")
    test.end()


main()
