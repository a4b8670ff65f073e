"""Directories and copies of local paths; hdfs:// goes through the program hdfs, as in verl."""

import os
import shutil
import subprocess


def is_hdfs(path):
    return str(path).startswith("hdfs://")


def exists(path, **kwargs):
    if is_hdfs(path):
        return subprocess.run(["hdfs", "dfs", "-test", "-e", path], check=False).returncode == 0
    return os.path.exists(path)


def makedirs(name, mode=0o777, exist_ok=False, **kwargs):
    if is_hdfs(name):
        subprocess.run(["hdfs", "dfs", "-mkdir", "-p", name], check=True)
    else:
        os.makedirs(name, mode=mode, exist_ok=exist_ok)


def copy(src, dst, **kwargs):
    if is_hdfs(src) or is_hdfs(dst):
        verb = "-put" if not is_hdfs(src) else "-get" if not is_hdfs(dst) else "-cp"
        subprocess.run(["hdfs", "dfs", verb, "-f", src, dst], check=True)
    elif os.path.isdir(src):
        shutil.copytree(src, dst, **kwargs)
    else:
        shutil.copy(src, dst)
    return True
