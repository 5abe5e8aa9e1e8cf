"""The limits of an app's tasks, and what a message of one has to ask for.

Owns the way from a message's body to the key of its limit; the rules are :mod:`celery_strategies.concurrency`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from celery_strategies.concurrency import Limit, limit_of
from celery_strategies.store.store import Ask


def limits_of(app: Any) -> dict[str, Limit]:
    """Return the limits of *app*'s tasks, by the task's name."""
    found = {name: limit_of(task) for name, task in app.tasks.items()}
    return {name: limit for name, limit in found.items() if limit is not None}


def ask_for(limit: Limit, task: str, message: Any, payload: Any) -> Ask | None:
    """Return what *message*, of *task*, has to ask for; None if *limit* does not hold for it.

    *payload* is its decoded body under protocol 1, else None.

    Raises:
        LimitError: its key is unknown.
        kombu.exceptions.DecodeError: its body cannot be decoded.
    """
    args, kwargs = _arguments(message, payload) if callable(limit.key) else ((), {})
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        # No task message, as Celery is about to find out.
        return None
    name = limit.name(task, args, kwargs)
    return None if name is None else Ask(name, limit.to, max(1, math.ceil(limit.duration * 1000)))


def _arguments(message: Any, payload: Any) -> tuple[Any, Any]:
    body = message.payload if payload is None else payload
    if isinstance(body, Mapping):
        return body.get("args", ()), body.get("kwargs", {})
    if isinstance(body, (list, tuple)) and len(body) >= 2:
        return body[0], body[1]
    return None, None
