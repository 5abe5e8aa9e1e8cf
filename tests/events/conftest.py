"""Fixtures of the event tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery

from celery_strategies.events import EventBus
from tests.conftest import WorkerFactory
from tests.events.handlers import EVENTS, add_handlers
from tests.support.apps import Recorder, make_app
from tests.support.waiting import wait_until
from tests.support.workers import Worker
from tests.worker.lab import Lab

PROJECT = "tests.events.project"


def unshared() -> dict[str, Any]:
    """Return settings by which an app does not publish over another's connections, which know what they declared."""
    return {"broker_transport_options": {"nobody_else": uuid4().hex}}


class EventLab(Lab):
    """A lab whose workers have a bus, and a bus to publish to."""

    def __init__(self, url: str, db: redis.Redis, workers: Callable[..., Worker]) -> None:
        super().__init__(url, db, workers, **unshared())
        self._apps: list[Celery] = []
        self.bus = EventBus(self.app)
        add_handlers(self.bus, Recorder(url))

    def close(self) -> None:
        for app in self._apps:
            app.close()
        super().close()

    def empty_bus(self, **settings: Any) -> EventBus:
        """Return a bus without handlers, as in a process of its own."""
        app = make_app(self.url, {**unshared(), **settings})
        self._apps.append(app)
        return EventBus(app)

    def another_bus(self, **settings: Any) -> EventBus:
        """Return a bus with the handlers of the project, as in a process of its own."""
        bus = self.empty_bus(**settings)
        add_handlers(bus, Recorder(self.url))
        return bus

    def worker(
        self,
        pool: str = "prefork",
        *,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Worker:
        options.setdefault("app", PROJECT)
        return super().worker(pool, settings=settings, **options)

    def calls(self, handler: str = "") -> list[dict[str, Any]]:
        """Return the calls of one handler, or of all, in the order in which they began."""
        lines: Any = self.db.lrange(EVENTS, 0, -1)
        found = [json.loads(line) for line in lines]
        return [call for call in found if handler in ("", call["handler"])]

    def wait_calls(self, count: int, handler: str = "", timeout: float = 30) -> list[Any]:
        """Wait until there were *count* calls."""
        wait_until(
            lambda: len(self.calls(handler)) >= count,
            timeout,
            f"{count} calls of {handler or 'all'}",
        )
        return self.calls(handler)

    def wait_empty(self) -> None:
        """Wait until every message of every handler is handled and acknowledged."""
        self.wait_settled()
        wait_until(
            lambda: not any(self.db.llen(queue) for queue in self.bus.handlers),
            description="no event waits",
        )
        self.wait_settled()


@pytest.fixture
def lab(
    broker_url: str, redis_db: redis.Redis, worker_factory: WorkerFactory
) -> Iterator[EventLab]:
    """The shared server with a bus of our own."""
    lab = EventLab(broker_url, redis_db, worker_factory)
    yield lab
    lab.close()
