"""A Kombu program without Celery, as a test runs it: in a thread, or `python -m tests.events.program`.

What it does with a message stands in the message: {"label": ..., "do": "ack", "reject", "requeue", "fail" or "keep"}.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

import redis
from kombu import Connection, Queue

from celery_strategies import StrategyConsumerMixin


class Program(StrategyConsumerMixin):
    """Consume *queues*, as told by *attributes* and by each message."""

    def __init__(self, connection: Any, queues: list[Any], **attributes: Any) -> None:
        self.connection = connection
        self.queues = [Queue(q, routing_key=q) if isinstance(q, str) else q for q in queues]
        self.no_ack = attributes.pop("no_ack", False)
        self.kombus = attributes.pop("kombus", ())
        self.seen: list[str] = []
        self.kept: dict[str, Any] = {}
        self.redelivered: dict[str, bool] = {}
        self.connections = 0
        self.ready = threading.Event()
        for name, value in attributes.items():
            setattr(self, name, value)

    def is_source(self, queue: str) -> bool:
        return queue not in self.kombus

    def get_consumers(self, Consumer: Any, channel: Any) -> list[Any]:  # noqa: N803  # Kombu's name
        return [Consumer(self.queues, callbacks=[self.handle], no_ack=self.no_ack)]

    def on_consume_ready(self, connection: Any, channel: Any, consumers: Any, **_: Any) -> None:
        self.connections += 1
        self.ready.set()

    def handle(self, body: Any, message: Any) -> None:
        self.redelivered[body["label"]] = bool(message.delivery_info.get("redelivered"))
        self.seen.append(body["label"])
        match body.get("do", "ack"):
            case "ack":
                message.ack()
            case "reject":
                message.reject()
            case "requeue" if self.seen.count(body["label"]) == 1:
                message.requeue()
            case "requeue":
                message.ack()
            case "fail":
                raise RuntimeError(body["label"])
            case _:
                self.kept[body["label"]] = message


class Written(Program):
    """One that writes what it sees into Redis."""

    client: redis.Redis

    def handle(self, body: Any, message: Any) -> None:
        self.client.rpush("test:seen", body["label"])
        super().handle(body, message)


def main() -> None:
    """Run until SIGTERM: arguments are the URL and a JSON object of attributes."""
    url, attributes = sys.argv[1], json.loads(sys.argv[2])
    options = attributes.pop("transport_options", {})
    program = Written(Connection(url, transport_options=options), attributes.pop("queues"))
    program.client = redis.Redis.from_url(url)
    for name, value in attributes.items():
        setattr(program, name, value)
    signal.signal(signal.SIGTERM, lambda *_: program.stop())
    program.run()


if __name__ == "__main__":
    main()
