"""Own what is known of each queue without a look at its messages: how many wait where, and who may read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_strategies.core.levels import LISTS
from celery_strategies.core.policy import order_in_words
from celery_strategies.look.reach import Reach, WorkerSeen, fields, scored, text
from celery_strategies.store import scripts

__all__ = ("Lease", "QueueSeen", "Reader", "as_json", "order_called", "read_queues", "worker_json")

#: Width of one list in the scores of a returned set, as in the scripts.
BAND = 2**47
#: What the scripts count where nobody knows how many were given back.
MANY = 2**40
#: Queues for whose delayed messages one call asks.
DUE_CHUNK = 100
#: Most consumers of a queue that are listed.
MOST_CONSUMERS = 500


@dataclass(frozen=True)
class Reader:
    """A worker that reads a queue; it stands by while a live one with a higher priority reads it too."""

    worker: WorkerSeen
    priority: int
    stands_by: bool


@dataclass(frozen=True)
class Lease:
    """The lease of a queue with a single active consumer; *until* and *tag* are None where nobody has it, or no job."""

    worker: str | None
    term: int
    until: float | None
    tag: str | None


@dataclass
class QueueSeen:
    """One queue. Counts are those of one moment each, not of the same."""

    name: str
    #: By level; sorted are those that may run now.
    inbox: dict[int, int] = field(default_factory=dict)
    sorted: dict[int, int] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)
    #: Sorted jobs, those of full keys too, and how many of them were given back (None: nobody knows).
    sorted_total: int = 0
    sorted_back: int | None = 0
    full_keys: int = 0
    delayed: int = 0
    due_in: float | None = None
    in_line: int = 0
    unsorting: int = 0
    dead: int = 0
    set_aside: int = 0
    in_flight: int = 0
    policy: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    sorter: str | None = None
    lease: Lease | None = None
    readers: list[Reader] = field(default_factory=list)
    paused: str | None = None

    @property
    def ready(self) -> int:
        """How many jobs a strategy counts: what may run now, or may once it is sorted."""
        return sum(self.inbox.values()) + sum(self.sorted.values()) + sum(self.returned.values())

    @property
    def full(self) -> int:
        """How many sorted jobs wait for one of their key to end."""
        return max(0, self.sorted_total - sum(self.sorted.values()))

    @property
    def waiting(self) -> int:
        """How many jobs wait, wherever."""
        return self.ready + self.full + self.delayed + self.in_line + self.unsorting

    @property
    def order(self) -> str | None:
        """How its keys are served, None if it is not sorted."""
        return order_called(self.policy)

    def live_readers(self) -> list[Reader]:
        """Return the readers that show signs of life."""
        return [reader for reader in self.readers if reader.worker.alive]


def order_called(policy: Mapping[str, str]) -> str | None:
    """Return a policy in words, None for none."""
    if not policy.get("order"):
        return None
    return order_in_words(policy["order"], policy.get("single") == "1")


def read_queues(
    reach: Reach, names: Iterable[str], workers: Sequence[WorkerSeen], now: float | None = None
) -> list[QueueSeen]:
    """Read what is known of these queues."""
    names = list(names)
    keys = reach.keys
    now = reach.now() if now is None else now
    calls: list[list[Any]] = []
    for name in names:
        calls += [["LLEN", inbox] for inbox in keys.inboxes(name)]
        calls += [["ZCARD", key(name)] for key in (keys.returned, keys.delayed, keys.in_line)]
        calls += [["LLEN", keys.unsorted(name)]]
        calls += [["XLEN", keys.dead(name)], ["XLEN", keys.set_aside(name)]]
        calls += [["HGETALL", keys.policy(name)], ["HGETALL", keys.state(name)]]
        calls += [["HGETALL", keys.lease(name)], ["GET", keys.sorter(name)]]
        calls += [["ZRANGE", keys.consumers(name), 0, MOST_CONSUMERS - 1, "WITHSCORES"]]
        calls += [["SCARD", f"{keys.base(name)}full"]]
    replies = reach.many(calls)
    each = len(calls) // max(1, len(names))
    in_flight = Counter(holding.queue for worker in workers for holding in worker.held)
    pauses = reach.pauses()
    found = []
    for number, name in enumerate(names):
        reply = replies[number * each : (number + 1) * each]
        seen = _queue(name, reply, workers, in_flight[name])
        seen.paused = pauses.get(name)
        found.append(seen)
    _returned(reach, [seen for seen in found if seen.returned])
    _due(reach, [seen for seen in found if seen.delayed])
    return found


def _queue(
    name: str, reply: Sequence[Any], workers: Sequence[WorkerSeen], in_flight: int
) -> QueueSeen:
    lists, rest = reply[:LISTS], reply[LISTS:]
    returned, delayed, in_line, unsorting, dead, aside = (int(value or 0) for value in rest[:6])
    policy, state, lease = fields(rest[6]), fields(rest[7]), fields(rest[8])
    back = int(float(state.get("b", 0)))
    return QueueSeen(
        name,
        inbox={level: int(n) for level, n in enumerate(lists) if n},
        sorted={
            level: int(float(state[f"r{level}"]))
            for level in range(LISTS)
            if float(state.get(f"r{level}", 0)) > 0
        },
        # Its levels come with a second call.
        returned={0: returned} if returned else {},
        sorted_total=int(float(state.get("t", 0))),
        sorted_back=back if back < MANY else None,
        full_keys=int(rest[11] or 0),
        delayed=delayed,
        in_line=in_line,
        unsorting=unsorting,
        dead=dead,
        set_aside=aside,
        in_flight=in_flight,
        policy=policy,
        state=state,
        sorter=text(rest[9]) if rest[9] else None,
        lease=_lease(lease),
        readers=_readers(name, scored(rest[10]), workers),
    )


def _lease(found: Mapping[str, str]) -> Lease | None:
    if not found:
        return None
    until = found.get("until")
    return Lease(
        found.get("worker"),
        int(float(found.get("term", 0))),
        float(until) / 1000 if until else None,
        found.get("tag"),
    )


def _readers(
    name: str, consumers: Sequence[tuple[bytes, float]], workers: Sequence[WorkerSeen]
) -> list[Reader]:
    priorities = {text(worker): int(priority) for worker, priority in consumers}
    mine = [worker for worker in workers if name in worker.queues or worker.id in priorities]
    numbers = [priorities.get(worker.id, worker.priority) for worker in mine]
    alive = [number for worker, number in zip(mine, numbers, strict=True) if worker.alive]
    highest = max(alive, default=None)
    found = [
        Reader(worker, number, stands_by=highest is not None and number < highest)
        for worker, number in zip(mine, numbers, strict=True)
        if name in worker.queues or not worker.queues
    ]
    return sorted(found, key=lambda reader: (-reader.priority, reader.worker.called))


def _returned(reach: Reach, queues: Sequence[QueueSeen]) -> None:
    calls = [
        ["ZCOUNT", reach.keys.returned(seen.name), n * BAND, f"({(n + 1) * BAND}"]
        for seen in queues
        for n in range(LISTS)
    ]
    replies = reach.many(calls)
    for number, seen in enumerate(queues):
        counts = replies[number * LISTS : (number + 1) * LISTS]
        seen.returned = {level: int(n) for level, n in enumerate(counts) if n}


def _due(reach: Reach, queues: Sequence[QueueSeen]) -> None:
    for start in range(0, len(queues), DUE_CHUNK):
        chunk = queues[start : start + DUE_CHUNK]
        names = [reach.keys.delayed(seen.name) for seen in chunk]
        for seen, wait in zip(chunk, reach.script(scripts.DUE, names, "") or (), strict=False):
            seen.due_in = None if wait < 0 else wait / 1000


# -- JSON --------------------------------------------------------------------------------------


def as_json(seen: QueueSeen, now: float) -> dict[str, Any]:
    """Return a queue as what JSON can hold."""
    levels = sorted({*seen.inbox, *seen.sorted, *seen.returned})
    return {
        "queue": seen.name,
        "waiting": seen.waiting,
        "ready": seen.ready,
        "in_flight": seen.in_flight,
        "levels": {
            str(level): {
                "inbox": seen.inbox.get(level, 0),
                "sorted": seen.sorted.get(level, 0),
                "given_back": seen.returned.get(level, 0),
            }
            for level in levels
        },
        "places": places(seen),
        "next_due_in": seen.due_in,
        # Celery's messages have no time stamp.
        "oldest_age": None,
        "paused": seen.paused,
        "policy": _policy_json(seen),
        "lease": _lease_json(seen, now),
        "readers": [
            {
                "worker": reader.worker.called,
                "id": reader.worker.id,
                "priority": reader.priority,
                "alive": reader.worker.alive,
                "stands_by": reader.stands_by,
            }
            for reader in seen.readers
        ],
    }


def places(seen: QueueSeen) -> dict[str, int]:
    """Return how many messages are in each place."""
    return {
        "inbox": sum(seen.inbox.values()),
        "sorted": sum(seen.sorted.values()),
        "full": seen.full,
        "given_back": sum(seen.returned.values()),
        "delayed": seen.delayed,
        "in_line": seen.in_line,
        "unsorting": seen.unsorting,
        "set_aside": seen.set_aside,
        "dead": seen.dead,
    }


def _policy_json(seen: QueueSeen) -> dict[str, Any] | None:
    if not seen.policy:
        return None
    return {
        "order": seen.policy.get("order"),
        "one_at_a_time": seen.policy.get("single") == "1",
        "words": seen.order,
        "key_header": seen.policy.get("key"),
        "weight_header": seen.policy.get("weight") or None,
        "caps": seen.policy.get("caps") == "1",
        "weights": seen.policy.get("weights") == "1",
        "full_keys": seen.full_keys,
        "sorted_given_back": seen.sorted_back,
        "sorter": seen.sorter,
    }


def _lease_json(seen: QueueSeen, now: float) -> dict[str, Any] | None:
    lease = seen.lease
    if lease is None:
        return None
    return {
        "worker": lease.worker,
        "term": lease.term,
        "for_seconds": None if lease.until is None else round(lease.until - now, 3),
        "job_in_flight": lease.tag is not None,
    }


def worker_json(worker: WorkerSeen) -> dict[str, Any]:
    """Return a worker as what JSON can hold."""
    return {
        "worker": worker.called,
        "id": worker.id,
        "alive": worker.alive,
        "last_beat_age": round(worker.age, 3),
        "host": worker.host,
        "pid": worker.pid,
        "strategy": worker.strategy or None,
        "consumer_priority": worker.priority,
        "queues": worker.queues,
        "slots": worker.slots,
        "held": len(worker.held),
    }


def dumps(data: Any) -> str:
    """Return *data* as the commands print it."""
    return json.dumps(data, indent=1, ensure_ascii=False)
