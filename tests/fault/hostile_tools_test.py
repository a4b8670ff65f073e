"""Tools at their worst, in a run of episodes that call nothing else: never ending, flooding, dying, forking, answering what is no
answer. Each call has its status, and the run goes on to its end and leaves no process behind."""

import json
import os
import pathlib
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tool_model import calling_model  # noqa: E402
from verlc_test import Scratch, Tests, patience, run, series, waited  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout."
MT = ROLLOUT + "multi_turn."
HEAD = """
import asyncio, os, signal, socket, subprocess, sys, threading, time
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

def note(pid):
    with open(os.environ["FORKED"], "a") as f:
        f.write(f"{pid}\\n")
"""
# name -> the lines of its body, whether it is async, the statuses that its calls may have
OK, ERROR, TIMEOUT = {"ok"}, {"error"}, {"timeout"}
TOOLS = {
    "fine": ("return 'fine'", False, OK),
    "loop": ("while True: pass", False, TIMEOUT),
    "wait": ("await asyncio.sleep(3600)", True, TIMEOUT),
    "block": ("time.sleep(3600)", True, TIMEOUT),
    "deaf": ("while True:\n  try: await asyncio.sleep(3600)\n  except BaseException: pass", True, TIMEOUT),
    "raises": ("raise ValueError('x' * 1000)", False, ERROR),
    "deep": ("return deep()", False, ERROR),
    "interrupts": ("raise KeyboardInterrupt", True, ERROR),
    "cancels": ("raise asyncio.CancelledError", True, ERROR),
    "exits": ("os._exit(0)", False, ERROR),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", False, ERROR),
    "stdout": ("os.write(1, b'x' * 300000)\n for _ in range(3000): print('y' * 200)\n return 'said'", False, OK),
    "stderr": ("for _ in range(3000): print('{\"level\":' * 30, file=sys.stderr)\n return 'said'", False, OK),
    "large": ("return 'x' * 10_000_000", False, OK),
    "nothing": ("return None", False, OK),
    "unjson": ("return {1, 2}", False, OK),
    "loops": ("x = []; x.append(x); return {'x': x}", False, ERROR),
    "huge": ("return 'a', 10 ** 400", False, ERROR),
    "image": ("return ToolResponse(text='a', image=['i'])", False, ERROR),
    "wrong": ("return ToolResponse.model_construct(text=5)", False, ERROR),
    "unprintable": ("class X:\n  def __str__(self): raise ValueError('no text')\n return X()", False, ERROR),
    "threads": ("for _ in range(50): threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n return 1", False, OK),
    "child": ("note(subprocess.Popen(['sleep', '3600'], start_new_session=True).pid)\n return 'child'", False, OK),
    "daemon": ("if (pid := os.fork()) == 0:\n  os.setsid(); time.sleep(3600)\n note(pid)\n return 'daemon'", False, OK),
    "twins": ("note(os.fork() or os.getpid())\n return 'twins'", True, OK),
    "fork_exits": ("if (pid := os.fork()) == 0:\n  time.sleep(3600)\n note(pid)\n os._exit(1)", True, ERROR),
    "signals": ("signal.raise_signal(signal.SIGTERM)\n return 'still here'", True, OK),
}


def source():
    text = HEAD
    for name, (body, is_async, _) in TOOLS.items():
        text += f'\n@function_tool\n{"async " * is_async}def {name}():\n "Hostile."\n {body}\n'
    return text


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def main():
    test = Tests()
    with Scratch() as s:
        calls = [f'<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>' for n in TOOLS]
        calling_model(s.dir / "model", s.dir / "calls", 12, 0, calls)
        (s.dir / "tools.py").write_text(source())
        forked = s.dir / "forked"
        p = run(*s.ppo("r", **{
            "actor_rollout_ref.model.path": s.dir / "calls", ROLLOUT + "agent.default_agent_loop": "tool_agent",
            MT + "function_tool_path": s.dir / "tools.py", MT + "max_assistant_turns": 4,
            MT + "tool_timeout": max(0.8, patience(0.4)), MT + "tool_processes": 2, "data.max_prompt_length": 200,
            "data.max_response_length": 150, "data.train_batch_size": 16, ROLLOUT + "n": 2,
            "trainer.total_training_steps": 1, "trainer.save_freq": -1, "actor_rollout_ref.actor.use_kl_loss": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 16, "trainer.device": "cpu"}), env={"FORKED": str(forked)}, timeout=600)
        with sqlite3.connect(s.dir / "r/run.db") as db:
            episodes = [json.loads(r[0]) for r in db.execute("SELECT episode FROM samples")]
        made = [c for e in episodes for c in e["calls"]]
        seen = {n: {c["status"] for c in made if c["name"] == n} for n in TOOLS}
        test("nearly every tool was called", sum(map(bool, seen.values())) > len(TOOLS) - 4, [n for n in TOOLS if not seen[n]])
        odd = [(c["name"], c["result"][:200]) for c in made if c["status"] not in TOOLS[c["name"]][2]]
        test("each call has its status", not odd, odd)
        test("results are short", all(len(c["result"]) < 1100 for c in made), max(len(c["result"]) for c in made))
        test("the step is made", len(episodes) == 32 and len(series(s.dir / "r", "actor/grad_norm")) == 1)
        pids = [int(x) for x in forked.read_text().split()]
        ended = waited(lambda: not any(map(alive, pids)), 20)
        test("what tools started has ended", pids and ended, [x for x in pids if alive(x)])
        test("the log is short", len(p.stderr) < 100_000, len(p.stderr))
        seconds = series(s.dir / "r", "timing_s/gen")
        test("times are within the deadlines", seconds[0] < patience(40), seconds)
    test.end()


main()
