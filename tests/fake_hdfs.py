#!/usr/bin/env python3
"""Hadoop's client as far as verlc calls it: `hdfs dfs -ls [-R] | -cat | -mkdir -p | -put -f | -get | -rm -f | -test -e`, with
Hadoop's rules and messages, over the directory HDFS_ROOT. Calls go to HDFS_LOG. HDFS_FAIL=N: so many calls of -put into a
checkpoint fail first (a file counts them); HDFS_SLOW=NAME: a -put of a file of that name writes half of it and stays."""

import os
import shutil
import sys
import time

root = os.environ["HDFS_ROOT"]
dfs, verb, *words = sys.argv[1:]
options = [w for w in words if w.startswith("-")]
paths = [w for w in words if not w.startswith("-")]
assert dfs == "dfs"
with open(os.environ["HDFS_LOG"], "a", encoding="utf-8") as log:
    print(verb, *words, file=log)


def local(path):
    assert path.startswith("hdfs://nn/"), path
    return os.path.join(root, path.removeprefix("hdfs://nn/"))


def no(path):
    sys.exit(f"{verb.lstrip('-')}: `{path}': No such file or directory")


def line(path):
    at = local(path)
    kind, n = ("d", 0) if os.path.isdir(at) else ("-", os.path.getsize(at))
    print(f"{kind}rwxr-xr-x   - user group {n:10d} 2026-01-01 00:00 {path}")


def below(path):
    for name in sorted(os.listdir(local(path))):
        line(f"{path}/{name}")
        if "-R" in options and os.path.isdir(local(f"{path}/{name}")):
            below(f"{path}/{name}")


def ls(path):
    if not os.path.exists(local(path)):
        no(path)
    if os.path.isdir(local(path)):
        if "-R" not in options:
            print(f"Found {len(os.listdir(local(path)))} items")
        below(path.rstrip("/"))
    else:
        line(path)


def put_one(source, to):
    target = os.path.join(to, os.path.basename(source)) if os.path.isdir(to) else to
    with open(source, "rb") as file:
        data = file.read()
    with open(target + "._COPYING_", "wb") as file:
        if os.path.basename(target) == os.environ.get("HDFS_SLOW"):
            file.write(data[:len(data) // 2])
            file.flush()
            time.sleep(600)
        file.write(data)
    os.replace(target + "._COPYING_", target)


def put():
    count = os.path.join(root, ".failures")
    n = int(open(count, encoding="utf-8").read()) if os.path.exists(count) else 0
    if n < int(os.environ.get("HDFS_FAIL", "0")) and "global_step" in paths[-1]:
        with open(count, "w", encoding="utf-8") as file:
            file.write(str(n + 1))
        sys.exit("26/01/01 WARN ipc.Client: retrying\nput: Connection refused")
    to = local(paths[-1])
    if not os.path.isdir(to) and (len(paths) > 2 or not os.path.isdir(os.path.dirname(to))):
        no(paths[-1])
    for source in paths[:-1]:
        if os.path.isdir(source):
            shutil.copytree(source, os.path.join(to, os.path.basename(source)), dirs_exist_ok=True)
        else:
            put_one(source, to)


def get():
    for path in paths[:-1]:
        if not os.path.exists(local(path)):
            no(path)
        to = os.path.join(paths[-1], path.rsplit("/", 1)[1]) if os.path.isdir(paths[-1]) else paths[-1]
        if os.path.exists(to):
            sys.exit(f"get: `{to}': File exists")
        (shutil.copytree if os.path.isdir(local(path)) else shutil.copyfile)(local(path), to)


if verb == "-ls":
    ls(paths[0])
elif verb == "-cat":
    if not os.path.isfile(local(paths[0])):
        no(paths[0])
    with open(local(paths[0]), "rb") as f:
        sys.stdout.buffer.write(f.read())
elif verb == "-mkdir":
    for p in paths:
        os.makedirs(local(p), exist_ok=True)
elif verb == "-put":
    put()
elif verb == "-get":
    get()
elif verb == "-rm":
    for p in paths:
        if os.path.exists(local(p)):
            os.unlink(local(p))
elif verb == "-test":
    sys.exit(0 if os.path.exists(local(paths[0])) else 1)
else:
    sys.exit(f"{verb}: Unknown command")
