"""A worker's sign of life, and its watch over the others.

Owns a thread with a connection of its own, since the loop may be busy with a job (solo) or with a reconnect. It beats:
one call says that the worker lives, renews what it holds, and names those who have been quiet. A worker that this one
has itself seen quiet for ``STALE_AFTER``, over many prompt looks on one connection, is dead: what it held goes back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_strategies.store import store as calls
from celery_strategies.store.link import Link
from celery_strategies.store.store import Store

logger = logging.getLogger("celery_strategies.keeper")

#: Seconds between beats.
BEAT_INTERVAL = 2.0
#: Seconds of silence, as one watcher sees it, after which a worker counts as dead.
STALE_AFTER = 10.0
#: Seconds without a turn of the loop after which a worker does not claim to live, unless a job blocks the loop.
LOOP_STALE_AFTER = 30.0


class Keeper:
    """Beat for the worker of *store*, and bury dead ones.

    *connect* returns a new connection, *tags* what is held now, *lives* whether the loop shows signs of life; *buried*
    is called, in the thread, when messages were put back. *also* returns what else to send at each beat.
    """

    def __init__(
        self,
        store: Store,
        ttl: int,
        *,
        connect: Callable[[], Any],
        tags: Callable[[], Iterable[str]],
        lives: Callable[[], bool],
        buried: Callable[[], None],
        also: Callable[[], Iterable[bytes]] = tuple,
    ) -> None:
        self._store = store
        self._ttl = ttl
        self._connect = connect
        self._tags = tags
        self._lives = lives
        self._buried = buried
        self._also = also
        self._stop = threading.Event()
        #: Quiet workers: their last beat, and since when, in monotonic seconds, this connection has seen it.
        self._quiet: dict[str, tuple[int, float]] = {}
        self._looked = 0.0
        self._failing = False
        self._thread = threading.Thread(
            target=self._run, name="celery-strategies-keeper", daemon=True
        )

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; waits a moment for a call that is out."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(BEAT_INTERVAL)

    def _run(self) -> None:
        link: Link | None = None
        while not self._stop.is_set():
            try:
                if link is None:
                    link = Link(self._connect(), lambda: None)
                    self._quiet.clear()
                self._turn(link)
                if self._failing:
                    self._failing = False
                    logger.info("The keeper reaches Redis again")
            except (RedisError, OSError) as exc:
                if not self._failing:
                    self._failing = True
                    logger.warning("The keeper does not reach Redis, trying again: %s", exc)
                if link is not None:
                    link.close()
                    link = None
            self._stop.wait(BEAT_INTERVAL)
        if link is not None:
            link.close()

    def _turn(self, link: Link) -> None:
        if not self._lives():
            return
        began = monotonic()
        tags = list(self._tags())
        first, rest = tags[: calls.TAG_LIMIT], tags[calls.TAG_LIMIT :]
        quiet = int(2.5 * BEAT_INTERVAL * 1000)
        found = self._call(link, self._store.beat(first, quiet, self._ttl))
        while rest:
            more, rest = rest[: calls.TAG_LIMIT], rest[calls.TAG_LIMIT :]
            self._call(link, self._store.beat(more, quiet, self._ttl))
        now = monotonic()
        if now - began > BEAT_INTERVAL or began - self._looked > 3 * BEAT_INTERVAL:
            # This process slept, or Redis did: what was quiet meanwhile need not be dead.
            self._quiet.clear()
        self._looked = now
        for packed in self._also():
            self._call(link, packed)
        for worker, beat in self._dead(found, now):
            self._bury(link, worker, beat)

    def _dead(self, found: Any, now: float) -> list[tuple[str, int]]:
        seen = {}
        for name, score in zip(found[::2], found[1::2], strict=True):
            worker, beat = name.decode(), int(float(score))
            before = self._quiet.get(worker)
            seen[worker] = before if before is not None and before[0] == beat else (beat, now)
        self._quiet = seen
        return [
            (worker, beat) for worker, (beat, since) in seen.items() if now - since > STALE_AFTER
        ]

    def _bury(self, link: Link, worker: str, beat: int) -> None:
        total, left = 0, 1
        while left:
            moved, left = self._call(link, self._store.bury(worker, beat))
            total += max(0, moved)
        self._quiet.pop(worker, None)
        if total:
            logger.warning("Worker %s is dead: %d messages that it held went back", worker, total)
            self._buried()

    def _call(self, link: Link, packed: bytes) -> Any:
        try:
            return link.call(packed)
        except NoScriptError:
            for reply in link.call_all(calls.load_scripts()):
                if isinstance(reply, RedisError):
                    raise reply from None
            return link.call(packed)
        except RedisTimeoutError:
            link.close()
            raise
