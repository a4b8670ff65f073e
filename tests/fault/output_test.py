"""Results that cannot be written end a tool with exit status 4: a full disk, a file size limit, a reader that has gone."""

import json
import os
import pathlib
import resource
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests  # noqa: E402

LIMIT = 1024


def tool(args, requests, **kw):
    return subprocess.run([VERLC, *map(str, args)], input=requests, text=True, stderr=subprocess.PIPE, timeout=120, env=ENV, **kw)


def main():
    test = Tests()
    with Scratch() as s:
        model = s.dir / "model"
        lines = {"tokenize": {"text": "What is 2 + 3?"}, "score": {"ids": [5, 6, 7, 8], "response_start": 2},
                 "generate": {"ids": [5, 6, 7], "max_tokens": 4},
                 "algo": {"op": "agg_loss", "loss_mat": [[1.0]], "loss_mask": [[1]]}}
        for name, request in lines.items():
            args = [name] + ([] if name == "algo" else ["--model", model])
            requests = (json.dumps(request) + "\n") * 600
            with open("/dev/full", "w") as full:
                test.refused(f"{name} into a full disk", tool(args, requests, stdout=full), 4, "No space left")
            closed = tool(args, requests, preexec_fn=lambda: os.close(1))
            test.refused(f"{name} with a closed standard output", closed, 4, "Bad file descriptor")
            out = s.dir / f"{name}.jsonl"
            with open(out, "w") as f:
                p = tool(args, requests, stdout=f, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)))
            test.refused(f"{name} over the file size limit", p, 4, "File too large")
            many = (json.dumps(request) + "\n") * 4000
            with subprocess.Popen([VERLC, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env=ENV) as p:
                p.stdout.close()
                _, err = p.communicate(many.encode(), timeout=120)
            test(f"{name} | head: ends quietly", p.returncode == 4 and b"error:" not in err, f"exit {p.returncode}: {err[-300:]}")
        for args in (["--help"], ["tokenize", "--help"], ["model", "info", "--model", model], ["ppo", "--cfg", "job"]):
            with open("/dev/full", "w") as full:
                p = tool(args, "", stdout=full)
            test(f"verlc {args[0]} {args[1:2]} into a full disk", p.returncode == 4, f"exit {p.returncode}")
    test.end()


main()
