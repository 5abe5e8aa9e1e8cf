"""Own calls of the scripts that meet sorted and delayed jobs, in the same form as `scenarios`."""

from __future__ import annotations

import json
from typing import Any

import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.store import HAS_ENDED, STILL_RUNS, SourceKeys

from .scenarios import BAD, Scenario, queue_of
from .tools import NOW, STALE, TTL, Worker, message, push, tagged

POLICY = Policy("fair", False, "fair_key", "fair_weight")
#: Microseconds: long after all that is delayed is due.
LATER = NOW + 10**12
SOON = "2023-11-14T22:15:00+00:00"


def sorted_source(queue: str, levels: int | None = 2) -> SourceKeys:
    """Return a source whose jobs are sorted."""
    return SourceKeys(queue, levels, tuple(range(10)), True)


def job(name: str, worker: Worker, key: str = "", weight: float = 1.0, **headers: Any) -> bytes:
    """Return a message of a key."""
    return message(name, queue=queue_of(worker), **tagged(POLICY, key, weight), **headers)


def _adopt(client: redis.Redis, worker: Worker, **caps: int) -> str:
    queue = queue_of(worker)
    worker.read(sorted_source(queue))
    worker.join()
    worker.adopt(queue, POLICY, caps)
    # A level counts from zero again after two jobs.
    client.hset(worker.keys.policy(queue), "rebase", 2)
    return queue


def _take(client: redis.Redis, worker: Worker, count: int) -> list[str]:
    """Take and return the tags in the order of the jobs."""
    return [delivery.tag for delivery in worker.take(count).deliveries]


def _waiting(client: redis.Redis, worker: Worker, **caps: int) -> None:
    """Three keys with jobs on two levels, with weights of all kinds."""
    queue = _adopt(client, worker, **caps)
    inbox = worker.keys.inbox
    some = [("a", 1.0), ("b", 0.3), ("", 1.0), ("a", 1.0), ("b", 0.3), ("b", 0.3), ("a", 3.0)]
    names = ["job-1", "job-2", "more-1", "job-3", "more-2", "more-3", "more-4"]
    for name, (key, weight) in zip(names, some, strict=True):
        push(client, inbox(queue, 0), job(name, worker, key, weight))
    push(client, inbox(queue, 1), job("more-5", worker, "a"), job("more-6", worker, "c"))
    worker.sort(worker.sources[0])


def _capped(client: redis.Redis, worker: Worker) -> None:
    """One job of *a* runs, acknowledged, which is all that may; the rest waits."""
    queue = _adopt(client, worker, a=1)
    push(client, worker.keys.inbox(queue, 0), job("done", worker, "a"))
    (tag,) = _take(client, worker, 1)
    worker.caller(worker.store.settle([STILL_RUNS + tag]))
    _waiting(client, worker, a=1)


def _counted(client: redis.Redis, worker: Worker) -> list[str]:
    """Return the tags of the capped jobs of this worker."""
    tags = client.hkeys(worker.keys.holder(worker.name))
    return [tag.decode() for tag in tags if tag.endswith(b"k")]


def _mixed(client: redis.Redis, worker: Worker) -> None:
    """All that a take can meet: given back, new, bad, not due, full, and idle workers to wake."""
    _capped(client, worker)
    queue, keys = queue_of(worker), worker.keys
    (tag,) = _take(client, worker, 1)
    place = worker.entry(tag, client)
    member = f"1:{9}:0:".encode() + job("back-1", worker, "b")
    worker.caller(worker.store.restore([(tag, place)], started=True))
    client.zadd(keys.returned(queue), {member: 2**47 + 9})
    eta = job("later-1", worker, "b", eta=SOON)
    push(client, keys.inbox(queue, 0), BAD, job("new-1", worker, "c", 0.7), eta)
    push(client, keys.inbox(queue, 7), job("new-2", worker, "d"))
    for name in ("x", "y"):
        other = Worker(worker.caller, name, queue, keys=keys)
        worker.caller(other.store.watch([queue], watchers=1, stale=STALE, now=NOW))


def _held(client: redis.Redis, worker: Worker) -> None:
    """Some of *a*, as many as may run, and all of the others are held; the rest of *a* waits."""
    _waiting(client, worker, a=2)
    _take(client, worker, 9)


def _items(client: redis.Redis, worker: Worker) -> list[tuple[str, bytes]]:
    entries = client.hgetall(worker.keys.holder(worker.name))
    return [(tag.decode(), entry) for tag, entry in sorted(entries.items()) if tag]


def _first(client: redis.Redis, worker: Worker) -> str:
    return _counted(client, worker)[0]


def _inbox(client: redis.Redis, worker: Worker) -> None:
    """New messages only, enough for each effect of sorting."""
    _capped(client, worker)
    queue, keys = queue_of(worker), worker.keys
    member = b"0:9:0:" + job("back-1", worker, "b")
    client.zadd(keys.returned(queue), {member: 9})
    eta = job("later-1", worker, "b", eta=SOON)
    new = [job(f"new-{n}", worker, key) for n, key in enumerate(["a", "c", "d", "c"])]
    push(client, keys.inbox(queue, 0), BAD, *new, eta)
    push(client, keys.inbox(queue, 1), job("new-9", worker, "b", 0.3))


def _delayed(client: redis.Redis, worker: Worker) -> None:
    """Messages that wait for their time, and one that waits for a rate limit."""
    _waiting(client, worker)
    queue = queue_of(worker)
    tags = _take(client, worker, 3)
    for number, tag in enumerate(tags):
        worker.caller(worker.store.delay(tag, queue, NOW / 1e6 + 60 + number, limited=number == 0))


def _beating(client: redis.Redis, worker: Worker) -> None:
    _held(client, worker)
    client.zadd(worker.keys.alive, {worker.name: 5})


def _dead(client: redis.Redis, worker: Worker) -> None:
    """A message that outlived too many workers, beside others."""
    _waiting(client, worker)
    fields = {"reason": "why", "list": "1", "message": job("dead-1", worker, "a")}
    client.xadd(worker.keys.dead(queue_of(worker)), fields, id="1-1")


def _unsorted(client: redis.Redis, worker: Worker) -> None:
    _mixed(client, worker)
    for _ in range(2):
        worker.caller(_gather(worker))


def _gather(worker: Worker, *strays: str, count: int = 9) -> bytes:
    queue, keys = queue_of(worker), worker.keys
    names = [keys.scratch, keys.policy(queue), keys.unsorted(queue)]
    return calls.evalsha(scripts.GATHER, names, count, *strays)


def _purge(worker: Worker) -> bytes:
    return calls.evalsha(
        scripts.PURGE, [worker.keys.scratch, worker.keys.policy(queue_of(worker))], 50
    )


def _lost_index(client: redis.Redis, worker: Worker) -> None:
    """Somebody removed an index, and with it the only word of where jobs are."""
    _waiting(client, worker)
    keys, queue = worker.keys, queue_of(worker)
    client.delete(f"{keys.base(queue)}index:0", f"{keys.base(queue)}old:0")


def _leading(client: redis.Redis, worker: Worker) -> None:
    """Another worker has the lease of the queue, and holds its one job; both are of a time long past."""
    _waiting(client, worker, a=2)
    queue, keys = queue_of(worker), worker.keys
    source = SourceKeys(queue, 2, tuple(range(10)), True, True)
    other = Worker(worker.caller, "x", source, keys=keys)
    other.join()
    other.take_one()
    worker.read(source)
    # It ran out long ago, and somebody saw that.
    worker.take(1, now=LATER - 10**7)


def _lead(client: redis.Redis, worker: Worker) -> None:
    """This worker has the lease of the queue, and no job of it."""
    _waiting(client, worker)
    worker.read(SourceKeys(queue_of(worker), 2, tuple(range(10)), True, True))
    worker.caller(worker.store.settle([worker.take_one()]))


def _steer(worker: Worker, what: str, field: str, value: str) -> bytes:
    return calls.steer(worker.keys, queue_of(worker), what, field, value)


SORTED_SCENARIOS = [
    Scenario(
        "take_sorted",
        _mixed,
        lambda c, w: w.pack_take(5, idle=True, tags=[HAS_ENDED + _first(c, w)]),
    ),
    Scenario("take_single", _leading, lambda _, w: w.pack_take(3, now=LATER)),
    Scenario("step_down", _lead, lambda _, w: w.store.step_down()),
    Scenario(
        "beat",
        _lead,
        lambda c, w: w.store.beat(
            [tag for tag, _ in _items(c, w)], 9, TTL, TTL, queues=[queue_of(w)], now=NOW
        ),
    ),
    Scenario(
        "settle_sorted",
        _held,
        lambda c, w: w.store.settle([tag for tag, _ in _items(c, w)]),
        moves=False,
    ),
    Scenario("restore", _held, lambda c, w: w.store.restore(_items(c, w), started=True)),
    Scenario("requeue", _held, lambda c, w: w.store.requeue(_first(c, w), queue_of(w), 0)),
    Scenario("set_aside", _held, lambda c, w: w.store.set_aside(_first(c, w), queue_of(w), "why")),
    Scenario("delay", _held, lambda c, w: w.store.delay(_first(c, w), queue_of(w), NOW / 1e6 + 9)),
    Scenario("due", _delayed, lambda _, w: w.store.due([queue_of(w)], NOW), writes=False),
    Scenario("promote", _delayed, lambda _, w: w.store.promote(queue_of(w), 2, LATER)),
    Scenario("release", _delayed, lambda _, w: w.store.release(queue_of(w))),
    Scenario("adopt", _waiting, lambda _, w: w.store.adopt(queue_of(w), POLICY, {"b": 3})),
    Scenario("sort", _inbox, lambda _, w: w.store.sort(w.sources[0], NOW)),
    Scenario("steer", _held, lambda _, w: _steer(w, "caps", "!ka", "9")),
    Scenario("steer", _held, lambda _, w: _steer(w, "caps", "!*", "9")),
    Scenario("steer", _held, lambda _, w: _steer(w, "caps", "", ""), writes=False),
    Scenario("steer", _waiting, lambda _, w: _steer(w, "weights", "!kb", "7")),
    Scenario("gather", _mixed, lambda _, w: _gather(w)),
    Scenario(
        "gather", _lost_index, lambda _, w: _gather(w, "0:a", "0:b", "0:", "1:a"), moves=False
    ),
    Scenario("unsort", _unsorted, lambda _, w: calls.unsort(w.keys, queue_of(w))),
    Scenario("purge", _mixed, lambda _, w: _purge(w), moves=False),
    Scenario("bury", _beating, lambda _, w: w.store.bury(w.name, 5)),
    Scenario("revive", _dead, lambda _, w: _revive(w)),
]


def _revive(worker: Worker) -> bytes:
    keys, queue = worker.keys, queue_of(worker)
    return calls.evalsha(
        scripts.REVIVE, [keys.scratch, keys.dead(queue), *keys.inboxes(queue)], "1-1"
    )


def names_in(raws: list[bytes]) -> set[str]:
    """Return the jobs of those messages that are some."""
    return {str(json.loads(raw)["headers"]["id"]) for raw in raws if raw != BAD}


__all__ = ["LATER", "SORTED_SCENARIOS", "TTL", "names_in"]
