"""Ranks of a run on a real Ray of two nodes: the bits of one rank under verl's own command line, `ray job submit -- verlc ppo` and
`ray symmetric-run`; a rank that is killed, and a cluster that is too small. Run by scripts/oracle.sh ray, in .venv-ray.

  VERLC=build/release/verlc python tools/oracle_ray_ranks.py
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from oracle_ray import VERLC, Cluster, Scratch, Tests, free_port, state  # noqa: E402

STEPS = 3


def keys(s, run_dir, **more):
    return s.ppo(run_dir, trainer__total_training_steps=STEPS, trainer__device="cpu",
                 actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=1, **more)


def workers():
    """Worker processes of this program, by rank."""
    found = {}
    for d in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (d / "cmdline").read_bytes().split(b"\0")
            env = (d / "environ").read_bytes().split(b"\0")
            if words[:2] == [VERLC.encode(), b"worker"]:
                found.update({int(e.split(b"=")[1]): int(d.name) for e in env if e.startswith(b"VERLC_RANK=")})
        except (OSError, IndexError):
            pass
    return found


def check_launchers(test, cluster, s):
    subprocess.run([VERLC, *map(str, keys(s, "one"))], check=True, capture_output=True, env=cluster.env)
    one = state(s.dir / "one", STEPS)
    several = {"trainer__ranks": 4, "trainer__nnodes": 2}
    env_vars = json.dumps({"env_vars": {"PATH": cluster.env["PATH"]}})
    submit = [str(cluster.bin / "ray"), "job", "submit", "--address", cluster.address, "--runtime-env-json", env_vars, "--"]
    commands = {
        "verl's command line under ray job submit":
            [VERLC, "exec", "ray", "job", "submit", "--address", cluster.address, "--", "python3", "-m", "verl.trainer.main_ppo",
             *keys(s, "verls", **several)[1:]],
        "ray job submit -- verlc ppo": [*submit, VERLC, *keys(s, "job", **several)],
        "beside a cluster": [VERLC, *keys(s, "beside", **several)],
    }
    for name, command in commands.items():
        env = {**cluster.env, **({"RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"} if name == "beside a cluster" else {})}
        p = subprocess.run([str(c) for c in command], env=env, cwd=cluster.dir, capture_output=True, text=True, timeout=300)
        run_dir = s.dir / {"v": "verls", "r": "job", "b": "beside"}[name[0]]
        test(f"{name}: 4 ranks on 2 nodes, the bits of one", p.returncode == 0 and state(run_dir, STEPS) == one,
             p.stdout[-1500:] + p.stderr[-1500:])
        test(f"{name}: no worker is left", not workers(), str(workers()))


def check_symmetric_run(test, cluster, s):
    command = [cluster.bin / "ray", "symmetric-run", "--address", f"127.0.0.1:{free_port()}", "--min-nodes", "1", "--num-cpus", "2",
               "--", VERLC, *keys(s, "symmetric", trainer__ranks=2, trainer__nnodes=2)]
    p = subprocess.run([str(c) for c in command], env=cluster.env, cwd=s.dir, capture_output=True, text=True, timeout=300)
    test("ray symmetric-run: the bits of one rank", p.returncode == 0 and
         state(s.dir / "symmetric", STEPS) == state(s.dir / "one", STEPS), p.stdout[-1500:] + p.stderr[-1500:])


def check_killed(test, cluster, s):
    env = {**cluster.env, "RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"}
    long = keys(s, "killed", trainer__ranks=4, trainer__nnodes=2, trainer__save_freq=-1)
    long = [k if not k.startswith("trainer.total_training_steps") else "trainer.total_training_steps=10000" for k in map(str, long)]
    p = subprocess.Popen([VERLC, *long], env=env, cwd=cluster.dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = s.dir / "killed" / "metrics.jsonl"
    until = time.time() + 120
    while time.time() < until and not (metrics.exists() and metrics.read_text().count("\n") > 1):
        time.sleep(0.05)
    begin, found = time.time(), workers()
    os.kill(found[3], signal.SIGKILL)
    error = p.communicate(timeout=60)[1]
    while workers() and time.time() < begin + 30:
        time.sleep(0.1)
    test("a rank is killed: it is named, and all are gone in 10 s", p.returncode == 1 and "rank 3 (host" in error and
         time.time() - begin < 10 and len(found) == 4, f"{p.returncode} {time.time() - begin:.1f} s {found} {error[-800:]}")


def check_too_small(test, cluster, s):
    env = {**cluster.env, "RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"}
    p = subprocess.run([VERLC, *map(str, keys(s, "small", trainer__ranks=8, trainer__nnodes=2))], env=env, cwd=cluster.dir,
                       capture_output=True, text=True, timeout=100)
    test.refused("a cluster that is too small", p, p.returncode or -1, "4 CPUs", "8 ranks")


def main():
    test = Tests()
    with Scratch(n_train=16, n_test=4) as s:
        cluster = Cluster(nodes=2)
        try:
            check_launchers(test, cluster, s)
            check_killed(test, cluster, s)
            check_too_small(test, cluster, s)
        finally:
            cluster.end()
        check_symmetric_run(test, cluster, s)
    test.end()


if __name__ == "__main__":
    main()
