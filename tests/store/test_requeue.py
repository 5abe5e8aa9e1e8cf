"""`requeue.lua`: to the tail of the level, once, marked as redelivered. Its bytes: test_messages.py."""

from __future__ import annotations

import json

import pytest
import redis

from .tools import (
    TTL,
    Caller,
    Worker,
    assert_ttls,
    everywhere,
    held,
    jobs,
    keyspace,
    message,
    place,
    push,
    record,
    tag,
)

A, B, C = message("a"), message("b"), message("c")
MARKED = A.replace(b'"delivery_info": {', b'"delivery_info": {"redelivered": true, ')


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker that holds a; b waits in the same list."""
    worker = Worker(caller, "w", "q")
    worker.join()
    push(redis_db, worker.keys.inbox("q", 4), A, B)
    worker.take(1)
    return worker


def test_it_goes_to_the_tail(redis_db: redis.Redis, worker: Worker) -> None:
    packed = worker.store.requeue(tag(1), "q", 4)
    after = {"q\x06\x164": [MARKED, B], "strategies:sequence": b"1", **held(worker, {})}
    assert worker.caller(packed) == 1
    assert keyspace(redis_db) == after
    assert_ttls(redis_db, {"strategies:holder:w": TTL})
    assert worker.caller(packed) == 0
    assert keyspace(redis_db) == after
    push(redis_db, worker.keys.inbox("q", 4), C)
    grant = worker.take(3)
    assert jobs(grant) == ["b", "a", "c"]
    # The payload says so; the delivery counter starts anew.
    assert [delivery.deliveries for delivery in grant.deliveries] == [0, 0, 0]
    assert json.loads(grant.deliveries[1].raw)["properties"]["delivery_info"]["redelivered"] is True


@pytest.mark.parametrize("times", [2, 3])
def test_requeued_again_it_has_one_mark(redis_db: redis.Redis, worker: Worker, times: int) -> None:
    worker.caller(worker.store.settle([worker.take_one()]))
    worker.caller(worker.store.requeue(tag(1), "q", 4))
    for _ in range(times):
        worker.caller(worker.store.requeue(worker.take_one(), "q", 4))
    assert redis_db.lrange("q\x06\x164", 0, -1) == [MARKED]


def test_one_that_is_held_by_another_is_left_alone(redis_db: redis.Redis, worker: Worker) -> None:
    other = Worker(worker.caller, "x", "q")
    before = keyspace(redis_db)
    assert worker.caller(other.store.requeue(tag(1), "q", 4)) == 0
    assert keyspace(redis_db) == before


def test_what_stock_kombu_has_restored_is_not_doubled(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.hdel("unacked", tag(1))
    redis_db.zrem("unacked_index", tag(1))
    push(redis_db, "q", A)
    assert worker.caller(worker.store.requeue(tag(1), "q", 4)) == 0
    assert everywhere(redis_db) == [A, B] or everywhere(redis_db) == [B, A]
    assert not redis_db.hexists("strategies:holder:w", tag(1))


def test_a_record_that_is_not_ours_stays_for_kombus_own_recovery(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.hset("unacked", tag(1), record(A, "another"))
    assert worker.caller(worker.store.requeue(tag(1), "q", 4)) == 0
    assert keyspace(redis_db) == {
        "q\x06\x164": [B],
        "strategies:sequence": b"1",
        **held(worker, {tag(1): (A, place(1, step=4))}, queue="another"),
        "strategies:holder:w": {b"": b"1"},
    }


@pytest.mark.parametrize("key", ["unacked", "unacked_index", "q"])
def test_a_key_of_a_wrong_type_stops_it_before_it_writes(
    redis_db: redis.Redis, worker: Worker, key: str
) -> None:
    redis_db.delete(key)
    redis_db.set(key, "text")
    before = keyspace(redis_db)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        worker.caller(worker.store.requeue(tag(1), "q", 0))
    assert keyspace(redis_db) == before
