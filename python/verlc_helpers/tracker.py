"""The trackers' own Python clients: swanlab, clearml, trackio here, W&B in tracker_wandb.py, MLflow in tracker_mlflow.py.

  init {"tracker": "wandb", "project", "experiment", "config": {...}, "run_dir", "version", "proxy": of wandb,
        "trace_project", "trace_experiment", "has_run": of mlflow_traces}
  {"run": that of the last reply or null, "records": [...]}
      -> {"run": {"id": ...}, "done": n, "error": text or null, "refused": [text]}
         the first n records are with the client (after BATCH_S s perhaps not all); error: why the next one is not
  {"run": ..., "records": [], "finish": "done" | "failed" | "killed", "ended": seconds since 1970 or 0: now}
      closes the run; the reply may have "hint": what the user may want to do now
  {"check": ["mlflow", ...]} -> {"missing": [...], "logged_out": [...], "python": path}   without init

A record is {"kind": "metrics", "step", "time", "data": {name: number}}, {"kind": "generations", "step",
"rows": [[input, output, score], ...]}, or {"kind": "trace", ...} (mlflow_traces alone).  The run is opened by the first request
and again after a failure; with an id it is the same run.  What the user sees there is what verl's Tracking
(verl/utils/tracking.py) makes: names, tables, parameters.

Invariant: no text that leaves this process holds a secret of its environment.
"""

import importlib.util
import os
import re
import sys
import time

from verlc_helpers.protocol import one_line, serve

SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
SECRET_CONFIG = re.compile(r"(api_?key|access_?key(_id)?|_token|secret|password)$", re.IGNORECASE)  # not data.prompt_key
HIDDEN = "***"
BATCH_S = 5.0  # after which a request is answered with what is done, so that it is on record


def redact(text):
    """The text without the values of secret environment variables and without passwords in URLs."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, HIDDEN)
    return re.sub(r"://[^/@\s'\"]+@", f"://{HIDDEN}@", text)


def without_secrets(config):
    """The configuration with the values of keys such as api_key hidden."""
    if isinstance(config, dict):
        return {k: HIDDEN if SECRET_CONFIG.search(k) and isinstance(v, str) else without_secrets(v) for k, v in config.items()}
    if isinstance(config, list):
        return [without_secrets(v) for v in config]
    return redact(config) if isinstance(config, str) else config


def describe(error):
    return redact(one_line(f"{type(error).__name__}: {error}"))[:500]


def numbers(data):
    """JSON has no NaN and no infinities; they come as text."""
    return {name: float(v) if isinstance(v, str) else v for name, v in data.items()}


class Refused(Exception):
    """The client will never take this record."""


class Client:
    """One run of one tracker.  Methods raise what the client raises; after that the run is opened again."""

    def __init__(self, args):
        self.args = args
        self.project, self.experiment = args["project"], args["experiment"]

    def open(self, run_id):
        """Opens a new run (None), or the one with this id; returns the id."""
        raise NotImplementedError

    def metrics(self, step, data, at):
        raise NotImplementedError

    def generations(self, step, rows, at):
        raise NotImplementedError

    def finish(self, how, ended):
        """Closes the run, which ended at a time (0: now); returns a hint for the user, or None."""
        raise NotImplementedError

    def drop(self):
        """After a failure: forget the open run."""

    def put_all(self, records):
        """Sends records in order: (how many, the error that stopped it, refusals)."""
        refused, until = [], time.monotonic() + BATCH_S
        for n, record in enumerate(records):
            if n > 0 and time.monotonic() > until:
                return n, None, refused
            try:
                self.put(record)
            except (Refused, TypeError, ValueError, KeyError) as error:
                refused.append(f"{record['kind']} of step {record['step']}: {describe(error)}")
            except Exception as error:
                return n, error, refused
        return len(records), None, refused

    def put(self, record):
        if record["kind"] == "metrics":
            self.metrics(record["step"], numbers(record["data"]), record["time"])
        elif record["kind"] == "generations":
            self.generations(record["step"], record["rows"], record["time"])


class Swanlab(Client):
    def open(self, run_id):
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "cloud")
        online = mode in ("cloud", "online")
        if os.environ.get("SWANLAB_API_KEY") and online:
            swanlab.login(os.environ["SWANLAB_API_KEY"])
        again = {"id": run_id, "resume": "allow"} if online and run_id else {}  # resuming is the cloud's
        config = {"FRAMEWORK": "verl", **self.args["config"]}
        run = swanlab.init(project=self.project, experiment_name=self.experiment, config=config,
                           logdir=os.environ.get("SWANLAB_LOG_DIR", "swanlog"), mode=mode, **again)
        return getattr(run, "id", None) or run_id

    def metrics(self, step, data, at):
        import swanlab

        swanlab.log(data, step=step)

    def generations(self, step, rows, at):
        import swanlab

        table = swanlab.echarts.Table()
        table.add(headers=["step", "input", "output", "score"], rows=[[step, *row] for row in rows])
        swanlab.log({"val/generations": table}, step=step)

    def finish(self, how, ended):
        import swanlab

        swanlab.finish()

    def drop(self):
        import swanlab

        swanlab.finish()


class Clearml(Client):
    def open(self, run_id):
        import clearml

        if run_id and not run_id.startswith("offline-"):  # such a task is a closed archive
            again = {"continue_last_task": 0, "reuse_last_task_id": run_id}  # 0: no offset is added to the steps
        else:
            again = {"reuse_last_task_id": False}
        self.task = clearml.Task.init(project_name=self.project, task_name=self.experiment, output_uri=False,
                                      auto_connect_arg_parser=False, auto_connect_frameworks=False, **again)
        self.task.connect_configuration(self.args["config"], name="Hyperparameters")
        return self.task.id

    def metrics(self, step, data, at):
        logger = self.task.get_logger()
        for name, value in data.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title=title, series=series or title, value=value, iteration=step)

    def generations(self, step, rows, at):
        table = [["step", "input", "output", "score"], *([step, *row] for row in rows)]
        self.task.get_logger().report_table(title="Validation", series="Validation generations", table_plot=table, iteration=step)

    def finish(self, how, ended):
        if how == "failed":
            self.task.mark_failed(ignore_errors=True, status_message="verlc failed")
        self.task.close()

    def drop(self):
        if getattr(self, "task", None):
            self.task.close()


class Trackio(Client):
    def open(self, run_id):
        import trackio

        trackio.init(project=self.project, name=self.experiment, config=self.args["config"], resume="allow" if run_id else "never")
        return self.experiment

    def metrics(self, step, data, at):
        import trackio

        trackio.log(data, step=step)

    def generations(self, step, rows, at):
        import pandas
        import trackio

        table = pandas.DataFrame([[step, *row] for row in rows], columns=["step", "input", "output", "score"])
        trackio.log({"val/generations": trackio.Table(dataframe=table)}, step=step)

    def finish(self, how, ended):
        import trackio

        trackio.finish()

    def drop(self):
        import trackio

        trackio.finish()


def make(args):
    if args["tracker"].startswith("mlflow"):
        from verlc_helpers.tracker_mlflow import Mlflow, MlflowTraces

        return Mlflow(args) if args["tracker"] == "mlflow" else MlflowTraces(args)
    if args["tracker"] == "wandb":
        from verlc_helpers.tracker_wandb import Wandb

        return Wandb(args)
    return {"swanlab": Swanlab, "clearml": Clearml, "trackio": Trackio}[args["tracker"]](args)


CLIENT = None
RUN = None  # of the open run


def init(args):
    global CLIENT
    if args is None:
        return
    os.nice(10)  # training comes first; children inherit it
    args["config"] = without_secrets(args.get("config") or {})
    CLIENT = make(args)


def is_package(name):
    """A directory of this name without an __init__.py is none: W&B's own runs make ./wandb, and the directory of the command is
    in Python's path."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def check(names):
    from verlc_helpers.tracker_wandb import wandb_logged_in

    missing = [name for name in names if not is_package(name)]
    logged_out = [name for name in names if name == "wandb" and name not in missing and not wandb_logged_in()]
    return {"missing": missing, "logged_out": logged_out, "python": sys.executable}


def known_record(r):
    """The record; for a line that somebody has changed one that no client knows, which is left out."""
    whole = isinstance(r, dict) and isinstance(r.get("kind"), str) and isinstance(r.get("step"), int)
    return r if whole else {"kind": "unknown", "step": -1}


def close_after(error):
    global RUN
    RUN = None
    try:
        CLIENT.drop()
    except Exception:
        pass  # it has failed already
    return describe(error)


def handle(request):
    global RUN
    if "check" in request:
        return check(request["check"])
    known = request.get("run")
    answer = {"run": RUN or known, "done": 0, "error": None, "refused": []}
    try:
        if RUN is None:
            RUN = answer["run"] = {"id": CLIENT.open(known and known["id"])}
    except (Exception, SystemExit) as error:
        return answer | {"error": close_after(error)}
    answer["done"], error, answer["refused"] = CLIENT.put_all([known_record(r) for r in request["records"]])
    if error is not None:
        return answer | {"error": close_after(error)}
    if request.get("finish"):
        try:
            answer["hint"] = CLIENT.finish(request["finish"], request.get("ended") or 0)
        except Exception as error:
            answer["error"] = close_after(error)
    return answer


if __name__ == "__main__":
    serve(handle, init, block_stops=True)  # some clients have processes that send what they have been given
