"""The one wrap around Celery's task sender, through which every task of every app goes.

It is the only place where a publish can still be changed, and can still fail: what is raised here reaches the caller,
and nothing is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_strategies import settings as settings_module
from celery_strategies.publish.fair import Marker, markers
from celery_strategies.publish.levels import set_level
from celery_strategies.settings import Settings
from celery_strategies.transport.reader import TERM_HEADER


def forget_term(headers: Any) -> None:
    """Remove the fencing number that a retry copies from its first run: it belongs to that one."""
    while isinstance(headers, dict):
        headers.pop(TERM_HEADER, None)
        headers = headers.get("headers")


def wrap(amqp: Any, send_task_message: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap *send_task_message* so that every task of *amqp*'s app gets its level and its key."""
    plan: tuple[Settings, tuple[Marker, ...]] | None = None

    def publish(producer: Any, name: str, message: Any, **options: Any) -> Any:
        nonlocal plan
        if plan is None:
            settings = settings_module.load(amqp.app.conf)
            plan = settings, markers(settings)
        settings, marks = plan
        forget_term(message.headers)
        set_level(amqp, settings, producer, options)
        for marker in marks:
            marker.mark(amqp.app, producer, name, message, options)
        return send_task_message(producer, name, message, **options)

    return publish
