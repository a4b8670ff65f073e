"""verl.utils.rollout_trace under verlc: a run's record of an episode is in run.db, so these mark nothing."""

import contextlib


def rollout_trace_op(func):
    return func


@contextlib.contextmanager
def rollout_trace_attr(*args, **kwargs):
    yield
