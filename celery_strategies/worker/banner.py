"""What a worker's start-up banner says about its reading.

Owns a few lines of text, and their way into Celery's banner.
"""

from __future__ import annotations

from typing import Any

from celery_strategies.core.sources import SourceList
from celery_strategies.publish.levels import max_priority_of
from celery_strategies.settings import Settings
from celery_strategies.worker.ranks import ranks_of


def text(app: Any, settings: Settings) -> str:
    """Return strategy and sources, in list order, of a worker of *app* that consumes what was selected."""
    sources = SourceList(ranks_of(app, settings))
    for name, queue in app.amqp.queues.consume_from.items():
        sources.bind(name, settings.levels_for(name, max_priority_of(queue)))
    lines = [f" -------------- [strategies] {settings.strategy.label}"]
    lines += [f"                .> {line}" for line in sources.describe().splitlines()]
    return "\n".join(lines) + "\n"


def extend(controller: Any, app: Any, settings: Settings) -> None:
    """Have *controller*'s banner, if it prints one, say :func:`text` too."""
    extra_info = getattr(controller, "extra_info", None)
    if extra_info is not None:
        controller.extra_info = lambda: text(app, settings) + (extra_info() or "")
