"""A sorted queue, its keys and its workers may be called anything, under any prefix."""

from __future__ import annotations

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import store as calls
from celery_strategies.store.admin import purge_sorted, set_cap, set_weight, unsort_queue
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import HAS_ENDED, STILL_RUNS, Place

from .sorted_scenarios import sorted_source
from .sorted_state import audit, look
from .test_queue_names import NAMES, PREFIXES
from .tools import NOW, Caller, Worker, job_of, jobs, message, push

POLICY = Policy("fair", False, "fair_key", "fair_weight")
KEYS = [*NAMES, "*", "!k*", "k", "0:1:2:", "jobs:0:a", "running:", "ż" * 256]
WORKERS = ["host@wörker:1", "a:b k", "%s{w}", 'w"\\', "w.1k", "wb"]


def life(client: redis.Redis, worker: Worker, queue: str, key: str) -> None:
    """Send a key's jobs every way out of a queue and back."""
    store, keys, caller = worker.store, worker.keys, worker.caller
    raws = [message(f"{n}", queue=queue, fair_key=key, fair_weight=0.3) for n in range(4)]
    push(client, keys.inbox(queue, 0), *raws[:3])
    push(client, keys.inbox(queue, 3), raws[3])
    assert set_cap(client, keys, queue, key, 2) is True
    assert set_weight(client, keys, queue, key, 7) is True

    zero, one = (delivery.tag for delivery in worker.take(9).deliveries)
    assert calls.worker_of(zero) == worker.name
    place = Place.parse(worker.entry(zero, client))
    assert place == Place(0, place.number, 0, queue, key)
    found = look(client, keys, queue)
    assert found.full == {(0, key), (1, key)}
    assert found.running == {key: {zero, one}}
    assert worker.take(9).deliveries == ()

    assert caller(store.settle([STILL_RUNS + zero])) == []
    assert worker.restore(client, one, started=True) == 1
    grant = worker.take(9)
    assert jobs(grant) == ["1"]
    assert grant.deliveries[0].raw == raws[1]
    assert grant.deliveries[0].deliveries == 1
    assert caller(store.settle([HAS_ENDED + zero])) == []

    assert caller(store.requeue(grant.deliveries[0].tag, queue, 0)) == 1
    second = worker.take(9)
    assert jobs(second) == ["2", "1"]
    two, one = (delivery.tag for delivery in second.deliveries)
    assert caller(store.delay(two, queue, NOW / 1e6)) == 1
    assert caller(store.promote(queue, now=NOW + 1000)) == 1
    assert caller(store.set_aside(one, queue, "why"))
    assert set_cap(client, keys, queue, key, None) is True
    assert set_weight(client, keys, queue, key, None) is True
    assert audit(client, keys, queue) == []

    worker.sort(worker.sources[0])
    assert unsort_queue(client, keys, queue) == 2
    worker.adopt(queue, POLICY, {"nobody": 9})
    third = worker.take(9)
    assert jobs(third) == ["2", "3"]
    assert [calls.is_counted(delivery.tag) for delivery in third.deliveries] == [True, True]
    worker.restore(client, *(delivery.tag for delivery in third.deliveries))
    assert purge_sorted(client, keys, queue) == 2
    assert audit(client, keys, queue) == []
    ((_, fields),) = client.xrange(keys.set_aside(queue))
    assert job_of(fields[b"message"]) == "1"


def a_worker(caller: Caller, queue: str, name: str = "w", prefix: str = "") -> Worker:
    worker = Worker(caller, name, sorted_source(queue), keys=Keys(prefix=prefix))
    worker.join()
    worker.adopt(queue, POLICY, {"nobody": 9})
    return worker


def _short(text: str) -> str:
    return repr(text)[:30]


@pytest.mark.parametrize("prefix", PREFIXES, ids=_short)
@pytest.mark.parametrize("queue", NAMES, ids=_short)
def test_queues(redis_db: redis.Redis, caller: Caller, queue: str, prefix: str) -> None:
    worker = a_worker(caller, queue, prefix=prefix)
    # Beside one of a similar name.
    other = Worker(caller, "x", sorted_source(queue + ":"), keys=worker.keys)
    other.join()
    other.adopt(queue + ":", POLICY)
    push(redis_db, worker.keys.inbox(queue + ":", 0), message("other", fair_key="k"))
    other.sort(other.sources[0])
    life(redis_db, worker, queue, "k")
    assert all(name.decode().startswith(prefix) for name in redis_db.scan_iter())
    assert jobs(other.take(9)) == ["other"]


# For an operator, * is every key: a tenant of that name cannot have a cap of its own.
@pytest.mark.parametrize("key", [key for key in KEYS if key != "*"], ids=_short)
def test_keys(redis_db: redis.Redis, caller: Caller, key: str) -> None:
    life(redis_db, a_worker(caller, "q"), "q", key)


@pytest.mark.parametrize("name", WORKERS, ids=_short)
def test_workers(redis_db: redis.Redis, caller: Caller, name: str) -> None:
    life(redis_db, a_worker(caller, "q", name), "q", "k")


def test_keys_are_never_confused_with_each_other(redis_db: redis.Redis, caller: Caller) -> None:
    worker = a_worker(caller, "q")
    for key in KEYS:
        push(redis_db, "q", message(key, fair_key=key))
    grant = worker.take(64)
    assert jobs(grant) == KEYS
    worker.restore(redis_db, *(delivery.tag for delivery in grant.deliveries))
    assert audit(redis_db, worker.keys, "q") == []
    assert jobs(worker.take(64)) == KEYS
