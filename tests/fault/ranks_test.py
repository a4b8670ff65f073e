"""Worker processes: `verlc netcheck` measures 2 to 4 ranks, by hand and as srun, mpirun and torchrun start them, on two
machines too (network namespaces). A worker or the controller that is killed or stopped at any moment, or a rank that fails, ends
all of them within 10 s; the rank is named, and no process or file is left. The same of `verlc ppo` in each of its stages and
while it writes a checkpoint, of `sft`, one step off and `generate`, and trainer.max_restarts. mpirun and torchrun are the real
ones where they are installed; without them, their environments."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, patience, run, state, waited  # noqa: E402

MARK = f"VERLC_TEST_MARK={os.getpid()}"
BASE = {**{k: v for k, v in ENV.items() if not k.startswith(("SLURM", "OMPI", "PMI"))}, **dict([MARK.split("=")])}
WITHIN = 10.0
t = Tests()
random.seed(7)


def alive(what=b""):
    """Our processes whose command line has `what`, by their environment."""
    found = []
    for d in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (d / "environ").read_bytes().split(b"\0") and what in (d / "cmdline").read_bytes() and \
                    (d / "stat").read_text().rsplit(") ")[1][0] != "Z":
                found.append(int(d.name))
        except OSError:
            pass
    return found


def gone(start):
    """Seconds until all were; of them those that a busy machine adds are not the program's."""
    waited(lambda: not alive(), patience(WITHIN + 5))
    return (time.time() - start) / patience(1)


def start(*args, env=(), before=(), cwd=None):
    return subprocess.Popen([*before, VERLC, "netcheck", *args], env={**BASE, **dict(env)}, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=cwd)


def workers():
    """Not their reapers, which have the same command line as they start."""
    found = []
    for pid in alive(b"\0worker\0"):
        try:
            parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
            if pathlib.Path(f"/proc/{parent}/comm").read_text().strip() == "helper-reaper":
                found.append(pid)
        except OSError:
            pass
    return found


def wait_for_workers(n):
    waited(lambda: len(workers()) >= n)
    return workers()


def measured(name, text, ranks):
    r = json.loads(text or "{}")
    pairs = [[a, b] for a in range(ranks) for b in range(a + 1, ranks)]
    t(name, [[x["a"], x["b"]] for x in r.get("links", [])] == pairs and len(r["ranks"]) == ranks and
      all(x["latency_s"] > 0 and all(v > 0 for v in x["a_to_b"] + x["b_to_a"] if v is not None) for x in r["links"]) and
      {x["operation"] for x in r["operations"]} ==
      {"barrier", "broadcast", "gather", "all_gather", "exchange", "call", "result"}, text[-500:])


def by_hand():
    for n in (1, 2, 4):
        p = start("--ranks", str(n), "--seconds", "0.005", "--json")
        out, err = p.communicate(timeout=120)
        t(f"{n} ranks end well", p.returncode == 0 and err == "", err)
        measured(f"{n} ranks", out, n)
    p = start("--ranks", "3", "--seconds", "0.005", "--device", "cpu")
    out, err = p.communicate(timeout=120)
    t("the table", p.returncode == 0 and re.search(r"^0 - 2 .*one host", out, re.M) is not None and
      re.search(r"^devices +cpu: ", out, re.M) is not None and re.search(r"^fold( +[0-9.]+){3}$", out, re.M) is not None, out + err)
    p = start("--ranks", "2", "--seconds", "0.005", "--device", "cpu", "--json")
    out, err = p.communicate(timeout=120)
    devices = json.loads(out or "{}").get("devices", [])
    t("what an update moves", len(devices) == 3 and all(x["fold_s"] > 0 and x["all_gather_s"] > 0 for x in devices), out + err)
    p = start("--ranks", "2", "--device", "gpu")
    out, err = p.communicate(timeout=120)
    t("an unknown device is refused", p.returncode == 2 and "--device gpu" in err, out + err)
    t("nothing is left", not alive(), str(alive()))


LAUNCHERS = {
    "torchrun": lambda r, n: {"RANK": r, "WORLD_SIZE": n, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": 0,
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "x"},
    "mpirun": lambda r, n: {"OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": n, "OMPI_COMM_WORLD_LOCAL_RANK": r,
                            "OMPI_COMM_WORLD_LOCAL_SIZE": n, "PMIX_RANK": r, "PMIX_NAMESPACE": "n1"},
    "srun": lambda r, n: {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": r, "SLURM_NTASKS": n, "SLURM_LOCALID": r,
                          "SLURM_NODEID": 0, "SLURM_STEP_TASKS_PER_NODE": n},
}


def launch(launcher, n, *args, d, hosts=None, but=None):
    """One process a rank, in any order, but none of rank `but`; hosts: for each rank the command that enters its machine."""
    found = {}
    for r in random.sample([r for r in range(n) if r != but], n - (but is not None)):
        env = {k: str(v) for k, v in LAUNCHERS[launcher](r, n).items()}
        if hosts and launcher == "srun":
            env.update({"SLURM_LOCALID": "0", "SLURM_NODEID": str(r), "SLURM_STEP_TASKS_PER_NODE": f"1(x{n})"})
        if hosts and launcher == "torchrun":
            env.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(r)})
        if hosts and launcher == "mpirun":
            env.update({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
        found[r] = start("--dir", str(d), *args, env=env, before=hosts[r] if hosts else ())
    return [found[r] for r in sorted(found)]


def launched(d):
    for name in LAUNCHERS:
        ps = launch(name, 3, "--seconds", "0.005", "--json", d=d)
        outs = [p.communicate(timeout=120) for p in ps]
        t(f"{name} ends well", all(p.returncode == 0 for p in ps), str(outs)[-800:])
        measured(f"{name}: 3 ranks", outs[0][0], 3)
        t(f"{name}: no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))
    p = start(env={"RANK": "1", "WORLD_SIZE": "two", "MASTER_ADDR": "a"})
    t.refused("a broken environment", subprocess.CompletedProcess([], p.wait(), None, p.stderr.read()), 2, "WORLD_SIZE='two'")
    p = launch("srun", 3, "--wait", "3", d=d, but=2)
    out = p[0].communicate(timeout=300)[1]
    t("who has not joined is named", p[0].returncode == 6 and "rank 2" in out, out)
    end = gone(time.time())
    t("and all end", end < WITHIN, f"{end:.1f} s")
    t("no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))


def faults(d):
    """At random moments from the first worker's start on; one is stopped before it can have joined."""
    for k in range(8):
        p = start("--ranks", "3", "--seconds", "2")
        victim = random.choice(wait_for_workers(3))
        moment = 0 if k == 4 else random.uniform(0, 1.5) if k % 2 else random.uniform(0, 0.1)
        time.sleep(moment)
        begin = time.time()
        if k == 0:
            p.kill()
        elif k == 1:
            p.terminate()
        else:
            os.kill(victim, signal.SIGSTOP if k in (3, 4) else signal.SIGKILL)
        ended = {0: "the controller killed", 1: "the controller ended", 3: "a worker stopped", 4: "a worker stopped"}
        what = ended.get(k, "a worker killed")
        what += f" after {moment:.2f} s"
        try:
            out, err = p.communicate(timeout=patience(40))
        except subprocess.TimeoutExpired:
            out = err = "the controller hangs"
        end = gone(begin)
        t(f"{what}: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}")
        if k > 1:
            t(f"{what}: the rank is named", p.returncode == 1 and re.search(r"error: .*rank [012]\b", err) is not None,
              f"{p.returncode}: {err}")
    ps = launch("mpirun", 3, "--seconds", "2", d=d)
    wait_for_workers(1)
    time.sleep(patience(1))  # all have joined
    begin = time.time()
    ps[2].kill()
    err = ps[0].communicate(timeout=300)[1]
    end = gone(begin)
    t("a launched rank killed: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}")
    t("a launched rank killed: it is named", ps[0].returncode == 1 and "rank 2 (host" in err, err)
    for moment in (0, 0.02, 0.5):
        ps = launch("srun", 3, "--seconds", "2", "--wait", "4", d=d)
        wait_for_workers(1)
        time.sleep(moment)
        begin = time.time()
        ps[0].kill()
        end = gone(begin)
        t(f"a launched controller killed after {moment} s: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}")
        for p in ps:
            p.communicate()
        t("no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))


# ---- verlc ppo ----

STAGES = {"generation": ("generate", "generate_begin", "generate_end"), "passes": ("forward",), "updates": ("update",)}


class Run:
    """A run on ranks that goes on until something ends it."""

    def __init__(self, s, name="", steps=100000, line=None, **keys):
        self.dir = s.dir / name
        keys = {"trainer__ranks": 2, **keys}
        line = line or s.ppo(name, trainer__device=keys.pop("trainer__device", "cpu"), trainer__total_training_steps=steps, **keys)
        self.err = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop the run
        self.p = subprocess.Popen([VERLC, *map(str, line)], env=BASE, stdout=subprocess.DEVNULL, stderr=self.err, text=True)

    def steps(self):
        f = self.dir / "metrics.jsonl"
        return f.read_text().count("\n") if f.exists() else 0

    def wait_steps(self, n):
        waited(lambda: self.p.poll() is not None or self.steps() >= n)

    def rank(self, r):
        """The pid of a rank's process."""
        for pid in workers():
            try:
                if f"VERLC_RANK={r}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
            except OSError:
                pass
        return None

    def kill_rank(self, r, but=None):
        """Kills a rank's process, another one than `but`: its pid."""
        end = time.time() + 60
        while self.p.poll() is None and time.time() < end:
            pid = self.rank(r)
            if pid not in (None, but):
                try:
                    os.kill(pid, signal.SIGKILL)
                    return pid
                except ProcessLookupError:  # it has ended meanwhile
                    pass
            time.sleep(0.01)
        return None

    def end(self, seconds=40):
        try:
            self.p.wait(patience(seconds))
        except subprocess.TimeoutExpired:
            self.p.kill()
        self.err.seek(0)
        return self.err.read()


def strike(s, name, what, r=1, line=None, **keys):
    """One rank is struck at a random moment after the first step: (seconds until all were gone, exit status, its errors)"""
    run_ = Run(s, name, line=line, **keys)
    run_.wait_steps(1)
    time.sleep(random.uniform(0, 0.3))
    begin = time.time()
    what(run_.rank(r))
    err = run_.end()
    return gone(begin), run_.p.returncode, err, list(run_.dir.glob(".rendezvous"))


def ppo_faults(s):
    left, tries = dict(STAGES), 0
    keys = {"trainer__force_old_log_prob": True, "actor_rollout_ref__actor__ppo_mini_batch_size": 4}  # passes take longer
    while left and tries < 200:
        seconds, code, err, files = strike(s, f"kill{tries}", lambda pid: os.kill(pid, signal.SIGKILL), **keys)
        named = re.search(r"error: rank 1 \(host .*?\), in (\w+) for", err)
        t(f"ppo: a rank killed: it is named, all are gone ({seconds:.1f} s), no file is left",
                seconds < WITHIN and code == 1 and named and not files, f"{code}: {err[-600:]} {files} {alive()}")
        left = {k: v for k, v in left.items() if not named or named[1] not in v}
        tries += 1
    t(f"ppo: ranks killed in each stage ({tries} runs)", not left, f"not in {list(left)}")
    seconds, code, err, files = strike(s, "stopped", lambda pid: os.kill(pid, signal.SIGSTOP))
    t("ppo: a rank stopped: it is named, all are gone", seconds < WITHIN and code == 1 and
      re.search(r"error: rank 1 \(host .*: no heartbeat for", err) and not files, f"{seconds:.1f} s, {code}: {err[-600:]} {files}")
    full = ["prlimit", "--fsize=100000", "--pid"]
    seconds, code, err, files = strike(s, "full", lambda pid: subprocess.run([*full, str(pid)], check=True), r=0,
                                       trainer__save_freq=1)
    t("ppo: a rank that cannot write: its error is the run's", seconds < WITHIN and code != 0 and
      re.search(r"error: rank 0 \(host .*?global_step_\d", err) and not files, f"{seconds:.1f} s, {code}: {err[-600:]} {files}")


def restarts(s):
    """Killed twice, once before any checkpoint; the third rank is left out when it is lost twice at one place. A kill has twelve
    steps to come in, so a machine under load changes nothing."""
    keys = {"trainer__save_freq": 12, "trainer__ranks": 3}
    run(*s.ppo("whole", trainer__device="cpu", trainer__total_training_steps=24, **keys))
    again = Run(s, "again", 24, trainer__max_restarts=3, trainer__resume_mode="disable", **keys)
    for at in (1, 13):
        again.wait_steps(at)
        waited(lambda: at == 1 or (again.dir / "global_step_12").exists())  # noqa: B023
        before, last = again.rank(0), again.kill_rank(2)
        waited(lambda: again.rank(0) not in (None, before) and again.rank(2))  # noqa: B023
    again.kill_rank(2, last)
    err = again.end(120)
    said = re.findall(r"warning: (rank 2 .*) restart (\d) of 3 .*?, from (.*?) on (\d) ranks", err)
    t("trainer.max_restarts: one line each", [x[1] for x in said] == ["1", "2", "3"] and said[0][2] == "the beginning" and
      said[1][2] == said[2][2] == "step 12" and said[2][3] == "2", f"{said} {err[-1500:]}")
    t("trainer.max_restarts: the bits of an unbroken run", again.p.returncode == 0 and again.steps() == 24 and
      state(again.dir, 24) == state(s.dir / "whole", 24), f"{again.p.returncode} {err[-800:]}")
    once = Run(s, "once", trainer__max_restarts=1, trainer__device="auto")
    last = None
    for _ in range(2):
        once.wait_steps(1)
        last = once.kill_rank(1, last)
    err = once.end()
    t("trainer.max_restarts: the line has the reason", re.search(r"^warning: rank 1 .* restart 1 of 1 ", err, re.M), err[-1500:])
    t("trainer.max_restarts: no more than that", once.p.returncode == 1 and "restart 1 of 1" in err and
      re.search(r"error: rank 1 ", err), f"{once.p.returncode} {err[-800:]}")


def generate(s):
    """The last rank is killed while it samples: the file of one process, on the same ranks and, lost twice, on those left."""
    args = {"model.path": s.dir / "model", "data.path": s.dir / "train.jsonl", "data.n_samples": 2, "rollout.ignore_eos": True,
            "rollout.response_length": 500, "rollout.prompt_length": 64, "trainer.device": "cpu"}
    line = ["generate", *[f"{k}={v}" for k, v in args.items()]]
    run(*line, f"data.output_path={s.dir / 'whole.jsonl'}")
    for kills in (1, 2):
        out = s.dir / f"killed{kills}.jsonl"
        p = Run(s, line=[*line, f"data.output_path={out}", "trainer.ranks=3", "trainer.max_restarts=2"])
        lost = [None]
        while len(lost) <= kills and p.p.poll() is None:
            waited(lambda: p.rank(2) not in lost or p.p.poll() is not None)  # noqa: B023
            time.sleep(random.uniform(0.2, 0.5))
            lost.append(p.rank(2))
            if lost[-1]:
                os.kill(lost[-1], signal.SIGKILL)
        err = p.end(120)
        said = re.findall(r"warning: (rank 2 .*) restart (\d) of 2 .*?, from the beginning on (\d) ranks", err)
        t(f"generate: killed {kills} times, restarted", [x[1:] for x in said] == [("1", "3"), ("2", "2")][:kills],
          f"{said} {err[-800:]}")
        t("generate: the file of one process", p.p.returncode == 0 and out.read_bytes() == (s.dir / "whole.jsonl").read_bytes(),
          f"{p.p.returncode} {err[-800:]}")


def sft(s, d, ranks, steps):
    rows = [{"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}]} for i in range(8)]
    args = {"model.path": s.dir / "model", "data.train_files": s.write("chats.jsonl", rows), "data.train_batch_size": 4,
            "data.max_length": 64, "data.max_token_len_per_gpu": 256, "optim.lr": 1e-3, "trainer.total_training_steps": steps,
            "trainer.total_epochs": steps, "trainer.device": "cpu", "trainer.logger": "[console,file]", "trainer.save_freq": 2,
            "trainer.default_local_dir": s.dir / d, "trainer.ranks": ranks}
    return ["sft", *[f"{k}={v}" for k, v in args.items()]]


def one_step_off(s, d, ranks, steps):
    keys = {"trainer.total_training_steps": steps, "trainer.save_freq": 2, "trainer.device": "cpu", "trainer.ranks": ranks,
            "actor_rollout_ref.hybrid_engine": False, "actor_rollout_ref.actor.use_kl_loss": False, "rollout.nnodes": 1,
            "rollout.n_gpus_per_node": 2}
    args = s.ppo(d, **keys)
    return [args[0], "--config-name=one_step_off_ppo_trainer", *args[1:]]


def programs(s):
    """A rank of other programs and schedules killed; the same command goes on to the bits of an unbroken run on one rank."""
    steps = 40
    for name, line in (("sft", sft), ("one_step_off", one_step_off)):
        run(*line(s, f"{name}_whole", 1, steps))
        seconds, code, err, files = strike(s, name, lambda pid: os.kill(pid, signal.SIGKILL), line=line(s, name, 2, steps))
        t(f"{name}: a rank killed: it is named, all are gone", seconds < WITHIN and code == 1 and
          re.search(r"error: rank 1 \(host .*?\), in \w+ for", err) and not files, f"{seconds:.1f} s, {code}: {err[-600:]} {files}")
        run(*line(s, name, 2, steps))
        t(f"{name}: resumed, the bits of an unbroken run on one rank",
          state(s.dir / name, steps) == state(s.dir / f"{name}_whole", steps))


def killed_writing(s):
    """Rank 0, which writes the checkpoints, is killed while it does: the one before it is there, and a run goes on from it."""
    keys = {"trainer__save_freq": 1, "trainer__device": "cpu", "trainer__total_training_steps": 12}
    run(*s.ppo("writing_whole", **keys))
    left = []
    for tries in range(60):
        d = f"writing{tries}"
        p = Run(s, d, 12, trainer__save_freq=1)
        waited(lambda: p.p.poll() is not None or (p.dir / "global_step_1").exists())  # noqa: B023
        pid = p.rank(0)
        while p.p.poll() is None and not any(f.name.endswith(".tmp") for f in os.scandir(p.dir) if f.name.startswith("global_")):
            time.sleep(0.0002)  # to spin would take the time of those who write
        begin = time.time()
        try:
            os.kill(pid, signal.SIGKILL)
        except (TypeError, ProcessLookupError):
            pass  # it has ended meanwhile
        err = p.end()
        if p.p.returncode == 0:
            continue
        seconds = gone(begin)
        t(f"ppo: rank 0 killed as it writes: it is named, all are gone ({seconds:.1f} s)", seconds < WITHIN and
          p.p.returncode == 1 and re.search(r"error: rank 0 \(host", err), f"{p.p.returncode}: {err[-600:]} {alive()}")
        left = list(p.dir.glob("global_step_*.tmp"))
        if left and list(left[0].glob("*/*.safetensors")):
            break
    t(f"ppo: rank 0 killed with files half written ({tries + 1} runs)", left and not (left[0] / "manifest.json").exists(), left)
    run(*s.ppo(d, trainer__ranks=2, **keys))
    t("ppo: resumed, the bits of an unbroken run, and nothing half written", not list(p.dir.glob("*.tmp")) and
      state(p.dir, 12) == state(s.dir / "writing_whole", 12))


def ppo():
    with Scratch(small=True) as s:
        ppo_faults(s)
        killed_writing(s)


def others():
    with Scratch(small=True) as s:
        restarts(s)
        programs(s)
        generate(s)
        real_launchers(s)


def real_launchers(s):
    commands = {
        "mpirun of Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
        "mpirun of MPICH": ["mpirun.mpich", "-n", "2"],
        "torchrun": ["torchrun", "--no-python", "--nproc-per-node", "2"],
    }
    found = {name: c for name, c in commands.items() if shutil.which(c[0])}
    if found:
        run(*s.ppo("one", trainer__total_training_steps=2, trainer__device="cpu"))
    for name, command in found.items():
        d = name.replace(" ", "_")
        line = s.ppo(d, trainer__total_training_steps=2, trainer__device="cpu")
        p = subprocess.run([*command, VERLC, *map(str, line)], env=BASE, capture_output=True, text=True, timeout=120)
        t(f"{name}: the bits of one rank", p.returncode == 0 and state(s.dir / d, 2) == state(s.dir / "one", 2), p.stderr[-800:])
    print("real launchers:", ", ".join(found) or "none is installed")


NAMESPACES = """
ip link set lo up && ip link add va type veth peer name vb && hostname machine-a
unshare -nu sleep 300 & other=$!
for i in $(seq 300); do
    [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.1
done
ip link set vb netns $other && ip addr add 10.93.0.1/24 dev va && ip link set va up
enter="nsenter --net=/proc/$other/ns/net --uts=/proc/$other/ns/uts"
$enter sh -c 'ip link set lo up; ip addr add 10.93.0.2/24 dev vb; ip link set vb up; hostname machine-b'
"$@" $other; status=$?
kill $other
exit $status
"""


def cut(d, enter):
    """Several groups at once, since a system takes longer to give a connection up where bytes are on their way just then."""
    dirs = [d / str(k) for k in range(6)]
    groups = []
    for one in dirs:
        one.mkdir()
        groups.append(launch("srun", 2, "--seconds", "10", d=one, hosts=[(), enter]))
    seen = set()

    def joined(one):  # the file is there until all ranks have joined
        there = (one / ".rendezvous").exists()
        seen.update([one] if there else [])
        return one in seen and not there

    t("groups on two machines", waited(lambda: all([joined(one) for one in dirs])), str(seen))
    time.sleep(0.2)
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    begin = time.time()
    end = gone(begin)
    t("the network is cut: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}, {[[p.poll() for p in ps] for ps in groups]}")
    for ps in groups:
        ps[1].kill()
        err = ps[0].communicate(timeout=60)[1]
        t("the network is cut: the rank is named", "rank 1 (host machine-b" in err, err)
        ps[1].communicate()
    t("no file is left", [list(one.iterdir()) for one in dirs] == [[]] * len(dirs), [list(one.iterdir()) for one in dirs])


def machines(other):
    enter = ["nsenter", f"--net=/proc/{other}/ns/net", f"--uts=/proc/{other}/ns/uts"]
    d = pathlib.Path(tempfile.mkdtemp(prefix="verlc-test-"))
    for name in LAUNCHERS:
        ps = launch(name, 2, "--seconds", "0.005", "--json", d=d, hosts=[(), enter])
        outs = [p.communicate(timeout=120) for p in ps]
        t(f"two machines, {name}", all(p.returncode == 0 for p in ps), str(outs)[-800:])
        measured(f"two machines, {name}: the link", outs[0][0], 2)
        r = json.loads(outs[0][0] or '{"links": [{}], "ranks": []}')
        t(f"two machines, {name}: hosts", r["links"][0].get("same_host") is False and "machine-b" in str(r["ranks"]),
          str(r)[:400])
    cut(d, enter)
    shutil.rmtree(d)
    t.end()


def groups():
    d = pathlib.Path(tempfile.mkdtemp(prefix="verlc-test-"))
    by_hand()
    launched(d)
    faults(d)
    shutil.rmtree(d)


def two_machines():
    try_it = ["unshare", "-Urnu", "sh", "-c", "ip link add va type veth peer name vb"]
    if subprocess.run(try_it, capture_output=True).returncode != 0:
        print("skipped: this system lets no test make network namespaces")
        sys.exit(0)
    p = subprocess.run(["unshare", "-Urnu", "sh", "-c", NAMESPACES, "sh", sys.executable, __file__, "--machines"])
    t("two machines", p.returncode == 0)


PARTS = {f.__name__: f for f in (groups, ppo, others, two_machines)}


def main():
    """The parts at once, each a process with processes of its own: most of their time is spent in waiting for others."""
    if len(sys.argv) == 3 and sys.argv[1] == "--machines":
        return machines(sys.argv[2])
    if len(sys.argv) == 2:
        PARTS[sys.argv[1]]()
        return t.end()
    with tempfile.TemporaryDirectory(prefix="verlc-test-") as logs:
        ps = {}
        for name in PARTS:
            with open(f"{logs}/{name}", "w") as out:
                ps[name] = subprocess.Popen([sys.executable, __file__, name], stdout=out, stderr=out)
        for name, p in ps.items():
            status = p.wait()
            print(f"---- {name}\n" + pathlib.Path(f"{logs}/{name}").read_text(), end="")
            t(name, status == 0)
    t.end()


main()
