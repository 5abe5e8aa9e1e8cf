"""The end of a reader: no more takes, every settle at once, and what is left goes back.

Owns the shutdown. From the moment the loop has ended nobody turns it, so settles that come from pool threads are sent
by whoever settles, under a lock, on a new connection if need be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic, sleep

from redis.exceptions import RedisError

from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.transport.connector import Connector
from celery_strategies.transport.idle import Idle
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.settler import Settler

logger = logging.getLogger("celery_strategies.reader")

#: Seconds that a shutdown goes on trying to reach Redis with the last settles.
LAST_WORDS = 5.0


class Drain:
    """End the reading of one worker."""

    def __init__(
        self, connector: Connector, settler: Settler, idle: Idle, patience: Patience
    ) -> None:
        #: Whether it has begun.
        self.active = False
        self._connector = connector
        self._settler = settler
        self._idle = idle
        self._patience = patience
        self._lock = threading.RLock()

    def begin(self, refuse_messages: Callable[[], None]) -> None:
        """Stop taking: the outstanding take goes back, and from here on every settle is sent at once.

        Called when the loop has ended, or from a signal handler in the middle of a read. *refuse_messages* is called
        before what is still to come is read: it has nobody to go to.
        """
        if self.active:
            return
        with self._lock:
            session = self._connector.session
            if session is not None and session.link.busy:
                # Interrupted in the middle of a reply: this connection cannot be read any further.
                session.link.close()
            elif session is not None:
                refuse_messages()
                try:
                    while session.link.pending:
                        session.link.read_one()
                    self._idle.leave(session)
                except (RedisError, ImproperlyConfigured) as exc:
                    logger.info("The connection to Redis was lost at shutdown: %s", exc)
            self.active = True
            self.settle_now()

    @property
    def _pending(self) -> int:
        return self._settler.acks + self._settler.others + self._settler.unconfirmed

    def settle_now(self) -> None:
        """Send what is pending, connecting anew if need be; what does not go through stays pending."""
        with self._lock:
            for last in (False, True):
                if not self._pending or not self._connector.reachable:
                    return
                try:
                    session = self._connector.session
                    if session is None or not session.link.alive:
                        session = self._connector.connect()
                    self._settler.send_others(session)
                    self._settler.send_acks(session)
                    while session.link.pending:
                        session.link.read_one()
                except (RedisError, OSError, ImproperlyConfigured) as exc:
                    if last:
                        self._patience.complain(
                            "drain", "Settles do not reach Redis at shutdown, trying again: %s", exc
                        )

    def settle_ended(self) -> None:
        """Say which of the jobs that were acknowledged when they started have ended. Any thread."""
        with self._lock:
            self._settler.note_ended()
            self.settle_now()

    def finish(
        self,
        tags: Collection[str],
        started: Callable[[str], bool],
        before_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        """Give *tags* back and leave; *started* tells whether a tag's job had begun.

        *before_leaving* is called when nothing is left to say but good-bye.
        """
        begun = {tag: started(tag) for tag in tags}
        for flag in (False, True):
            self._settler.give_back([tag for tag in tags if begun[tag] is flag], started=flag)
        with self._lock:
            # Their jobs have ended, or end with this process.
            self._settler.note_ended(all_of_them=True)
            deadline = monotonic() + LAST_WORDS
            self.settle_now()
            while self._pending and self._connector.reachable and monotonic() < deadline:
                sleep(0.2)
                self.settle_now()
            left = self._pending
            if left:
                logger.error(
                    "%d settles did not reach Redis: their messages will be delivered again", left
                )
            elif tags:
                logger.warning(
                    "%d messages that were not finished went back to their queues", len(tags)
                )
            before_leaving()
            session = self._connector.session
            if session is not None and session.link.alive:
                # Nothing depends on it: others put back what a dead worker held.
                with suppress(RedisError, OSError):
                    session.link.call(session.store.leave())
            self._connector.detach(final=True)
