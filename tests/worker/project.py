"""The project of the worker tests: the test project, and tasks that a test holds and lets go.

`hold` blocks on a Redis list instead of sleeping, so that a test decides when a job ends.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from tests.support.apps import PREFIX, Recorder
from tests.support.project import app

recorder = Recorder(os.environ.get("TEST_RECORD_URL") or os.environ["TEST_BROKER_URL"])


def task(**options: Any) -> Callable[[Any], Any]:
    """Register a bound task under `test.<name>`."""

    def decorate(function: Any) -> Any:
        return app.task(bind=True, name=PREFIX + function.__name__, **options)(function)

    return decorate


def wait_for(gate: str, seconds: float = 60) -> None:
    """Wait for a token in *gate*."""
    deadline = time.monotonic() + seconds
    while not recorder.client().lpop(gate):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody opened {gate}")
        time.sleep(0.02)


@task()
def hold(self: Task, label: str, gate: str = "gate") -> None:
    """Run until the test opens the gate once."""
    with recorder.recorded(self, label):
        wait_for(gate)


@task(acks_late=True)
def hold_late(self: Task, label: str, gate: str = "gate") -> None:
    """Like `hold`, acknowledged at the end."""
    with recorder.recorded(self, label):
        wait_for(gate)


@task(acks_late=True)
def record_late(self: Task, label: str) -> None:
    with recorder.recorded(self, label):
        pass


@task(ignore_result=False)
def hold_result(self: Task, label: str, gate: str = "gate") -> str:
    """Like `hold`, with a result."""
    with recorder.recorded(self, label):
        wait_for(gate)
    return label


@task(priority=0)
def urgent(self: Task, label: str) -> None:
    """A task with a priority of its own."""
    with recorder.recorded(self, label):
        pass


@task(ignore_result=False)
def gather(self: Task, results: list[Any], label: str = "gather") -> list[Any]:
    """The body of a chord."""
    with recorder.recorded(self, label):
        return results


@task(max_retries=1, acks_late=True)
def outcome(self: Task, how: str) -> str:
    """End in the way that *how* names."""
    return end(self, how)


def end(self: Task, how: str) -> str:  # noqa: C901  # one branch for each way to end
    """End the running task in the way that *how* names."""
    recorder.write(self, how, "start")
    first = recorder.count(self) == 1
    if how == "error":
        raise ValueError("as asked")
    if how == "retry" and first:
        raise self.retry(countdown=0)
    if how == "reject":
        raise Reject("as asked", requeue=False)
    if how == "requeue" and first:
        raise Reject("as asked", requeue=True)
    if how == "ignore":
        raise Ignore
    if how == "memory" and first:
        raise MemoryError
    if how == "exit":
        raise SystemExit(1)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "unpicklable":
        raise _UnpicklableError(lambda: None)
    if how == "soft":
        try:
            time.sleep(30)
        except SoftTimeLimitExceeded:
            return "soft"
    if how == "hard":
        time.sleep(30)
    while how == "deaf":
        with contextlib.suppress(SoftTimeLimitExceeded):
            time.sleep(30)
    return how


class _UnpicklableError(Exception):
    """An error that cannot be sent to the parent."""


@task(acks_late=True, reject_on_worker_lost=True)
def poison(self: Task, label: str) -> None:
    """Kill the child that runs it, every time."""
    recorder.write(self, label, "start")
    os.kill(os.getpid(), signal.SIGKILL)


@task()
def measure(self: Task, payload: str, label: str) -> None:
    """Take a large argument; end with its size."""
    with recorder.recorded(self, f"{label}:{len(payload)}"):
        pass


@task()
def measure_bytes(self: Task, label: str, payload: str) -> None:
    with recorder.recorded(self, f"{label}:{len(base64.b64decode(payload))}"):
        pass
