"""When delayed messages are due, and moving them to their lists then.

Owns one worker's timer for the delayed messages of its sources. They wait in Redis; every worker looks for those that
are due, so none depends on the worker that put them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from celery_strategies.transport.patience import Patience
from celery_strategies.transport.session import Session

#: Seconds between looks while messages are known to wait, and while none are.
LOOK_INTERVAL, IDLE_INTERVAL = 1.0, 5.0


class Delays:
    """Promote delayed messages when they are due.

    *look* is called when a take is worth while, *refused* with an error reply, *later* with seconds after which a turn
    is due.
    """

    def __init__(
        self,
        patience: Patience,
        *,
        look: Callable[[bool], None],
        refused: Callable[[str, RedisError], None],
        later: Callable[[float], None],
    ) -> None:
        self._patience = patience
        self._look = look
        self._refused = refused
        self._later = later
        self._next = 0.0
        self._asking = False

    def reset(self) -> None:
        """Begin anew on a new connection."""
        self._next = 0.0
        self._asking = False

    def expect(self, seconds: float) -> None:
        """Note that a message is due in *seconds*."""
        due = monotonic() + max(0.0, seconds)
        if due < self._next:
            self._next = due
            self._later(max(0.0, seconds))

    def remaining(self, now: float) -> float:
        """Return how long, in seconds, until the next look."""
        return max(0.0, self._next - now)

    def run(self, session: Session, queues: Sequence[str], now: float) -> None:
        """Look if it is time to, at *now* (monotonic seconds)."""
        if now < self._next or self._asking or not queues:
            return
        if self._patience.remaining(now, "promote"):
            return
        self._asking = True
        self._next = now + IDLE_INTERVAL
        session.link.send(
            session.store.due(queues), partial(self._answered, session, tuple(queues))
        )

    def _answered(self, session: Session, queues: Sequence[str], waits: Any) -> None:
        self._asking = False
        if isinstance(waits, RedisError):
            self._failed(waits)
            return
        for queue, wait in zip(queues, waits, strict=True):
            if wait == 0:
                session.link.send(session.store.promote(queue), self._promoted)
            elif wait > 0:
                self.expect(min(LOOK_INTERVAL, wait / 1000))

    def _promoted(self, moved: Any) -> None:
        if isinstance(moved, RedisError):
            self._failed(moved)
            return
        self._patience.accepted("promote")
        if moved:
            self._look(False)
        # There may be more that is due, and the next one's time is not known yet.
        self._next = 0.0
        self._later(0.0)

    def release(self, session: Session, queue: str, cursor: Any = b"0") -> None:
        """Have what waits for a rate limit in *queue* come back at once."""

        def released(reply: Any) -> None:
            if isinstance(reply, RedisError):
                self._failed(reply)
            elif reply != b"0":
                self.release(session, queue, reply)
            else:
                self.expect(0.0)

        if session.link.alive:
            session.link.send(session.store.release(queue, cursor), released)

    def _failed(self, error: RedisError) -> None:
        self._next = monotonic()
        self._refused("promote", error)
