"""What a worker holds, and how each delivery ends.

Owns the held tags and the settles on their way to Redis: pending (any thread may add), sent and unconfirmed, or
to be sent again after a lost connection. Settling twice does no harm, so what is in doubt is sent again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import clock_gettime, monotonic
from typing import Any
from weakref import ref

from redis.exceptions import NoScriptError, ReadOnlyError, RedisError

from celery_strategies.store import store as calls
from celery_strategies.store.link import ignore
from celery_strategies.store.store import Place, Store
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.session import Session

logger = logging.getLogger("celery_strategies.reader")

#: Not on every platform.
CLOCK_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def boot_time() -> float:
    """Return seconds by a clock that goes on while the machine sleeps, where there is one."""
    return clock_gettime(CLOCK_BOOTTIME) if CLOCK_BOOTTIME is not None else monotonic()


@dataclass(slots=True)
class Held:
    """One message that this worker holds: its queue, its list there, and who works on it.

    *message* is a weak reference: once nobody has the message any more, nobody can settle it. *job* is one to what
    runs it, if that is known. *limited* says that it has a permit of a limit.
    """

    queue: str
    list: int
    message: Callable[[], Any] | None = None
    job: Callable[[], Any] | None = None
    #: When it was asked for, by :func:`boot_time`.
    since: float = 0.0
    suspect: bool = False
    limited: bool = False


#: A settle that is not an ack: the tag and the call that a store makes of it.
Other = tuple[str, Callable[[Store], bytes]]
#: A message on its way back: the tag, and whether its job had begun.
Back = tuple[str, bool]
#: What one call settles.
Batch = tuple[list[str], list[Other], list[Back]]


def _bare(settle: str) -> str:
    """Return the tag of a settle that may say more than that."""
    return settle.lstrip(calls.STILL_RUNS + calls.HAS_ENDED + calls.HAD_PERMIT)


class Settler:
    """Keep the held tags of *worker* and settle them.

    *notify* is called, from any thread, when a settle is pending. *runs* says whether a job, as told to
    :meth:`work_on`, has not ended.
    """

    def __init__(
        self,
        worker: str,
        patience: Patience,
        notify: Callable[[], None],
        runs: Callable[[Any], bool] = lambda _job: False,
    ) -> None:
        self.worker = worker
        self.held: dict[str, Held] = {}
        #: Jobs that run although their message is acknowledged, where they count: for caps, groups and limits.
        self.running: dict[str, Callable[[], Any]] = {}
        #: Tags of jobs that have a permit of a limit.
        self.limited: set[str] = set()
        self._freed = False
        self._runs = runs
        self._patience = patience
        self._notify = notify
        self._acks: deque[str] = deque()
        self._others: deque[Other] = deque()
        self._back: deque[Back] = deque()
        self._unconfirmed: dict[int, Batch] = {}
        self._resent: set[str] = set()
        self._batch = 0

    # -- any thread -----------------------------------------------------------------------------

    def owns(self, tag: object) -> bool:
        """Whether *tag* was minted for this worker."""
        return isinstance(tag, str) and calls.worker_of(tag) == self.worker

    def settle(self, tag: str) -> None:
        """Acknowledge *tag*, or reject it for good."""
        held = self._holds(tag, "Settling")
        if held is not None:
            if held.job is not None and self._goes_on(held.job):
                self.running[tag] = held.job
                self._acks.append(calls.STILL_RUNS + tag)
            else:
                self._acks.append(calls.HAD_PERMIT + tag if self._free(tag) else tag)
            self._release(tag)

    def requeue(self, tag: str) -> None:
        """Put *tag*'s message at the tail of its level."""
        held = self._holds(tag, "Requeueing")
        if held is not None:
            self._others.append((tag, lambda store: store.requeue(tag, held.queue, held.list)))
            self._free(tag)
            self._release(tag)

    def set_aside(self, tag: str, reason: str) -> None:
        """Move *tag*'s message to where an operator can look at it."""
        held = self._holds(tag, "Setting aside")
        if held is not None:
            self._others.append((tag, lambda store: store.set_aside(tag, held.queue, reason)))
            self._free(tag)
            self._release(tag)

    def give_back(self, tags: Iterable[str], *, started: bool = False) -> None:
        """Put messages back where they were, in their order; *started* counts the delivery."""
        for tag in tags:
            if tag in self.held:
                self._back.append((tag, started))
                self._free(tag)
                self.held.pop(tag, None)
        self._notify()

    def delay(self, tag: str, due: float, *, limited: bool = False) -> None:
        """Put *tag*'s message where it waits until *due*, in seconds since the epoch by the server's clock.

        *limited* says that it waits for a rate limit.
        """
        held = self._holds(tag, "Delaying")
        if held is not None:
            self._others.append(
                (tag, lambda store: store.delay(tag, held.queue, due, limited=limited))
            )
            self._free(tag)
            self._release(tag)

    def _goes_on(self, job: Callable[[], Any]) -> bool:
        found = job()
        return found is not None and self._runs(found)

    def _holds(self, tag: str, verb: str) -> Held | None:
        held = self.held.get(tag)
        if held is None:
            self._patience.complain(
                f"{verb} {tag}", "%s of a message that is not held any more: %s", verb, tag
            )
        return held

    def _free(self, tag: str) -> bool:
        """Note that *tag* makes room for another job; returns whether it had a permit of a limit."""
        if calls.is_counted(tag):
            self._freed = True
        if tag not in self.limited:
            return False
        self.limited.discard(tag)
        self._freed = True
        return True

    def _release(self, tag: str) -> None:
        if calls.is_counted(tag):
            self._freed = True
        # After the tag has its new place: a reconnect that looks in between must see it somewhere.
        self.held.pop(tag, None)
        self._notify()

    # -- the loop -------------------------------------------------------------------------------

    @property
    def acks(self) -> int:
        """Number of acknowledgements that wait."""
        return len(self._acks)

    @property
    def others(self) -> int:
        """Number of other settles that wait."""
        return len(self._others) + len(self._back)

    @property
    def returning(self) -> bool:
        """Whether messages are on their way back: a take now would pass them by."""
        return any(back for _, _, back in self._unconfirmed.values())

    @property
    def unconfirmed(self) -> int:
        """Number of calls whose reply has not come."""
        return len(self._unconfirmed)

    def tags(self) -> set[str]:
        """Return every tag that Redis may still list as this worker's, and rightly."""
        # Held first: a tag that another thread moves meanwhile is seen where it goes.
        settling = {*self.held, *self.running}
        settling.update(map(_bare, tuple(self._acks)))
        settling.update(tag for tag, _ in (*self._others, *self._back))
        for acks, others, back in self._unconfirmed.values():
            settling.update(map(_bare, acks), (tag for tag, _ in (*others, *back)))
        return settling

    def note_ended(self, *, all_of_them: bool = False) -> bool:
        """Look which of the jobs that were acknowledged when they started have ended, or say that all have.

        Returns whether a settle that is on its way lets another job run: one of its key, its group or its limit.
        """
        for tag, job in tuple(self.running.items()):
            if all_of_them or not self._goes_on(job):
                self._acks.append(calls.HAS_ENDED + tag)
                del self.running[tag]
                self._free(tag)
        if not self._freed:
            return False
        # A settle that frees something appends first: what another thread sets meanwhile goes out with this turn, too.
        self._freed = False
        return True

    def hold(self, tag: str, queue: str, step: int, since: float = 0.0) -> None:
        """Note that a take that was sent at *since*, by :func:`boot_time`, handed out *tag*."""
        self.held[tag] = Held(queue, step, since=since)

    def limit(self, tag: str) -> bool:
        """Note that the job of *tag* has a permit of a limit; False if it is not held any more."""
        held = self.held.get(tag)
        if held is None:
            return False
        held.limited = True
        self.limited.add(tag)
        return True

    def forget(self, tag: str) -> None:
        """Note that Redis does not list *tag* as ours any more, and rightly."""
        self.held.pop(tag, None)

    def pop_acks(self) -> list[str]:
        """Take out the acks that the next call carries."""
        acks: list[str] = []
        while self._acks and len(acks) < calls.TAG_LIMIT:
            acks.append(self._acks.popleft())
        return acks

    def expect(
        self, acks: list[str], others: list[Other] | None = None, back: list[Back] | None = None
    ) -> int:
        """Note what a call that is about to be sent settles; returns the number of the batch."""
        self._batch += 1
        if acks or others or back:
            self._unconfirmed[self._batch] = (acks, others or [], back or [])
        return self._batch

    def confirm(self, batch: int, what: str, lost: Iterable[bytes | str] = ()) -> None:
        """Note that Redis executed *batch*, a call of kind *what*; *lost* are tags it found in other hands."""
        acks, others, back = self._unconfirmed.pop(batch, ([], [], []))
        self._patience.accepted(what)
        names = [tag if isinstance(tag, str) else tag.decode() for tag in lost]
        gone = [name for name in names if name not in self._resent]
        if gone:
            logger.warning(
                "%d messages were finished here, but Redis does not list them as ours any more, the first is %s: "
                "another worker has them, or Redis lost its data",
                len(gone),
                gone[0],
            )
        if self._resent:
            self._resent.difference_update(map(_bare, acks), (tag for tag, _ in (*others, *back)))

    def refuse(self, session: Session, what: str, error: RedisError, batch: int = 0) -> None:
        """Take up *batch*, which Redis did not execute; load the scripts again if they are missing."""
        batch_lost = self._unconfirmed.pop(batch, ([], [], []))
        # A script that failed halfway may have settled them already.
        self._resent.update(map(_bare, batch_lost[0]))
        self._take_up(batch_lost)
        if isinstance(error, NoScriptError):
            commands = calls.load_scripts()
            session.link.send(b"".join(commands), *([ignore] * len(commands)))
            return
        self._patience.refused(what, error)
        if isinstance(error, ReadOnlyError) or "-READONLY" in str(error):
            # This server is a replica now: only a new connection finds the master. Redis 6.2 wraps what a
            # script was refused into an error of its own.
            session.link.close()

    def _take_up(self, batch: Batch) -> None:
        acks, others, back = batch
        self._acks.extendleft(reversed(acks))
        self._others.extendleft(reversed(others))
        self._back.extendleft(reversed(back))

    def resume(self) -> None:
        """After a lost connection: what was sent may have been executed or not, so it is sent again."""
        for batch in sorted(self._unconfirmed, reverse=True):
            acks, others, back = self._unconfirmed.pop(batch)
            self._resent.update(map(_bare, acks), (tag for tag, _ in (*others, *back)))
            self._take_up((acks, others, back))

    def send_acks(self, session: Session) -> None:
        """Send all pending acknowledgements."""
        while self._acks:
            acks = self.pop_acks()
            batch = self.expect(acks)
            session.link.send(session.store.settle(acks), partial(self._settled, session, batch))

    def send_others(self, session: Session) -> None:
        """Send everything that is not an acknowledgement."""
        while self._others:
            tag, call = self._others.popleft()
            batch = self.expect([], [(tag, call)])
            session.link.send(call(session.store), partial(self._settled, session, batch))
        while self._back:
            started = self._back[0][1]
            back: list[Back] = []
            while self._back and self._back[0][1] is started and len(back) < calls.TAKE_LIMIT:
                back.append(self._back.popleft())
            batch = self.expect([], None, back)
            holder = session.keys.holder(self.worker)
            packed = calls.command(calls.pack("HMGET", holder, *(tag for tag, _ in back)))
            session.link.send(packed, partial(self._placed, session, batch, back))

    def _placed(self, session: Session, batch: int, back: list[Back], reply: Any) -> None:
        if isinstance(reply, RedisError):
            self.refuse(session, "give back", reply, batch)
            return
        self._unconfirmed.pop(batch, None)
        groups: dict[str, list[tuple[Back, bytes]]] = {}
        for item, place in zip(back, reply, strict=True):
            queue = self._queue_of(place)
            if queue is not None:
                groups.setdefault(queue, []).append((item, place))
        # One call for each queue: a key of one that cannot be written must not hold up the others.
        for group in groups.values():
            started = group[0][0][1]
            packed = session.store.restore(
                [(tag, place) for (tag, _), place in group], started=started
            )
            part = self.expect([], None, [item for item, _ in group])
            session.link.send(packed, partial(self._returned, session, part))

    def _queue_of(self, place: bytes | None) -> str | None:
        if place is None:
            # Redis does not list it as ours any more: nothing to give back.
            return None
        try:
            return Place.parse(place).queue
        except ValueError:
            self._patience.complain("place", "A holder entry cannot be read: %r", place)
            return None

    def _returned(self, session: Session, batch: int, reply: Any) -> None:
        if isinstance(reply, RedisError):
            self.refuse(session, "give back", reply, batch)
        else:
            self.confirm(batch, "give back")

    def _settled(self, session: Session, batch: int, reply: Any) -> None:
        if isinstance(reply, RedisError):
            self.refuse(session, "settle", reply, batch)
        else:
            self.confirm(batch, "settle", reply if isinstance(reply, list) else ())

    # -- upkeep ---------------------------------------------------------------------------------

    def work_on(self, tag: str, message: Any) -> None:
        """Note that *message* is what somebody works on for *tag*."""
        held = self.held.get(tag)
        if held is not None:
            held.message = ref(message)

    def run_by(self, tag: str, job: Any) -> None:
        """Note that *job* is what runs the message of *tag*."""
        held = self.held.get(tag)
        if held is not None and (held.limited or calls.is_counted(tag)):
            held.job = ref(job)

    def reclaim(self) -> None:
        """Give back messages that nobody has any more: nobody is left to settle them.

        Celery leaves some messages unacknowledged on purpose (a cancelled request, a MemoryError) and trusts the
        channel's close to return them; our tags outlive channels. Twice gone, a call apart, is gone.
        """
        orphans = []
        for tag, held in list(self.held.items()):
            if held.message is None or held.message() is not None:
                held.suspect = False
            elif held.suspect:
                orphans.append(tag)
            else:
                held.suspect = True
        if orphans:
            logger.info("%d messages that nobody works on go back to their queues", len(orphans))
            self.give_back(orphans, started=True)
