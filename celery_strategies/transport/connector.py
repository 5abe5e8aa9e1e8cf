"""A reader's way to its broker: one session after another, and what is held across them.

Owns the connection pool, the sessions, and the comparison of what Redis says this worker holds with what it knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from celery_strategies.store import store as calls
from celery_strategies.store.link import Link, ignore
from celery_strategies.store.store import Store
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.session import Session
from celery_strategies.transport.settler import Settler

logger = logging.getLogger("celery_strategies.reader")


class Connector:
    """Connect *worker* to the broker of one channel after the other.

    *look* is called when a tracked key changed, *begun* at each new session, before anything else is sent in it.
    """

    def __init__(
        self,
        worker: str,
        settler: Settler,
        patience: Patience,
        *,
        look: Callable[[bool], None],
        begun: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.channel: Any = None
        self.session: Session | None = None
        self._settler = settler
        self._patience = patience
        self._look = look
        self._begun = begun
        self._pool: Any = None
        self._sessions = 0
        self._address: Any = None
        #: Whether the last :meth:`use` went to another broker than the one before.
        self.moved = False

    @property
    def reachable(self) -> bool:
        """Whether there is a broker to connect to."""
        return self._pool is not None

    def use(self, channel: Any) -> None:
        """Go to *channel*'s broker from now on."""
        self.detach(final=True)
        self._pool = channel.reader_pool()
        self.channel = channel
        options = self._pool.connection_kwargs
        address = [options.get(name) for name in ("host", "port", "path", "db")]
        self.moved = self._address is not None and address != self._address
        self._address = address

    def connect(self) -> Session:
        """Begin a session, and take up what this worker still holds on the broker.

        Raises:
            Exception: the transport's connection errors, ImproperlyConfigured; there is no session then.
        """
        self.drop()
        keys = self.channel.strategy_keys()
        self._sessions += 1
        connection = self._pool.get_connection()
        try:
            session = Session(
                Link(connection, partial(self._look, False)),
                Store(keys, self.worker),
                keys,
                str(self._sessions),
                float(self.channel.visibility_timeout),
            )
            entries = session.open(self._patience)
            self._settler.resume()
            unknown = self._unknown(entries.items())
            for start in range(0, len(unknown), calls.TAKE_LIMIT):
                session.link.call(session.store.restore(unknown[start : start + calls.TAKE_LIMIT]))
        except BaseException:
            connection.disconnect()
            self._pool.release(connection)
            raise
        if unknown:
            logger.warning(
                "%d messages of a take whose reply was lost went back to their queues", len(unknown)
            )
        self._begun()
        self.session = session
        return session

    def look_for_half_a_take(self, session: Session) -> None:
        """Put back what a script that failed halfway has moved already, else a living worker would hide it."""

        def compare(reply: Any) -> None:
            if isinstance(reply, RedisError):
                return
            pairs = (
                reply.items()
                if isinstance(reply, dict)
                else zip(reply[::2], reply[1::2], strict=True)
            )
            unknown = self._unknown((tag.decode(), place) for tag, place in pairs if tag)
            for start in range(0, len(unknown), calls.TAKE_LIMIT):
                packed = session.store.restore(unknown[start : start + calls.TAKE_LIMIT])
                session.link.send(packed, ignore)

        if session.link.alive:
            packed = calls.command(calls.pack("HGETALL", session.keys.holder(self.worker)))
            session.link.send(packed, compare)

    def _unknown(self, entries: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Return those of *entries*, which Redis says this worker holds, that it never heard of."""
        known = self._settler.tags()
        return [(tag, place) for tag, place in entries if tag not in known]

    def another_connection(self) -> Any:
        """Return a connection of its own to the same broker, which outlives the sessions.

        Raises:
            redis.exceptions.ConnectionError: it cannot be reached.
        """
        pool = self._pool
        if pool is None:
            raise RedisConnectionError("not connected")
        # Not one of the pool's: those close with the session.
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        return connection

    def drop(self) -> None:
        """End the session."""
        session, self.session = self.session, None
        if session is not None:
            session.link.close()
            if self._pool is not None:
                self._pool.release(session.link.connection)

    def detach(self, *, final: bool = False) -> None:
        """Drop the connection; unless *final*, the way to the broker is kept.

        A shutdown that begins before the next session needs it.
        """
        self.drop()
        if self._pool is not None:
            self._pool.disconnect()
            if final:
                self._pool = None
