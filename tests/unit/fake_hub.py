"""A small stand-in for the hub's HTTP interface, as huggingface_hub asks it.

  fake_hub.py DIR MODE   serves each folder USER/NAME of DIR, with main/ files for a dataset, on a free port, which it prints.
  MODE, of several words with commas: ok; flaky (every first request of a path gets HTTP 503); damaged (large files have a
  wrong byte); cut (the first answer of a large file ends half way); escape (names a file outside the repository); junk;
  gated; huge (claims files of 10^15 bytes); token (401 without "Bearer secret"); slow (large files come in ten pieces of
  0.1 s).  Files over 1,000 bytes are large: stored as LFS.
"""

import hashlib
import http.server
import json
import os
import re
import sys
import time

root, modes = sys.argv[1], sys.argv[2].split(",")
asked = set()
SHA = "a" * 40


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, data=b"", **headers):
        self.send_response(status)
        for k, v in {"Content_Length": str(len(data)), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if "flaky" in modes and path not in asked:
            asked.add(path)
            return self.reply(503, b"busy")
        if "token" in modes and self.headers.get("Authorization") != "Bearer secret":
            return self.reply(401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Invalid credentials")
        if "gated" in modes:
            return self.reply(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        if m := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(/.*)?", path):
            return self.api(m[1], m[2] or "")
        if m := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self.file(m[1], m[2])
        self.reply(404, b"no")

    def files(self, repo):
        top = os.path.join(root, repo)
        return sorted(os.path.relpath(os.path.join(d, f), top) for d, _, names in os.walk(top) for f in names)

    def entry(self, repo, name):
        with open(os.path.join(root, repo, name), "rb") as f:
            data = f.read()
        e = {"type": "file", "path": "../../" + name if "escape" in modes else name, "size": len(data),
             "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
        if len(data) > 1000:
            e["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": e["size"], "pointerSize": 134}
        return e

    def api(self, repo, rest):
        if not os.path.isdir(os.path.join(root, repo)):
            return self.reply(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if "junk" in modes:
            return self.reply(200, b"<html>")
        names = self.files(repo)
        if rest.startswith("/tree/"):
            return self.json([self.entry(repo, n) for n in names])
        self.json({"id": repo, "_id": "1", "sha": SHA, "private": False, "gated": False, "disabled": False, "downloads": 0,
                   "likes": 0, "tags": [], "siblings": [{"rfilename": n} for n in names]})

    def json(self, value):
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def file(self, repo, name):
        e = self.entry(repo, name)
        with open(os.path.join(root, repo, name), "rb") as f:
            data = f.read()
        large = "lfs" in e
        head = {"ETag": '"%s"' % (e["lfs"]["oid"] if large else e["oid"])}
        if large and "damaged" in modes:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if self.command == "HEAD":
            return self.reply(200, data, **head, **({"Content_Length": str(10**15)} if "huge" in modes else {}))
        status, begin = 200, 0
        if m := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, begin = 206, int(m[1])
            head["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            print("range", begin, file=sys.stderr, flush=True)
        body = data[begin:]
        self.send_response(status)
        for k, v in {"Content-Length": str(len(body)), "X-Repo-Commit": SHA, **head}.items():
            self.send_header(k, v)
        self.end_headers()
        if large and "cut" in modes and name not in asked:
            asked.add(name)
            self.wfile.write(body[:len(body) // 2])
            self.wfile.flush()
            self.connection.close()
        elif large and "slow" in modes:
            for k in range(0, len(body), max(len(body) // 10, 1)):
                self.wfile.write(body[k:k + max(len(body) // 10, 1)])
                self.wfile.flush()
                time.sleep(0.1)
        else:
            self.wfile.write(body)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
