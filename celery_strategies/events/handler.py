"""A function that handles events, as a Celery task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kombu import Exchange, binding

from celery_strategies.events.model import received
from celery_strategies.events.queue import EventQueue
from celery_strategies.transport import topics


@dataclass(frozen=True)
class Handler:
    """Name a task, the queue that it alone reads, and the patterns that the queue is bound by."""

    task: str
    queue: str
    patterns: tuple[str, ...]
    rank: int | None

    def handles(self, topic: str) -> bool:
        """Whether an event of *topic* comes to this handler."""
        return any(topics.matches(pattern, topic) for pattern in self.patterns)

    def declaration(self, exchange: Exchange) -> EventQueue:
        """Return the queue, bound to *exchange*."""
        return EventQueue(
            self.queue,
            bindings=[binding(exchange, pattern) for pattern in self.patterns],
            task=self.task,
            rank=self.rank,
        )


class _OwnQueue:
    """What a handler's task does in its own way: its retry goes to its own queue and to no other."""

    event_queue: str

    def signature_from_request(
        self: Any,
        request: Any = None,
        args: Any = None,
        kwargs: Any = None,
        queue: Any = None,
        **options: Any,
    ) -> Any:
        """Return what is published for another attempt; Celery would publish it to the exchange again."""
        return super().signature_from_request(  # type: ignore[misc]  # Task's, which comes next
            request, args, kwargs, queue=queue or self.event_queue, **options
        )


def make_task(
    app: Any,
    function: Callable[..., Any],
    *,
    name: str,
    queue: str,
    base: Any,
    bind: bool,
    options: Mapping[str, Any],
) -> None:
    """Register *function*, which is called with an Event, as the task *name* of *app*."""

    def run(self: Any, topic: str, payload: Any) -> Any:
        event = received(self.request, topic, payload)
        return function(self, event) if bind else function(event)

    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(run, attribute, getattr(function, attribute, None))
    kind = type("EventTask", (_OwnQueue, base or app.Task), {"abstract": True})
    app.task(
        run,
        # Another app of this process has no such queue.
        shared=False,
        bind=True,
        # A task's own signature is checked, but nobody calls this one by it.
        typing=False,
        name=name,
        base=kind,
        **{"ignore_result": True, "event_queue": queue, **options},
    )
