"""`verlc view` without a browser: every answer, who may ask, hostile requests and databases, a run that is being written,
several viewers. tools/view_browser.py has the page itself, in Chromium."""

import array
import base64
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import view_db  # noqa: E402
from verlc_test import VERLC, Tests, patience  # noqa: E402

test = Tests()


class Server:
    def __init__(self, *args):
        self.process = subprocess.Popen([VERLC, "view", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = urllib.parse.urlparse(self.process.stdout.readline().split()[-1])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end(signal.SIGTERM)

    def end(self, how):
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(20)

    def get(self, path, headers=None, method="GET", body=None):
        """Status, headers, bytes."""
        c = http.client.HTTPConnection("127.0.0.1", self.url.port, timeout=60)
        c.request(method, path, body=body, headers=headers or {})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, r.headers, data

    def json(self, path, **params):
        """(status, answer)"""
        status, _, data = self.get(f"/api/{path}?{urllib.parse.urlencode(params, doseq=True)}")
        return status, json.loads(data)

    def raw(self, data, wait=5):
        """What comes back to these bytes, b"" where the connection is closed."""
        with socket.create_connection(("127.0.0.1", self.url.port), timeout=wait) as s:
            try:
                s.sendall(data)
                return s.recv(65536)
            except OSError:
                return b""

    def alive(self):
        return self.process.poll() is None and self.get("/")[0] == 200


def numbers(kind, text):
    return list(array.array(kind, base64.b64decode(text)))


def check_answers(d):
    view_db.make(d / "a", 30, 32, tokens=12)
    view_db.make(d / "deep/b", 6, 16, name="second", ended=False)
    db = sqlite3.connect(d / "a/run.db")
    with Server(d) as s:
        status, head, page = s.get("/")
        test("the page", status == 200 and head["Content-Type"].startswith("text/html") and b"app.js" in page)
        test(
            "nothing from outside",
            head["Content-Security-Policy"].startswith("default-src 'self'")
            and "unsafe" not in head["Content-Security-Policy"]
            and head["X-Content-Type-Options"] == "nosniff",
        )
        names = (
            {"/style.css"}
            | {f"/{p.name}" for p in (view_db.ROOT / "src/view/page").glob("*.js")}
            | {"/dygraph.js", "/dygraph.css", "/favicon.svg"}
        )
        test("its files", all(s.get(n)[0] == 200 for n in names), str(names))
        runs = s.json("runs")[1]["runs"]
        by_name = {pathlib.Path(r["dir"]).name: r for r in runs}
        test(
            "two runs",
            set(by_name) == {"a", "b"}
            and by_name["a"]["state"] == "done"
            and by_name["a"]["step"] == 30
            and by_name["b"]["state"] == "running",
            str(runs),
        )
        run = by_name["a"]["id"]
        info = s.json("run", run=run)[1]
        explained = {n["name"]: n.get("text") for n in info["names"]}
        test(
            "metrics and their explanations",
            len(explained) > 60
            and explained["actor/grad_norm"]
            and info["plan"]["limit"] == 80 << 30
            and info["headline"] == ["critic/rewards/mean"],
        )
        events = s.json("state", run=run, event=0)[1]["events"]
        test(
            "events",
            [e["kind"] for e in events] == ["warning", "checkpoint"]
            and s.json("state", run=run, event=events[0]["id"])[1]["events"] == events[1:],
        )
        series = s.json("series", run=run, name=["actor/kl_loss", "val-core/openai/gsm8k/acc/mean@1", "no/such"], since=3)[1][
            "series"
        ]
        want = db.execute("SELECT step, value FROM metrics WHERE name = 'actor/kl_loss' AND step > 3 ORDER BY step").fetchall()
        test(
            "values after a step",
            list(zip(numbers("q", series["actor/kl_loss"]["step"]), numbers("d", series["actor/kl_loss"]["value"]))) == want
            and numbers("q", series["val-core/openai/gsm8k/acc/mean@1"]["step"]) == [20]
            and series["no/such"]["step"] == "",
        )
        test("the last step", s.json("step", run=run, step=30)[1]["metrics"]["timing_s/adv"] == 0.02)
        h = s.json("histograms", run=run, name="score", since=10)[1]
        test(
            "histograms",
            h["bins"] == 40 and numbers("q", h["step"]) == list(range(11, 31)) and sum(numbers("i", h["counts"])) == 20 * 32,
        )
        test(
            "steps with samples",
            numbers("q", s.json("steps", run=run)[1]["step"]) == list(range(1, 31))
            and numbers("q", s.json("steps", run=run, validation=1)[1]["step"]) == [20],
        )
        samples = s.json("samples", run=run, step=7)[1]["samples"]
        test(
            "samples of a step",
            len(samples) == 32
            and samples[3]["score"] is None
            and samples[3]["status"] == "timeout"
            and samples[9]["uid"] == 1
            and samples[9]["sample"] == 1,
        )
        part = s.json("excerpts", run=run, step=7, offset=30, limit=100)[1]["samples"]
        test(
            "excerpts: the user's last message from its start, the response",
            len(part) == 2 and part[0][0].startswith("Question 3: Anna") and len(part[0][0]) == 240 and part[0][1],
            str(part),
        )
        group = s.json("group", run=run, step=7, uid=2)[1]["samples"]
        test(
            "a group",
            len(group) == 8
            and "Question 2" in group[0]["prompt"]
            and group[0]["ground_truth"] == "16"
            and group[0]["extra"]["pred"] == "42",
        )
        one = group[5]
        tokens = s.json("tokens", run=run, id=one["id"])[1]["samples"][0]
        ids, logp, lengths = db.execute("SELECT ids, logp, token_bytes FROM samples WHERE id = ?", (one["id"],)).fetchone()
        ends, at, text = [], 0, one["response"].encode()
        for n in array.array("H", lengths):
            at += n
            ends.append(len(text[:at].decode().encode("utf-16-le")) // 2)
        test(
            "its tokens",
            base64.b64decode(tokens["logp"]) == logp
            and base64.b64decode(tokens["ids"]) == ids
            and numbers("i", tokens["ends"]) == ends
            and len(numbers("f", tokens["ref_logp"])) == len(ends)
            and tokens["advantages"] is None,
        )
        prompt = s.json("tokens", run=run, id=one["id"], prompt=1)[1]["samples"][0]
        ids, ends = numbers("i", prompt["ids"]), numbers("i", prompt["ends"])
        of = [group[0]["prompt"][a:b] for a, b in zip([0, *ends], ends)]
        special = info["special"]
        test(
            "its prompt's tokens; special ones by name",
            [special.get(str(i)) if not t else t for i, t in zip(ids, of)][:4] == ["<|im_start|>", "system", "\n", "You"]
            and ends[-1] == len(group[0]["prompt"])
            and len(ids) == group[0]["prompt_tokens"],
            str(of),
        )
        check_prompt(s, run)
        check_list(by_name)
        errors = s.json("errors", run=run)[1]
        wrong = db.execute("SELECT COUNT(*) FROM metrics WHERE name = 'reward/num_errors' AND value > 0").fetchone()[0]
        test(
            "rewards that failed",
            errors["steps"] == wrong
            and (wrong == 0 or errors["by_status"]["timeout"]["message"].startswith("the scorer took longer")),
            str(errors),
        )
        config = s.json("config", run=run)[1]
        test(
            "configuration, and which keys were set",
            config["config"]["trainer"]["experiment_name"] == "grpo"
            and config["set"] == ["data.train_batch_size", "actor_rollout_ref.actor.optim", "trainer.total_training_steps"],
        )
        lines = [json.loads(x) for x in s.get(f"/api/search?run={run}&q=question%203%5B:%5D&in=prompt")[2].splitlines()]
        found = [x for x in lines if "match" in x]
        test(
            "search",
            len(found) == 30 * 8 + 1
            and found[0]["step"] == 30
            and found[0]["match"] == "Question 3:"
            and lines[-1]["more"] is False
            and lines[-1]["done"] == lines[-1]["total"],
            str(lines[-1]),
        )
        test(
            "search minds the case",
            not any("match" in json.loads(x) for x in s.get(f"/api/search?run={run}&q=question&case=1&in=prompt")[2].splitlines()),
        )
        check_filters(s, run, db)
        status, answer = s.json("search", run=run, q="(")
        test("a wrong pattern", status == 400 and "pattern" in answer["error"], str(answer))
        for path, want in (
            ("runs/x", 404),
            ("run?run=no", 404),
            ("run", 404),
            (f"step?run={run}&step=x", 400),
            (f"samples?run={run}&step=-1", 400),
            (f"tokens?run={run}", 400),
            (f"tokens?run={run}&id=99999999999999999999", 400),
            (f"tokens?run={run}&id=1&prompt=2", 400),
            (f"prompt?run={run}", 400),
            (f"prompt?run={run}&uid=-1", 400),
            (f"search?run={run}&q=a&min=x", 400),
            (f"search?run={run}&q=a&max=nan", 400),
            (f"search?run={run}&q=a&max=", 400),
            (f"search?run={run}&q=a&ids=2", 400),
        ):
            status, _, data = s.get(f"/api/{path}")
            test(f"{path}: {want} and why", status == want and len(json.loads(data)["error"]) > 5, f"{status} {data}")
    db.close()


def check_prompt(s, run):
    """A prompt in all steps."""
    a = s.json("prompt", run=run, uid=2)[1]
    val = s.json("prompt", run=run, uid=2, validation=1)[1]
    test(
        "a prompt over all steps",
        a["steps"] == 30
        and [x["step"] for x in a["samples"]] == [step for step in range(1, 31) for _ in range(8)]
        and all(x["uid"] == 2 for x in a["samples"])
        and set(a["excerpts"]) == {str(i) for i in range(1, 31)}
        and all(a["excerpts"].values())
        and "Question 2" in a["prompt"]
        and a["ground_truth"] == "16"
        and val["steps"] == 1
        and {x["step"] for x in val["samples"]} == {20},
        str(a)[:300],
    )
    test("a prompt that no step has", s.json("prompt", run=run, uid=999)[1] == {"steps": 0, "samples": [], "excerpts": {}})


def check_list(by_name):
    """What the list of runs has beside the heads."""
    a, db = by_name["a"], sqlite3.connect(pathlib.Path(by_name["a"]["dir"]) / "run.db")
    last = db.execute("SELECT value FROM metrics WHERE name = 'critic/rewards/mean' ORDER BY step DESC LIMIT 10").fetchall()
    val = db.execute("SELECT value FROM metrics WHERE name LIKE 'val-core/%' ORDER BY step DESC LIMIT 1").fetchone()[0]
    db.close()
    test(
        "the list: reward, validation, lr, duration",
        a["reward"]["name"] == "critic/rewards/mean"
        and abs(a["reward"]["value"] - sum(v for (v,) in last) / 10) < 1e-12
        and a["validation"] == {"name": "val-core/openai/gsm8k/acc/mean@1", "value": val}
        and a["lr"] == 1e-6
        and abs(a["seconds"] - 3600) < 2
        and by_name["b"]["validation"] is None
        and abs(by_name["b"]["seconds"] - 3600) < 120,
        str(a),
    )


def check_filters(s, run, db):
    """Scores and words, in a step and in the search."""

    def search(**params):
        lines = s.get(f"/api/search?{urllib.parse.urlencode({'run': run, **params})}")[2].splitlines()
        return [json.loads(x) for x in lines]

    ones = search(q="question 3:", min=1, max=1, **{"in": "prompt"})
    found = [x for x in ones if "match" in x]
    want = db.execute("SELECT COUNT(*) FROM samples WHERE uid = 3 AND score = 1").fetchone()[0]
    test("search in a range of scores", len(found) == want > 0 and all(x["score"] == 1 for x in found), f"{len(found)} {want}")
    test("search: no score is in no range", not any("match" in x for x in search(q=".", min=2)))
    lines = search(q="boxed", step=7, ids=1, **{"in": "response"})
    ids = sorted(i for x in lines for i in x.get("ids", []))
    want = [i for (i,) in db.execute("SELECT id FROM samples WHERE step = 7 AND response LIKE '%boxed%' ORDER BY id")]
    test("which samples of a step have the words", ids == want != [] and not any("match" in x for x in lines), f"{ids} {want}")


def note(*args, check=True):
    p = subprocess.run([VERLC, "note", *map(str, args)], capture_output=True, text=True)
    if check and p.returncode:
        raise AssertionError(p.stderr)
    return p


def check_notes(d):
    view_db.make(d / "n", 3, 8)
    before = (d / "n/run.db").read_bytes()
    test("no notes", note(d / "n").stdout == "no tags\n")
    out = note(d / "n", "lr too <b>high</b>\nsecond line", "--tag", "bad, to repeat").stdout.splitlines()
    test("a note and tags", out[0] == "tags: bad, to repeat" and out[1].startswith("1  20") and "<b>high</b>" in out[1], str(out))
    note(d / "n/run.db", "another", "--tag", "bad", "--untag", "to repeat")
    held = json.loads((d / "n/notes.json").read_text())
    test("kept beside run.db", held["tags"] == ["bad"] and [x["text"] for x in held["notes"]][1] == "another", str(held))
    for name, args, words in (
        ("no such tag", ["--untag", "no"], "no tag 'no'"),
        ("no such note", ["--remove", 3], "no note 3"),
        ("an empty tag", ["--tag", "a,,b"], "empty"),
        ("a long tag", ["--tag", "x" * 61], "60 bytes"),
        ("a long note", ["x" * 4001], "4000"),
        ("an empty note", [""], "empty"),
    ):
        p = note(d / "n", *args, check=False)
        test(f"{name} is refused", p.returncode == 2 and words in p.stderr, p.stderr)
    test("no run there", note(d / "nowhere", "x", check=False).returncode == 3)
    test("nothing was changed", json.loads((d / "n/notes.json").read_text()) == held)
    many = [subprocess.Popen([VERLC, "note", d / "n", f"note {i}"], stdout=subprocess.DEVNULL) for i in range(8)]
    test(
        "eight at once all count",
        [p.wait() for p in many] == [0] * 8 and len(json.loads(note(d / "n", "--json").stdout)["notes"]) == 10,
    )
    note(d / "n", "--remove", 1)
    test("the run's database is untouched", (d / "n/run.db").read_bytes() == before)
    with Server(d / "n") as s:
        run = s.json("runs")[1]["runs"][0]
        test(
            "the page has them",
            run["tags"] == ["bad"] and run["notes"][0]["text"] == "another" and len(run["notes"]) == 9,
            str(run),
        )
        note(d / "n", "--tag", "later")
        test(
            "at once",
            s.json("state", run=run["id"])[1]["tags"] == ["bad", "later"]
            and s.json("runs")[1]["runs"][0]["tags"] == ["bad", "later"],
        )
        test("only reading: POST writes nothing", s.get("/api/note", method="POST")[0] == 405)
        for text in (
            "",
            "{",
            "[]",
            '{"tags": 1, "notes": []}',
            '{"tags": [], "notes": [{"text": 1, "wall": 2}]}',
            '{"tags": [null]}',
            '{"tags": [], "notes": [{"text": "a", "wall": 1e999}]}',
            "\0\xff" * 100,
            "[" * 100000,
        ):
            (d / "n/notes.json").write_text(text)
            got = s.json("run", run=run["id"])
            test(
                f"notes.json {text[:24]!r}: said in place of them",
                got[0] == 200 and got[1]["tags"] == [] and "notes.json" in got[1]["notes"][0]["text"],
                str(got)[:300],
            )
            p = note(d / "n", "x", check=False)
            kept = (d / "n/notes.json").read_text() == text
            test("and not written over", p.returncode == 3 and kept and "notes.json" in p.stderr, p.stderr)
        (d / "n/notes.json").unlink()
        (d / "n/notes.json").mkdir()
        test("a directory of that name", s.json("run", run=run["id"])[0] == 200 and s.alive())


def check_who_may_ask(d):
    view_db.make(d / "one", 3, 8)
    with Server(d / "one", "--token") as s:
        token = urllib.parse.parse_qs(s.url.query)["token"][0]
        test("without the token", s.get("/")[0] == 403 and s.get("/app.js")[0] == 403 and s.get("/api/runs")[0] == 403)
        test(
            "a wrong token",
            s.get("/?token=" + "0" * 32)[0] == 403
            and s.get("/?token=")[0] == 403
            and s.get(f"/?token={token[:-1]}")[0] == 403
            and s.get(f"/api/runs?token={token}")[0] == 403,
        )
        status, head, _ = s.get(f"/?token={token}")
        cookie = head["Set-Cookie"]
        test(
            "the token gives a cookie", status == 303 and head["Location"] == "/" and "HttpOnly" in cookie and "SameSite" in cookie
        )
        jar = {"Cookie": f"other=1; {cookie.split(';')[0]}"}
        test("the cookie is enough", s.get("/api/runs", jar)[0] == 200 and s.get("/", jar)[0] == 200)
        test("another's is not", s.get("/", {"Cookie": cookie.split("=")[0] + "=" + "f" * 32})[0] == 403)
        test("another host, with the cookie", s.get("/", {**jar, "Host": "evil.example"})[0] == 403)
    with Server(d / "one", "--host", "0.0.0.0") as s:
        test(
            "beyond loopback there is a token",
            "token=" in s.url.query and s.get("/")[0] == 403 and s.get(f"/?{s.url.query}")[0] == 303,
        )
    with Server(d / "one") as s:
        hosts = {
            f"127.0.0.1:{s.url.port}": 200,
            "localhost": 200,
            f"LOCALHOST:{s.url.port}": 200,
            "evil.example": 403,
            "127.0.0.1.evil.example": 403,
            "localhost.evil.example:80": 403,
            "": 403,
        }
        got = {h: s.get("/api/runs", {"Host": h})[0] for h in hosts}
        test("the Host header", got == hosts, str(got))
        test("no Host header", b" 403 " in s.raw(b"GET / HTTP/1.0\r\n\r\n") or b" 400 " in s.raw(b"GET / HTTP/1.0\r\n\r\n"))
        test("only GET", all(s.get("/", method=m)[0] == 405 for m in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH")))
        p = subprocess.run([VERLC, "view", d / "one", "--port", str(s.url.port)], capture_output=True, text=True)
        test("a port that is taken", p.returncode != 0 and f"port {s.url.port}" in p.stderr, p.stderr)
    p = subprocess.run([VERLC, "view", d / "no"], capture_output=True, text=True)
    test("no such directory", p.returncode != 0 and "no such directory" in p.stderr, p.stderr)
    (d / "empty").mkdir()
    p = subprocess.run([VERLC, "view", d / "empty"], capture_output=True, text=True)
    test("no run there", p.returncode != 0 and "run.db" in p.stderr, p.stderr)


def check_dripping(s):
    """Connections whose request never ends: 64 of them, and then as many as come, keep nobody out, and none lasts."""
    drips = [socket.create_connection(("127.0.0.1", s.url.port)) for _ in range(64)]
    begin = time.monotonic()
    ended = {}
    slowest = 0
    while time.monotonic() - begin < patience(14) and len(ended) < len(drips):
        for i, c in enumerate(drips):
            try:
                c.sendall(b"X")
                c.setblocking(False)
                if i not in ended and c.recv(1) == b"":
                    ended[i] = time.monotonic() - begin
            except BlockingIOError:
                pass
            except OSError:
                ended.setdefault(i, time.monotonic() - begin)
            c.setblocking(True)
        asked = time.monotonic()
        test_ok = s.get("/")[0] == 200
        slowest = max(slowest, time.monotonic() - asked if test_ok else 99)
        time.sleep(0.5)
    for c in drips:
        c.close()
    test("64 connections that drip keep nobody waiting", slowest < patience(2), f"{slowest:.1f} s")
    test("and none of them lasts", len(ended) == len(drips) and max(ended.values()) < patience(14),
         f"{len(ended)} of {len(drips)} ended")


def check_hostile_requests(d):
    with Server(d / "one") as s:
        at = f"Host: 127.0.0.1:{s.url.port}\r\n".encode()
        secret = d / "secret"
        secret.write_text("SECRET")
        paths = [
            "/../secret",
            "/..%2fsecret",
            "/%2e%2e/secret",
            "//../secret",
            "/./../secret",
            "/page/../../secret",
            f"//{secret}",
            str(secret),
            f"/api/run?run=../secret",
            f"/api/run?run={secret}",
            "/%00",
            "/a%00b",
            "/api/run?run=%00",
            "/api/run?run=%ff%fe",
            "/api/series?run=x&" + "name=a&" * 2000,
            "/" + "a" * 12000,
            "/api/search?q=" + "(" * 3000,
            "http://evil.example/",
            "/api/samples?step=1e9",
            "*",
        ]
        answers = [s.raw(b"GET " + p.encode() + b" HTTP/1.1\r\n" + at + b"Connection: close\r\n\r\n") for p in paths]
        bad = [(p, a[:60]) for p, a in zip(paths, answers) if b"SECRET" in a or a[9:12] == b"200"]
        test("paths lead nowhere", not bad, str(bad))
        for name, data in {
            "garbage": os.urandom(4000),
            "a long header": b"GET / HTTP/1.1\r\n" + at + b"X: " + b"x" * 100000 + b"\r\n\r\n",
            "many headers": b"GET / HTTP/1.1\r\n" + at + b"".join(b"X%d: y\r\n" % i for i in range(5000)) + b"\r\n",
            "a body": b"GET / HTTP/1.1\r\n" + at + b"Content-Length: 100000000\r\n\r\n" + b"x" * 1000,
            "a wrong length": b"GET / HTTP/1.1\r\n" + at + b"Content-Length: -5\r\n\r\n",
            "chunks": b"GET / HTTP/1.1\r\n" + at + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\nx",
            "NUL": b"GET /\0 HTTP/1.1\r\n" + at + b"\r\n",
            "no version": b"GET /\r\n\r\n",
            "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(200),
        }.items():
            s.raw(data, wait=3)
            test(f"{name}: goes on", s.alive())
        many = [socket.create_connection(("127.0.0.1", s.url.port)) for _ in range(100)]
        open_fds = len(os.listdir(f"/proc/{s.process.pid}/fd"))
        for c in many:
            c.close()
        test("a hundred connections: some are refused, all end", open_fds < 100 and s.alive(), str(open_fds))
        check_dripping(s)
        run = s.json("runs")[1]["runs"][0]["id"]
        gone = socket.create_connection(("127.0.0.1", s.url.port))
        gone.sendall(f"GET /api/search?run={run}&q=a HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        gone.close()
        test("who searches and leaves", s.alive())
        slow = socket.create_connection(("127.0.0.1", s.url.port))
        slow.sendall(f"GET /api/search?run={run}&q=zzz HTTP/1.1\r\n".encode())
        test("SIGINT with a connection open ends it", s.end(signal.SIGINT) == 0, s.process.stderr.read())
        slow.close()


ALL = (
    "run",
    "state",
    "config",
    "series",
    "step",
    "histograms",
    "steps",
    "samples",
    "excerpts",
    "group",
    "prompt",
    "tokens",
    "errors",
    "search",
)


def ask_all(s, run):
    """The statuses of all answers about a run; each body is JSON, or JSON lines."""
    got = {}
    for name in ALL:
        status, _, data = s.get(f"/api/{name}?run={run}&step=1&uid=0&id=1&name=score&name=critic/score/mean&q=a")
        for line in data.splitlines() if name == "search" else [data]:
            json.loads(line, parse_constant=lambda c: (_ for _ in ()).throw(ValueError(c)))
        got[name] = status
    return got


def check_hostile_databases(d):
    d = d / "hostile"
    view_db.make(d / "good", 3, 8, tokens=6)

    def variant(name, sql, *values):
        shutil.copytree(d / "good", d / name)
        db = sqlite3.connect(d / name / "run.db", isolation_level=None)
        db.text_factory = bytes
        for statement in sql.split(";"):
            db.execute(statement, values if "?" in statement else ())
        db.close()

    variant(
        "types",
        "UPDATE samples SET score = 'x', uid = x'00', sample = 'a', prompt = 5, response = x'ff00', ids = 'text', logp = "
        "x'000000', extra = '{', token_bytes = x'ff', prompt_bytes = x'ffffff'",
    )
    variant(
        "numbers",
        "UPDATE metrics SET value = 9e999 WHERE step = 1; UPDATE metrics SET value = -9e999 WHERE step = 2; UPDATE metrics "
        "SET value = NULL WHERE step = 3; UPDATE samples SET score = 9e999, advantage = -9e999, uid = 9223372036854775807; "
        "UPDATE histograms SET lo = 9e999",
    )
    variant(
        "steps",
        "UPDATE metrics SET step = 9223372036854775807 WHERE step = 3; UPDATE samples SET step = -9223372036854775808 WHERE "
        "step = 2; INSERT INTO events VALUES(9223372036854775807, -1, 9e999, x'00', NULL)",
    )
    variant(
        "texts",
        "UPDATE samples SET prompt = CAST(? AS TEXT), response = CAST(? AS TEXT), reward_status = CAST(? AS TEXT)",
        *[b"a\0\xff\xfe</script><img src=x onerror=alert(1)>\xed\xa0\x80"] * 3,
    )
    variant("meta", "UPDATE meta SET value = CAST(? AS TEXT)", b"\xff" + b"[" * 100000)
    variant(
        "histogram",
        "UPDATE histograms SET counts = x'ffffffff'; UPDATE histograms SET counts = x'00' WHERE step = 2; UPDATE histograms "
        "SET counts = zeroblob(40000) WHERE step = 3",
    )
    variant("later", "UPDATE meta SET value = '99' WHERE key = 'format'")
    variant(
        "view",
        "ALTER TABLE metrics RENAME TO m2; CREATE VIEW metrics AS WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 "
        "FROM r) SELECT x AS step, 'a' AS name, 1.0 AS value FROM r",
    )
    variant("empty", "DELETE FROM meta; DELETE FROM metrics; DELETE FROM samples; DELETE FROM events; DELETE FROM histograms")
    for name, data in {
        "cut": (d / "good/run.db").read_bytes()[:9000],
        "garbage": os.urandom(20000),
        "nothing": b"",
        "header": (d / "good/run.db").read_bytes()[:100] + os.urandom(40000),
    }.items():
        (d / name).mkdir()
        (d / name / "run.db").write_bytes(data)
    whole = bytearray((d / "good/run.db").read_bytes())
    for i in range(4096, len(whole), 97):
        whole[i] ^= 0x5A
    (d / "flipped").mkdir()
    (d / "flipped/run.db").write_bytes(whole)
    with Server(d) as s:
        for r in s.json("runs")[1]["runs"]:
            name, got = pathlib.Path(r["dir"]).name, ask_all(s, r["id"])
            fine = {"good", "types", "numbers", "texts", "meta", "histogram", "empty", "steps"}
            test(
                f"database {name}: answers",
                all(v == 200 for v in got.values()) if name in fine else all(v in (200, 400, 404, 500) for v in got.values()),
                f"{got} {r.get('error')}",
            )
            test(
                f"database {name}: says why",
                name in fine or name in ("flipped", "cut", "nothing") or len(r.get("error", "")) > 10,
                str(r),
            )
        test("the server lives", s.alive())


def check_replaced(d):
    view_db.make(d / "r/run", 5, 8, seed=1)
    view_db.make(d / "r2", 3, 8, seed=2)
    with Server(d / "r") as s:
        run = s.json("runs")[1]["runs"][0]["id"]
        before = s.json("state", run=run)[1]
        shutil.move(d / "r/run/run.db", d / "away.db")
        status, answer = s.json("state", run=run)
        test("a run.db that is gone", status in (404, 500) and "run.db" in answer["error"], str(answer))
        shutil.copy(d / "r2/run.db", d / "r/run/run.db")
        after = s.json("state", run=run)[1]
        test("another in its place", after["step"] == 3 and after["epoch"] != before["epoch"], str(after))
        (d / "r/run/run.db").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
        status, answer = s.json("state", run=run)
        test("overwritten with something else", status == 500 and "run.db" in answer["error"], str(answer))
        shutil.rmtree(d / "r/run")
        test("a run that is gone", s.json("runs")[1]["runs"] == [] and s.json("run", run=run)[0] == 404)


def check_writer(d):
    """A run that goes on: what is polled with an increasing `since` is every value once."""
    db_path = view_db.make(d / "w", 1, 8, ended=False)
    n, seen, stop = 150, {}, threading.Event()

    def write():
        db = sqlite3.connect(db_path, isolation_level=None)
        for step in range(2, n + 1):
            db.execute("BEGIN")
            db.executemany("INSERT INTO metrics VALUES(?, ?, ?)", [(step, f"m/{k}", step * k) for k in range(20)])
            db.execute("INSERT INTO samples(step, validation, uid, sample, prompt, response) VALUES(?, 0, 0, 0, 'p', 'r')", (step,))
            db.executemany(
                "INSERT OR REPLACE INTO status VALUES(?, ?)",
                [("step", step), ("phase", "rollout"), ("wall", time.time()), ("pid", os.getpid())],
            )
            db.execute("COMMIT")
        db.close()
        stop.set()

    def watch(s, run, k):
        got, since = [], -1
        while True:
            last = stop.is_set()
            part = s.json("series", run=run, name=f"m/{k}", since=since)[1]["series"][f"m/{k}"]
            got += zip(numbers("q", part["step"]), numbers("d", part["value"]))
            since = got[-1][0] if got else -1
            if last:
                break
        seen[k] = got

    with Server(d / "w") as s:
        run = s.json("runs")[1]["runs"][0]["id"]
        threads = [threading.Thread(target=watch, args=(s, run, k)) for k in range(6)] + [threading.Thread(target=write)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        test(
            "six viewers of a run that is written",
            all(seen.get(k) == [(step, float(step * k)) for step in range(2, n + 1)] for k in range(6)),
            str({k: len(v) for k, v in seen.items()}),
        )
        status = s.json("state", run=run)[1]
        test(
            "what it does",
            status["state"] == "running" and status["status"]["phase"] == "rollout" and status["step"] == n,
            str(status),
        )
        integrity = sqlite3.connect(db_path).execute("PRAGMA integrity_check").fetchone()
        test("the database is whole", integrity == ("ok",), str(integrity))
        test("SIGTERM ends it", s.end(signal.SIGTERM) == 0)


def main():
    with tempfile.TemporaryDirectory(prefix="verlc-view-") as name:
        d = pathlib.Path(name)
        check_answers(d / "answers")
        check_notes(d / "notes")
        check_who_may_ask(d)
        check_hostile_requests(d)
        check_hostile_databases(d)
        check_replaced(d)
        check_writer(d)
    test.end()


main()
