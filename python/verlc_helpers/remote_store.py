"""Checkpoints and inputs in other stores: hdfs:// through the client `hdfs`, s3://, gs:// and whatever else fsspec knows, file://
and plain directories.

  {"op": "fetch", "url": U, "to": PATH} -> {"bytes": n}         a file or a directory, whole under that name or not there
  {"op": "newest", "url": ROOT, "after": N, "write": true} -> {"latest": N or null, "steps": [{"step": N, "bytes": n}, ...]}
      newest first; write: an error where a file cannot be written there
  {"op": "take", "url": ROOT, "step": N, "to": DIR} -> {"bytes": n}    the files that its manifest lists, and the manifest
  {"op": "put", "url": ROOT, "step": N, "from": DIR, "notes": DIR} -> {"bytes": n}    notes: for two small files
  {"op": "forget", "url": ROOT} -> {}                             the tracker goes; checkpoints stay

ROOT/global_step_N is a copy of the local directory, ROOT/latest_checkpointed_iteration.txt the number that was copied last.
What a put writes comes in this order: a marker, the files, manifest.json, the tracker.  Checksums are the caller's.
Invariants: a global_step_N with a manifest.json is whole, whenever this process is killed; one that verlc has not written (neither
its manifest nor the marker says so) is never written over; nothing is deleted but what a put of the same step replaces."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from verlc_helpers.protocol import HelperError, serve

TRACKER, MANIFEST, MARKER = "latest_checkpointed_iteration.txt", "manifest.json", "verlc_upload.txt"
VERLS = re.compile(r"(actor|critic)/(huggingface|lora_adapter)/[^/]+")
STEP = re.compile(r"global_step_(0|[1-9]\d{0,17})")
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs",
            "adl": "adlfs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "hf": "huggingface_hub", "webhdfs": "requests",
            "http": "aiohttp", "https": "aiohttp"}
SMALL = 64 << 20


def join(*parts):
    return "/".join(p.rstrip("/") for p in parts[:-1]) + "/" + parts[-1]


class Directory:
    """A local directory, or one that is mounted."""

    def read(self, path):
        """The bytes of a small file, or None."""
        try:
            with open(path, "rb") as file:
                return file.read(SMALL)
        except FileNotFoundError:
            return None

    def names(self, path):
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []

    def files(self, path):
        """{relative path: size} of the files below; of a file itself {"": size}."""
        if os.path.isfile(path):
            return {"": os.path.getsize(path)}
        return {os.path.relpath(os.path.join(folder, name), path): os.path.getsize(os.path.join(folder, name))
                for folder, _, names in os.walk(path) for name in names}

    def put(self, pairs):
        for local, path in pairs:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            part = f"{path}.{os.getpid()}.tmp"
            try:
                with open(local, "rb") as source, open(part, "wb") as file:
                    shutil.copyfileobj(source, file, 16 << 20)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            finally:
                if os.path.lexists(part):
                    os.unlink(part)

    def get(self, pairs):
        for path, local in pairs:
            os.makedirs(os.path.dirname(local), exist_ok=True)
            shutil.copyfile(path, local)

    def remove(self, paths):
        for path in paths:
            if os.path.lexists(path):
                os.unlink(path)


class Hdfs:
    """By `hdfs dfs`, several files a call: each starts a virtual machine."""

    def run(self, *words, missing_ok=False):
        try:
            p = subprocess.run(["hdfs", "dfs", *words], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except FileNotFoundError:
            raise HelperError("hdfs:// needs the client 'hdfs' in PATH: install Hadoop's client", "HELPER") from None
        except OSError as error:
            raise HelperError(f"hdfs: {error.strerror}", "HELPER") from None
        if p.returncode == 0:
            return p.stdout
        if missing_ok and b"No such file or directory" in p.stderr:
            return None
        lines = [line for line in p.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        text = next((line for line in reversed(lines) if line.startswith(words[0].lstrip("-") + ":")), lines[-1] if lines else "")
        raise HelperError(f"'hdfs dfs {' '.join(words)[:200]}' ended with exit code {p.returncode}: {text}", "IO")

    def read(self, path):
        return self.run("-cat", path, missing_ok=True)

    def listing(self, path, *options):
        """(is a directory, size, path) of each line: permissions, replicas, owner, group, size, date, time, path."""
        for line in (self.run("-ls", *options, path, missing_ok=True) or b"").decode("utf-8", "surrogateescape").splitlines():
            words = line.split(None, 7)
            if len(words) == 8 and words[4].isdigit() and words[0][0] in "-d":
                yield words[0][0] == "d", int(words[4]), words[7]

    def names(self, path):
        return [p.rstrip("/").rsplit("/", 1)[1] for _, _, p in self.listing(path)]

    def files(self, path):
        def bare(p):
            return re.sub(r"^\w+://[^/]*", "", p).rstrip("/")

        root = bare(path)
        return {bare(p)[len(root):].lstrip("/"): size for is_dir, size, p in self.listing(path, "-R") if not is_dir}

    def put(self, pairs):
        folders = {}
        for local, path in pairs:
            if os.path.basename(local) != path.rsplit("/", 1)[1]:
                raise HelperError(f"{path}: hdfs keeps names", "INTERNAL")
            folders.setdefault(path.rsplit("/", 1)[0], []).append(local)
        self.run("-mkdir", "-p", *folders)
        for folder, files in folders.items():
            self.run("-put", "-f", *files, folder)

    def get(self, pairs):
        folders = {}
        for path, local in pairs:
            folders.setdefault(os.path.dirname(local), []).append(path)
        for folder, paths in folders.items():
            os.makedirs(folder, exist_ok=True)
            self.run("-get", *paths, folder)

    def remove(self, paths):
        if paths:
            self.run("-rm", "-f", *paths)


class Fsspec:
    """Object stores: a put of a file is whole or not there."""

    def __init__(self, url):
        scheme = url.split("://", 1)[0]
        package = PACKAGES.get(scheme, "")
        install = f"pip install fsspec {package}".rstrip() + f" (for {sys.executable})"
        try:
            import fsspec
        except ImportError:
            raise HelperError(f"{scheme}:// needs the Python package fsspec: {install}", "HELPER") from None
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except TypeError:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise HelperError(f"{scheme}://: {error}: {install}", "HELPER") from None
        except ValueError as error:
            raise HelperError(f"{url}: {error}", "INPUT") from None
        self.url = url

    def path(self, url):
        return self.fs._strip_protocol(url)

    def read(self, path):
        try:
            return self.fs.cat_file(self.path(path))
        except FileNotFoundError:
            return None

    def names(self, path):
        try:
            self.fs.invalidate_cache()
            return [p.rstrip("/").rsplit("/", 1)[1] for p in self.fs.ls(self.path(path), detail=False)]
        except FileNotFoundError:
            return []

    def files(self, path):
        self.fs.invalidate_cache()
        root = self.path(path).rstrip("/")
        found = self.fs.find(root, detail=True)
        return {p[len(root):].lstrip("/"): info["size"] or 0 for p, info in found.items()}

    def put(self, pairs):
        for local, path in pairs:
            self.fs.makedirs(self.fs._parent(self.path(path)), exist_ok=True)
            self.fs.put_file(local, self.path(path))

    def get(self, pairs):
        for path, local in pairs:
            os.makedirs(os.path.dirname(local), exist_ok=True)
            self.fs.get_file(self.path(path), local)

    def remove(self, paths):
        for path in paths:
            try:
                self.fs.rm_file(self.path(path))
            except FileNotFoundError:
                pass


def store_of(url):
    if url.startswith("hdfs://"):
        return Hdfs(), url
    if url.startswith("file://"):
        return Directory(), url.removeprefix("file://") or "/"
    if "://" not in url:
        return Directory(), os.path.abspath(os.path.expanduser(url))
    return Fsspec(url), url


def guarded(run):
    """Errors of clients, which raise whatever they like, as one line."""
    def call(request):
        try:
            return run(request)
        except (HelperError, MemoryError):
            raise
        except Exception as error:
            raise HelperError(f"{request['url']}: {type(error).__name__}: {error}", "IO") from error
    return call


# ---- checkpoints ----

def manifest_of(store, folder):
    """The manifest, {} where it cannot be read, None where there is none."""
    text = store.read(join(folder, MANIFEST))
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and isinstance(value.get("files"), dict) else {}


def verl_files(files):
    """Of {relative path: size}: what a checkpoint has for scripts written for verl, which no manifest lists."""
    return {rel: size for rel, size in files.items() if VERLS.fullmatch(rel)}


def sizes_of(manifest, folder):
    """{relative path: bytes} of a manifest, whose paths do not lead out of the directory."""
    sizes = {}
    for rel, entry in manifest["files"].items():
        if rel.startswith("/") or ".." in rel.split("/") or not rel or not isinstance(entry, dict):
            raise HelperError(f"{folder}/{MANIFEST} names '{rel}'", "FORMAT")
        sizes[rel] = int(entry.get("bytes") or 0)
    return sizes


def is_ours(store, folder):
    """Whether verlc wrote the step, or there is none."""
    manifest = manifest_of(store, folder)
    return "verlc" in (manifest or {}) or store.read(join(folder, MARKER)) is not None or not store.names(folder)


def latest_of(store, root):
    text = (store.read(join(root, TRACKER)) or b"").strip()
    return int(text) if text.isdigit() and len(text) < 19 else None


def check_writable(store, root):
    """Says before a run what its first copy would say after hours: no such bucket, no permission."""
    with tempfile.TemporaryDirectory() as folder:
        local = os.path.join(folder, MARKER)
        with open(local, "w", encoding="utf-8") as file:
            file.write("verlc may write here\n")
        store.put([(local, join(root, MARKER))])
    store.remove([join(root, MARKER)])


def newest(request):
    store, root = store_of(request["url"])
    latest = latest_of(store, root)
    if latest is not None and not is_ours(store, join(root, f"global_step_{latest}")):
        raise HelperError(f"{request['url']}: global_step_{latest} there was not written by verlc; give another directory",
                          "UNSUPPORTED")
    found = (STEP.fullmatch(name) for name in (store.names(root) if latest is not None else []))
    steps = []
    for step in sorted((int(m[1]) for m in found if m), reverse=True):
        if step > latest or step <= request.get("after", -1):
            continue
        folder = join(root, f"global_step_{step}")
        manifest = manifest_of(store, folder)
        if manifest and "verlc" in manifest:
            steps.append({"step": step, "bytes": sum(sizes_of(manifest, folder).values())})
    if request.get("write"):
        check_writable(store, root)
    return {"latest": latest, "steps": steps}


def check_room(to, need):
    folder = os.path.dirname(os.path.abspath(to))
    os.makedirs(folder, exist_ok=True)
    room = shutil.disk_usage(folder).free
    if need > room:
        raise HelperError(f"{folder}: {need / 1e9:.2f} GB are to come, the disk has {room / 1e9:.2f} GB free", "IO")


def take(request):
    store, root = store_of(request["url"])
    folder, to = join(root, f"global_step_{request['step']}"), os.path.abspath(request["to"])
    manifest = manifest_of(store, folder)
    if not manifest:
        raise HelperError(f"{folder}: no {MANIFEST} that can be read", "FORMAT")
    sizes, there = sizes_of(manifest, folder), store.files(folder)
    for rel, size in sizes.items():
        if there.get(rel) != size:
            raise HelperError(f"{folder}/{rel}: {there.get(rel, 'no')} bytes where the manifest says {size}", "FORMAT")
    sizes |= verl_files(there)
    check_room(to, sum(sizes.values()))
    store.get([(join(folder, rel), os.path.join(to, rel)) for rel in [*sizes, MANIFEST]])
    return {"bytes": sum(sizes.values())}


def put(request):
    """A step whose copy was broken off is put again as a whole."""
    store, root = store_of(request["url"])
    source, name = os.path.abspath(request["from"]), f"global_step_{request['step']}"
    folder = join(root, name)
    with open(os.path.join(source, MANIFEST), "rb") as file:
        sizes = sizes_of(json.loads(file.read()), source) | verl_files(Directory().files(source))
    if not is_ours(store, folder):
        raise HelperError(f"{folder} is there and was not written by verlc, which never writes over such a one", "UNSUPPORTED")
    notes = os.path.join(os.path.abspath(request["notes"]), name)
    os.makedirs(notes, exist_ok=True)
    for what, text in ((MARKER, "verlc copies a checkpoint to here\n"), (TRACKER, str(request["step"]))):
        with open(os.path.join(notes, what), "w", encoding="utf-8") as file:
            file.write(text)
    there = store.files(folder)
    store.put([(os.path.join(notes, MARKER), join(folder, MARKER))])
    store.remove([join(folder, MANIFEST)] if MANIFEST in there else [])
    store.remove([join(folder, rel) for rel in there if rel not in sizes and rel not in (MANIFEST, MARKER)])
    store.put([(os.path.join(source, rel), join(folder, rel)) for rel in sizes])
    arrived = store.files(folder)
    for rel, size in sizes.items():
        if arrived.get(rel) != size:
            raise HelperError(f"{folder}/{rel}: {arrived.get(rel)} bytes have arrived, not {size}", "IO")
    store.put([(os.path.join(source, MANIFEST), join(folder, MANIFEST))])
    store.remove([join(folder, MARKER)])
    store.put([(os.path.join(notes, TRACKER), join(root, TRACKER))])
    return {"bytes": sum(sizes.values())}


def forget(request):
    store, root = store_of(request["url"])
    if store.read(join(root, TRACKER)) is not None:
        newest(request)  # refuses where another program's is the newest
        store.remove([join(root, TRACKER)])
    return {}


# ---- inputs ----

def fetch(request):
    store, url = store_of(request["url"])
    sizes, to = store.files(url), os.path.abspath(request["to"])
    if not sizes or any(rel.startswith("/") or ".." in rel.split("/") for rel in sizes):
        raise HelperError(f"{request['url']}: there is no such file or directory", "INPUT")
    check_room(to, sum(sizes.values()))
    if isinstance(store, Hdfs):
        store.run("-get", url, to)
    else:
        store.get([(join(url, rel) if rel else url, os.path.join(to, rel) if rel else to) for rel in sizes])
    if os.path.isfile(to) != (list(sizes) == [""]) and not isinstance(store, Hdfs):
        raise HelperError(f"{request['url']}: another kind of file has arrived", "IO")
    return {"bytes": sum(sizes.values())}


OPS = {"fetch": fetch, "newest": newest, "take": take, "put": put, "forget": forget}


if __name__ == "__main__":
    serve(guarded(lambda request: OPS[request["op"]](request)))
