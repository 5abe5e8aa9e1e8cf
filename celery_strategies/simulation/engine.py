"""Own simulated time: jobs arrive, free slots take, jobs end.

One worker, alone on its broker, with a fixed number of slots. Each decision is that of :class:`core.model.Model`,
which the scripts in Redis are tested against. Times are microseconds in here, as integers, so that what should happen
at once does.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from celery_strategies.core.levels import level_of_list
from celery_strategies.core.model import Model
from celery_strategies.core.policy import Policy
from celery_strategies.core.sources import Source
from celery_strategies.core.strategies import Strategy
from celery_strategies.simulation.reasons import Step, Witness

__all__ = ("Arrival", "Event", "Pick", "Result", "Setup", "simulate")

SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """Describe one job: when it comes, in seconds from the start, where, and how long it runs.

    ``list`` is the list that it is published to, 0 to 9, as its priority says.
    """

    number: int
    queue: str
    at: float = 0.0
    run: float = 1.0
    list: int = 0
    key: str = ""
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True)
class Setup:
    """Describe the worker. ``sources`` are in list order; ``policy`` holds for all of them.

    ``single`` are the queues with a single active consumer, this worker; ``paused`` those that nobody serves.
    """

    strategy: Strategy
    sources: tuple[Source, ...]
    policy: Policy | None = None
    slots: int = 1
    read_ahead: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    single: frozenset[str] = frozenset()
    paused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pick:
    """Say which job a free slot got, at what time in seconds, and why, in the order of decisions.

    ``reasons``, and the ``lengths`` that the strategy found, are empty where nobody asked for them.
    """

    number: int
    at: float
    job: Arrival
    level: int
    reasons: tuple[Step, ...] = ()
    lengths: Mapping[str, int] = field(default_factory=dict)


class Event(NamedTuple):
    """One thing that happened: ``push`` or ``end`` of a job, or a ``take`` for ``n`` slots that gave ``jobs``."""

    what: str
    jobs: tuple[Arrival, ...]
    n: int = 0


@dataclass
class Result:
    """What a run came to. ``starts`` and ``ends`` are in seconds, by the number of the job."""

    setup: Setup
    jobs: tuple[Arrival, ...]
    picks: list[Pick] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    starts: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)

    def wait(self, job: Arrival) -> float | None:
        """Return the seconds from arrival to start, None if it never started."""
        start = self.starts.get(job.number)
        return None if start is None else max(0.0, start - job.at)


def simulate(setup: Setup, jobs: Iterable[Arrival], *, explain: int | None = None) -> Result:
    """Run until every job has ended, or none may start any more.

    What comes at the same time happens in this order: arrivals, as they are given; ends, in the order of the starts;
    then one take for all free slots. ``explain`` is how many picks get reasons, None for all.
    """
    return _Run(setup, tuple(jobs), explain).result()


class _Run:
    def __init__(self, setup: Setup, jobs: tuple[Arrival, ...], explain: int | None) -> None:
        self.setup = setup
        self.explain = len(jobs) if explain is None else explain
        self.found = Result(setup, jobs)
        self.coming = deque(sorted(jobs, key=attrgetter("at")))
        #: (end in microseconds, number of the pick, job).
        self.ending: list[tuple[int, int, Arrival]] = []
        #: Taken, and not started: there are more of them than slots.
        self.ahead: deque[tuple[int, Arrival]] = deque()
        self.busy = 0
        #: Queues with a single active consumer whose job is in flight.
        self.leased: set[str] = set()
        specs = [(source.queue, source.levels, setup.policy) for source in setup.sources]
        self.model = Model(setup.strategy, specs)
        self.levels = {source.queue: source.levels for source in setup.sources}
        self.witness = Witness(self.model, setup)
        if setup.policy is not None:
            for source in setup.sources:
                for key, weight in setup.weights.items():
                    self.model.set_weight(source.queue, key, weight)
                for key, cap in setup.caps.items():
                    self.model.set_cap(source.queue, key, cap)

    def result(self) -> Result:
        while self.coming or self.ending:
            coming = [_micro(self.coming[0].at)] if self.coming else []
            now = min([*coming, self.ending[0][0]] if self.ending else coming)
            self._arrive(now)
            self._end(now)
            self._start(now)
            self._take(now)
        return self.found

    def _arrive(self, now: int) -> None:
        while self.coming and _micro(self.coming[0].at) <= now:
            job = self.coming.popleft()
            self.model.push(job.queue, job, job.list, job.key, job.weight)
            self.found.events.append(Event("push", (job,)))

    def _end(self, now: int) -> None:
        while self.ending and self.ending[0][0] <= now:
            _, _, job = heapq.heappop(self.ending)
            self.model.ack(job)
            self.leased.discard(job.queue)
            self.busy -= 1
            self.found.ends[job.number] = now / SECOND
            self.found.events.append(Event("end", (job,)))

    def _start(self, now: int) -> None:
        while self.ahead and self.busy < self.setup.slots:
            number, job = self.ahead.popleft()
            self.busy += 1
            self.found.starts[job.number] = now / SECOND
            heapq.heappush(self.ending, (now + _micro(job.run), number, job))

    def _take(self, now: int) -> None:
        """Fill the free slots, and what is read ahead, by one take."""
        free = self.setup.slots + self.setup.read_ahead - self.busy - len(self.ahead)
        if free <= 0:
            return
        taken: list[Arrival] = []
        self.model.begin()
        while len(taken) < free and (job := self._pick(now)) is not None:
            taken.append(job)
        self.found.events.append(Event("take", tuple(taken), free))
        self._start(now)

    def _pick(self, now: int) -> Arrival | None:
        number = len(self.found.picks) + 1
        skip = self.setup.paused | self.leased
        seen = None
        if number <= self.explain and self.model.choose(skip) is not None:
            seen = self.witness.look(skip, self.leased)
        taken = self.model.pick(skip)
        if taken is None:
            return None
        job = taken.job
        assert isinstance(job, Arrival)  # noqa: S101  # what was pushed
        level = level_of_list(taken.list_index, self.levels[job.queue])
        pick = Pick(number, now / SECOND, job, level)
        if seen is not None:
            reasons = self.witness.reasons(seen, job.queue, job.key, level)
            pick = replace(pick, reasons=reasons, lengths=seen.lengths)
        self.witness.last = job.queue
        self.found.picks.append(pick)
        if job.queue in self.setup.single:
            self.leased.add(job.queue)
        self.ahead.append((number, job))
        return job


def _micro(seconds: float) -> int:
    return round(seconds * SECOND)
