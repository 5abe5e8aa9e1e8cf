"""`set_aside.lua`: to the stream of what could not be run, once."""

from __future__ import annotations

import pytest
import redis

from .tools import (
    TTL,
    Caller,
    Worker,
    assert_ttls,
    held,
    keyspace,
    message,
    place,
    push,
    record,
    tag,
)

A, B = message("a"), message("b")


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker that holds a, of list 7."""
    worker = Worker(caller, "w", "q")
    worker.join()
    push(redis_db, worker.keys.inbox("q", 7), A, B)
    worker.take(1)
    return worker


def test_it_goes_to_the_stream(redis_db: redis.Redis, worker: Worker) -> None:
    packed = worker.store.set_aside(tag(1), "q", "why, exactly: 'ü'")
    entry = worker.caller(packed)
    after = {
        "q\x06\x167": [B],
        "strategies:sequence": b"1",
        "strategies:{q}:set_aside": [
            {b"reason": "why, exactly: 'ü'".encode(), b"list": b"7", b"worker": b"w", b"message": A}
        ],
        **held(worker, {}),
    }
    assert keyspace(redis_db) == after
    assert [number for number, _ in redis_db.xrange("strategies:{q}:set_aside")] == [entry]
    assert_ttls(redis_db, {"strategies:holder:w": TTL})
    assert worker.caller(packed) == b""
    assert keyspace(redis_db) == after


def test_one_that_is_held_by_another_is_left_alone(redis_db: redis.Redis, worker: Worker) -> None:
    other = Worker(worker.caller, "x", "q")
    before = keyspace(redis_db)
    assert worker.caller(other.store.set_aside(tag(1), "q", "why")) == b""
    assert keyspace(redis_db) == before


def test_a_record_that_is_not_ours_stays_for_kombus_own_recovery(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.hset("unacked", tag(1), record(A, "another"))
    assert worker.caller(worker.store.set_aside(tag(1), "q", "why")) == b""
    assert keyspace(redis_db) == {
        "q\x06\x167": [B],
        "strategies:sequence": b"1",
        **held(worker, {tag(1): (A, place(1, step=7))}, queue="another"),
        "strategies:holder:w": {b"": b"1"},
    }


@pytest.mark.parametrize("key", ["unacked", "unacked_index", "strategies:{q}:set_aside"])
def test_a_key_of_a_wrong_type_stops_it_before_it_writes(
    redis_db: redis.Redis, worker: Worker, key: str
) -> None:
    redis_db.delete(key)
    redis_db.set(key, "text")
    before = keyspace(redis_db)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        worker.caller(worker.store.set_aside(tag(1), "q", "why"))
    assert keyspace(redis_db) == before
