"""How a worker waits: without polling, without popping, and without a stampede.

Owns the registration among the idle workers of each source and the tracking of keys. When a take comes back
empty, the worker joins the idle workers of its sources: a few *watch* a source, the others *park*. It then has
the server remember the keys it depends on, its own wake key and the lists of the sources it watches, and sleeps
until one changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from celery_strategies.store import store as calls
from celery_strategies.store.link import ignore
from celery_strategies.transport.session import Session

#: Idle workers that watch one source; the others park.
WATCHERS = 2
#: Seconds between the looks of an idle worker that nothing wakes.
LOOK_INTERVAL = 5.0
#: Seconds after which an idle worker that was not seen is forgotten.
STALE_AFTER = 3 * LOOK_INTERVAL
#: Empty takes in a row, although something is there, after which a worker waits instead of looking again.
FUTILE = 3


class Idle:
    """The waiting of *worker*.

    *look* is called when a take is worth while again; *refused* with an error reply; *polling_interval* (seconds)
    is used where the server does not track keys.
    """

    def __init__(
        self,
        worker: str,
        polling_interval: float,
        look: Callable[[bool], None],
        refused: Callable[[RedisError], None],
        accepted: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.polling_interval = polling_interval
        #: Sources whose idle workers this one is among.
        self.registered: tuple[str, ...] = ()
        self.next_look = 0.0
        self._look = look
        self._refused = refused
        self._accepted = accepted
        self._futile = 0

    def reset(self) -> None:
        """Forget everything: the connection is gone, and its registrations with it."""
        self.registered = ()
        self._futile = 0

    def yielded(self, *, full: bool) -> None:
        """Note that a take yielded something; *full*: it filled every slot, which ends the waiting."""
        self._futile = 0
        if full:
            self.registered = ()

    def wait(
        self,
        session: Session,
        queues: Sequence[str],
        more: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        """Arrange to be told when one of *queues* may have something, or a key of *extra* comes to be.

        *more* names one more key to watch for some queues. The keys of *extra* are watched even if the worker parks.
        """
        now = monotonic()
        if not session.tracking:
            self.next_look = now + self.polling_interval
            return
        gone = tuple(queue for queue in self.registered if queue not in queues)
        if gone:
            session.link.send(session.store.unwatch(gone), partial(self._left, session, gone))
        self.registered = tuple(queues)
        self.next_look = now + LOOK_INTERVAL * random.uniform(0.8, 1.2)
        packed = session.store.watch(queues, watchers=WATCHERS, stale=int(STALE_AFTER * 1000))
        session.link.send(packed, partial(self._track, session, queues, more or {}, extra))

    def _track(
        self,
        session: Session,
        queues: Sequence[str],
        more: Mapping[str, str],
        extra: Sequence[str],
        roles: Any,
    ) -> None:
        if isinstance(roles, RedisError):
            self._refused(roles)
            return
        keys = [session.keys.wake(self.worker), *extra]
        for queue, watches in zip(queues, roles, strict=True):
            if watches:
                keys += [session.keys.returned(queue), *session.keys.inboxes(queue)]
                if queue in more:
                    keys.append(more[queue])
        # EXISTS says whether something came meanwhile, and has the server remember the keys.
        caching = calls.command(calls.pack("CLIENT", "CACHING", "YES"))
        packed = caching + calls.command(calls.pack("EXISTS", *keys))
        session.link.send(packed, ignore, self._tracked)

    def _tracked(self, reply: Any) -> None:
        if isinstance(reply, RedisError):
            self._refused(reply)
            return
        self._accepted()
        self._futile = self._futile + 1 if reply else 0
        if 0 < self._futile <= FUTILE:
            # Something lies there that the take did not see: new, or in a list nobody expected.
            self._look(True)
        elif reply:
            # A key that cannot be read, of a wrong type say: looking again at once would never end.
            pause = self.polling_interval * 2 ** min(10, self._futile - FUTILE)
            self.next_look = monotonic() + min(LOOK_INTERVAL, pause)

    def leave(self, session: Session) -> None:
        """Hand the watch on: something came, and this worker has no slot for it."""
        queues, self.registered = self.registered, ()
        if queues:
            session.link.send(session.store.unwatch(queues), partial(self._left, session, queues))

    def _left(self, session: Session, queues: Sequence[str], reply: Any) -> None:
        if isinstance(reply, NoScriptError):
            # The scripts are loaded again, and this one goes behind them.
            self._refused(reply)
            session.link.send(session.store.unwatch(queues), ignore)
