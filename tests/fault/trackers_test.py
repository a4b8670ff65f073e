"""Trackers with a client in Python: what the client is given and in which order, and that one which is slow, down or
broken costs no step and no record.  The clients are stand-ins on PYTHONPATH which write down what they are asked and
fail as a file beside them says; scripts/oracle.sh trackers runs the real ones."""

import functools
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from ranks import below  # noqa: E402
from verlc_test import Scratch, at_once, patience, run, start, state, waited  # noqa: E402

USAGE = 2
SECRET = "sk-0123456789abcdef"

# What every stand-in has: calls go to calls.jsonl; the file "fault" says what happens to those that it names.
COMMON = '''
import json, os, pathlib, time
HERE = pathlib.Path(__file__).resolve().parent


def call(what, **kw):
    fault = (HERE / "fault").read_text().split() if (HERE / "fault").exists() else []
    if fault and what in fault[1:]:
        (HERE / "faulted").touch()
        if fault[0] == "raise":
            raise ConnectionError("no server at http://me:hunter2@tracker.example and key " + os.environ.get("WANDB_API_KEY", ""))
        if fault[0] == "hang":
            time.sleep(1000)
        if fault[0] == "exit":
            os._exit(3)
        if fault[0] == "refuse":
            raise ValueError("this value cannot be drawn")
        time.sleep(float(fault[0]))
    with open(HERE / "calls.jsonl", "a") as f:
        f.write(json.dumps({"what": what, "at": time.time(), **kw}) + "\\n")
'''
WANDB = COMMON + '''
import types


class Settings:
    def __init__(self, **kw):
        self.kw = kw


class Table:
    def __init__(self, columns, data):
        self.value = {"columns": columns, "data": data}


class Run:
    def __init__(self, id):
        self.id = id
        self.settings = types.SimpleNamespace(mode=os.environ.get("WANDB_MODE") or "online", sync_dir="/runs/offline-run-1")

    def log(self, data, step, commit=None):
        call("log", step=step, data={k: getattr(v, "value", v) for k, v in data.items()})

    def finish(self, exit_code):
        call("finish", exit_code=exit_code)


def init(project, name, entity, config, id, resume, settings):
    call("init", project=project, name=name, entity=entity, id=id, resume=resume, config=config, settings=settings.kw)
    return Run(id)


def teardown():
    pass
'''
MLFLOW = COMMON + '''
import entities_of_mlflow as entities, sys, types
sys.modules["mlflow.entities"] = entities


def set_tracking_uri(uri):
    call("uri", uri=uri)


def set_experiment(name):
    call("experiment", name=name)
    return types.SimpleNamespace(experiment_id="7")


class Gone(Exception):
    error_code = "RESOURCE_DOES_NOT_EXIST"


class MlflowClient:
    def create_run(self, experiment_id, run_name, tags):
        call("create_run", experiment_id=experiment_id, run_name=run_name, tags=tags)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-1"))

    def update_run(self, run_id, status):
        call("update_run", run_id=run_id, status=status)

    def get_run(self, run_id):
        return types.SimpleNamespace(data=types.SimpleNamespace(params={"trainer/nnodes": "1"}))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        call("log_batch", run_id=run_id, metrics=[m.__dict__ for m in metrics], params={p.key: p.value for p in params})

    def log_dict(self, run_id, value, path):
        call("log_dict", run_id=run_id, value=value, path=path)

    def set_terminated(self, run_id, status, end_time=None):
        call("set_terminated", run_id=run_id, status=status, end_time=end_time)


class Span:
    def end(self, outputs, end_time_ns):
        call("span_end", outputs=outputs, end=end_time_ns)


def start_span_no_context(name, parent_span=None, **kw):
    call("span", name=name, child=parent_span is not None, **kw)
    return Span()
'''
ENTITIES = '''
class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.timestamp, self.step = key, value, timestamp, step


class Param:
    def __init__(self, key, value):
        self.key, self.value = key, value
'''


class Stand:
    """A directory with stand-in clients."""

    def __init__(self, s, name):
        self.dir = s.dir / name
        self.dir.mkdir()
        (self.dir / "wandb.py").write_text(WANDB)
        (self.dir / "mlflow.py").write_text(MLFLOW)
        (self.dir / "entities_of_mlflow.py").write_text(ENTITIES)
        self.env = {"PYTHONPATH": str(self.dir), "WANDB_API_KEY": SECRET, "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}

    def fault(self, text):
        if text:
            (self.dir / "fault").write_text(text)
        else:
            (self.dir / "fault").unlink()

    def calls(self, *what):
        path = self.dir / "calls.jsonl"
        all_calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [c for c in all_calls if c["what"] in what]

    def steps(self):
        """Steps whose metrics the W&B client has been given, in order."""
        return [c["step"] for c in self.calls("log") if "training/global_step" in c["data"]]


def kept(run_dir, name="wandb"):
    """(records in the file, what the cursor says)."""
    d = run_dir / "trackers"
    lines = [json.loads(line) for line in (d / f"{name}.jsonl").read_text().splitlines()]
    at = json.loads((d / f"{name}.state.json").read_text()) if (d / f"{name}.state.json").exists() else {"sent": 0, "run": None}
    return [r for r in lines if r["seq"] > at["sent"]], at


def check_wandb(s, test):
    a = Stand(s, "plain")
    keys = {"trainer.logger": '["console","wandb"]', "trainer.test_freq": 2, "trainer.log_val_generations": 3,
            "trainer.project_name": "sums", "trainer.experiment_name": "first", "+trainer.wandb_proxy": "http://proxy:3128"}
    p = run(*s.ppo("wandb", trainer__total_training_steps=4, **keys), env=a.env)
    init, end = a.calls("init"), a.calls("finish")
    test("wandb: one run with project, name, configuration and proxy",
         len(init) == 1 and (init[0]["project"], init[0]["name"]) == ("sums", "first") and
         init[0]["config"]["trainer"]["total_training_steps"] == 4 and init[0]["settings"]["https_proxy"] == "http://proxy:3128")
    test("wandb: every step, in order, then finish", a.steps() == [1, 2, 3, 4] and [c["exit_code"] for c in end] == [0])
    db = sqlite3.connect(s.dir / "wandb/run.db")
    sent = {(c["step"], k): v for c in a.calls("log") for k, v in c["data"].items() if k != "val/generations"}
    test("wandb: the numbers of run.db", sent == {(t, n): v for t, n, v in db.execute("select step, name, value from metrics")})
    tables = [c["data"]["val/generations"] for c in a.calls("log") if "val/generations" in c["data"]]
    test("wandb: a table of three samples at each validation, rows added",
         [len(t["data"]) for t in tables] == [1, 2] and tables[1]["columns"] == ["step"] + [
             f"{w}_{i}" for i in (1, 2, 3) for w in ("input", "output", "score")] and [r[0] for r in tables[1]["data"]] == [2, 4])
    inputs = [r[0] for r in db.execute("select prompt from samples where validation = 1 and step = 2 order by prompt")]
    shown = [tables[0]["data"][0][1 + 3 * i] for i in range(3)]
    # numpy.random.RandomState(42).shuffle(list(range(8))) begins 1, 5, 0
    test("wandb: verl's choice of samples", shown == [inputs[i] for i in (1, 5, 0)], str(shown))
    left, at = kept(s.dir / "wandb")
    test("wandb: nothing is kept, the run's id is", left == [] and at["run"] == {"id": init[0]["id"]}, str(at))
    test("wandb: no warning", "tracker wandb" not in p.stderr, p.stderr[-300:])
    # as verl names them: the older name, and a run again from a checkpoint
    run(*s.ppo("wandb", trainer__total_training_steps=5, **{**keys, "trainer.logger": "tracking"}), env=a.env)
    init = a.calls("init")
    test("wandb: a resumed run is the same run", len(init) == 2 and init[0]["id"] == init[1]["id"] and a.steps() == [1, 2, 3, 4, 5])
    run(*s.ppo("wandb", trainer__resume_mode="disable", trainer__total_training_steps=1, **keys), env=a.env)
    test("wandb: a new run is another run", a.calls("init")[2]["id"] != init[0]["id"])


def check_mlflow(s, test):
    a = Stand(s, "ml")
    trace = "actor_rollout_ref.rollout.trace."
    keys = {"trainer.logger": '["console","mlflow"]', "trainer.test_freq": 3, "trainer.log_val_generations": 2,
            trace + "backend": "mlflow", trace + "max_samples_per_step_per_worker": 1}
    run(*s.ppo("mlflow", trainer__total_training_steps=3, **keys, **{trace + "token2text": True}), env=a.env)
    params = {k: v for c in a.calls("log_batch") for k, v in c["params"].items()}
    test("mlflow: the configuration as parameters, flattened as verl does, but those that are there",
         params["trainer/logger/list_len"] == "2" and params["trainer/logger/1"] == "mlflow" and
         params["actor_rollout_ref/actor/optim/lr"] == "0.0001" and params["data/custom_cls/path"] == "None" and
         params["trainer/val_before_train"] == "False" and "trainer/nnodes" not in params)
    points = [m for c in a.calls("log_batch") for m in c["metrics"]]
    test("mlflow: metrics with their steps and times, verl's names",
         [m["step"] for m in points if m["key"] == "training/global_step"] == [1, 2, 3] and
         all(abs(m["timestamp"] / 1000 - time.time()) < 300 for m in points) and
         any(m["key"].startswith("val-") and m["key"].endswith("mean_at_1") for m in points), str({m["key"] for m in points})[:500])
    paths = [c["path"] for c in a.calls("log_dict")]
    test("mlflow: configuration and validation samples as artifacts", paths == ["config.yaml", "val_step3.json"], str(paths))
    test("mlflow: the run ends as finished", [c["status"] for c in a.calls("set_terminated")] == ["FINISHED"])
    roots = [c for c in a.calls("span") if not c["child"]]
    tags = [c["tags"] for c in roots]
    test("traces: both samples of one prompt a step, and of one at the validation",
         [(t["step"], t["rollout_n"], t["validate"]) for t in tags] ==
         [(str(n), str(k), "False") for n in (1, 2, 3) for k in (0, 1)] + [("3", "0", "True")], str(tags))
    db = sqlite3.connect(s.dir / "mlflow/run.db")
    ends = [c["outputs"] for c in a.calls("span_end") if "response_ids" in c["outputs"]]
    same = all(db.execute("select count(*) from samples where step = ? and ids = ? and prompt_ids = ?", (
        int(t["step"]), b"".join(i.to_bytes(4, "little") for i in o["response_ids"]),
        b"".join(i.to_bytes(4, "little") for i in o["prompt_ids"]))).fetchone()[0] for t, o in zip(tags, ends))
    test("traces: the token ids of run.db, with texts and reward", len(ends) == len(tags) and same and all(
        "<|im_start|>user" in o["prompt_text"] and o["reward_score"] == 0 and len(o["response_logprobs"]) == len(o["response_ids"])
        for o in ends))
    test("traces: the index is that of the data", 64 <= int(tags[-1]["sample_index"]) < 72, str(tags[-1]))
    test("traces: times", all(0 <= c["start_time_ns"] / 1e9 <= time.time() for c in roots) and
         all(r["start_time_ns"] <= e["end"] for r, e in zip(roots, a.calls("span_end")[1::2])))
    test("traces: in the run of the tracker", all(c["metadata"] == {"mlflow.sourceRun": "run-1"} for c in roots))
    order = [c["what"] for c in a.calls("experiment", "create_run")]
    test("traces: opened when the run is there, for a new database is made by one client", order == [
        "experiment", "create_run", "experiment"], str(order))
    # traces alone: no run, no metrics
    b = Stand(s, "ml_traces")
    run(*s.ppo("traces", trainer__total_training_steps=1, **{**keys, "trainer.logger": "console"}), env=b.env)
    ends = [c["outputs"] for c in b.calls("span_end") if "response_ids" in c["outputs"]]
    test("traces without the tracker: token ids alone, no run", len(ends) == 3 and "response_text" not in ends[0] and
         not b.calls("create_run", "log_batch", "set_terminated"))


def check_down(s, test):
    """Down from the start, up again in mid-run."""
    a = Stand(s, "down")
    slow = s.dir / "slow.py"  # so that the run goes on for long enough after the fault
    slow.write_text("import time\ndef compute_score(*args, **kw):\n    time.sleep(0.03)\n    return 0.5\n")
    keys = {"trainer.logger": '["console","wandb"]', "trainer.total_training_steps": 60, "trainer.save_freq": 30,
            "reward.custom_reward_function.path": slow, "reward.num_workers": 1}
    a.fault("raise init")
    p = start(s.ppo("down", **keys), a.env)
    metrics = s.dir / "down/trackers/wandb.jsonl"
    test("down: records are kept", waited(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 5 and
                                          (a.dir / "faulted").exists()))
    a.fault("")
    err = p.communicate(timeout=120)[1]
    test("down: one warning, one line when it works again", p.returncode == 0 and err.count("tracker wandb fails") == 1 and
         err.count("tracker wandb works again") == 1, err[-600:])
    test("down: every step was sent, in order", a.steps() == list(range(1, 61)) and kept(s.dir / "down")[0] == [], str(a.steps()))
    test("down: neither the key nor the password is in the message", SECRET not in err and "hunter2" not in err and "***" in err)
    found = [f for f in (s.dir / "down").rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]
    test("the key is in no file of the run", not found, str(found))


def check_kept(s, test):
    """Down to the end: kept, and sent by the same command again.  A process that dies; one that hangs."""
    for fault in ("raise", "exit"):
        a = Stand(s, f"kept_{fault}")
        keys = {"trainer.logger": "wandb", "trainer.total_training_steps": 3}
        a.fault(f"{fault} log")
        began = time.time()
        p = run(*s.ppo(f"kept_{fault}", **keys), env=a.env)
        soon = time.time() - began < patience(45)
        left, at = kept(s.dir / f"kept_{fault}")
        test(f"{fault}: the run ends well and soon, all is kept and said", soon and a.steps() == [] and
             [r["step"] for r in left] == [1, 2, 3] and p.stderr.count("warning: tracker wandb") == 2 and
             "were not sent" in p.stderr, p.stderr[-600:])
        a.fault("")
        p = run(*s.ppo(f"kept_{fault}", **keys), env=a.env)
        test(f"{fault}: the same command again sends it", a.steps() == [1, 2, 3] and kept(s.dir / f"kept_{fault}")[0] == [] and
             {c["id"] for c in a.calls("init")} == {at["run"]["id"]} and "3 records" in p.stderr, p.stderr[-600:])
    a.fault("raise log")
    run(*s.ppo("kept_raise", trainer__resume_mode="disable", **keys), env=a.env)
    p = run(*s.ppo("kept_raise", trainer__resume_mode="disable", **keys), env=a.env)
    test("a new run in the same directory says what it leaves behind", "3 records of the run before" in p.stderr, p.stderr[-400:])


def check_refused(s, test):
    a = Stand(s, "refused")
    a.fault("refuse log")
    p = run(*s.ppo("refused", trainer__logger="wandb", trainer__total_training_steps=3), env=a.env)
    test("records that the client refuses are left out, said once", p.stderr.count("does not take metrics of step 1") == 1 and
         p.stderr.count("warning: tracker wandb") == 1 and kept(s.dir / "refused")[0] == [] and a.calls("finish"), p.stderr[-400:])


def check_hang(s, test):
    """A client that hangs holds up no step; a signal ends the run, within the clients' ten seconds."""
    a = Stand(s, "hang")
    a.fault("hang log")
    args = s.ppo("hang", trainer__total_training_steps=1000, trainer__save_freq=1000,
                 trainer__logger='["console","file","wandb","mlflow"]')
    p = start(args, a.env)
    numbers = s.dir / "hang/metrics.jsonl"
    # both clients have answered: one that has not may take longer at the end
    test("hang: steps go on", waited(lambda: numbers.exists() and len(numbers.read_text().splitlines()) > 20 and
                                     (a.dir / "faulted").exists() and a.calls("log_batch")))
    began = time.time()
    p.send_signal(signal.SIGTERM)
    err = p.communicate(timeout=300)[1]
    took = time.time() - began
    test("hang: a signal still ends the run", p.returncode == 143 and took < patience(30), f"{took:.0f} s")
    steps = len(numbers.read_text().splitlines())
    left, at = kept(s.dir / "hang")
    test("hang: all is kept, and the other tracker has it", [r["step"] for r in left] == list(range(1, steps + 1)) and
         [m["step"] for c in a.calls("log_batch") for m in c["metrics"] if m["key"] == "training/global_step"] ==
         list(range(1, steps + 1)), err[-400:])
    test("hang: the other tracker's run is marked as killed", [c["status"] for c in a.calls("set_terminated")] == ["KILLED"])


def check_kill(s, test):
    """kill -9 in mid-run, and a resumed run: each step is sent, none is lost; the bits are those without trackers."""
    a = Stand(s, "kill")
    a.fault("0.2 log")
    args = s.ppo("kill", trainer__logger='["console","wandb"]', trainer__total_training_steps=12, trainer__save_freq=3)
    p = start(args, a.env)
    spool = s.dir / "kill/trackers/wandb.jsonl"
    waited(lambda: a.steps() and '"step":7,' in spool.read_text())
    os.kill(p.pid, signal.SIGKILL)
    p.communicate()
    p = run(*args[:1], *args[1:], env=a.env)
    test("killed: every step is sent after the resume", set(a.steps()) == set(range(1, 13)), str(a.steps()))
    test("killed: one run", len({c["id"] for c in a.calls("init")}) == 1)
    run(*s.ppo("none", trainer__logger="console", trainer__total_training_steps=12, trainer__save_freq=12))
    test("the bits are those of a run without trackers", state(s.dir / "kill", 12) == state(s.dir / "none", 12))


def send_all(pid, sig):
    """As `ray job stop` does it: to every process of the run."""
    pids = [pid, *below(pid)]
    for p in pids:
        try:
            os.kill(p, sig)
        except ProcessLookupError:
            pass
    return pids


def global_steps(a):
    """Those that MLflow has been given, in order."""
    return [m["step"] for c in a.calls("log_batch") for m in c["metrics"] if m["key"] == "training/global_step"]


def n_traces(a):
    return len([c for c in a.calls("span") if not c["child"]])


TRACE = "actor_rollout_ref.rollout.trace."


def check_job_stop(s, test):
    """SIGTERM to every process of the run, while MLflow's first connection takes its time."""
    a = Stand(s, "job_stop")
    a.fault("11 experiment")
    p = start(s.ppo("job_stop", trainer__total_training_steps=1000, trainer__save_freq=1000,
                    trainer__logger='["console","file","mlflow"]',
                    **{TRACE + "backend": "mlflow", TRACE + "max_samples_per_step_per_worker": 1}), a.env)
    numbers = s.dir / "job_stop/metrics.jsonl"
    waited(lambda: numbers.exists() and len(numbers.read_text().splitlines()) >= 2 and (a.dir / "faulted").exists())
    pids = send_all(p.pid, signal.SIGTERM)
    err = p.communicate(timeout=300)[1]
    steps = list(range(1, len(numbers.read_text().splitlines()) + 1))
    test("job stop: the run ends by the signal, and is told to MLflow as killed", p.returncode == 143 and
         [c["status"] for c in a.calls("set_terminated")] == ["KILLED"], err[-600:])
    test("job stop: every step, once, in one run", global_steps(a) == steps and len(a.calls("create_run")) == 1, err[-600:])
    test("job stop: every trace, once", n_traces(a) == 2 * len(steps) and kept(s.dir / "job_stop", "mlflow_traces")[0] == [],
         f"{n_traces(a)} of {len(steps)} steps")
    test("job stop: what is waited for is said", "waiting for tracker mlflow: its client is starting" in err, err[-600:])
    test("job stop: no process is left", len(pids) > 4 and
         waited(lambda: not any(pathlib.Path(f"/proc/{x}").exists() for x in pids), 20))


def check_sync(s, test):
    """What a run that was killed has not sent is listed, and sent without training."""
    a = Stand(s, "sync_clients")
    a.fault("raise log init experiment")
    d = s.dir / "sync"
    keys = {"trainer__logger": '["console","file","mlflow","wandb"]', "trainer__test_freq": 2, "trainer__log_val_generations": 1,
            "trainer__total_training_steps": 1000, "trainer__save_freq": 1000, "trainer__project_name": "sums",
            TRACE + "backend": "mlflow", TRACE + "project_name": "rollouts"}
    p = start(s.ppo("sync", **keys), a.env)
    spools = [d / f"trackers/{name}.jsonl" for name in ("mlflow", "wandb", "mlflow_traces")]
    waited(lambda: all(f.exists() and '"step":4,' in f.read_text() for f in spools) and (a.dir / "faulted").exists())
    q = run("trackers", "sync", d, check=False, env=a.env)
    test.refused("sync: not while the run goes on, which is named", q, 4, f"pid {p.pid} on ", "verlc ppo")
    os.kill(p.pid, signal.SIGKILL)
    p.communicate()
    left = {f.name[:-6]: kept(d, f.name[:-6])[0] for f in spools}
    listed = {t["tracker"]: t for t in json.loads(run("trackers", d, "--json").stdout)["trackers"]}
    test("trackers: lists what is kept", {k: v["unsent"] for k, v in listed.items()} == {k: len(v) for k, v in left.items()} and
         listed["wandb"]["open"] and listed["wandb"]["first_step"] == 1 and listed["wandb"]["run"] is None, str(listed))
    q = run("trackers", "sync", d, "--dry-run")
    test("sync --dry-run: the same in words, nothing is sent",
         f"wandb: 0 sent, {len(left['wandb'])} to send of step 1 to " in q.stdout and not a.calls("init"), q.stdout)
    q = run("trackers", "sync", d, "--only", "trackio", check=False)
    test.refused("sync --only: a name that it has not", q, USAGE, "mlflow, wandb")
    q = run("trackers", "sync", d, "--only", "wandb", check=False, env=a.env)
    test.refused("sync: a tracker that fails, in its own words", q, 1, "tracker wandb fails", "no server at", "still kept in")
    a.fault("")
    q = run("trackers", "sync", d, env=a.env)
    want = [r["step"] for r in left["mlflow"] if r["kind"] == "metrics"]
    test("sync: every step once, in order, to each", a.steps() == want == global_steps(a), f"{a.steps()} {global_steps(a)}")
    test("sync: every trace once", n_traces(a) == len(left["mlflow_traces"]))
    tables = [c["data"]["val/generations"]["data"][-1][0] for c in a.calls("log") if "val/generations" in c["data"]]
    test("sync: the tables", tables == [r["step"] for r in left["wandb"] if r["kind"] == "generations"], str(tables))
    ends = a.calls("set_terminated")
    test("sync: the run ends there as it has ended, at that time", [c["status"] for c in ends] == ["KILLED"] and
         [c["exit_code"] for c in a.calls("finish")] == [1] and
         abs(ends[0]["end_time"] / 1000 - (d / "metrics.jsonl").stat().st_mtime) < 5, str(ends))
    test("sync: as the run would have: experiments, name, configuration",
         {c["name"] for c in a.calls("experiment")} == {"sums", "rollouts"} and a.calls("init")[-1]["project"] == "sums" and
         a.calls("init")[-1]["config"]["trainer"]["total_training_steps"] == 1000)
    test("sync: says what it did", f"wandb: {len(left['wandb'])} records sent; its run has ended as killed" in q.stdout, q.stdout)
    before = a.calls("init", "create_run", "log")
    q = run("trackers", "sync", d, env=a.env)
    test("sync: again, nothing is left", "nothing is left to send" in q.stderr and
         a.calls("init", "create_run", "log") == before and "has ended as killed" in run("trackers", d).stdout, q.stderr)
    test.refused("sync: no run there", run("trackers", "sync", s.dir / "no_such", check=False), 3, "no_such")
    test("sync: makes no directory", not (s.dir / "no_such").exists())
    q = run(*s.ppo("sync", **{**keys, "trainer__total_training_steps": 2, "trainer__resume_mode": "disable"}), env=a.env)
    listed = json.loads(run("trackers", d, "--json").stdout)["trackers"]
    test("a run that ends well has nothing to sync", all(not t["open"] and t["unsent"] == 0 for t in listed), str(listed))


def check_logged_in(s, test):
    """A directory ./wandb is no package; W&B without a login has one note and no records."""
    home, a = s.dir / "home", Stand(s, "logged_out")
    (home / "wandb/run-1").mkdir(parents=True)
    (home / "keys").write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    (home / "nothing").write_text("")
    env = {"HOME": str(home), "NETRC": str(home / "nothing"), "WANDB_API_KEY": "", "WANDB_MODE": ""}
    default = [x for x in s.ppo("no_wandb", trainer__total_training_steps=1) if not x.startswith("trainer.logger=")]
    p = run(*default, env=env, cwd=home)
    test("a directory ./wandb is not the package", "has no package of that name" in p.stderr and "tracker wandb" not in p.stderr and
         not (s.dir / "no_wandb/trackers").exists(), p.stderr[-400:])
    env["PYTHONPATH"] = a.env["PYTHONPATH"]
    p = run(*default, "trainer.resume_mode=disable", env=env, cwd=home)
    test("not logged in: one note that says what to do, no records", "note: trainer.logger: wandb is verl's default, and it is not "
         "logged in: 'wandb login' or WANDB_API_KEY" in p.stderr and "tracker wandb" not in p.stderr and not a.calls("init") and
         not (s.dir / "no_wandb/trackers").exists(), p.stderr[-400:])
    p = run(*default, "trainer.resume_mode=disable", "trainer.logger=wandb", env=env, cwd=home)
    test("asked for and not logged in: a warning, the records wait for a sync", "warning: trainer.logger: wandb is not logged in" in
         p.stderr and len(kept(s.dir / "no_wandb")[0]) == 1 and not a.calls("init"), p.stderr[-400:])
    q = run("trackers", "sync", s.dir / "no_wandb", env=env, cwd=home, check=False)
    test.refused("sync: not logged in", q, 1, "tracker wandb is not logged in", "wandb login")
    q = run("trackers", "sync", s.dir / "no_wandb", env={**env, "WANDB_MODE": "offline"}, cwd=home)
    test("offline: sent, and what uploads it is said", a.steps() == [1] and
         "'wandb sync /runs/offline-run-1' uploads it" in q.stderr, q.stderr)
    (home / ".config/wandb").mkdir(parents=True)
    logins = [({"WANDB_API_KEY": SECRET}, ""), ({"NETRC": str(home / "keys")}, ""), ({}, "[default]\nmode = offline\n"),
              ({"WANDB_BASE_URL": "https://w.example", "NETRC": str(home / "keys")}, None), ({}, None)]
    for more, settings in logins:
        (home / ".config/wandb/settings").write_text(settings or "")
        python = [sys.executable, "-m", "verlc_helpers.tracker"]
        path = f"{pathlib.Path(os.environ['SOURCE_DIR'])}/python:{env['PYTHONPATH']}"
        p = subprocess.run(python, input='{"check": ["wandb"]}\n', capture_output=True, text=True, cwd=home,
                           env={**os.environ, **env, **more, "PYTHONPATH": path})
        test(f"login by {more} {settings!r}", (json.loads(p.stdout)["ok"]["logged_out"] == []) == (settings is not None), p.stderr)


def check_missing(s, test):
    a = Stand(s, "missing")
    two = {"trainer__total_training_steps": 2, "trainer__save_freq": 2}
    for logger, package in (("clearml", "clearml"), ('["console","trackio"]', "trackio")):
        p = run(*s.ppo(package, **two, trainer__logger=logger), check=False, env=a.env)
        kept = (s.dir / package / f"trackers/{package}.jsonl").read_text()
        test(f"{package} without its package: said with the line that installs it, the records are kept", p.returncode == 0 and
             f"-m pip install {package}" in p.stderr and '"step":2,' in kept, p.stderr[-500:])
    p = run(*s.ppo("no_traces", **two, **{"actor_rollout_ref.rollout.trace.backend": "mlflow"}), check=False)
    test("traces without MLflow are kept", p.returncode == 0 and "pip install mlflow" in p.stderr and
         (s.dir / "no_traces/trackers/mlflow_traces.jsonl").stat().st_size > 0, p.stderr[-500:])
    p = run(*s.ppo("unmade", **{"actor_rollout_ref.rollout.trace.backend": "weave"}), check=False)
    test.refused("weave", p, USAGE, "rollout.trace.backend", "weave", "mlflow")
    p = run(*s.ppo("unmade", trainer__logger="vemlp_wandb"), check=False)
    test.refused("vemlp_wandb", p, USAGE, "trainer.logger", "vemlp_wandb", "use wandb")
    args = [x for x in s.ppo("default", trainer__total_training_steps=1) if not x.startswith("trainer.logger=")]
    p = run(*args)
    test("verl's default names wandb: without it a note", p.stderr.count("note: trainer.logger: wandb") == 1 and
         "step:1 " in p.stdout, p.stderr[-300:])


def main():
    """The checks mostly wait, for clients that are slow: four at a time."""
    checks = [check_job_stop, check_hang, check_kept, check_sync, check_down, check_kill, check_mlflow, check_missing, check_wandb,
              check_logged_in, check_refused]
    checks = [c for c in checks if not sys.argv[1:] or c.__name__ in sys.argv[1:]]
    with Scratch(small=True) as s:
        test = at_once(*[functools.partial(check, s) for check in checks])
    test.end()


main()
