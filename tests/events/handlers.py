"""The handlers of the event tests. They write what they get to the Redis list `test:events`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from celery import Task

from celery_strategies.events import Event, EventBus
from tests.support.apps import Recorder

EVENTS = "test:events"


def add_handlers(bus: EventBus, recorder: Recorder) -> None:
    """Give *bus* its handlers: billing, mail (which fails as told), audit (which gets all) and slow."""

    def note(handler: str, event: Event, **more: Any) -> None:
        line = {
            "handler": handler,
            "topic": event.topic,
            "payload": event.payload,
            "headers": dict(event.headers),
            "id": event.id,
            "pid": os.getpid(),
            **more,
        }
        recorder.client().rpush(EVENTS, json.dumps(line))

    @bus.on("orders.*", "refunds.#", queue="billing", rank=2)
    def bill(event: Event) -> None:
        note("billing", event)

    @bus.on("#", queue="audit", bind=True, ignore_result=False)
    def audit(self: Task, event: Event) -> str:
        note("audit", event, task=self.request.id, name=self.name)
        return event.topic

    @bus.on("orders.#", queue="mail", rank=1, bind=True, max_retries=5, acks_late=True)
    def mail(self: Task, event: Event) -> None:
        """Fail as often as the payload says."""
        note("mail", event, retries=self.request.retries, task=self.request.id)
        if self.request.retries < (event.payload or {}).get("fail", 0):
            raise self.retry(countdown=(event.payload or {}).get("countdown", 0))

    @bus.on("slow.#", queue="slow", bind=True, acks_late=True)
    def slow(self: Task, event: Event) -> None:
        """Run until the test opens the gate once."""
        info = self.request.delivery_info or {}
        note("slow", event, redelivered=bool(info.get("redelivered")))
        _wait(recorder.client().lpop)


def _wait(take: Callable[[str], Any], gate: str = "gate") -> None:
    deadline = time.monotonic() + 60
    while not take(gate):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody opened {gate}")
        time.sleep(0.02)
