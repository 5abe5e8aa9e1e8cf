"""What an event is, on the wire and for a handler.

On the wire it is a Celery task message called :data:`EVENT_TASK`, with the topic and the payload as its arguments. One
such message may reach many queues, so it names no handler; each queue's copy is given its handler's name and an
id of its own when it is delivered (:func:`address`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid5

from celery_strategies.errors import StrategiesError

#: The task name of an event that no handler has received yet. Producers that do not know us use it too.
EVENT_TASK = "celery_strategies.event"
#: The header in which a handler's task carries the id of its event.
ID_HEADER = "event_id"

_IDS = UUID("5b0f6c1e-6d0c-4b52-9a53-1c7a3f1f6b0e")


class UnroutableEvent(StrategiesError):  # noqa: N818  # as the package's other errors
    """Tell that no queue is bound to the topic of an event that was published as mandatory."""


@dataclass(frozen=True)
class Event:
    """Hold what was published. ``id`` is the same in every handler, and on every attempt."""

    topic: str
    payload: Any
    headers: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


def task_id(event_id: str, queue: str) -> str:
    """Return the id of the task that handles the event *event_id* in *queue*.

    Results, revocation and Celery's own lists know a task by its id, so the copies of an event must not share one.
    """
    return str(uuid5(_IDS, f"{queue}:{event_id}"))


def address(message: Any, task: str, queue: str) -> None:
    """Make *message*, delivered from *queue*, a message for *task* if it is an event; leave any other as it is."""
    headers = message.headers
    if not isinstance(headers, dict):
        return
    fields: Any = headers
    if "task" not in headers:
        # Protocol 1 has it in the body, which Kombu keeps once it is decoded.
        try:
            fields = message.decode()
        except Exception:  # noqa: BLE001  # whoever runs it meets the error again, and deals with it
            return
    if not isinstance(fields, dict) or fields.get("task") != EVENT_TASK:
        return
    event_id = str(fields.get("id"))
    fields["task"], fields["id"] = task, task_id(event_id, queue)
    headers[ID_HEADER] = event_id
    # The publisher knows nothing of results: the handler's own options decide.
    headers.pop("ignore_result", None)


def received(request: Any, topic: str, payload: Any) -> Event:
    """Return the event that a task with *request* handles."""
    headers = dict(request.headers or {})
    return Event(topic, payload, headers, headers.pop(ID_HEADER, None) or request.id)
