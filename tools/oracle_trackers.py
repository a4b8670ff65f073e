"""verlc's trackers with the real clients: MLflow with SQLite, with files, and with a server that is killed and started
again in mid-run; wandb, swanlab and clearml offline, trackio on disk; runs that are stopped from outside.  What each client
keeps is compared with run.db.
Run by scripts/oracle.sh trackers, in .venv-trackers.

  VERLC=build/release/verlc python tools/oracle_trackers.py [mlflow server wandb swanlab clearml trackio stop]
"""

import json
import logging
import math
import os
import pathlib
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile

os.environ["VERLC"] = os.path.abspath(os.environ.get("VERLC", "build/release/verlc"))  # runs have a directory of their own
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from ranks import below  # noqa: E402
from verlc_test import Scratch, Tests, run, start  # noqa: E402

TRACE = "actor_rollout_ref.rollout.trace."
CLIENT = {"VERLC_PYTHON": sys.executable, "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}


def recorded(run_dir):
    """{(step, name): value} of run.db."""
    return {(t, n): v for t, n, v in sqlite3.connect(run_dir / "run.db").execute("select step, name, value from metrics")}


def same(a, b):
    return a.keys() == b.keys() and all(a[k] == b[k] or (b[k] is None and not math.isfinite(a[k])) for k in a)


def differs(a, b):
    return str([(k, a.get(k), b.get(k)) for k in sorted(set(a) | set(b)) if a.get(k) != b.get(k)][:3])


# ---- MLflow ----

class Server:
    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        log = open(self.folder / "log", "ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/store.db",
             "--artifacts-destination", str(self.folder / "artifacts"), "--port", str(self.port), "--workers", "1"],
            stdout=log, stderr=log, start_new_session=True, cwd=self.folder)
        until = time.time() + 180
        while time.time() < until:
            try:
                return urllib.request.urlopen(self.uri + "/health", timeout=2).read()
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise AssertionError("the MLflow server did not start: " + (self.folder / "log").read_text()[-2000:])

    def kill(self):
        os.killpg(self.process.pid, 9)
        self.process.wait()


def mlflow_run(uri, project):
    """(client, the one run of the project, {(step, name): value})."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(project)
    runs = client.search_runs([experiment.experiment_id])
    points = {}
    for name in runs[0].data.metrics:
        for m in client.get_metric_history(runs[0].info.run_id, name):
            points[m.step, name] = m.value
    return client, runs, points


def mlflow_names(values):
    return {(t, n.replace("@", "_at_")): v for (t, n), v in values.items()}


def check_traces(test, name, run_dir, experiment_id, prompts):
    import mlflow

    traces = mlflow.search_traces(locations=[experiment_id], return_type="list", max_results=500)
    db = sqlite3.connect(run_dir / "run.db")
    rows = {(t, v, u, k): (p, i, s) for t, v, u, k, p, i, s in db.execute(
        "select step, validation, uid, sample, prompt_ids, ids, score from samples")}
    blob = lambda ids: struct.pack(f"<{len(ids)}i", *ids)  # noqa: E731
    wrong, per_step = [], {}
    for t in traces:
        if "validate" not in t.info.tags:
            continue  # the half of one that was under way when the server was killed
        tags, span = t.info.tags, {s.name: s for s in t.data.spans}
        validate = tags["validate"] == "True"
        o = span["SingleTurnAgentLoop.run"].outputs
        # sample_index is the data's: the rows of train.jsonl count from 0, those of test.jsonl from 64
        key = int(tags["step"]), int(validate), int(tags["sample_index"]) - 64 * validate, int(tags["rollout_n"])
        if rows.get(key) != (blob(o["prompt_ids"]), blob(o["response_ids"]), o["reward_score"]) or "<|im_start|>" not in \
                o["prompt_text"] or set(span) != {"agent_loop", "SingleTurnAgentLoop.run"}:
            wrong.append((key, o))
        per_step.setdefault((key[0], validate), set()).add(key[2:])
    counts = {k: len(v) for k, v in per_step.items()}
    test(f"{name}: the traces have the tokens, rewards and texts of run.db", traces and not wrong, str(wrong)[:500])
    want = {(t, bool(v)): prompts * (1 if v else 2) for t, v, _, _ in rows}
    test(f"{name}: the asked number of prompts of each step, with all their samples", counts == want, str(counts))


def mlflow_keys(uri_name):
    return {"trainer.logger": '["console","mlflow"]', "trainer.project_name": uri_name, "trainer.experiment_name": "sums",
            "trainer.test_freq": 4, "trainer.log_val_generations": 2, TRACE + "backend": "mlflow", TRACE + "token2text": True,
            TRACE + "max_samples_per_step_per_worker": 2}


def check_run(test, name, uri, run_dir, project, steps, prompts):
    client, runs, points = mlflow_run(uri, project)
    want = mlflow_names(recorded(run_dir))
    test(f"{name}: one run, finished, every value of run.db", len(runs) == 1 and runs[0].info.status == "FINISHED" and
         same(points, want), f"{len(runs)} {runs[0].info.status} {differs(points, want)}")
    print(f"{name}: {len(points)} values")
    paths = {f.path for f in client.list_artifacts(runs[0].info.run_id)}
    test(f"{name}: configuration, validation samples, tags", "config.yaml" in paths and f"val_step{steps}.json" in paths and
         runs[0].info.run_name == "sums" and runs[0].data.tags["verlc.run_dir"] == str(run_dir), str(paths))
    params = runs[0].data.params
    test(f"{name}: parameters", params["data/train_batch_size"] == "4" and params["trainer/logger/list_len"] in "23" and
         len(params) > 500, str(len(params)))
    check_traces(test, name, run_dir, runs[0].info.experiment_id, prompts)


def check_mlflow_stores(s, test):
    (s.dir / "store").mkdir()
    uri = f"sqlite:///{s.dir}/store/runs.db"
    env = {**CLIENT, "MLFLOW_TRACKING_URI": uri}
    p = run(*s.ppo("sqlite", trainer__total_training_steps=4, **mlflow_keys("sqlite")), env=env, cwd=s.dir)
    test("mlflow: a database that is made by the run: nothing fails", "tracker mlflow" not in p.stderr, p.stderr[-800:])
    run(*s.ppo("sqlite", trainer__total_training_steps=8, **mlflow_keys("sqlite")), env=env, cwd=s.dir)
    check_run(test, "SQLite, resumed", uri, s.dir / "sqlite", "sqlite", 8, 2)

    # a store of files has metrics and parameters; newer servers want it allowed
    uri = f"file://{s.dir}/files"
    env = {**CLIENT, "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    keys = {k: v for k, v in mlflow_keys("files").items() if not k.startswith(TRACE)}
    p = run(*s.ppo("files", trainer__total_training_steps=4, **keys), env=env, cwd=s.dir)
    _, runs, points = mlflow_run(uri, "files")
    test("files: one run, finished, every value of run.db", len(runs) == 1 and runs[0].info.status == "FINISHED" and
         same(points, mlflow_names(recorded(s.dir / "files"))), p.stderr[-500:])


def check_mlflow_server(s, test):
    server = Server(s.dir / "server")
    env = {**CLIENT, "MLFLOW_TRACKING_URI": server.uri}
    slow = s.write("slow.py", [])  # steps of half a second
    slow.write_text("import time\ndef compute_score(**kw):\n    time.sleep(0.06)\n    return 1.0\n")
    args = s.ppo("killed", trainer__total_training_steps=80, trainer__save_freq=40, **{
        **mlflow_keys("killed"), "trainer.logger": '["console","file","mlflow"]', "trainer.test_freq": 40,
        TRACE + "max_samples_per_step_per_worker": 1, "reward.custom_reward_function.path": slow, "reward.num_workers": 1})
    p = start(args, env, cwd=s.dir)
    numbers, cursor = s.dir / "killed/metrics.jsonl", s.dir / "killed/trackers/mlflow.state.json"
    lines = lambda: len(numbers.read_text().splitlines()) if numbers.exists() else 0  # noqa: E731
    while p.poll() is None and not (cursor.exists() and json.loads(cursor.read_text())["sent"] > 0):
        time.sleep(0.1)
    server.kill()
    at = lines()
    while p.poll() is None and lines() < at + 15:
        time.sleep(0.1)
    went = lines() - at
    server.start()
    err = p.communicate(timeout=300)[1]
    test("a server killed in mid-run: steps went on", at < 65 and went >= 15 and p.returncode == 0, f"{at} {went} {err[-600:]}")
    print(f"server: killed at step {at}, {went} steps without it")
    test("a server killed in mid-run: said once", err.count("tracker mlflow fails") == 1, err[-800:])
    p = run(*args, env=env, cwd=s.dir)  # sends what the first could not
    test("what could not be sent is sent by the same command", "were not sent" not in p.stderr, p.stderr[-800:])
    check_run(test, "server, killed in mid-run", server.uri, s.dir / "killed", "killed", 80, 1)
    server.kill()


# ---- the others ----

def level_log(path, head):
    """Records of a LevelDB log, which wandb keeps a run in: blocks of 32 KiB, records of crc, length, type."""
    data, at, part = path.read_bytes(), head, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, n, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7:at + 7 + n]
        at += 7 + n
        if kind in (1, 4):
            yield part
            part = b""


def check_wandb(s, test):
    from wandb.proto.wandb_internal_pb2 import Record

    keys = {"trainer.logger": "wandb", "trainer.test_freq": 2, "trainer.log_val_generations": 2}
    for steps in (3, 5):
        run(*s.ppo("wandb_run", trainer__total_training_steps=steps, **keys), env=CLIENT, cwd=s.dir)
    files = sorted(s.dir.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime)
    values, ids, tables = {}, set(), 0
    for f in files:
        for raw in level_log(f, 7):
            r = Record.FromString(raw)
            if r.WhichOneof("record_type") == "run":
                ids.add((r.run.run_id, r.run.project, r.run.display_name))
            if r.WhichOneof("record_type") != "history":
                continue
            row = {("/".join(i.nested_key) or i.key): json.loads(i.value_json) for i in r.history.item}
            tables += "val/generations/nrows" in row
            values |= {(row["_step"], k): v for k, v in row.items() if isinstance(v, (int, float)) and
                       not k.startswith(("_", "val/generations/"))}
    want = recorded(s.dir / "wandb_run")
    test("wandb: every value of run.db", same(values, want), differs(values, want))
    test("wandb: resumed under one id, a table at each validation", len(files) == 2 and len(ids) == 1 and tables == 4,
         f"{len(files)} {ids} {tables}")


def check_swanlab(s, test):
    keys = {"trainer.logger": "swanlab", "trainer.test_freq": 2, "trainer.log_val_generations": 2}
    run(*s.ppo("swan", trainer__total_training_steps=2, **keys), env=CLIENT, cwd=s.dir)
    data = next(s.dir.glob("swanlog/run-*/run-*.swanlab")).read_bytes()
    names = {n for _, n in recorded(s.dir / "swan")}
    test("swanlab: every metric", names and not [n for n in names if n.encode() not in data])
    test("swanlab: a table of samples", len(list(s.dir.glob("swanlog/run-*/media/echarts/*.json"))) == 1)
    config = next(s.dir.glob("swanlog/run-*/files/config.yaml")).read_text()
    test("swanlab: the configuration", "train_batch_size" in config and "verl" in config)


def check_clearml(s, test):
    keys = {"trainer.logger": "clearml", "trainer.test_freq": 2, "trainer.log_val_generations": 2}
    env = {**CLIENT, "HOME": str(s.dir)}
    run(*s.ppo("clear", trainer__total_training_steps=2, **keys), env=env, cwd=s.dir)
    with zipfile.ZipFile(next(s.dir.glob(".clearml/cache/offline/*.zip"))) as z:
        events = [e for line in z.read("metrics.jsonl").splitlines() for e in json.loads(line)]
        task = json.loads(z.read("task.json"))
    values = {(e["iter"], f"{e['metric']}/{e['variant']}"): e["value"] for e in events if e["type"] == "training_stats_scalar"
              and not e["metric"].startswith(":")}
    want = recorded(s.dir / "clear")
    test("clearml: every value of run.db", same(values, want), differs(values, want))
    test("clearml: a table of samples, the configuration", any(e["type"] == "plot" and e["metric"] == "Validation" for e in events)
         and "train_batch_size" in json.dumps(task))


def check_trackio(s, test):
    keys = {"trainer.logger": "trackio", "trainer.test_freq": 2, "trainer.log_val_generations": 2, "trainer.project_name": "tio"}
    for steps in (3, 5):
        run(*s.ppo("tio", trainer__total_training_steps=steps, **keys), env={**CLIENT, "TRACKIO_DIR": str(s.dir / "io")}, cwd=s.dir)
    rows = sqlite3.connect(s.dir / "io/tio.db").execute("select run_id, step, metrics from metrics").fetchall()
    values = {(t, k): v for _, t, m in rows for k, v in json.loads(m).items() if not isinstance(v, dict)}
    tables = sum("val/generations" in json.loads(m) for _, _, m in rows)
    want = recorded(s.dir / "tio")
    test("trackio: every value of run.db", same(values, want), differs(values, want))
    test("trackio: resumed in one run, a table at each validation", len({r[0] for r in rows}) == 1 and tables == 4, str(tables))


# ---- stopped from outside ----

def wandb_steps(folder):
    """Steps of all files of the offline runs there, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime)
    records = [Record.FromString(raw) for f in files for raw in level_log(f, 7)]
    return [r.history.step.num for r in records if r.WhichOneof("record_type") == "history"]


def check_stop(s, test):
    """SIGTERM to every process, as ray job stop sends it, W&B's own among them; and kill -9, with a sync afterwards."""
    slow = s.dir / "slower.py"
    slow.write_text("import time\ndef compute_score(*args, **kw):\n    time.sleep(0.1)\n    return 0.5\n")
    for name in ("stopped", "killed_at_once"):
        folder = s.dir / f"{name}_wandb"
        folder.mkdir()
        uri = f"sqlite:///{folder}/runs.db"
        env = {**CLIENT, "MLFLOW_TRACKING_URI": uri, "WANDB_DIR": str(folder)}
        keys = {**mlflow_keys(name), "trainer.logger": '["console","file","mlflow","wandb"]', "trainer.test_freq": -1}
        p = start(s.ppo(name, trainer__total_training_steps=100000, trainer__save_freq=100000, **keys, **{
            "reward.custom_reward_function.path": slow, "reward.num_workers": 1}), env, cwd=s.dir)
        states = [s.dir / name / f"trackers/{t}.state.json" for t in ("mlflow", "wandb")]
        while p.poll() is None and not all(f.exists() and json.loads(f.read_text())["sent"] > 5 for f in states):
            time.sleep(0.1)
        if name == "stopped":
            for pid in [p.pid, *below(p.pid)]:
                os.kill(pid, 15)
        else:
            p.kill()
        err = p.communicate(timeout=200)[1]
        p = run("trackers", "sync", s.dir / name, env=env, cwd=s.dir)
        sent = {line.split(":")[0] for line in p.stdout.splitlines()} - {"mlflow_traces"}  # a signal may leave some
        want = set() if name == "stopped" else {"mlflow", "wandb"}
        test(f"{name}: what a sync had to do", sent == want, f"{sent} {err[-900:]}")
        _, runs, points = mlflow_run(uri, name)
        want = mlflow_names(recorded(s.dir / name))
        test(f"{name}: MLflow has one run, killed, every value of run.db", len(runs) == 1 and runs[0].info.status == "KILLED" and
             same(points, want), f"{len(runs)} {runs[0].info.status} {differs(points, want)}")
        steps = list(range(1, len((s.dir / name / "metrics.jsonl").read_text().splitlines()) + 1))
        got = wandb_steps(folder)  # the last ones twice where W&B's own process was ended
        test(f"{name}: W&B has every step", list(dict.fromkeys(got)) == steps and len(got) < len(steps) + 9,
             f"{got} of {len(steps)}")


def main():
    test = Tests()
    logging.disable(logging.WARNING)
    checks = {"mlflow": check_mlflow_stores, "server": check_mlflow_server, "wandb": check_wandb, "swanlab": check_swanlab,
              "clearml": check_clearml, "trackio": check_trackio, "stop": check_stop}
    with Scratch() as s:
        for name in sys.argv[1:] or checks:
            checks[name](s, test)
    test.end()


main()
