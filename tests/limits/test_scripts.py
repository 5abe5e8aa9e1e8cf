"""The scripts that give out permits: who gets one, who waits, who is next, and what is left behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import admin
from celery_strategies.store import store as calls
from celery_strategies.store.store import (
    HAS_PERMIT,
    IN_LINE,
    NOT_HELD,
    UNREADABLE,
    Answer,
    Ask,
    Place,
)
from tests.store.tools import NOW, TTL, Caller, job_of, keyspace, message
from tests.store.tools import Worker as Plain

from .tools import (
    KEYS,
    ONE,
    Worker,
    adopt,
    expire,
    hire,
    in_line,
    nothing_is_left,
    permits,
    publish,
    source,
)

THREE = Ask("task:key", 3, 300_000)


def numbered(count: int, prefix: str = "job-") -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


@pytest.fixture
def worker(caller: Caller) -> Worker:
    return hire(caller, "w", "q")


def taken(worker: Worker, client: redis.Redis, count: int, queue: str = "q") -> list[str]:
    """Publish and take so many jobs; returns their tags."""
    publish(client, queue, numbered(count))
    return [delivery.tag for delivery in worker.grab(count)]


# -- vectors -------------------------------------------------------------------------------------------


def test_to_three_the_fourth_waits(worker: Worker, redis_db: redis.Redis) -> None:
    tags = taken(worker, redis_db, 4)
    assert [worker.ask(tag, THREE).state for tag in tags] == [HAS_PERMIT] * 3 + [IN_LINE]
    assert len(permits(redis_db)) == 3
    assert in_line(redis_db) == ["job-3"]
    assert redis_db.hlen(KEYS.unacked) == 3
    worker.settle(tags[1])
    assert len(permits(redis_db)) == 3
    assert in_line(redis_db) == []
    (again,) = worker.grab()
    assert job_of(again.raw) == "job-3"
    assert worker.ask(again.tag, THREE) == Answer(HAS_PERMIT)
    worker.settle(tags[0], tags[2], again.tag)
    nothing_is_left(redis_db)


def test_eight_threads_at_once_three_run(redis_db: redis.Redis, caller: Caller) -> None:
    publish(redis_db, "q", numbered(8))
    barrier, states = threading.Barrier(8), []

    def run(number: int) -> None:
        mine = Caller(redis_db)
        worker = hire(mine, f"w{number}", "q")
        (delivery,) = worker.grab()
        barrier.wait(20)
        states.append(worker.ask(delivery.tag, THREE).state)
        mine.close()

    caller.load()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(states) == [IN_LINE] * 5 + [HAS_PERMIT] * 3
    assert len(permits(redis_db)) == 3
    assert len(in_line(redis_db)) == 5


def test_a_double_release_frees_one_permit_once(worker: Worker, redis_db: redis.Redis) -> None:
    tags = taken(worker, redis_db, 4)
    for tag in tags:
        worker.ask(tag)
    assert worker.settle(tags[0]) == []
    assert in_line(redis_db) == ["job-2", "job-3"]
    assert worker.settle(tags[0]) == [tags[0].encode()]
    worker.caller(worker.store.settle([calls.HAS_ENDED + tags[0]]))
    assert in_line(redis_db) == ["job-2", "job-3"]
    assert len(permits(redis_db)) == 1


# -- asking --------------------------------------------------------------------------------------------


def test_asking_again_changes_nothing(worker: Worker, redis_db: redis.Redis) -> None:
    first, second = taken(worker, redis_db, 2)
    for _ in range(2):
        assert worker.ask(first, now=NOW) == Answer(HAS_PERMIT)
    worker.ask(second, now=NOW)
    before = keyspace(redis_db)
    # As after a lost reply: it is not this worker's any more.
    assert worker.ask(second, now=NOW) == Answer(NOT_HELD)
    assert worker.ask("w:1.99", now=NOW) == Answer(NOT_HELD)
    assert keyspace(redis_db) == before


def test_a_message_in_other_hands_gets_none(worker: Worker, redis_db: redis.Redis) -> None:
    (tag,) = taken(worker, redis_db, 1)
    # What a stock worker's recovery removes.
    redis_db.hdel(KEYS.unacked, tag)
    redis_db.zrem(KEYS.unacked_index, tag)
    assert worker.ask(tag) == Answer(NOT_HELD)
    assert redis_db.hkeys(KEYS.holder("w")) == [b""]
    assert permits(redis_db) == []


def test_what_is_stored(worker: Worker, redis_db: redis.Redis) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first, now=NOW)
    worker.ask(second, now=NOW)
    space = keyspace(redis_db)
    end = NOW // 1000 + 300_000
    assert space[KEYS.permits(ONE.limit)] == {b"1": end}
    assert space[KEYS.line(ONE.limit)] == {b'2,"","q"]': 2}
    assert space[KEYS.lines] == {b"task:key": end}
    assert space[KEYS.limits] == {b"task:key": b"1:300000"}
    assert space[KEYS.limited("w")] == {first.encode(): b"1:300000:task:key"}
    assert space[KEYS.in_line("q")] == {b"p0:2:0:" + message("job-1"): 2}
    ttls = {key for key in space if redis_db.ttl(key) > 0}
    assert ttls == {KEYS.permits(ONE.limit), KEYS.limited("w"), KEYS.holder("w")}


@pytest.mark.parametrize("where", ["permits", "line", "in_line", "lines", "limits"])
def test_a_key_of_a_wrong_type_is_told(worker: Worker, redis_db: redis.Redis, where: str) -> None:
    key = {
        "permits": KEYS.permits(ONE.limit),
        "line": KEYS.line(ONE.limit),
        "in_line": KEYS.in_line("q"),
        "lines": KEYS.lines,
        "limits": KEYS.limits,
    }[where]
    first, tag = taken(worker, redis_db, 2)
    if where != "permits":
        worker.ask(first)
    redis_db.set(key, "x")
    before = keyspace(redis_db)
    answer = worker.ask(tag)
    assert answer.state == UNREADABLE
    assert key in answer.error
    assert keyspace(redis_db) == before


def test_different_keys_and_limits_do_not_hinder_each_other(
    worker: Worker, redis_db: redis.Redis
) -> None:
    tags = taken(worker, redis_db, 4)
    asks = [ONE, Ask("task:other", 1, 1000), Ask("other:key", 1, 1000), ONE]
    states = [worker.ask(tag, ask).state for tag, ask in zip(tags, asks, strict=True)]
    assert states == [HAS_PERMIT] * 3 + [IN_LINE]
    worker.settle(tags[1], tags[2])
    assert in_line(redis_db) == ["job-3"]


@pytest.mark.parametrize("limit", ["a b:c", "ü:☃", 'q"\\:\n', "%d%s:%1", "x:" + "k" * 512])
def test_any_name(worker: Worker, redis_db: redis.Redis, limit: str) -> None:
    ask = Ask(limit, 1, 1000)
    first, second = taken(worker, redis_db, 2)
    worker.ask(first, ask)
    assert worker.ask(second, ask).state == IN_LINE
    worker.settle(first)
    (again,) = worker.grab()
    assert worker.ask(again.tag, ask).state == HAS_PERMIT
    worker.settle(again.tag)
    nothing_is_left(redis_db)


@pytest.mark.parametrize("queue", ["a b", "ü☃", 'q"\\', "{x}", "a:b\n", "line"])
def test_a_queue_of_any_name(caller: Caller, redis_db: redis.Redis, queue: str) -> None:
    worker = hire(caller, "w", queue)
    first, second = taken(worker, redis_db, 2, queue)
    worker.ask(first)
    assert worker.ask(second).state == IN_LINE
    assert in_line(redis_db) == ["job-1"]
    worker.settle(first)
    (again,) = worker.grab()
    assert job_of(again.raw) == "job-1"
    worker.ask(again.tag)
    worker.settle(again.tag)
    nothing_is_left(redis_db)


# -- order ---------------------------------------------------------------------------------------------


def test_the_line_is_in_the_order_of_the_first_take_over_all_queues(
    caller: Caller, redis_db: redis.Redis
) -> None:
    one, other = hire(caller, "one", "a"), hire(caller, "other", "b")
    publish(redis_db, "a", numbered(4, "a"))
    publish(redis_db, "b", numbered(3, "b"))
    tags = []
    for worker in (one, other, one, other, one, other, one):
        (delivery,) = worker.grab()
        tags.append((worker, delivery.tag))
    worker, running = tags[0]
    assert worker.ask(running).state == HAS_PERMIT
    # They ask in another order than that in which they were taken.
    for worker, tag in reversed(tags[1:]):
        assert worker.ask(tag).state == IN_LINE
    assert in_line(redis_db) == ["b0", "a1", "b1", "a2", "b2", "a3"]
    ran = []
    holder = one
    for _ in range(6):
        holder.settle(running)
        ((holder, delivery),) = [(w, d) for w in (one, other) for d in w.grab(9)]
        assert holder.ask(delivery.tag).state == HAS_PERMIT
        running = delivery.tag
        ran.append(job_of(delivery.raw))
    assert ran == ["b0", "a1", "b1", "a2", "b2", "a3"]
    holder.settle(running)
    nothing_is_left(redis_db)


def test_an_older_message_does_not_wait_behind_a_newer_one(
    worker: Worker, redis_db: redis.Redis
) -> None:
    """A permit expired, and nobody has looked: who asks next serves the line first."""
    first, second, third, fourth = taken(worker, redis_db, 4)
    for tag in (first, third):
        worker.ask(tag)
    expire(redis_db)
    assert worker.ask(fourth) == Answer(IN_LINE, served=1)
    assert in_line(redis_db) == ["job-3"]
    expire(redis_db)
    assert worker.ask(second) == Answer(HAS_PERMIT)
    assert in_line(redis_db) == ["job-3"]


def test_a_message_given_back_keeps_its_permit(worker: Worker, redis_db: redis.Redis) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    worker.ask(second)
    worker.restore(redis_db, first)
    assert len(permits(redis_db)) == 1
    assert in_line(redis_db) == ["job-1"]
    assert redis_db.exists(KEYS.limited("w")) == 0
    other = hire(worker.caller, "other", "q")
    (again,) = other.grab()
    assert job_of(again.raw) == "job-0"
    assert other.ask(again.tag) == Answer(HAS_PERMIT)
    # Whoever had it before cannot end it.
    worker.settle(first)
    assert in_line(redis_db) == ["job-1"]
    other.settle(again.tag)
    assert in_line(redis_db) == []


@pytest.mark.parametrize("how", ["settle", "requeue", "set_aside", "delay"])
def test_every_other_end_gives_the_permit_up(
    worker: Worker, redis_db: redis.Redis, how: str
) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    worker.ask(second)
    packed = {
        "settle": lambda: worker.store.settle([calls.HAD_PERMIT + first]),
        "requeue": lambda: worker.store.requeue(first, "q", 0),
        "set_aside": lambda: worker.store.set_aside(first, "q", "why"),
        "delay": lambda: worker.store.delay(first, "q", 4e9),
    }[how]()
    worker.caller(packed)
    assert in_line(redis_db) == []
    assert permits(redis_db) == ["2"]
    assert redis_db.zcard(KEYS.returned("q")) == 1


def test_a_permit_outlives_an_early_acknowledgement(worker: Worker, redis_db: redis.Redis) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    worker.ask(second)
    worker.caller(worker.store.settle([calls.STILL_RUNS + first]))
    assert redis_db.hlen(KEYS.unacked) == 0
    assert permits(redis_db) == ["1"]
    worker.caller(worker.store.settle([calls.HAS_ENDED + first]))
    assert permits(redis_db) == ["2"]


@pytest.mark.parametrize("early", [True, False])
def test_a_take_that_settles_gets_the_next_in_line(
    worker: Worker, redis_db: redis.Redis, early: bool
) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    worker.ask(second)
    if early:
        worker.caller(worker.store.settle([calls.STILL_RUNS + first]))
    mark = calls.HAS_ENDED if early else calls.HAD_PERMIT
    (delivery,) = worker.take(1, tags=[mark + first]).deliveries
    assert job_of(delivery.raw) == "job-1"
    assert worker.ask(delivery.tag) == Answer(HAS_PERMIT)


def test_to_may_grow_and_shrink(worker: Worker, redis_db: redis.Redis) -> None:
    tags = taken(worker, redis_db, 7)
    for tag in tags[:4]:
        worker.ask(tag)
    assert in_line(redis_db) == numbered(4)[1:]
    # The next that asks says three: two of the line may go.
    assert worker.ask(tags[4], THREE) == Answer(IN_LINE, served=2)
    assert in_line(redis_db) == ["job-3", "job-4"]
    assert worker.ask(tags[5]) == Answer(IN_LINE)
    worker.settle(tags[0])
    assert len(permits(redis_db)) == 2
    assert in_line(redis_db) == ["job-3", "job-4", "job-5"]


# -- places kept ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, 9])
def test_list_and_deliveries_are_kept(worker: Worker, redis_db: redis.Redis, step: int) -> None:
    publish(redis_db, "q", ["first", "second"], step)
    tags = [delivery.tag for delivery in worker.grab(2)]
    worker.restore(redis_db, *tags, started=True)
    first, second = worker.grab(2)
    before = Place.parse(worker.entry(second.tag, redis_db))
    assert before == Place(step, 2, 1, "q")
    worker.ask(first.tag)
    worker.ask(second.tag)
    worker.settle(first.tag)
    (again,) = worker.grab()
    assert again[2:] == (step, 1, message("second"))
    assert Place.parse(worker.entry(again.tag, redis_db)) == before


@pytest.mark.parametrize("key", ["acme", None, "a:b:7:"])
@pytest.mark.parametrize("weight", [None, 3, 0.25])
def test_key_and_weight_are_kept(
    caller: Caller, redis_db: redis.Redis, key: str | None, weight: float | None
) -> None:
    headers = {"fair_key": key, "fair_weight": weight}
    headers = {name: value for name, value in headers.items() if value is not None}
    adopt(caller, "q")
    worker = hire(caller, "w", source("q", by_key=True))
    publish(redis_db, "q", ["first", "second", "third"], 2, **headers)
    first, second = worker.grab(2)
    before = worker.entry(second.tag, redis_db)
    worker.ask(first.tag)
    assert worker.ask(second.tag).state == IN_LINE
    worker.settle(first.tag)
    (again,) = worker.grab()
    assert again[2:] == second[2:]
    assert worker.entry(again.tag, redis_db) == before
    assert worker.ask(again.tag).state == HAS_PERMIT
    # It goes before what its key has waiting.
    (third,) = worker.grab()
    assert job_of(third.raw) == "third"
    worker.settle(again.tag, third.tag)
    nothing_is_left(redis_db)
    state: Any = redis_db.hgetall(KEYS.state("q"))
    assert not int(state.get(b"t", 0))


def test_a_job_in_line_is_not_in_flight_for_its_cap(caller: Caller, redis_db: redis.Redis) -> None:
    caller(calls.Store(KEYS, "x").adopt("q", Policy("fair", False, "fair_key", ""), {"*": 1}))
    worker = hire(caller, "w", source("q", by_key=True))
    publish(redis_db, "q", ["a1", "a2"], fair_key="a")
    publish(redis_db, "q", ["b1"], fair_key="b")
    tags = {job_of(delivery.raw): delivery.tag for delivery in worker.grab(9)}
    assert set(tags) == {"a1", "b1"}
    worker.ask(tags["b1"])
    assert worker.ask(tags["a1"]).state == IN_LINE
    (delivery,) = worker.grab(9)
    assert job_of(delivery.raw) == "a2"
    worker.settle(tags["b1"])
    # a1 may run, and its key is full: it waits for that, with its permit.
    assert worker.grab(9) == []
    worker.settle(delivery.tag)
    assert [job_of(d.raw) for d in worker.grab(9)] == ["a1"]


def test_a_queue_that_became_sorted_or_plain_meanwhile(
    caller: Caller, redis_db: redis.Redis
) -> None:
    plain = hire(caller, "w", "q")
    first, second = taken(plain, redis_db, 2)
    plain.ask(first)
    plain.ask(second)
    adopt(caller, "q")
    plain.settle(first)
    worker = hire(caller, "x", source("q", by_key=True))
    (delivery,) = worker.grab()
    assert job_of(delivery.raw) == "job-1"
    assert worker.ask(delivery.tag).state == HAS_PERMIT

    publish(redis_db, "q", ["late"], 4)
    (late,) = worker.grab()
    assert worker.ask(late.tag).state == IN_LINE
    assert admin.unsort_queue(redis_db, KEYS, "other") == 0
    redis_db.delete(KEYS.policy("q"), KEYS.state("q"))
    worker.settle(delivery.tag)
    (again,) = plain.grab()
    assert (job_of(again.raw), again.list) == ("late", 4)


# -- expiry --------------------------------------------------------------------------------------------


def test_a_permit_expires_after_its_duration(worker: Worker, redis_db: redis.Redis) -> None:
    ask = Ask("task:key", 1, 2_000)
    first, second = taken(worker, redis_db, 2)
    worker.ask(first, ask, NOW)
    worker.ask(second, ask, NOW)
    served = worker.caller(worker.store.serve(9, NOW + 1_999_000))
    assert served == [0, 1]
    assert worker.caller(worker.store.renew([first], TTL, NOW + 1_500_000)) == 0
    assert worker.caller(worker.store.serve(9, NOW + 2_000_000)) == [0, 1500]
    assert in_line(redis_db) == ["job-1"]
    assert worker.caller(worker.store.serve(9, NOW + 3_500_000)) == [1, -1]
    assert permits(redis_db) == ["2"]
    # The first still runs: it counts, although that is one too many.
    assert worker.caller(worker.store.renew([first], TTL, NOW + 3_600_000)) == 1
    assert permits(redis_db) == ["2", "1"]
    assert worker.caller(worker.store.renew([first], TTL, NOW + 3_600_000)) == 0


def test_a_permit_that_was_given_up_is_not_renewed(worker: Worker, redis_db: redis.Redis) -> None:
    (tag,) = taken(worker, redis_db, 1)
    worker.ask(tag)
    worker.settle(tag)
    assert worker.caller(worker.store.renew([tag], TTL)) == 0
    nothing_is_left(redis_db)


def test_a_line_moves_on_when_all_holders_died(worker: Worker, redis_db: redis.Redis) -> None:
    tags = taken(worker, redis_db, 6)
    for tag in tags:
        worker.ask(tag, THREE)
    assert worker.caller(worker.store.serve())[0] == 0
    # Whether they expired, or Redis dropped them all.
    expire(redis_db)
    assert worker.caller(worker.store.serve()) == [3, -1]
    assert len(permits(redis_db)) == 3
    assert redis_db.zcard(KEYS.returned("q")) == 3


def test_a_look_is_bounded(worker: Worker, redis_db: redis.Redis) -> None:
    """One call serves so many limits and messages at most; the next look is due at once."""
    tags = taken(worker, redis_db, 64)
    asks = [Ask(f"task:{number % 8}", 1, 1000) for number in range(64)]
    for tag, ask in zip(tags, asks, strict=True):
        worker.ask(tag, ask, NOW)
    assert redis_db.zcard(KEYS.lines) == 8
    later = NOW + 2_000_000
    assert worker.caller(worker.store.serve(3, later)) == [3, 0]
    assert worker.caller(worker.store.serve(3, later)) == [3, 0]
    assert worker.caller(worker.store.serve(3, later))[0] == 2
    assert worker.caller(worker.store.serve(3, later)) == [0, 1000]


def test_a_dead_workers_early_acknowledged_job_gives_its_permit_up_when_it_is_buried(
    worker: Worker, redis_db: redis.Redis
) -> None:
    first, second, third = taken(worker, redis_db, 3)
    worker.ask(first)
    worker.ask(second)
    worker.caller(worker.store.settle([calls.STILL_RUNS + first]))
    redis_db.zadd(KEYS.alive, {"w": 5})
    other = hire(worker.caller, "other", "q")
    assert worker.caller(other.store.bury("w", 5)) == [1, 0, 2]
    assert permits(redis_db) == ["2"]
    assert [job_of(d.raw) for d in other.grab(9)] == ["job-1", "job-2"]
    assert third
    assert redis_db.exists(KEYS.limited("w")) == 0


def test_a_dead_workers_late_job_comes_back_with_its_permit(
    worker: Worker, redis_db: redis.Redis
) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    worker.ask(second)
    redis_db.zadd(KEYS.alive, {"w": 5})
    other = hire(worker.caller, "other", "q")
    worker.caller(other.store.bury("w", 5))
    assert in_line(redis_db) == ["job-1"]
    (delivery,) = other.grab(9)
    assert job_of(delivery.raw) == "job-0"
    assert delivery.deliveries > 0
    assert other.ask(delivery.tag) == Answer(HAS_PERMIT)


# -- looking, purging, unsorting -----------------------------------------------------------------------


def test_what_was_purged_is_passed_over(worker: Worker, redis_db: redis.Redis) -> None:
    tags = taken(worker, redis_db, 60)
    for tag in tags[:59]:
        worker.ask(tag)
    redis_db.delete(KEYS.in_line("q"))
    assert worker.ask(tags[59]).state == IN_LINE
    assert in_line(redis_db) == ["-"] * 58 + ["job-59"]
    worker.settle(tags[0])
    assert in_line(redis_db) == []
    assert [job_of(d.raw) for d in worker.grab(9)] == ["job-59"]


def test_a_long_purged_line_is_passed_over_in_steps(worker: Worker, redis_db: redis.Redis) -> None:
    line = {f'{number},"","q"]': number for number in range(1000, 1500)}
    redis_db.zadd(KEYS.line(ONE.limit), line)
    redis_db.zadd(KEYS.lines, {ONE.limit: 1})
    looks = 0
    while redis_db.exists(KEYS.line(ONE.limit)):
        assert worker.caller(worker.store.serve())[0] == 0
        looks += 1
    assert looks == 8
    nothing_is_left(redis_db)


def test_unsort_finds_what_stands_in_line(caller: Caller, redis_db: redis.Redis) -> None:
    worker = hire(caller, "w", "q")
    publish(redis_db, "q", ["a", "b", "c"], 3)
    publish(redis_db, "q", ["d"], 5)
    a, b, c, d = (delivery.tag for delivery in worker.grab(9))
    for tag in (a, b, d):
        worker.ask(tag)
    worker.restore(redis_db, c)
    publish(redis_db, "q", ["e"], 3)
    assert admin.queues_to_unsort(redis_db, KEYS) == ["q"]
    assert admin.unsort_queue(redis_db, KEYS, "q") == 3
    listed: Any = redis_db.lrange(KEYS.inbox("q", 3), 0, -1)
    assert [job_of(raw) for raw in reversed(listed)] == ["b", "c", "e"]
    assert [job_of(raw) for raw in redis_db.lrange(KEYS.inbox("q", 5), 0, -1)] == ["d"]
    assert admin.queues_to_unsort(redis_db, KEYS) == []
    worker.settle(a)
    nothing_is_left(redis_db)


def test_unsort_finds_sorted_jobs_in_line(caller: Caller, redis_db: redis.Redis) -> None:
    adopt(caller, "q")
    worker = hire(caller, "w", source("q", by_key=True))
    publish(redis_db, "q", ["a", "b", "c"], 2, fair_key="acme:1", fair_weight=2)
    a, b = (delivery.tag for delivery in worker.grab(2))
    worker.ask(a)
    worker.ask(b)
    worker.settle(a)
    (b,) = (delivery.tag for delivery in worker.grab(1))
    publish(redis_db, "q", ["d"], 2, fair_key="acme:1")
    worker.ask(b)
    (c,) = (delivery.tag for delivery in worker.grab(1))
    worker.ask(c)
    assert admin.unsort_queue(redis_db, KEYS, "q") == 2
    listed: Any = redis_db.lrange(KEYS.inbox("q", 2), 0, -1)
    assert [job_of(raw) for raw in reversed(listed)] == ["c", "d"]


def test_a_queue_that_cannot_be_written_stops_its_line_and_no_settle(
    worker: Worker, redis_db: redis.Redis
) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    worker.ask(second)
    redis_db.set(KEYS.returned("q"), "x")
    assert worker.settle(first) == []
    assert in_line(redis_db) == ["job-1"]
    assert permits(redis_db) == []
    served, wait = worker.caller(worker.store.serve())
    assert served == 0
    assert 4000 < wait <= 5000
    redis_db.delete(KEYS.returned("q"))
    redis_db.zadd(KEYS.lines, {ONE.limit: 1})
    assert worker.caller(worker.store.serve()) == [1, -1]


def test_a_limited_set_of_a_wrong_type_stops_no_settle(
    worker: Worker, redis_db: redis.Redis
) -> None:
    (tag,) = taken(worker, redis_db, 1)
    worker.ask(tag)
    redis_db.delete(KEYS.limited("w"))
    redis_db.set(KEYS.limited("w"), "x")
    assert worker.settle(tag) == []
    assert redis_db.hlen(KEYS.unacked) == 0


def test_a_prefix(redis_db: redis.Redis, caller: Caller) -> None:
    keys = calls.Keys(prefix="p:")
    worker = Plain(caller, "w", "q", keys=keys)
    worker.join()
    redis_db.lpush("p:q", message("a"), message("b"))
    a, b = (delivery.tag for delivery in worker.take(2).deliveries)
    for tag in (a, b):
        caller(worker.store.acquire(tag, ONE, TTL))
    caller(worker.store.settle([calls.HAD_PERMIT + a]))
    assert all(key.startswith(b"p:") for key in redis_db.keys("*"))
    assert redis_db.zcard(keys.returned("q")) == 1


@pytest.mark.parametrize("backlog", [1, 5000])
def test_a_long_line_costs_no_more(worker: Worker, redis_db: redis.Redis, backlog: int) -> None:
    first, second = taken(worker, redis_db, 2)
    worker.ask(first)
    numbers = range(10_000, 10_000 + backlog)
    redis_db.zadd(KEYS.line(ONE.limit), {f'{number},"","q"]': number for number in numbers})
    waiting = {b"p0:%d:0:" % number + message(str(number)): number for number in numbers}
    redis_db.zadd(KEYS.in_line("q"), waiting)
    caller = worker.caller
    caller.load()
    redis_db.config_resetstat()
    worker.ask(second)
    worker.settle(first)
    stats: Any = redis_db.info("commandstats")
    assert sum(stat["calls"] for stat in stats.values()) <= 60
