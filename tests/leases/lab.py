"""What the lease tests share: a lab that knows who leads, who is dead, and whether an order held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import redis

from tests.support.apps import Event, read_events
from tests.support.waiting import wait_until
from tests.support.workers import Worker
from tests.worker.lab import Lab

PROJECT = "tests.leases.project"
QUEUE = "ordered"
SINGLE: Mapping[str, Any] = {"strategies_single_active_consumer": [QUEUE]}
#: Silence after which a worker counts as dead, in tests that wait for it.
STALE = 2.0
QUICK: Mapping[str, Any] = {"strategies_stale_after": STALE}


def numbers(count: int, start: int = 0) -> list[str]:
    return [f"{n:05d}" for n in range(start, start + count)]


class LeaseLab(Lab):
    """A lab whose workers serve the queue `ordered` one at a time."""

    record_url: str | None = None

    def __init__(
        self,
        url: str,
        db: redis.Redis,
        workers: Callable[..., Worker],
        *,
        records: redis.Redis | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(url, db, workers, **settings)
        self.records = records or db
        self.names: dict[str, Worker] = {}

    def worker(
        self,
        pool: str = "threads",
        *,
        queues: Sequence[str] = (QUEUE,),
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Worker:
        options.setdefault("app", PROJECT)
        options.setdefault("record_url", self.record_url)
        worker = super().worker(
            pool, queues=queues, settings={**SINGLE, **(settings or {})}, **options
        )
        self.names[worker.hostname] = worker
        return worker

    def fleet(self, count: int, pool: str = "threads", **options: Any) -> list[Worker]:
        """Start workers together."""
        workers = [self.worker(pool, wait=False, **options) for _ in range(count)]
        for worker in workers:
            worker.wait_ready()
        self.acquainted(*workers)
        return workers

    def acquainted(self, *workers: Worker) -> None:
        """Wait until each has seen the others' beats: only then a death is seen at once."""
        wait_until(lambda: len(self._beats(workers)) == len(workers), 20, "all beat")
        for _ in range(2):
            self._beat_again(workers)

    def _beat_again(self, workers: Iterable[Worker]) -> None:
        latest = max(self._beats(workers))
        wait_until(lambda: all(b > latest for b in self._beats(workers)), 20, "all beat again")

    def _beats(self, workers: Iterable[Worker]) -> list[float]:
        names = {worker.hostname for worker in workers}
        beats = self.db.zrange(self.keys.alive, 0, -1, withscores=True)
        return [beat for name, beat in beats if name.decode().rpartition("-")[0] in names]

    # -- producing ------------------------------------------------------------------------------------------

    def open(self, count: int = 1, gate: str = "gate") -> None:
        self.records.rpush(gate, *["go"] * count)

    # -- looking --------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        return read_events(self.records)

    def started(self) -> list[str]:
        return [event.label for event in self.events() if event.event == "start"]

    def ended(self) -> list[str]:
        return [event.label for event in self.events() if event.event == "end"]

    def lease(self, queue: str = QUEUE) -> dict[str, str]:
        """Return the lease of a queue."""
        found: Any = self.db.hgetall(self.keys.lease(queue))
        return {name.decode(): value.decode() for name, value in found.items()}

    def leader(self, queue: str = QUEUE) -> Worker | None:
        """Return who leads a queue."""
        return self.names.get(self.lease(queue).get("worker", "").rpartition("-")[0])

    def wait_leader(self, *others: Worker, queue: str = QUEUE, timeout: float = 20) -> Worker:
        """Wait until somebody leads who is none of *others*."""
        return wait_until(
            lambda: (found := self.leader(queue)) not in others and found,
            timeout,
            f"somebody leads {queue}",
        )

    def term(self, queue: str = QUEUE) -> int:
        return int(self.lease(queue).get("term", 0))

    def terms(self) -> list[tuple[str, int | None]]:
        """Return label and term of every start, in order."""
        lines: Any = self.records.lrange("test:terms", 0, -1)
        return [(line["label"], line["term"]) for line in map(json.loads, lines)]

    def headers(self) -> list[list[str]]:
        """Return the names of the headers of every start, in order."""
        lines: Any = self.records.lrange("test:terms", 0, -1)
        return [json.loads(line)["headers"] for line in lines]

    def ran_by(self, *labels: str) -> set[str]:
        """Return who started these jobs, or all."""
        return {
            event.worker
            for event in self.events()
            if event.event == "start" and (not labels or event.label in labels)
        }

    def alive(self) -> list[str]:
        """Return the workers that count as alive."""
        return [name.decode() for name in self.db.zrange(self.keys.alive, 0, -1)]

    def wait_dead(self, worker: Worker, timeout: float = 20) -> None:
        """Wait until somebody has found *worker* dead."""
        wait_until(
            lambda: not any(name.startswith(f"{worker.hostname}-") for name in self.alive()),
            timeout,
            f"{worker.hostname} is buried",
        )


def no_burial(*workers: Worker) -> None:
    """Assert that none of *workers* found another dead."""
    for worker in workers:
        assert "is dead" not in worker.log()


def broken_order(events: Iterable[Event], labels: Sequence[str]) -> list[str]:
    """Return what is wrong with a row of jobs that were to run one after the other, in words.

    A job may begin again, and next, only after its first run was cut off or could not be acknowledged.
    """
    found = []
    position, running = 0, False
    for event in events:
        if event.label not in labels:
            continue
        at = labels.index(event.label)
        if event.event == "end":
            running = running and at != position - 1
        elif at == position:
            if running:
                found.append(f"{event.label} began while {labels[position - 1]} ran")
            position, running = position + 1, True
        elif at == position - 1:
            running = True
        else:
            found.append(f"{event.label} began after {labels[max(0, position - 1)]}")
    if position != len(labels):
        found.append(f"{len(labels) - position} never began")
    return found


def repeated(events: Iterable[Event]) -> list[str]:
    """Return the labels of the jobs that began more than once, as often as they did again."""
    seen: set[str] = set()
    found = []
    for event in events:
        if event.event == "start":
            if event.label in seen:
                found.append(event.label)
            seen.add(event.label)
    return found
