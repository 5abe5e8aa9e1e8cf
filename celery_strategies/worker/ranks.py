"""Which rank each queue has: what the settings say of it, else what it says of itself.

A queue of the app, a ``kombu.Queue``, may have an attribute ``rank``, as those of event handlers do.
"""

from __future__ import annotations

from typing import Any

from celery_strategies.settings import Settings


def ranks_of(app: Any, settings: Settings) -> dict[str, int]:
    """Return the ranks of all queues of *app* that have one."""
    own = {name: getattr(queue, "rank", None) for name, queue in app.amqp.queues.items()}
    return {**{name: rank for name, rank in own.items() if rank is not None}, **settings.ranks}
