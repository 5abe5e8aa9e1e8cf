"""The one wrap around Celery's task sender, through which every task of every app goes.

It is the only place where a publish can still be changed, and can still fail: what is raised here reaches the caller,
and nothing is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_strategies import settings as settings_module
from celery_strategies.core.tags import TERM_HEADER
from celery_strategies.publish.fair import Marker, markers
from celery_strategies.publish.levels import set_level
from celery_strategies.settings import Settings


def without_term(headers: Any) -> Any:
    """Return *headers* without the fencing number that a retry copies from its first run: it belongs to that one.

    They may be those of the task that is running, which still asks for its number: they are not changed.
    """
    if not isinstance(headers, dict) or not (TERM_HEADER in headers or "headers" in headers):
        return headers
    found = {name: value for name, value in headers.items() if name != TERM_HEADER}
    if "headers" in found:
        found["headers"] = without_term(found["headers"])
    return found


def _tell(event: dict[str, Any], options: dict[str, Any], marks: tuple[Marker, ...]) -> None:
    """Have a task-sent event say level, key and weight, too: nobody who records arrivals sees the message."""
    if options.get("priority") is not None:
        event.setdefault("priority", options["priority"])
    headers = options.get("headers") or {}
    for marker in marks:
        for header in (marker.key_header, marker.weight_header):
            if header in headers:
                event.setdefault(header, headers[header])


def wrap(amqp: Any, send_task_message: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap *send_task_message* so that every task of *amqp*'s app gets its level and its key."""
    plan: tuple[Settings, tuple[Marker, ...]] | None = None

    def publish(producer: Any, name: str, message: Any, **options: Any) -> Any:
        nonlocal plan
        if plan is None:
            settings = settings_module.load(amqp.app.conf)
            plan = settings, markers(settings)
        settings, marks = plan
        headers = without_term(message.headers)
        if headers is not message.headers:
            message = message._replace(headers=headers)
        if options.get("headers"):
            options["headers"] = without_term(options["headers"])
        set_level(amqp, settings, producer, options)
        for marker in marks:
            marker.mark(amqp.app, producer, name, message, options)
        if message.sent_event:
            _tell(message.sent_event, options, marks)
        return send_task_message(producer, name, message, **options)

    return publish
