"""`verlc exec ray job submit` on a real Ray: a local cluster of its own, the job's environment, words, log and status, a job
that fails, and one that is stopped and resumed to the same bits. Run by scripts/oracle.sh ray, in .venv-ray.

The cluster has a directory and ports of its own and is ended with its process: another Ray on the machine is not touched.

  VERLC=build/release/verlc python tools/oracle_ray.py [--keep]     --keep: the cluster stays until Enter, for its dashboard
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

os.environ["VERLC"] = os.path.abspath(os.environ.get("VERLC", "build/release/verlc"))  # runs have a directory of their own
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from verlc_test import ENV, VERLC, Scratch, Tests, series, state  # noqa: E402

STEPS = 8
REWARD = """
import os
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(os.environ.get("SLOW", "0")))
    right = os.environ.get("MLFLOW_TRACKING_URI") == "sqlite:////tmp/a b.db"
    return right + sum(c.isdigit() for c in solution_str) / 100
"""
SLOW_END = """
import signal
import time


def end(number, frame):
    time.sleep(5)
    print("ended in its own time", flush=True)
    raise SystemExit(143)


signal.signal(signal.SIGTERM, end)
print("waiting", flush=True)
while True:
    time.sleep(1)
"""
# as in verl's tutorial: quotes in quotes, a list, "$@"
SUBMIT = r"""ray job submit --address="$ADDRESS" \
    --runtime-env-json='{"env_vars": {"MLFLOW_TRACKING_URI": "sqlite:////tmp/a b.db", "SLOW": "'$SLOW'"}}' $OPTIONS \
    -- python3 -m verl.trainer.main_ppo \
    trainer.logger='["console", "file"]' trainer.experiment_name='"two words; $HOME"' "$@"
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    def __init__(self, nodes=1):
        self.gcs, self.more = free_port(), []
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets' paths have to be short
        self.bin = pathlib.Path(sys.executable).parent
        self.address = f"http://127.0.0.1:{free_port()}"
        self.env = {k: v for k, v in ENV.items() if not k.startswith("RAY_")} | {
            "PATH": f"{self.bin}{os.pathsep}{ENV['PATH']}", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_MULTI_NODE": "1", "ADDRESS": self.address}
        with open(self.dir / "start.log", "wb") as log:
            self.process = subprocess.Popen(
                [self.bin / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={self.gcs}",
                 "--dashboard-host=127.0.0.1", f"--dashboard-port={self.address.rsplit(':', 1)[1]}", f"--temp-dir={self.dir}",
                 f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}", "--num-cpus=2",
                 "--num-gpus=0", "--object-store-memory=100000000"],
                stdout=log, stderr=log, env=self.env, cwd=self.dir, start_new_session=True)
        self.wait(lambda: self.get("/api/jobs/") is not None, "the dashboard")
        for _ in range(1, nodes):
            with open(self.dir / "node.log", "ab") as log:
                self.more.append(subprocess.Popen(
                    [self.bin / "ray", "start", "--block", f"--address=127.0.0.1:{self.gcs}", "--node-ip-address=127.0.0.1",
                     "--num-cpus=2", "--num-gpus=0", "--object-store-memory=100000000",
                     f"--dashboard-agent-listen-port={free_port()}"],
                    stdout=log, stderr=log, env=self.env, cwd=self.dir, start_new_session=True))
        none = {"data": {"summary": []}}
        self.wait(lambda: (self.get("/nodes?view=summary") or none)["data"]["summary"][nodes - 1:], "all nodes")

    def get(self, path):
        try:
            with urllib.request.urlopen(self.address + path, timeout=20) as answer:
                return json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):
            return None

    def wait(self, ready, what, seconds=300):
        until = time.time() + seconds
        while not ready():
            if time.time() > until or self.process.poll() is not None:
                raise AssertionError(f"{what}: not there; {(self.dir / 'start.log').read_text()[-2000:]}")
            time.sleep(0.3)

    def log(self, job):
        return (self.get(f"/api/jobs/{job}/logs") or {"logs": ""})["logs"]

    def job(self, job):
        return self.get(f"/api/jobs/{job}") or {}

    def ray(self, *args):
        return subprocess.run([self.bin / "ray", "job", *args[:1], "--address", self.address, *args[1:]], capture_output=True,
                              text=True, env=self.env, cwd=self.dir, timeout=300)

    def submit(self, options, arguments, slow="0", launcher=SUBMIT, cwd=None):
        return subprocess.run([VERLC, "exec", "bash", "-c", launcher, "submit", *map(str, arguments)], capture_output=True,
                              text=True, timeout=600, cwd=cwd or self.dir, stdin=subprocess.DEVNULL,
                              env={**self.env, "OPTIONS": shlex.join(options), "SLOW": slow})

    def end(self):
        for process in [*self.more, self.process]:
            process.send_signal(signal.SIGTERM)  # ray start --block ends what it started
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self.dir, ignore_errors=True)


def arguments(s, run_dir, **keys):
    keys = {"custom_reward_function.path": s.dir / "reward.py", "reward.num_workers": 1, "trainer.total_training_steps": STEPS,
            **keys}
    return [a for a in s.ppo(run_dir, **keys) if a != "ppo" and not a.startswith("trainer.logger=")]


def check_whole(test, cluster, s):
    p = cluster.submit(["--submission-id", "whole"], arguments(s, "whole", trainer__seed=3))
    log, job = cluster.log("whole"), cluster.job("whole")
    test("the job runs to its end: exit status, status, exit code of the driver", p.returncode == 0 and
         (job.get("status"), job.get("driver_exit_code")) == ("SUCCEEDED", 0), f"{p.stdout[-1500:]} {p.stderr[-800:]} {job}")
    test("its entry point is verl's command under verlc exec",
         str(job.get("entrypoint")).startswith("verlc exec python3 -m verl.trainer.main_ppo "), str(job.get("entrypoint")))
    lines = [line for line in log.splitlines() if line.startswith("step:")]
    test("its log: one plain line a step", len(lines) == STEPS and "\r" not in log and "\x1b" not in log, log[-2000:])
    test("ray job submit shows the same lines", lines and all(line in p.stdout for line in lines), p.stdout[-1500:])
    file = s.dir / f"whole/global_step_{STEPS}/config.yaml"
    config = file.read_text() if file.exists() else ""
    test("words arrive as they were written", "two words; $HOME" in config and "seed: 3" in config, config[-500:])
    scores = series(s.dir / "whole", "critic/score/mean") if lines else []
    test("env_vars arrive, in the reward function too", len(scores) == STEPS and min(scores) >= 1, str(scores))
    print("\n".join(line[:160] for line in log.splitlines()[-2:]))


def check_stopped(test, cluster, s):
    """Through a script: Ray's SIGTERM goes to its shell too, which dies of it before verlc has saved."""
    script = s.dir / "run.sh"
    script.write_text('python3 -m verl.trainer.main_ppo trainer.logger="[console,file]" "$@"\necho "the script went on: $?"\n')
    launcher = SUBMIT.split("python3 -m")[0] + f'bash {script} "$@"'
    p = cluster.submit(["--no-wait", "--submission-id", "stopped"],
                       arguments(s, "stopped", trainer__seed=3, trainer__save_freq=-1), slow="0.3", launcher=launcher)
    test("--no-wait returns", p.returncode == 0 and "stopped" in p.stdout, p.stdout + p.stderr)
    cluster.wait(lambda: "step:2 - " in cluster.log("stopped"), "step 2 in the log of the job that runs")
    status = cluster.job("stopped").get("status")
    p = cluster.ray("stop", "stopped")
    log = cluster.log("stopped")
    steps = sorted(int(d.name.rsplit("_", 1)[1]) for d in (s.dir / "stopped").glob("global_step_*"))
    test("lines come as the job runs; ray job stop saves the last whole step and ends it", status == "RUNNING" and
         p.returncode == 0 and cluster.job("stopped").get("status") == "STOPPED" and len(steps) == 1 and 2 <= steps[0] < STEPS,
         f"{status} {steps} {p.stdout} {p.stderr} {log[-1500:]}")
    print("\n".join(log.splitlines()[-2:]))
    p = cluster.submit(["--submission-id", "resumed"], arguments(s, "stopped", trainer__seed=3, trainer__save_freq=-1))
    whole = state(s.dir / "whole", STEPS)
    test(f"a further job goes on from step {steps} to the same bits", p.returncode == 0 and
         state(s.dir / "stopped", STEPS) == whole, p.stdout[-1500:] + p.stderr[-500:])


def check_slow_end(test, cluster):
    launcher = f'ray job submit --address="$ADDRESS" --no-wait --submission-id slow -- python3 -c {shlex.quote(SLOW_END)}'
    cluster.submit([], [], launcher=launcher)
    cluster.wait(lambda: "\nwaiting\n" in cluster.log("slow"), "the job's first line")
    cluster.ray("stop", "slow")
    log = cluster.log("slow")
    test("a job has more than Ray's 3 s to end after ray job stop", "\nended in its own time\n" in log, log)


def check_failed(test, cluster, s):
    p = cluster.submit(["--submission-id", "failed"], arguments(s, "failed", trainer__total_epochz=1))
    job = cluster.job("failed")
    test("a job that is refused fails with its message and exit status", p.returncode == 1 and job.get("status") == "FAILED" and
         job.get("driver_exit_code") == 2 and "total_epochz" in str(job.get("message")), f"{p.returncode} {job}")


def check_working_dir(test, cluster, s):
    d = s.dir / "work"
    d.mkdir()
    for name in ("train.jsonl", "test.jsonl", "reward.py"):
        shutil.copy(s.dir / name, d)
    (d / "run.sh").write_text('python3 -m verl.trainer.main_ppo trainer.logger=console "$@"\n')
    more = {"data.train_files": "train.jsonl", "data.val_files": "test.jsonl", "custom_reward_function.path": "reward.py"}
    keys = arguments(s, "carried", trainer__total_training_steps=1, **more)
    p = cluster.submit([], keys, launcher='ray job submit --address="$ADDRESS" --working-dir=. -- bash run.sh "$@"', cwd=d)
    test("--working-dir: a script and files of the directory", p.returncode == 0 and "step:1 - " in p.stdout,
         p.stdout[-1500:] + p.stderr[-500:])


def main():
    test = Tests()
    with Scratch(n_train=16, n_test=4) as s:
        (s.dir / "reward.py").write_text(REWARD)
        cluster = Cluster()
        try:
            check_whole(test, cluster, s)
            check_stopped(test, cluster, s)
            check_slow_end(test, cluster)
            check_failed(test, cluster, s)
            check_working_dir(test, cluster, s)
            if "--keep" in sys.argv[1:]:
                input(f"{cluster.address}/#/jobs ")
        finally:
            cluster.end()
    test.end()


if __name__ == "__main__":
    main()
