"""Own how a look reaches Redis, and who is there: queues and workers.

Calls go out in pipelines of bounded length, and never as a transaction: others' calls go in between. What cannot be
read (a key of a wrong type, a refused command) is noted, and does not end the look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_strategies.store.admin import escaped, run
from celery_strategies.store.keys import Keys
from celery_strategies.store.scripts import Script
from celery_strategies.store.store import Place

__all__ = ("Holding", "Queues", "Reach", "WorkerSeen", "find_queues", "find_workers")

#: Commands of one pipeline.
CHUNK = 500
#: Names that one SCAN looks at, and seconds after which the search for queues ends.
SCAN_COUNT, SCAN_SECONDS = 500, 0.25
#: Held messages that a look reads of one worker.
MOST_HELD = 5000
#: Milliseconds after which a worker that does not beat is called silent.
SILENT = 3000
#: Kombu's separator inside a member of a binding.
_SEP = "\x06\x16"


class Reach:
    """Read from one broker."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        #: What could not be read, and why; each thing once.
        self.notes: list[str] = []

    def many(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """Return the replies of commands, None for those that failed."""
        commands, replies = list(calls), []
        for start in range(0, len(commands), CHUNK):
            chunk = commands[start : start + CHUNK]
            pipe = self.client.pipeline(transaction=False)
            for command in chunk:
                pipe.execute_command(*command)
            for command, reply in zip(chunk, pipe.execute(raise_on_error=False), strict=True):
                replies.append(self._checked(command, reply))
        return replies

    def one(self, *command: Any) -> Any:
        """Return the reply of one command, None if it failed."""
        return self.many([command])[0]

    def script(self, script: Script, names: list[str], *argv: Any) -> Any:
        """Return the reply of a script, None if it failed."""
        try:
            return run(self.client, script, names, *argv)
        except ResponseError as error:
            return self._checked((script.name, *names[:1]), error)

    def _checked(self, command: Sequence[Any], reply: Any) -> Any:
        if isinstance(reply, (RedisConnectionError, RedisTimeoutError)):
            raise reply
        if not isinstance(reply, Exception):
            return reply
        name = command[1] if len(command) > 1 else ""
        self.note(f"{command[0]} {name!r}: {reply}")
        return None

    def note(self, text: str) -> None:
        """Note what a reader of the answer should know."""
        if text not in self.notes:
            self.notes.append(text)

    def now(self) -> float:
        """Return the server's time in seconds."""
        seconds, micros = self.client.time()
        return float(seconds) + float(micros) / 1e6

    def pauses(self) -> dict[str, str]:
        """Return what is paused, by queue, with the reason. Nothing can be paused yet."""
        return {}


def text(value: Any) -> str:
    """Return bytes from Redis as text that can be shown."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def pairs(reply: Any) -> list[tuple[Any, Any]]:
    """Return a flat reply of names and values as pairs, whatever the client made of it."""
    if isinstance(reply, dict):
        return list(reply.items())
    return list(zip(reply[::2], reply[1::2], strict=True))


def fields(reply: Any) -> dict[str, str]:
    """Return the reply of HGETALL as text, whatever the client made of it."""
    return {text(name): text(value) for name, value in pairs(reply or ())}


def scored(reply: Any) -> list[tuple[bytes, float]]:
    """Return the reply of a command WITHSCORES as pairs, whatever the client made of it."""
    found = list(reply or [])
    if found and not isinstance(found[0], (tuple, list)):
        found = pairs(found)
    return [(member, float(score)) for member, score in found]


# -- queues ------------------------------------------------------------------------------------


@dataclass
class Queues:
    """The queues that were found: in the app, in what workers say, in Kombu's bindings, and in our own keys."""

    names: list[str]
    #: Whether the whole key space was looked through.
    complete: bool = True


def find_queues(
    reach: Reach,
    known: Iterable[str],
    workers: Iterable[WorkerSeen],
    own_exchanges: Iterable[str] = (),
    seconds: float = SCAN_SECONDS,
) -> Queues:
    """Find every queue that there is.

    *known* are those of the app; *own_exchanges* are Celery's own, whose queues hold no jobs. Walks the key space, for
    *seconds* at most: a Redis that also holds millions of results would take longer.
    """
    found = dict.fromkeys(known)
    for worker in workers:
        found.update(dict.fromkeys(worker.queues))
    scanned: set[str] = set()
    complete = True
    bindings: list[bytes] = []
    ends = _ends(reach.keys)
    begins = f"{reach.keys.prefix}strategies:{{"
    for name in _scan(reach, (f"{reach.keys.prefix}_kombu.binding.", begins), seconds):
        if name is None:
            complete = False
            reach.note(
                "Redis has too many keys to look through all of them: a queue that no worker reads, and that the app "
                "does not name, may be missing"
            )
        elif name.startswith(begins.encode()):
            whole = text(name)[len(begins) :]
            scanned.update(whole[: -len(end)] for end in ends if whole.endswith(end))
        else:
            bindings.append(name)
    skipped = {f"{reach.keys.prefix}_kombu.binding.{name}".encode() for name in own_exchanges}
    asked = [["SMEMBERS", name] for name in bindings if name not in skipped]
    for members in reach.many(asked):
        parts = [text(member).split(_SEP) for member in members or ()]
        scanned.update(part[2] for part in parts if len(part) == 3 and part[2])
    found.update(dict.fromkeys(sorted(scanned)))
    return Queues(list(found), complete)


def _ends(keys: Keys) -> list[str]:
    """Return what keys of ours that a queue with anything worth a look has end with."""
    makers: list[Callable[[str], str]] = [
        *(keys.policy, keys.state, keys.returned, keys.delayed, keys.in_line),
        *(keys.dead, keys.set_aside, keys.unsorted, keys.lease, keys.consumers),
    ]
    return [make("\0").partition("\0")[2] for make in makers]


def _scan(reach: Reach, starts: Sequence[str], seconds: float) -> Iterator[bytes | None]:
    """Yield the names of keys that begin so, each start in its own walk; None if the time was over."""
    deadline = monotonic() + seconds
    cursors: dict[str, Any] = dict.fromkeys(starts, 0)
    while cursors:
        if monotonic() > deadline:
            yield None
            return
        replies = reach.many(
            ["SCAN", cursor, "MATCH", f"{escaped(start)}*", "COUNT", SCAN_COUNT]
            for start, cursor in cursors.items()
        )
        for start, reply in zip(list(cursors), replies, strict=True):
            if reply is None:
                del cursors[start]
                continue
            yield from reply[1]
            cursors[start] = reply[0]
            if int(reply[0]) == 0:
                del cursors[start]


# -- workers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """A message that a worker holds, or whose job it runs: queue, level, key ("" = none)."""

    tag: str
    queue: str
    level: int
    key: str
    deliveries: int


@dataclass
class WorkerSeen:
    """A strategies worker, as it is on record in Redis."""

    id: str
    #: Seconds since its last beat.
    age: float
    #: Whether its session is there; None if that cannot be told.
    session: bool | None
    name: str = ""
    host: str = ""
    pid: int | None = None
    queues: list[str] = field(default_factory=list)
    strategy: str = ""
    priority: int = 0
    slots: int | None = None
    held: list[Holding] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether it shows signs of life."""
        return self.age * 1000 < SILENT and self.session is not False

    @property
    def called(self) -> str:
        """What a person knows it by."""
        return self.name or self.id


def find_workers(reach: Reach) -> list[WorkerSeen]:
    """Return the workers on record, by name."""
    keys, now = reach.keys, reach.now()
    beats: list[tuple[bytes, float]] = []
    while page := scored(
        reach.one("ZRANGE", keys.alive, len(beats), len(beats) + CHUNK - 1, "WITHSCORES")
    ):
        beats += page
    names = [text(name) for name, _ in beats]
    entries = reach.many(["HGETALL", keys.entry(name)] for name in names)
    sessions = reach.many(["PUBSUB", "NUMSUB", keys.session(name)] for name in names)
    found = []
    for name, (_, beat), entry, session in zip(names, beats, entries, sessions, strict=True):
        worker = _worker(name, max(0.0, now - beat / 1000), fields(entry), session)
        worker.held = _held(reach, name)
        found.append(worker)
    return sorted(found, key=lambda worker: (worker.called, worker.id))


def _worker(name: str, age: float, entry: dict[str, str], session: Any) -> WorkerSeen:
    try:
        queues = [str(queue) for queue in json.loads(entry.get("queues", "[]"))]
    except (ValueError, TypeError):
        queues = []
    count = scored(session)
    return WorkerSeen(
        id=name,
        age=age,
        session=bool(count and count[0][1]) if entry.get("session") == "1" else None,
        name=entry.get("name", ""),
        host=entry.get("host", ""),
        pid=_number(entry.get("pid")),
        queues=queues,
        strategy=entry.get("strategy", ""),
        priority=_number(entry.get("priority")) or 0,
        slots=_number(entry.get("slots")),
    )


def _number(value: str | None) -> int | None:
    try:
        return int(value or "")
    except ValueError:
        return None


def _held(reach: Reach, worker: str) -> list[Holding]:
    found: list[Holding] = []
    cursor: Any = 0
    while len(found) < MOST_HELD:
        reply = reach.one("HSCAN", reach.keys.holder(worker), cursor, "COUNT", CHUNK)
        if reply is None:
            break
        cursor, entries = reply
        for tag, place in pairs(entries):
            if tag and (holding := holding_of(text(tag), place)):
                found.append(holding)
        if int(cursor) == 0:
            break
    return found


def holding_of(tag: str, place: bytes) -> Holding | None:
    """Return what a holder entry says, None if it is none of ours."""
    try:
        parsed = Place.parse(place)
    except (ValueError, LookupError, TypeError):
        return None
    return Holding(tag, parsed.queue, parsed.list, parsed.key or "", parsed.deliveries)


#: What ends a look: the broker is away, or says no to everything.
UNREACHABLE = (OSError, RedisError)
