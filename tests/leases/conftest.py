"""Fixtures of the tests of leases, stand-by and recovery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.conftest import RedisFactory, WorkerFactory
from tests.leases.lab import LeaseLab
from tests.support.redis_server import RedisServer


@pytest.fixture
def lab(
    broker_url: str, redis_db: redis.Redis, worker_factory: WorkerFactory
) -> Iterator[LeaseLab]:
    """The shared server with a producer of our own."""
    lab = LeaseLab(broker_url, redis_db, worker_factory)
    yield lab
    lab.close()


@pytest.fixture
def own_server(redis_factory: RedisFactory) -> RedisServer:
    """A server of this test's own, with an append-only file."""
    return redis_factory(aof=True)


@pytest.fixture
def own_lab(
    own_server: RedisServer, redis_server: RedisServer, worker_factory: WorkerFactory
) -> Iterator[LeaseLab]:
    """A server that the test may break; what ran is recorded on the shared one."""
    with own_server.client() as db, redis_server.client() as records:
        lab = LeaseLab(own_server.url(), db, worker_factory, records=records)
        lab.record_url = redis_server.url()
        yield lab
        lab.close()
