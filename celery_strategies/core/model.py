"""Own an executable description of what take and settle do to the jobs of a broker.

The scripts in Redis are checked against this model, and a simulation runs on it. It must stay
plainly right rather than fast, and must not know messages, tags or workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

from .interleave import Interleave
from .levels import LISTS, check_levels, level_of_list
from .policy import Policy
from .strategies import Strategy, choose, turn_from
from .tags import check_weight

__all__ = ("Model", "SourceSpec", "Taken")

#: A source of a worker: queue, levels, and the policy of the queue if the worker has one.
SourceSpec: TypeAlias = tuple[str, int | None] | tuple[str, int | None, Policy | None]


class Taken(NamedTuple):
    """Tell which job a slot got, and from where."""

    queue: str
    list_index: int
    job: Hashable
    #: True if the job has been taken before.
    redelivered: bool


@dataclass(eq=False)
class _Job:
    job: Hashable
    queue: str
    list_index: int
    key: str = ""
    weight: float = 1.0
    #: Number of the first take; in a queue with a policy, the number of its sorting.
    place: int = 0
    redelivered: bool = False


@dataclass
class _Queue:
    """Hold what waits in one queue: ten lists, oldest first, and what was given back.

    With a policy, they hold what is not sorted yet, and ``keys`` holds the rest.
    """

    lists: list[deque[_Job]] = field(default_factory=lambda: [deque() for _ in range(LISTS)])
    returned: list[_Job] = field(default_factory=list)
    policy: Policy | None = None
    keys: Interleave | None = None

    def __len__(self) -> int:
        """Return what a strategy sees: a job whose key is full does not count."""
        sorted_jobs = self.keys.runnable if self.keys else 0
        return sorted_jobs + len(self.returned) + sum(map(len, self.lists))

    def pop(self, levels: int | None) -> _Job:
        """Remove and return the next job: lowest level, given back before waiting, oldest.

        With a policy: what the policy says. Raises IndexError if there is none.
        """
        if self.keys is not None:
            if (drawn := self.keys.pop()) is None:
                raise IndexError("pop from a queue without a job that may run")
            return cast("_Job", drawn.job)

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

    ``sources`` are (queue, levels) pairs, or (queue, levels, policy), in list order. A job is in
    one place at a time: waiting, held after take, or running (acknowledged, and not ended).

    A policy belongs to the queue and stays, whoever reads it. What is published to such a queue is
    sorted when a take next looks at it: list by list in numeric order, oldest first.
    """

    def __init__(self, strategy: Strategy, sources: Iterable[SourceSpec]) -> None:
        self.strategy = strategy
        self._queues: dict[str, _Queue] = {}
        self._held: dict[Hashable, _Job] = {}
        self._running: dict[Hashable, _Job] = {}
        self._known: set[Hashable] = set()
        self._places = 0
        #: Queues that the present take has looked at.
        self._measured: set[str] = set()
        self._last: str | None = None
        self._turn_order: tuple[str, ...] = ()
        self._sources: dict[str, int | None] = {}
        self.set_sources(sources)

    def set_sources(self, sources: Iterable[SourceSpec]) -> None:
        """Replace the list of sources; jobs and the round-robin turn stay.

        Raises ValueError, before any effect, for a queue named twice, for levels that are not 1 to
        10, and for a policy of a queue that has another.
        """
        specs = [(spec[0], spec[1], spec[2] if len(spec) > 2 else None) for spec in sources]
        bound = {queue: check_levels(levels) for queue, levels, _ in specs}
        if len(bound) < len(specs):
            raise ValueError("a queue is on the list twice")
        for queue, _, policy in specs:
            have = self._queues[queue].policy if queue in self._queues else None
            if policy and have and policy != have:
                raise ValueError(f"{queue} has another policy: {have}, not {policy}")
        self._sources = bound
        for queue, _, policy in specs:
            waiting = self._queues.setdefault(queue, _Queue())
            if policy and not waiting.policy:
                waiting.policy = policy
                waiting.keys = Interleave(policy.order, single=policy.single)

    def push(
        self, queue: str, job: Hashable, list_index: int = 0, key: str = "", weight: float = 1.0
    ) -> None:
        """Publish ``job`` to list ``list_index`` (0 to 9) of ``queue``, bound or not.

        ``key`` and ``weight`` matter if the queue has a policy. Raises ValueError if this job is on
        the broker already, or for another list, or a weight that cannot be one.
        """
        level_of_list(list_index, None)
        if job in self._known:
            raise ValueError(f"{job!r} is on the broker already")
        entry = _Job(job, queue, list_index, key, float(check_weight(weight)))
        self._known.add(job)
        self._queues.setdefault(queue, _Queue()).lists[list_index].append(entry)

    def take(self, n: int = 1) -> list[Taken]:
        """Give up to ``n`` free slots a job each, deciding every one from the lengths then."""
        taken: list[Taken] = []
        if n > 0:
            self.begin()
        while len(taken) < n and (job := self.pick()) is not None:
            taken.append(job)
        return taken

    def begin(self) -> None:
        """Start a take of several calls of :meth:`pick`."""
        self._measured.clear()

    def choose(self, skip: Collection[str] = ()) -> str | None:
        """Return the queue that the next :meth:`pick` takes from, None if no source has a job that may run.

        The queues in ``skip`` are left alone, as if they were empty.
        """
        order = tuple(self._sources)
        lengths = [0] * len(order)
        turn, first = self.turn, self.strategy in (Strategy.PRIORITY, Strategy.ROUND_ROBIN)
        start = turn if self.strategy is Strategy.ROUND_ROBIN else 0
        for index in (*range(start, len(order)), *range(start)):
            if order[index] not in skip:
                lengths[index] = self._measure(order[index])
                # What is behind it is not looked at, so not sorted either.
                if first and lengths[index]:
                    break
        index = choose(self.strategy, lengths, turn)
        return None if index is None else order[index]

    def pick(self, skip: Collection[str] = ()) -> Taken | None:
        """Give one free slot a job of the queue that :meth:`choose` returns."""
        if (queue := self.choose(skip)) is None:
            return None
        entry = self._queues[queue].pop(self._sources[queue])
        self._last, self._turn_order = queue, tuple(self._sources)
        if not entry.place:
            entry.place = self._next_place()
        self._held[entry.job] = entry
        taken = Taken(queue, entry.list_index, entry.job, entry.redelivered)
        entry.redelivered = True
        return taken

    def sort(self) -> None:
        """Move what is new in every source to its keys, as the sorter of a backlog does."""
        self.begin()
        for queue in self._sources:
            self._measure(queue)

    def give_back(self, *jobs: Hashable) -> None:
        """Put held jobs back where they came from, before all that was never taken.

        The place a job got when it was first taken decides, not the order of the arguments.
        Raises KeyError, before any effect, for a job that is not held.
        """
        entries = [self._held[job] for job in dict.fromkeys(jobs)]
        for entry in entries:
            if keys := self._counted(entry):
                keys.restore(entry)
            else:
                self._queues[entry.queue].returned.append(entry)
            del self._held[entry.job]

    def requeue(self, job: Hashable) -> None:
        """Put a held job at the tail of its list, as if it had just been published.

        Its old place is forgotten. Raises KeyError if it is not held.
        """
        entry = self._held.pop(job)
        if keys := self._counted(entry):
            keys.end(entry)
        entry.place = 0
        self._queues[entry.queue].lists[entry.list_index].append(entry)

    def ack(self, job: Hashable, running: bool = False) -> None:
        """Settle a held job. Unless it is still ``running`` (an early ack), it ends with that.

        Raises KeyError if it is not held.
        """
        self._running[job] = self._held.pop(job)
        if not running:
            self.end(job)

    def end(self, job: Hashable) -> None:
        """Forget a job that was acknowledged while it ran. Raises KeyError for any other."""
        entry = self._running.pop(job)
        if keys := self._counted(entry):
            keys.end(entry)
        self._known.discard(job)

    def set_weight(self, queue: str, key: str, weight: float | None) -> None:
        """Override the weights of all jobs of ``key``; None ends that.

        Raises ValueError for a queue without a policy, and for a weight that cannot be one.
        """
        self._keys(queue).set_weight(key, weight)

    def set_cap(self, queue: str, key: str, cap: int | None) -> None:
        """Limit how many jobs of ``key`` may be in flight at once, on all levels; None ends that.

        Raises ValueError for a queue without a policy, and for what cannot be a cap.
        """
        self._keys(queue).set_cap(key, cap)

    def lengths(self) -> dict[str, int]:
        """Return how many jobs wait in each source, in list order, as a strategy counts them.

        Sorted jobs of a key that is full do not count; what is not sorted yet does.
        """
        return {queue: len(self._queues[queue]) for queue in self._sources}

    def keys(self, queue: str) -> Interleave | None:
        """Return what serves the sorted jobs of ``queue``, to look at; None for a queue without a policy."""
        return self._queues[queue].keys if queue in self._queues else None

    @property
    def held(self) -> frozenset[Hashable]:
        """Return the jobs that were taken and neither settled nor given back."""
        return frozenset(self._held)

    @property
    def running(self) -> frozenset[Hashable]:
        """Return the jobs that were acknowledged and have not ended."""
        return frozenset(self._running)

    @property
    def turn(self) -> int:
        """Return the index in the list at which round robin looks next."""
        return turn_from(self._last, tuple(self._sources), self._turn_order)

    def _measure(self, queue: str) -> int:
        """Return the length of a source; the first look of a take moves what is new to its keys."""
        waiting, keys = self._queues[queue], self._queues[queue].keys
        if keys is not None and queue not in self._measured:
            self._measured.add(queue)
            self._sort(waiting, keys, self._sources[queue])
        return len(waiting)

    def _sort(self, waiting: _Queue, keys: Interleave, levels: int | None) -> None:
        back = sorted(waiting.returned, key=lambda entry: entry.place)
        new = [entry for jobs in waiting.lists for entry in jobs]
        for entry in (*back, *new):
            front = bool(entry.place)
            if not front:
                entry.place = self._next_place()
            level = level_of_list(entry.list_index, levels)
            keys.push(entry, entry.key, entry.weight, level, seq=entry.place, front=front)
        waiting.returned.clear()
        for jobs in waiting.lists:
            jobs.clear()
        keys.begin()

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def _keys(self, queue: str) -> Interleave:
        if (keys := self.keys(queue)) is None:
            raise ValueError(f"{queue} has no policy")
        return keys

    def _counted(self, entry: _Job) -> Interleave | None:
        """Return what counts the job as one in flight, None if nothing does."""
        keys = self._queues[entry.queue].keys
        return keys if keys is not None and entry in keys.running else None
