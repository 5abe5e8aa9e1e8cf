"""The project of the fair share tests: that of the worker tests, and tasks of their own."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from celery import Task
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from tests.support.apps import PREFIX
from tests.worker.project import app, end, recorder, task, wait_for

__all__ = ["app"]


@task()
def nap(self: Task, label: str, seconds: float = 0.05) -> None:
    """Take up to *seconds*."""
    with recorder.recorded(self, label):
        time.sleep(random.uniform(0, seconds))


@task(max_retries=1)
def again(self: Task, label: str, countdown: float = 0) -> None:
    """Fail the first time, and retry after *countdown* seconds."""
    with recorder.recorded(self, label):
        if not self.request.retries:
            raise self.retry(countdown=countdown)


@task(max_retries=1)
def outcome_early(self: Task, how: str) -> str:
    """As `outcome`, acknowledged when it starts."""
    return end(self, how)


@task()
def deaf(self: Task, label: str) -> None:
    """Go on after SIGTERM, as a job does that cleans up, until the test opens the gate."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    recorder.write(self, label, "start")
    wait_for("gate")
    os.kill(os.getpid(), signal.SIGKILL)


@task()
def see_eta(self: Task, label: str) -> None:
    """Write down the ETA that the task sees."""
    with recorder.recorded(self, label):
        recorder.client().set(f"test:eta:{label}", str(self.request.eta))


@inspect_command()
def memory(state: Any) -> dict[str, int]:
    """Count what a worker keeps of messages."""
    consumer = state.consumer
    return {
        "held": len(consumer.reader.held),
        "requests": len(worker_state.requests),
        "timers": sum(bool(entry.entry.args) for entry in consumer.timer.queue),
    }


@task(autoretry_for=(ValueError,), retry_kwargs={"max_retries": 1, "countdown": 0})
def autoretried(self: Task, label: str) -> None:
    """Fail the first time; Celery retries."""
    with recorder.recorded(self, label):
        if not self.request.retries:
            raise ValueError("as asked")


@task()
def spread(self: Task, label: str, parts: int) -> None:
    """Publish some more jobs."""
    with recorder.recorded(self, label):
        for part in range(parts):
            app.send_task(f"{PREFIX}record", [f"part {part}"], queue="a")
