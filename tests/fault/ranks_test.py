"""Worker processes: `verlc netcheck` measures 2 to 4 ranks, by hand and as srun, mpirun and torchrun start them, on two
machines too (network namespaces). A worker or the controller that is killed or stopped at any moment ends all of them within
10 s; the rank is named, and no process or file is left."""

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
from verlc_test import ENV, VERLC, Tests  # noqa: E402

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
    while alive() and time.time() - start < WITHIN + 5:
        time.sleep(0.05)
    return time.time() - start


def start(*args, env=(), before=(), cwd=None):
    return subprocess.Popen([*before, VERLC, "netcheck", *args], env={**BASE, **dict(env)}, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=cwd)


def workers():
    return alive(b"\0worker\0")


def wait_for_workers(n, seconds=30):
    end = time.time() + seconds
    while len(workers()) < n and time.time() < end:
        time.sleep(0.01)
    return workers()


def measured(name, text, ranks):
    r = json.loads(text or "{}")
    pairs = [[a, b] for a in range(ranks) for b in range(a + 1, ranks)]
    t(name, [[x["a"], x["b"]] for x in r.get("links", [])] == pairs and len(r["ranks"]) == ranks and
      all(x["latency_s"] > 0 and all(v > 0 for v in x["a_to_b"] + x["b_to_a"] if v is not None) for x in r["links"]) and
      {x["operation"] for x in r["operations"]} == {"barrier", "broadcast", "gather", "all_gather", "exchange"}, text[-500:])


def by_hand():
    for n in (1, 2, 4):
        p = start("--ranks", str(n), "--seconds", "0.005", "--json")
        out, err = p.communicate(timeout=120)
        t(f"{n} ranks end well", p.returncode == 0 and err == "", err)
        measured(f"{n} ranks", out, n)
    p = start("--ranks", "3", "--seconds", "0.005")
    out, err = p.communicate(timeout=120)
    t("the table", p.returncode == 0 and re.search(r"^0 - 2 .*one host", out, re.M) is not None and
      "links between GPUs are not" in out, out + err)
    t("nothing is left", not alive(), str(alive()))


LAUNCHERS = {
    "torchrun": lambda r, n: {"RANK": r, "WORLD_SIZE": n, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": n, "GROUP_RANK": 0,
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "x"},
    "mpirun": lambda r, n: {"OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": n, "OMPI_COMM_WORLD_LOCAL_RANK": r,
                            "OMPI_COMM_WORLD_LOCAL_SIZE": n, "PMIX_RANK": r, "PMIX_NAMESPACE": "n1"},
    "srun": lambda r, n: {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": r, "SLURM_NTASKS": n, "SLURM_LOCALID": r,
                          "SLURM_NODEID": 0, "SLURM_STEP_TASKS_PER_NODE": n},
}


def launch(launcher, n, *args, d, hosts=None):
    """One process a rank, in any order; hosts: for each rank the command that enters its machine."""
    found = {}
    for r in random.sample(range(n), n):
        env = {k: str(v) for k, v in LAUNCHERS[launcher](r, n).items()}
        if hosts and launcher == "srun":
            env.update({"SLURM_LOCALID": "0", "SLURM_NODEID": str(r), "SLURM_STEP_TASKS_PER_NODE": f"1(x{n})"})
        if hosts and launcher == "torchrun":
            env.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(r)})
        if hosts and launcher == "mpirun":
            env.update({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
        found[r] = start("--dir", str(d), *args, env=env, before=hosts[r] if hosts else ())
    return [found[r] for r in range(n)]


def launched(d):
    for name in LAUNCHERS:
        ps = launch(name, 3, "--seconds", "0.005", "--json", d=d)
        outs = [p.communicate(timeout=120) for p in ps]
        t(f"{name} ends well", all(p.returncode == 0 for p in ps), str(outs)[-800:])
        measured(f"{name}: 3 ranks", outs[0][0], 3)
        t(f"{name}: no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))
    p = start(env={"RANK": "1", "WORLD_SIZE": "two", "MASTER_ADDR": "a"})
    t.refused("a broken environment", subprocess.CompletedProcess([], p.wait(), None, p.stderr.read()), 2, "WORLD_SIZE='two'")
    p = launch("srun", 3, "--wait", "2", d=d)
    p[2].kill()
    out = p[0].communicate(timeout=60)[1]
    t("who has not joined is named", p[0].returncode == 6 and "rank 2" in out, out)
    end = gone(time.time())
    t("and all end", end < WITHIN, f"{end:.1f} s")
    t("no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))


def faults(d):
    """At random moments from the first worker's start on."""
    for k in range(8):
        p = start("--ranks", "3", "--seconds", "2")
        victim = random.choice(wait_for_workers(3))
        moment = random.uniform(0, 1.5) if k % 2 else random.uniform(0, 0.1)
        time.sleep(moment)
        begin = time.time()
        if k == 0:
            p.kill()
        elif k == 1:
            p.terminate()
        else:
            os.kill(victim, signal.SIGSTOP if k == 3 else signal.SIGKILL)
        what = {0: "the controller killed", 1: "the controller ended", 3: "a worker stopped"}.get(k, "a worker killed")
        what += f" after {moment:.2f} s"
        try:
            out, err = p.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            out = err = "the controller hangs"
        end = gone(begin)
        t(f"{what}: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}")
        if k > 1:
            t(f"{what}: the rank is named", p.returncode == 1 and re.search(r"error: .*rank [012]\b", err) is not None,
              f"{p.returncode}: {err}")
    ps = launch("mpirun", 3, "--seconds", "2", d=d)
    wait_for_workers(1)
    time.sleep(1)
    begin = time.time()
    ps[2].kill()
    err = ps[0].communicate(timeout=40)[1]
    end = gone(begin)
    t("a launched rank killed: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}")
    t("a launched rank killed: it is named", ps[0].returncode == 1 and "rank 2 (host" in err, err)
    for moment in (0, 0.02, 0.5):
        ps = launch("srun", 3, "--seconds", "2", "--wait", "8", d=d)
        wait_for_workers(1)
        time.sleep(moment)
        begin = time.time()
        ps[0].kill()
        end = gone(begin)
        t(f"a launched controller killed after {moment} s: all are gone", end < WITHIN, f"{end:.1f} s, left {alive()}")
        for p in ps:
            p.communicate()
        t("no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))


NAMESPACES = """
ip link set lo up && ip link add va type veth peer name vb && hostname machine-a
unshare -nu sleep 300 & other=$!
for i in 1 2 3 4 5 6 7 8 9 10; do
    sleep 0.1
    [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
done
ip link set vb netns $other && ip addr add 10.93.0.1/24 dev va && ip link set va up
enter="nsenter --net=/proc/$other/ns/net --uts=/proc/$other/ns/uts"
$enter sh -c 'ip link set lo up; ip addr add 10.93.0.2/24 dev vb; ip link set vb up; hostname machine-b'
"$@" $other; status=$?
kill $other
exit $status
"""


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
    ps = launch("srun", 2, "--seconds", "2", d=d, hosts=[(), enter])
    wait_for_workers(1)
    time.sleep(1)
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    begin = time.time()
    err = ps[0].communicate(timeout=60)[1]
    end = gone(begin)
    t("the network is cut: all are gone", end < 2 * WITHIN, f"{end:.1f} s, left {alive()}, {ps[1].poll()}")
    ps[1].kill()
    t("the network is cut: the rank is named", "rank 1 (host machine-b" in err, err)
    t("no file is left", list(d.iterdir()) == [], str(list(d.iterdir())))
    shutil.rmtree(d)
    t.end()


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--machines":
        return machines(sys.argv[2])
    d = pathlib.Path(tempfile.mkdtemp(prefix="verlc-test-"))
    by_hand()
    launched(d)
    faults(d)
    shutil.rmtree(d)
    try_it = ["unshare", "-Urnu", "sh", "-c", "ip link add va type veth peer name vb"]
    if subprocess.run(try_it, capture_output=True).returncode == 0:
        p = subprocess.run(["unshare", "-Urnu", "sh", "-c", NAMESPACES, "sh", sys.executable, __file__, "--machines"])
        t("two machines", p.returncode == 0)
    else:
        print("skipped: this system lets no test make network namespaces")
    t.end()


main()
