"""A Redis whose memory is full can be emptied, sorted queues too; only sorting ahead of need is refused, and told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import store as calls
from celery_strategies.store.admin import purge_sorted

from .sorted_scenarios import sorted_source
from .sorted_state import audit
from .tools import NOW, SECONDS, Caller, Worker, everywhere, job_of, jobs, keyspace, message, push

FAIR = Policy("fair", False, "fair_key", "fair_weight")
GROUPS = Policy("age", True, "fair_key", "")


@pytest.fixture
def full(redis_factory: Any) -> Iterator[redis.Redis]:
    """A client whose server's memory can be declared full."""
    with redis_factory(config={"maxmemory-policy": "noeviction"}).client() as client:
        yield client


@pytest.fixture
def caller(full: redis.Redis) -> Iterator[Caller]:
    caller = Caller(full)
    yield caller
    caller.close()


def fill(client: redis.Redis) -> None:
    """Declare the memory full."""
    client.config_set("maxmemory", "1")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.lpush("q", b"more")


def a_worker(client: redis.Redis, caller: Caller, policy: Policy, **caps: int) -> Worker:
    worker = Worker(caller, "w", sorted_source("q", None))
    worker.join()
    worker.adopt("q", policy, caps)
    names = [(f"{n}", "abc"[n % 3]) for n in range(500)]
    push(client, "q", *(message(name, fair_key=key, fair_weight=0.7) for name, key in names))
    return worker


@pytest.mark.parametrize("policy", [FAIR, GROUPS], ids=["fair", "groups"])
@pytest.mark.parametrize("sort_first", [True, False], ids=["sorted", "a backlog to sort"])
@pytest.mark.parametrize("caps", [{}, {"a": 2, "*": 1}], ids=["no caps", "caps"])
def test_a_worker_empties_a_sorted_queue(
    full: redis.Redis, caller: Caller, policy: Policy, sort_first: bool, caps: dict[str, int]
) -> None:
    worker = a_worker(full, caller, policy, **caps)
    if sort_first:
        worker.sort(worker.sources[0])
    fill(full)
    done: list[str] = []
    tags: list[str] = []
    for _ in range(1000):
        grant = worker.take(5, tags=tags)
        assert not grant.lost
        assert not grant.broken
        done += jobs(grant)
        tags = [delivery.tag for delivery in grant.deliveries]
        if not (tags or grant.more):
            break
    assert sorted(map(int, done)) == list(range(500))
    caller(worker.store.leave())
    left = keyspace(full).keys() - {worker.keys.caps("q")}
    assert left == {"strategies:sequence", worker.keys.policy("q")}


def test_a_take_sorts_only_what_it_needs(full: redis.Redis, caller: Caller) -> None:
    worker = a_worker(full, caller, FAIR)
    full.ltrim("q", 0, 199)
    fill(full)
    assert len(worker.take(3).deliveries) == 3
    # With memory left, it would have sorted them all.
    assert full.llen("q") == 197
    assert audit(full, worker.keys, "q") == []


def test_the_sorter_is_refused_and_told_why(full: redis.Redis, caller: Caller) -> None:
    worker = a_worker(full, caller, FAIR)
    fill(full)
    before = keyspace(full)
    with pytest.raises(redis.ResponseError, match=r"OOM|maxmemory"):
        worker.sort(worker.sources[0])
    assert keyspace(full) == before
    full.config_set("maxmemory", "0")
    assert worker.sort(worker.sources[0]) == []
    assert not full.exists("q")


def test_what_is_held_can_go_wherever_it_has_to(full: redis.Redis, caller: Caller) -> None:
    worker = a_worker(full, caller, FAIR, a=9)
    worker.sort(worker.sources[0])
    tags = [delivery.tag for delivery in worker.take(8).deliveries]
    every = sorted(everywhere(full))
    full.zadd(worker.keys.alive, {"w": 5})
    fill(full)
    store = worker.store
    assert worker.restore(full, tags[0], tags[1]) == 2
    assert caller(store.requeue(tags[2], "q", 0)) == 1
    assert caller(store.delay(tags[3], "q", SECONDS + 1)) == 1
    assert caller(store.set_aside(tags[4], "q", "why"))
    assert caller(store.settle([calls.STILL_RUNS + tags[5]])) == []
    assert caller(store.settle([calls.HAS_ENDED + tags[5]])) == []
    assert caller(store.settle([tags[6]])) == []
    assert caller(store.bury("w", 5)) == [1, 0, 1]
    assert caller(store.promote("q", now=NOW + 2_000_000)) == 1
    assert len(everywhere(full)) == len(every) - 2
    assert audit(full, worker.keys, "q") == []


def test_an_operator_can_purge(full: redis.Redis, caller: Caller) -> None:
    worker = a_worker(full, caller, FAIR)
    worker.sort(worker.sources[0])
    fill(full)
    # The server has the script already, as where workers run: loading one is refused.
    assert purge_sorted(full, worker.keys, "q") == 500
    assert audit(full, worker.keys, "q") == []


def test_bad_messages_leave_the_way_free(full: redis.Redis, caller: Caller) -> None:
    worker = a_worker(full, caller, FAIR)
    full.delete("q")
    push(full, "q", *[b"{bad"] * 10, message("good", fair_key="a"))
    fill(full)
    grant = worker.take(2)
    while not grant.deliveries:
        assert grant.more
        grant = worker.take(2)
    assert [job_of(delivery.raw) for delivery in grant.deliveries] == ["good"]
    assert full.xlen(worker.keys.set_aside("q")) == 10
