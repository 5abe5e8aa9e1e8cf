"""Fixtures of the fair share tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.conftest import RedisFactory, WorkerFactory
from tests.fair.lab import FairLab
from tests.support.redis_server import RedisServer


@pytest.fixture
def lab(broker_url: str, redis_db: redis.Redis, worker_factory: WorkerFactory) -> Iterator[FairLab]:
    """The shared server with a producer of our own."""
    lab = FairLab(broker_url, redis_db, worker_factory)
    yield lab
    lab.close()


@pytest.fixture
def own_server(redis_factory: RedisFactory) -> RedisServer:
    """A server of this test's own, with an append-only file."""
    return redis_factory(aof=True)
