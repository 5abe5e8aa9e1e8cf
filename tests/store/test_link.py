"""`link.py`: every command has one handler, in order, whatever comes between; nothing is ever sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError

from celery_strategies.store.link import SUPPORTS_PUSH, Link
from celery_strategies.store.store import command, load_scripts, pack
from tests.support.proxy import Proxy
from tests.support.proxy import command as proxy_command
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

from .tools import Caller


def packed(*parts: str) -> bytes:
    """Return one command."""
    return command(pack(*parts))


@pytest.fixture
def link(caller: Caller) -> Link:
    """A link to the shared server, with tracking on."""
    caller.link.call(packed("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP"))
    return caller.link


def drain(link: Link, got: list[Any], count: int) -> list[Any]:
    """Pump until *count* replies are there."""

    def pumped() -> bool:
        link.pump()
        return len(got) >= count

    wait_until(pumped, description=f"{count} replies")
    return got


def track(link: Link, *keys: str) -> None:
    """Have the server say when one of *keys* changes."""
    link.call_all([packed("CLIENT", "CACHING", "YES"), packed("EXISTS", *keys)])


def test_pushes_can_be_told_from_replies_here() -> None:
    assert SUPPORTS_PUSH


def test_replies_reach_their_handlers_in_order(link: Link) -> None:
    got: list[Any] = []
    for number in range(5):
        link.send(
            packed("ECHO", str(number)), lambda reply, number=number: got.append((number, reply))
        )
    link.send(
        packed("ECHO", "a") + packed("ECHO", "b"),
        lambda reply: got.append(("a", reply)),
        lambda reply: got.append(("b", reply)),
    )
    assert link.pending == 7
    assert link.waited(monotonic()) >= 0
    drain(link, got, 7)
    assert got == [*((n, str(n).encode()) for n in range(5)), ("a", b"a"), ("b", b"b")]
    assert link.pending == 0
    assert link.waited(monotonic()) == 0


def test_an_error_is_its_commands_value(link: Link) -> None:
    got: list[Any] = []
    link.send(
        packed("EVALSHA", "0" * 40, "0") + packed("LPUSH") + packed("ECHO", "x"), *[got.append] * 3
    )
    drain(link, got, 3)
    assert isinstance(got[0], NoScriptError)
    assert isinstance(got[1], redis.ResponseError)
    assert got[2] == b"x"
    assert link.alive


def test_call_raises_its_error_and_call_all_returns_it(link: Link) -> None:
    with pytest.raises(redis.ResponseError):
        link.call(packed("LPUSH"))
    replies = link.call_all([packed("ECHO", "x"), packed("LPUSH"), packed("ECHO", "y")])
    assert (replies[0], replies[2]) == (b"x", b"y")
    assert isinstance(replies[1], redis.ResponseError)
    assert link.call_all([]) == []


def test_call_handles_what_was_sent_before(link: Link) -> None:
    got: list[Any] = []
    link.send(packed("ECHO", "first"), got.append)
    assert link.call(packed("ECHO", "second")) == b"second"
    assert got == [b"first"]


def test_a_handler_may_send_and_call(link: Link) -> None:
    got: list[Any] = []

    def handler(reply: Any) -> None:
        got.append(reply)
        got.append(link.call(packed("ECHO", "inner")))
        link.send(packed("ECHO", "later"), got.append)

    link.send(packed("ECHO", "outer"), handler)
    assert drain(link, got, 3) == [b"outer", b"inner", b"later"]


def test_a_push_between_replies_is_no_reply(
    link: Link, caller: Caller, redis_db: redis.Redis
) -> None:
    track(link, "key", "other")
    got: list[Any] = []
    # The server answers the first before it sees the change, and the second after it.
    assert link.call(packed("ECHO", "1")) == b"1"
    redis_db.set("key", "x")
    assert caller.changes == 0
    link.send(packed("ECHO", "2") + packed("ECHO", "3"), got.append, got.append)
    drain(link, got, 2)
    assert got == [b"2", b"3"]
    assert caller.changes == 1
    redis_db.set("key", "y")
    assert link.call(packed("ECHO", "4")) == b"4"
    assert caller.changes == 1
    redis_db.set("other", "y")
    assert link.call(packed("ECHO", "5")) == b"5"
    assert caller.changes == 2


def test_a_push_alone_is_handled_when_the_socket_is_readable(
    link: Link, caller: Caller, redis_db: redis.Redis
) -> None:
    track(link, "key")
    redis_db.lpush("key", "x")

    def pumped() -> bool:
        link.pump()
        return caller.changes == 1

    wait_until(pumped, description="the push arrives")
    assert link.pending == 0


def test_pumping_with_nothing_to_come_does_not_wait(link: Link) -> None:
    # Within one turn of the loop a call may have read what the poll had seen. Waiting here would end
    # in the connection's read timeout, and that in its close.
    link.pump()
    assert link.alive


def test_nil_replies_count(link: Link) -> None:
    got: list[Any] = []
    link.send(packed("GET", "nothing") + packed("HGET", "nothing", "x"), got.append, got.append)
    assert drain(link, got, 2) == [None, None]


def test_a_reply_of_megabytes_in_pieces(link: Link, redis_db: redis.Redis) -> None:
    value = bytes(range(256)) * 40_000
    redis_db.set("big", value)
    got: list[Any] = []
    link.send(packed("GET", "big") + packed("ECHO", "after"), got.append, got.append)
    drain(link, got, 2)
    assert got == [value, b"after"]


# -- a connection that ends -------------------------------------------------------------------------------------


def test_a_closed_link_refuses_and_never_connects_again(link: Link, redis_db: redis.Redis) -> None:
    got: list[Any] = []
    link.send(packed("ECHO", "x"), got.append)
    link.close()
    connections = redis_db.info("stats")["total_connections_received"]
    assert (link.alive, link.pending, link.waited(0)) == (False, 0, 0)
    for use in (
        lambda: link.send(packed("ECHO", "x"), got.append),
        lambda: link.call(packed("ECHO", "x")),
        lambda: link.call_all([packed("ECHO", "x")]),
    ):
        with pytest.raises(RedisConnectionError):
            use()
    link.pump()
    assert got == []
    assert redis_db.info("stats")["total_connections_received"] == connections


def _kill(client: redis.Redis) -> None:
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def test_a_killed_connection_raises_and_stays_closed(link: Link, redis_db: redis.Redis) -> None:
    redis_db.client_setname("survivor")
    _kill(redis_db)
    connections = redis_db.info("stats")["total_connections_received"]
    with pytest.raises(RedisConnectionError):
        link.call(packed("ECHO", "x"))
    assert not link.alive
    with pytest.raises(RedisConnectionError):
        link.call(packed("ECHO", "x"))
    assert redis_db.info("stats")["total_connections_received"] == connections


@pytest.fixture
def proxied(proxy: Proxy, redis_server: RedisServer) -> Iterator[Link]:
    """A link through a proxy."""
    pool = redis.ConnectionPool(host="127.0.0.1", port=proxy.port, protocol=3, socket_timeout=10)
    link = Link(pool.get_connection(), lambda: None)
    yield link
    link.close()
    pool.disconnect()


def test_a_call_whose_reply_is_lost_is_made_once(
    proxied: Link, proxy: Proxy, redis_db: redis.Redis
) -> None:
    order = proxy.discard_reply(proxy_command("INCR"))
    with pytest.raises(RedisConnectionError):
        proxied.call(packed("INCR", "n"))
    assert order.done
    assert redis_db.get("n") == b"1"
    assert not proxied.alive


def test_a_call_that_never_arrives_is_not_made_again(
    proxied: Link, proxy: Proxy, redis_db: redis.Redis
) -> None:
    proxy.discard_request(proxy_command("INCR"))
    got: list[Any] = []
    proxied.send(packed("ECHO", "x") + packed("INCR", "n"), got.append, got.append)

    def read_both() -> None:
        proxied.read_one()
        proxied.read_one()

    with pytest.raises(RedisConnectionError):
        read_both()
    assert proxied.pending >= 1
    assert not redis_db.exists("n")
    with pytest.raises(RedisConnectionError):
        proxied.send(packed("INCR", "n"), got.append)
    assert not redis_db.exists("n")


def test_an_error_reply_that_redis_py_calls_a_connection_error_ends_it(
    link: Link, redis_server: RedisServer, redis_db: redis.Redis
) -> None:
    # -NOAUTH and -LOADING are of this kind; the first can be had at will.
    redis_db.config_set("requirepass", "secret")
    try:
        link.call(packed("RESET"))
        with pytest.raises(redis.AuthenticationError):
            link.call(packed("ECHO", "x"))
        assert not link.alive
    finally:
        redis_db.execute_command("AUTH", "secret")
        redis_db.config_set("requirepass", "")


def test_a_refusal_by_a_replica_leaves_the_connection_open(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        caller = Caller(client)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(ReadOnlyError):
            caller.link.call(packed("SET", "key", "x"))
        assert caller.link.call(packed("ECHO", "x")) == b"x"
        caller.close()


def test_loading_the_scripts_over_a_link(link: Link, redis_db: redis.Redis) -> None:
    shas = [reply.decode() for reply in link.call_all(load_scripts())]
    assert redis_db.script_exists(*shas) == [True] * len(shas)
