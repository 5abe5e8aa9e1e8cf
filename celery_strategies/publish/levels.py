"""Which level a published task gets when nobody named one.

Kombu writes ``priority: 0`` where none was given, and 0 is the highest level, so the default must be set before the
message reaches Kombu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_strategies.settings import Settings
from celery_strategies.transport.redis import LEVELS_OPTION


def carry_levels(connection: Any, settings: Settings) -> None:
    """Let the channels of *connection* know ``strategies_priority_levels``."""
    levels = settings.priority_levels
    if levels is not None:
        connection.transport_options[LEVELS_OPTION] = (
            dict(levels) if isinstance(levels, Mapping) else levels
        )


def max_priority_of(queue: Any) -> int | None:
    """Return the ``x-max-priority`` argument of *queue* (a ``kombu.Queue`` or None), None without one."""
    if queue is None:
        return None
    maximum: int | None = (queue.queue_arguments or {}).get("x-max-priority", queue.max_priority)
    return maximum


def set_level(amqp: Any, settings: Settings, producer: Any, options: dict[str, Any]) -> None:
    """Make *options*, those of a publish through *producer*, name a level."""
    if settings.priority_levels is not None:
        carry_levels(producer.connection, settings)
    if options.get("priority") is None:
        level = _default_level(amqp, settings, options.get("queue"))
        if level is not None:
            options["priority"] = level


def _default_level(amqp: Any, settings: Settings, queue: Any) -> int | None:
    """Return the level of a task published to *queue* (a name, a Queue, None) without a priority."""
    if queue is None:
        queue = amqp.app.conf.task_default_queue
    if isinstance(queue, str):
        found = amqp.queues.get(queue) if queue in amqp.queues else None
        name, declared = queue, found
    else:
        name, declared = queue.name, queue
    levels = settings.levels_for(name, max_priority_of(declared))
    return None if levels is None else settings.default_level(levels)
