"""A worker's sign of life, and its watch over the others.

Owns a thread with a connection of its own, since the loop may be busy with a job (solo) or with a reconnect. It beats:
one call says that the worker lives, renews what it holds, and names those who seem not to live. Its *session* is a
subscription to a channel that nobody publishes to: it ends with the connection, so with the process.

A worker is dead

* if its session is gone for ``GRACE``, no beat came meanwhile, and it did beat while this watcher was connected; or
* if this watcher has itself seen the same last beat for ``stale_after``, over many prompt looks on one connection.

After a restart of Redis all sessions are gone at once, and all beats are old: the first rule then says nothing of those
who have not come back yet. Whoever sees a death puts back at once what the dead held.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any

from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError

from celery_strategies.store import store as calls
from celery_strategies.store.link import SUPPORTS_PUSH, Link, ignore
from celery_strategies.store.store import Store
from celery_strategies.transport.threads import ThreadLogger, readable, start_thread

#: All lines are written in the thread, so not by `logging` itself.
logger = ThreadLogger("celery_strategies.keeper")

#: Seconds between beats.
BEAT_INTERVAL = 0.5
#: Seconds between looks whether a worker that shuts down can give up its leases.
HURRY_INTERVAL = 0.02
#: Seconds that a session must be gone.
GRACE = 0.75
#: Seconds of silence, as one watcher sees it, after which a worker counts as dead.
STALE_AFTER = 10.0
#: Seconds without a turn of the loop after which a worker does not claim to live, unless a job blocks the loop.
LOOP_STALE_AFTER = 30.0
#: Most calls that bury one worker before the next beat.
BURY_CALLS = 16
#: Seconds that a worker's entry outlives its last beat.
ENTRY_TTL = 60.0

_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


@dataclass(slots=True)
class _Suspect:
    """A worker that seems not to live: its last beat, and since when this connection has seen it so, and no session."""

    beat: int
    since: float
    gone_since: float | None


class Keeper:
    """Beat for the worker of *store*, and bury dead ones.

    *connect* returns a new connection, *tags* what is held now, *lives* whether the loop shows signs of life, *entry*
    what the worker says of itself (with its "queues" and its consumer "priority"), *also* what else to send at each
    beat. *buried* is called, in the thread, when messages were put back, *outranked* at each beat with the queues that
    a live worker of higher priority reads. *hurries* is called at each turn, and very often while it returns true: then
    leases are given up, and when those were all, *stepped_down* is called. *ttl* is that of what the worker holds, in
    milliseconds, *stale_after* in seconds; a message that has outlived *most* workers (0: any number) does not come
    back.
    """

    def __init__(
        self,
        store: Store,
        ttl: int,
        *,
        connect: Callable[[], Any],
        tags: Callable[[], Iterable[str]],
        lives: Callable[[], bool],
        leads: Callable[[], bool] = lambda: True,
        entry: Callable[[], Mapping[str, Any]],
        buried: Callable[[], None],
        outranked: Callable[[list[str]], None] = lambda _queues: None,
        also: Callable[[], Iterable[bytes]] = tuple,
        hurries: Callable[[], bool] = lambda: False,
        stepped_down: Callable[[], None] = lambda: None,
        stale_after: float = STALE_AFTER,
        most: int = 0,
    ) -> None:
        self._most = most
        self._store = store
        self._ttl = ttl
        self._connect = connect
        self._tags = tags
        self._lives = lives
        self._leads = leads
        self._entry = entry
        self._buried = buried
        self._outranked = outranked
        self._queues: tuple[str, ...] = ()
        self._priority = 0
        self._also = also
        self._hurries = hurries
        self._stepped_down = stepped_down
        self._stale_after = stale_after
        self._stopping = False
        self._nudge, self._nudged = socket.socketpair()
        self._link: Link | None = None
        self._told: str | None = None
        self._introduced: tuple[str, ...] = ()
        self._unreadable: set[str] = set()
        self._unburied: set[str] = set()
        #: The server's time, in milliseconds, of the first beat over this connection.
        self._began = 0
        self._suspects: dict[str, _Suspect] = {}
        self._looked = self._next_beat = 0.0
        self._failing = self._warned = self._session = False
        self._running = self._moved = False
        _keepers.add(self)

    def start(self) -> None:
        """Begin to beat."""
        self._running = True
        start_thread(self._main, "celery-strategies-keeper")

    def nudge(self) -> None:
        """Have the thread turn now. Any thread, or a signal handler."""
        with suppress(OSError):
            self._nudge.send(b"\0")

    def follow(self) -> None:
        """Go to another broker: what *connect* returns has changed."""
        self._moved = True
        self._next_beat = 0.0
        self.nudge()

    def stop(self) -> None:
        """Stop beating; waits a moment for a call that is out."""
        self._stopping = True
        self.nudge()
        # Not join(): in a green process it waits for greenlets only.
        deadline = monotonic() + 2.0
        while self._running and monotonic() < deadline:
            sleep(0.005)
        self._nudge.close()
        self._nudged.close()
        logger.flush()

    # -- the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self._running = False

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping:
            try:
                if monotonic() >= self._next_beat:
                    pause = self._turn()
                    self._next_beat = monotonic() + pause
                    if self._failing:
                        self._failing = False
                        logger.info("The keeper reaches Redis again")
                if self._hurries() and not self._step_down():
                    pause = HURRY_INTERVAL
            except Exception as exc:  # noqa: BLE001  # a keeper that ends lets a living worker look dead
                pause = BEAT_INTERVAL
                self._next_beat = monotonic() + pause
                self._failed(exc)
            self._wait(max(0.0, min(pause, self._next_beat - monotonic())))
        self._disconnect()

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            unexpected = not isinstance(error, (RedisError, OSError))
            logger.warning(
                "The keeper does not reach Redis, trying again: %s", error, exc_info=unexpected
            )
        refused = isinstance(error, ResponseError) and not isinstance(error, ReadOnlyError)
        if not refused or "-READONLY" in str(error):
            self._disconnect()
        # Else the session stays: a call that Redis refuses must not make this worker look dead.

    def _step_down(self) -> bool:
        """Give up the leases of queues whose jobs have ended; returns whether that were all."""
        link = self._link
        if link is None or not link.alive or self._call(link, self._store.step_down()):
            return False
        self._stepped_down()
        return True

    def _wait(self, pause: float) -> None:
        """Sleep, but not on if the connection ends: the session has to be there again at once."""
        watched = [self._nudged.fileno()]
        link = self._link
        if link is not None and link.alive:
            watched.append(link.fileno())
        with suppress(OSError, ValueError):
            ready = readable(watched, pause)
            if watched[0] in ready:
                self._nudged.recv(64)
            if len(watched) > 1 and watched[1] in ready and link is not None:
                try:
                    link.pump()
                except (RedisError, OSError):
                    self._disconnect()
                    self._next_beat = 0.0

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _begin(self) -> Link:
        link = Link(self._connect(), lambda: None)
        self._link = link
        self._suspects.clear()
        self._began = 0
        self._told = None
        self._session = SUPPORTS_PUSH and self._subscribe(link)
        return link

    def _subscribe(self, link: Link) -> bool:
        channel = self._store.keys.session(self._store.worker)
        packed = calls.command(calls.pack("SUBSCRIBE", channel))
        error = link.subscribe(packed, calls.command(calls.pack("PING")))
        if error is not None and not self._warned:
            self._warned = True
            logger.warning(
                "Redis refuses a subscription to %s (%s): "
                "if this worker dies, its jobs come back after %g s, not at once",
                channel,
                error,
                self._stale_after,
            )
        return error is None

    def _turn(self) -> float:
        """Beat, look and bury; returns the seconds until the next turn."""
        if self._moved:
            self._moved = False
            self._disconnect()
        if not self._lives():
            # No session either: a worker whose loop hangs must not look alive.
            self._disconnect()
            return BEAT_INTERVAL
        link = self._link if self._link is not None and self._link.alive else self._begin()
        before = monotonic()
        entry = self._entry()
        before_that, self._queues = self._queues, tuple(entry["queues"])
        self._priority = int(entry["priority"])
        # While its sources come one by one, as after a reconnect, it must not seem to have given one up.
        leads = self._leads() and self._queues == before_that
        now_ms, has_entry, found = self._beat(link, leads=leads)
        now = monotonic()
        if not self._began:
            self._began = now_ms
        if not has_entry:
            self._told = None
        self._introduce(link, entry)
        if now - before > BEAT_INTERVAL or before - self._looked > 4 * BEAT_INTERVAL:
            # This process slept, or Redis did: whoever was quiet meanwhile need not be dead.
            self._suspects.clear()
        self._looked = now
        for packed in self._also():
            self._call(link, packed)
        for worker, beat, by_session in self._dead(found, now):
            self._bury(link, worker, beat, by_session=by_session)
        waiting = any(suspect.gone_since is not None for suspect in self._suspects.values())
        return BEAT_INTERVAL / 2 if waiting else BEAT_INTERVAL

    def _beat(self, link: Link, *, leads: bool) -> tuple[int, bool, list[tuple[str, int, bool]]]:
        tags = list(self._tags())
        quiet = int(3 * BEAT_INTERVAL * 1000)
        args = (quiet, self._ttl, int(ENTRY_TTL * 1000))
        answer: Any = None
        for start in range(0, max(1, len(tags)), calls.TAG_LIMIT):
            packed = self._store.beat(
                tags[start : start + calls.TAG_LIMIT],
                *args,
                queues=self._queues,
                priority=self._priority,
                lease_ttl=int(self._stale_after * 1000) * (1 if leads else -1),
            )
            answer = self._call(link, packed)
        now, entry, outranked, *rest = answer
        flags = zip(self._queues, outranked.decode(), strict=True)
        self._outranked([queue for queue, flag in flags if flag == "1"])
        found = [
            (name.decode("utf-8", "replace"), int(float(beat)), bool(gone))
            for name, beat, gone in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        ]
        return int(now), bool(entry), found

    def _introduce(self, link: Link, entry: Mapping[str, Any]) -> None:
        """Write down what the worker says of itself, if that is new, and with which priority it reads its queues."""
        text = json.dumps(entry, sort_keys=True)
        if text == self._told:
            return
        keys, worker = self._store.keys, self._store.worker
        fields: list[Any] = []
        for name, value in entry.items():
            fields += [name, value if isinstance(value, (str, int)) else json.dumps(value)]
        # A worker without a session must not be taken for one whose session is gone.
        fields += ["session", int(self._session)]
        for queue in self._queues:
            packed = calls.command(
                calls.pack("ZADD", keys.consumers(queue), self._priority, worker)
            )
            link.send(packed, partial(self._stood_in, queue))
        for queue in set(self._introduced) - set(self._queues):
            link.send(calls.command(calls.pack("ZREM", keys.consumers(queue), worker)), ignore)
        self._introduced = self._queues
        link.send(calls.command(calls.pack("HSET", keys.entry(worker), *fields)), ignore)
        self._call(
            link, calls.command(calls.pack("PEXPIRE", keys.entry(worker), int(ENTRY_TTL * 1000)))
        )
        self._told = text

    def _stood_in(self, queue: str, reply: Any) -> None:
        if isinstance(reply, RedisError) and queue not in self._unreadable:
            self._unreadable.add(queue)
            logger.warning("The consumer priorities of queue %r cannot be used: %s", queue, reply)

    def _dead(self, found: list[tuple[str, int, bool]], now: float) -> list[tuple[str, int, bool]]:
        suspects: dict[str, _Suspect] = {}
        for worker, beat, gone in found:
            before = self._suspects.get(worker)
            if before is None or before.beat != beat:
                before = _Suspect(beat, now, None)
            if not gone:
                before.gone_since = None
            elif before.gone_since is None and beat >= self._began:
                before.gone_since = now
            suspects[worker] = before
        self._suspects = suspects
        dead = []
        for worker, suspect in suspects.items():
            gone = suspect.gone_since is not None and now - suspect.gone_since >= GRACE
            if gone or now - suspect.since >= self._stale_after:
                dead.append((worker, suspect.beat, gone))
        return dead

    def _bury(self, link: Link, worker: str, beat: int, *, by_session: bool) -> None:
        packed = self._store.bury(worker, beat, by_session=by_session, most=self._most)
        total, left = 0, 1
        try:
            for _ in range(BURY_CALLS):
                moved, left, step = self._call(link, packed)
                total += max(0, moved)
                if step <= 0 or not left:
                    break
        except ResponseError as exc:
            # A dead worker that cannot be buried must not end the beats of the living.
            self._stuck(worker, str(exc))
            return
        if moved < 0:
            # It lives, or somebody else has buried it.
            self._suspects.pop(worker, None)
        elif left:
            if not step:
                self._stuck(worker, f"{left} messages whose queues cannot be written")
        else:
            self._suspects.pop(worker, None)
            self._unburied.discard(worker)
            logger.warning("Worker %s is dead: %d messages that it held went back", worker, total)
        if total or not left:
            self._buried()

    def _stuck(self, worker: str, why: str) -> None:
        if worker not in self._unburied:
            self._unburied.add(worker)
            logger.warning("Not all that dead worker %s held can go back yet: %s", worker, why)

    def _call(self, link: Link, packed: bytes) -> Any:
        try:
            return link.call(packed)
        except NoScriptError:
            for reply in link.call_all(calls.load_scripts()):
                if isinstance(reply, RedisError):
                    raise reply from None
            return link.call(packed)

    def _forget_in_child(self) -> None:
        """Close a child process's copy of the connection, else the session would outlive this process."""
        link = self._link
        sock = getattr(link.connection, "_sock", None) if link is not None else None
        if sock is not None:
            # Not shutdown(): that would end the parent's, too.
            with suppress(OSError):
                os.close(sock.detach())


def _after_fork() -> None:
    for keeper in tuple(_keepers):
        keeper._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
