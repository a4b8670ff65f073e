"""Attacks the ports of a run on two CPU ranks with a stranger's bytes: requests, TLS, random bytes, greetings of ZeroMQ that are cut or
changed, connections that stay open, and --flood connections at once. The run must end with the weights of one that was left alone.

  python3 tools/attack/wire.py [--seed N] [--cases N] [--flood N]      (VERLC: the program, else build/release/verlc)"""

import argparse
import os
import pathlib
import random
import resource
import socket
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
os.environ.setdefault("VERLC", str(TOP / "build/release/verlc"))
os.environ.setdefault("SOURCE_DIR", str(TOP))
sys.path.insert(0, str(TOP / "tests"))
from ranks import below  # noqa: E402
from verlc_test import Scratch, Tests, run, start  # noqa: E402

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
STEPS = 150  # long enough for the flood
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)


def ports(pid):
    """Where the processes below this one listen."""
    inodes = set()
    for p in [pid, *below(pid)]:
        for fd in pathlib.Path(f"/proc/{p}/fd").glob("*"):
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                pass
    rows = (line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sorted({int(r[1].split(":")[1], 16) for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in inodes})


def payload(r):
    kind = r.randrange(9)
    if kind == 0:
        return r.choice([b"GET / HTTP/1.0\r\n\r\n", b"POST /v1/x HTTP/1.1\r\nHost: a\r\n\r\n", b"\n", b"\0", b""])
    if kind == 1:
        return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + r.randbytes(r.randrange(300))
    if kind == 2:
        return r.randbytes(r.choice([1, 9, 64, 200, 4096, 70000]))
    whole = bytearray(GREETING + HELLO + r.randbytes(200))
    if kind < 6:
        return bytes(whole[:r.randrange(len(whole))])
    for _ in range(r.randrange(1, 6)):
        whole[r.randrange(len(whole))] = r.randrange(256)
    return bytes(whole)


def attack(p, r, cases, flood):
    """Strangers at all ports of the run until it ends. (connections made, ports seen)"""
    made, seen, held = 0, set(), []
    while p.poll() is None:
        here = ports(p.pid)
        seen.update(here)
        for port in here:
            try:
                s = socket.create_connection(("127.0.0.1", port), timeout=1)
                made += 1
                s.sendall(payload(r))
                if r.random() < 0.2:
                    held.append(s)
                else:
                    s.close()
            except OSError:
                pass
        if made >= cases and flood > 0 and here:
            try:
                held += [socket.create_connection(("127.0.0.1", here[flood % len(here)]), timeout=1) for _ in range(min(flood, 100))]
                made += 100
            except OSError:
                pass
            flood -= 100
        if len(held) > 2000:
            for s in held[:1000]:
                s.close()
            del held[:1000]
        if flood <= 0:
            time.sleep(0.01)
    for s in held:
        s.close()
    return made, seen


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--seed", type=int, default=int(time.time()))
    a.add_argument("--cases", type=int, default=200)
    a.add_argument("--flood", type=int, default=10000)
    a = a.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    test = Tests()
    with Scratch(n_train=16) as s:
        keys = {"trainer__ranks": 2, "trainer__total_training_steps": STEPS, "trainer__save_freq": STEPS, "trainer__device": "cpu"}
        run(*s.ppo("alone", **keys))
        begin = time.monotonic()
        p = start(s.ppo("attacked", **keys))
        made, seen = attack(p, random.Random(a.seed), a.cases, a.flood)
        err = p.communicate()[1]
        print(f"seed {a.seed}: {made} connections to {len(seen)} ports in {time.monotonic() - begin:.1f} s")
        test("the run ends as it should", p.returncode == 0, err[-800:] if err else p.returncode)
        weights = [(s.dir / name / f"global_step_{STEPS}/actor/model.safetensors") for name in ("alone", "attacked")]
        test("and has the weights of one that was left alone", all(w.exists() for w in weights) and
             weights[0].read_bytes() == weights[1].read_bytes())
        test("the ports were found and attacked", len(seen) >= 3 and made >= a.cases, (made, seen))
    test.end()


main()
