"""Which sources are sorted by key, under which policy, and the sorting of a backlog.

Owns the agreement with Redis on each queue's policy, and the calls that sort what a take had no room for. A take sorts
a little of what is new by itself; where a large backlog is found, one worker, elected by the first call, sorts on, for
at most half of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from celery_strategies.core.policy import Policy
from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.store import store as calls
from celery_strategies.store.store import Agreement, Grant, SourceKeys, steer
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.session import Session

logger = logging.getLogger("celery_strategies.reader")

#: Seconds between looks whether somebody began, or ceased, to sort a queue.
LOOK_INTERVAL = 5.0
#: Seconds after which a worker asks again to sort a queue that another one sorts.
RETRY_INTERVAL = 1.0
#: Shortest pause between two sorting calls, in seconds.
SHORTEST_PAUSE = 0.001


class Sorting:
    """Keep what one worker knows of the policies of its queues, and sort.

    *policy* and *caps* are this worker's settings, None: it has none, and serves what others sorted. *changed* is
    called when the plan of takes has to be made anew, *look* when a take is worth while, *refused* with an error reply
    and what was asked, *later* with seconds after which a turn is due, *expect* with seconds after which a message that
    went to the delayed is due, *led* with a queue whose lease somebody has,
    unless *leads* says that this worker reads it under the lease anyway.
    """

    def __init__(
        self,
        policy: Policy | None,
        caps: Mapping[str, int] | None,
        patience: Patience,
        *,
        changed: Callable[[], None],
        look: Callable[[bool], None],
        refused: Callable[[str, RedisError], None],
        later: Callable[[float], None],
        expect: Callable[[float], None],
        leads: Callable[[str], bool],
        led: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self.caps = dict(caps or {})
        self._patience = patience
        self._changed = changed
        self._look = look
        self._refused = refused
        self._later = later
        self._expect = expect
        self._leads = leads
        self._led = led
        #: What is known of each queue: its policy, or None where it has none.
        self._known: dict[str, Policy | None] = {}
        #: Queues whose policy this worker has agreed to once: from then on it follows.
        self._settled: set[str] = set()
        self._asked: set[str] = set()
        self._next_look = 0.0
        #: When to sort a queue next; None while a call is out.
        self._due: dict[str, float | None] = {}

    def reset(self) -> None:
        """Begin anew on a new connection."""
        self._known.clear()
        self._asked.clear()
        self._due.clear()
        self._next_look = 0.0

    def known(self, queue: str) -> bool:
        """Whether it is known how *queue* is read."""
        return queue in self._known

    def sorted(self, queue: str) -> bool:
        """Whether the jobs of *queue* are sorted by key."""
        return self._known.get(queue) is not None

    # -- agreeing -------------------------------------------------------------------------------

    def agree(self, session: Session, queues: Sequence[str], now: float) -> None:
        """Ask about the policies of *queues* that are not known, and look now and then whether any came or went."""
        if self._patience.remaining(now, "policy"):
            return
        for queue in queues:
            if queue not in self._known and queue not in self._asked:
                self._ask(session, queue, self.policy)
        if queues and now >= self._next_look:
            self._next_look = now + LOOK_INTERVAL
            names = [session.keys.policy(queue) for queue in queues]
            expected = sum(map(self.sorted, queues))
            self._count(session, queues, names, expected)
            others = [queue for queue in queues if not self._leads(queue)]
            if others:
                # Whether one has got a single active consumer meanwhile. Those that once had one are asked, too.
                self._count(session, others, [session.keys.lease(queue) for queue in others], 0)

    def _count(
        self, session: Session, queues: Sequence[str], names: Sequence[str], expected: int
    ) -> None:
        packed = calls.command(calls.pack("EXISTS", *names))
        session.link.send(packed, partial(self._counted, session, tuple(queues), expected))

    def _counted(self, session: Session, queues: Sequence[str], expected: int, number: Any) -> None:
        if isinstance(number, RedisError):
            self._refused("policy", number)
        elif number != expected:
            for queue in queues:
                if queue not in self._asked:
                    self._ask(session, queue, None)

    def _ask(self, session: Session, queue: str, wanted: Policy | None) -> None:
        self._asked.add(queue)
        packed = session.store.adopt(queue, wanted, self.caps, renew=queue not in self._settled)
        session.link.send(packed, partial(self._agreed, session, queue, wanted))

    def forget(self, queues: Sequence[str]) -> None:
        """Ask about *queues* again: their policy is gone."""
        for queue in queues:
            self._known.pop(queue, None)
        self._changed()

    def _agreed(self, session: Session, queue: str, wanted: Policy | None, reply: Any) -> None:
        self._asked.discard(queue)
        if isinstance(reply, RedisError):
            self._refused("policy", reply)
            return
        self._patience.accepted("policy")
        agreement = Agreement.parse(reply)
        if agreement.led and not self._leads(queue):
            self._led(queue)
        if wanted is not None and not agreement.agreed and queue not in self._settled:
            raise ImproperlyConfigured(
                f"queue {queue!r} is sorted by {_told(agreement.policy)}, "
                f"and this worker's settings say {_told(wanted)}: one queue has one policy; "
                "give it the same settings, or run `celery strategies unsort` first"
            )
        if agreement.changed:
            packed = steer(session.keys, queue, "caps", "")
            session.link.send(packed, partial(self._steered, session, queue))
        if wanted is not None:
            self._settled.add(queue)
        policy = agreement.policy
        if policy is None and self.policy is not None:
            # It was removed a moment ago; the next look finds it unknown and adopts it again.
            self._known.pop(queue, None)
        elif queue not in self._known or self._known[queue] != policy:
            follows = self.policy is None or queue in self._settled
            if policy is not None and policy != self.policy and follows:
                logger.info("Queue %r is sorted by %s: serving that", queue, _told(policy))
            self._known[queue] = policy
        else:
            return
        self._changed()

    def _steered(self, session: Session, queue: str, cursor: Any) -> None:
        if isinstance(cursor, RedisError):
            self._refused("policy", cursor)
        elif cursor not in (b"0", b"-1"):
            packed = steer(session.keys, queue, "caps", "", cursor=cursor.decode())
            session.link.send(packed, partial(self._steered, session, queue))
        else:
            self._look(False)

    # -- sorting --------------------------------------------------------------------------------

    def report(self, sources: Sequence[SourceKeys], grant: Grant) -> None:
        """Take note of what a take says about sorting."""
        if grant.soon is not None:
            self._expect(grant.soon)
        for index, text in grant.notes:
            self._complain(sources[index].queue, text)
        for index, _left in grant.unsorted:
            self._due.setdefault(sources[index].queue, 0.0)
        if grant.unknown:
            self.forget([sources[index].queue for index in grant.unknown])

    def run(self, session: Session, sources: Sequence[SourceKeys], now: float) -> None:
        """Send the sorting calls that are due at *now* (monotonic seconds)."""
        if not self._due or self._patience.remaining(now, "sort"):
            return
        for source in sources:
            due = self._due.get(source.queue)
            if due is not None and now >= due and source.sorted:
                self._due[source.queue] = None
                session.link.send(
                    session.store.sort(source), partial(self._sorted, source, monotonic())
                )

    def _sorted(self, source: SourceKeys, sent: float, reply: Any) -> None:
        queue = source.queue
        if isinstance(reply, RedisError):
            self._due[queue] = 0.0
            self._refused("sort", reply)
            return
        self._patience.accepted("sort")
        left, notes, aside, soon = reply
        if soon >= 0:
            self._expect(soon / 1000)
        if left >= 0:
            # Of our own writes nobody tells us.
            self._look(False)
        for text in notes:
            self._complain(queue, text.decode("utf-8", "replace"))
        for entry, reason in zip(aside[::2], aside[1::2], strict=True):
            logger.error(
                "Set aside a message of queue %r that cannot be run: %s (entry %s)",
                queue,
                reason.decode("utf-8", "replace"),
                entry.decode(),
            )
        if left in (0, -2):
            self._due.pop(queue, None)
            return
        now = monotonic()
        # The call took at most that long, and may take as long again only after as long a pause.
        pause = RETRY_INTERVAL if left < 0 else max(SHORTEST_PAUSE, now - sent)
        self._due[queue] = now + pause
        self._later(pause)

    def _complain(self, queue: str, text: str) -> None:
        self._patience.complain(f"tag {queue} {text}", "A job of queue %r: %s", queue, text)


def _told(policy: Policy | None) -> str:
    fields = asdict(policy) if policy else {"order": "arrival"}
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())
