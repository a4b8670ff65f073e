"""MLflow: a run's metrics, parameters, artifacts and tags; and, as a tracker of its own, traces of sampled rollouts.

The experiment is trainer.project_name and the run's name trainer.experiment_name, as in verl.  Everything goes
through MlflowClient with the time at which it was measured, so a record that is sent twice, or hours later, is the same
point.  An error of the connection is raised; what MLflow itself refuses is Refused.
"""

import json
import logging
import os
import re
import time

# Read by mlflow at import. Retries are the sender's (src/track/tracker_client.c), which waits longer and blocks nobody.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"  # else nobody learns that a trace was lost

from verlc_helpers.tracker import BATCH_S, Client, Refused, describe  # noqa: E402

URI = "sqlite:////tmp/mlruns.db"  # verl's default
MAX_BATCH = {"metrics": 1000, "params": 100}  # of one request
MAX_PARAM = 6000
RUN_S = 60.0  # for which traces wait for the run's id
END = {"done": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


def key(name):
    """A name as MLflow takes it: verl's rule (_MlflowLoggingAdapter)."""
    return re.sub(r"[^/\w.\- :]", "_", re.sub(r"/+", "/", name.replace("@", "_at_")))


def flat(value, prefix=""):
    """{"a/b": leaf} of nested objects; a list is an object with its list_len (verl's _compute_mlflow_params_from_objects)."""
    if isinstance(value, list):
        value = {"list_len": len(value), **{str(i): v for i, v in enumerate(value)}}
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, item in value.items() for k, v in flat(item, f"{prefix}/{name}" if prefix else name).items()}


class Warnings(logging.Handler):
    """What MLflow's trace exporter logs instead of raising."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class Mlflow(Client):
    def __init__(self, args):
        super().__init__(args)
        self.run_id = None

    def connect(self, project):
        """The id of the experiment."""
        import mlflow

        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or URI)
        self.client = mlflow.MlflowClient()
        return mlflow.set_experiment(project).experiment_id

    def open(self, run_id):
        self.experiment_id = self.connect(self.project)
        run_id = os.environ.get("MLFLOW_RUN_ID") or run_id or self.run_id  # self's: made, and then the server went away
        self.run_id = run_id if run_id and self.reopen(run_id) else self.create()
        self.parameters()
        self.client.log_dict(self.run_id, self.args["config"], "config.yaml")
        return self.run_id

    def reopen(self, run_id):
        """False: the server has no such run, as after a change of servers."""
        try:
            self.client.update_run(run_id, status="RUNNING")
        except Exception as error:
            if "RESOURCE_DOES_NOT_EXIST" in str(getattr(error, "error_code", "")):
                return False
            raise
        return True

    def create(self):
        tags = {"mlflow.source.name": "verlc", "mlflow.source.type": "JOB", "mlflow.user": os.environ.get("USER", "unknown"),
                "verlc.version": self.args["version"], "verlc.run_dir": os.path.abspath(self.args["run_dir"])}
        return self.client.create_run(self.experiment_id, run_name=self.experiment, tags=tags).info.run_id

    def parameters(self):
        """Those that the run does not have; MLflow's never change, so after a resume config.yaml shows them."""
        from mlflow.entities import Param

        there = self.client.get_run(self.run_id).data.params
        params = [Param(key(k), str(v)[:MAX_PARAM]) for k, v in flat(self.args["config"]).items() if key(k) not in there]
        for i in range(0, len(params), MAX_BATCH["params"]):
            self.client.log_batch(self.run_id, params=params[i:i + MAX_BATCH["params"]])

    def put_all(self, records):
        """Metrics of neighbouring records go in one request."""
        done, refused, until = 0, [], time.monotonic() + BATCH_S
        while done < len(records) and (done == 0 or time.monotonic() < until):
            n = 1
            size = len(records[done].get("data", ()))
            while (done + n < len(records) and records[done]["kind"] == records[done + n]["kind"] == "metrics"
                   and size + len(records[done + n]["data"]) <= MAX_BATCH["metrics"]):
                size += len(records[done + n]["data"])
                n += 1
            try:
                self.put_some(records[done:done + n])
            except Exception as error:
                if not (isinstance(error, (Refused, TypeError, ValueError, KeyError)) or "INVALID_PARAMETER" in
                        str(getattr(error, "error_code", ""))):
                    return done, error, refused
                refused.append(f"{records[done]['kind']} of step {records[done]['step']}: {describe(error)}")
            done += n
        return done, None, refused

    def put_some(self, records):
        kind = records[0]["kind"]
        if kind == "metrics":
            self.metrics(records)
        elif kind == "generations":
            rows = [{"input": i, "output": o, "score": s} for i, o, s in records[0]["rows"]]
            self.client.log_dict(self.run_id, rows, f"val_step{records[0]['step']}.json")

    def metrics(self, records):
        from mlflow.entities import Metric

        points = [Metric(key(name), float(value), int(r["time"] * 1000), r["step"]) for r in records for name, value in
                  r["data"].items()]
        for i in range(0, len(points), MAX_BATCH["metrics"]):
            self.client.log_batch(self.run_id, metrics=points[i:i + MAX_BATCH["metrics"]])

    def finish(self, how, ended):
        self.client.set_terminated(self.run_id, END[how], int(ended * 1000) if ended else None)


class MlflowTraces(Mlflow):
    def __init__(self, args):
        super().__init__(args)
        self.warnings = Warnings()
        logging.getLogger("mlflow.tracing").addHandler(self.warnings)

    def open(self, run_id):
        """Traces belong to the experiment; where the tracker mlflow makes a run, they name it. That run's id also says that
        the database is there: two clients that make a new one at the same time break it."""
        until = time.monotonic() + RUN_S
        while self.args["has_run"] and not run_id and time.monotonic() < until:
            time.sleep(0.2)
            try:
                with open(os.path.join(self.args["run_dir"], "trackers/mlflow.state.json")) as f:
                    run_id = json.load(f)["run"]["id"]
            except (OSError, ValueError, KeyError, TypeError):
                pass
        self.experiment_id = self.connect(self.args.get("trace_project") or self.project)
        self.run_id = run_id
        return run_id

    def put_some(self, records):
        self.trace(records[0])

    def trace(self, r):
        """verl's spans of a rollout: agent_loop, and in it SingleTurnAgentLoop.run with the token ids."""
        import mlflow

        begin, end = int((r["time"] - r["seconds"]) * 1e9), int(r["time"] * 1e9)
        tags = {"step": r["step"], "sample_index": r["sample_index"], "rollout_n": r["rollout_n"], "validate": r["validate"],
                "experiment_name": self.args.get("trace_experiment") or self.experiment}
        reward = {"reward_score": r["reward"], "reward_status": r["reward_status"]}
        text = {k: r[k] for k in ("prompt_text", "response_text") if k in r}
        outputs = {"prompt_ids": r["prompt_ids"], "response_ids": r["response_ids"], "response_logprobs": r["response_logprobs"],
                   "finish_reason": r["finish_reason"], "num_turns": 2, **reward, "reward_extra_info": r["extra"], **text}
        self.warnings.texts.clear()
        root = mlflow.start_span_no_context(
            "agent_loop", span_type="AGENT", experiment_id=self.experiment_id, start_time_ns=begin,
            inputs={"prompt": text.get("prompt_text", r["prompt_ids"])}, tags={k: str(v) for k, v in tags.items()},
            metadata={"mlflow.sourceRun": self.run_id} if self.run_id else None)
        child = mlflow.start_span_no_context(
            "SingleTurnAgentLoop.run", span_type="LLM", parent_span=root, start_time_ns=begin,
            inputs={"sampling_params": r["sampling"], "data_source": r["data_source"], "ground_truth": r["ground_truth"]})
        child.end(outputs=outputs, end_time_ns=end)
        root.end(outputs={"response": text.get("response_text", r["response_ids"]), **reward}, end_time_ns=end)
        if self.warnings.texts:
            raise ConnectionError(self.warnings.texts[0])

    def finish(self, how, ended):
        pass
