"""A run in the terminal: verlc show, verlc grep and verlc status of a run that goes on, that was killed with SIGKILL, that is
done; and the columns of run.db that they show."""

import json
import os
import pathlib
import pty
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import unicodedata

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import view_db  # noqa: E402
from verlc_test import ENV, VERLC, Scratch, Tests, run, start  # noqa: E402

# Scores by the response's length; samples 0 of every third prompt end in an exception.
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 3 == 0 and len(solution_str) % 2:
        raise ValueError("an odd response of prompt %d" % extra_info["index"])
    return {"score": len(solution_str) % 7 / 7, "letters": sum(c.isalpha() for c in solution_str)}
'''


def columns(line):
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def numbers(kind, blob):
    return struct.unpack(f"<{len(blob) // struct.calcsize(kind)}{kind}", blob)


def database(path):
    db = sqlite3.connect(path / "run.db")
    db.text_factory = bytes
    return db


def metric(db, step, name):
    return db.execute("SELECT value FROM metrics WHERE step=? AND name=?", [step, name]).fetchone()[0]


def check_columns(test, path):
    db = database(path)
    rows = db.execute("SELECT ids, logp, entropy, ref_logp, token_bytes, response, reward_status FROM samples WHERE step=1 AND "
                      "validation=0").fetchall()
    scored = [r for r in rows if r[6] == b"score" and r[2]]
    entropy = [x for r in scored for x in numbers("f", r[2])]
    test("entropy: its mean is the metric", abs(sum(entropy) / len(entropy) - metric(db, 1, "actor/entropy")) < 1e-5,
         (sum(entropy) / len(entropy), metric(db, 1, "actor/entropy")))
    test("ref_logp: the policy's own before the first update", all(r[1] == r[3] for r in scored) and scored)
    later = db.execute("SELECT logp, ref_logp FROM samples WHERE step=4 AND validation=0 AND ref_logp NOT NULL").fetchall()
    test("ref_logp: others' afterwards", later and any(a != b for a, b in later))
    test("token_bytes add up to the response", all(sum(numbers("H", r[4])) == len(r[5]) for r in rows))
    rows = db.execute("SELECT prompt_ids, prompt_bytes, prompt FROM samples").fetchall()
    special = json.loads(db.execute("SELECT value FROM meta WHERE key='special_tokens'").fetchone()[0])
    lengths = [dict(zip(numbers("i", ids), numbers("H", n))) for ids, n, _ in rows]
    test("prompt_bytes add up to the prompt", rows and all(
        sum(numbers("H", n)) == len(text) and len(n) * 2 == len(ids) for ids, n, text in rows))
    test("special tokens have a name and no text", special and any(i in n for i in map(int, special) for n in lengths) and all(
        n.get(int(i), 0) == 0 for i in special for n in lengths), special)
    keys = json.loads(db.execute("SELECT value FROM meta WHERE key='set'").fetchone()[0])
    test("the keys that were set", "data.train_batch_size" in keys and "trainer.seed" not in keys, keys)
    test("a number for each token", all(len(r[2]) == len(r[3]) == len(r[0]) and len(r[4]) * 2 == len(r[0]) for r in scored))
    bad = db.execute("SELECT reward_status, reward_message, score, entropy FROM samples WHERE validation=0 AND step>0 AND "
                     "reward_status<>'score'").fetchall()
    test("samples without a score are there, with the reason", bad and all(
        r[0] == b"crash" and b"an odd response" in r[1] and r[2] is None and r[3] is None for r in bad), bad[:2])
    n = sum(metric(db, s, "reward/num_errors") for (s,) in db.execute("SELECT DISTINCT step FROM metrics WHERE step>0"))
    test("as many as reward/num_errors says", n == len(bad), (n, len(bad)))
    kinds = dict(db.execute("SELECT kind, count(*) FROM events GROUP BY 1").fetchall())
    test("events: checkpoints, scorer's errors", kinds.get(b"checkpoint", 0) > 0 and kinds.get(b"reward_error", 0) > 0, kinds)
    for step, name, lo, hi, counts in db.execute("SELECT step, name, lo, hi, counts FROM histograms WHERE validation=0"):
        what = "score" if name == b"score" else "length(ids)/4"
        got = db.execute(f"SELECT min({what}), max({what}), count({what}) FROM samples WHERE step=? AND validation=0", [step])
        if got.fetchone() != (lo, hi, sum(numbers("i", counts))):
            test("histograms", False, (step, name))
    plan = json.loads(db.execute("SELECT value FROM meta WHERE key='plan'").fetchone()[0])
    block = max(p["bytes"] for p in plan["parts"] if p["block"])
    whole = sum(p["bytes"] for p in plan["parts"] if not p["block"])
    test("the plan's parts are its total", abs(plan["total"] - whole - block) < 0.02 * plan["total"], (plan, whole + block))


def check_text(test, path):
    for width in (80, 200):
        env = {"COLUMNS": str(width)}
        for args in (["show", path], ["show", path, "--step", 2], ["show", path, "--step", 2, "--validation"], ["status", path]):
            text = run(*args, env=env).stdout
            wide = [x for x in text.splitlines() if columns(x) > width and "global_step" not in x and str(path) not in x]
            name = " ".join(map(str, [args[0], *args[2:]]))
            test(f"{name}: {width} columns, no colours in a pipe", not wide and "\x1b" not in text, wide[:1])
    text = run("show", path).stdout
    test("show: plots, validation, events, plan", re.search("[\u2801-\u28ff]{20}", text) and "last validation, step 6" in text and
         "reward_error" in text and "memory plan" in text and "actor/grad_norm (log)" in text, text[:500])
    db = database(path)
    db.text_factory = str
    step, uid, k, score = db.execute("SELECT step, uid, sample, score FROM samples WHERE validation=0 AND score>0 "
                                     "ORDER BY step DESC LIMIT 1").fetchone()
    table = run("show", path, "--step", step, "--limit", 0).stdout
    test("show --step: every sample", len(re.findall(r"^\d+\.\d+ ", table, re.M)) == 16 and "grad_norm" in table, table[-500:])
    one = run("show", path, "--step", step, "--sample", f"{uid}.{k}").stdout
    response = db.execute("SELECT response FROM samples WHERE step=? AND uid=? AND sample=?", [step, uid, k]).fetchone()[0]
    test("show --sample: texts, score, what the scorer said", "letters" in one and f"score {score:.4g}" in one and "What is" in one,
         one)
    shown = json.loads(run("show", path, "--step", step, "--sample", f"{uid}.{k}", "--json").stdout)
    test("show --json: tokens and their numbers", "".join(shown["tokens"]) == shown["response"] == response and
         len(shown["logp"]) == len(shown["entropy"]) == len(shown["ref_logp"]) == len(shown["ids"]) == len(shown["tokens"]))
    group = run("show", path, "--step", step, "--sample", uid).stdout
    test("show --sample UID: all of the prompt", group.count("── response") == 4)
    for by in ("logp", "entropy", "kl"):
        text = run("show", path, "--step", step, "--sample", f"{uid}.{k}", "--color", "always", "--color-by", by).stdout
        test(f"show: tokens by {by}", "\x1b[30;48;5;" in text)
    test.refused("show: no such step", run("show", path, "--step", 99, check=False), 3, "no step 99", "from 1 to 6")
    test.refused("show: no such sample", run("show", path, "--step", 2, "--sample", "9999.1", check=False), 3, "no sample 9999.1")
    test.refused("show: no run", run("show", path.parent, check=False), 3, "runs below it", str(path))
    test.refused("show: nothing at all", run("show", path.parent / "model", check=False), 3, "nor has a directory below")
    test.refused("show: another file", run("show", path.parent / "train.jsonl", check=False), 3, "not a database")


def check_grep(test, path):
    p = run("grep", "What is 3", path, "--step", 2, check=False)
    db = database(path)
    n = db.execute("SELECT count(*) FROM samples WHERE step=2 AND prompt LIKE '%What is 3%'").fetchone()[0]
    lines = p.stdout.splitlines()
    test("grep: a line for each match", n > 0 and len(lines) == n and p.returncode == 0 and
         all(re.match(r"2:\d+\.\d+:(validation )?prompt:\d+: .*What is 3", x) for x in lines), p.stdout[:300])
    test("grep: none is exit status 1", run("grep", "no such text", path, check=False).returncode == 1)
    count = run("grep", "-i", "WHAT IS", path, "-c", "--prompt").stdout.strip()
    everything = db.execute("SELECT count(*) FROM samples").fetchone()[0]
    test("grep -i -c", int(count) == everything, (count, everything))
    test("grep --response", run("grep", "What is", path, "--response", check=False).returncode == 1)
    rows = [json.loads(x) for x in run("grep", "What is 3", path, "--json").stdout.splitlines()]
    test("grep --json: the newest step first", [r["step"] for r in rows] == sorted((r["step"] for r in rows), reverse=True))
    test.refused("grep: a pattern that is none", run("grep", "a(b", path, check=False), 2, "'a(b'", "at byte 3")
    test.refused("grep: no run", run("grep", "a", check=False), 2, "a pattern and a run")


def check_compare(s, test, path, keys):
    other = s.dir / "other"
    run(*s.ppo("other", trainer__total_training_steps=2, trainer__save_freq=0,
               **{**keys, "actor_rollout_ref__actor__optim__lr": 3e-3, "actor_rollout_ref__rollout__n": 2}))
    text = run("show", path, other).stdout
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    last = {str(d): metric(database(d), n, "critic/rewards/mean") for d, n in ((path, 7), (other, 2))}
    cells = next(r for r in rows if r[0] == "critic/rewards/mean" and len(r) == 3)[1:]
    test("show A B: last metrics side by side, with their steps", [c.split()[1] for c in cells] == ["(7)", "(2)"] and all(
        abs(float(c.split()[0]) - v) < 1e-3 * max(1, abs(v)) for c, v in zip(cells, last.values())), (cells, last))
    test("show A B: what differs in the configurations", ["actor_rollout_ref.actor.optim.lr", "0.001", "0.003"] in rows and
         ["actor_rollout_ref.rollout.n", "4", "2"] in rows and "default_local_dir" not in text and "rollout_n" not in text,
         text[-900:])
    braille = [line for line in text.splitlines() if any("\u2800" < c <= "\u28ff" for c in line)]
    test("show A B: two curves with their ends", any(line.rstrip().endswith("A") for line in braille) and
         any("B" in line for line in braille) and max(map(columns, text.splitlines())) <= 80, text[:1500])
    got = json.loads(run("show", path, other, "--json", "--metric", "actor/lr").stdout)
    test("show A B --json", [r["last_step"] for r in got["runs"]] == [7, 2] and
         got["differs"]["actor_rollout_ref.rollout.n"] == [4, 2] and got["curves"]["actor/lr"][1]["step"] == [1, 2], str(got)[:300])
    text = run("show", path, "--metric", "response_length/mean,actor/grad_norm").stdout
    test("show RUN --metric: chosen curves", "response_length/mean" in text and "actor/grad_norm (log)" in text and
         "critic/rewards/mean" not in text, text[:300])
    test.refused("show --metric: a part of a name", run("show", path, "--metric", "rewards", check=False), 2, "critic/rewards/mean")
    test.refused("show A B --step", run("show", path, other, "--step", "1", check=False), 2, "--step and --sample are of one run")
    test("colours of curves on a terminal", "\x1b[33m" in terminal("show", path, other))


def terminal(*args, env=None):
    """What the program writes to a terminal of 80 columns."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(ENV | {"TERM": "xterm-256color"} | (env or {}))
        os.environ.pop("NO_COLOR", None) if not env else None
        os.execv(VERLC, [VERLC, *map(str, args)])
    text = b""
    while True:
        try:
            more = os.read(fd, 65536)
        except OSError:
            break
        if not more:
            break
        text += more
    os.waitpid(pid, 0)
    os.close(fd)
    return text.decode()


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def state(path):
    p = run("status", path, "--json", check=False)
    return json.loads(p.stdout) if p.returncode == 0 else {}


def check_turns(s, test):
    """Conversations with tools: the filters, and what is said where nothing fits."""
    path = view_db.make(s.dir / "agents", 2, 32, agents=True).parent

    def chosen(*args):
        return json.loads(run("show", path, "--step", 2, "--limit", 0, "--json", *args).stdout)["samples"]

    every = chosen()
    for args, fits in ((["--tool", "search"], lambda x: "search" in x["tools"]),
                       (["--failed-calls"], lambda x: x["failed_calls"] + x["malformed_calls"] > 0),
                       (["--turns", "4"], lambda x: x["turns"] == 4), (["--turns", "3..6"], lambda x: 3 <= x["turns"] <= 6),
                       (["--turns", "..4", "--tool", "calculator"], lambda x: x["turns"] <= 4 and "calculator" in x["tools"])):
        got, want = chosen(*args), [x for x in every if fits(x)]
        test(f"show {' '.join(args)}", got == want and 0 < len(got) < len(every), (len(got), len(want), len(every)))
    for bad in ("0", "x..", "2..y", "", "-1"):
        test.refused(f"--turns {bad}", run("show", path, "--step", 2, "--turns", bad, check=False), 2, "--turns")
    text = run("show", path, "--step", 2, "--turns", "4..").stdout
    test("a column of turns", "turns calls bad response" in text, text[-300:])
    test.refused("no sample fits", run("show", path, "--step", 2, "--sample", "0", "--tool", "none", check=False), 3, "--tool")


def main():
    test = Tests()
    with Scratch(n_train=32, n_test=4, small=True) as s:
        (s.dir / "own.py").write_text(REWARD)
        keys = {"data__train_batch_size": 4, "actor_rollout_ref__rollout__n": 4,
                "actor_rollout_ref__actor__ppo_mini_batch_size": 4, "actor_rollout_ref__actor__optim__lr": 1e-3,
                "reward__custom_reward_function__path": s.dir / "own.py", "data__max_response_length": 24,
                "trainer__test_freq": 1}
        path = s.dir / "run"
        # while it goes on: many steps, killed in the middle
        p = start(s.ppo("run", trainer__total_training_steps=4000, trainer__save_freq=2, **keys))
        # the step it is at is written once a second, so it may be older than the last step's record
        ok = wait_for(lambda: (path / "run.db").exists() and (now := state(path)).get("last_step", 0) >= 2 and
                      now.get("now", {}).get("step", 0) >= 1)
        now = state(path)
        test("status while it runs", ok and now["state"] == "running" and now["pid"] == p.pid and now["total_steps"] == 4000 and
             now["now"]["step"] >= 1 and now["eta_s"] > 0, now)
        text = run("status", path).stdout
        test("status in words", "running" in text and "ends in about" in text and "phases of step" in text, text)
        watch = subprocess.Popen([VERLC, "status", path, "--watch", "--json"], stdout=subprocess.PIPE, text=True, env=ENV)
        first = watch.stdout.readline()
        text = run("show", path).stdout
        test("show and grep while it runs", "running" in text and run("grep", "-c", "What", path).returncode == 0, text[:300])
        p.send_signal(signal.SIGKILL)
        p.wait()
        lines = [json.loads(x) for x in [first, *watch.stdout]]
        watch.wait(60)
        test("status --watch ends with the run", lines[0]["state"] == "running" and lines[-1]["state"] == "killed", lines[-1])
        test("status after kill -9", "no process, and no word of its end" in run("status", path).stdout and "killed" in
             run("show", path).stdout)
        db = database(path)
        test("integrity after kill -9", db.execute("PRAGMA integrity_check").fetchone()[0] == b"ok")
        db.close()
        # the same run from its start, to its end
        run(*s.ppo("run", trainer__total_training_steps=6, trainer__resume_mode="disable", **keys))
        now = state(path)
        test("status of a run that is done", now["state"] == "ended" and now["exit"] == "done" and now["last_step"] == 6, now)
        took = [metric(database(path), 6, f"timing_s/{n}") for n in ("step", "testing")]
        test("status: a step's seconds are its phases', not their parts", took[0] <= now["last_steps"][0]["seconds"] + 1e-9 and
             now["last_steps"][0]["seconds"] < 2 * sum(took) + 1 and "agent_loop" not in run("status", path).stdout, (took, now))
        check_columns(test, path)
        check_text(test, path)
        check_grep(test, path)
        run(*s.ppo("run", trainer__total_training_steps=7, **keys))
        kinds = [r[0] for r in database(path).execute("SELECT kind FROM events WHERE step>=6 ORDER BY id")]
        test("a resumed run keeps what happened", b"resume" in kinds and kinds.index(b"checkpoint") < kinds.index(b"resume"), kinds)
        text = terminal("show", path)
        test("colours on a terminal", "\x1b[36m" in text and "\x1b" not in terminal("show", path, env={"NO_COLOR": "1"}))
        text = terminal("grep", "What is .", path, "--step", 2)
        test("grep: matches stand out", "\x1b[1;31mWhat is" in text, text[:200])
        check_compare(s, test, path, keys)
        check_turns(s, test)
        # one that fails says so
        (s.dir / "own.py").write_text("def compute_score(*a, **k): raise ValueError('never')\n")
        failed = run(*s.ppo("failed", trainer__total_training_steps=2, **keys), check=False)
        now = state(s.dir / "failed")
        test("status of a run that failed", failed.returncode != 0 and now["state"] == "ended" and
             now["exit"].startswith("failed: reward: none of the"), now)
    test.end()


main()
