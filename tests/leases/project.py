"""The project of the lease tests: that of the fair share tests, and tasks that tell their term."""

from __future__ import annotations

import json
import os
import signal
import time

from celery import Task
from celery.signals import worker_ready
from kombu import Queue

from celery_strategies import fencing_term
from celery_strategies.transport import presence
from tests.fair.project import app, recorder, task, wait_for

__all__ = ["app"]

if "TEST_ARGUED" in os.environ:
    app.conf.task_queues = [
        Queue(name, queue_arguments={"x-single-active-consumer": True})
        for name in os.environ["TEST_ARGUED"].split(",")
    ]


def note(self: Task, label: str) -> None:
    """Tell the test which term this job sees, and with which headers it came."""
    line = {"label": label, "term": fencing_term(), "headers": sorted(self.request.headers or {})}
    recorder.client().rpush("test:terms", json.dumps(line))


@task(acks_late=True)
def number(self: Task, label: str, seconds: float = 0) -> None:
    """One of a row of jobs whose order matters."""
    note(self, label)
    with recorder.recorded(self, label):
        time.sleep(seconds)


@task()
def number_early(self: Task, label: str, seconds: float = 0) -> None:
    """The same, acknowledged when it starts."""
    note(self, label)
    with recorder.recorded(self, label):
        time.sleep(seconds)


@task(max_retries=1, acks_late=True)
def number_again(self: Task, label: str, queue: str = "") -> None:
    """The same, failing the first time; then it goes to *queue*."""
    note(self, label)
    with recorder.recorded(self, label):
        if not self.request.retries:
            raise self.retry(countdown=0, **({"queue": queue} if queue else {}))


@task(acks_late=True)
def end_worker(self: Task, label: str, times: int) -> None:
    """End the whole worker, the first *times* times."""
    with recorder.recorded(self, label):
        if recorder.count(self) <= times:
            os.killpg(os.getpgid(0), signal.SIGKILL)


@task(acks_late=True)
def busy(self: Task, label: str, seconds: float) -> None:
    """Compute without a pause, as a job does that never lets a green pool's loop turn."""
    with recorder.recorded(self, label):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(1000))


@task(acks_late=True)
def hold_number(self: Task, label: str, gate: str = "gate") -> None:
    """Tell the term, and run until the test opens the gate once."""
    note(self, label)
    with recorder.recorded(self, label):
        wait_for(gate)


def hang(_number: int, _frame: object) -> None:
    """Have the loop do nothing for a minute, while the other threads go on."""
    time.sleep(60)


if "TEST_LOOP_STALE_AFTER" in os.environ:
    presence.LOOP_STALE_AFTER = float(os.environ["TEST_LOOP_STALE_AFTER"])

    @worker_ready.connect(weak=False)
    def can_hang(**_: object) -> None:
        signal.signal(signal.SIGUSR2, hang)
