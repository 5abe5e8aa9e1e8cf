"""The project of the survival tests: tasks that write down the tag that they see, and publish more.

Every task takes `tenant`, which it does not use: only the callable reads it, in the process that
publishes. What a task sees goes to the Redis list `test:tags`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from celery import Task

from tests.support.apps import PREFIX, Recorder
from tests.support.project import app

TAGS = "test:tags"

recorder = Recorder(os.environ.get("TEST_RECORD_URL") or os.environ["TEST_BROKER_URL"])


def task(**options: Any) -> Callable[[Any], Any]:
    """Register a bound task under `test.<name>`."""

    def decorate(function: Any) -> Any:
        return app.task(bind=True, name=PREFIX + function.__name__, **options)(function)

    return decorate


def note(task: Task, label: str) -> None:
    """Write down what the running task sees of its tag."""
    headers = task.request.headers or {}
    name = app.conf.get("strategies_fair_key_header") or "fair_key"
    line = [label, headers.get(name), headers.get("fair_weight")]
    recorder.client().rpush(TAGS, json.dumps(line))


@task(ignore_result=False)
def see(self: Task, *args: Any, label: str, tenant: str | None = None) -> str:
    note(self, label)
    return label


@task(max_retries=1)
def retry(self: Task, label: str, tenant: str | None = None, **options: Any) -> None:
    note(self, f"{label} {self.request.retries}")
    if not self.request.retries:
        raise self.retry(countdown=0, **options)


@task(autoretry_for=(ValueError,), retry_kwargs={"max_retries": 1, "countdown": 0})
def autoretry(self: Task, label: str, tenant: str | None = None) -> None:
    note(self, f"{label} {self.request.retries}")
    if not self.request.retries:
        raise ValueError("as asked")


@task()
def nest(self: Task, label: str, tenant: str | None = None, **options: Any) -> None:
    """Publish another task, in several ways."""
    note(self, label)
    see.delay(label=f"{label} > delay")
    see.s(label=f"{label} > signature").apply_async()
    app.send_task(see.name, kwargs={"label": f"{label} > send_task"})
    see.apply_async(kwargs={"label": f"{label} > explicit"}, headers={"fair_key": "other"})
    see.apply_async(kwargs={"label": f"{label} > none"}, headers={"fair_key": None})
    see.delay(label=f"{label} > callable", tenant="third")
    see.delay(label=f"{label} > unkeyed", tenant="nobody")
    as_function(f"{label} > function")


@task()
def as_function(self: Task, label: str) -> None:
    see.delay(label=label)


@task()
def substitute(self: Task, label: str, tenant: str | None = None) -> None:
    note(self, label)
    raise self.replace(see.si(label=f"{label} > replaced") | see.si(label=f"{label} > next"))


@task()
def break_down(self: Task, *args: Any, label: str, tenant: str | None = None) -> None:
    note(self, label)
    raise ValueError("as asked")


@task(ignore_result=False)
def fail_part(self: Task, label: str, how: str, tenant: str | None = None) -> None:
    """End in a way that is reported by the parent process, as part of a chord or alone."""
    note(self, label)
    if how == "lost":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@task(acks_late=True, reject_on_worker_lost=True)
def killed_once(self: Task, label: str, tenant: str | None = None) -> None:
    """Kill the child process, the first time."""
    count = recorder.count(self)
    note(self, f"{label} {count}")
    if count == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@task(acks_late=True)
def hold(self: Task, label: str, tenant: str | None = None) -> None:
    """Run until the worker is killed, the first time."""
    count = recorder.count(self)
    note(self, f"{label} {count}")
    while count == 1:
        time.sleep(0.1)
