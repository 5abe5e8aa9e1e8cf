"""The tasks of the smoke tests. pytest-celery puts this module, alone, beside the worker's app.

What ran goes to the result backend: the one Redis that test and worker both reach, by whatever
address.
"""

from __future__ import annotations

import time
from typing import Any

from celery import Task, current_app, shared_task

#: List of the labels of the tasks that started.
RAN = "smoke:ran"
#: List of tokens; a held task ends when it gets one.
GATE = "smoke:gate"


def _started(label: str) -> Any:
    backend: Any = current_app.backend
    client = backend.client
    client.rpush(RAN, label)
    return client


@shared_task
def record(label: str) -> str:
    """Say that it ran."""
    _started(label)
    return label


@shared_task
def hold(label: str) -> str:
    """Run until the test opens the gate once."""
    client = _started(label)
    deadline = time.monotonic() + 60
    while not client.lpop(GATE):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody let {label} go")
        time.sleep(0.02)
    return label


@shared_task(acks_late=True)
def hold_late(label: str) -> str:
    """Like `hold`, acknowledged at its end."""
    return str(hold.run(label))


@shared_task
def total(numbers: list[int], label: str = "total") -> int:
    """Add up: the body of a chord."""
    _started(label)
    return sum(numbers)


@shared_task(bind=True)
def whereabouts(self: Task, label: str) -> str:
    """Say that it ran, and on which node."""
    _started(label)
    time.sleep(0.05)
    return str(self.request.hostname)


@shared_task(bind=True, max_retries=2)
def third_time(self: Task, label: str) -> int:
    """Succeed at the third try."""
    _started(label)
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)
