"""Calls of the scripts as packed commands, and their replies as typed values.

Owns the order of every script's keys and arguments. Does no I/O: a call is bytes for whoever has a
connection, so the same code serves the reader's non-blocking link, a blocking client and the tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_strategies.core.policy import Policy
from celery_strategies.core.strategies import Strategy
from celery_strategies.store import scripts
from celery_strategies.store.keys import Keys
from celery_strategies.store.scripts import Script

#: Most messages one take hands out.
TAKE_LIMIT = 64
#: A take stops adding messages once their bodies are this many bytes together.
BYTE_LIMIT = 1024 * 1024
#: Most tags one settling call names (bounded by Lua's unpack).
TAG_LIMIT = 500
#: Most messages, and about how many bytes, one call sorts.
SORT_LIMIT = 100
SORT_BYTES = 256 * 1024
#: Most limits at whose lines one call looks.
LINES_LIMIT = 32
#: Milliseconds after which a silent sorter is replaced.
SORTER_TTL = 3000
#: Milliseconds that the lease of a single-active queue outlives its holder's last beat.
LEASE_TTL = 10_000
#: Before a tag that is settled: its message is acknowledged but its job still runs; its job has ended; it has ended and
#: had a permit of a limit.
STILL_RUNS, HAS_ENDED, HAD_PERMIT = "\1", "\2", "\3"

Argument = str | bytes | int | float


def pack(*args: Argument) -> tuple[int, bytes]:
    """Encode arguments as RESP bulk strings; returns their number and the bytes."""
    out = []
    for arg in args:
        value = arg if isinstance(arg, bytes) else str(arg).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(value), value))
    return len(args), b"".join(out)


def command(*parts: tuple[int, bytes]) -> bytes:
    """Join packed parts into one command."""
    return b"*%d\r\n" % sum(count for count, _ in parts) + b"".join(data for _, data in parts)


def evalsha(script: Script, keys: Sequence[str], *argv: Argument) -> bytes:
    """Return a packed ``EVALSHA``."""
    return command(pack("EVALSHA", script.sha, len(keys), *keys, *argv))


def load_scripts() -> list[bytes]:
    """Return one packed ``SCRIPT LOAD`` for each script."""
    return [command(pack("SCRIPT", "LOAD", script.source)) for script in scripts.ALL]


def suffix_of(queue: str) -> str:
    """Return what follows the message in Kombu's unacked record: exchange ``""``, routing key *queue*.

    With the default exchange a stock worker restores the message to that queue and to no other.
    """
    return f',"",{json.dumps(queue)}]'


def is_counted(tag: str) -> bool:
    """Whether the message of *tag*, minted by take, counts for a cap, a group or a lease until its job has ended."""
    return tag.endswith(("k", "l", "b"))


def is_leased(tag: str) -> bool:
    """Whether the message of *tag* was taken under the lease of its queue."""
    return tag.endswith(("l", "b"))


def _is_more(tag: str) -> bool:
    """Whether to settle *tag* takes more than to remove its record."""
    return is_counted(tag) or tag.startswith((STILL_RUNS, HAS_ENDED, HAD_PERMIT))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a held message came from: list 0-9, number of its first take, deliveries, source.

    A sorted message also has its key ("" if it has none), and *list* is its level.
    """

    list: int
    number: int
    deliveries: int
    queue: str
    key: str | None = None

    @classmethod
    def parse(cls, value: bytes) -> Place:
        """Read a holder entry, as take writes it.

        Raises:
            ValueError: it is none.
        """
        step, number, deliveries, rest = value.split(b":", 3)
        key = None
        if not rest.startswith(b","):
            _weight, size, rest = rest.split(b":", 2)
            # A foreign producer's key may be any bytes.
            key, rest = _text(rest[: int(size)]), rest[int(size) :]
        queue = json.loads(b"[0" + rest)[2]
        return cls(int(step), int(number), int(deliveries), queue, key)


@dataclass(frozen=True, slots=True)
class SourceKeys:
    """What take must know of one source.

    Its queue, its levels (None: each list is one), its active lists, whether its jobs are sorted by key, and whether it
    has a single active consumer.
    """

    queue: str
    levels: int | None
    lists: tuple[int, ...]
    sorted: bool = False
    single: bool = False


class Delivery(NamedTuple):
    """One message handed out by take. *source* indexes the sources of that take."""

    source: int
    tag: str
    list: int
    deliveries: int
    raw: bytes


class Grant(NamedTuple):
    """Reply of take. *valid* is false when another session of this worker has begun since.

    *now* is the server's time in seconds, None if no source is sorted. *unsorted* says of which sources how many
    messages are still to be sorted, *notes* what was wrong with their tags, *unknown* which have no policy, *terms* the
    term of each lease (0: it is ours, and its job is in flight; below zero: milliseconds until somebody else's runs
    out), *soon* in how many seconds the first message is due that this take put among the delayed,
    *moved* how many messages it sorted, or put there.
    """

    valid: bool
    turn: int = 0
    more: bool = False
    deliveries: tuple[Delivery, ...] = ()
    set_aside: tuple[tuple[int, str, str], ...] = ()
    broken: tuple[tuple[int, str], ...] = ()
    lost: tuple[str, ...] = ()
    now: float | None = None
    unsorted: tuple[tuple[int, int], ...] = ()
    notes: tuple[tuple[int, str], ...] = ()
    unknown: tuple[int, ...] = ()
    terms: tuple[tuple[int, int], ...] = ()
    soon: float | None = None
    moved: int = 0

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> Grant:
        """Read take's reply."""
        if not reply[0]:
            return cls(valid=False)
        (
            _,
            turn,
            more,
            flat,
            bad,
            broken,
            lost,
            now,
            unsorted,
            notes,
            unknown,
            terms,
            soon,
            moved,
        ) = reply
        # One pass in C over the flat reply: five values for each message.
        columns = [iter(flat)] * 5
        return cls(
            True,
            turn,
            bool(more),
            tuple(
                [
                    Delivery(source, tag.decode(), *rest)
                    for source, tag, *rest in zip(*columns, strict=True)
                ]
            ),
            tuple(
                [(bad[i], bad[i + 1].decode(), _text(bad[i + 2])) for i in range(0, len(bad), 3)]
            ),
            tuple([(broken[i], _text(broken[i + 1])) for i in range(0, len(broken), 2)]),
            tuple([tag.decode() for tag in lost]),
            int(now) / 1e6 if now else None,
            tuple(zip(unsorted[::2], unsorted[1::2], strict=True)),
            tuple([(notes[i], _text(notes[i + 1])) for i in range(0, len(notes), 2)]),
            tuple(unknown),
            tuple([(terms[i], int(terms[i + 1])) for i in range(0, len(terms), 2)]),
            None if soon < 0 else soon / 1000,
            moved,
        )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


class TakePlan:
    """The part of a take that stays the same while the sources do, packed once."""

    __slots__ = ("_is_sorted", "_plain", "_sorted", "_tail", "sources")

    def __init__(
        self,
        keys: Keys,
        worker: str,
        strategy: Strategy,
        sources: Sequence[SourceKeys],
        *,
        lease_ttl: int = LEASE_TTL,
    ) -> None:
        self.sources = tuple(sources)
        names = [
            keys.wake(worker),
            keys.sequence,
            keys.unacked,
            keys.unacked_index,
            keys.holder(worker),
        ]
        argv: list[Argument] = [
            worker,
            int(strategy),
            BYTE_LIMIT,
            len(sources),
            bytes(len(source.lists) for source in sources),
            bytes(source.levels or 0 for source in sources),
            bytes(step for source in sources for step in source.lists),
            bytes(source.sorted for source in sources),
            bytes(source.single for source in sources),
            lease_ttl,
        ]
        for source in sources:
            queue = source.queue
            names += [
                keys.set_aside(queue),
                keys.watchers(queue),
                keys.parked(queue),
                keys.returned(queue),
            ]
            names += [keys.inbox(queue, step) for step in source.lists]
            argv.append(suffix_of(queue))
        self._plain = pack("EVALSHA", scripts.TAKE.sha, len(names), *names)
        single = any(source.single for source in sources)
        script = scripts.TAKE_SINGLE if single else scripts.TAKE_SORTED
        self._sorted = pack("EVALSHA", script.sha, len(names), *names)
        self._is_sorted = single or any(source.sorted for source in sources)
        self._tail = pack(*argv)

    def call(
        self,
        session: str,
        n: int,
        *,
        turn: int = 0,
        idle: bool = False,
        tags: Iterable[str] = (),
        now: int | str = "",
        skip: bytes = b"",
    ) -> bytes:
        """Return a packed take of up to *n* messages that settles *tags*.

        *turn* is the index of the source from which round robin looks on; *idle* says that this worker is
        registered as watching or parked; *now* overrides the server's clock, in microseconds (tests); *skip* has a byte
        for each source: 1 leaves it alone, 2 gives up its lease, too.
        """
        tags = tuple(tags)
        head = self._sorted if self._is_sorted or any(map(_is_more, tags)) else self._plain
        return command(head, self._tail, pack(session, n, turn, int(idle), now, skip, *tags))


class Store:
    """Calls for one worker on one broker."""

    def __init__(self, keys: Keys, worker: str) -> None:
        self.keys = keys
        self.worker = worker
        # Sent for almost every job of a busy worker, so packed once.
        names = [*self._unacked(), keys.holder(worker)]
        self._settle_plain = pack("EVALSHA", scripts.SETTLE.sha, len(names), *names)
        self._settle_sorted = pack("EVALSHA", scripts.SETTLE_SORTED.sha, len(names), *names)

    def _unacked(self) -> list[str]:
        return [self.keys.scratch, self.keys.unacked, self.keys.unacked_index]

    def settle(self, tags: Iterable[str]) -> bytes:
        """Acknowledge *tags*, or reject them for good; replies with those not held any more."""
        tags = tuple(tags)
        head = self._settle_sorted if any(map(_is_more, tags)) else self._settle_plain
        return command(head, pack(*tags))

    def restore(
        self,
        items: Sequence[tuple[str, bytes]],
        *,
        limit: bytes | str = "",
        started: bool = False,
        died: bool = False,
        most: int = 0,
    ) -> bytes:
        """Put held messages back to their places.

        *items* are (tag, holder entry), of any worker; *limit* is a time in seconds: entries refreshed since
        then are left alone; *started* counts the delivery, *died* says that its worker died; a message that has
        outlived *most* workers (0: any number) goes to the dead ones.
        """
        names, argv = self._unacked(), [limit, 1001 if died else int(started), most]
        for tag, entry in items:
            names.append(self.keys.holder(worker_of(tag)))
            argv += [tag, entry]
        return evalsha(scripts.RESTORE, names, *argv)

    def requeue(self, tag: str, queue: str, step: int) -> bytes:
        """Move a held message to the tail of list *step* of *queue*."""
        names = [*self._unacked(), self.keys.holder(self.worker), self.keys.inbox(queue, step)]
        return evalsha(scripts.REQUEUE, names, tag, suffix_of(queue))

    def set_aside(self, tag: str, queue: str, reason: str) -> bytes:
        """Move a held message to the stream of messages that could not be run."""
        names = [*self._unacked(), self.keys.holder(self.worker), self.keys.set_aside(queue)]
        return evalsha(scripts.SET_ASIDE, names, tag, suffix_of(queue), reason, self.worker)

    def delay(self, tag: str, queue: str, due: float, *, limited: bool = False) -> bytes:
        """Put a held message where it waits until *due*, in seconds since the epoch.

        *limited* says that it waits for a rate limit, so that :meth:`release` finds it.
        """
        names = [*self._unacked(), self.keys.holder(self.worker)]
        names += [self.keys.delayed(queue), self.keys.sequence]
        # Rounded up: what comes back is due.
        due_ms, mark = math.ceil(due * 1000), "r" if limited else ""
        return evalsha(scripts.DELAY, names, tag, suffix_of(queue), due_ms, mark)

    def due(self, queues: Iterable[str], now: int | str = "") -> bytes:
        """Ask how many milliseconds the first delayed message of each queue has to wait; -1: there is none."""
        return evalsha(scripts.DUE, [self.keys.delayed(queue) for queue in queues], now)

    def promote(self, queue: str, count: int = SORT_LIMIT, now: int | str = "") -> bytes:
        """Move messages that are due to the tails of their lists; replies with how many."""
        names = [self.keys.scratch, self.keys.delayed(queue), *self.keys.inboxes(queue)]
        return evalsha(scripts.PROMOTE, names, count, now)

    def release(self, queue: str, cursor: bytes | str = "0") -> bytes:
        """Have delayed messages that wait for a rate limit come back at once; replies with the next cursor."""
        return evalsha(scripts.RELEASE, [self.keys.scratch, self.keys.delayed(queue)], cursor)

    def acquire(self, tag: str, ask: Ask, ttl: int, now: int | str = "") -> bytes:
        """Have a held message get a permit of a limit, or wait in line; replies with :class:`Answer`. *ttl* in ms."""
        names = [*self._unacked(), self.keys.holder(self.worker), self.keys.limited(self.worker)]
        return evalsha(scripts.ACQUIRE, names, tag, ask.limit, ask.to, ask.duration, ttl, now)

    def renew(self, tags: Iterable[str], ttl: int, now: int | str = "") -> bytes:
        """Renew the permits of held *tags*; replies with how many had expired. *ttl* in ms."""
        names = [self.keys.scratch, self.keys.limited(self.worker)]
        return evalsha(scripts.RENEW, names, ttl, now, *tags)

    def serve(self, count: int = LINES_LIMIT, now: int | str = "") -> bytes:
        """Give permits that expired to those first in line.

        Replies with how many messages got one, and after how many milliseconds to look again (-1: there is no line).
        """
        return evalsha(scripts.SERVE, [self.keys.scratch, self.keys.lines], count, now)

    def adopt(
        self,
        queue: str,
        policy: Policy | None,
        caps: Mapping[str, int] | None = None,
        *,
        renew: bool = True,
    ) -> bytes:
        """Agree on how the jobs of *queue* are sorted; without a *policy*, ask only. See :class:`Agreement`.

        *caps* are those of the settings, "*" for every key; *renew* allows another policy while nothing is sorted.
        """
        names = [self.keys.policy(queue), self.keys.state(queue), self.keys.caps(queue)]
        names += [self.keys.weights(queue), self.keys.lease(queue)]
        if policy is None:
            return evalsha(scripts.ADOPT, names, "", 0, "", "", 0)
        argv: list[Argument] = [policy.order, int(policy.single), policy.key_header]
        argv += [policy.weight_header, int(renew)]
        for key, cap in (caps or {}).items():
            argv += ["*" if key == "*" else f"k{key}", cap]
        return evalsha(scripts.ADOPT, names, *argv)

    def sort(self, source: SourceKeys, now: int | str = "") -> bytes:
        """Sort some of the new jobs of a source, unless another worker does."""
        queue = source.queue
        names = [self.keys.sequence, self.keys.sorter(queue), self.keys.set_aside(queue)]
        names += [self.keys.returned(queue)]
        names += [self.keys.inbox(queue, step) for step in source.lists]
        argv: list[Argument] = [self.worker, SORTER_TTL, source.levels or 0, bytes(source.lists)]
        return evalsha(scripts.SORT, names, *argv, SORT_LIMIT, SORT_BYTES, now)

    def join(self, session: str, ttl: int) -> bytes:
        """Open *session*; replies with tag, entry, … of what this worker still holds. *ttl* in ms."""
        return evalsha(
            scripts.JOIN, [self.keys.scratch, self.keys.holder(self.worker)], session, ttl
        )

    def leave(self) -> bytes:
        """Forget this worker's holder if it is empty; replies with the number of messages held."""
        names = [self.keys.holder(self.worker), self.keys.alive, self.keys.entry(self.worker)]
        return evalsha(scripts.LEAVE, names, self.worker)

    def beat(
        self,
        tags: Iterable[str],
        quiet: int,
        ttl: int,
        entry_ttl: int,
        *,
        queues: Iterable[str] = (),
        priority: int = 0,
        lease_ttl: int = LEASE_TTL,
        sessions: bool = True,
        now: int | str = "",
    ) -> bytes:
        """Say that this worker lives and holds *tags*; replies with workers that seem not to live.

        *quiet*, *ttl* (of what is held), *entry_ttl* and *lease_ttl* are in ms; *queues* are those that the worker
        reads with *priority*; *sessions* says whether to look who has none.
        """
        keys = self.keys
        names = [keys.scratch, keys.alive, keys.unacked_index, keys.holder(self.worker)]
        names += [keys.entry(self.worker), keys.leases(self.worker)]
        names += [keys.consumers(queue) for queue in queues]
        channels = keys.sessions if sessions else ""
        argv: list[Argument] = [self.worker, quiet, ttl, entry_ttl, channels, lease_ttl, priority]
        return evalsha(scripts.BEAT, names, *argv, now, *tags)

    def step_down(self) -> bytes:
        """Give up the leases of queues of which this worker has no job; replies with how many it still has."""
        return evalsha(
            scripts.STEP_DOWN, [self.keys.scratch, self.keys.leases(self.worker)], self.worker
        )

    def bury(
        self,
        worker: str,
        beat: int,
        count: int = TAKE_LIMIT,
        *,
        by_session: bool = False,
        most: int = 0,
    ) -> bytes:
        """Put back what a dead worker held, whose last *beat*, in ms, was seen; replies with (moved, left, dealt with).

        *by_session* says that its session must be gone; *most* as in :meth:`restore`.
        """
        names = [*self._unacked(), self.keys.alive, self.keys.holder(worker)]
        names.append(self.keys.entry(worker))
        session = self.keys.session(worker) if by_session else ""
        return evalsha(scripts.BURY, names, worker, beat, session, most, count)

    def refresh(self, tags: Iterable[str], ttl: int, now: int | str = "") -> bytes:
        """Renew the time stamps of held *tags*; replies with how many are still held. *ttl* in ms."""
        names = [self.keys.scratch, self.keys.unacked_index, self.keys.holder(self.worker)]
        return evalsha(scripts.REFRESH, names, ttl, now, *tags)

    def expired(self, timeout: float, count: int, now: int | str = "") -> bytes:
        """List up to *count* tags not refreshed for *timeout* seconds, after the limit in seconds."""
        return evalsha(scripts.EXPIRED, [self.keys.unacked_index], timeout, count, now)

    def watch(
        self, queues: Sequence[str], *, watchers: int, stale: int, now: int | str = ""
    ) -> bytes:
        """Register as idle on *queues*; replies with 1 (watch) or 0 (parked) for each. *stale* in ms."""
        return evalsha(scripts.WATCH, self._idle_keys(queues), watchers, stale, now)

    def unwatch(self, queues: Sequence[str]) -> bytes:
        """Leave the idle workers of *queues*; replies with the number of workers woken instead."""
        return evalsha(scripts.UNWATCH, self._idle_keys(queues))

    def _idle_keys(self, queues: Sequence[str]) -> list[str]:
        names = [self.keys.wake(self.worker)]
        for queue in queues:
            names += [self.keys.watchers(queue), self.keys.parked(queue)]
        return names


class Ask(NamedTuple):
    """What a message wants of a *limit*: one of *to* permits, which outlives its last renewal by *duration* ms."""

    limit: str
    to: int
    duration: int


class Answer(NamedTuple):
    """Reply of acquire: *state* (see the constants), and how many others got a permit (*served*).

    *error* says which key of the limit cannot be read.
    """

    state: int
    served: int = 0
    error: str = ""

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> Answer:
        """Read acquire's reply."""
        return cls(int(reply[0]), int(reply[1]), _text(reply[2]))


#: States of an :class:`Answer`.
HAS_PERMIT, IN_LINE, NOT_HELD, UNREADABLE = 1, 0, -1, -2


class Agreement(NamedTuple):
    """Reply of adopt: the *policy* in force (None: the queue has none), and whether it is what was wanted.

    *led* says that somebody has the queue's lease, *changed* that the caps are not what they were.
    """

    agreed: bool
    policy: Policy | None
    led: bool = False
    changed: bool = False

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> Agreement:
        """Read adopt's reply."""
        agreed, order, single, key, weight, led, *changed = reply
        policy = None
        if order:
            policy = Policy(order.decode(), single == b"1", key.decode(), weight.decode())
        return cls(bool(agreed), policy, bool(led), changed == [1])


def steer(
    keys: Keys, queue: str, what: str, field: str, value: str = "", cursor: str = "0"
) -> bytes:
    """Change a weight or a cap; see ``steer.lua``."""
    values = keys.caps(queue) if what == "caps" else keys.weights(queue)
    return evalsha(scripts.STEER, [keys.policy(queue), values], what, field, value, cursor)


def unsort(keys: Keys, queue: str, count: int = TAKE_LIMIT) -> bytes:
    """Move up to *count* given-back messages to Kombu's lists; replies with how many."""
    return evalsha(scripts.UNSORT, unsort_keys(keys, queue), count)


def unsort_keys(keys: Keys, queue: str) -> list[str]:
    """Return the keys of :func:`unsort`, for a client that packs its own commands."""
    return [keys.scratch, keys.returned(queue), keys.unsorted(queue), *keys.inboxes(queue)]


def worker_of(tag: str) -> str:
    """Return the worker id inside a delivery tag that take minted; any other tag gives a name nobody has."""
    return tag.rpartition(":")[0]
