"""A small stand-in for the hub's HTTP interface, for tests/unit/test_data_make.c.

  fake_hub.py DIR MODE   serves DIR's files as the repository fake/gsm8k on a free
                         port, which it prints.  MODE: ok; flaky (every first request
                         of a path gets HTTP 503); damaged (files lose their last byte);
                         escape (names a file outside the repository); junk.
"""

import hashlib
import http.server
import json
import os
import sys

root, mode = sys.argv[1], sys.argv[2]
asked = set()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def reply(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if mode == "flaky" and self.path not in asked:
            asked.add(self.path)
            return self.reply(503, b"busy")
        tree, files = "/api/datasets/fake/gsm8k/tree/main/main", "/datasets/fake/gsm8k/resolve/main/main/"
        if self.path == tree:
            if mode == "junk":
                return self.reply(200, b"<html>")
            return self.reply(200, json.dumps([self.entry(n) for n in sorted(os.listdir(root))]).encode())
        if self.path.startswith(files):
            with open(os.path.join(root, os.path.basename(self.path)), "rb") as f:
                data = f.read()
            return self.reply(200, data[:-1] if mode == "damaged" else data)
        self.reply(404, b"no")

    def entry(self, name):
        with open(os.path.join(root, name), "rb") as f:
            data = f.read()
        path = "../../" + name if mode == "escape" else "main/" + name
        return {"type": "file", "path": path, "size": len(data), "lfs": {"oid": hashlib.sha256(data).hexdigest()}}


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
