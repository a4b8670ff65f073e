"""Dataset files of the Hugging Face hub, over HTTPS with the standard library.

  {"repo": "openai/gsm8k", "config": "main"} -> {"dir": directory with the files}

A snapshot in Hugging Face's own cache is used as it is; otherwise the files of
the configuration's folder are fetched to ~/.cache/verl/hub.  HF_ENDPOINT,
HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE mean what they mean there.
A file appears under its name only when its size and, where the hub tells it,
its SHA-256 are right; every wait on the network ends after TIMEOUT_S.
"""

import hashlib
import http.client
import json
import os
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request

from verlc_helpers.protocol import HelperError, serve

TIMEOUT_S = 30
TRIES = 4
DATA_FILES = (".parquet", ".jsonl", ".json")


def endpoint():
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def cached_snapshot(repo):
    """The newest snapshot in Hugging Face's cache, or None."""
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    hub = os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))
    folder = os.path.join(hub, "datasets--" + repo.replace("/", "--"))
    try:
        with open(os.path.join(folder, "refs", "main")) as f:
            path = os.path.join(folder, "snapshots", f.read().strip())
    except OSError:
        return None
    return path if os.path.isdir(path) else None


def explain(url, error):
    host = urllib.parse.urlsplit(url).netloc
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (401, 403):
            return HelperError(f"{url}: access denied (HTTP {error.code}); set HF_TOKEN to a token that may read it", "INPUT")
        if error.code == 404:
            return HelperError(f"{url}: no such dataset or file on the hub (HTTP 404)", "INPUT")
        return HelperError(f"{url}: HTTP {error.code} {error.reason}", "INPUT")
    return HelperError(
        f"cannot reach {host}: {getattr(error, 'reason', error)}; connect this machine, "
        "or give a copy on disk with --local_dataset_path DIR",
        "INPUT",
    )


def is_final(error):
    return isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429


def get(url, consume):
    """consume(response), with retries on what may pass; an error says what to do."""
    request = urllib.request.Request(url, headers={"User-Agent": "verlc"})
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_unredirected_header("Authorization", "Bearer " + token)
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return consume(response)
        except (urllib.error.URLError, http.client.HTTPException, socket.timeout, ConnectionError) as error:
            if is_final(error) or attempt == TRIES - 1:
                raise explain(url, error) from None
            time.sleep(0.5 * 2**attempt)


def list_files(repo, folder):
    """The data files in a folder of the repository, as the hub describes them."""
    url = f"{endpoint()}/api/datasets/{repo}/tree/main/{urllib.parse.quote(folder)}"
    try:
        entries = get(url, lambda r: json.load(r))
        return [e for e in entries if e["type"] == "file" and e["path"].endswith(DATA_FILES)]
    except (ValueError, KeyError, TypeError) as error:
        raise HelperError(f"{url}: not the hub's answer ({error})", "FORMAT") from None


def download(repo, entry, root):
    path = os.path.normpath(os.path.join(root, entry["path"]))
    if not path.startswith(os.path.normpath(root) + os.sep):
        raise HelperError(f"the hub names a file outside its repository: {entry['path']!r}", "FORMAT")
    if os.path.exists(path) and os.path.getsize(path) == entry["size"]:
        return
    url = f"{endpoint()}/datasets/{repo}/resolve/main/{urllib.parse.quote(entry['path'])}"
    tmp = f"{path}.{os.getpid()}.tmp"
    os.makedirs(os.path.dirname(path), exist_ok=True)

    def store(response):
        digest = hashlib.sha256()
        with open(tmp, "wb") as out:
            while chunk := response.read(1 << 20):
                out.write(chunk)
                digest.update(chunk)
            out.flush()
            os.fsync(out.fileno())
        size, want = os.path.getsize(tmp), entry.get("lfs", {}).get("oid")
        if size != entry["size"] or (want and want != digest.hexdigest()):
            raise ConnectionError(f"{entry['path']} arrived damaged ({size} of {entry['size']} bytes)")

    try:
        get(url, store)
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.unlink(tmp)


def handle(request):
    repo, config = request["repo"], request["config"]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise HelperError(f"'{repo}' is not the name of a dataset (user/name)", "INVAL")
    snapshot = cached_snapshot(repo)
    if snapshot:
        return {"dir": snapshot}
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise HelperError(f"HF_HUB_OFFLINE is set and {repo} is not in the local cache; unset it or give --local_dataset_path",
                          "INPUT")
    root = os.path.expanduser(os.path.join("~/.cache/verl/hub", repo))
    files = list_files(repo, config)
    if not files:
        raise HelperError(f"{endpoint()}/datasets/{repo}: no Parquet or JSON files in '{config}'", "INPUT")
    for entry in files:
        download(repo, entry, root)
    return {"dir": root}


if __name__ == "__main__":
    serve(handle)
