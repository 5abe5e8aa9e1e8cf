"""Own the search for the message of one task: where it may be, in which order, and for how long.

Nothing in Redis leads from a task's id to its message, so messages are read until it turns up: by a script, since what
leaves Redis then is one message and not all of them, in calls of a few milliseconds, one at a time. What was not
searched is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, NamedTuple

from celery_strategies.core.levels import LISTS
from celery_strategies.look.reach import Reach, holding_of, pairs, text
from celery_strategies.look.shares import KeySeen
from celery_strategies.look.status import QueueSeen
from celery_strategies.look.tenants import survey
from celery_strategies.store import scripts
from celery_strategies.store.store import worker_of

__all__ = ("Found", "Place", "Search", "Searched", "rounds")

#: Seconds that a search may take; with a hundred thousand keys, finding these takes some of it.
SEARCH_SECONDS = 0.4
SURVEY_SECONDS = 0.25
#: Messages of a call, to begin with and at most; lists of a call; seconds that one should take, and at most.
FIRST, MOST, MOST_LISTS = 16, 512, 200
AIM, LONG = 0.0015, 0.003
#: Messages that the script reads at once: few near the ends, where large ones are met first.
STEP, BYTES_CALL = 16, 512 * 1024
#: Messages of the first stretch at each end of a list; each further one is this many times as long.
STRETCH, GROWTH = 4, 4
#: Before 7.0, Redis walks to any place of a list from its newest end: so many nodes, of 8 kB, are some milliseconds.
WALK_NODES, NODE = 30_000, 8192
#: Messages that are near enough to the other end there.
TAIL = 128
#: Records, or entries of a stream, that one call reads.
PAGE = 20


class Place(NamedTuple):
    """A list ("l") or sorted set ("z") of messages; *what* says what they wait for, *key* is a fairness key."""

    kind: str
    name: str | bytes
    what: str
    queue: str
    level: int | None
    key: str | None
    length: int


class Stretch(NamedTuple):
    """Some messages of a place that stand side by side; of kind "t" they are counted from the oldest end."""

    place: Place
    kind: str
    first: int
    size: int


@dataclass(frozen=True)
class Found:
    """A message that was found. *index* counts from the newest end of a list, or by rank in a sorted set."""

    what: str
    queue: str
    raw: bytes
    level: int | None = None
    key: str | None = None
    index: int = 0
    length: int = 0
    place: Place | None = None
    #: Of an element of a sorted list, and of a sorted set: number of its first take, deliveries, mark of a delay.
    number: int | None = None
    deliveries: int = 0
    mark: str = ""
    #: Of a held message: its tag, and the worker in it; of a stream: the entry and why it is there.
    tag: str = ""
    worker: str = ""
    entry: str = ""
    why: str = ""

    @property
    def ahead(self) -> int:
        """How many messages of its list, or of its set, go before it."""
        if self.place is not None and self.place.kind == "z":
            return self.index
        return self.length - 1 - self.index


@dataclass
class Searched:
    """What was searched: messages read, of how many, and why others were not."""

    messages: int = 0
    total: int = 0
    seconds: float = 0.0
    unreached: int = 0
    #: Whether the names of all keys were known.
    all_keys: bool = True

    @property
    def everything(self) -> bool:
        """Whether nothing was left out."""
        return self.all_keys and not self.unreached and self.messages >= self.total


def rounds(places: Sequence[Place], reach_of: Callable[[Place], int | None]) -> Iterator[Stretch]:
    """Yield all stretches of all places: both ends of each first, then ever longer ones towards the middle.

    *reach_of* says how far from the newest end a list can be read, None: anywhere; of the rest, what is near its
    oldest end is read one by one.
    """
    near, far = 0, STRETCH
    left = [place for place in places if place.length]
    while left:
        more = []
        for place in left:
            # Up to the middle from either end.
            half = (place.length + 1) // 2
            first, last = min(near, half), min(far, half)
            limit = reach_of(place) if place.kind == "l" else None
            yield from _end(place, first, last, limit)
            begin, end = place.length - min(far, place.length - half), place.length - near
            yield from _begin(place, begin, end, limit)
            if far < half:
                more.append(place)
        near, far, left = far, far * GROWTH, more


def _end(place: Place, first: int, last: int, limit: int | None) -> Iterator[Stretch]:
    if limit is not None:
        last = min(last, limit)
    if last > first:
        yield Stretch(place, place.kind, first, last - first)


def _begin(place: Place, first: int, last: int, limit: int | None) -> Iterator[Stretch]:
    """Yield the stretch from *first* to *last*, counted from the newest end: what stands near the oldest."""
    if last <= first:
        return
    if limit is None or last <= limit:
        yield Stretch(place, place.kind, first, last - first)
        return
    if first < limit:
        yield Stretch(place, place.kind, first, limit - first)
    # Counted from the oldest end.
    near = place.length - last
    count = min(TAIL, place.length - max(first, limit)) - near
    if count > 0:
        yield Stretch(place, "t", near, count)


class Search:
    """Search for one task, for *seconds* (None: until everything is read)."""

    def __init__(
        self,
        reach: Reach,
        task: str,
        *,
        seconds: float | None = SEARCH_SECONDS,
        progress: Callable[[Searched], None] = lambda _: None,
    ) -> None:
        self.reach = reach
        self.task = task
        #: As it stands in a message.
        self.wanted = json.dumps(task)[1:-1]
        self._own = re.compile(
            rb'"(?:correlation_id|id)"\s*:\s*"' + re.escape(self.wanted.encode()) + rb'"'
        )
        self._bounded = seconds is not None
        self._begun = monotonic()
        self._deadline = float("inf") if seconds is None else self._begun + seconds
        self._progress = progress
        self._count = FIRST
        self._largest = 1024
        self._walks = self._walks_far()
        self.done = Searched()
        #: An id that begins like the one that is searched.
        self.near: str | None = None

    def _walks_far(self) -> bool:
        """Whether Redis walks to the oldest messages of a list from its newest."""
        try:
            version = str(self.reach.client.info("server")["redis_version"])
            return int(version.partition(".")[0]) < 7
        except Exception:  # noqa: BLE001  # a proxy, an ACL: whatever, then it may
            return True

    def run(self, queues: Sequence[QueueSeen], key: str | None = None) -> Found | None:
        """Search these queues, those of *key* only where that is given."""
        try:
            return (
                self._held([seen.name for seen in queues])
                or self._streams(queues)
                or self._over([*self._small(queues), *self._large(queues, key)])
            )
        finally:
            self.done.seconds = monotonic() - self._begun

    # -- what workers hold, and what nobody runs ---------------------------------------------------

    def _held(self, queues: Sequence[str]) -> Found | None:
        """Look through Kombu's records of held messages."""
        cursor: Any = 0
        while True:
            reply = self.reach.one("HSCAN", self.reach.keys.unacked, cursor, "COUNT", PAGE)
            if reply is None:
                return None
            cursor, records = reply
            for tag, record in pairs(records):
                self.done.messages += 1
                self.done.total += 1
                if self._own.search(record) and (found := self._record(text(tag), record, queues)):
                    return found
            if int(cursor) == 0:
                return None
            if monotonic() > self._deadline:
                self.done.unreached += 1
                return None

    def _record(self, tag: str, record: bytes, queues: Sequence[str]) -> Found | None:
        try:
            message, _, queue = json.loads(record)
        except ValueError:
            return None
        if queue not in queues:
            return None
        worker = worker_of(tag)
        place = self.reach.one("HGET", self.reach.keys.holder(worker), tag)
        holding = holding_of(tag, place) if place else None
        return Found(
            "unacked",
            queue,
            json.dumps(message).encode(),
            level=holding.level if holding else None,
            key=holding.key if holding else None,
            deliveries=holding.deliveries if holding else 0,
            tag=tag,
            worker=worker if holding else "",
        )

    def _streams(self, queues: Sequence[QueueSeen]) -> Found | None:
        keys = self.reach.keys
        for seen in queues:
            for what, name, there in (
                ("dead", keys.dead(seen.name), seen.dead),
                ("set_aside", keys.set_aside(seen.name), seen.set_aside),
            ):
                if there:
                    self.done.total += there
                    if found := self._stream(what, name, seen.name):
                        return found
        return None

    def _stream(self, what: str, name: str, queue: str) -> Found | None:
        after = "-"
        while entries := self.reach.one("XRANGE", name, after, "+", "COUNT", PAGE):
            for entry, values in entries:
                found = dict(pairs(values))
                raw = found.get(b"message", b"")
                self.done.messages += 1
                if self._own.search(raw):
                    level = text(found.get(b"list", b""))
                    return Found(
                        what,
                        queue,
                        raw,
                        level=int(level) if level.isdigit() else None,
                        key=text(found[b"key"]) if found.get(b"key") else None,
                        worker=text(found.get(b"worker", b"")),
                        entry=text(entry),
                        why=text(found.get(b"reason", b"")),
                    )
                after = f"({text(entry)}"
            if monotonic() > self._deadline:
                return None
        return None

    # -- what waits -----------------------------------------------------------------------------

    def _small(self, queues: Sequence[QueueSeen]) -> list[Place]:
        """Return what is mostly short: what was given back, is delayed, in line, or on its way to stock workers."""
        keys, found = self.reach.keys, []
        for seen in queues:
            name = seen.name
            returned = sum(seen.returned.values())
            found += [
                Place("z", keys.returned(name), "returned", name, None, None, returned),
                Place("z", keys.delayed(name), "delayed", name, None, None, seen.delayed),
                Place("z", keys.in_line(name), "in_line", name, None, None, seen.in_line),
                Place("l", keys.unsorted(name), "unsorted", name, None, None, seen.unsorting),
            ]
        return found

    def _large(self, queues: Sequence[QueueSeen], key: str | None) -> list[Place]:
        """Return the lists of what is to be sorted, and of each key."""
        found = []
        for seen in queues:
            for step in range(LISTS):
                inbox = self.reach.keys.inbox(seen.name, step)
                length = seen.inbox.get(step, 0)
                found.append(Place("l", inbox, "inbox", seen.name, step, None, length))
            if seen.policy:
                found += self._keys(seen, key)
        return found

    def _keys(self, seen: QueueSeen, key: str | None) -> list[Place]:
        seconds = SURVEY_SECONDS if self._bounded else float("inf")
        looked = survey(self.reach, seen, weights=False, seconds=seconds)
        self.done.all_keys = self.done.all_keys and looked.complete
        found = []
        for one in looked.keys:
            if key is None or one.key == key:
                found += self._places_of(seen.name, one)
        return found

    def _places_of(self, queue: str, one: KeySeen) -> list[Place]:
        base = self.reach.keys.base(queue)
        name = f"{one.level}:{one.key}"
        return [
            Place("z", f"{base}front:{name}", "front", queue, one.level, one.key, one.back),
            Place("l", f"{base}jobs:{name}", "sorted", queue, one.level, one.key, one.jobs),
        ]

    def _reach_of(self, _place: Place) -> int | None:
        if not self._walks or not self._bounded:
            return None
        return WALK_NODES * max(1, NODE // self._largest)

    def _over(self, places: Sequence[Place]) -> Found | None:
        self.done.total += sum(place.length for place in places)
        batch: list[Stretch] = []
        size = 0
        for stretch in rounds(places, self._reach_of):
            rest: Stretch | None = stretch
            while rest is not None:
                room = max(1, self._count - size)
                part = rest._replace(size=min(rest.size, room))
                batch.append(part)
                size += part.size
                left = rest.size - part.size
                rest = rest._replace(first=rest.first + part.size, size=left) if left else None
                if size >= self._count or len(batch) >= MOST_LISTS:
                    found, go_on = self._call(batch)
                    if found or not go_on:
                        return found
                    batch, size = [], 0
        return self._call(batch)[0] if batch else None

    def _call(self, batch: list[Stretch]) -> tuple[Found | None, bool]:
        """Search some stretches; returns what was found, and whether there is time for more."""
        while batch:
            if monotonic() > self._deadline:
                return None, False
            # In the depth of a long list each step is a walk.
            deep = max(stretch.first for stretch in batch) > 2000
            step = max(1, min(self._count if deep else STEP, BYTES_CALL // self._largest))
            argv: list[Any] = []
            for stretch in batch:
                argv += [stretch.kind, stretch.first, stretch.size]
            names = [stretch.place.name for stretch in batch]
            begun = monotonic()
            reply = self.reach.script(
                scripts.FIND,
                names,  # type: ignore[arg-type]  # bytes are names, too
                self.wanted,
                step,
                BYTES_CALL,
                *argv,
            )
            spent = monotonic() - begun
            if reply is None:
                return None, True
            key, index, length, element, done, within, messages, size, near = reply
            self.done.messages += messages
            self.near = self.near or (_unescaped(near) if near else None)
            self._learn(spent, messages, size)
            if key:
                return self._found(batch[key - 1], index, length, element), False
            self._progress(self.done)
            batch = batch[done:]
            if within and batch:
                head = batch[0]
                batch[0] = head._replace(first=head.first + within, size=head.size - within)
            if not self._bounded:
                # Half of Redis's time, at most.
                sleep(spent)
        return None, True

    def _learn(self, spent: float, messages: int, size: int) -> None:
        if messages:
            self._largest = max(size // messages, self._largest // 2, 64)
        if spent < AIM:
            self._count = min(MOST, self._count * 2)
        elif spent > LONG:
            self._count = max(1, self._count // 2)

    def _found(self, stretch: Stretch, index: int, length: int, element: bytes) -> Found:
        place = stretch.place
        found = Found(
            place.what,
            place.queue,
            element,
            level=place.level,
            key=place.key,
            index=index,
            length=length,
            place=place,
        )
        return _parsed(found, element)


def _parsed(found: Found, element: bytes) -> Found:
    """Return *found* with what its element says before the message."""
    values = dict(vars(found))
    try:
        if found.what in ("sorted", "front"):
            number, deliveries, _, raw = element.split(b":", 3)
            values.update(number=int(number), deliveries=int(deliveries), raw=raw)
        elif found.what == "returned":
            step, number, deliveries, raw = element.split(b":", 3)
            values.update(level=int(step), number=int(number), deliveries=int(deliveries), raw=raw)
        elif found.what == "delayed":
            _, step, raw = element.split(b":", 2)
            values.update(level=int(step.rstrip(b"r")), mark=text(step[1:]), raw=raw)
        elif found.what == "unsorted":
            step, _, raw = element.partition(b":")
            values.update(level=int(step), raw=raw)
        elif found.what == "in_line":
            values.update(_in_line(element))
    except ValueError:
        # None of ours, or of another version: its place is known all the same.
        return found
    return Found(**values)


def _in_line(element: bytes) -> dict[str, Any]:
    if element[:1] == b"p":
        step, number, deliveries, raw = element[1:].split(b":", 3)
        return {
            "level": int(step),
            "number": int(number),
            "deliveries": int(deliveries),
            "raw": raw,
        }
    step, number, deliveries, _, size, rest = element[1:].split(b":", 5)
    return {
        "level": int(step),
        "number": int(number),
        "deliveries": int(deliveries),
        "key": text(rest[: int(size)]),
        "raw": rest[int(size) :],
    }


def _unescaped(near: bytes) -> str:
    try:
        return str(json.loads(b'"' + near + b'"'))
    except ValueError:
        return text(near)


def headers_of(raw: bytes) -> dict[str, Any]:
    """Return the headers of a message, none if it has none."""
    try:
        return dict(json.loads(raw)["headers"])
    except (ValueError, LookupError, TypeError):
        return {}


def ids_in(raws: Iterable[bytes]) -> list[str]:
    """Return the ids of the tasks of these messages."""
    return [str(found["id"]) for found in map(headers_of, raws) if found.get("id")]
