"""What a worker does now and then: renew what it holds, and put back what dead workers held.

Owns the timing and the steps of recovery by Kombu's ``visibility_timeout``. Every step is sent without waiting.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from celery_strategies.store import store as calls
from celery_strategies.store.link import ignore
from celery_strategies.store.store import Place
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.session import Session
from celery_strategies.transport.settler import Settler

logger = logging.getLogger("celery_strategies.reader")

#: Seconds between looks for held messages that nobody works on.
RECLAIM_INTERVAL = 5.0
#: Seconds of silence after which a word is said, since Redis's ``timeout`` closes silent connections.
KEEPALIVE = 2.5

_PING = calls.command(calls.pack("PING"))


class Upkeep:
    """Keep the records of *settler*'s worker fresh and sweep those that nobody refreshes.

    *restore_foreign* puts back messages of stock workers, by tag; *look* says that a take is worth while; a message
    that has outlived *most* workers (0: any number) does not come back.
    """

    def __init__(
        self,
        settler: Settler,
        patience: Patience,
        restore_foreign: Callable[[list[str], float], int],
        look: Callable[[bool], None],
        most: int = 0,
    ) -> None:
        self._most = most
        self._settler = settler
        self._patience = patience
        self._restore_foreign = restore_foreign
        self._look = look
        self._next_refresh = self._next_sweep = self._next_reclaim = 0.0
        self._sweeping = False

    def reset(self) -> None:
        """Begin anew on a new connection, with a refresh and a sweep."""
        self._next_refresh = self._next_sweep = 0.0
        self._sweeping = False

    def run(self, session: Session, now: float) -> None:
        """Do what is due at *now* (monotonic seconds)."""
        timeout = session.visibility_timeout
        if now >= self._next_refresh:
            self._next_refresh = now + min(60.0, max(0.2, timeout / 5))
            self._refresh(session)
        if now >= self._next_sweep and not self._sweeping:
            interval = min(60.0, max(0.5, timeout / 10))
            self._next_sweep = now + interval * random.uniform(0.8, 1.2)
            self.sweep(session)
        if now >= self._next_reclaim:
            self._next_reclaim = now + RECLAIM_INTERVAL
            self._settler.reclaim()
        if now - session.link.sent_at > KEEPALIVE:
            session.link.send(_PING, ignore)

    def _refresh(self, session: Session) -> None:
        tags = list(self._settler.held)
        for start in range(0, max(1, len(tags)), calls.TAG_LIMIT):
            packed = session.store.refresh(tags[start : start + calls.TAG_LIMIT], session.ttl)
            session.link.send(packed, partial(self._refreshed, session))

    def _refreshed(self, session: Session, reply: Any) -> None:
        if isinstance(reply, RedisError):
            # A busy worker may send nothing else for long: what is not renewed would be delivered again.
            self._settler.refuse(session, "renewal", reply)
            self._next_refresh = monotonic() + self._patience.remaining(monotonic(), "renewal")
        else:
            self._patience.accepted("renewal")

    def sweep(self, session: Session) -> None:
        """Look for records that nobody refreshed within the visibility timeout, and put them back."""
        self._sweeping = True
        packed = session.store.expired(session.visibility_timeout, calls.TAKE_LIMIT)
        session.link.send(packed, partial(self._expired, session))

    def _failed(self, error: Exception) -> None:
        self._sweeping = False
        self._patience.complain("sweep", "Could not look for messages of dead workers: %s", error)

    def _expired(self, session: Session, reply: Any) -> None:
        if isinstance(reply, RedisError):
            self._failed(reply)
            return
        limit, *found = reply
        mine = self._settler.tags()
        tags = [tag for tag in map(bytes.decode, found) if tag not in mine]
        if not tags:
            self._sweeping = False
            return
        places: list[Any] = []

        def collect(place: Any) -> None:
            places.append(place)
            if len(places) == len(tags):
                self._restore(session, limit, tags, places)

        packed = b"".join(
            calls.command(calls.pack("HGET", session.keys.holder(calls.worker_of(tag)), tag))
            for tag in tags
        )
        session.link.send(packed, *([collect] * len(tags)))

    def _restore(self, session: Session, limit: bytes, tags: list[str], places: list[Any]) -> None:
        self._sweeping = False
        pairs = list(zip(tags, places, strict=True))
        ours = [(tag, place) for tag, place in pairs if self._readable(place)]
        foreign = [tag for tag, place in pairs if place is None]
        if ours:
            session.link.send(
                session.store.restore(ours, limit=limit, died=True, most=self._most), self._restored
            )
        if foreign:
            try:
                self._restored(self._restore_foreign(foreign, float(limit)))
            except Exception as exc:  # noqa: BLE001  # a record of somebody else's must not end the loop
                self._failed(exc)

    def _readable(self, place: Any) -> bool:
        if not isinstance(place, bytes):
            return False
        try:
            Place.parse(place)
        except ValueError:
            self._patience.complain("place", "A holder entry cannot be read: %r", place)
            return False
        return True

    def _restored(self, reply: Any) -> None:
        if isinstance(reply, RedisError):
            self._failed(reply)
        elif reply:
            self._look(False)
            # There may be more than one sweep's worth.
            self._next_sweep = 0.0
            logger.warning("Restored %d messages whose worker did not finish them", reply)
