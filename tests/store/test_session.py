"""`join.lua`, `leave.lua`, `refresh.lua` and `expired.lua`: a worker's session and its signs of life."""

from __future__ import annotations

import pytest
import redis

from celery_strategies.store import store as calls

from .tools import (
    NOW,
    SECONDS,
    TTL,
    Caller,
    Worker,
    assert_ttls,
    held,
    keyspace,
    message,
    place,
    push,
    tag,
)

A, B = message("a"), message("b")
SECOND = 1_000_000


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker that holds a and b."""
    worker = Worker(caller, "w", "q")
    worker.join()
    push(redis_db, "q", A, B)
    worker.take(2)
    return worker


# -- join -------------------------------------------------------------------------------------------------------


def test_the_first_join_opens_a_session(redis_db: redis.Redis, caller: Caller) -> None:
    worker = Worker(caller, "w", "q")
    assert worker.join() == {}
    assert keyspace(redis_db) == {"strategies:holder:w": {b"": b"1"}}
    assert_ttls(redis_db, {"strategies:holder:w": TTL})


def test_the_next_tells_what_is_held_and_voids_the_one_before(
    redis_db: redis.Redis, worker: Worker
) -> None:
    before = keyspace(redis_db)
    assert worker.join() == {tag(1): place(1), tag(2): place(2)}
    before["strategies:holder:w"][b""] = b"2"
    assert keyspace(redis_db) == before
    worker.session = "1"
    assert not worker.take(1).valid
    worker.session = "2"
    assert worker.take(1).valid


def test_join_can_be_repeated(redis_db: redis.Redis, worker: Worker) -> None:
    packed = worker.store.join("2", TTL)
    first = worker.caller(packed)
    after = keyspace(redis_db)
    assert worker.caller(packed) == first
    assert keyspace(redis_db) == after


def test_a_join_that_comes_late_does_not_void_the_present_session(
    redis_db: redis.Redis, worker: Worker
) -> None:
    late = worker.store.join("9", TTL)
    worker.sessions = 9
    worker.join()
    before = keyspace(redis_db)
    worker.caller(late)
    assert keyspace(redis_db) == before
    assert before["strategies:holder:w"][b""] == b"10"
    assert worker.take(1).valid


def test_join_renews_the_holder(redis_db: redis.Redis, worker: Worker) -> None:
    redis_db.pexpire("strategies:holder:w", 1000)
    worker.join()
    assert_ttls(redis_db, {"strategies:holder:w": TTL})


def test_sessions_of_other_workers_are_their_own(redis_db: redis.Redis, worker: Worker) -> None:
    other = Worker(worker.caller, "w2", "q")
    assert other.join() == {}
    assert worker.take(1).valid


# -- leave ------------------------------------------------------------------------------------------------------


def test_leave_forgets_an_empty_holder(redis_db: redis.Redis, worker: Worker) -> None:
    worker.caller(worker.store.settle([tag(1), tag(2)]))
    assert worker.caller(worker.store.leave()) == 0
    assert keyspace(redis_db) == {"strategies:sequence": b"2"}
    assert worker.caller(worker.store.leave()) == 0
    assert keyspace(redis_db) == {"strategies:sequence": b"2"}


def test_leave_keeps_what_is_held(redis_db: redis.Redis, worker: Worker) -> None:
    before = keyspace(redis_db)
    assert worker.caller(worker.store.leave()) == 2
    assert keyspace(redis_db) == before


def test_leave_without_a_session(redis_db: redis.Redis, worker: Worker) -> None:
    redis_db.hdel("strategies:holder:w", "")
    assert worker.caller(worker.store.leave()) == 2
    redis_db.delete("strategies:holder:w")
    assert worker.caller(worker.store.leave()) == 0


# -- refresh ----------------------------------------------------------------------------------------------------


def test_refresh_renews_the_records_time_and_the_holder(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.pexpire("strategies:holder:w", 1000)
    packed = worker.store.refresh([tag(2)], TTL, NOW + 3 * SECOND)
    after = {
        "strategies:sequence": b"2",
        **held(worker, {tag(1): (A, place(1)), tag(2): (B, place(2))}),
    }
    after["unacked_index"][tag(2).encode()] = SECONDS + 3
    for _ in range(2):
        assert worker.caller(packed) == 1
        assert keyspace(redis_db) == after
    assert_ttls(redis_db, {"strategies:holder:w": TTL})


def test_refresh_brings_nothing_back(redis_db: redis.Redis, worker: Worker) -> None:
    worker.caller(worker.store.settle([tag(1)]))
    before = keyspace(redis_db)
    assert worker.caller(worker.store.refresh([tag(1), "w:1.99"], TTL, NOW + SECOND)) == 0
    assert keyspace(redis_db) == before
    redis_db.delete("strategies:holder:w")
    assert worker.caller(worker.store.refresh([], TTL, NOW)) == 0
    assert not redis_db.exists("strategies:holder:w")


def test_refresh_of_as_many_tags_as_a_call_names(redis_db: redis.Redis, worker: Worker) -> None:
    tags = [tag(n) for n in range(calls.TAG_LIMIT)]
    redis_db.zadd("unacked_index", dict.fromkeys(tags, 1.0))
    assert worker.caller(worker.store.refresh(tags, TTL, NOW)) == calls.TAG_LIMIT
    assert set(keyspace(redis_db)["unacked_index"].values()) == {SECONDS}


def test_without_a_clock_of_ours_the_time_is_the_servers(
    redis_db: redis.Redis, worker: Worker
) -> None:
    seconds, micros = redis_db.time()
    worker.caller(worker.store.refresh([tag(1)], TTL))
    assert redis_db.zscore("unacked_index", tag(1)) >= seconds + micros / 1e6


# -- expired ----------------------------------------------------------------------------------------------------


def test_expired_lists_the_oldest_first(redis_db: redis.Redis, worker: Worker) -> None:
    redis_db.zadd("unacked_index", {"stock": SECONDS - 100, "young": SECONDS + 3})
    before = keyspace(redis_db)
    limit, *tags = worker.caller(worker.store.expired(2.5, 10, NOW + 5 * SECOND))
    assert float(limit) == SECONDS + 2.5
    assert tags == [b"stock", tag(1).encode(), tag(2).encode()]
    assert worker.caller(worker.store.expired(2.5, 2, NOW + 5 * SECOND))[1:] == tags[:2]
    assert worker.caller(worker.store.expired(1000, 10, NOW + 5 * SECOND))[1:] == []
    assert keyspace(redis_db) == before


def test_the_limit_itself_has_expired_and_nothing_after_it(
    redis_db: redis.Redis, worker: Worker
) -> None:
    assert worker.caller(worker.store.expired(0, 10, NOW))[1:] == [tag(1).encode(), tag(2).encode()]
    assert worker.caller(worker.store.expired(0, 10, NOW - 1))[1:] == []


def test_expired_on_the_servers_clock(redis_db: redis.Redis, worker: Worker) -> None:
    limit, *tags = worker.caller(worker.store.expired(0.25, 10))
    seconds, micros = redis_db.time()
    assert float(limit) <= seconds + micros / 1e6 - 0.25
    assert len(tags) == 2


def test_nothing_there(redis_db: redis.Redis, caller: Caller) -> None:
    assert caller(Worker(caller, "w").store.expired(1, 10, NOW))[1:] == []
    assert keyspace(redis_db) == {}
