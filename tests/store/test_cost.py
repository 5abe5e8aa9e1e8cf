"""What one call costs the server, in Redis commands: counts, which no machine can change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from celery_strategies.core.strategies import Strategy
from celery_strategies.store import store as calls

from .tools import NOW, STALE, Caller, Worker, message, push, source

SOURCES = 50
LEVELS = 3
#: Commands of the clients of this test, not of the scripts.
OUTSIDE = {
    "evalsha",
    "info",
    "script|load",
    "script",
    "hello",
    "select",
    "client",
    "config|resetstat",
    "config",
}


def commands(client: redis.Redis, action: Callable[[], object]) -> dict[str, int]:
    """Return how often the server executed each command inside *action*'s scripts."""
    client.config_resetstat()
    action()
    stats = client.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
    return {name: count for name, count in counts.items() if name not in OUTSIDE}


@pytest.fixture(params=Strategy, ids=lambda strategy: strategy.label)
def fleet(request: pytest.FixtureRequest, caller: Caller) -> Worker:
    """A worker with 50 sources of three levels."""
    sources = [source(f"queue-{n}", LEVELS, range(LEVELS)) for n in range(SOURCES)]
    worker = Worker(caller, "w", *sources, strategy=request.param)
    worker.join()
    caller.load()
    return worker


def fill(client: redis.Redis, worker: Worker) -> None:
    """Put two messages into every list."""
    for entry in worker.sources:
        for step in entry.lists:
            push(client, worker.keys.inbox(entry.queue, step), message("a"), message("b"))


def test_an_empty_take(fleet: Worker, redis_db: redis.Redis) -> None:
    counts = commands(redis_db, lambda: fleet.take(1))
    assert sum(counts.values()) <= SOURCES + 10


def test_a_take_for_one_slot(fleet: Worker, redis_db: redis.Redis) -> None:
    fill(redis_db, fleet)
    counts = commands(redis_db, lambda: fleet.take(1))
    measured = 1 if fleet.strategy in {Strategy.PRIORITY, Strategy.ROUND_ROBIN} else SOURCES
    assert sum(counts.values()) <= measured * (1 + LEVELS) + 20
    assert sum(counts.values()) <= 300


def test_a_take_for_64_slots_costs_few_more(fleet: Worker, redis_db: redis.Redis) -> None:
    fill(redis_db, fleet)
    one = sum(commands(redis_db, lambda: fleet.take(1)).values())
    many = commands(redis_db, lambda: fleet.take(64))
    assert many["lindex"] == 64
    # A read for each message; a trim and a wake for each source at most.
    assert sum(many.values()) <= one + 64 + (1 + LEVELS) * SOURCES + LEVELS * SOURCES + SOURCES + 20


def test_a_woken_idle_worker_that_is_full(fleet: Worker, redis_db: redis.Redis) -> None:
    fill(redis_db, fleet)
    queues = [entry.queue for entry in fleet.sources]
    fleet.caller(fleet.store.watch(queues, watchers=2, stale=STALE, now=NOW))
    redis_db.set("strategies:wake:w", "1")
    counts = commands(redis_db, lambda: fleet.take(1, idle=True))
    assert sum(counts.values()) <= 10 * SOURCES + 20


def test_the_backlog_is_never_scanned(caller: Caller, redis_db: redis.Redis) -> None:
    worker = Worker(caller, "w", "q")
    worker.join()
    caller.load()
    counts = []
    for backlog in (10, 2000):
        redis_db.lpush("q", *(message(f"{n}") for n in range(backlog)))
        counts.append(commands(redis_db, lambda: worker.take(8)))
    assert counts[0] == counts[1]


def test_returned_messages_cost_a_look_at_each_list_at_most(
    caller: Caller, redis_db: redis.Redis
) -> None:
    worker = Worker(caller, "w", source("q", 2))
    worker.join()
    caller.load()
    push(redis_db, "q", *(message(f"{n}") for n in range(64)))
    tags = [delivery.tag for delivery in worker.take(64).deliveries]
    worker.restore(redis_db, *tags)
    counts = commands(redis_db, lambda: worker.take(64))
    assert counts["zrangebyscore"] <= 10 + 64
    assert counts["zrem"] == 1


@pytest.mark.parametrize("number", [1, 64, calls.TAG_LIMIT])
def test_settling_costs_the_same_for_any_number(
    caller: Caller, redis_db: redis.Redis, number: int
) -> None:
    worker = Worker(caller, "w", "q")
    caller.load()
    tags = [f"w:1.{n}" for n in range(number)]
    counts = commands(redis_db, lambda: caller(worker.store.settle(tags)))
    assert counts == {"del": 1, "zmscore": 1, "hdel": 2, "zrem": 1}
