"""Own looks at the sorted state of a queue: what is there, and what must be true of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import redis

from celery_strategies.store.keys import Keys
from celery_strategies.store.store import Place, is_counted

LEVELS = range(10)


class Element(NamedTuple):
    """One job of a key."""

    sequence: int
    deliveries: int
    weight: str
    raw: bytes

    @classmethod
    def parse(cls, element: bytes) -> Element:
        sequence, deliveries, weight, raw = element.split(b":", 3)
        return cls(int(sequence), int(deliveries), weight.decode(), raw)


class Member(NamedTuple):
    """A key in an index: whether its next job was given back, the sequence of that job, its finish tag."""

    front: bool
    sequence: int
    finish: float


At = tuple[int, str]


@dataclass
class Sorted:
    """All that Redis has of one queue's sorted jobs. Jobs of a key: what was given back, then the others."""

    jobs: dict[At, list[Element]] = field(default_factory=dict)
    fronts: dict[At, list[Element]] = field(default_factory=dict)
    index: dict[At, list[Member]] = field(default_factory=dict)
    tags: dict[At, str] = field(default_factory=dict)
    full: set[At] = field(default_factory=set)
    running: dict[str, set[str]] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    caps: dict[str, int] = field(default_factory=dict)
    policy: dict[str, str] = field(default_factory=dict)
    ready: bool = False

    def places(self) -> set[At]:
        """Return where jobs wait."""
        return {*self.jobs, *self.fronts}

    def waiting(self, at: At) -> list[Element]:
        """Return what waits there, the next first."""
        return [*self.fronts.get(at, []), *self.jobs.get(at, [])]

    def cap(self, key: str) -> int | None:
        """Return how many jobs of *key* may be in flight."""
        if not key:
            return None
        if self.policy["single"] == "1":
            return 1
        fields = (f"!k{key}", f"k{key}", "!*", "*")
        return next((self.caps[name] for name in fields if name in self.caps), None)

    def is_full(self, key: str) -> bool:
        """Whether *key* has as many jobs in flight as it may have."""
        cap = self.cap(key)
        return cap is not None and len(self.running.get(key, ())) >= cap


def look(client: redis.Redis, keys: Keys, queue: str) -> Sorted:
    """Read everything, key by key."""
    found, base = Sorted(), keys.base(queue)
    found.state = {name: float(value) for name, value in _hash(client, f"{base}state").items()}
    for name in client.scan_iter(count=10_000):
        if name.startswith(base.encode()):
            kind, _, rest = name.decode()[len(base) :].partition(":")
            if kind in _READERS:
                _READERS[kind](found, client, name, rest)
    return found


def _hash(client: redis.Redis, name: bytes | str) -> dict[str, str]:
    return {field.decode(): value.decode() for field, value in client.hgetall(name).items()}


def _at(rest: str) -> At:
    level, _, key = rest.partition(":")
    return int(level), key


def _jobs(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.jobs[_at(rest)] = [Element.parse(raw) for raw in reversed(client.lrange(name, 0, -1))]


def _front(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    members = client.zrange(name, 0, -1, withscores=True)
    found.fronts[_at(rest)] = [Element.parse(raw) for raw, _ in members]
    assert [element.sequence for element in found.fronts[_at(rest)]] == [
        int(score) for _, score in members
    ]


def _index(found: Sorted, client: redis.Redis, name: bytes, rest: str, shift: float = 0.0) -> None:
    for member, score in client.zrange(name, 0, -1, withscores=True):
        text = member.decode()
        assert text[0] in "!0"
        entry = Member(text[0] == "!", int(text[1:17]), score - shift)
        found.index.setdefault((int(rest), text[17:]), []).append(entry)


def _old(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    _index(found, client, name, rest, found.state.get(f"s{rest}", 0.0))


def _tags(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.tags |= {(int(rest), key): value for key, value in _hash(client, name).items()}


def _full(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.full = {_at(entry.decode()) for entry in client.smembers(name)}


def _running(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.running[rest] = {tag.decode() for tag in client.smembers(name)}


def _caps(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.caps = {key: int(value) for key, value in _hash(client, name).items()}


def _policy(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.policy = _hash(client, name)


def _ready(found: Sorted, client: redis.Redis, name: bytes, rest: str) -> None:
    found.ready = True


_READERS: dict[str, Callable[[Sorted, redis.Redis, bytes, str], None]] = {
    "jobs": _jobs,
    "front": _front,
    "index": _index,
    "old": _old,
    "tags": _tags,
    "full": _full,
    "running": _running,
    "caps": _caps,
    "policy": _policy,
    "ready": _ready,
}


def held(client: redis.Redis, keys: Keys, queue: str) -> dict[str, set[str]]:
    """Return the tags of the counted jobs of *queue* that holder entries list, by key."""
    found: dict[str, set[str]] = {}
    for name in client.scan_iter(match=f"{keys.holder('*')}", count=10_000):
        for tag, entry in client.hgetall(name).items():
            if is_counted(tag.decode()):
                place = Place.parse(entry)
                if place.queue == queue and place.key is not None:
                    found.setdefault(place.key, set()).add(tag.decode())
    return found


def audit(client: redis.Redis, keys: Keys, queue: str, *, lowered: bool = False) -> list[str]:
    """Return everything that is not as it should be; nothing, unless a script was stopped halfway.

    *lowered*: the cap of every key may have been lowered, after which a key that is full leaves when it is next.
    """
    found = look(client, keys, queue)
    checks = [*_counters(found), ("running", found.running, held(client, keys, queue))]
    for at in found.places() | found.index.keys() | found.full:
        full = found.is_full(at[1]) and (not lowered or at in found.full)
        checks += _key(found, at, full)
    checks += [(f"{at} with a tag in the index", at in found.index, True) for at in found.tags]
    return [
        f"{what} is {got!r}, should be {truth!r}" for what, got, truth in checks if got != truth
    ]


Check = tuple[str, object, object]


def _counters(found: Sorted) -> list[Check]:
    counts = {at: len(found.waiting(at)) for at in found.places()}
    runnable = Counter(dict.fromkeys(LEVELS, 0))
    for (level, key), count in counts.items():
        if (level, key) not in found.full:
            runnable[level] += count
    given_back = sum(map(len, found.fronts.values()))
    return [
        ("t", found.state.get("t", 0), sum(counts.values())),
        ("b", found.state.get("b", 0), given_back),
        *((f"r{level}", found.state.get(f"r{level}", 0), runnable[level]) for level in LEVELS),
        ("ready", found.ready, sum(runnable.values()) > 0),
    ]


def _key(found: Sorted, at: At, full: bool) -> list[Check]:
    elements = found.waiting(at)
    members = [(member.front, member.sequence) for member in found.index.get(at, [])]
    if not elements:
        return [(f"index of {at}", members, []), (f"{at} in full", at in found.full, False)]
    expected = [] if full else [(at in found.fronts, elements[0].sequence)]
    checks: list[Check] = [
        (f"{at} in full", at in found.full, full),
        (f"index of {at}", members, expected),
    ]
    for part in (found.fronts.get(at, []), found.jobs.get(at, [])):
        sequences = [element.sequence for element in part]
        checks.append((f"order of {at}", sequences, sorted(set(sequences))))
    return checks
