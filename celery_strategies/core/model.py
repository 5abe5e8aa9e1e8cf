"""Own an executable description of what take and settle do to the jobs of a broker.

The scripts in Redis are checked against this model, and a simulation runs on it. It must stay
plainly right rather than fast, and must not know messages, tags or workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .levels import LISTS, check_levels, level_of_list
from .strategies import Strategy, choose, turn_from

__all__ = ("Model", "Taken")


class Taken(NamedTuple):
    """Tell which job a slot got, and from where."""

    queue: str
    list_index: int
    job: Hashable
    #: True if the job has been taken before.
    redelivered: bool


@dataclass
class _Job:
    job: Hashable
    queue: str
    list_index: int
    place: int = 0
    redelivered: bool = False


@dataclass
class _Queue:
    """Hold what waits in one queue: ten lists, oldest first, and what was given back."""

    lists: list[deque[_Job]] = field(default_factory=lambda: [deque() for _ in range(LISTS)])
    returned: list[_Job] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.returned) + sum(map(len, self.lists))

    def pop(self, levels: int | None) -> _Job:
        """Remove and return the next job: lowest level, given back before waiting, oldest."""

        def level(entry: _Job) -> int:
            return level_of_list(entry.list_index, levels)

        back = min(self.returned, key=lambda entry: (level(entry), entry.place), default=None)
        waiting = next((jobs for jobs in self.lists if jobs), None)
        if back is not None and (waiting is None or level(back) <= level(waiting[0])):
            self.returned.remove(back)
            return back
        if waiting is None:
            raise IndexError("pop from an empty queue")
        return waiting.popleft()


class Model:
    """Act like one worker on one broker, whose jobs are any hashable values.

    ``sources`` are (queue, levels) pairs in list order. A job is in one place at a time: waiting
    in a list, held after take, or given back.
    """

    def __init__(self, strategy: Strategy, sources: Iterable[tuple[str, int | None]]) -> None:
        self.strategy = strategy
        self._queues: dict[str, _Queue] = {}
        self._held: dict[Hashable, _Job] = {}
        self._known: set[Hashable] = set()
        self._places = 0
        self._last: str | None = None
        self._turn_order: tuple[str, ...] = ()
        self._sources: dict[str, int | None] = {}
        self.set_sources(sources)

    def set_sources(self, sources: Iterable[tuple[str, int | None]]) -> None:
        """Replace the list of sources; jobs and the round-robin turn stay.

        Raises ValueError for a queue named twice and for levels that are not 1 to 10.
        """
        pairs = list(sources)
        bound = {queue: check_levels(levels) for queue, levels in pairs}
        if len(bound) < len(pairs):
            raise ValueError("a queue is on the list twice")
        self._sources = bound
        for queue in bound:
            self._queues.setdefault(queue, _Queue())

    def push(self, queue: str, job: Hashable, list_index: int = 0) -> None:
        """Publish ``job`` to list ``list_index`` (0 to 9) of ``queue``, bound or not.

        Raises ValueError if this job is on the broker already, or for another list.
        """
        level_of_list(list_index, None)
        if job in self._known:
            raise ValueError(f"{job!r} is on the broker already")
        self._known.add(job)
        entry = _Job(job, queue, list_index)
        self._queues.setdefault(queue, _Queue()).lists[list_index].append(entry)

    def take(self, n: int = 1) -> list[Taken]:
        """Give up to ``n`` free slots a job each, deciding every one from the lengths then."""
        taken: list[Taken] = []
        order = tuple(self._sources)
        while len(taken) < n:
            lengths = [len(self._queues[queue]) for queue in order]
            index = choose(self.strategy, lengths, self.turn)
            if index is None:
                break
            queue = order[index]
            entry = self._queues[queue].pop(self._sources[queue])
            self._last, self._turn_order = queue, order
            if not entry.place:
                self._places += 1
                entry.place = self._places
            self._held[entry.job] = entry
            taken.append(Taken(queue, entry.list_index, entry.job, entry.redelivered))
            entry.redelivered = True
        return taken

    def give_back(self, *jobs: Hashable) -> None:
        """Put held jobs back where they came from, before all that was never taken.

        The place a job got when it was first taken decides, not the order of the arguments.
        Raises KeyError, before any effect, for a job that is not held.
        """
        entries = [self._held[job] for job in dict.fromkeys(jobs)]
        for entry in entries:
            self._queues[entry.queue].returned.append(entry)
            del self._held[entry.job]

    def requeue(self, job: Hashable) -> None:
        """Put a held job at the tail of its list, as if it had just been published.

        Its old place is forgotten. Raises KeyError if it is not held.
        """
        entry = self._held.pop(job)
        entry.place = 0
        self._queues[entry.queue].lists[entry.list_index].append(entry)

    def ack(self, job: Hashable) -> None:
        """Forget a held job. Raises KeyError if it is not held."""
        del self._held[job]
        self._known.discard(job)

    def lengths(self) -> dict[str, int]:
        """Return how many jobs wait in each source, in list order."""
        return {queue: len(self._queues[queue]) for queue in self._sources}

    @property
    def held(self) -> frozenset[Hashable]:
        """Return the jobs that were taken and neither settled nor given back."""
        return frozenset(self._held)

    @property
    def turn(self) -> int:
        """Return the index in the list at which round robin looks next."""
        return turn_from(self._last, tuple(self._sources), self._turn_order)
