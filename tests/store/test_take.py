"""`take.lua`: what one call moves, and to where."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_strategies.core.strategies import Strategy
from celery_strategies.store import store as calls
from celery_strategies.store.store import Grant

from .tools import (
    SECONDS,
    TTL,
    Caller,
    Worker,
    assert_ttls,
    held,
    jobs,
    keyspace,
    member,
    message,
    place,
    push,
    record,
    score,
    source,
    tag,
)

A, B, C = message("a"), message("b"), message("c")


@pytest.fixture
def worker(caller: Caller) -> Worker:
    """A worker in its first session, with one source and no levels."""
    worker = Worker(caller, "w", "q")
    worker.join()
    return worker


def test_it_moves_a_message_into_kombus_records(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", A, B)
    grant = worker.take(1)
    (delivery,) = grant.deliveries
    assert (delivery.source, delivery.tag, delivery.list, delivery.deliveries) == (0, tag(1), 0, 0)
    assert delivery.raw == A
    assert grant == Grant(valid=True, turn=0, more=False, deliveries=grant.deliveries, now=SECONDS)
    assert keyspace(redis_db) == {
        "q": [B],
        "strategies:sequence": b"1",
        **held(worker, {tag(1): (A, place(1))}),
    }
    assert_ttls(redis_db, {"strategies:holder:w": TTL})


def test_another_call_takes_the_next(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", A, B, C)
    assert jobs(worker.take(1)) == ["a"]
    assert jobs(worker.take(64)) == ["b", "c"]
    after = keyspace(redis_db)
    assert after == {
        "strategies:sequence": b"3",
        **held(worker, {tag(n): (raw, place(n)) for n, raw in enumerate((A, B, C), 1)}),
    }
    assert worker.take(64) == Grant(valid=True)
    assert keyspace(redis_db) == after


def test_an_empty_take_leaves_no_trace(redis_db: redis.Redis, worker: Worker) -> None:
    before = keyspace(redis_db)
    assert worker.take(5) == Grant(valid=True)
    assert keyspace(redis_db) == before == held(worker, {})


def test_without_sources_it_only_settles(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", A)
    held_tag = worker.take_one()
    worker.read()
    assert worker.take(3, tags=[held_tag]) == Grant(valid=True)
    assert keyspace(redis_db) == {"strategies:sequence": b"1", **held(worker, {})}


def test_without_a_clock_of_ours_the_record_has_the_servers_time(
    redis_db: redis.Redis, worker: Worker
) -> None:
    push(redis_db, "q", A)
    first = redis_db.time()
    held_tag = worker.take_one(now="")
    last = redis_db.time()
    stamp = redis_db.zscore("unacked_index", held_tag)
    assert first[0] + first[1] / 1e6 <= stamp <= last[0] + last[1] / 1e6


def test_all_ten_lists_are_read_in_numeric_order(redis_db: redis.Redis, worker: Worker) -> None:
    for step in reversed(range(10)):
        push(redis_db, worker.keys.inbox("q", step), message(f"s{step}"))
    grant = worker.take(64)
    assert jobs(grant) == [f"s{step}" for step in range(10)]
    assert [delivery.list for delivery in grant.deliveries] == list(range(10))


def test_up_to_64_messages_in_one_call(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", *(message(f"{n}") for n in range(70)))
    assert jobs(worker.take(64)) == [f"{n}" for n in range(64)]
    assert redis_db.llen("q") == 6
    assert len(keyspace(redis_db)["unacked"]) == 64


def test_64_returned_and_waiting_ones_of_many_sources_in_one_call(
    redis_db: redis.Redis, worker: Worker
) -> None:
    queues = [f"q{n}" for n in range(16)]
    worker.read(*queues)
    for queue in queues:
        push(redis_db, queue, *(message(f"{queue}-{n}") for n in range(4)))
    first = worker.take(64)
    assert len(first.deliveries) == 64
    worker.restore(redis_db, *(delivery.tag for delivery in first.deliveries))
    again = worker.take(64)
    assert jobs(again) == jobs(first)
    assert {delivery.deliveries for delivery in again.deliveries} == {0}


def test_bodies_beyond_the_byte_limit_wait_for_the_next_call(
    redis_db: redis.Redis, worker: Worker
) -> None:
    big = "x" * (calls.BYTE_LIMIT // 2)
    push(redis_db, "q", *(message(f"{n}", body=big) for n in range(4)))
    grant = worker.take(4)
    assert jobs(grant) == ["0", "1"]
    assert grant.more
    assert redis_db.llen("q") == 2
    grant = worker.take(4)
    assert jobs(grant) == ["2", "3"]


def test_one_message_larger_than_the_limit_is_taken(redis_db: redis.Redis, worker: Worker) -> None:
    raw = message("huge", body="x" * (8 * 1024 * 1024))
    push(redis_db, "q", raw, A)
    grant = worker.take(2)
    assert [delivery.raw for delivery in grant.deliveries] == [raw]
    assert grant.more
    assert redis_db.hget("unacked", tag(1)) == record(raw)


# -- session ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["0", "2", ""])
def test_a_stale_session_is_refused_and_nothing_is_written(
    redis_db: redis.Redis, worker: Worker, session: str
) -> None:
    push(redis_db, "q", A, b"{bad", B)
    worker.session = "1"
    held_tag = worker.take_one()
    redis_db.set("strategies:wake:w", "1")
    before = keyspace(redis_db)
    worker.session = session
    assert worker.take(3, tags=[held_tag], idle=True) == Grant(valid=False)
    assert keyspace(redis_db) == before


def test_without_a_holder_it_is_refused(redis_db: redis.Redis, caller: Caller) -> None:
    push(redis_db, "q", A)
    stranger = Worker(caller, "w", "q")
    stranger.session = "1"
    assert stranger.take(1) == Grant(valid=False)
    assert keyspace(redis_db) == {"q": [A]}


def test_tags_are_unique_after_redis_has_lost_its_last_writes(
    redis_db: redis.Redis, worker: Worker
) -> None:
    push(redis_db, "q", A, B)
    old = worker.take_one()
    # A fail-over to a replica that lags behind: the counter goes back, the message waits again.
    redis_db.set("strategies:sequence", 0)
    worker.join()
    assert worker.take_one() != old


# -- settling ---------------------------------------------------------------------------------------------------


def test_it_settles_what_rides_along(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", A, B, C)
    first = worker.take_one()
    second = worker.take_one()
    grant = worker.take(1, tags=[first, "w:1.99"])
    assert jobs(grant) == ["c"]
    assert grant.lost == ("w:1.99",)
    assert keyspace(redis_db) == {
        "strategies:sequence": b"3",
        **held(worker, {second: (B, place(2)), tag(3): (C, place(3))}),
    }


def test_500_tags_ride_along(redis_db: redis.Redis, worker: Worker) -> None:
    tags = []
    for _ in range(8):
        push(redis_db, "q", *(message(f"{n}") for n in range(64)))
        tags += [delivery.tag for delivery in worker.take(64).deliveries]
    assert len(tags) == 512
    assert worker.take(1, tags=tags[: calls.TAG_LIMIT]).lost == ()
    assert redis_db.hlen("unacked") == 12


# -- returned ---------------------------------------------------------------------------------------------------


def test_returned_ones_go_first_and_keep_their_place(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", A, B)
    first = worker.take_one()
    worker.restore(redis_db, first, started=True)
    push(redis_db, "q", C)
    assert keyspace(redis_db)["strategies:{q}:returned"] == {member(A, 1, deliveries=1): score(1)}
    grant = worker.take(1)
    assert grant.deliveries[0].deliveries == 1
    assert grant.deliveries[0].raw == A
    assert keyspace(redis_db) == {
        "q": [C, B],
        "strategies:sequence": b"2",
        **held(worker, {tag(2): (A, place(1, deliveries=1))}),
    }


def test_a_returned_one_waits_for_a_higher_level(redis_db: redis.Redis, worker: Worker) -> None:
    worker.read(source("q", 3))
    inbox = worker.keys.inbox
    push(redis_db, inbox("q", 2), A)
    worker.restore(redis_db, worker.take_one())
    push(redis_db, inbox("q", 1), B)
    push(redis_db, inbox("q", 2), C)
    assert jobs(worker.take(3)) == ["b", "a", "c"]


def test_a_returned_message_has_the_level_that_its_list_has_now(
    redis_db: redis.Redis, worker: Worker
) -> None:
    inbox = worker.keys.inbox
    push(redis_db, inbox("q", 6), A)
    worker.restore(redis_db, worker.take_one())
    push(redis_db, inbox("q", 2), B)
    # Without levels list 2 goes first; with three levels both are of the last.
    worker.read(source("q", 3))
    first = worker.take(1)
    assert jobs(first) == ["a"]
    worker.restore(redis_db, first.deliveries[0].tag)
    worker.read(source("q"))
    assert jobs(worker.take(2)) == ["b", "a"]


def test_returned_ones_of_one_level_go_in_the_order_taken_whatever_their_lists(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.read(source("q", 2))
    inbox = worker.keys.inbox
    tags = []
    for step, job in ((9, "a"), (1, "b"), (5, "c")):
        push(redis_db, inbox("q", step), message(job))
        tags.append(worker.take_one())
    push(redis_db, inbox("q", 0), message("top"))
    worker.restore(redis_db, *reversed(tags))
    grant = worker.take(4)
    assert jobs(grant) == ["top", "a", "b", "c"]
    assert [delivery.list for delivery in grant.deliveries] == [0, 9, 1, 5]
    assert "strategies:{q}:returned" not in keyspace(redis_db)


def test_part_of_what_was_returned_stays(redis_db: redis.Redis, worker: Worker) -> None:
    raws = [message(f"{n}") for n in range(5)]
    push(redis_db, "q", *raws)
    worker.restore(redis_db, *(delivery.tag for delivery in worker.take(5).deliveries))
    assert jobs(worker.take(2)) == ["0", "1"]
    left = {member(raw, n): score(n) for n, raw in enumerate(raws[2:], 3)}
    assert keyspace(redis_db)["strategies:{q}:returned"] == left


# -- strategies and turns ---------------------------------------------------------------------------------------


def test_the_turn_moves_past_the_source_that_yielded(redis_db: redis.Redis, caller: Caller) -> None:
    worker = Worker(caller, "w", "a", "b", "c", strategy=Strategy.ROUND_ROBIN)
    worker.join()
    push(redis_db, "c", message("c1"), message("c2"))
    grant = worker.take(1, turn=1)
    assert (jobs(grant), grant.turn) == (["c1"], 0)
    push(redis_db, "a", message("a1"))
    grant = worker.take(1, turn=grant.turn)
    assert (jobs(grant), grant.turn) == (["a1"], 1)
    assert worker.take(0, turn=2).turn == 2


def test_no_message_and_no_turn_is_lost_to_a_take_for_no_slot(
    redis_db: redis.Redis, worker: Worker
) -> None:
    push(redis_db, "q", A)
    held_tag = worker.take_one()
    push(redis_db, "q", B)
    grant = worker.take(0, tags=[held_tag])
    assert (grant.deliveries, grant.lost) == ((), ())
    assert keyspace(redis_db) == {"q": [B], "strategies:sequence": b"1", **held(worker, {})}


# -- keys of a wrong type ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["bad", "bad\x06\x163", "strategies:{bad}:returned"])
@pytest.mark.parametrize("strategy", Strategy)
def test_a_key_of_a_wrong_type_hides_no_other_source(
    redis_db: redis.Redis, caller: Caller, key: str, strategy: Strategy
) -> None:
    worker = Worker(caller, "w", "bad", "good", strategy=strategy)
    worker.join()
    redis_db.hset(key, "x", "1")
    push(redis_db, "good", A, B)
    grant = worker.take(64)
    assert jobs(grant) == ["a", "b"]
    ((index, reason),) = grant.broken
    assert index == 0
    assert reason.startswith("WRONGTYPE")
    assert keyspace(redis_db)[key] == {b"x": b"1"}


@pytest.mark.parametrize("key", ["q", "q\x06\x165", "strategies:{q}:returned"])
def test_the_other_lists_of_the_same_source_are_read(
    redis_db: redis.Redis, worker: Worker, key: str
) -> None:
    redis_db.set(key, "text")
    push(redis_db, worker.keys.inbox("q", 3), A)
    grant = worker.take(64)
    assert jobs(grant) == ["a"]
    assert len(grant.broken) == 1
    assert worker.take(64).broken == grant.broken


def test_a_stream_of_a_wrong_type_leaves_the_bad_message_and_serves_the_other_sources(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.read("q", "other")
    redis_db.set("strategies:{q}:set_aside", "text")
    push(redis_db, "q", A, b"{bad", B)
    push(redis_db, "other", C)
    grant = worker.take(64)
    assert jobs(grant) == ["a", "c"]
    assert grant.set_aside == ()
    ((index, _),) = grant.broken
    assert index == 0
    assert redis_db.lrange("q", 0, -1) == [B, b"{bad"]
    assert worker.take(64).deliveries == ()
    redis_db.delete("strategies:{q}:set_aside")
    assert jobs(worker.take(64)) == ["b"]


@pytest.mark.parametrize("kind", ["watchers", "parked"])
def test_a_wrong_type_of_the_idle_sets_costs_no_message(
    redis_db: redis.Redis, worker: Worker, kind: str
) -> None:
    redis_db.set(f"strategies:{{q}}:{kind}", "text")
    push(redis_db, "q", A, B)
    redis_db.set("strategies:wake:w", "1")
    assert jobs(worker.take(1, idle=True)) == ["a"]
    assert keyspace(redis_db)["unacked"] == {tag(1).encode(): record(A)}


def test_a_score_of_no_list_does_not_stop_the_source(redis_db: redis.Redis, worker: Worker) -> None:
    redis_db.zadd("strategies:{q}:returned", {b"what": -5.0})
    push(redis_db, "q", A)
    assert jobs(worker.take(2)) == ["a"]


def test_scores_stay_exact_doubles(redis_db: redis.Redis, worker: Worker) -> None:
    last: Any = 2**47 - 3
    redis_db.set("strategies:sequence", last)
    key = worker.keys.inbox("q", 9)
    push(redis_db, key, A, B)
    grant = worker.take(2)
    worker.restore(redis_db, *(delivery.tag for delivery in grant.deliveries))
    assert keyspace(redis_db)["strategies:{q}:returned"] == {
        member(A, last + 1, step=9): score(last + 1, 9),
        member(B, last + 2, step=9): score(last + 2, 9),
    }
    assert jobs(worker.take(2)) == ["a", "b"]
    assert redis_db.zscore("unacked_index", tag(last + 3)) == SECONDS
