"""What a reward function starts ends with the run, whatever ends that: plain children, daemons of their own session
(double fork, setsid, every signal ignored), children with an empty environment.  A stop (SIGSTOP) longer than every
deadline ends nothing.  SIGHUP saves.  Closed standard descriptors; who the kernel kills first when memory is short."""

import fcntl
import os
import pathlib
import pty
import re
import resource
import signal
import subprocess
import sys
import termios
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, is_pending, met, reached, run, state, waited  # noqa: E402

DEADLINE = 4  # of runs that are stopped for three times as long, beside the other checks
MARK = f"86000.{os.getpid()}"  # the argument of every sleep that a reward function starts

REWARD = f'''
import multiprocessing, os, signal, subprocess, time

def start():
    subprocess.Popen(["sleep", {MARK!r}])
    subprocess.Popen(["setsid", "sleep", {MARK!r}], env={{}})
    multiprocessing.get_context("fork").Process(target=os.execvp, args=("sleep", ["sleep", {MARK!r}])).start()
    if os.fork() == 0:  # a daemon
        os.setsid()
        for sig in range(1, 32):
            if sig not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
                signal.signal(sig, signal.SIG_IGN)
        if os.fork() == 0:
            os.closerange(0, 256)
            os.execvp("sleep", ["sleep", {MARK!r}])
        os._exit(0)
    os.wait()

STARTED = False
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global STARTED
    if not STARTED:
        STARTED = True
        start()
        time.sleep(0.2)
        open(CALLS, "a").write(".")
    WAIT
    return float(len(solution_str) % 2)
'''


def strays():
    """Processes that sleep for MARK."""
    found = []
    for d in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if MARK in (d / "cmdline").read_text().split("\0") and "\nState:\tZ" not in (d / "status").read_text():
                found.append(int(d.name))
        except OSError:
            pass  # it has just ended
    return found


def left():
    """What goes on though the run has ended: it was killed with it, and the kernel takes its time on a busy machine."""
    waited(lambda: not strays(), 20)
    return strays()


def no_core():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def begin(s, name, body, **keys):
    """A run whose reward function has started its children."""
    reward, calls = s.dir / f"{name}.py", s.dir / f"{name}.calls"
    reward.write_text(REWARD.replace("WAIT", body).replace("CALLS", repr(str(calls))))
    keys = {"reward.custom_reward_function.path": reward, "reward.num_workers": 1, "trainer.save_freq": -1, **keys}
    p = subprocess.Popen([VERLC, *map(str, s.ppo(name, **keys))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                         env=ENV, preexec_fn=no_core)
    waited(lambda: p.poll() is not None or calls.exists())
    return p


def check_nothing_left(s, test):
    ends = {
        "SIGKILL": ([signal.SIGKILL], -signal.SIGKILL, "time.sleep(60)", {}),
        "SIGQUIT": ([signal.SIGQUIT], -signal.SIGQUIT, "time.sleep(60)", {}),
        "SIGSEGV": ([signal.SIGSEGV], -signal.SIGSEGV, "time.sleep(60)", {}),
        "SIGHUP": ([signal.SIGHUP], 129, "time.sleep(60)", {"reward.trial_call": False}),
        "SIGINT twice": ([signal.SIGINT, signal.SIGINT], -signal.SIGINT, "time.sleep(60)", {}),
        "the watchdog": ([], 6, "time.sleep(60)", {"trainer.deadline": 12}),
        "the end of the run": ([], 0, "", {"trainer.total_training_steps": 1}),
    }

    def ended(i, name, signals, status, body, keys):
        """None: the first of two signals had ended the run before the second was sent."""
        p = begin(s, f"{name.replace(' ', '_')}{i}", body, **keys)
        there = strays()
        if name != "the end of the run":
            test(f"{name}: a reward function has four children", len(there) == 4, str(there))
        for sig in signals:
            p.send_signal(sig)
            waited(lambda: p.poll() is not None or not is_pending(p, sig))  # noqa: B023
        _, err = p.communicate(timeout=300)
        there = left()
        if len(signals) == 2 and p.returncode == 128 + signals[0] and not there:
            return None
        test(f"{name}: exit {status}, nothing is left behind", p.returncode == status and not there,
             f"exit {p.returncode}, left {there}, {err[-300:]}")
        for pid in there:
            reached(pid, signal.SIGKILL)
        return True

    for name, end in ends.items():
        test(f"{name}: it met the run", met(lambda i, end=(name, *end): ended(i, *end)))


def check_timeout(s, test):
    """A call that does not end: its helper's children go with it, the run goes on, and calls of the next helper end."""
    p = begin(s, "slow_call", "if open(CALLS).read() == '.': time.sleep(1000)", **{
        "reward.timeout": 3, "trainer.total_training_steps": 1, "reward.trial_call": False})
    first = set(strays())
    waited(lambda: p.poll() is not None or (s.dir / "slow_call.calls").stat().st_size > 1)
    second = set(strays())
    _, err = p.communicate(timeout=300)
    test("a call that is killed for its time takes its children along", len(first) == 4 and not first & second and
         "timeout" in err and not left(), f"{first} {second} {strays()} {err[-300:]}")


def check_memory_order(s, test):
    p = begin(s, "oom", "time.sleep(60)")
    adjust = [int(pathlib.Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in strays()]
    own = int(pathlib.Path(f"/proc/{p.pid}/oom_score_adj").read_text())
    test("the kernel kills helpers and their children before the run", len(adjust) == 4 and all(a > own for a in adjust),
         f"{adjust} {own}")
    reapers = [int(x) for x in pathlib.Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split()]
    names = [pathlib.Path(f"/proc/{pid}/{f}").read_text() for pid in reapers for f in ("comm", "cmdline")]
    test("pkill -f verlc would leave the reapers", len(reapers) >= 2 and not any("verlc" in x for x in names), str(names))
    p.kill()
    p.communicate()
    left()


def stop(s):
    """SIGSTOP to two runs in a scorer's call of their rollout: (process, all of its processes) by name."""
    runs = {}
    for name, decorator in (("def", ""), ("async", "async ")):
        body = "import asyncio\n    await asyncio.sleep(0.4)" if decorator else "time.sleep(0.4)"
        reward = s.dir / f"stop_{name}.py"
        reward.write_text(f"import time\n{decorator}def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                          f"    open({str(s.dir / name)!r}, 'a').write('.')\n    {body}\n    return 1.0\n")
        keys = {"reward.custom_reward_function.path": reward, "reward.num_workers": 1, "reward.timeout": DEADLINE,
                "trainer.deadline": DEADLINE, "trainer.total_training_steps": 2, "reward.on_error": "stop"}
        p = subprocess.Popen([VERLC, *map(str, s.ppo(f"stopped_{name}", **keys))], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True, env=ENV)
        calls = s.dir / name
        waited(lambda: p.poll() is not None or calls.exists() and calls.stat().st_size >= 3)  # noqa: B023
        runs[name] = p, [pid for pid in (p.pid, *helpers(p.pid)) if reached(pid, signal.SIGSTOP)]
    return runs


def check_stopped(runs, since, test):
    time.sleep(max(0, since + 3 * DEADLINE - time.monotonic()))
    for name, (p, whole) in runs.items():
        for pid in whole:
            os.kill(pid, signal.SIGCONT)
        _, err = p.communicate(timeout=300)
        test(f"{name}: stopped for three times every deadline, the run goes on to its end",
             p.returncode == 0 and "timeout" not in err and len(whole) > 1, f"exit {p.returncode}: {err[-400:]}")


def helpers(pid):
    """All that descends from pid."""
    below = [int(c) for t in pathlib.Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()]
    return below + [x for c in below for x in helpers(c)]


def check_hangup(s, test):
    """Calls from the 20th on, in the third step, wait for the hangup."""
    slow, calls, go = s.dir / "slow.py", s.dir / "slow.calls", s.dir / "slow.go"
    slow.write_text("import os, time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                    f"    open({str(calls)!r}, 'a').write('.')\n"
                    f"    while os.path.getsize({str(calls)!r}) >= 20 and not os.path.exists({str(go)!r}):\n"
                    "        time.sleep(0.01)\n"
                    "    return float(len(solution_str) % 2)\n")
    go.touch()
    keys = {"reward.custom_reward_function.path": slow, "reward.num_workers": 1, "trainer.save_freq": 6,
            "reward.trial_call": False}
    run(*s.ppo("whole", **keys))
    want = state(s.dir / "whole", 6)

    def until(n):
        waited(lambda: p.poll() is not None or calls.exists() and calls.stat().st_size >= n)

    go.unlink()
    calls.unlink()
    here, there = pty.openpty()
    p = subprocess.Popen([VERLC, *map(str, s.ppo("hangup", **keys))], stdin=there, stdout=there, stderr=there, env=ENV,
                         start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(there)
    os.set_blocking(here, False)
    until(20)
    os.close(here)  # the terminal goes: SIGHUP, and no more writing
    p.send_signal(signal.SIGHUP)  # a second one, from the shell
    p.wait(300)
    go.touch()
    saved = [f.name for f in (s.dir / "hangup").glob("global_step_*")]
    test("a closed terminal: exit 129, the last whole step is saved", p.returncode == 129 and saved == ["global_step_2"],
         f"{p.returncode} {saved}")
    run(*s.ppo("hangup", **keys))
    test("a closed terminal: resumed to the same bits", state(s.dir / "hangup", 6) == want)

    calls.unlink()
    p = subprocess.Popen(["nohup", VERLC, *map(str, s.ppo("nohup", **keys))], stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    until(12)
    p.send_signal(signal.SIGHUP)
    p.wait(300)
    test("nohup: SIGHUP is ignored", p.returncode == 0 and state(s.dir / "nohup", 6) == want, str(p.returncode))


def check_closed(s, test):
    """Descriptors 0 to 2 may be closed at the start: no file or socket of ours takes their numbers."""
    want = state(s.dir / "whole", 6)
    for closed in ("2>&-", "0<&- 1>&- 2>&-"):
        name = "closed_" + "".join(c for c in closed if c.isdigit())
        words = subprocess.list2cmdline([VERLC, *map(str, s.ppo(name, **{
            "reward.custom_reward_function.path": s.dir / "slow.py", "reward.num_workers": 1, "trainer.save_freq": 6,
            "trainer.deadline": 10}))])
        p = subprocess.run(["bash", "-c", f"exec {words} {closed}"], capture_output=True, text=True, env=ENV, timeout=100)
        test(f"started with {closed}: runs to its end", p.returncode == 0 and state(s.dir / name, 6) == want,
             f"exit {p.returncode}: {p.stderr[-300:]}")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        runs, since = stop(s), time.monotonic()
        check_nothing_left(s, test)
        check_timeout(s, test)
        check_memory_order(s, test)
        check_hangup(s, test)
        check_closed(s, test)
        check_stopped(runs, since, test)
    test.end()


main()
