"""Where the tools of verl until 0.7.1 run what blocks: `await pool.execute.remote(function, *arguments)`, the call that their
subclasses make of a Ray actor.  Here it is threads of this process.

num_workers calls run at once in a process.  rate_limit is of all tools in all processes of a run together, as verl's one limiter
in a cluster: each process has its share, and the first tool to ask sets it.  Invariant: a call that fails gives None, as verl's."""

import asyncio
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)
PROCESSES = "VERLC_TOOL_PROCESSES"  # how many share rate_limit
LIMITER = []  # of this process


def limiter(rate_limit):
    if not LIMITER:
        LIMITER.append(threading.BoundedSemaphore(max(1, int(rate_limit) // int(os.environ.get(PROCESSES, "1")))))
    return LIMITER[0]


class Method:
    def __init__(self, call):
        self.remote = call


class ExecutionPool:
    def __init__(self, num_workers, rate_limit=None, what="executing code"):
        """rate_limit None: no limit, and what a call raises is raised."""
        self.threads = ThreadPoolExecutor(max(1, int(num_workers)))
        self.limiter, self.what = None if rate_limit is None else limiter(rate_limit), what
        self.execute, self.ping = Method(self._submit), Method(lambda: self._submit(lambda: True))

    async def _submit(self, function, *args, **kwargs):
        return await asyncio.get_running_loop().run_in_executor(self.threads, lambda: self._run(function, args, kwargs))

    def _run(self, function, args, kwargs):
        if self.limiter is None:
            return function(*args, **kwargs)
        with self.limiter:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                logger.warning("Error when %s: %s", self.what, error)
                return None
