"""Permits of the limits of tasks: asking for them, keeping them, and seeing that no line is left standing.

Owns the messages that wait for Redis's answer, which count as held, and one worker's part in the upkeep of all limits:
it renews the permits of its own jobs, and gives permits that expired, whoever had them, to those first in line.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from celery_strategies.store import store as calls
from celery_strategies.store.store import Answer, Ask, Store
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.session import Session
from celery_strategies.transport.settler import Settler

logger = logging.getLogger("celery_strategies.reader")

#: Seconds between looks whether a line can go on: at least, and at most.
SHORTEST_LOOK, LONGEST_LOOK = 0.05, 5.0
#: Times that a permit is renewed while it would last without.
RENEWALS = 3


@dataclass(slots=True)
class Waiting:
    """A message that waits for the answer to *ask*, and what to call once it has its permit; *sent*: it was asked."""

    ask: Ask
    go_on: Callable[[], object]
    sent: bool = False


class Permits:
    """Ask for permits for the messages of *settler*'s worker.

    *may_start* says whether messages of a queue may still start here, *look* is called when a take is worth while,
    *refused* with an error reply, *later* with seconds after which a turn is due.
    """

    def __init__(
        self,
        settler: Settler,
        patience: Patience,
        *,
        may_start: Callable[[str], bool],
        look: Callable[[bool], None],
        refused: Callable[[str, RedisError], None],
        later: Callable[[float], None],
    ) -> None:
        self._settler = settler
        self._patience = patience
        self._may_start = may_start
        self._look = look
        self._refused = refused
        self._later = later
        self._waiting: dict[str, Waiting] = {}
        self._next_look = 0.0
        self._looking = False
        #: Shortest duration, in seconds, of the permits that this worker has had.
        self._shortest = float("inf")
        self._next_renewal = float("inf")

    @property
    def pending(self) -> int:
        """Number of messages that wait for an answer."""
        return len(self._waiting)

    @property
    def tags(self) -> set[str]:
        """Tags of the messages that wait for an answer."""
        return set(self._waiting)

    def reset(self) -> None:
        """Begin anew on a new connection: what was asked may have been done or not, so it is asked again."""
        for waiting in self._waiting.values():
            waiting.sent = False
        self._next_look = 0.0
        self._looking = False
        if self._settler.limited:
            self._next_renewal = 0.0

    def acquire(self, tag: str, ask: Ask, go_on: Callable[[], object]) -> None:
        """Ask for a permit for *tag*; *go_on* is called, in the loop, when it has one: never, if it waits in line."""
        self._waiting[tag] = Waiting(ask, go_on)

    # -- the loop -------------------------------------------------------------------------------

    def remaining(self, now: float) -> float:
        """Return how long, in seconds, until there is something to do."""
        return max(0.0, min(self._next_look, self._next_renewal) - now)

    def run(self, session: Session, now: float) -> None:
        """Send what is due at *now* (monotonic seconds)."""
        if self._waiting and not self._patience.remaining(now, "limit"):
            for tag, waiting in self._waiting.items():
                if not waiting.sent:
                    waiting.sent = True
                    packed = session.store.acquire(tag, waiting.ask, session.ttl)
                    session.link.send(packed, partial(self._answered, tag))
        if now >= self._next_renewal:
            self._renew(session, now)
        due = now >= self._next_look and not self._looking
        if due and not self._patience.remaining(now, "lines"):
            self._looking = True
            session.link.send(session.store.serve(), self._served)

    def _answered(self, tag: str, reply: Any) -> None:
        waiting = self._waiting.get(tag)
        if isinstance(reply, RedisError):
            if waiting is not None:
                waiting.sent = False
            self._refused("limit", reply)
            return
        self._patience.accepted("limit")
        answer = Answer.parse(reply)
        if answer.served:
            self._look(False)
        if waiting is None:
            return
        del self._waiting[tag]
        if answer.state == calls.HAS_PERMIT:
            self._start(tag, waiting)
            return
        if answer.state == calls.UNREADABLE:
            self._settler.set_aside(tag, f"its limit cannot be read: {answer.error}")
        # In line, or in other hands.
        self._settler.forget(tag)
        self._look(False)

    def _start(self, tag: str, waiting: Waiting) -> None:
        held = self._settler.held.get(tag)
        if held is None or not self._settler.limit(tag):
            # It went back meanwhile, and keeps its permit.
            return
        seconds = waiting.ask.duration / 1000
        if seconds < self._shortest or len(self._settler.limited) == 1:
            self._shortest = seconds
            due = monotonic() + seconds / RENEWALS
            if due < self._next_renewal:
                self._next_renewal = due
                self._later(seconds / RENEWALS)
        if self._may_start(held.queue):
            waiting.go_on()
        else:
            self._settler.give_back([tag])

    # -- upkeep ---------------------------------------------------------------------------------

    def renewal(self, store: Store, ttl: int) -> list[bytes]:
        """Return the calls that renew the permits of this worker's jobs; any thread. *ttl* in ms."""
        tags = tuple(self._settler.limited)
        return [
            store.renew(tags[start : start + calls.TAG_LIMIT], ttl)
            for start in range(0, len(tags), calls.TAG_LIMIT)
        ]

    def _renew(self, session: Session, now: float) -> None:
        packed = self.renewal(session.store, session.ttl)
        if not packed:
            self._shortest = self._next_renewal = float("inf")
            return
        self._next_renewal = now + self._shortest / RENEWALS
        self._later(self._shortest / RENEWALS)
        session.link.send(b"".join(packed), *([self._renewed] * len(packed)))

    def _renewed(self, reply: Any) -> None:
        if isinstance(reply, RedisError):
            self._refused("renewal", reply)
            self._next_renewal = monotonic() + self._patience.remaining(monotonic(), "renewal")
            return
        self._patience.accepted("renewal")
        if reply:
            logger.warning(
                "%d jobs had lost their permit of a limit: this worker was silent for longer than its duration",
                reply,
            )

    def _served(self, reply: Any) -> None:
        self._looking = False
        if isinstance(reply, RedisError):
            self._next_look = monotonic()
            self._refused("lines", reply)
            return
        self._patience.accepted("lines")
        served, wait = reply
        if served:
            self._look(False)
        pause = LONGEST_LOOK * random.uniform(0.8, 1.0)
        if 0 <= wait < 1000 * pause:
            pause = max(SHORTEST_LOOK, wait / 1000)
            self._later(pause)
        self._next_look = monotonic() + pause
