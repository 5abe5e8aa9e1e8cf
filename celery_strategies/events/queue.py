"""The queue of one handler: how it is bound, and what becomes of a message that comes out of it."""

from __future__ import annotations

from typing import Any

from kombu import Exchange, Queue

from celery_strategies.events.model import address


class EventQueue(Queue):
    """A queue bound to a topic exchange by the patterns of its handler, and by its own name to an exchange of its own.

    The second is what Celery gives to every queue that it makes up: so ``queue="name"`` publishes to this queue alone,
    as a retry does. *task* is the handler's task; *rank* its rank among the sources, unless the settings have one.
    """

    attrs = (*Queue.attrs, ("task", None), ("rank", None))
    task: str
    rank: int | None

    def __init__(
        self,
        name: str = "",
        exchange: Exchange | None = None,
        routing_key: str = "",
        channel: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name, exchange, routing_key, **kwargs)
        # Kombu has either an exchange or bindings.
        self.exchange = exchange or Exchange(self.name, type="direct")
        self.routing_key = routing_key or self.name
        self.maybe_bind(channel)

    def declare(self, nowait: bool = False, channel: Any = None) -> Any:
        """Declare and bind, and remove bindings of patterns that the handler has no more."""
        name = super().declare(nowait=nowait, channel=channel)
        channel = channel or self.channel
        bindings: Any = self.bindings
        for exchange in {binding.exchange.name for binding in bindings}:
            patterns = {b.routing_key for b in bindings if b.exchange.name == exchange}
            for pattern, _, queue in channel.get_table(exchange):
                if queue == self.name and pattern not in patterns:
                    channel.queue_unbind(self.name, exchange, pattern)
        return name

    def consume(  # type: ignore[override]  # whatever else Kombu's takes
        self, consumer_tag: str = "", callback: Any = None, **kwargs: Any
    ) -> Any:
        """Consume; an event goes to *callback* as a message for this queue's task."""

        def received(message: Any) -> Any:
            address(message, self.task, self.name)
            return callback(message)

        return super().consume(consumer_tag, received, **kwargs)  # type: ignore[arg-type]
