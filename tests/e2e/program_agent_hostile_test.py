"""Agent programs that die, hang, flood or lie: each costs its own episode alone, tagged with the reason, or is refused with a
status, and the run goes on."""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from agent_program import AGENT, CLIENT, REWARD, ROLLOUT, args_of, samples  # noqa: E402
from verlc_test import Scratch, Tests, start  # noqa: E402

BAD = CLIENT + r'''
import http.client, pathlib, signal, subprocess
from urllib.parse import urlsplit
kind, here = ROW["extra_info"]["kind"], pathlib.Path(sys.argv[1])
CHAT, HELLO = BASE + "/chat/completions", [{"role": "user", "content": "Hello"}]

def status(body=None, url=CHAT, **more):
    try:
        return post(url, body, **more)
    except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as e:
        return 0, str(e)

def want(code, words, got):
    assert got[0] in (code if isinstance(code, tuple) else (code,)) and words in str(got[1]), (kind, code, words, got)

def chat(**more):
    return {"model": "m", "messages": HELLO, **more}

if kind != "silent":
    ask(HELLO, max_tokens=3)
if kind == "dies":
    print("about to die", file=sys.stderr)
    raise ValueError("no luck today")
if kind == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if kind == "busy":
    while True:
        ask([{"role": "user", "content": str(time.time())}], max_tokens=1)
if kind == "floods":
    for _ in range(5):
        os.write(1, b"x" * 1000000)
        os.write(2, b"y" * 100000 + b"\n")
if kind == "big":
    want((0, 413), "", status({"messages": [{"role": "user", "content": "ab " * 3500000}]}))
    want(400, "maximum context length", status({"messages": [{"role": "user", "content": "ab " * 2000000}]}))
    want(400, "maximum context length", status({"messages": [{"role": "user", "content": "ab " * 200}]}))
if kind == "json":
    for raw in (b"", b"{", b"[]", b"\xff", b"[" * 100000, b'{"messages": 3}', b'{"messages": [{"role": "god"}]}', b'"x"'):
        want(400, "", status(raw=raw))
    for body in (chat(n=2), chat(logprobs=True, top_logprobs=3), chat(temperature="hot"), chat(foo=1),
                 chat(chat_template_kwargs={"a": 1}), chat(continue_final_message=True, add_generation_prompt=False)):
        want(400, "", status(body))
    for prompt, words in ((["a", "b"], "one at a time"), ([1 << 30], "none of the model's"), ([], "wanted"), (3, "wanted"),
                          ([1] * 500, "maximum context"), ("ab " * 2000000, "maximum context")):
        want(400, words, status({"prompt": prompt}, url=BASE + "/completions"))
    want(400, "a number", status({"reward": "much"}, url=os.environ["VERLC_REWARD_URL"]))
    want(400, "at most", status({"reward": 1, "x": "y" * 100000}, url=os.environ["VERLC_REWARD_URL"]))
if kind == "thief":
    (here / "wanted").write_text("")
    while not (here / "victim").exists():
        time.sleep(0.01)
    other = (here / "victim").read_text()
    want(401, "not this session's", status(chat(), url=CHAT.replace(os.environ["VERLC_SESSION"], other)))
    mine = os.environ["VERLC_REWARD_URL"]
    want(401, "not this session's", status({"reward": 9}, url=mine.replace(os.environ["VERLC_SESSION"], other)))
    want(401, "", status(chat(), key="none"))
    want(404, "no such session", status(chat(), url=CHAT.replace(os.environ["VERLC_SESSION"], "0" * 32)))
    want(404, "", status(chat(), url=CHAT.replace("/sessions/" + os.environ["VERLC_SESSION"], "")))
    want(403, "", status(chat(), headers={"Origin": "http://evil"}))
    (here / "victim").unlink()
if kind == "victim":
    (here / "victim.new").write_text(os.environ["VERLC_SESSION"])
    (here / "victim.new").rename(here / "victim")  # the thief reads it as soon as it is there
    while (here / "victim").exists():
        time.sleep(0.01)
if kind == "connects":
    flood = f"""
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
all = []
try:
    for _ in range(10000):
        all.append(socket.socket())
        all[-1].setblocking(False)
        all[-1].connect_ex(("127.0.0.1", {urlsplit(BASE).port}))
except OSError:
    pass  # no more of them
assert len(all) > 900
time.sleep(0.5)
"""
    many = [subprocess.Popen([sys.executable, "-c", flood]) for _ in range(10)]
    assert [p.wait() for p in many] == [0] * 10
if kind == "leaves":  # a process that outlives it, in a session of its own
    subprocess.Popen([sys.executable, "-c", "import time\nwhile True: open(%r,'w').write(str(time.time())); time.sleep(.01)"
                      % str(here / "beat")], start_new_session=True)
    while not (here / "beat").exists():
        time.sleep(0.01)
if kind == "long":
    talk = list(HELLO)
    while True:
        got = status({"messages": talk, "max_tokens": 12})
        if got[0] == 400:
            break
        talk += [got[1]["choices"][0]["message"], {"role": "user", "content": "more of it please"}]
    want(400, "data.max_response_length", got)
    raise SystemExit(9)
reward(reward=1)
'''
BAD_KINDS = {"dies": "exit code 1: ValueError: no luck today", "killed": "exit code 137", "silent": "without a turn", "floods": "",
             "big": "", "json": "", "thief": "", "victim": "", "connects": "", "leaves": "", "long": "", "good": ""}
# In runs of their own, behind a good one: no deadline that is meant for one of them ends another that a busy machine makes slow.
LATE_KINDS = {"hangs": ("idle_timeout", 4), "busy": ("episode_timeout", 5)}


def begin(s, name, kinds, **keys):
    return start(args_of(s, name, kinds, BAD, **{
        AGENT + "command": f"{sys.executable} {s.dir / f'{name}.py'} {s.dir}", ROLLOUT + "n": 1, "trainer.total_training_steps": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": len(kinds), "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        **keys}))


def episodes(s, name, p):
    """Of each its samples, once the run has ended well."""
    err = p.communicate(timeout=300)[1]
    if p.returncode != 0:
        raise AssertionError(f"{name}: exit {p.returncode}\n{err}")
    of = {}
    for r in samples(s.dir / name):
        of.setdefault(r[1], []).append(r)
    return [r for _, r in sorted(of.items())]


def check(test, kind, why, row):
    """row: the last sample of an episode."""
    status, message, episode = row[7], row[8], json.loads(row[9])
    end = "timeout" if "timeout" in why else "error"
    failed = (status, episode["end"]) == ("crash", end) and why in message and episode["reason"] in message
    scored = status == "score" and (kind == "long" or row[6] == 1)
    test(kind, failed if why else scored, (status, message, episode["end"]))


def bad(s, test):
    late = {kind: begin(s, kind, ["good", kind], **{AGENT + key: seconds, AGENT + "max_concurrent": 1})
            for kind, (key, seconds) in LATE_KINDS.items()}
    of = episodes(s, "bad", begin(s, "bad", list(BAD_KINDS)))
    before = (s.dir / "beat").read_text()
    rows = {kind: r[-1] for kind, r in zip(BAD_KINDS, of)}
    for kind, why in BAD_KINDS.items():
        check(test, kind, why, rows[kind])
    test("a program that dies because its context is full has ended by length", json.loads(rows["long"][9])["end"] == "length")
    for kind, (key, seconds) in LATE_KINDS.items():
        good, of = episodes(s, kind, late[kind])
        check(test, "good", "", good[-1])
        check(test, kind, f"agent.{key}={seconds}", of[-1])
    test("an episode of a thousand conversations is 256 samples", 2 < len(of) <= 256, len(of))
    time.sleep(0.1)
    test("what a program leaves is ended with it", (s.dir / "beat").read_text() == before)


def main():
    test = Tests()
    with Scratch(small=True) as s:
        (s.dir / "reward.py").write_text(REWARD)
        bad(s, test)
    test.end()


main()
