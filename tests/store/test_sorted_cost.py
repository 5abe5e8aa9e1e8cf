"""What one call of a sorted queue costs, in Redis commands: the same for few keys and many, and bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.admin import PURGE_KEYS

from .sorted_scenarios import sorted_source
from .test_cost import commands
from .tools import NOW, Caller, Worker, message, push

POLICY = Policy("fair", False, "fair_key", "fair_weight")
GROUPS = Policy("turn", True, "fair_key", "")
BODY = ""
MEGABYTE = "x" * 1_000_000


def total(client: redis.Redis, action: Callable[[], object]) -> int:
    """Return how many commands *action*'s scripts executed."""
    return sum(commands(client, action).values())


class Queue:
    """A sorted queue with some jobs of each of some keys."""

    def __init__(
        self, client: redis.Redis, caller: Caller, keys: int, each: int, policy: Policy = POLICY, **caps: int
    ) -> None:  # fmt: skip
        client.flushall()
        self.client, self.caller = client, caller
        self.worker = Worker(caller, "w", sorted_source("q", None))
        self.worker.join()
        caller.load()
        self.worker.adopt("q", policy, caps)
        self.keys = keys
        for _ in range(each):
            self.publish(range(keys))
        self.worker.sort(self.worker.sources[0])

    def publish(self, keys: range, **headers: Any) -> None:
        raws = [message("j", body=BODY, fair_key=f"k{key}", **headers) for key in keys]
        for start in range(0, len(raws), 1000):
            self.client.lpush("q", *raws[start : start + 1000])

    def take(self, n: int, tags: list[str] | None = None) -> list[str]:
        grant = self.worker.take(n, tags=tags or [])
        assert len(grant.deliveries) == n
        return [delivery.tag for delivery in grant.deliveries]

    def items(self, tags: list[str]) -> list[tuple[str, bytes]]:
        return [(tag, self.worker.entry(tag, self.client)) for tag in tags]

    def admin(self, script: scripts.Script, *argv: Any) -> Any:
        keys = self.worker.keys
        names = {
            scripts.GATHER: [keys.scratch, keys.policy("q"), keys.unsorted("q")],
            scripts.PURGE: [keys.scratch, keys.policy("q")],
        }[script]
        return self.caller(calls.evalsha(script, names, *argv))


#: What each call does, and the most commands that it may take whatever waits.
CALLS: dict[str, tuple[int, Callable[[Queue], Callable[[], object]]]] = {
    "take 1": (30, lambda q: lambda: q.take(1)),
    "take 64": (30 + 5 * 64, lambda q: lambda: q.take(64)),
    "take 1, settle 1": (40, lambda q: _then(q.take(1), lambda tags: q.take(1, tags))),
    "settle 64": (
        10 + 5 * 64,
        lambda q: _then(q.take(64), lambda tags: q.caller(q.worker.store.settle(tags))),
    ),
    "restore 64": (
        20 + 30 * 64,
        lambda q: _then(q.items(q.take(64)), lambda items: q.caller(q.worker.store.restore(items))),
    ),
    "sort a call's worth": (
        30 + 9 * calls.SORT_LIMIT,
        lambda q: _then(
            q.publish(range(q.keys, q.keys + 2 * calls.SORT_LIMIT)),
            lambda _: q.caller(q.worker.store.sort(q.worker.sources[0], NOW)),
        ),
    ),
    "sort more of the same keys": (
        30 + 9 * calls.SORT_LIMIT,
        lambda q: _then(
            [q.publish(range(min(q.keys, 100))) for _ in range(9)],
            lambda _: q.caller(q.worker.store.sort(q.worker.sources[0], NOW)),
        ),
    ),
    "take 1 beside a backlog": (
        60 + 9 * 16,
        lambda q: _then(q.publish(range(2000)), lambda _: q.take(1)),
    ),
    "take 1 that sorts what is new": (
        60 + 9 * 256,
        lambda q: _then(q.publish(range(100)), lambda _: q.take(1)),
    ),
    "weight": (
        60,
        lambda q: lambda: q.caller(calls.steer(q.worker.keys, "q", "weights", "!kk1", "3")),
    ),
    "cap": (60, lambda q: lambda: q.caller(calls.steer(q.worker.keys, "q", "caps", "!kk1", "3"))),
    "cap of all": (
        20 + 64 * 70,
        lambda q: lambda: q.caller(calls.steer(q.worker.keys, "q", "caps", "!*", "9")),
    ),
    "look at the full keys": (
        20 + 64 * 70,
        lambda q: lambda: q.caller(calls.steer(q.worker.keys, "q", "caps", "")),
    ),
    "adopt": (12, lambda q: lambda: q.worker.adopt("q", POLICY)),
    "gather": (80 + 6 * 64, lambda q: lambda: q.admin(scripts.GATHER, 64)),
    "purge": (60 + 7 * 2 * PURGE_KEYS, lambda q: lambda: q.admin(scripts.PURGE, PURGE_KEYS)),
    "due": (5, lambda q: lambda: q.caller(q.worker.store.due(["q"], NOW))),
}


def _then(before: Any, action: Callable[[Any], object]) -> Callable[[], object]:
    return lambda: action(before)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_costs_the_same_with_few_keys_and_with_many(
    name: str, redis_db: redis.Redis, caller: Caller
) -> None:
    most, make = CALLS[name]
    counts = []
    for keys in (100, 3000):
        queue = Queue(redis_db, caller, keys, 2)
        counts.append(total(redis_db, make(queue)))
    assert counts[1] <= most
    assert abs(counts[1] - counts[0]) <= 3


@pytest.mark.parametrize("full", [10, 2000])
def test_nor_does_it_depend_on_how_many_keys_are_full(
    full: int, redis_db: redis.Redis, caller: Caller
) -> None:
    queue = Queue(redis_db, caller, full, 2, GROUPS)
    while (grant := queue.worker.take(64)).deliveries:
        tags = [delivery.tag for delivery in grant.deliveries]
    assert redis_db.scard(f"{queue.worker.keys.base('q')}full") == full
    # Nothing may run.
    assert total(redis_db, lambda: queue.worker.take(1)) <= 40
    # One ends, and the next of its key may.
    assert total(redis_db, lambda: queue.take(1, tags[:1])) <= 60
    assert total(redis_db, lambda: caller(queue.worker.store.settle(tags[1:2]))) <= 40
    steer = calls.steer(queue.worker.keys, "q", "caps", "")
    assert total(redis_db, lambda: caller(steer)) <= 20 + 100 * 10
    assert total(redis_db, lambda: queue.admin(scripts.GATHER, 64)) <= 20 + 64 * 40
    assert total(redis_db, lambda: queue.admin(scripts.PURGE, PURGE_KEYS)) <= 60 + 14 * PURGE_KEYS


def test_a_rebase_moves_some_keys_a_call(redis_db: redis.Redis, caller: Caller) -> None:
    queue = Queue(redis_db, caller, 3000, 3)
    redis_db.hset(queue.worker.keys.policy("q"), "rebase", 1)
    queue.take(1)
    old = f"{queue.worker.keys.base('q')}old:0"
    assert redis_db.zcard(old) == 3000
    worst = max(total(redis_db, lambda: queue.take(1)) for _ in range(60))
    assert worst <= 30 + 64 * 3
    assert not redis_db.exists(old)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_thousand_keys_and_a_hundred_thousand_jobs(
    redis_db: redis.Redis, caller: Caller
) -> None:
    queue = Queue(redis_db, caller, 20_000, 5)
    assert redis_db.hget(queue.worker.keys.state("q"), "t") == b"100000"
    for name, (most, make) in CALLS.items():
        action = make(queue)
        count = total(redis_db, action)
        spent = redis_db.info("commandstats")["cmdstat_evalsha"]["usec"]
        print(f"{name}: {count} commands, {spent / 1000:.2f} ms")  # noqa: T201
        assert count <= most, name


# -- bytes --------------------------------------------------------------------------------------


@pytest.fixture
def heavy(redis_db: redis.Redis, caller: Caller) -> Worker:
    """A worker of a sorted queue; whatever waits there has a body of a megabyte."""
    worker = Worker(caller, "w", sorted_source("q", None))
    worker.join()
    worker.adopt("q", POLICY)
    return worker


def push_heavy(client: redis.Redis, count: int, body: str = MEGABYTE) -> None:
    push(client, "q", *(message(f"{n}", body=body, fair_key=f"k{n % 3}") for n in range(count)))


def test_a_call_sorts_one_megabyte_at_a_time(redis_db: redis.Redis, heavy: Worker) -> None:
    push_heavy(redis_db, 5)
    left = [heavy.caller(heavy.store.sort(heavy.sources[0], NOW))[0] for _ in range(5)]
    assert left == [4, 3, 2, 1, 0]


def test_a_call_sorts_some_hundred_kilobytes(redis_db: redis.Redis, heavy: Worker) -> None:
    push_heavy(redis_db, 60, "x" * 30_000)
    left = heavy.caller(heavy.store.sort(heavy.sources[0], NOW))[0]
    assert 60 - left == pytest.approx(calls.SORT_BYTES / 30_400, abs=2)
    # What is read too many is no more than fits.
    counts = commands(redis_db, lambda: heavy.caller(heavy.store.sort(heavy.sources[0], NOW)))
    assert counts["lrange"] <= 6


def test_a_take_sorts_no_more_than_it_needs_of_large_ones(
    redis_db: redis.Redis, heavy: Worker
) -> None:
    push_heavy(redis_db, 9)
    assert len(heavy.take(1).deliveries) == 1
    assert redis_db.llen("q") == 8
    grant = heavy.take(4)
    # As from a plain queue: until they are a megabyte together.
    assert len(grant.deliveries) <= 2
    assert redis_db.llen("q") >= 6


def test_what_was_given_back_unsorted_is_sorted_one_megabyte_at_a_time(
    redis_db: redis.Redis, heavy: Worker
) -> None:
    for number in range(4):
        raw = message(f"{number}", body=MEGABYTE, fair_key="a")
        redis_db.zadd(heavy.keys.returned("q"), {f"0:{number}:0:".encode() + raw: number})
    left = [heavy.caller(heavy.store.sort(heavy.sources[0], NOW))[0] for _ in range(4)]
    assert left == [3, 2, 1, 0]


def test_unsorting_moves_one_megabyte_at_a_time(redis_db: redis.Redis, heavy: Worker) -> None:
    push_heavy(redis_db, 4)
    heavy.sort(heavy.sources[0])
    keys = heavy.keys
    names = [keys.scratch, keys.policy("q"), keys.unsorted("q")]
    gather = calls.evalsha(scripts.GATHER, names, 64)
    assert [heavy.caller(gather) for _ in range(5)] == [1, 1, 1, 1, -1]
    assert [heavy.caller(calls.unsort(keys, "q")) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_long_lists_are_not_read_by_range(redis_db: redis.Redis, caller: Caller) -> None:
    """Redis 6.2 walks to where an LRANGE begins from the head: milliseconds, behind a million messages."""
    queue = Queue(redis_db, caller, keys=1, each=0)
    for _ in range(3):
        queue.publish(range(1000))
    source = queue.worker.sources[0]
    asked = commands(redis_db, lambda: queue.caller(queue.worker.store.sort(source)))
    assert asked["lindex"] == calls.SORT_LIMIT
    assert "lrange" not in asked
    # A whale: one key with a long list of its own.
    queue = Queue(redis_db, caller, keys=1, each=2000)
    asked = commands(redis_db, lambda: queue.take(4))
    assert asked["lindex"] > 0
    assert "lrange" not in asked
