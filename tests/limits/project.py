"""The project of the tests of limits: the workers' test project, and tasks that have limits."""

from __future__ import annotations

from typing import Any

from celery import Task

from celery_strategies import limits_concurrency
from tests.limits.lab import SHORT
from tests.support.project import app
from tests.worker.project import outcome, recorder, task, wait_for


def by_key(_label: str, key: str = "k", *_: Any, **__: Any) -> str:
    """Return the second argument."""
    return key


@task()
@limits_concurrency(to=1, key=by_key)
def one(self: Task, label: str, key: str = "k", gate: str = "gate") -> None:
    """Run until the test opens the gate once, one at a time for each key."""
    with recorder.recorded(self, label):
        wait_for(gate)


@task(acks_late=True)
@limits_concurrency(to=1, key=by_key)
def one_late(self: Task, label: str, key: str = "k", gate: str = "gate") -> None:
    with recorder.recorded(self, label):
        wait_for(gate)


@task()
@limits_concurrency(to=3, key=by_key)
def three(self: Task, label: str, key: str = "k", gate: str = "gate") -> None:
    with recorder.recorded(self, label):
        wait_for(gate)


@task()
@limits_concurrency(to=1, key=by_key, duration=SHORT)
def short(self: Task, label: str, key: str = "k", gate: str = "gate") -> None:
    """Like `one`; a permit ends soon after its holder."""
    with recorder.recorded(self, label):
        wait_for(gate)


@task(acks_late=True)
@limits_concurrency(to=1, key=by_key, duration=SHORT)
def short_late(self: Task, label: str, key: str = "k", gate: str = "gate") -> None:
    with recorder.recorded(self, label):
        wait_for(gate)


@task()
@limits_concurrency(to=1, group="shared")
def left(self: Task, label: str) -> None:
    """Share a limit with `right`."""
    with recorder.recorded(self, label):
        wait_for("gate")


@task()
@limits_concurrency(to=1, group="shared")
def right(self: Task, label: str) -> None:
    with recorder.recorded(self, label):
        wait_for("gate")


@task()
@limits_concurrency(to=1, key=lambda label: None if label == "free" else 1 / len(label))
def broken(self: Task, label: str) -> None:
    """Have no key, or one that cannot be told."""
    with recorder.recorded(self, label):
        pass


@task()
@limits_concurrency(to=1)
def quick(self: Task, label: str) -> None:
    """Run alone, and not for long."""
    with recorder.recorded(self, label):
        pass


@task(rate_limit="1/h")
@limits_concurrency(to=1)
def seldom(self: Task, label: str) -> None:
    with recorder.recorded(self, label):
        pass


def _limited(name: str, **options: Any) -> None:
    # The same endings as the workers' tests have.
    function: Any = outcome.run
    app.task(bind=True, name=f"test.{name}", max_retries=1, **options)(
        limits_concurrency(to=1, group=name)(function.__func__)
    )


_limited("ends_late", acks_late=True)
_limited("ends_early")
