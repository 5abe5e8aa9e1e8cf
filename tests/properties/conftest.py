"""Own the fixtures of the state machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.store.tools import Caller


@pytest.fixture
def caller(redis_db: redis.Redis) -> Iterator[Caller]:
    """Calls over a connection like the reader's, on the emptied shared server."""
    caller = Caller(redis_db)
    yield caller
    caller.close()
