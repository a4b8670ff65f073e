"""The real TensorBoard reads the event files that verlc writes, with equal values: a
run, stopped and resumed; the validation samples as text.  Python's sqlite3 reads run.db while the run is still
writing it.  MLflow's parameters and names, and the choice of validation samples, are those of verl's own code.
Needs tensorboard and verl from PyPI (run by `make oracle`).

  VERLC=build/release/verlc python tools/oracle_track.py
"""

import json
import logging
import math
import pathlib
import sqlite3
import struct
import subprocess
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]
from verlc_test import ENV, VERLC, Scratch, Tests, run  # noqa: E402

import numpy  # noqa: E402
import yaml  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # noqa: E402

sys.modules.setdefault("orjson", types.ModuleType("orjson"))  # of verl's JSONL logger, which is not asked here
from verl.utils import tracking  # noqa: E402
from verlc_helpers import tracker_mlflow  # noqa: E402


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def recorded(run_dir):
    """{(name, step): value} of metrics.jsonl; null where it is not finite."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {(name, d["step"]): v for d in lines for name, v in d["data"].items()}


def check_values(test, name, run_dir):
    tb = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    tb.Reload()
    got = {(tag, e.step): e.value for tag in tb.Tags()["scalars"] for e in tb.Scalars(tag)}
    want = recorded(run_dir)
    wrong = [k for k, v in want.items() if k not in got or not (got[k] == f32(v) if v is not None else not math.isfinite(got[k]))]
    print(f"{name}: {len(want)} values of {len({k[0] for k in want})} metrics")
    test(f"{name}: TensorBoard reads every value, equal in fp32", want and not wrong and set(got) == set(want),
         str((wrong or set(got) ^ set(want)))[:400])


def check_live(s, test):
    """Reads run.db over and over while the run writes it."""
    p = subprocess.Popen([VERLC, *map(str, s.ppo("live"))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV)
    seen, counts = [], set()
    path = s.dir / "live/run.db"
    while p.poll() is None:
        time.sleep(0.02)
        if not path.exists():
            continue
        try:
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            seen.append(db.execute("select count(distinct step) from metrics").fetchone()[0])
            counts |= set(db.execute("select step, count(*) from metrics group by step"))
            db.close()
        except sqlite3.OperationalError as e:
            test("no reader is refused", "no such table" in str(e), str(e))  # the first instant
    test("run.db is read while it is written", p.returncode == 0 and len(set(seen)) > 2 and seen == sorted(seen),
         str(sorted(set(seen))))
    db = sqlite3.connect(path)
    test("a reader sees a step whole or not at all", counts <= set(db.execute("select step, count(*) from metrics group by step")),
         str(sorted(counts)))
    want = recorded(s.dir / "live")
    got = {(name, step): v for step, name, v in db.execute("select step, name, value from metrics")}
    test("run.db has the values of the JSONL file", got == {k: None if v is None else float(v) for k, v in want.items()})
    n, ids, logp, response = db.execute("select count(*), ids, logp, response from samples where step = 1").fetchone()
    test("run.db has every sample with a log-prob for each id", n == 8 and len(ids) == len(logp) > 0 and isinstance(response, str))
    test("run.db is sound", db.execute("pragma integrity_check").fetchone()[0] == "ok")


def check_text(s, test):
    """The samples that verl's trainer would show (ray_trainer._maybe_log_val_generations), in its Markdown."""
    run(*s.ppo("text", trainer__total_training_steps=2, trainer__test_freq=2, trainer__log_val_generations=3,
               trainer__logger="tensorboard"))
    tb = EventAccumulator(str(s.dir / "text/tensorboard"))
    tb.Reload()
    event, = tb.Tensors("val/generations/text_summary")
    got = event.tensor_proto.string_val[0].decode()
    rows = sqlite3.connect(s.dir / "text/run.db").execute(
        "select prompt, response, score from samples where validation = 1 order by id")
    samples = sorted(rows.fetchall(), key=lambda r: r[0])
    numpy.random.RandomState(42).shuffle(samples)

    class Writer:
        def add_text(self, tag, text, step):
            self.text = (tag + "/text_summary", text, step)

        def flush(self):
            pass

    logger = tracking.ValidationGenerationsLogger()
    logger.writer = Writer()
    logger.log_generations_to_tensorboard([(i, o, f"{x:g}") for i, o, x in samples[:3]], 2)
    test("TensorBoard's text panel has verl's text", logger.writer.text == ("val/generations/text_summary", got, event.step),
         f"{got}\n{logger.writer.text[1]}"[:800])


def check_names(s, test):
    config = yaml.safe_load(run(*s.ppo("names"), "--cfg", "job").stdout)
    want = tracking._compute_mlflow_params_from_objects(config)
    got = tracker_mlflow.flat(config)
    test("MLflow's parameters are verl's", got == want, str(set(got.items()) ^ set(want.items()))[:400] if got != want else "")
    adapter, seen = tracking._MlflowLoggingAdapter(), {}
    logging.disable(logging.WARNING)
    sys.modules["mlflow"] = type("mlflow", (), {"log_metrics": staticmethod(lambda metrics, step: seen.update(metrics))})
    names = ["val-core/a/acc/mean@1", "a//b", "x(y)", "perf/µs", "a b:c.d-e_f", "///", "p@q@r"]
    for name in names:
        adapter.log({name: 1.0}, 1)
    test("MLflow's names are verl's", list(seen) == [tracker_mlflow.key(n) for n in names], str(list(seen)))


def main():
    test = Tests()
    with Scratch() as s:
        check_text(s, test)
        check_names(s, test)
        keys = {"trainer.logger": "[console,file,tensorboard]", "trainer.test_freq": 2}
        run(*s.ppo("tb", trainer__total_training_steps=4, **keys))
        check_values(test, "a run", s.dir / "tb")
        time.sleep(1.1)  # the name of an event file has the second in it
        # as after a crash: step 4 was logged and its checkpoint lost
        (s.dir / "tb/global_step_4/manifest.json").unlink()
        run(*s.ppo("tb", **keys))
        check_values(test, "resumed", s.dir / "tb")
        files = sorted((s.dir / "tb/tensorboard").iterdir())
        records = [e for f in files for e in EventFileLoader(str(f)).Load()]
        test("every record of both files is read", len(files) == 2 and len(records) == (1 + 4) + (2 + 3),
             f"{len(files)} files, {len(records)} records")
        check_live(s, test)
    test.end()


main()
