"""Bindings in Redis: what our processes write and read there, beside stock ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue

from celery_strategies.transport import topics
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

OURS = "redis"
STOCK = "kombu.transport.redis:Transport"
NEWS = Exchange("news", type="topic")
TABLES = ("_kombu.binding.news", "_kombu.binding_permanent.news")

Connect = Callable[..., Any]


@pytest.fixture
def connect(broker_url: str, redis_db: redis.Redis) -> Iterator[Connect]:
    """Return a channel of a connection of its own, as one process has it."""
    made = []

    def make(transport: str = OURS, **options: Any) -> Any:
        connection = Connection(broker_url, transport=transport, transport_options=options)
        made.append(connection)
        return connection.default_channel

    yield make
    for connection in made:
        connection.release()


def bind(channel: Any, queue: str, *patterns: str, exchange: Exchange = NEWS) -> None:
    for pattern in patterns:
        Queue(queue, exchange, routing_key=pattern, channel=channel).declare()


def send(channel: Any, key: str, exchange: str = "news") -> None:
    message = channel.prepare_message(key, content_type="text/plain", content_encoding="utf-8")
    channel.basic_publish(message, exchange, key)


def got(db: redis.Redis, *queues: str) -> dict[str, int]:
    """Return how many messages wait in each queue, and forget them."""
    found: dict[str, int] = {queue: int(db.llen(queue)) for queue in queues}  # type: ignore[arg-type]
    db.delete(*queues)
    return found


def rows(db: redis.Redis, exchange: str = "news") -> set[tuple[str, str]]:
    """Return routing key and expression of each binding."""
    members: Any = db.smembers(f"_kombu.binding.{exchange}")
    return {tuple(member.decode().split("\x06\x16")[:2]) for member in members}


def by_older_kombu(db: redis.Redis, queue: str, pattern: str) -> None:
    """Write a binding as a stock process with Kombu 5.6 does."""
    member = "\x06\x16".join((pattern, topics.kombus(pattern)[0], queue))
    for table in TABLES:
        db.sadd(table, member)


def test_the_pattern_decides_and_each_queue_gets_one_copy(
    connect: Connect, redis_db: redis.Redis
) -> None:
    channel = connect()
    bind(channel, "one", "a.*")
    bind(channel, "any", "a.#", "#.c", "a.b.c")
    for key, expected in [
        ("a", {"one": 0, "any": 1}),
        ("a.b", {"one": 1, "any": 1}),
        ("a.b.c", {"one": 0, "any": 1}),
        ("c", {"one": 0, "any": 1}),
        ("b", {"one": 0, "any": 0}),
    ]:
        send(channel, key)
        assert got(redis_db, "one", "any") == expected, key


def test_binding_here_removes_the_looser_expression(
    connect: Connect, redis_db: redis.Redis
) -> None:
    bind(connect(STOCK), "one", "a.*")
    by_older_kombu(redis_db, "one", "a.*")
    assert {written for _, written in rows(redis_db)} <= set(topics.kombus("a.*"))
    bind(connect(), "one", "a.*")
    assert rows(redis_db) == {("a.*", topics.expression("a.*"))}
    assert {redis_db.scard(table) for table in TABLES if redis_db.exists(table)} == {1}
    send(connect(STOCK), "a.b.c")
    assert got(redis_db, "one") == {"one": 0}


def test_a_stock_declaration_brings_it_back_for_stock_producers_only(
    connect: Connect, redis_db: redis.Redis
) -> None:
    """The documented limit: a stock producer matches by all that it finds."""
    ours, stock = connect(), connect(STOCK)
    bind(ours, "one", "a.*")
    send(stock, "a.b.c")
    assert got(redis_db, "one") == {"one": 0}
    bind(stock, "one", "a.*")
    by_older_kombu(redis_db, "one", "a.*")
    send(ours, "a.b.c")
    assert got(redis_db, "one") == {"one": 0}
    send(stock, "a.b.c")
    assert got(redis_db, "one") == {"one": 1}


def test_one_producer_of_ours_need_not_have_declared_the_exchange(
    connect: Connect, redis_db: redis.Redis
) -> None:
    """As in AMQP; Kombu takes an exchange that it does not know for a direct one."""
    bind(connect(), "one", "a.*")
    send(connect(), "a.b")
    assert got(redis_db, "one") == {"one": 1}
    send(connect(), "a.b.c")
    assert got(redis_db, "one") == {"one": 0}


def test_direct_exchanges_are_as_they_were(connect: Connect, redis_db: redis.Redis) -> None:
    media = Exchange("media", type="direct")
    channel = connect()
    bind(channel, "video", "a.*", exchange=media)
    bind(channel, "other", "a.b", exchange=media)
    for key, expected in [("a.*", {"video": 1, "other": 0}), ("a.b", {"video": 0, "other": 1})]:
        send(channel, key, "media")
        assert got(redis_db, "video", "other") == expected
    assert rows(redis_db, "media") == {("a.*", ""), ("a.b", "")}


@pytest.mark.parametrize("sep", [":", "|"])
def test_a_separator_of_ones_own(connect: Connect, redis_db: redis.Redis, sep: str) -> None:
    name = f"eu{sep}mail"
    channel = connect(sep=sep)
    bind(channel, name, "a.#", "b.*")
    send(channel, "a.b.c")
    send(channel, "b.c")
    send(channel, "b")
    assert got(redis_db, name) == {name: 2}
    channel.queue_unbind(name, "news", "a.#")
    send(channel, "a.b.c")
    assert got(redis_db, name) == {name: 0}


def test_a_prefix(connect: Connect, redis_db: redis.Redis) -> None:
    bind(connect(STOCK, global_keyprefix="p:"), "one", "a.*")
    channel = connect(global_keyprefix="p:")
    bind(channel, "one", "a.*")
    send(channel, "a.b")
    assert redis_db.llen("p:one") == 1
    assert redis_db.smembers("p:_kombu.binding.news") == {
        f"a.*\x06\x16{topics.expression('a.*')}\x06\x16one".encode()
    }


# -- case 59: a pattern that was changed ---------------------------------------------------------


def test_case_59_unbinding_removes_every_expression_of_a_binding(
    connect: Connect, redis_db: redis.Redis
) -> None:
    ours = connect()
    bind(ours, "one", "old.#", "new.#")
    bind(connect(STOCK), "one", "old.#")
    ours.queue_unbind("one", "news", "old.#")
    assert {key for key, _ in rows(redis_db)} == {"new.#"}
    for channel in (ours, connect()):
        send(channel, "old.x")
        send(channel, "new.x")
        assert got(redis_db, "one") == {"one": 1}


# -- case 58: somebody deleted the bindings ------------------------------------------------------


def test_case_58_a_producer_writes_what_it_has_declared_again(
    connect: Connect, redis_db: redis.Redis
) -> None:
    channel = connect()
    bind(channel, "one", "a.*", "b")
    bind(channel, "two", "#")
    redis_db.delete(*TABLES)
    send(channel, "a.b")
    assert got(redis_db, "one", "two") == {"one": 1, "two": 1}
    assert {key for key, _ in rows(redis_db)} == {"a.*", "b", "#"}
    # Not what was unbound here.
    channel.queue_unbind("one", "news", "b")
    redis_db.delete(*TABLES)
    send(channel, "b")
    assert got(redis_db, "one", "two") == {"one": 0, "two": 1}


def test_case_58_declaring_once_more_writes_once_more(
    connect: Connect, redis_db: redis.Redis
) -> None:
    channel = connect()
    bind(channel, "one", "a.*")
    bind(channel, "two", "b")
    redis_db.srem(TABLES[0], *redis_db.smembers(TABLES[0]))  # type: ignore[misc]
    bind(channel, "two", "c")
    assert {key for key, _ in rows(redis_db)} == {"c"}
    bind(channel, "one", "a.*")
    assert {key for key, _ in rows(redis_db)} == {"c", "a.*"}


@pytest.mark.parametrize("kind", ["topic", "direct"])
def test_case_58_a_consumer_keeps_the_bindings_of_its_queues(
    connect: Connect, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("celery_strategies.transport.redis.BINDINGS_EVERY", 0.05)
    exchange = Exchange("news", type=kind)
    channel = connect()
    bind(channel, "one", "a.b", exchange=exchange)
    bind(channel, "plain", "plain", exchange=Exchange("plain"))
    with connect().connection.client.Consumer([Queue("one", exchange, routing_key="a.b")]) as them:
        client = them.channel.connection.client
        redis_db.delete(*TABLES)

        def again() -> bool:
            with contextlib.suppress(TimeoutError):
                client.drain_events(timeout=0.1)
            return bool(redis_db.exists(TABLES[0]))

        wait_until(again, description="the consumer bound its queue again")
        # From a process that knows nothing.
        send(connect(), "a.b")
        wait_until(lambda: not redis_db.llen("one") or again(), description="it was taken")


def test_an_exchange_without_bindings_takes_what_it_gets(
    connect: Connect, redis_db: redis.Redis
) -> None:
    send(connect(), "a.b")
    assert redis_db.keys("*") == []


def test_what_is_no_binding_binds_nothing(connect: Connect, redis_db: redis.Redis) -> None:
    channel = connect()
    bind(channel, "one", "a.*")
    redis_db.sadd(TABLES[0], "a.b")
    send(channel, "a.b")
    assert got(redis_db, "one") == {"one": 1}


def test_a_producer_that_may_not_remove_bindings_declares_all_the_same(
    connect: Connect, redis_db: redis.Redis, redis_server: RedisServer
) -> None:
    by_older_kombu(redis_db, "one", "a.*")
    redis_db.acl_setuser(
        "shy", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-srem"]
    )
    try:
        host = f"127.0.0.1:{redis_server.port}"
        with Connection(f"redis://shy:secret@{host}/0") as connection:
            bind(connection.default_channel, "one", "a.*")
            assert len(rows(redis_db)) == 2
            send(connection.default_channel, "a.b.c")
            assert got(redis_db, "one") == {"one": 0}
    finally:
        redis_db.acl_deluser("shy")
