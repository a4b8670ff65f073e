"""verl.utils.profiler under verlc: a timer."""

import contextlib
import time


@contextlib.contextmanager
def simple_timer(name, timing_raw):
    """Adds the seconds inside to timing_raw[name]."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0) + time.perf_counter() - begun
