"""Fixtures of the tests of publishing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.publish.lab import Producer


@pytest.fixture(params=[2, 1], ids=["protocol 2", "protocol 1"])
def protocol(request: pytest.FixtureRequest) -> int:
    """The task protocol."""
    return int(request.param)


@pytest.fixture
def producer(broker_url: str, redis_db: redis.Redis, protocol: int) -> Iterator[Producer]:
    """The shared server, emptied, and apps that publish to it."""
    producer = Producer(broker_url, redis_db, protocol)
    yield producer
    producer.close()
