"""Own what is known of one task, as one answer: where it is, what is before it, why it waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_strategies.look.find import Found, Searched, headers_of
from celery_strategies.look.reach import WorkerSeen
from celery_strategies.look.shares import KeySeen
from celery_strategies.look.status import QueueSeen

__all__ = ("STATES", "Answer", "Limit", "Reason", "Running", "as_json")

#: Where a task can be, as the answer calls it.
STATES = {
    "inbox": "inbox",
    "sorted": "sorted",
    "front": "given back",
    "returned": "given back",
    "delayed": "delayed",
    "in_line": "in line",
    "unsorted": "inbox",
    "unacked": "in flight",
    "running": "in flight",
    "dead": "dead",
    "set_aside": "set aside",
}


class Reason(NamedTuple):
    """One step of the order of decisions that keeps a task from running now, and why."""

    step: str
    text: str


@dataclass(frozen=True)
class Limit:
    """The limit in whose line a task stands."""

    name: str
    to: int | None
    permits: int
    before: int


@dataclass(frozen=True)
class Running:
    """What a worker says of a task: its name, whether the job has begun, and when."""

    worker: str
    state: str
    since: float | None


@dataclass
class Answer:
    """Everything that is known of one task; *found* is None where its message is nowhere that was searched."""

    task: str
    searched: Searched
    found: Found | None = None
    near: str | None = None
    queue: QueueSeen | None = None
    now: float = 0.0
    running: Running | None = None
    worker: WorkerSeen | None = None
    #: Jobs before it: of its key, of its level with those, and of its queue with those. None: not known.
    of_key: int | None = None
    of_level: int | None = None
    of_queue: int | None = None
    key: KeySeen | None = None
    limit: Limit | None = None
    due: float | None = None
    #: Jobs of its queue that are taken in a second, and the seconds in which that was seen.
    rate: float | None = None
    window: float = 0.0
    reasons: list[Reason] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Where it is, in words; "unknown" only if everything was searched, else "not found"."""
        if self.found is not None:
            return STATES[self.found.what]
        if self.running is not None:
            return "in flight"
        return "unknown" if self.searched.everything else "not found"

    @property
    def seconds(self) -> float | None:
        """About how long it waits until it is taken, None if that cannot be told."""
        if self.due is not None:
            return max(0.0, self.due - self.now)
        if self.of_queue is None or not self.rate:
            return None
        return (self.of_queue + 1) / self.rate


def as_json(answer: Answer, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return an answer as what JSON can hold."""
    found, limit = answer.found, answer.limit
    headers = headers_of(found.raw) if found else {}
    running = answer.running
    held_by = running.worker if running else None
    if found is not None and found.worker and held_by is None:
        held_by = answer.worker.called if answer.worker else found.worker
    return {
        "task": answer.task,
        "state": answer.state,
        "name": headers.get("task"),
        "queue": found.queue if found else None,
        "level": found.level if found else None,
        "key": (found.key or None) if found else None,
        "deliveries": found.deliveries % 1000 if found else None,
        "worker": held_by,
        "worker_alive": answer.worker.alive if answer.worker else None,
        "running": running.state == "active" if running else None,
        "since": running.since if running else None,
        "due": answer.due,
        "limit": None
        if limit is None
        else {
            "name": limit.name,
            "to": limit.to,
            "permits": limit.permits,
            "before_in_line": limit.before,
        },
        "entry": (found.entry or None) if found else None,
        "reason": (found.why or None) if found else None,
        "before": {
            "of_key": answer.of_key,
            "of_level": answer.of_level,
            "of_queue": answer.of_queue,
        },
        "waits_because": [{"step": step, "text": words} for step, words in answer.reasons],
        "estimate": {
            "seconds": None if answer.seconds is None else round(answer.seconds, 2),
            "jobs_per_second": None if answer.rate is None else round(answer.rate, 2),
            "window": round(answer.window, 3),
        },
        "did_you_mean": answer.near,
        "searched": {
            "messages": answer.searched.messages,
            "of": answer.searched.total,
            "everything": answer.searched.everything,
            "seconds": round(answer.searched.seconds, 3),
        },
        "notes": list(notes),
    }
