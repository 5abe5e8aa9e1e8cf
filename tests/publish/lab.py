"""What the tests of publishing share: apps that publish, and eyes for what they queued."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import redis
from celery import Celery
from celery._state import _task_stack
from celery.app.task import Context

from tests.support.apps import PREFIX, make_app

QUEUE = "celery"


class Queued(NamedTuple):
    """One message as it lies in a list."""

    headers: dict[str, Any]
    body: Any
    priority: int

    @property
    def tag(self) -> tuple[Any, Any]:
        """Key and weight, None where there is no header."""
        return self.headers.get("fair_key"), self.headers.get("fair_weight")

    @property
    def embed(self) -> dict[str, Any]:
        """The part with callbacks and errbacks."""
        return self.body if isinstance(self.body, dict) else self.body[2]


class Producer:
    """Apps on one broker, and what they have queued there."""

    def __init__(self, url: str, db: redis.Redis, protocol: int) -> None:
        self.url = url
        self.db = db
        self.protocol = protocol
        self.apps: list[Celery] = []

    def app(self, *, stock: bool = False, **settings: Any) -> Celery:
        """Return a new app with these settings."""
        settings = {"task_protocol": self.protocol, **settings}
        app = make_app(self.url, settings, stock=stock)
        self.apps.append(app)
        return app

    def close(self) -> None:
        for app in self.apps:
            app.close()

    def queued(self, queue: str = QUEUE) -> list[Queued]:
        """Return what waits in *queue*, in the order in which it was published."""
        lines: Any = self.db.lrange(queue, 0, -1)
        found = []
        for line in reversed(lines):
            message = json.loads(line)
            body = json.loads(base64.b64decode(message["body"]))
            found.append(Queued(message["headers"], body, message["properties"]["priority"]))
        return found

    def tags(self, queue: str = QUEUE) -> list[tuple[Any, Any]]:
        """Return the keys and weights of what waits in *queue*."""
        return [message.tag for message in self.queued(queue)]

    def keys(self, queue: str = QUEUE) -> list[Any]:
        """Return the keys of what waits in *queue*."""
        return [key for key, _ in self.tags(queue)]


def send(app: Celery, task: str = "record", *args: Any, **options: Any) -> str:
    """Publish one task and return its id."""
    return str(app.send_task(PREFIX + task, args, **options).id)


@contextlib.contextmanager
def running(
    app: Celery, headers: Mapping[str, Any] | None = None, protocol: int = 2, **request: Any
) -> Iterator[Any]:
    """Run the block as a worker would run a task whose message has these headers."""
    task = app.tasks[PREFIX + "record"]
    headers = dict(headers or {})
    fields = headers if protocol == 2 else {"headers": headers}
    values = {"id": "running", "retries": 0, "delivery_info": {}, "called_directly": False}
    _task_stack.push(task)
    task.request_stack.push(Context({**values, **fields, **request}))
    try:
        yield task
    finally:
        task.request_stack.pop()
        _task_stack.pop()
