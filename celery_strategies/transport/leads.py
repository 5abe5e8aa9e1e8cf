"""What a worker leads, and what it leaves to others: leases of single-active queues, and consumer priority.

Owns what one worker knows of both. The truth is in Redis: a take serves a single-active source only under the lease,
which the same script checks, and the keeper looks who reads the same queues with a higher consumer priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from celery_strategies.store.store import Grant, SourceKeys

#: How many polling intervals lie between two takes from a queue that a worker of higher priority reads.
BACK_OFF = 3


class Leads:
    """Keep terms and back-off for a worker; *exclusive* names the queues with a single active consumer.

    *polling_interval* is in seconds.
    """

    def __init__(self, exclusive: Iterable[str], polling_interval: float) -> None:
        self.exclusive = set(exclusive)
        self._pause = BACK_OFF * polling_interval
        #: Term of each lease that this worker has.
        self.terms: dict[str, int] = {}
        self._outranked: frozenset[str] = frozenset()
        self._taken: dict[str, float] = {}
        self._asked: frozenset[str] = frozenset()
        #: When the leases that others have run out, in monotonic seconds.
        self._ends: dict[str, float] = {}

    def reset(self) -> None:
        """Forget what the last session knew."""
        self.terms.clear()
        self._ends.clear()

    def report(self, sources: Sequence[SourceKeys], grant: Grant, now: float) -> None:
        """Take note of the leases that a take has, and has not, at *now* (monotonic seconds)."""
        for index, term in grant.terms:
            queue = sources[index].queue
            if term < 0:
                self.terms.pop(queue, None)
                self._ends[queue] = now - term / 1000
            elif term > 0:
                self.terms[queue] = term

    def stands_by(self, queue: str) -> bool:
        """Whether *queue* is somebody else's for now, so that news of it are none of this worker's business."""
        return queue in self._outranked or (queue in self.exclusive and queue not in self.terms)

    # -- consumer priority ----------------------------------------------------------------------

    def outranked_on(self, queues: Iterable[str]) -> bool:
        """Note on which *queues* a live worker has a higher consumer priority; returns whether that changed."""
        before, self._outranked = self._outranked, frozenset(queues)
        return before != self._outranked

    def skip(self, sources: Sequence[SourceKeys], now: float) -> bytes:
        """Return what a take at *now* (monotonic seconds) leaves alone: a byte for each source, empty for none."""
        if not self._outranked:
            return b""
        self._asked = frozenset(source.queue for source in sources)
        return bytes(self._leaves(source.queue, now) for source in sources)

    def _leaves(self, queue: str, now: float) -> int:
        if queue not in self._outranked:
            return 0
        if queue in self.exclusive and queue in self.terms:
            # The lease is for whoever has the highest priority and wants it; a job in flight ends first.
            return 2
        return int(now - self._taken.get(queue, 0.0) < self._pause)

    def asked(self, sources: Sequence[SourceKeys], skip: bytes, now: float) -> None:
        """Note that a take at *now* asked all *sources*, or gave them up, but those in *skip*."""
        self._ends.clear()
        if skip:
            for source, left in zip(sources, skip, strict=True):
                if left != 1:
                    self._taken[source.queue] = now

    def next_turn(self, now: float) -> float | None:
        """Return the seconds until a take may ask an outranked queue again, or until a lease runs out; None: never."""
        # Not one that no take asks, since its policy is not known, say.
        asked = self._outranked & self._asked
        times = [self._taken.get(queue, now) + self._pause for queue in asked]
        times += [end for queue, end in self._ends.items() if queue not in self._outranked]
        return max(0.0, min(times) - now) if times else None
