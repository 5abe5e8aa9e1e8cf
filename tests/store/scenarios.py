"""Own one call of every script that has all its effects, for what must hold of each of them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import redis

from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys

from .tools import NOW, STALE, TTL, Caller, Worker, message, push

BAD = b"{not json"


@dataclass(frozen=True)
class Scenario:
    """*seed* prepares, by whoever may do all; *call* returns the packed call under test.

    *moves*: the messages of the seed must all be somewhere after the call, however far it came.
    """

    name: str
    seed: Callable[[redis.Redis, Worker], object]
    call: Callable[[redis.Redis, Worker], bytes]
    moves: bool = True
    writes: bool = True

    def __str__(self) -> str:
        return self.name


def worker_for(caller: Caller, queue: str = "q", keys: Keys = Keys()) -> Worker:  # noqa: B008  # immutable
    """Return the worker of the scenarios."""
    return Worker(caller, "w", queue, keys=keys)


def queue_of(worker: Worker) -> str:
    """Return the queue of the scenarios."""
    return worker.sources[0].queue


def messages(worker: Worker) -> list[bytes]:
    """Return the three good messages of the seed."""
    return [message(f"job-{number}", queue=queue_of(worker)) for number in (1, 2, 3)]


def _taken(client: redis.Redis, worker: Worker) -> None:
    worker.join()
    push(client, worker.keys.inbox(queue_of(worker), 3), *messages(worker))
    assert len(worker.take(3).deliveries) == 3


def _returned(client: redis.Redis, worker: Worker) -> None:
    _taken(client, worker)
    worker.restore(client, *_tags(client, worker))


def _mixed(client: redis.Redis, worker: Worker) -> None:
    """One message given back, a good one in each of two lists, a bad one, and two parked workers."""
    queue, keys = queue_of(worker), worker.keys
    first, second, third = messages(worker)
    worker.join()
    push(client, keys.inbox(queue, 0), first)
    worker.restore(client, worker.take_one())
    push(client, keys.inbox(queue, 0), BAD, second)
    push(client, keys.inbox(queue, 2), third, message("left-behind", queue=queue))
    for name in ("x", "y", "z", "v"):
        other = Worker(worker.caller, name, queue, keys=keys)
        worker.caller(other.store.watch([queue], watchers=1, stale=STALE, now=NOW))
    worker.caller(worker.store.watch([queue], watchers=9, stale=STALE, now=NOW))
    client.set(keys.wake(worker.name), "1", px=30_000)


def _tags(client: redis.Redis, worker: Worker) -> list[str]:
    return sorted(tag.decode() for tag in client.hkeys(worker.keys.holder(worker.name)) if tag)


def _items(client: redis.Redis, worker: Worker) -> list[tuple[str, bytes]]:
    return [(tag, worker.entry(tag, client)) for tag in _tags(client, worker)]


def _watching(client: redis.Redis, worker: Worker) -> None:
    queue = queue_of(worker)
    worker.caller(worker.store.watch([queue], watchers=1, stale=STALE, now=NOW))
    other = Worker(worker.caller, "x", queue, keys=worker.keys)
    worker.caller(other.store.watch([queue], watchers=1, stale=STALE, now=NOW))
    client.set(worker.keys.wake(worker.name), "1", px=30_000)


def _one_at_a_time(client: redis.Redis, worker: Worker) -> None:
    """Three messages are held, one has the only permit of a limit."""
    _taken(client, worker)
    worker.caller(worker.store.acquire(_tags(client, worker)[0], ASK, TTL, NOW))


def _in_line(client: redis.Redis, worker: Worker) -> None:
    """One has the only permit, one waits in line."""
    _one_at_a_time(client, worker)
    worker.caller(worker.store.acquire(_tags(client, worker)[1], ASK, TTL, NOW))


#: One permit, for a second.
ASK = calls.Ask("limit:key", 1, 1000)

SCENARIOS = [
    Scenario("take", _mixed, lambda _, w: w.pack_take(3, idle=True)),
    Scenario("settle", _taken, lambda c, w: w.store.settle(_tags(c, w)), moves=False),
    Scenario("restore", _taken, lambda c, w: w.store.restore(_items(c, w), started=True)),
    Scenario("requeue", _taken, lambda c, w: w.store.requeue(_tags(c, w)[0], queue_of(w), 3)),
    Scenario(
        "set_aside", _taken, lambda c, w: w.store.set_aside(_tags(c, w)[0], queue_of(w), "why")
    ),
    Scenario("join", _taken, lambda _, w: w.store.join("2", TTL)),
    Scenario("leave", lambda _, w: w.join(), lambda _, w: w.store.leave()),
    Scenario("refresh", _taken, lambda c, w: w.store.refresh(_tags(c, w), TTL, NOW + 1)),
    Scenario(
        "expired", _taken, lambda _, w: w.store.expired(1.5, 9, NOW + 2_000_000), writes=False
    ),
    Scenario(
        "watch",
        _watching,
        lambda _, w: w.store.watch([queue_of(w)], watchers=2, stale=STALE, now=NOW + 1000),
    ),
    Scenario("unwatch", _watching, lambda _, w: w.store.unwatch([queue_of(w)])),
    Scenario("unsort", _returned, lambda _, w: calls.unsort(w.keys, queue_of(w))),
    Scenario(
        "acquire",
        _one_at_a_time,
        lambda c, w: w.store.acquire(_tags(c, w)[1], ASK, TTL, NOW),
    ),
    Scenario(
        "renew",
        _one_at_a_time,
        lambda c, w: w.store.renew(_tags(c, w)[:1], TTL, NOW + 500_000),
    ),
    Scenario("serve", _in_line, lambda _, w: w.store.serve(9, NOW + 2_000_000)),
    Scenario(
        "disperse",
        _in_line,
        lambda _, w: calls.evalsha(
            scripts.DISPERSE,
            [w.keys.scratch, w.keys.in_line(queue_of(w)), w.keys.returned(queue_of(w))],
            9,
        ),
    ),
]
