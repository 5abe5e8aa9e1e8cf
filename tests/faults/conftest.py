"""Fixtures of the fault tests."""

from __future__ import annotations

import os
from typing import Any, Protocol

import pytest
import redis

from tests.conftest import RedisFactory, WorkerFactory
from tests.faults.helpers import pool_options
from tests.support.apps import PREFIX, make_app
from tests.support.redis_server import RedisServer
from tests.support.workers import Worker


@pytest.fixture
def cycles() -> int:
    """How many cycles the restart tests run: `FAULT_CYCLES`, 15 unless set."""
    return int(os.environ.get("FAULT_CYCLES", "15"))


@pytest.fixture
def broker(redis_factory: RedisFactory) -> RedisServer:
    """A server of this test's own that it may break; what ran is recorded on the shared one."""
    return redis_factory(aof=True)


class Publisher(Protocol):
    """Publish one job: the task's short name, its arguments, options of `apply_async`."""

    def __call__(self, task: str, *args: Any, **options: Any) -> str: ...


@pytest.fixture
def publish(broker: RedisServer) -> Publisher:
    """Publish one job to `broker` from a stock app, over a connection of its own, and return its id."""

    def publish_one(task: str, *args: Any, **options: Any) -> str:
        with make_app(broker.url(), stock=True) as app:
            return str(app.send_task(PREFIX + task, args, **options).id)

    return publish_one


@pytest.fixture
def records(redis_db: redis.Redis) -> redis.Redis:
    """A client of the shared server, where the tasks record what ran."""
    return redis_db


class Starter(Protocol):
    """Start a worker on `broker` (or at `url`), recording on the shared server."""

    def __call__(
        self,
        pool: str = "prefork",
        settings: dict[str, Any] | None = None,
        *,
        url: str = "",
        **options: Any,
    ) -> Worker: ...


@pytest.fixture
def start(
    worker_factory: WorkerFactory, redis_server: RedisServer, request: pytest.FixtureRequest
) -> Starter:
    """Start workers of the fault project."""

    def start_one(
        pool: str = "prefork",
        settings: dict[str, Any] | None = None,
        *,
        url: str = "",
        **options: Any,
    ) -> Worker:
        url = url or request.getfixturevalue("broker").url()
        chosen = {"app": "tests.faults.project", **pool_options(pool, settings), **options}
        return worker_factory(url, record_url=redis_server.url(), **chosen)

    return start_one
