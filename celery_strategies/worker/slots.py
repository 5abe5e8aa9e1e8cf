"""How many messages a worker may hold: counted from Celery's own truth at each look, never kept.

Owns the arithmetic of slots. A slot is taken from the moment a request is reserved until it is ready
(:mod:`celery.worker.state`), whatever happens to its message meanwhile.
"""

from __future__ import annotations

from typing import Any

from celery.worker import state
from celery.worker.request import Request


def total(consumer: Any) -> int:
    """Return the number of slots: what the autoscaler may grow to, else the pool's size."""
    scaler = getattr(consumer.controller, "autoscaler", None)
    if scaler is not None:
        return int(scaler.max_concurrency)
    pool = consumer.pool
    if pool.is_green:
        # Celery 5.6 counts the greenlets that run now, not those that may.
        return int(pool._pool.size)
    return int(pool.num_processes or 0)


def leaving() -> bool:
    """Whether the worker was told to shut down; its loop may turn on until it notices. An exit code of 0 counts."""
    return any(
        flag is not None and flag is not False
        for flag in (state.should_stop, state.should_terminate)
    )


def free(consumer: Any, read_ahead: int = 0) -> int:
    """Return how many more messages the worker may take; may be negative.

    ``len()`` of Celery's weak sets is safe while pool threads change them, iterating is not.
    """
    # What waits for its task's rate limit is not reserved yet.
    limited = sum(len(bucket.contents) for bucket in consumer.rate_limits)
    return total(consumer) + read_ahead - len(state.reserved_requests) - limited


def requests(consumer: Any) -> list[Any]:
    """Return every request the worker knows: reserved, active, scheduled, or waiting for a rate limit."""
    found = [*tuple(state.requests.values())]
    for bucket in tuple(consumer.task_buckets.values()):
        if bucket:
            found += [request for request, _ in tuple(bucket.contents)]
    timer = consumer.timer
    for scheduled in tuple(getattr(timer, "queue", ()) or ()):
        args = getattr(getattr(scheduled, "entry", None), "args", None)
        if args and isinstance(args[0], Request):
            found.append(args[0])
    return found
