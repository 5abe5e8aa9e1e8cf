"""Own how a live system becomes a trace: what is read from Redis, what events say, and what both together mean.

Only reads. No call reads more than some hundred kilobytes, or visits more than a bounded number of keys, so that none
takes Redis more than some milliseconds; what that leaves out is counted.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from celery_strategies.core.levels import LISTS, clamp_priority
from celery_strategies.core.tags import heed
from celery_strategies.settings import Settings
from celery_strategies.simulation.trace import Entry, Trace
from celery_strategies.store.keys import Keys

__all__ = ("Recording", "Survey", "settings_of")

#: Most messages that one call reads, and about how many bytes.
CHUNK, CHUNK_BYTES = 50, 128 * 1024
#: Most calls of a look that read what workers hold; the next look goes on.
HELD_CALLS = 20
#: What stands before the key in a member of an index.
MEMBER_HEAD = 17
#: Most keys of a level, and messages of a list per look, that are read.
MOST_KEYS, MOST_NEW = 1000, 500

#: Events after which a task runs no more.
_ENDS = ("task-succeeded", "task-failed", "task-retried", "task-rejected")


@dataclass
class Seen:
    """What is known of one job. Times are seconds since the epoch; ``backlog`` is its place among what waited first."""

    queue: str | None = None
    list: int | None = None
    key: str = ""
    weight: float = 1.0
    task: str = ""
    at: float | None = None
    backlog: tuple[float, int] | None = None
    started: float | None = None
    run: float | None = None


@dataclass
class Recording:
    """Put together what is seen of each job, wherever it is seen. ``begun`` is when the recording began."""

    begun: float
    queues: list[str]
    key_header: str
    weight_header: str
    jobs: dict[str, Seen] = field(default_factory=dict)
    #: Messages that waited at first and were not read.
    skipped: int = 0

    def message(
        self, raw: bytes, queue: str, step: int | None, at: float, place: float | None = None
    ) -> str | None:
        """Note a message of ``queue`` that is there at time ``at``; returns the task's id, None if it has none.

        ``place`` orders what was there at the start.
        """
        try:
            message = json.loads(raw)
            headers = message["headers"]
            name, task = headers.get("id"), headers.get("task")
            # Task protocol 1 has both in the body.
            name = name or message["properties"]["correlation_id"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        seen = self.jobs.setdefault(str(name), Seen())
        if seen.queue is None or seen.list is None:
            seen.queue = queue
            # What is held has left its list: the priority says which it was.
            seen.list = (
                clamp_priority(message["properties"].get("priority")) if step is None else step
            )
            self._tag(seen, headers)
        seen.task = seen.task or str(task or "")
        if seen.at is None:
            seen.at = at
            if place is not None:
                seen.backlog = (place, len(self.jobs))
        return str(name)

    def event(self, event: Mapping[str, Any]) -> None:
        """Note an event of a task. Without one of its beginning, what is not known already stays unknown."""
        kind, name = str(event.get("type", "")), str(event.get("uuid") or "")
        begins = kind in ("task-sent", "task-received", "task-started")
        if not name or not (begins or (kind in _ENDS and name in self.jobs)):
            return
        seen = self.jobs.setdefault(name, Seen())
        seen.task = seen.task or str(event.get("name") or "")
        when = float(event.get("timestamp") or 0)
        if kind == "task-sent":
            self._sent(seen, event, when)
        elif begins:
            seen.at = when if seen.at is None else seen.at
            seen.started = when if kind == "task-started" else seen.started
        elif event.get("runtime") is not None:
            seen.run = float(event["runtime"])
        elif seen.started is not None:
            seen.run = max(0.0, when - seen.started)

    def _sent(self, seen: Seen, event: Mapping[str, Any], when: float) -> None:
        if seen.backlog is None:
            seen.at = when
        if seen.queue is None:
            seen.queue = str(event["queue"]) if event.get("queue") else None
            seen.list = clamp_priority(event.get("priority"))
            self._tag(seen, event)

    def _tag(self, seen: Seen, headers: Mapping[str, Any]) -> None:
        weight = headers.get(self.weight_header) if self.weight_header else None
        tag = heed(headers.get(self.key_header), weight)
        if isinstance(tag.key, str):
            seen.key = tag.key
        seen.weight = float(tag.weight)

    def trace(self, seconds: float) -> tuple[Trace, dict[str, Any]]:
        """Return the trace, and what the reader should know of it."""
        by_task: dict[str, Counter[str]] = defaultdict(Counter)
        runs: dict[str, list[float]] = defaultdict(list)
        for seen in self.jobs.values():
            if seen.task and seen.queue:
                by_task[seen.task][seen.queue] += 1
            if seen.run is not None:
                runs[seen.task].append(seen.run)
        counts: Counter[str] = Counter()
        found: list[tuple[tuple[float, float, float], Entry]] = []
        for number, seen in enumerate(self.jobs.values()):
            queue = seen.queue
            if queue is None and seen.task in by_task:
                # Too quick to be seen, from a producer that sends no events: where the others of its task go.
                ((queue, _),) = by_task[seen.task].most_common(1)
                counts["guessed_queue"] += 1
            if queue is None or queue not in self.queues or seen.at is None:
                counts["left_out"] += queue is None or seen.at is None
                continue
            run = seen.run
            if run is None:
                counts["guessed_run"] += 1
                run = median(runs[seen.task]) if runs[seen.task] else None
            at = 0.0 if seen.backlog else max(0.0, seen.at - self.begun)
            entry = Entry(
                queue,
                at=round(at, 6),
                run=None if run is None else round(run, 6),
                level=seen.list or 0,
                key=seen.key,
                weight=None if seen.weight == 1 else seen.weight,
                name=seen.task,
            )
            # The backlog comes first, in its order.
            place = (0.0, *seen.backlog) if seen.backlog else (1.0, seen.at, float(number))
            found.append((place, entry))
        entries = [entry for _, entry in sorted(found, key=lambda pair: pair[0])]
        facts = {
            "seconds": round(seconds, 3),
            "jobs": len(entries),
            "guessed_queue": counts["guessed_queue"],
            "guessed_run": counts["guessed_run"],
            "left_out": counts["left_out"] + self.skipped,
        }
        return Trace(entries=entries, queues=list(self.queues)), facts


class Survey:
    """Read what waits, and what is held, in bounded calls."""

    def __init__(self, client: Any, keys: Keys, recording: Recording, backlog: int) -> None:
        self.client = client
        self.keys = keys
        self.recording = recording
        self.backlog = backlog
        #: Newest message of each list that was read; a producer's are all different.
        self._newest: dict[str, bytes] = {}
        self._largest = CHUNK_BYTES
        self._cursor = 0

    def start(self, now: float) -> None:
        """Read the backlog, the oldest first, up to the limit of each queue."""
        self._held(now, place=-1.0)
        for queue in self.recording.queues:
            left, total = self.backlog, 0
            # What was given back or is sorted stands by its number; then comes what is new.
            for name, is_set, level in self._sorted_lists(queue):
                length = self._length(name, is_set)
                total += length
                for element in self._slice(name, is_set, min(left, length)):
                    number, step, raw = _sorted_element(element, level)
                    self.recording.message(raw, queue, step, now, number)
                    left -= 1
            for step in range(LISTS):
                inbox = self.keys.inbox(queue, step)
                length = self._length(inbox, False)
                total += length
                for raw in self._slice(inbox, False, min(left, length)):
                    self.recording.message(raw, queue, step, now, float("inf"))
                    left -= 1
                head = self.client.lindex(inbox, 0)
                if head is not None:
                    self._newest[inbox] = head
            self.recording.skipped += max(0, total - (self.backlog - left))

    def look(self, now: float) -> None:
        """Read what is new in the lists since the last look, and what is held."""
        names = [
            (queue, step, self.keys.inbox(queue, step))
            for queue in self.recording.queues
            for step in range(LISTS)
        ]
        pipe = self.client.pipeline(transaction=False)
        for _, _, name in names:
            pipe.exists(name)
        for (queue, step, name), there in zip(names, pipe.execute(), strict=True):
            if there:
                self._new(queue, step, name, now)
        self._held(now)

    def _new(self, queue: str, step: int, name: str, now: float) -> None:
        last, first = self._newest.get(name), None
        start = 0
        while start < MOST_NEW:
            size = self._size()
            found = self.client.lrange(name, start, start + size - 1)
            for raw in found:
                first = first or raw
                if raw == last:
                    break
                self._measure(raw)
                self.recording.message(raw, queue, step, now)
            else:
                if len(found) == size:
                    start += size
                    continue
            break
        if first is not None:
            self._newest[name] = first

    def _held(self, now: float, place: float | None = None) -> None:
        """Note what workers hold: a job that left its list between two looks is still there while it runs."""
        for _ in range(HELD_CALLS):
            self._cursor, found = self.client.hscan(
                self.keys.unacked, self._cursor, count=self._size()
            )
            for record in found.values():
                self._measure(record)
                raw, queue = _record(record)
                if queue in self.recording.queues:
                    self.recording.message(raw, queue, None, now, place)
            if not self._cursor:
                return

    def _sorted_lists(self, queue: str) -> Iterator[tuple[bytes, bool, int | None]]:
        """Yield the keys that hold jobs of a queue which left its inbox, whether it is a set, and the level."""
        yield self.keys.returned(queue).encode(), True, None
        base = self.keys.base(queue).encode()
        for level in range(LISTS):
            members: list[bytes] = []
            for index in ("index", "old"):
                name = base + f"{index}:{level}".encode()
                members += self.client.zrange(name, 0, MOST_KEYS - 1)
            for key in dict.fromkeys(member[MEMBER_HEAD:] for member in members):
                yield base + b"front:%d:%b" % (level, key), True, level
                yield base + b"jobs:%d:%b" % (level, key), False, level
        _, full = self.client.sscan(base + b"full", 0, count=MOST_KEYS)
        for entry in full:
            yield base + b"front:" + entry, True, int(entry[:1])
            yield base + b"jobs:" + entry, False, int(entry[:1])

    def _length(self, name: bytes | str, is_set: bool) -> int:
        return int(self.client.zcard(name) if is_set else self.client.llen(name))

    def _slice(self, name: bytes | str, is_set: bool, count: int) -> Iterator[bytes]:
        """Yield the ``count`` next messages of a list, or of a set of given-back ones, in the order they would run."""
        done = 0
        while done < count:
            size = min(self._size(), count - done)
            if is_set:
                found = self.client.zrange(name, done, done + size - 1)
            else:
                # Not LRANGE: Redis 6.2 walks there from the other end, which takes milliseconds in a long list.
                pipe = self.client.pipeline(transaction=False)
                for index in range(done + 1, done + size + 1):
                    pipe.lindex(name, -index)
                found = [element for element in pipe.execute() if element is not None]
            for element in found:
                self._measure(element)
            yield from found
            if len(found) < size:
                return
            done += size

    def _size(self) -> int:
        """Return how many messages a call may read: one until it is known how large they are."""
        return max(1, min(CHUNK, CHUNK_BYTES // self._largest))

    def _measure(self, raw: bytes) -> None:
        # Slowly down again: one large message must not make all calls small.
        self._largest = max(len(raw), self._largest // 2, 1)


def _sorted_element(element: bytes, level: int | None) -> tuple[float, int, bytes]:
    """Return number, level and message of an element of a sorted list or front; ``level`` None: of a returned set."""
    first, second, _, raw = element.split(b":", 3)
    try:
        return (float(first), level, raw) if level is not None else (float(second), int(first), raw)
    except ValueError:
        # None of ours: it has no place.
        return 0.0, 0, raw


def _record(record: bytes) -> tuple[bytes, str]:
    """Return message and queue of a record of a held message."""
    try:
        raw, _, queue = json.loads(record)
    except ValueError:
        return b"", ""
    # Kombu's records, and ours, hold the message as JSON.
    return json.dumps(raw).encode(), str(queue)


def settings_of(settings: Settings, queues: Iterable[str]) -> dict[str, Any]:
    """Return, as what JSON can hold, the settings that decide what is next."""
    found: dict[str, Any] = {"strategies_strategy": settings.strategy.label}
    names = list(queues)
    ranks = {queue: rank for queue, rank in settings.ranks.items() if queue in names}
    values = {
        "ranks": ranks,
        "priority_levels": settings.priority_levels,
        "default_priority": settings.default_priority,
        "read_ahead": settings.read_ahead,
        "fair_share": True if settings.fair else None,
        "fair_share_memory": settings.fair_share_memory if settings.fair else None,
        "max_in_flight": settings.max_in_flight,
        "group_mode": settings.group_mode,
        "single_active_consumer": [q for q in settings.single_active_consumer if q in names],
    }
    for name, value in values.items():
        if value:
            found[f"strategies_{name}"] = dict(value) if isinstance(value, Mapping) else value
    return found
