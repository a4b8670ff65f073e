"""verl's reward managers, one short run each: what batch, prime, rate_limited, remote and gdpo pass and take; a manager
of the user's, in the reward loop's form and in the older one, from a file that imports verl; a judge's server under
reward_router_address."""

import http.server
import json
import pathlib
import sqlite3
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

SMALL = {"reward.num_workers": 2, "trainer.save_freq": -1, "actor_rollout_ref.actor.use_kl_loss": False,
         "trainer.total_training_steps": 1, "data.shuffle": False}

SCORERS = '''
import asyncio, os, time
def batched(data_sources, solution_strs, ground_truths, extra_infos, scale=1):
    n = len(data_sources)
    assert n == len(solution_strs) == len(ground_truths) == len(extra_infos)
    assert all(e["rollout_reward_scores"] == {} for e in extra_infos) and "num_turns" not in extra_infos[0]
    return [{"score": scale * len(s), "n": n, "seen": s} for s in solution_strs]
def batched_bare(data_sources, solution_strs, ground_truths, extra_infos):
    return [None if i == 1 else float(len(s)) for i, s in enumerate(solution_strs)]
def batched_short(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]
def positional(task, completion, reference, extra):
    assert "num_turns" not in extra and task == "openai/gsm8k"
    return (float(len(completion)), "why")
def flaky(task, completion, reference, extra):
    if extra["index"] == 1:
        raise ValueError("no opinion")
    if extra["index"] == 2:
        time.sleep(60)
    return 1.0
def fails(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 4 == 1:
        raise ValueError("odd")
    return None if extra_info["index"] % 4 == 2 else 1.0
async def limited(data_source, solution_str, ground_truth, extra_info):
    start = time.time()
    await asyncio.sleep(0.05)
    with open(os.environ["CALLS"], "a") as f:
        f.write(f"{start} {time.time()}\\n")
    return {"score": 1.0, "keys": sorted(extra_info)}
def told(data_source, solution_str, ground_truth, extra_info):
    return {"score": extra_info["num_turns"], "a": 1.0, "b": 2.0}
def experiment(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "a": float(len(solution_str)), "b": 2.0, "name": extra_info["experiment_name"]}
'''

MANAGERS = '''
import numpy as np
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager import register as register_older
from verl.workers.reward_manager.abstract import AbstractRewardManager

@register("mine")
class Mine(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score=None, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: DataProto):
        assert len(data) == 1
        item = data[0]
        ids = item.batch["responses"]
        n = int(item.batch["attention_mask"][-ids.shape[-1]:].sum())
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids[:n], skip_special_tokens=True))
        rows = item.non_tensor_batch
        if rows["extra_info"]["index"] == 3:
            raise KeyError("row 3")
        return {"reward_score": float(n), "reward_extra_info": {
            "text": text, "truth": rows["reward_model"]["ground_truth"], "source": rows["data_source"],
            "batch": self.config.data.train_batch_size, "turns": rows["__num_turns__"], "prompt": rows["raw_prompt"][0]["content"],
            "eos": self.tokenizer.eos_token, "score_of": self.compute_score is not None}}

class Decoded(NaiveRewardManager):
    async def run_single(self, data):
        got = await super().run_single(data)
        got["reward_score"] = got["reward_score"] + 10
        return got

@register_older("older")
class Older(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", bonus=0):
        self.tokenizer, self.compute_score, self.bonus = tokenizer, compute_score, bonus

    def __call__(self, data, return_dict=False):
        n_prompt = data.batch["prompts"].shape[-1]
        lengths = np.asarray(data.batch["attention_mask"][:, n_prompt:].sum(-1))
        rewards, texts = np.zeros(tuple(data.batch["responses"].shape), dtype=np.float32), []
        for i in range(len(data)):
            item = data[i]
            texts.append(self.tokenizer.decode(item.batch["responses"][:lengths[i]], skip_special_tokens=True))
            rewards[i, lengths[i] - 1] = len(data) + self.bonus
        return {"reward_tensor": rewards, "reward_extra_info": {"text": texts}} if return_dict else rewards

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "seen": solution_str}
'''

# as a reward file of verl's is written: the address and the tokenizer are arguments
JUDGED = '''
import asyncio, json, urllib.request

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    ids = reward_model_tokenizer.apply_chat_template([{"role": "user", "content": solution_str}], tokenize=True,
                                                     add_generation_prompt=True)
    assert reward_model_tokenizer.decode(ids, skip_special_tokens=True)
    body = json.dumps({"model": "judge", "messages": [{"role": "user", "content": f"Grade: {ground_truth}"}]}).encode()
    def ask():
        url = f"http://{reward_router_address}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request).read())
    answer = await asyncio.get_running_loop().run_in_executor(None, ask)
    return {"score": float(answer["choices"][0]["message"]["content"]), "truth": ground_truth}
'''


class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        grade = asked["messages"][0]["content"].split()[-1]
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": grade}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Runs:
    def __init__(self, s):
        self.s, self.n = s, 0

    def __call__(self, file, function=None, manager=None, env=None, **more):
        """The samples of a run, its metrics, and the process."""
        self.n += 1
        name = f"run{self.n}"
        keys = {**SMALL, "trainer.rollout_data_dir": self.s.dir / name / "dump"}
        keys |= {k.replace("__", "."): v for k, v in more.items()}
        if function:
            keys |= {"reward.custom_reward_function.path": self.s.dir / file, "reward.custom_reward_function.name": function}
        if manager:
            keys["reward.reward_manager.name"] = manager
        p = run(*self.s.ppo(name, **keys), check=False, env=env)
        dump, log = self.s.dir / name / "dump/1.jsonl", self.s.dir / name / "metrics.jsonl"
        rows = [json.loads(x) for x in dump.read_text().splitlines()] if dump.exists() else []
        lines = log.read_text().splitlines() if log.exists() else []
        return rows, json.loads(lines[-1])["data"] if lines else {}, p


def check_batch(runs, test):
    rows, _, p = runs("scorers.py", "batched", "batch", **{"+reward.custom_reward_function.reward_kwargs.scale": 2})
    test("batch: one call with the lists of all samples", len(rows) == 8 and all(
        r["n"] == 8 and r["seen"] == r["output"] and r["score"] == 2 * len(r["output"]) for r in rows), p.stderr[-800:])
    rows, m, p = runs("scorers.py", "batched_bare", "batch")
    test("batch: one of them without a score costs that one", m.get("reward/num_errors") == 1 and "1 of 8 samples ended as "
         "unparsed" in p.stderr, p.stderr[-800:])
    _, _, p = runs("scorers.py", "batched_short", "batch")
    test.refused("batch: another number of scores is none", p, 1, "none of the 8 samples")
    test("and the warning says so", "returned 1 values, not a list of 8 scores" in p.stderr, p.stderr[-800:])
    rows, _, p = runs("scorers.py", "batched", "batch", algorithm__filter_groups__enable=True,
                      algorithm__filter_groups__metric="score", data__gen_batch_size=4, actor_rollout_ref__rollout__temperature=1.0)
    test("batch: with groups that are filtered", len(rows) == 8 or "filter_groups" in p.stderr, p.stderr[-800:])


def check_prime(runs, test):
    rows, _, p = runs("scorers.py", "positional", "prime")
    test("prime: called by position, the first of a tuple is the score", len(rows) == 8 and all(
        r["score"] == len(r["output"]) for r in rows), p.stderr[-800:])
    rows, m, p = runs("scorers.py", "flaky", "prime", **{"reward.timeout": 1, "reward.num_workers": 2})
    test("prime: what raises and what takes too long is no 0", m.get("reward/num_errors") == 4 and len(rows) == 4 and
         all(f"2 of 8 samples ended as {kind}" in p.stderr for kind in ("crash", "timeout")), p.stderr[-800:])


def check_counts(s, runs, test):
    """A scorer that fails in two ways, in two steps and in validation."""
    rows, m, p = runs("scorers.py", "fails", trainer__total_training_steps=2, trainer__test_freq=1, **{"reward.num_workers": 1})
    test("failures are counted by kind", m.get("reward/num_crash") == 2 and m.get("reward/num_unparsed") == 2 and
         m.get("reward/num_timeout") == 0 and m.get("reward/num_missing") == 0 and m.get("reward/num_errors") == 4, p.stderr[-600:])
    test("in validation too", m.get("val-aux/reward_errors") == 4 and m.get("val-aux/reward_errors/crash") == 2 and
         m.get("val-aux/reward_errors/unparsed") == 2, {k: v for k, v in m.items() if "errors" in k})
    warned = [line for line in p.stderr.splitlines() if line.startswith("warning: reward: ")]
    crash = [w for w in warned if "ended as crash (first: ValueError: odd" in w and "data_source openai/gsm8k, response: " in w]
    test("the log has an example of each kind once, then one line a step", len(crash) == 1 and
         sum("ended as unparsed" in w for w in warned) == 1 and
         sum("have no score: 2 crash, 2 unparsed" in w for w in warned) == 3 and len(warned) == 5, "\n".join(warned))
    db = sqlite3.connect(s.dir / f"run{runs.n}/run.db")
    events = db.execute("SELECT message FROM events WHERE kind = 'reward_error'").fetchall()
    test("run.db: an event with an example for each kind, each time", len(events) == 8 and
         all("response: " in e[0] for e in events), events)
    said = db.execute("SELECT reward_status, reward_message FROM samples WHERE reward_status <> 'score'").fetchall()
    test("and the message of each sample", {s for s, _ in said} == {"crash", "unparsed"} and all(m for _, m in said), said[:3])


def calls_of(path):
    return [tuple(map(float, line.split())) for line in path.read_text().splitlines()]


def check_limits(s, runs, test):
    path = s.dir / "calls"

    def limited(**more):
        path.unlink(missing_ok=True)
        rows, _, p = runs("scorers.py", "limited", "rate_limited", env={"CALLS": str(path)}, **{"reward.trial_call": False, **more})
        return rows, calls_of(path) if path.exists() else [], p

    rows, calls, p = limited()
    calls.sort()
    test("rate_limited: one call at a time over all processes, verl's default", len(rows) == 8 and all(
        b[0] >= a[1] for a, b in zip(calls, calls[1:])), f"{calls} {p.stderr[-600:]}")
    test("rate_limited: extra_info has the agent loop's fields, no num_turns", "global_steps" in rows[0]["keys"] and
         "num_turns" not in rows[0]["keys"], rows[0]["keys"] if rows else "")
    _, calls, p = limited(**{"reward.max_concurrent": 8, "+reward.max_rpm": 240})
    starts = sorted(c[0] for c in calls)
    test("rate_limited: max_rpm, 4 calls a second after a first 4", len(starts) == 8 and 0.9 < starts[7] - starts[0] < 5,
         f"{starts} {p.stderr[-600:]}")
    _, calls, p = limited(**{"reward.max_concurrent": 8, "+reward_model.max_tpm": 60000,
                            "+reward_model.estimated_tokens_per_request": 200})
    starts = sorted(c[0] for c in calls)
    test("rate_limited: max_tpm, 5 calls a second after a first 5", len(starts) == 8 and starts[7] - starts[0] >= 0.5, str(starts))
    _, _, p = runs("scorers.py", "told", "naive", **{"+reward.max_rpm": 600})
    test("max_rpm under another manager is noted", "reward.max_rpm has no effect" in p.stderr, p.stderr[-600:])


def check_others(runs, test):
    rows, _, p = runs("scorers.py", "told", "remote")
    test("remote: as naive, in processes", len(rows) == 8 and all(r["score"] == 2 for r in rows), p.stderr[-600:])
    rows, _, p = runs("scorers.py", "experiment", "gdpo", algorithm__adv_estimator="gdpo",
                      **{"+algorithm.gdpo_reward_keys": "[a,b]", "trainer.experiment_name": "try"})
    test("gdpo: the experiment's name, and the components", len(rows) == 8 and
         all(r["name"] == "try" and r["b"] == 2 for r in rows), p.stderr[-600:])
    _, _, p = runs("scorers.py", "told", None, **{"reward.reward_manager.name": "nobody"})
    test.refused("a name that nobody registered", p, 2, "nobody", "rate_limited")
    _, _, p = runs(None, None, "nobody")
    test.refused("a name without a file", p, 2, "nobody", "importlib")


def check_own(s, runs, test):
    own = {"reward.reward_manager.source": "importlib", "reward.reward_manager.module.path": s.dir / "managers.py"}
    rows, m, p = runs(None, None, "Mine", **own)
    good = [r for r in rows if r.get("text") is not None]
    test("a manager of one's own: run_single has DataProto, config and tokenizer", len(good) == 6 and all(
        r["text"] == r["output"] and r["truth"] == r["gts"] and r["source"] == "openai/gsm8k" and r["batch"] == 4 and
        r["turns"] == 2 and r["prompt"] in r["input"] and r["score"] > 0 for r in good), f"{rows[:1]} {p.stderr[-800:]}")
    test("what it raises is a crash of that sample", m.get("reward/num_errors") == 2 and "KeyError: 'row 3'" in p.stderr,
         p.stderr[-600:])
    rows, _, p = runs("managers.py", "compute_score", "mine")
    test("registered by the reward function's file", len([r for r in rows if r.get("text") == r["output"]]) == 6, p.stderr[-800:])
    rows, _, p = runs("managers.py", "compute_score", "Decoded", **own)
    test("one that inherits verl's naive manager", len(rows) == 8 and all(
        r["seen"] == r["output"] and r["score"] == 10 + len(r["output"]) for r in rows), p.stderr[-800:])
    rows, _, p = runs(None, None, "Older", **{**own, "+reward.reward_kwargs.bonus": 2})
    test("the older form: one call with the batch, reward_kwargs as arguments", len(rows) == 8 and all(
        r["score"] == 10 and r["text"] == r["output"] for r in rows), p.stderr[-800:])
    _, _, p = runs(None, None, None, reward_model__reward_loop_source="importlib", reward_model__reward_loop_module_path=s.dir /
                   "managers.py", reward_model__reward_loop_class_name="Mine")
    test("the older names of the keys", p.returncode == 0, p.stderr[-800:])
    _, _, p = runs(None, None, "Nobody", **own)
    test.refused("a class that the file has not", p, 3, "managers.py", "Nobody")
    _, _, p = runs(None, None, "Mine", **{"reward.reward_manager.source": "importlib"})
    test.refused("no file", p, 2, "reward.reward_manager.module.path")


def check_judge(s, runs, test):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    keys = {"reward_model.enable": True, "reward_model.model.path": s.dir / "model"}
    rows, _, p = runs("judged.py", "compute_score", **keys,
                      **{"+reward.reward_model.router_address": f"127.0.0.1:{server.server_port}"})
    test("a judge behind reward_router_address, as verl passes it", len(rows) == 8 and all(
        r["score"] == float(r["truth"]) == float(r["gts"]) for r in rows), p.stderr[-800:])
    server.shutdown()
    _, _, p = runs("judged.py", "compute_score")
    test.refused("without an address: what to set", p, 2, "reward_router_address", "reward.reward_model.router_address=HOST:PORT")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        for name, text in (("scorers.py", SCORERS), ("managers.py", MANAGERS), ("judged.py", JUDGED)):
            (s.dir / name).write_text(text)
        runs = Runs(s)
        t = time.monotonic()
        check_batch(runs, test)
        check_prime(runs, test)
        check_counts(s, runs, test)
        check_limits(s, runs, test)
        check_others(runs, test)
        check_own(s, runs, test)
        check_judge(s, runs, test)
        print(f"{time.monotonic() - t:.0f} s")
    test.end()


main()
