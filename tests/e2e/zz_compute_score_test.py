"""How the user's compute_score is called: an async one many times at once in one process, each call
with its own deadline; what extra_info holds beside the data's; reward.reward_kwargs; and texts with
a NUL, which arrive, are graded and are stored whole."""

import collections
import http.server
import json
import pathlib
import sqlite3
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, patience, run, signal, start  # noqa: E402

SMALL = {"reward.num_workers": 1, "trainer.save_freq": -1, "actor_rollout_ref.actor.use_kl_loss": False}

JUDGE = '''
import asyncio, os
busy = most = 0
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A judge behind an API: it answers when it serves 200, or after a while, and knows how many it serves."""
    global busy, most
    busy += 1
    most = max(most, busy)
    try:
        if solution_str == "slow":
            await asyncio.sleep(60)
        for _ in range(40):
            await asyncio.sleep(0 if most >= 200 else 0.1)
    finally:
        busy -= 1
    if solution_str == "raise":
        raise ValueError("no opinion")
    return {"score": 1.0, "most": most, "pid": os.getpid()}
'''


def evaluate(s, rows, *more):
    path = s.write("scored.jsonl", rows)
    t = time.monotonic()
    p = run("eval", f"data.path={path}", *more, check=False)
    return p, json.loads(p.stdout) if p.returncode == 0 else {}, time.monotonic() - t


def check_async(s, test):
    (s.dir / "judge.py").write_text(JUDGE)
    keys = [f"custom_reward_function.path={s.dir / 'judge.py'}", "+reward.num_workers=1", "+reward.timeout=5"]
    rows = [{"data_source": "a/b", "reward_model": {"ground_truth": ""}, "responses": ["fine"]} for _ in range(240)]
    p, got, seconds = evaluate(s, rows, *keys)
    test("an async compute_score: at least 200 calls in flight in one process", got.get("val-aux/a/b/most/mean@1", 0) >= 200 and
         got["test_score/a/b"] == 1, f"{got or p.stderr[-500:]}")
    test("and they are not one after another", seconds < patience(30), f"{seconds:.1f} s")
    rows[7]["responses"], rows[9]["responses"] = ["slow"], ["raise"]
    p, got, seconds = evaluate(s, rows, *keys)
    test("a call that passes its deadline and one that raises cost nobody else", got.get("errors") == 2 and
         got["test_score/a/b"] == 1, f"{got} {p.stderr[-500:]}")


class Service(http.server.BaseHTTPRequestHandler):
    """Scores an answer by its length; busy at each first request, without a score for "odd"."""
    asked = collections.Counter()

    def do_POST(self):
        answer = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answer"]
        self.asked[answer] += 1
        reply = json.dumps({} if answer == "odd" else {"score": len(answer)}).encode()
        self.send_response(429 if self.asked[answer] == 1 else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


def check_http(s, test):
    """examples/http_reward.py beside a service of its own."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [{"data_source": "a/b", "reward_model": {"ground_truth": ""}, "responses": [x]} for x in ("four", "sixsix", "odd")]
    example = pathlib.Path(__file__).resolve().parent.parent.parent / "examples/http_reward.py"
    p, got, _ = evaluate(s, rows, f"custom_reward_function.path={example}", "+reward.num_workers=1",
                         f"+custom_reward_function.reward_kwargs.url=http://127.0.0.1:{server.server_port}/score")
    test("a score over HTTP: asked again where the service is busy, no score where it gives none",
         got.get("test_score/a/b") == 5 and got.get("errors") == 1 and set(Service.asked.values()) == {2}, p.stderr[-500:])
    server.shutdown()
    server.server_close()


def check_shutdown(s, test):
    """SIGINT while 8 calls wait for an answer that takes a minute."""
    calls = s.dir / "calls"
    (s.dir / "long.py").write_text("import asyncio, os, subprocess\nasync def compute_score(**kw):\n"
                                   "    child = subprocess.Popen(['sleep', '60'])\n"
                                   f"    open({str(calls)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
                                   "    await asyncio.sleep(60)\n    return 1\n")
    p = start(s.ppo("stopped", **SMALL, **{"reward.custom_reward_function.path": s.dir / "long.py", "reward.trial_call": False}))
    until = time.monotonic() + 60
    while time.monotonic() < until and not (calls.exists() and len(calls.read_text().splitlines()) == 8):
        time.sleep(0.05)
    pids = calls.read_text().split() if calls.exists() else []
    p.send_signal(signal.SIGINT)
    t = time.monotonic()
    p.communicate(timeout=300)
    took = time.monotonic() - t
    test("a signal ends the run, and its calls with it", p.returncode == 130 and len(pids) == 16 and took < patience(20),
         f"{p.returncode} after {took:.1f} s, {len(pids)}")

    def alive(pid):
        stat = pathlib.Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    while any(map(alive, pids)) and time.monotonic() - t < 30:
        time.sleep(0.05)
    test("and no process is left", pids and not any(map(alive, pids)), str([q for q in pids if alive(q)]))


TELLS = '''
def naive(data_source, solution_str, ground_truth, extra_info=None):
    e = extra_info
    assert type(e["num_turns"]) is int and e["rollout_reward_scores"] == {}, e
    assert e["index"] >= 0 and e["turn_scores"] == [] and e["tool_rewards"] == [] and e["raw_prompt"][0]["role"] == "user", e
    return {"score": e["num_turns"], "version": e["global_steps"]}
def given(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["rollout_reward_scores"]["user"]
def dapo(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1, "n_keys": len(extra_info)}
'''
def samples_of(path):
    return [json.loads(x) for x in path.read_text().splitlines()]


def samples(d):
    return [x for f in sorted(pathlib.Path(d).glob("*.jsonl"), key=lambda f: int(f.stem)) for x in samples_of(f)]


def check_extra_info(s, test):
    (s.dir / "tells.py").write_text(TELLS)
    rows = [{**s.row(i), "reward_scores": {"user": i}} for i in range(4)]
    keys = {**SMALL, "reward.custom_reward_function.path": s.dir / "tells.py", "trainer.total_training_steps": 2}

    def scored(name, manager="naive", **more):
        run_dir = f"{name}_{manager}"
        p = run(*s.ppo(run_dir, **{**keys, "reward.custom_reward_function.name": name, "reward.reward_manager.name": manager,
                                   "trainer.rollout_data_dir": s.dir / run_dir / "dump", **more}), check=False)
        return samples(s.dir / run_dir / "dump"), p

    got, p = scored("naive")
    test("the naive manager: num_turns, rollout_reward_scores and the agent loop's fields", len(got) == 16 and
         all(x["score"] == 2 for x in got), p.stderr[-600:])
    versions = [x.get("version") for x in got]
    test("and the version of the weights", versions == [0] * 8 + [1] * 8, str(versions))
    got, p = scored("given", data__train_files=s.write("given.jsonl", rows), data__shuffle=False, trainer__total_training_steps=1)
    test("a column reward_scores of the data is rollout_reward_scores", [x["score"] for x in got] == [0, 0, 1, 1, 2, 2, 3, 3],
         p.stderr[-600:])
    got, p = scored("dapo", "dapo")
    test("the dapo manager: the data's extra_info alone, as in verl", len(got) == 16 and all(x["n_keys"] == 2 for x in got),
         p.stderr[-600:])


def check_reward_kwargs(s, test):
    over = "+reward.reward_kwargs.overlong_buffer_cfg."

    def tried(**more):
        return run(*s.ppo("kwargs", **{**SMALL, "trainer.total_training_steps": 1, **more}), check=False)

    p = tried(**{over + "enable": True, over + "len": 4, over + "penalty_factor": 1.0, "+reward.reward_kwargs.max_resp_len": 16})
    test("the naive manager does not read reward_kwargs: said by name", p.returncode == 0 and all(
        f"reward.reward_kwargs.{k} has no effect" in p.stderr for k in ("overlong_buffer_cfg", "max_resp_len")), p.stderr[-600:])
    test.refused("an unknown key of reward_kwargs", tried(**{"+reward.reward_kwargs.max_resp_length": 16}), 2,
                 "reward.reward_kwargs.max_resp_length", "max_resp_len", "custom_reward_function.reward_kwargs")
    dapo = {"reward.reward_manager.name": "dapo", over + "enable": True, over + "len": 4}
    test.refused("an unknown key of overlong_buffer_cfg", tried(**{**dapo, over + "penalty": 1.0}), 2,
                 "reward.reward_kwargs.overlong_buffer_cfg.penalty:", "penalty_factor")
    test.refused("reward_kwargs that are no dictionary", tried(**{"+reward.reward_kwargs.overlong_buffer_cfg": 3}), 2,
                 "reward.reward_kwargs.overlong_buffer_cfg: expected a dictionary")


SEEN = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "seen": solution_str, "truth": ground_truth, "k\\0": 1}
'''


def check_nul(s, test):
    """Random weights write a NUL now and then."""
    (s.dir / "seen.py").write_text(SEEN)
    rows = [s.row(i) for i in range(64)]
    for r in rows:
        r["reward_model"]["ground_truth"] += "\0x"
        r["prompt"][0]["content"] += "\0?"
    keys = {**SMALL, "data.train_files": s.write("nul.jsonl", rows), "data.train_batch_size": 64, "data.max_response_length": 48,
            "actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 64, "trainer.total_training_steps": 1,
            "reward.custom_reward_function.path": s.dir / "seen.py", "trainer.rollout_data_dir": s.dir / "nul/dump",
            "data.val_files": s.dir / "nul.jsonl", "trainer.test_freq": 1, "trainer.validation_data_dir": s.dir / "nul/val",
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True, "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0}
    run(*s.ppo("nul", **keys))
    got = samples(s.dir / "nul/dump")
    n = sum("\0" in x["output"] for x in got)
    test("compute_score gets what follows a NUL", len(got) == 256 and sum("\0" in x["seen"].rstrip("\0") for x in got) > 0,
         f"{n} outputs, {sum(chr(0) in x['seen'] for x in got)} seen")
    test("dumps have the text that was scored, whole", n > 0 and all(
        x["output"] == x["seen"] and x["score"] == len(x["seen"]) and x["gts"] == x["truth"] for x in got))
    test("prompt and ground truth too", all("\0?" in x["input"] and x["gts"].endswith("\0x") for x in got))
    val = samples(s.dir / "nul/val")
    test("validation too", len(val) == 64 and all(x["output"] == x["seen"] for x in val) and any("\0" in x["seen"] for x in val))
    db = sqlite3.connect(s.dir / "nul/run.db")
    kept = db.execute("SELECT prompt, response, ground_truth, score, extra FROM samples WHERE validation = 0 ORDER BY id")
    kept = kept.fetchall()
    test("run.db has them whole", len(kept) == 256 and any("\0" in r[1] for r in kept) and all(
        r[:4] == (x["input"], x["output"], x["gts"], x["score"]) and json.loads(r[4])["seen"] == r[1] for r, x in zip(kept, got)))

    run("generate", f"model.path={s.dir / 'model'}", f"data.path={s.dir / 'nul.jsonl'}",
        f"data.output_path={s.dir / 'said.jsonl'}", "data.n_samples=4", "rollout.prompt_length=64",
        "rollout.response_length=48", "rollout.top_p=1", "rollout.top_k=-1")
    said = samples_of(s.dir / "said.jsonl")
    whole = [t for r in said for t in r["responses"] if "\0" in t.rstrip("\0")]
    test("generate writes what follows a NUL", len(whole) > 0)
    p, got, _ = evaluate(s, said, f"custom_reward_function.path={s.dir / 'seen.py'}")
    mean = sum(len(t) for r in said for t in r["responses"]) / (4 * len(said))
    test("eval scores it", abs(got.get("test_score/openai/gsm8k", 0) - mean) < 1e-9, f"{mean} {got} {p.stderr[-300:]}")
    rows = [{"data_source": "lighteval/MATH", "reward_model": {"ground_truth": "5"}, "responses": ["so \0 \\boxed{5}"]},
            {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "5\0"}, "responses": ["#### 5"]}]
    p, got, _ = evaluate(s, rows)
    test("and the native graders read past it", got.get("test_score/lighteval/MATH") == 1 and got["test_score/openai/gsm8k"] == 0,
         f"{got} {p.stderr[-300:]}")


def main():
    test = Tests()
    with Scratch(small=True) as s:
        check_async(s, test)
        check_http(s, test)
        check_shutdown(s, test)
        check_extra_info(s, test)
        check_reward_kwargs(s, test)
        check_nul(s, test)
    test.end()


main()
