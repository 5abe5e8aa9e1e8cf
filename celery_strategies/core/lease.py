"""The lease of a queue with a single active consumer, as an executable description.

Owns when a worker may take from such a queue, and when it may still start what it took. The scripts in Redis are
checked against it. Times are in milliseconds, by the server's clock unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ("LATE", "Answer", "Lease", "may_start")

#: For how long a lease that was found to have run out is left to its owner all the same: after a pause of the server
#: itself, the owner's next sign of life is on its way.
LATE = 2000


class Answer(NamedTuple):
    """What a worker that asks is told.

    *term* is above 0 if it may take one job, 0 if it leads and its job is in flight, and below 0 the milliseconds until
    it is worth while to ask again. *back* is the job of a former holder, which must go back before anything is taken.
    """

    term: int
    back: str | None = None


@dataclass
class Lease:
    """Who may read a queue. *holder* is None while it is free; *job* is the one in flight, whoever runs it."""

    ttl: int
    holder: str | None = None
    term: int = 0
    until: int = 0
    late: int = 0
    job: str | None = None
    #: Who took *job*.
    runner: str | None = None

    def ask(self, worker: str, now: int) -> Answer:
        """Acquire the lease for *worker*, or keep it; it has to be asked before each job."""
        mine = self.holder == worker
        if self.holder is not None and not mine:
            if self.until <= now and not self.late:
                self.late = now + LATE
            ends = max(self.until, self.late)
            if ends > now:
                return Answer(min(-1, now - ends))
        if self.job is not None and mine and self.runner == worker:
            return Answer(0)
        back, self.job, self.runner = self.job, None, None
        self.late = 0
        self.until = now + self.ttl
        if not mine:
            self.holder = worker
            # By the clock, so that terms rise even if the server lost its last writes.
            self.term = max(self.term + 1, now)
        return Answer(self.term, back)

    def took(self, worker: str, job: str) -> None:
        """Note that *worker*, which was just told a term, took *job*."""
        self.job, self.runner = job, worker

    def ended(self, job: str) -> None:
        """Note that *job* ended, or went back."""
        if self.job == job:
            self.job = self.runner = None

    def renew(self, worker: str, now: int) -> bool:
        """Note a sign of life; returns whether *worker* leads."""
        if self.holder != worker:
            return False
        self.until, self.late = now + self.ttl, 0
        return True

    def release(self, worker: str) -> bool:
        """Give the lease up, unless the job of *worker* is in flight; returns whether it is free of *worker* now."""
        if self.holder != worker:
            return True
        if self.job is not None:
            return False
        self._free()
        return True

    def buried(self, worker: str) -> str | None:
        """Note that *worker* is dead; returns its job, which goes back first."""
        back = None
        if self.runner == worker:
            back, self.job, self.runner = self.job, None, None
        if self.holder == worker:
            self._free()
        return back

    def _free(self) -> None:
        self.holder, self.until, self.late = None, 0, 0


def may_start(asked: float, now: float, ttl: float) -> bool:
    """Whether a job may start at *now* that was taken by a call sent at *asked*.

    Both are of the worker's own clock, one that goes on while the machine sleeps. The lease lasts for *ttl* from the
    call on, at least. Half of it is kept for what happens between this look and the first effect of the job.
    """
    return now - asked < ttl / 2
