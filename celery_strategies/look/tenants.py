"""Own the look at the keys of one queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from celery_strategies.core.levels import LISTS
from celery_strategies.look.reach import Reach, WorkerSeen, text
from celery_strategies.look.shares import KeySeen, due, got
from celery_strategies.look.status import QueueSeen
from celery_strategies.store import scripts

__all__ = ("Survey", "Tenant", "survey", "tenants", "tenants_json")

#: Keys of one call, and bytes of messages that it reads for their weights.
KEYS_CALL, BYTES_CALL = 200, 256 * 1024
#: Seconds that the look at all keys may take.
SURVEY_SECONDS = 0.6


@dataclass
class Survey:
    """The keys of a queue. *complete* is false where there are more than the time allowed."""

    keys: list[KeySeen] = field(default_factory=list)
    complete: bool = True
    #: Virtual time by level, and the server's time in seconds.
    v: dict[int, float] = field(default_factory=dict)
    at: float = 0.0


@dataclass
class Tenant:
    """A key over all levels of a queue."""

    key: str
    backlog: int = 0
    in_flight: int = 0
    weight: float | None = None
    cap: int | None = None
    full: bool = False
    due: float = 0.0
    #: Jobs given to it, and its share of all that were, in the window; None without one.
    got: float | None = None
    share: float | None = None


def survey(
    reach: Reach,
    seen: QueueSeen,
    *,
    levels: Sequence[int] | None = None,
    weights: bool = True,
    seconds: float = SURVEY_SECONDS,
) -> Survey:
    """Look at the keys of a queue, in the order in which they are served, level by level."""
    found = Survey(
        v={
            level: float(seen.state[f"v{level}"])
            for level in range(LISTS)
            if f"v{level}" in seen.state
        },
        at=reach.now(),
    )
    if not seen.policy:
        return found
    deadline = monotonic() + seconds
    places: dict[tuple[int, str], KeySeen] = {}
    wanted = range(LISTS) if levels is None else levels
    parts = [
        (f"{index}:{level}", _shift(seen, level) if index == "old" else 0.0)
        for level in wanted
        for index in ("index", "old")
    ]
    for part, shift in [*parts, ("full", 0.0)]:
        for row in _rows(reach, seen.name, part, BYTES_CALL if weights else 0):
            key = _key(row, shift)
            if levels is None or key.level in levels:
                places[key.level, key.key] = key
            if monotonic() > deadline:
                found.complete = False
                break
        if not found.complete:
            break
    found.keys = list(places.values())
    return found


def _shift(seen: QueueSeen, level: int) -> float:
    # What stands in the old index is still to lose what V lost.
    return abs(float(seen.state.get(f"s{level}", 0)))


def _rows(reach: Reach, queue: str, part: str, size: int) -> Iterator[Sequence[Any]]:
    cursor: Any = 0
    name = reach.keys.policy(queue)
    while cursor is not None:
        reply = reach.script(scripts.SURVEY, [name], part, cursor, KEYS_CALL, size)
        if not reply:
            return
        following, flat = reply[0], reply[1:]
        yield from zip(*[iter(flat)] * 8, strict=True)
        cursor = None if following in (-1, b"-1", "-1") else following


def _key(row: Sequence[Any], shift: float) -> KeySeen:
    key, level, tag, jobs, back, running, weight, cap = row
    return KeySeen(
        text(key),
        int(level),
        float(tag) - shift if tag else None,
        int(jobs),
        int(back),
        int(running),
        float(weight) if weight else None,
        int(float(cap)) if cap else None,
    )


def tenants(
    found: Survey,
    workers: Sequence[WorkerSeen],
    queue: str,
    earlier: Survey | None = None,
) -> list[Tenant]:
    """Put the levels of each key together; the largest backlog first. *earlier* begins the window of what each got."""
    shares = due(found.keys)
    rows: dict[str, Tenant] = {}
    for seen in found.keys:
        row = rows.setdefault(seen.key, Tenant(seen.key, cap=seen.cap, due=shares.get(seen.key, 0)))
        row.backlog += seen.backlog
        row.in_flight = seen.in_flight
        row.weight = seen.weight if row.weight is None else row.weight
        row.full = row.full or seen.tag is None
    held: dict[str, int] = {}
    for holding in (one for worker in workers for one in worker.held):
        if holding.queue == queue:
            held[holding.key] = held.get(holding.key, 0) + 1
    for key, number in held.items():
        row = rows.setdefault(key, Tenant(key))
        row.in_flight = max(row.in_flight, number)
    if earlier is not None:
        served = got(earlier.keys, found.keys, earlier.v)
        total = sum(served.values())
        for key, jobs in served.items():
            row = rows.setdefault(key, Tenant(key))
            row.got, row.share = jobs, jobs / total if total else None
    return sorted(rows.values(), key=lambda row: (-row.backlog, -row.in_flight, row.key))


def tenants_json(row: Tenant) -> dict[str, Any]:
    """Return a row as what JSON can hold; a job without a key is null's."""
    data: dict[str, Any] = {
        "key": row.key or None,
        "backlog": row.backlog,
        "in_flight": row.in_flight,
        "weight": row.weight,
        "cap": row.cap,
        "full": row.full,
        "share_due": round(row.due, 6),
        "jobs_got": None if row.got is None else round(row.got, 2),
        "share_got": None if row.share is None else round(row.share, 6),
    }
    return data


def other(rows: Sequence[Tenant]) -> Tenant:
    """Return what several keys are together."""
    windowed = any(row.got is not None for row in rows)
    return Tenant(
        "",
        sum(row.backlog for row in rows),
        sum(row.in_flight for row in rows),
        due=sum(row.due for row in rows),
        got=sum(row.got or 0.0 for row in rows) if windowed else None,
        share=sum(row.share or 0.0 for row in rows) if windowed else None,
    )
