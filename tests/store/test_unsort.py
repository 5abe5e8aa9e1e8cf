"""`unsort.lua`: given-back messages go to the heads of Kombu's lists."""

from __future__ import annotations

import pytest
import redis

from celery_strategies.store import store as calls
from celery_strategies.store.admin import unsort_queue
from celery_strategies.store.keys import Keys

from .tools import Caller, Worker, held, job_of, jobs, keyspace, message, push

STEPS = (0, 0, 3, 9)


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker that gave back two messages of list 0, one of 3 and one of 9; in each of those waits another."""
    worker = Worker(caller, "w", "q")
    worker.join()
    for number, step in enumerate(STEPS):
        push(redis_db, worker.keys.inbox("q", step), message(f"old-{number}"))
    tags = [delivery.tag for delivery in worker.take(4).deliveries]
    worker.restore(redis_db, *tags)
    for step in sorted({*STEPS}):
        push(redis_db, worker.keys.inbox("q", step), message(f"new-{step}"))
    return worker


EXPECTED = {
    "q": [message("new-0"), message("old-1"), message("old-0")],
    "q\x06\x163": [message("new-3"), message("old-2")],
    "q\x06\x169": [message("new-9"), message("old-3")],
}


def test_they_are_next_in_their_lists(redis_db: redis.Redis, worker: Worker) -> None:
    assert worker.caller(calls.unsort(worker.keys, "q")) == 4
    after = {"strategies:sequence": b"4", **held(worker, {}), **EXPECTED}
    assert keyspace(redis_db) == after
    assert worker.caller(calls.unsort(worker.keys, "q")) == 0
    assert keyspace(redis_db) == after


def test_any_part_of_it_keeps_the_order(redis_db: redis.Redis, worker: Worker) -> None:
    moved = [worker.caller(calls.unsort(worker.keys, "q", 1)) for _ in range(5)]
    assert moved == [1, 1, 1, 1, 0]
    assert keyspace(redis_db) == {"strategies:sequence": b"4", **held(worker, {}), **EXPECTED}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_between_two_parts_the_order_taken_is_the_same(
    redis_db: redis.Redis, worker: Worker, count: int
) -> None:
    worker.caller(calls.unsort(worker.keys, "q", count))
    order = ["old-0", "old-1", "new-0", "old-2", "new-3", "old-3", "new-9"]
    assert jobs(worker.take(9)) == order


def test_the_command_moves_more_than_one_call_can(redis_db: redis.Redis, caller: Caller) -> None:
    worker = Worker(caller, "w", "q")
    worker.join()
    total = 2 * calls.TAKE_LIMIT + 5
    push(redis_db, "q", *(message(f"{n}") for n in range(total)))
    tags = []
    while grant := worker.take(64).deliveries:
        tags += [delivery.tag for delivery in grant]
    worker.restore(redis_db, *tags)
    redis_db.script_flush()
    assert unsort_queue(redis_db, Keys(), "q") == total
    assert [job_of(raw) for raw in reversed(redis_db.lrange("q", 0, -1))] == [
        f"{n}" for n in range(total)
    ]
    assert not redis_db.exists("strategies:{q}:returned")
    assert unsort_queue(redis_db, Keys(), "q") == 0


def test_a_list_of_a_wrong_type_stops_it_before_it_removes_anything(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.delete("q\x06\x169")
    redis_db.set("q\x06\x169", "text")
    before = keyspace(redis_db)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        worker.caller(calls.unsort(worker.keys, "q"))
    assert keyspace(redis_db) == before
