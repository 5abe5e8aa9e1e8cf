"""Lists that hold messages although nobody's priority steps explain them.

Owns which of a queue's ten lists a take reads. Reading all ten for every source would cost Redis more than the take
itself, and almost all are always empty; so a take reads those that the levels or Kombu's ``priority_steps`` name, and
a survey now and then, and whenever something seems to lie unread, finds the others and adds them for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from celery_strategies.core.levels import LISTS
from celery_strategies.store import store as calls
from celery_strategies.store.store import SourceKeys
from celery_strategies.transport.session import Session

logger = logging.getLogger("celery_strategies.reader")

#: Seconds between surveys.
INTERVAL = 5.0


class Strays:
    """Find lists with messages. *found* is called when a list was added; *refused* with an error reply."""

    def __init__(
        self,
        found: Callable[[], None],
        refused: Callable[[RedisError], None],
        accepted: Callable[[], None],
    ) -> None:
        self.surveying = False
        self._found = found
        self._refused = refused
        self._accepted = accepted
        self._lists: dict[str, set[int]] = {}
        self._steps: tuple[int, ...] = (0,)
        self._next = 0.0

    @property
    def due(self) -> bool:
        """Whether a survey should come before the next take."""
        return monotonic() >= self._next

    @due.setter
    def due(self, due: bool) -> None:
        self._next = 0.0 if due else monotonic() + INTERVAL

    def reset(self, channel_steps: Iterable[int]) -> None:
        """Begin anew on a connection whose channels have these ``priority_steps``."""
        self._steps = tuple(channel_steps)
        self.surveying = False
        self.due = True

    def lists(self, queue: str, levels: int | None) -> tuple[int, ...]:
        """Return the lists of *queue* that a take reads, in numeric order."""
        active = self._lists.setdefault(queue, set())
        active.update(range(levels) if levels is not None else self._steps)
        return tuple(sorted(active))

    def survey(self, session: Session, sources: Sequence[SourceKeys]) -> bool:
        """Look into the lists that no take reads; returns whether there are any and a reply will come."""
        self.due = False
        places = [
            (source.queue, step)
            for source in sources
            for step in range(LISTS)
            if step not in source.lists
        ]
        if not places:
            return False
        self.surveying = True
        names = [session.keys.inbox(queue, step) for queue, step in places]
        packed = calls.command(calls.pack("EXISTS", *names))
        session.link.send(packed, partial(self._counted, session, places, names))
        return True

    def _counted(
        self, session: Session, places: list[tuple[str, int]], names: list[str], reply: Any
    ) -> None:
        if isinstance(reply, RedisError):
            self.surveying = False
            self.due = True
            self._refused(reply)
            return
        self._accepted()
        if not reply:
            self.surveying = False
        else:
            packed = b"".join(calls.command(calls.pack("EXISTS", name)) for name in names)
            handlers = [partial(self._seen, place, place is places[-1]) for place in places]
            session.link.send(packed, *handlers)

    def _seen(self, place: tuple[str, int], last: bool, reply: Any) -> None:
        if reply == 1:
            queue, step = place
            self._lists.setdefault(queue, set()).add(step)
            logger.info("Queue %r has messages at priority step %d: reading it too", queue, step)
            self._found()
        if last:
            self.surveying = False
