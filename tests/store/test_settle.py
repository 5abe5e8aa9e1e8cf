"""`settle.lua`: a tag is settled once, and only by whoever holds it."""

from __future__ import annotations

import pytest
import redis

from .tools import TTL, Caller, Worker, assert_ttls, held, keyspace, message, place, push, tag

A, B, C = message("a"), message("b"), message("c")


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker that holds a, b and c."""
    worker = Worker(caller, "w", "q")
    worker.join()
    push(redis_db, "q", A, B, C)
    worker.take(3)
    return worker


def test_the_records_go(redis_db: redis.Redis, worker: Worker) -> None:
    packed = worker.store.settle([tag(1), tag(3)])
    after = {"strategies:sequence": b"3", **held(worker, {tag(2): (B, place(2))})}
    assert worker.caller(packed) == []
    assert keyspace(redis_db) == after
    assert_ttls(redis_db, {"strategies:holder:w": TTL})
    assert worker.caller(packed) == [tag(1).encode(), tag(3).encode()]
    assert keyspace(redis_db) == after


def test_the_last_one_leaves_nothing_but_the_session(redis_db: redis.Redis, worker: Worker) -> None:
    assert worker.caller(worker.store.settle([tag(1), tag(2), tag(3)])) == []
    assert keyspace(redis_db) == {"strategies:sequence": b"3", **held(worker, {})}


def test_no_tags(redis_db: redis.Redis, worker: Worker) -> None:
    before = keyspace(redis_db)
    assert worker.caller(worker.store.settle([])) == []
    assert keyspace(redis_db) == before


def test_a_tag_that_never_was(redis_db: redis.Redis, worker: Worker) -> None:
    before = keyspace(redis_db)
    assert worker.caller(worker.store.settle(["w:1.99", "x"])) == [b"w:1.99", b"x"]
    assert keyspace(redis_db) == before


def test_what_another_worker_got_meanwhile_is_left_alone(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.restore(redis_db, tag(1), started=True)
    other = Worker(worker.caller, "x", "q")
    other.join()
    (delivery,) = other.take(1).deliveries
    assert delivery.raw == A
    before = keyspace(redis_db)
    assert worker.caller(worker.store.settle([tag(1)])) == [tag(1).encode()]
    assert keyspace(redis_db) == before


def test_what_stock_kombu_has_restored_is_left_alone(redis_db: redis.Redis, worker: Worker) -> None:
    # What its restore does: the record goes, the message waits, the holder knows nothing of it.
    redis_db.hdel("unacked", tag(1))
    redis_db.zrem("unacked_index", tag(1))
    push(redis_db, "q", A)
    assert worker.caller(worker.store.settle([tag(1)])) == [tag(1).encode()]
    assert keyspace(redis_db) == {
        "q": [A],
        "strategies:sequence": b"3",
        **held(worker, {tag(2): (B, place(2)), tag(3): (C, place(3))}),
    }


def test_it_needs_no_session(redis_db: redis.Redis, worker: Worker) -> None:
    # A job that ended over a reconnect is settled by the next session, or by one whose holder has expired.
    redis_db.delete("strategies:holder:w")
    assert worker.caller(worker.store.settle([tag(1), tag(2), tag(3)])) == []
    assert keyspace(redis_db) == {"strategies:sequence": b"3"}
