"""Own the rule that says which key of a queue gives the next job, and how many jobs of a key run.

The rule is self-clocked fair queueing (S. J. Golestani, "A self-clocked fair queueing scheme for
broadband applications", IEEE INFOCOM 1994) with jobs of size 1. The scripts in Redis do the same
arithmetic, operation by operation, in the same IEEE doubles. Plainly right rather than fast: every
pick looks at every key. Must not know messages, tags or workers.

Each level of a queue has a *virtual time* V, and an *index* of the keys that may run: those with a
job and fewer in flight than their cap. In the index, a key has a *finish tag* F, and the lowest F
goes next; V follows the F of what was taken. A key that enters does so
at F = V + 1/w, w being the weight of its next job. So nobody hoards credit while
idle, and nobody waits behind the backlog of another. From job to job F grows by 1/w.

Sums of 1/w break ties wrongly (ten times 0.1 is not 1), so F is ``J + n/w`` for the n-th job since
the tag was J, as long as w is the same (and no power of two, whose sums are exact). On an untouched
backlog this is ``rank / weight``, exactly.

For every key whose next job was never taken before, V <= F <= V + 1/w. Two keys i and j that stay
in the index, under constant weights, have therefore been given, over any interval,

    | S_i/w_i - S_j/w_j | <= 1/w_i + 1/w_j

jobs: the bound of P. Goyal, H. M. Vin and H. Cheng ("Start-time fair queuing", ACM SIGCOMM 1996).
If weights differ from job to job, it holds for the sums of 1/w of the jobs taken, with the weight
of i's next job at the start of the interval and of j's next job at its end (or the other way round).

A job that is given back was paid for when it was first taken: it goes before everything else of
its level, at F = V and without moving V. Behind the last of them the key enters anew, at V + 1/w.
So a key that had jobs given back is not short of its share if what it takes again counts, and is
ahead by no more than that.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import frexp
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, get_args

from .policy import Order
from .tags import check_weight

__all__ = ("ANY_KEY", "REBASE_AT", "Entry", "Interleave", "Job", "Run")

#: The key whose cap holds for every key without one.
ANY_KEY = "*"

#: The virtual time at which a level starts counting from 0 again, long before ``V + 1e-6 == V``.
REBASE_AT = 2.0**30

_ORDERS: tuple[str, ...] = get_args(Order)


class Job(NamedTuple):
    """Describe one job of a queue; ``job`` is whatever the caller calls it."""

    job: Hashable
    key: str
    #: Unique in the queue, and rising: the order of arrival.
    seq: int
    #: What the job itself says; an override for its key goes before it.
    weight: float
    level: int


class Run(NamedTuple):
    """Say that the next job of a key is the ``n``-th of one ``weight`` since the tag was ``start``."""

    start: float
    n: int
    weight: float


class Entry(NamedTuple):
    """Describe a key in the index: its finish tag, and the run it is in (from the second job on)."""

    finish: float
    run: Run | None = None


@dataclass
class _Waiting:
    """Hold what one key has waiting at one level; the next job is that of the lowest ``seq``."""

    #: What was given back, by ``seq``. All of it is older than all of ``jobs``.
    front: list[Job] = field(default_factory=list)
    jobs: deque[Job] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.front) + len(self.jobs)

    @property
    def head(self) -> Job:
        return self.front[0] if self.front else self.jobs[0]

    def pop(self) -> Job:
        return self.front.pop(0) if self.front else self.jobs.popleft()


@dataclass
class _Level:
    """Hold one level: its virtual time, the keys that have jobs, and those of them that may run."""

    virtual_time: float = 0.0
    keys: dict[str, _Waiting] = field(default_factory=dict)
    index: dict[str, Entry] = field(default_factory=dict)

    def rebase(self) -> None:
        """Count from zero again; what is in the index keeps its distance to V."""
        past = self.virtual_time
        for key, (finish, run) in self.index.items():
            moved = run and run._replace(start=run.start - past)
            self.index[key] = Entry(finish - past, moved)
        self.virtual_time = 0.0


class Interleave:
    """Hold the jobs of one queue, all levels, and say which goes next.

    ``order`` is ``fair``; ``batch`` (each take counts from zero, no memory: the r-th job of a key in
    it has the tag r/w); ``age`` (the oldest job of a key that may run); or ``turn`` (round robin:
    whoever enters, or was served, goes to the tail). With ``single``, one job per key is in flight
    at a time. Levels are strict: the lowest with a job that may run goes first. Caps and overrides
    hold for a key on all levels.
    Jobs without a key are one key, ``""``, which is never full.

    A job is waiting, then in flight from :meth:`take` to :meth:`end`, :meth:`restore` or
    :meth:`requeue`, which raise KeyError, before any effect, for a job that is not in flight.
    """

    def __init__(
        self, order: Order = "fair", *, single: bool = False, rebase_at: float = REBASE_AT
    ) -> None:
        if order not in _ORDERS:
            raise ValueError(f"order must be one of {', '.join(_ORDERS)}, not {order!r}")
        self.order = order
        self.single = single
        self.rebase_at = rebase_at
        self._levels: dict[int, _Level] = {}
        self._weights: dict[str, float] = {}
        self._caps: dict[str, int] = {}
        self._flight: dict[Hashable, Job] = {}
        self._seq = 0
        #: (level, key) -> jobs of this take.
        self._drawn: Counter[tuple[int, str]] = Counter()

    # -- what happens to jobs ----------------------------------------------------------------

    def push(
        self,
        job: Hashable,
        key: str = "",
        weight: float = 1.0,
        level: int = 0,
        *,
        seq: int | None = None,
        front: bool = False,
    ) -> None:
        """Add a job, at the tail of its key.

        ``seq`` is for a caller that counts over several queues, and must rise; None counts here.
        ``front`` is for a job that was taken before it came in here, with the ``seq`` that it had.
        Raises ValueError for a weight that cannot be one.
        """
        number = self._seq + 1 if seq is None else seq
        new = Job(job, key, number, float(check_weight(weight)), level)
        self._seq = max(self._seq, number)
        if front:
            self._return(new)
        else:
            self._at(level).keys.setdefault(key, _Waiting()).jobs.append(new)
            self._look(key)

    def take(self, n: int = 1) -> list[Job]:
        """Take up to ``n`` jobs, in order."""
        self.begin()
        taken: list[Job] = []
        while len(taken) < n and (job := self.pop()) is not None:
            taken.append(job)
        return taken

    def begin(self) -> None:
        """Start a take of several calls of :meth:`pop`; only ``batch`` heeds it."""
        self._drawn.clear()

    def pop(self) -> Job | None:
        """Take the next job, or return None if none may run."""
        for number in sorted(self._levels):
            if self._levels[number].index:
                return self._serve(number)
        return None

    def end(self, job: Hashable) -> None:
        """Note that a job has ended: it counts for no cap any more."""
        self._look(self._flight.pop(job).key)

    def restore(self, *jobs: Hashable) -> None:
        """Put jobs back before all of their key and level that were never taken, by ``seq``."""
        for back in [self._flight[job] for job in dict.fromkeys(jobs)]:
            del self._flight[back.job]
            self._return(back)

    def requeue(self, job: Hashable) -> None:
        """Put a job at the tail of its key, as if it had just come."""
        old = self._flight[job]
        self.end(job)
        self.push(job, old.key, old.weight, old.level)

    # -- what an operator sets -----------------------------------------------------------------

    def set_weight(self, key: str, weight: float | None) -> None:
        """Override the weights of all jobs of ``key``, from its next job on; None ends that.

        In order ``fair``, a key in the index keeps the virtual time S at which its next job became
        the next: F = max(V, S + 1/w). So changes in a row neither put it off nor favour it.
        Raises ValueError for a weight that cannot be one.
        """
        new = None if weight is None else float(check_weight(weight))
        if new == self._weights.get(key):
            return
        starts = {
            number: self._start(level, key)
            for number, level in self._levels.items()
            if self.order == "fair" and key in level.index and not level.keys[key].front
        }
        if new is None:
            del self._weights[key]
        else:
            self._weights[key] = new
        for number, start in starts.items():
            level = self._levels[number]
            tag = start + 1 / self.weight(level.keys[key].head)
            level.index[key] = Entry(max(level.virtual_time, tag))

    def set_cap(self, key: str, cap: int | None) -> None:
        """Limit how many jobs of ``key`` may be in flight; None ends that.

        :data:`ANY_KEY` is the limit of every key without its own. What is in flight above a lowered
        cap stays so. Raises ValueError for a cap below 1, and for jobs without a key.
        """
        if not key:
            raise ValueError("jobs without a key have no cap")
        if cap is None:
            self._caps.pop(key, None)
        elif cap < 1:
            raise ValueError(f"a cap must be 1 or more, not {cap!r}")
        else:
            self._caps[key] = cap
        everyone = {name for level in self._levels.values() for name in level.keys}
        for name in everyone if key == ANY_KEY else (key,):
            self._look(name)

    # -- looking -------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Return how many jobs wait, also those of keys that are full."""
        return sum(len(have) for level in self._levels.values() for have in level.keys.values())

    @property
    def runnable(self) -> int:
        """Return how many jobs wait whose key may run now: the length that a strategy sees."""
        return sum(len(level.keys[key]) for level in self._levels.values() for key in level.index)

    @property
    def running(self) -> Mapping[Hashable, Job]:
        """Return the jobs in flight."""
        return MappingProxyType(self._flight)

    def in_flight(self, key: str) -> int:
        """Return how many jobs of ``key`` are in flight."""
        return sum(job.key == key for job in self._flight.values())

    def cap(self, key: str) -> int | None:
        """Return how many jobs of ``key`` may be in flight, None for any number."""
        if not key:
            return None
        return 1 if self.single else self._caps.get(key, self._caps.get(ANY_KEY))

    def is_full(self, key: str) -> bool:
        """Return whether ``key`` has as many jobs in flight as it may have."""
        cap = self.cap(key)
        return cap is not None and self.in_flight(key) >= cap

    def weight(self, job: Job) -> float:
        """Return the weight in force for ``job``: 1 where the order knows no weights."""
        if self.order in {"age", "turn"}:
            return 1.0
        return self._weights.get(job.key, job.weight)

    def virtual_time(self, level: int = 0) -> float:
        """Return V of ``level``; it stays 0 in the orders ``batch`` and ``age``."""
        return self._levels[level].virtual_time if level in self._levels else 0.0

    def index(self, level: int = 0) -> Mapping[str, Entry]:
        """Return the keys of ``level`` that may run. Tags mean nothing in ``batch`` and ``age``."""
        return MappingProxyType(self._levels[level].index if level in self._levels else {})

    def tags(self, level: int = 0) -> dict[str, float]:
        """Return what decides between the keys of ``level`` that may run, before age does; lower goes first."""
        return {key: self._tag(level, key) for key in self.index(level)}

    def full(self, level: int = 0) -> list[str]:
        """Return the keys of ``level`` that have jobs and may run none, in the order of their oldest job."""
        have = self._levels[level].keys if level in self._levels else {}
        keys = [key for key in have if key not in self._levels[level].index]
        return sorted(keys, key=lambda key: have[key].head.seq)

    @property
    def levels(self) -> list[int]:
        """Return the levels that have jobs, in order, also those whose keys are all full."""
        return sorted(number for number, level in self._levels.items() if level.keys)

    def jobs(self, key: str, level: int = 0) -> list[Job]:
        """Return what waits for ``key`` on ``level``, the next first."""
        have = self._levels[level].keys.get(key) if level in self._levels else None
        return [*have.front, *have.jobs] if have else []

    def preview(self, n: int) -> list[Job]:
        """Return what a take of ``n`` would give now, without taking it."""
        return self.copy().take(n)

    def copy(self) -> Interleave:
        """Return another one in the same state, that shares nothing with this but the jobs."""
        other = Interleave(self.order, single=self.single, rebase_at=self.rebase_at)
        other._weights = dict(self._weights)
        other._caps = dict(self._caps)
        other._flight = dict(self._flight)
        other._seq = self._seq
        other._drawn = Counter(self._drawn)
        for number, level in self._levels.items():
            keys = {
                key: _Waiting(list(have.front), deque(have.jobs))
                for key, have in level.keys.items()
            }
            other._levels[number] = replace(level, keys=keys, index=dict(level.index))
        return other

    # -- the rule ------------------------------------------------------------------------------

    @property
    def _remembers(self) -> bool:
        return self.order in {"fair", "turn"}

    def _at(self, level: int) -> _Level:
        return self._levels.setdefault(level, _Level())

    def _serve(self, number: int) -> Job:
        """Take the next job of a level whose index is not empty."""
        level = self._levels[number]

        def place(key: str) -> tuple[float, bool, int]:
            have = level.keys[key]
            return self._tag(number, key), not have.front, have.head.seq

        key = min(level.index, key=place)
        have, entry = level.keys[key], level.index[key]
        given_back = bool(have.front)
        job = have.pop()
        self._flight[job.job] = job
        self._drawn[number, key] += 1
        if self._remembers:
            level.virtual_time = max(level.virtual_time, entry.finish)
        if not have:
            del level.keys[key], level.index[key]
        elif given_back or self.order != "fair":
            self._enter(level, key)
        else:
            level.index[key] = self._following(entry, self.weight(job), self.weight(have.head))
        self._look(key)
        if not level.index:
            level.virtual_time = 0.0
        elif level.virtual_time >= self.rebase_at:
            level.rebase()
        return job

    def _tag(self, number: int, key: str) -> float:
        """Return what decides between the keys of a level, before age does; lower goes first."""
        level = self._levels[number]
        if self.order == "batch":
            return (self._drawn[number, key] + 1) / self.weight(level.keys[key].head)
        return level.index[key].finish

    @staticmethod
    def _following(entry: Entry, weight: float, next_weight: float) -> Entry:
        """Return the entry of a key whose job of ``weight`` was taken, for the job behind it."""
        finish, run = entry
        if frexp(weight)[0] == 0.5:
            # Sums of 1/w are exact then, and nothing need be remembered.
            return Entry(finish + 1 / next_weight)
        if run is not None and next_weight == run.weight:
            run = run._replace(n=run.n + 1)
        elif run is None and next_weight == weight:
            run = Run(finish - 1 / weight, 2, weight)
        else:
            return Entry(finish + 1 / next_weight)
        return Entry(run.start + run.n / run.weight, run)

    def _start(self, level: _Level, key: str) -> float:
        """Return the virtual time at which the next job of a key in the index became the next."""
        finish, run = level.index[key]
        if run is not None:
            return run.start + (run.n - 1) / run.weight
        return finish - 1 / self.weight(level.keys[key].head)

    def _enter(self, level: _Level, key: str) -> None:
        """Put a key into the index, or put it there anew."""
        have = level.keys[key]
        if not self._remembers:
            level.index[key] = Entry(0.0)
        elif self.order == "turn":
            # A counter of turns: whoever enters, or was served, goes to the tail.
            if not have.front:
                level.virtual_time += 1
            level.index[key] = Entry(-1.0 if have.front else level.virtual_time)
        elif have.front:
            level.index[key] = Entry(level.virtual_time)
        else:
            level.index[key] = Entry(level.virtual_time + 1 / self.weight(have.head))

    def _look(self, key: str) -> None:
        """Let ``key`` leave the index if it is full, and enter where it has jobs if it is not."""
        full = self.is_full(key)
        for level in self._levels.values():
            if full:
                level.index.pop(key, None)
            elif key in level.keys and key not in level.index:
                self._enter(level, key)

    def _return(self, job: Job) -> None:
        """Put a job into the front of its key, which then enters the index anew."""
        level = self._at(job.level)
        have = level.keys.setdefault(job.key, _Waiting())
        insort(have.front, job, key=attrgetter("seq"))
        level.index.pop(job.key, None)
        self._look(job.key)
