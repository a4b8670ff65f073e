#!/usr/bin/env python3
"""When verl's AsyncTokenBucket lets requests go, on a clock that jumps from one wait to the next.

  oracle_rate_limit.py [DIR]     writes DIR/rate_limit.json (tests/fixtures/algo)

[{"per_minute", "cost", "arrivals": [seconds, ...], "times": [seconds, ...]}]: requests of one cost, and when each has
what it asked for, in order."""

import ast
import asyncio
import importlib.util
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def verl_class(file, name, **names):
    """One class of a file of verl's, without what the file imports."""
    path = os.path.join(importlib.util.find_spec("verl").submodule_search_locations[0], file)
    tree = ast.parse(open(path, encoding="utf-8").read())
    body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    exec(compile(ast.Module(body, []), path, "exec"), names)
    return names[name]


AsyncTokenBucket = verl_class("experimental/reward_loop/reward_manager/limited.py", "AsyncTokenBucket", asyncio=asyncio,
                              get_event_loop=asyncio.get_event_loop)


class Clock(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when) + 1e-9  # a wait that rounds to nothing ends too
        super()._run_once()


def times(per_minute, cost, arrivals):
    got = []

    async def one(bucket, at):
        await asyncio.sleep(at)
        await bucket.acquire(cost)
        got.append(asyncio.get_running_loop().time())

    async def run():
        bucket = AsyncTokenBucket(rate_limit=per_minute / 60.0, max_tokens=per_minute / 60.0)
        await asyncio.gather(*(one(bucket, at) for at in arrivals))

    loop = Clock()
    loop.run_until_complete(run())
    loop.close()
    return sorted(got)


def make(out):
    spread = {"at once": [0.0] * 12, "a pause": [0.0] * 5 + [7.25] * 7, "a drip": [0.3 * i for i in range(12)]}
    cases = [{"per_minute": per_minute, "cost": cost, "arrivals": arrivals, "times": times(per_minute, cost, arrivals)}
             for per_minute, cost in ((600, 1), (120, 1), (60, 1), (7, 1), (100000, 2000), (60000, 999), (30000, 700))
             for arrivals in spread.values()]
    with open(os.path.join(out, "rate_limit.json"), "w") as f:
        json.dump(cases, f, indent=1)
        f.write("\n")
    print(f"rate_limit: {len(cases)} sequences of 12 requests")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../tests/fixtures/algo"))
