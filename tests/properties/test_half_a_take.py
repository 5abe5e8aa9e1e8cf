"""A take that fails halfway, as for a user without a permission, hides nothing behind a living worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from celery_strategies.core.strategies import Strategy
from celery_strategies.store.keys import Keys
from celery_strategies.transport.reader import Reader
from tests.store.tools import everywhere, job_of, keyspace, message, push
from tests.support.waiting import wait_until


@dataclass(eq=False)
class Message:
    """What is delivered."""

    payload: dict[str, Any]
    channel: Any
    delivery_tag: str = ""


class Channel:
    """What the reader needs of a Kombu channel."""

    priority_steps = (0,)
    visibility_timeout = 3600
    Message = Message

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def reader_pool(self) -> redis.ConnectionPool:
        pool = self.client.connection_pool
        return redis.ConnectionPool(
            **{**pool.connection_kwargs, "protocol": 3}, connection_class=pool.connection_class
        )

    def strategy_keys(self) -> Keys:
        return Keys()

    def attach_reader(self, reader: Reader) -> None:
        """Nothing to do."""


@pytest.fixture
def limited(redis_factory: Any) -> Iterator[redis.Redis]:
    """A client of a server whose default user can be denied commands."""
    with redis_factory(acl=["user default on nopass ~* &* +@all"]).client() as client:
        yield client


def test_what_was_moved_goes_back(limited: redis.Redis) -> None:
    messages: list[Message] = []
    reader = Reader("w", strategy=Strategy.PRIORITY, capacity=lambda: 2)
    channel = Channel(limited)
    reader.attach(channel)
    reader.bind(channel, "q", messages.append, no_ack=False, levels=None)
    jobs = [f"job-{n}" for n in range(4)]
    push(limited, "q", *(message(job) for job in jobs))
    limited.execute_command("ACL", "SETUSER", "default", "-ltrim")

    def turn() -> None:
        reader.on_tick()
        session = reader.session
        assert session is not None
        session.link.pump()

    def gone_back() -> bool:
        turn()
        return bool(limited.exists("strategies:{q}:returned"))

    wait_until(gone_back, description="what the failed take moved is back")
    assert not messages
    assert not reader.held
    assert {job_of(raw) for raw in everywhere(limited)} == set(jobs)

    limited.execute_command("ACL", "SETUSER", "default", "+ltrim")

    def all_delivered() -> bool:
        turn()
        return {message.payload["headers"]["id"] for message in messages} == set(jobs)

    wait_until(all_delivered, description="every job is delivered")

    def nothing_hidden() -> bool:
        turn()
        tags = keyspace(limited)[f"strategies:holder:{reader.worker}"]
        return {tag.decode() for tag in tags} - {""} == reader.held.keys()

    wait_until(nothing_hidden, description="Redis and the reader agree on what is held")
    reader.detach()
    reader.waker.close()
