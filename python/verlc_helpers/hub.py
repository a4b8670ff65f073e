"""Models and datasets of the Hugging Face hub, through huggingface_hub, into Hugging Face's own cache.

  {"op": "start", "type": "model" or "dataset", "repo": "user/name", "revision": commit or null, "patterns": [...]}
      -> {"dir": the snapshot} where all files are there, else {"total": bytes still to come, "files": their number}
  {"op": "status"} -> {"state": "running", "done": bytes} or {"state": "done", "dir": ...}; an error ends the download

The download runs on a thread, so that verlc can show how far it is and stop it.  HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_CACHE and HF_HUB_OFFLINE mean what they mean to huggingface_hub. A connection that was cut goes on at the same byte; a
program that was killed fetches only the files that are not whole.
A file that arrived is checked: SHA-256 of large files, git's hash of small ones, as the hub names them.
Does not decide which files a model needs: the patterns do.  Invariant: a snapshot that is returned has every file whole.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import time

from verlc_helpers.protocol import HelperError, install_line, serve

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # verlc draws one
for name in [n for n, v in os.environ.items() if n.startswith("HF_") and not v]:
    del os.environ[name]  # an empty one is not set
try:
    import huggingface_hub
    from huggingface_hub import constants, errors
except ImportError:  # reported at the first request
    huggingface_hub = None

TRIES = 4
RESERVE = 64 << 20  # bytes of the disk that stay free


class Download(threading.Thread):
    """One snapshot on its way."""

    def __init__(self, request, folder, todo):
        super().__init__(daemon=True)
        self.request, self.folder, self.todo = request, folder, todo
        self.before = bytes_of(folder)
        self.error = self.dir = None

    def run(self):
        try:
            path = snapshot(self.request)
            check(self.request, path, self.todo)
            self.dir = path
        except HelperError as error:
            self.error = error
        except Exception as error:
            self.error = explain(self.request, error)


running = None


def bytes_of(folder):
    """Bytes of the blobs in a repository's cache, those still on their way included."""
    try:
        return sum(e.stat().st_size for e in os.scandir(os.path.join(folder, "blobs")))
    except OSError:
        return 0


def snapshot(request, **more):
    """huggingface_hub's download, with retries on what may pass."""
    for attempt in range(TRIES):
        try:
            return huggingface_hub.snapshot_download(request["repo"], repo_type=request["type"], revision=request["revision"],
                                                     allow_patterns=request["patterns"], **more)
        except Exception as error:
            status = getattr(getattr(cause(error), "response", None), "status_code", 0)
            if (status < 500 and status != 429) or attempt == TRIES - 1:
                raise
            time.sleep(0.5 * 2**attempt)


def cause(error):
    """What stopped a dry run."""
    return error.__cause__ if isinstance(error, errors.DryRunError) and error.__cause__ is not None else error


def explain(request, error):
    """What a person can do about an error of huggingface_hub."""
    repo, kind = request["repo"], request["type"]
    what = f"{kind} {repo}"
    error = cause(error)
    text = " ".join(str(error).split())[:300]
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(error, errors.GatedRepoError):
        return HelperError(f"{what}: its owner grants access by name; ask for it on the hub's page and set HF_TOKEN", "INPUT")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HelperError(f"{what}: no such {kind} on the hub, or HF_TOKEN may not read it", "INPUT")
    if isinstance(error, errors.RevisionNotFoundError):
        return HelperError(f"{what}: the hub has no branch main of it", "INPUT")
    if constants.HF_HUB_OFFLINE:
        return HelperError(f"{what}: HF_HUB_OFFLINE is set and the local cache has not all of its files; unset it once, or give "
                           "a directory", "INPUT")
    if isinstance(error, (errors.LocalEntryNotFoundError, ConnectionError)) or "onnect" in type(root).__name__:
        reason = " ".join(str(root).split())[:200]
        return HelperError(f"{what}: cannot reach {constants.ENDPOINT} ({reason}); connect this machine, set HF_ENDPOINT to a "
                           "mirror, or give a directory", "INPUT")
    if isinstance(error, json.JSONDecodeError):
        return HelperError(f"{what}: {constants.ENDPOINT} does not answer as the hub does ({text}); check HF_ENDPOINT", "FORMAT")
    if isinstance(error, OSError) and error.errno:
        return HelperError(f"{what}: {text}", "IO")
    return HelperError(f"{what}: {type(error).__name__}: {text}", "INPUT")


def digest(path, entry):
    """The hash by which the hub names a file's content, and what it is of this file."""
    if entry.lfs is not None:
        h, want = hashlib.sha256(), entry.lfs.sha256
    else:
        h, want = hashlib.sha1(b"blob %d\0" % os.path.getsize(path)), entry.blob_id
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            h.update(chunk)
    return h.hexdigest(), want


def check(request, path, names):
    """Every file that was fetched against the hub's own hash; a damaged one is removed."""
    api = huggingface_hub.HfApi()
    revision = os.path.basename(path)
    for entry in api.list_repo_tree(request["repo"], recursive=True, repo_type=request["type"], revision=revision):
        if entry.path not in names:
            continue
        file = os.path.join(path, entry.path)
        got, want = digest(file, entry)
        if want and got != want:
            os.unlink(os.path.realpath(file))
            os.unlink(file)
            raise HelperError(f"{request['type']} {request['repo']}: {entry.path} arrived damaged and was removed; try again",
                              "INPUT")


def start(request):
    global running
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", request["repo"]):
        raise HelperError(f"'{request['repo']}' is not a name on the hub (user/name)", "INVAL")
    folder = os.path.join(constants.HF_HUB_CACHE, request["type"] + "s--" + request["repo"].replace("/", "--"))
    try:
        files = snapshot(request, dry_run=True) if not constants.HF_HUB_OFFLINE else []
        todo = [f for f in files if f.will_download]
        if not todo:
            return {"dir": snapshot(request, local_files_only=constants.HF_HUB_OFFLINE)}
    except Exception as error:
        raise explain(request, error) from None
    total = sum(f.file_size or 0 for f in todo)
    place = os.path.abspath(constants.HF_HUB_CACHE)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if total + RESERVE > free:
        raise HelperError(f"{request['type']} {request['repo']}: {total / 2**30:.2f} GiB are to come and {place} has "
                          f"{free / 2**30:.2f} GiB free; make room or set HF_HUB_CACHE to another disk", "IO")
    running = Download(request, folder, [f.filename for f in todo])
    running.start()
    return {"total": total, "files": len(todo)}


def status():
    if running.error is not None:
        raise running.error
    if running.dir is not None:
        return {"state": "done", "dir": running.dir}
    return {"state": "running", "done": max(bytes_of(running.folder) - running.before, 0)}


def handle(request):
    if huggingface_hub is None:
        raise HelperError(f"the Python package huggingface_hub is missing; {install_line('huggingface_hub')}, or give a directory",
                          "INPUT")
    return start(request) if request["op"] == "start" else status()


if __name__ == "__main__":
    serve(handle)
