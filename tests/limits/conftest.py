"""Fixtures of the tests of limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.conftest import WorkerFactory

from .lab import Lab


@pytest.fixture
def lab(broker_url: str, redis_db: redis.Redis, worker_factory: WorkerFactory) -> Iterator[Lab]:
    """The shared server with a producer of our own."""
    lab = Lab(broker_url, redis_db, worker_factory)
    yield lab
    lab.close()
