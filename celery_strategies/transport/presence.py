"""What a worker's keeper knows of the worker, and what it tells it.

Owns the keeper of one reader and the sign of life of its loop. The keeper's thread calls most of this, so nothing here
touches the reader's connection, but for a shutdown, when no loop turns any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from celery_strategies.store.store import Store
from celery_strategies.transport.connector import Connector
from celery_strategies.transport.drain import Drain
from celery_strategies.transport.keeper import LOOP_STALE_AFTER, Keeper
from celery_strategies.transport.keeper import logger as keeper_logger
from celery_strategies.transport.leads import Leads
from celery_strategies.transport.permits import Permits
from celery_strategies.transport.session import Session
from celery_strategies.transport.threads import is_green


class Presence:
    """Keep the worker of *connector* present in Redis.

    *about* is what the worker says of itself, *queues* returns what it reads now, *tags* what it
    holds, *look* has the loop take again; *stale_after* (seconds) and *max_deliveries* are the keeper's.
    """

    def __init__(
        self,
        about: dict[str, Any],
        connector: Connector,
        drained: Drain,
        leads: Leads,
        permits: Permits,
        *,
        queues: Callable[[], list[str]],
        tags: Callable[[], Iterable[str]],
        look: Callable[[], None],
        consumer_priority: int,
        stale_after: float,
        max_deliveries: int,
    ) -> None:
        self._about = about
        #: Returns what else the worker says of itself in Redis; called at each beat, in the keeper's thread.
        self.more: Callable[[], dict[str, Any]] = dict
        #: Set while a job blocks the loop (solo), which is a sign of life too.
        self.blocked = False
        self._connector, self._drained = connector, drained
        self._leads, self._permits = leads, permits
        self._queues, self._tags, self._look = queues, tags, look
        self._priority = consumer_priority
        self._stale_after, self._max_deliveries = stale_after, max_deliveries
        self._turned = monotonic()
        self._keeper: Keeper | None = None

    def begin(self, session: Session) -> None:
        """Beat on the broker of *session* from now on."""
        self.turned(monotonic())
        if self._keeper is None:
            self._keeper = Keeper(
                Store(session.keys, self._connector.worker),
                session.ttl,
                connect=self._connector.another_connection,
                tags=self._tags,
                lives=self._lives,
                leads=self._reads,
                buried=self._look,
                outranked=self._outranked,
                entry=self._entry,
                also=self._renew_permits,
                hurries=self._hurries,
                stepped_down=self._leads.terms.clear,
                stale_after=self._stale_after,
                most=self._max_deliveries,
            )
            self._keeper.start()
        elif self._connector.moved:
            self._keeper.follow()

    def turned(self, now: float) -> None:
        """Note that the loop turned at *now* (monotonic seconds), and write what the keeper has to say."""
        self._turned = now
        keeper_logger.flush()

    def nudge(self) -> None:
        """Have the keeper look now: the worker shuts down."""
        if self._keeper is not None:
            self._keeper.nudge()

    def end(self) -> None:
        """Stop beating."""
        if self._keeper is not None:
            self._keeper.stop()

    # -- the keeper's thread --------------------------------------------------------------------

    def _lives(self) -> bool:
        if self._connector.session is None or self.blocked or self._drained.active:
            # Between connections, during a job in the loop, and at the end it does not turn.
            return True
        return monotonic() - self._turned < LOOP_STALE_AFTER

    def _reads(self) -> bool:
        return self._connector.session is not None and bool(self._queues())

    def _renew_permits(self) -> list[bytes]:
        # A job that blocks the loop keeps its permit.
        session = self._connector.session
        if not self.blocked or session is None:
            return []
        return self._permits.renewal(session.store, session.ttl)

    def _entry(self) -> dict[str, Any]:
        return {
            **self._about,
            **self.more(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            # At a shutdown, none: those of lower priority need not wait until its last job has ended.
            "queues": [] if self._drained.active else self._queues(),
            "priority": self._priority,
        }

    def _hurries(self) -> bool:
        # At a shutdown nobody turns the loop, and a stand-by waits.
        if not self._drained.active or not self._leads.terms:
            return False
        if not is_green():
            # Elsewhere the reader's connection belongs to greenlets of another thread.
            self._drained.settle_ended()
        return True

    def _outranked(self, queues: list[str]) -> None:
        if self._leads.outranked_on(queues):
            self._look()
