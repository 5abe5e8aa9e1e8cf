"""What nobody of ours wrote, in keys that are ours: it costs its own source, and no more."""

from __future__ import annotations

import redis

from celery_strategies.core.strategies import Strategy
from celery_strategies.store.store import Grant, Place, TakePlan

from .tools import Caller, Worker, message, push, source, tag

A, B = message("a"), message("b")


def test_a_returned_member_without_a_place_stops_no_other_source(
    caller: Caller, redis_db: redis.Redis
) -> None:
    worker = Worker(caller, "w", "q", "other")
    worker.join()
    redis_db.zadd(worker.keys.returned("q"), {"no place at all": 1})
    push(redis_db, worker.keys.inbox("q", 0), A)
    push(redis_db, worker.keys.inbox("other", 0), B)
    plan = TakePlan(worker.keys, "w", Strategy.PRIORITY, [source("q"), source("other")])
    grant = Grant.parse(caller(plan.call("1", 2)))
    assert [delivery.raw for delivery in grant.deliveries] == [A, B]
    assert [(index, "no place" in reason) for index, reason in grant.broken] == [(0, True)]
    assert redis_db.zrange(worker.keys.returned("q"), 0, -1) == [b"no place at all"]


def test_requeueing_a_message_full_of_delivery_infos_copies_it_once(
    caller: Caller, redis_db: redis.Redis
) -> None:
    # Quadratic work here would stop the server for seconds; the test's time limit would tell.
    nested = b", ".join(b'"%d": {"delivery_info": {}}' % number for number in range(40_000))
    hostile = A.replace(b'"headers": {', b'"headers": {"x": {%b}, ' % nested, 1)
    worker = Worker(caller, "w", "q")
    worker.join()
    push(redis_db, worker.keys.inbox("q", 0), hostile)
    worker.take(1)
    assert caller(worker.store.requeue(tag(1), "q", 0)) == 1
    (requeued,) = redis_db.lrange(worker.keys.inbox("q", 0), 0, -1)
    assert requeued.count(b'"redelivered": true') == 1
    assert len(requeued) < len(hostile) + 40


def test_a_place_of_another_format_is_no_place() -> None:
    for entry in (b"", b"1:2", b'x:1:0:,"","q"]', b"{}"):
        try:
            Place.parse(entry)
        except ValueError:
            continue
        raise AssertionError(entry)
