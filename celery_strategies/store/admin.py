"""Calls for operators, over an ordinary blocking client."""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import NoScriptError

from celery_strategies.store import scripts
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import TAKE_LIMIT, unsort_keys


def unsort_queue(client: Any, keys: Keys, queue: str) -> int:
    """Move everything that was given back to *queue* to the heads of Kombu's lists; returns how many."""
    total = 0
    names = unsort_keys(keys, queue)
    while True:
        try:
            moved = int(client.evalsha(scripts.UNSORT.sha, len(names), *names, TAKE_LIMIT))
        except NoScriptError:
            client.script_load(scripts.UNSORT.source)
            continue
        total += moved
        if moved < TAKE_LIMIT:
            return total


def queues_with_returned(client: Any, keys: Keys) -> list[str]:
    """Return the queues that have given-back messages, by name. Walks the key space with ``SCAN``."""
    # A queue's name is what stands between two fixed ends, whatever it is.
    start, end = keys.returned("\0").split("\0")
    pattern = f"{_escaped(start)}*{_escaped(end)}"
    found = client.scan_iter(match=pattern, count=1000, _type="ZSET")
    return sorted({key.decode()[len(start) : -len(end)] for key in found})


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
