"""Own the frames of `top`: two looks at the same things, and what happened between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_strategies.look.reach import Reach, WorkerSeen, find_workers
from celery_strategies.look.shares import served_rate
from celery_strategies.look.status import QueueSeen, as_json, read_queues, worker_json
from celery_strategies.look.tenants import Survey, Tenant, survey, tenants, tenants_json

__all__ = ("Frame", "frame_json", "look")

#: Seconds that the keys of one queue may take in a frame.
KEYS_SECONDS = 0.3
#: Queues whose tenants a frame shows: those with the most jobs waiting.
MOST_SORTED = 5


@dataclass
class Frame:
    """One look at everything. *rates* is how many jobs were taken in a second, where that is known."""

    at: float
    queues: list[QueueSeen]
    workers: list[WorkerSeen]
    surveys: dict[str, Survey] = field(default_factory=dict)
    tenants: dict[str, list[Tenant]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def look(reach: Reach, names: Sequence[str], earlier: Frame | None = None) -> Frame:
    """Take a look; what was got is since the *earlier* one."""
    workers = find_workers(reach)
    at = reach.now()
    queues = read_queues(reach, names, workers, at)
    frame = Frame(at, sorted(queues, key=lambda seen: -seen.waiting), workers)
    for seen in [seen for seen in frame.queues if seen.policy][:MOST_SORTED]:
        found = survey(reach, seen, seconds=KEYS_SECONDS)
        before = earlier.surveys.get(seen.name) if earlier else None
        frame.surveys[seen.name] = found
        frame.tenants[seen.name] = tenants(found, workers, seen.name, before)
        if not found.complete:
            reach.note(f"{seen.name} has more keys than could be looked at")
        if before is not None and found.at > before.at:
            rate = _rate(seen, before, found)
            if rate is not None:
                frame.rates[seen.name] = rate / (found.at - before.at)
    frame.notes = list(reach.notes)
    return frame


def _rate(seen: QueueSeen, before: Survey, after: Survey) -> float | None:
    """Return how many jobs of a queue were taken between two looks, all levels together."""
    total = 0.0
    for level in {*before.v, *after.v}:
        weights = sum(
            key.weight or 1.0 for key in after.keys if key.level == level and key.tag is not None
        )
        number = served_rate(
            seen.policy.get("order", ""),
            before.v.get(level, 0.0),
            after.v.get(level, 0.0),
            weights,
        )
        if number is None:
            return None
        total += number
    return total


def frame_json(frame: Frame) -> dict[str, Any]:
    """Return a frame as what JSON can hold."""
    queues = []
    for seen in frame.queues:
        data = as_json(seen, frame.at)
        data["taken_per_second"] = frame.rates.get(seen.name)
        data["tenants"] = [tenants_json(row) for row in frame.tenants.get(seen.name, [])]
        queues.append(data)
    return {
        "at": frame.at,
        "queues": queues,
        "workers": [worker_json(worker) for worker in frame.workers],
        "notes": frame.notes,
    }
