"""Own the test project: one Celery app with the tasks that the process tests run.

`make_app` builds it for the test's own process; `tests.support.project` builds the same one from
the environment, for workers and producers. What ran is written to the Redis list `test:ran` at
the *record URL*, which is usually not the way to the broker that a test breaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import redis
from celery import Celery, Task
from celery.exceptions import Reject
from redis.backoff import ConstantBackoff
from redis.retry import Retry

RAN = "test:ran"
PREFIX = "test."

#: Stock defaults that only make tests slow or noisy.
BASE_SETTINGS: Mapping[str, Any] = {
    "broker_connection_retry_on_startup": True,
    "enable_utc": True,
    "task_ignore_result": True,
    "worker_hijack_root_logger": True,
}


@dataclass(frozen=True)
class Event:
    """One line of `test:ran`."""

    uid: str
    worker: str
    pid: int
    task: str
    """The task's id."""
    name: str
    """The task's name without its prefix."""
    label: str
    """What the test called this job."""
    event: str
    """`start` or `end`; a task that was killed has no end."""
    at: float
    """Seconds of the machine's monotonic clock: comparable between processes."""
    queue: str
    """The routing key of the delivery."""
    redelivered: bool


def record_client(url: str) -> redis.Redis:
    """Return a client for `test:ran` that outlives a restart of its server."""
    retry = Retry(ConstantBackoff(0.1), 100)
    errors: list[type[Exception]] = [redis.ConnectionError, redis.TimeoutError]
    if url.startswith("redis+socket://"):
        url = "unix://" + url.removeprefix("redis+socket://").replace("?virtual_host=", "?db=")
    # Celery and redis-py spell this differently.
    url = url.replace("ssl_cert_reqs=CERT_REQUIRED", "ssl_cert_reqs=required")
    return redis.Redis.from_url(url, retry=retry, retry_on_error=errors, socket_timeout=5)


def read_events(client: redis.Redis) -> list[Event]:
    """Return what ran, in the order recorded (a resent record counts once)."""
    names = {field.name for field in fields(Event)}
    lines: Any = client.lrange(RAN, 0, -1)
    events: dict[str, Event] = {}
    for line in lines:
        values = json.loads(line)
        events.setdefault(values["uid"], Event(**{k: values[k] for k in names}))
    return list(events.values())


def started(client: redis.Redis) -> list[str]:
    """Return the labels of all starts, in order."""
    return [event.label for event in read_events(client) if event.event == "start"]


def ended(client: redis.Redis) -> list[str]:
    """Return the labels of all jobs that ran to their end, in order."""
    return [event.label for event in read_events(client) if event.event == "end"]


def make_app(
    broker_url: str,
    settings: Mapping[str, Any] | None = None,
    *,
    stock: bool = False,
    record_url: str | None = None,
    name: str = "tests.support.project",
) -> Celery:
    """Return the test project's app.

    Args:
        broker_url: Where the jobs are.
        settings: More Celery settings.
        stock: Leave `celery_strategies` out.
        record_url: Where to write what ran; the broker when not given.
        name: The app's `main`.
    """
    app = Celery(name, set_as_current=False)
    app.conf.update(BASE_SETTINGS)
    app.conf.update(broker_url=broker_url)
    if not stock:
        import celery_strategies  # noqa: F401

        app.conf.update(imports=("celery_strategies",))
    app.conf.update(settings or {})
    recorder = Recorder(record_url or broker_url)
    _add_plain_tasks(app, recorder)
    _add_failing_tasks(app, recorder)
    return app


class Recorder:
    """Writes what the tasks do to `test:ran`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients: dict[int, redis.Redis] = {}

    def client(self) -> redis.Redis:
        """Return this process's client: a forked child must not share its parent's socket."""
        if os.getpid() not in self._clients:
            self._clients[os.getpid()] = record_client(self._url)
        return self._clients[os.getpid()]

    def write(self, task: Task, label: str | None, event: str) -> None:
        """Write one event of a running task; its id stands in for a missing label."""
        request = task.request
        info = request.delivery_info or {}
        line = {
            "uid": uuid.uuid4().hex,
            "worker": request.hostname or socket.gethostname(),
            "pid": os.getpid(),
            "task": request.id,
            "name": (task.name or "").removeprefix(PREFIX),
            "label": request.id if label is None else label,
            "event": event,
            "at": time.monotonic(),
            "queue": info.get("routing_key") or "",
            "redelivered": bool(info.get("redelivered")),
        }
        self.client().rpush(RAN, json.dumps(line))

    @contextlib.contextmanager
    def recorded(self, task: Task, label: str | None) -> Iterator[None]:
        """Write the start and, if the block ends without an exception, the end."""
        self.write(task, label, "start")
        yield
        self.write(task, label, "end")

    def count(self, task: Task) -> int:
        """Return how often this was called for this task id, this time included."""
        key = f"test:count:{task.request.id}"
        count: Any = self.client().incr(key)
        self.client().expire(key, 600)
        return int(count)


def _decorator(app: Celery) -> Callable[..., Callable[[Any], Any]]:
    def task(**options: Any) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            # Not shared, or every app made later in this process would get these tasks too.
            return app.task(bind=True, shared=False, name=PREFIX + function.__name__, **options)(
                function
            )

        return decorate

    return task


def _add_plain_tasks(app: Celery, recorder: Recorder) -> None:
    task = _decorator(app)

    @task()
    def noop(self: Task) -> None:
        """Do nothing, not even record."""

    @task(ignore_result=False)
    def add(self: Task, x: int, y: int) -> int:
        return x + y

    @task(ignore_result=False)
    def echo(self: Task, label: str | None = None) -> dict[str, Any]:
        """Record, and return what the task sees of its delivery."""
        with recorder.recorded(self, label):
            info = dict(self.request.delivery_info or {})
            return {"label": label, "delivery_info": info, "headers": self.request.headers}

    @task()
    def record(self: Task, label: str | None = None) -> None:
        with recorder.recorded(self, label):
            pass

    @task()
    def sleep_for(self: Task, seconds: float, label: str | None = None) -> None:
        with recorder.recorded(self, label):
            time.sleep(seconds)

    @task(ignore_result=False)
    def big(self: Task, payload: str, label: str | None = None) -> int:
        with recorder.recorded(self, label):
            return len(payload)


def _add_failing_tasks(app: Celery, recorder: Recorder) -> None:
    task = _decorator(app)

    @task()
    def fail(self: Task, label: str | None = None) -> None:
        recorder.write(self, label, "start")
        raise ValueError(f"as asked: {label}")

    @task(max_retries=3)
    def retry_once(self: Task, label: str | None = None, countdown: float = 0) -> None:
        with recorder.recorded(self, label):
            if not self.request.retries:
                raise self.retry(countdown=countdown)

    @task(acks_late=True)
    def reject(self: Task, label: str | None = None, requeue: bool = False) -> None:
        """Reject; with `requeue` only the first time, so that it comes to an end."""
        with recorder.recorded(self, label):
            if not requeue or recorder.count(self) == 1:
                raise Reject("as asked", requeue=requeue)

    @task(acks_late=True, reject_on_worker_lost=True)
    def kill_self(self: Task, label: str | None = None, times: int = 1) -> None:
        """Kill the process that runs it, the first `times` times."""
        with recorder.recorded(self, label):
            if recorder.count(self) <= times:
                os.kill(os.getpid(), signal.SIGKILL)
