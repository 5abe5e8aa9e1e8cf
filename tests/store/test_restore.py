"""`restore.lua`: back to source and list, in the order taken, once."""

from __future__ import annotations

import pytest
import redis

from .tools import (
    NOW,
    SECONDS,
    TTL,
    Caller,
    Worker,
    assert_ttls,
    everywhere,
    held,
    job_of,
    jobs,
    keyspace,
    member,
    message,
    place,
    push,
    record,
    score,
    tag,
)

A, B, C = message("a"), message("b"), message("c")


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker that holds a and b of list 0 and c of list 4."""
    worker = Worker(caller, "w", "q")
    worker.join()
    push(redis_db, "q", A, B)
    push(redis_db, worker.keys.inbox("q", 4), C)
    worker.take(3)
    return worker


def test_they_wait_in_the_returned_set(redis_db: redis.Redis, worker: Worker) -> None:
    items = [(tag(n), worker.entry(tag(n), redis_db)) for n in (3, 1)]
    packed = worker.store.restore(items)
    assert worker.caller(packed) == 2
    after = {
        "strategies:sequence": b"3",
        "strategies:{q}:returned": {member(A, 1): score(1), member(C, 3, step=4): score(3, 4)},
        **held(worker, {tag(2): (B, place(2))}),
    }
    assert keyspace(redis_db) == after
    assert_ttls(redis_db, {"strategies:holder:w": TTL})
    assert worker.caller(packed) == 0
    assert keyspace(redis_db) == after


def test_started_counts_a_delivery(redis_db: redis.Redis, worker: Worker) -> None:
    for deliveries in (1, 2):
        worker.restore(
            redis_db, worker.take(1).deliveries[0].tag if deliveries > 1 else tag(1), started=True
        )
        returned = keyspace(redis_db)["strategies:{q}:returned"]
        assert returned == {member(A, 1, deliveries=deliveries): score(1)}


def test_chunks_and_repetitions_keep_the_order(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", message("new"))
    worker.restore(redis_db, tag(2))
    worker.restore(redis_db, tag(3))
    worker.restore(redis_db, tag(1))
    grant = worker.take(2)
    assert jobs(grant) == ["a", "b"]
    worker.restore(redis_db, grant.deliveries[1].tag)
    worker.restore(redis_db, grant.deliveries[0].tag)
    assert jobs(worker.take(9)) == ["a", "b", "new", "c"]


def test_nothing_to_do(redis_db: redis.Redis, worker: Worker) -> None:
    before = keyspace(redis_db)
    assert worker.caller(worker.store.restore([])) == 0
    assert keyspace(redis_db) == before


@pytest.mark.parametrize(
    "entry", [place(2), place(1, step=1), place(1, deliveries=1), place(1, queue="other")]
)
def test_another_place_than_the_present_is_left_alone(
    redis_db: redis.Redis, worker: Worker, entry: bytes
) -> None:
    before = keyspace(redis_db)
    assert worker.caller(worker.store.restore([(tag(1), entry)])) == 0
    assert keyspace(redis_db) == before


# -- of other workers, once their time is over ------------------------------------------------------------------


def test_only_what_was_not_refreshed_since(redis_db: redis.Redis, worker: Worker) -> None:
    keeper = Worker(worker.caller, "keeper", "q")
    items = [(tag(n), worker.entry(tag(n), redis_db)) for n in (1, 2, 3)]
    worker.caller(worker.store.refresh([tag(2)], TTL, NOW + 10_000_000))
    limit, *expired = worker.caller(keeper.store.expired(5, 10, NOW + 6_000_000))
    assert expired == [tag(1).encode(), tag(3).encode()]
    assert worker.caller(keeper.store.restore(items, limit=limit, started=True)) == 2
    assert keyspace(redis_db) == {
        "strategies:sequence": b"3",
        "strategies:{q}:returned": {
            member(A, 1, deliveries=1): score(1),
            member(C, 3, step=4, deliveries=1): score(3, 4),
        },
        **held(worker, {tag(2): (B, place(2))}, seconds=SECONDS + 10),
    }


def test_a_refresh_between_the_look_and_the_restore_keeps_it(
    redis_db: redis.Redis, worker: Worker
) -> None:
    keeper = Worker(worker.caller, "keeper", "q")
    items = [(tag(1), worker.entry(tag(1), redis_db))]
    limit, *_ = worker.caller(keeper.store.expired(5, 10, NOW + 6_000_000))
    worker.caller(worker.store.refresh([tag(1)], TTL, NOW + 1_000_001))
    before = keyspace(redis_db)
    assert worker.caller(keeper.store.restore(items, limit=limit, started=True)) == 0
    assert keyspace(redis_db) == before


def test_two_keepers_restore_it_once(redis_db: redis.Redis, worker: Worker) -> None:
    items = [(tag(1), worker.entry(tag(1), redis_db))]
    keepers = [Worker(worker.caller, name, "q") for name in ("x", "y")]
    limit = worker.caller(keepers[0].store.expired(0, 10, NOW))[0]
    moved = [worker.caller(keeper.store.restore(items, limit=limit)) for keeper in keepers]
    assert moved == [1, 0]
    assert everywhere(redis_db).count(A) == 1


def test_messages_of_several_workers_and_queues_in_one_call(
    redis_db: redis.Redis, worker: Worker
) -> None:
    other = Worker(worker.caller, "x:y", "r")
    other.join()
    push(redis_db, "r", message("r1"))
    held_tag = other.take_one()
    items = [(held_tag, other.entry(held_tag, redis_db)), (tag(1), worker.entry(tag(1), redis_db))]
    assert worker.caller(worker.store.restore(items)) == 2
    space = keyspace(redis_db)
    assert space["strategies:{r}:returned"] == {member(message("r1"), 4): score(4)}
    assert space["strategies:{q}:returned"] == {member(A, 1): score(1)}


# -- records that are not as expected ---------------------------------------------------------------------------


def test_what_stock_kombu_has_restored_is_not_restored_again(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.hdel("unacked", tag(1))
    redis_db.zrem("unacked_index", tag(1))
    push(redis_db, "q", A)
    assert worker.restore(redis_db, tag(1)) == 0
    assert everywhere(redis_db).count(A) == 1
    assert not redis_db.hexists("strategies:holder:w", tag(1))


@pytest.mark.parametrize("text", [b"{}", record(A, "another"), record(A)[1:], b""])
def test_a_record_that_is_not_ours_stays_for_kombus_own_recovery(
    redis_db: redis.Redis, worker: Worker, text: bytes
) -> None:
    redis_db.hset("unacked", tag(1), text)
    before = keyspace(redis_db)
    assert worker.restore(redis_db, tag(1)) == 0
    del before["strategies:holder:w"][tag(1).encode()]
    assert keyspace(redis_db) == before


def test_a_record_without_a_time_can_be_given_back_by_its_holder(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.zrem("unacked_index", tag(1))
    assert worker.restore(redis_db, tag(1), limit="9999999999") == 0
    assert worker.restore(redis_db, tag(1)) == 1
    assert everywhere(redis_db).count(A) == 1


@pytest.mark.parametrize("key", ["unacked", "unacked_index"])
def test_a_key_of_a_wrong_type_stops_it_before_it_removes_anything(
    redis_db: redis.Redis, worker: Worker, key: str
) -> None:
    entry = worker.entry(tag(1), redis_db)
    redis_db.delete(key)
    redis_db.set(key, "text")
    before = keyspace(redis_db)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        worker.caller(worker.store.restore([(tag(1), entry)]))
    assert keyspace(redis_db) == before


def test_a_queue_that_cannot_be_written_holds_up_no_other(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.read("q", "r")
    push(redis_db, "r", message("other", queue="r"))
    other = worker.take_one()
    items = [(held_tag, worker.entry(held_tag, redis_db)) for held_tag in (tag(1), other)]
    redis_db.set("strategies:{q}:returned", "text")
    before = keyspace(redis_db)
    with pytest.raises(redis.ResponseError, match="a message stays where it is"):
        worker.caller(worker.store.restore(items))
    after = keyspace(redis_db)
    assert [job_of(raw.split(b":", 3)[3]) for raw in after["strategies:{r}:returned"]] == ["other"]
    # It waits where it was, and the call can be repeated.
    assert after["unacked"][tag(1).encode()] == before["unacked"][tag(1).encode()]
    with pytest.raises(redis.ResponseError, match="a message stays where it is"):
        worker.caller(worker.store.restore(items))
    assert keyspace(redis_db) == after
    redis_db.delete("strategies:{q}:returned")
    assert worker.caller(worker.store.restore(items)) == 1
    assert tag(1).encode() not in keyspace(redis_db)["unacked"]
