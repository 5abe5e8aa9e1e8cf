"""Calls for operators and producers, over an ordinary blocking client.

Everything here works in bounded calls, so that a large queue never stops the server, and can be interrupted and
repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoScriptError

from celery_strategies.core.tags import check_weight
from celery_strategies.store import scripts
from celery_strategies.store.keys import Keys
from celery_strategies.store.scripts import Script
from celery_strategies.store.store import SORT_LIMIT, TAKE_LIMIT, unsort_keys

#: Keys whose jobs one call purges.
PURGE_KEYS = 50


def run(client: Any, script: Script, names: list[str], *argv: Any) -> Any:
    """Run *script*, loading it if the server does not know it."""
    try:
        return client.evalsha(script.sha, len(names), *names, *argv)
    except NoScriptError:
        client.script_load(script.source)
        return client.evalsha(script.sha, len(names), *names, *argv)


def unsort_queue(client: Any, keys: Keys, queue: str) -> int:
    """Give everything that only our workers see back to Kombu's lists; returns how many messages.

    What was sorted goes to the heads of the lists in the order in which it would have been taken, before that what was
    given back or waits for a permit of a limit, and to the tails what is delayed. The queue's policy is removed: a
    worker of ours that still runs with fair share makes it anew.
    """
    in_line = [keys.scratch, keys.in_line(queue), keys.returned(queue)]
    # Those that are there now: a worker that still runs may put them back in line.
    for _ in range(0, int(client.zcard(keys.in_line(queue))), TAKE_LIMIT):
        run(client, scripts.DISPERSE, in_line, TAKE_LIMIT)
    gathering = [keys.scratch, keys.policy(queue), keys.unsorted(queue)]
    strays = list(_lists_of_jobs(client, keys, queue))
    for start in range(0, len(strays), TAKE_LIMIT):
        # Where an index was lost, nothing but these names says that there are jobs.
        run(client, scripts.GATHER, gathering, TAKE_LIMIT, *strays[start : start + TAKE_LIMIT])
    while run(client, scripts.GATHER, gathering, TAKE_LIMIT) >= 0:
        pass
    total = 0
    for moved in _unsorting(client, keys, queue):
        total += moved
    names = [keys.scratch, keys.delayed(queue), *keys.inboxes(queue)]
    while moved := int(run(client, scripts.PROMOTE, names, SORT_LIMIT, "all")):
        total += moved
    return total


def _unsorting(client: Any, keys: Keys, queue: str) -> Iterator[int]:
    while moved := int(run(client, scripts.UNSORT, unsort_keys(keys, queue), TAKE_LIMIT)):
        yield moved


def _lists_of_jobs(client: Any, keys: Keys, queue: str) -> Iterator[bytes]:
    """Return ``level:key`` of every list of sorted jobs. Walks the key space with ``SCAN``."""
    for kind, name in (("LIST", "jobs:"), ("ZSET", "front:")):
        start = f"{keys.base(queue)}{name}"
        found = client.scan_iter(match=f"{escaped(start)}*", count=1000, _type=kind)
        yield from (key[len(start.encode()) :] for key in found)


def purge_sorted(client: Any, keys: Keys, queue: str) -> int:
    """Remove the sorted jobs of *queue*; returns how many there were."""
    total, more = 0, 1
    while more:
        removed, more = run(client, scripts.PURGE, [keys.scratch, keys.policy(queue)], PURGE_KEYS)
        total += int(removed)
    return total


def set_weight(client: Any, keys: Keys, queue: str, key: str, weight: float | None) -> bool:
    """Have the jobs of *key* served with *weight*, those that wait too; None: with their own again.

    Returns False if the queue's jobs are not sorted. Raises ValueError for what cannot be a weight.
    """
    value = "" if weight is None else repr(float(check_weight(weight)))
    return _steer(client, keys, queue, "weights", f"!k{key}", value)


def set_cap(client: Any, keys: Keys, queue: str, key: str, cap: int | None) -> bool:
    """Let *cap* jobs of *key* ("*": of every key without a cap of its own) be in flight; None: as the settings say.

    Returns False if the queue's jobs are not sorted. Raises ValueError for a cap below 1, and for jobs without a key.
    """
    if not key:
        raise ValueError("jobs without a key have no cap")
    if cap is not None and cap < 1:
        raise ValueError(f"a cap must be 1 or more, not {cap!r}")
    field = "!*" if key == "*" else f"!k{key}"
    return _steer(client, keys, queue, "caps", field, "" if cap is None else str(cap))


def _steer(client: Any, keys: Keys, queue: str, what: str, field: str, value: str) -> bool:
    names = [keys.policy(queue), keys.caps(queue) if what == "caps" else keys.weights(queue)]
    cursor = b"0"
    while True:
        cursor = run(client, scripts.STEER, names, what, field, value, cursor)
        if cursor in (b"0", b"-1", "0", "-1"):
            return cursor in (b"0", "0")


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that outlived too many workers. *list* is its level, *message* the raw bytes."""

    id: str
    reason: str
    list: int
    key: str
    weight: str
    worker: str
    message: bytes


def dead_messages(
    client: Any, keys: Keys, queue: str, count: int = 100, after: str = "-"
) -> list[DeadMessage]:
    """Return up to *count* dead messages of *queue*, the oldest first, from the id *after* on, without that."""
    start = after if after == "-" else f"({after}"
    found = client.xrange(keys.dead(queue), start, "+", count)
    messages = []
    for entry, fields in found:
        values = {name.decode(): value for name, value in fields.items()}
        raw = values.pop("message")
        text = {name: value.decode("utf-8", "replace") for name, value in values.items()}
        number = int(text.pop("list"))
        messages.append(DeadMessage(id=entry.decode(), list=number, message=raw, **text))
    return messages


def revive(client: Any, keys: Keys, queue: str, entry: str) -> bool:
    """Put a dead message back at the tail of its level; False if there is none with that id."""
    names = [keys.scratch, keys.dead(queue), *keys.inboxes(queue)]
    return bool(run(client, scripts.REVIVE, names, entry))


def drop_dead(client: Any, keys: Keys, queue: str, entry: str) -> bool:
    """Remove a dead message; False if there is none with that id."""
    return bool(client.xdel(keys.dead(queue), entry))


def queues_with_dead(client: Any, keys: Keys) -> list[str]:
    """Return the queues that have dead messages, by name. Walks the key space with ``SCAN``."""
    return [
        queue
        for queue in _queues_with(client, ("STREAM", keys.dead))
        if client.xlen(keys.dead(queue))
    ]


def sorted_queues(client: Any, keys: Keys) -> list[str]:
    """Return the queues whose jobs are sorted by key, by name. Walks the key space with ``SCAN``."""
    return _queues_with(client, ("HASH", keys.policy))


def queues_to_unsort(client: Any, keys: Keys) -> list[str]:
    """Return the queues that have messages which only our workers see, by name. Walks the key space with ``SCAN``."""
    return _queues_with(
        client,
        ("ZSET", keys.returned),
        ("ZSET", keys.delayed),
        ("ZSET", keys.in_line),
        ("HASH", keys.policy),
        ("LIST", keys.unsorted),
    )


def _queues_with(client: Any, *kinds: tuple[str, Callable[[str], str]]) -> list[str]:
    found: set[str] = set()
    for kind, key_of in kinds:
        # A queue's name is what stands between two fixed ends, whatever it is.
        start, end = key_of("\0").split("\0")
        names = client.scan_iter(match=f"{escaped(start)}*{escaped(end)}", count=1000, _type=kind)
        found.update(name.decode()[len(start) : -len(end)] for name in names)
    return sorted(found)


def escaped(text: str) -> str:
    """Return *text* as a pattern of ``MATCH`` that fits only it."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
