"""The event bus of an app: its handlers, their queues, and publishing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from celery import Celery
from celery.utils import uuid
from kombu import Exchange
from kombu.common import maybe_declare

from celery_strategies import settings as settings_module
from celery_strategies.core.tags import read_tag
from celery_strategies.errors import ImproperlyConfigured, NotOurTransport, invalid
from celery_strategies.events.handler import Handler, make_task
from celery_strategies.events.model import (
    EVENT_TASK,
    ID_HEADER,
    Event,
    UnroutableEvent,
    task_id,
)
from celery_strategies.events.queue import EventQueue
from celery_strategies.publish.fair import Marker
from celery_strategies.settings import Settings, Tagger
from celery_strategies.transport import topics
from celery_strategies.transport.redis import TransportMixin

F = TypeVar("F", bound=Callable[..., Any])


class EventBus:
    """Events of one topic exchange: handlers for the worker, :meth:`publish` for everybody.

    Make it where the app is made; *exchange* is the exchange's name. The queues of its handlers are among the app's
    queues, so a worker of the app consumes them all, or those that ``-Q`` names.
    """

    def __init__(self, app: Celery, exchange: str = "events") -> None:
        _check_name("exchange", exchange)
        self.app = app
        self.exchange = Exchange(exchange, type="topic")
        #: The handlers by queue.
        self.handlers: dict[str, Handler] = {}
        self._declarations: dict[str, EventQueue] = {}
        self._extend_queues()

    # -- handlers -----------------------------------------------------------------------------------------------

    def on(
        self,
        *patterns: str,
        queue: str,
        rank: int | None = None,
        name: str | None = None,
        bind: bool = False,
        base: Any = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Have a function handle the events whose topic matches one of *patterns*, out of *queue*.

        The function is called with an :class:`~celery_strategies.events.Event`, and with its task before it if *bind*
        is true. *rank* is the queue's unless ``strategies_ranks`` has one. *name*, *bind*, *base* and *options* are
        those of ``app.task``. The function itself is returned as it is.

        Raises:
            ImproperlyConfigured: a wrong pattern or rank, or a queue that is another's.
        """
        for pattern in patterns:
            _check_pattern(pattern)
        if not patterns:
            raise invalid("patterns", patterns, "name at least one")
        _check_name("queue", queue)
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
            raise invalid(f"rank of queue {queue!r}", rank, "must be an integer (lower goes first)")

        def register(function: F) -> F:
            task = name or self.app.gen_task_name(function.__name__, function.__module__)
            handler = Handler(task, queue, patterns, rank)
            self._add(handler)
            make_task(
                self.app, function, name=task, queue=queue, base=base, bind=bind, options=options
            )
            return function

        return register

    def _add(self, handler: Handler) -> None:
        for other in self.handlers.values():
            if other.queue == handler.queue:
                raise ImproperlyConfigured(
                    f"queue {handler.queue!r} has a handler, {other.task}: a queue belongs to one handler, "
                    f"give {handler.task} a queue of its own"
                )
            if other.task == handler.task:
                raise ImproperlyConfigured(
                    f"the handler of queue {other.queue!r} is called {other.task} too: "
                    f"give that of queue {handler.queue!r} another name="
                )
        self.handlers[handler.queue] = handler
        self._declarations[handler.queue] = handler.declaration(self.exchange)
        queues = self.app.amqp.__dict__.get("queues")
        if queues is not None:
            self._put(queues, handler)

    # -- the app's queues ---------------------------------------------------------------------------------------

    def _extend_queues(self) -> None:
        """Have the app's queues, which are made when they are first needed, hold those of the handlers.

        They are not to be made now: that would read the configuration, which may not be complete.
        """
        amqp: Any = self.app.amqp
        make = amqp.queues_cls

        def queues_cls(*args: Any, **kwargs: Any) -> Any:
            queues = make(*args, **kwargs)
            for handler in self.handlers.values():
                self._put(queues, handler)
            return queues

        amqp.queues_cls = queues_cls

    def _put(self, queues: Any, handler: Handler) -> None:
        name = handler.queue
        # A worker may have made one up for a name in -Q, before the handler was imported.
        if isinstance(queues.get(name), EventQueue) or name in self._configured():
            raise ImproperlyConfigured(
                f"queue {name!r} of the handler {handler.task} is in task_queues, or another bus has it: "
                "give the handler a queue of its own"
            )
        queue = queues.add(self._declarations[name])
        selected = queues._consume_from  # noqa: SLF001  # what -Q chose; Celery has no other word for it
        if selected is None:
            getattr(queues, "_default_consume_from", {})[name] = queue
        elif name in selected:
            selected[name] = queue

    def _configured(self) -> set[str]:
        conf = self.app.conf
        named = conf.task_queues
        if not named:
            return {conf.task_default_queue}
        return set(named) if isinstance(named, Mapping) else {queue.name for queue in named}

    # -- publishing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        payload: Any = None,
        *,
        headers: Mapping[str, Any] | None = None,
        priority: int | None = None,
        mandatory: bool = False,
        producer: Any = None,
        **options: Any,
    ) -> str:
        """Publish an event and return its id.

        Every queue that is bound to *topic* gets a copy; where none is, the event is gone, as in AMQP, unless it is
        *mandatory*. *options* are those of ``app.send_task``, such as ``countdown``, ``expires``, ``serializer``.

        Raises:
            UnroutableEvent: the event is mandatory, and no queue is bound to its topic.
            FairShareError: what ``strategies_event_fair_share`` returned is no key; what it raises comes through.
            kombu.exceptions.OperationalError: Redis cannot be reached.
        """
        known: Any = topic
        if not isinstance(known, str) or not known:
            raise ValueError(f"a topic must be a string, and not empty: {topic!r}")
        event_id = uuid()
        event = Event(topic, payload, dict(headers or {}), event_id)
        if self.app.conf.task_always_eager:
            self._handle_here(event, event_id, mandatory=mandatory)
            return event_id
        with self.app.producer_or_acquire(producer) as free:
            marked = self._marked(free, event)
            if mandatory and not self._route(free, topic):
                raise UnroutableEvent(
                    f"no queue is bound to the topic {topic!r} of exchange {self.exchange.name!r}"
                )
            self.app.send_task(
                EVENT_TASK,
                (topic, payload),
                task_id=event_id,
                producer=free,
                exchange=self.exchange.name,
                routing_key=topic,
                declare=self._undeclared(free),
                headers=marked,
                priority=self._default_priority() if priority is None else priority,
                ignore_result=True,
                **options,
            )
        return event_id

    @staticmethod
    def task_id(event_id: str, queue: str) -> str:
        """Return the id of the task that handles the event *event_id* in *queue*, for results and ``revoke``."""
        return task_id(event_id, queue)

    def declare(self, producer: Any = None) -> None:
        """Declare the exchange, and the queues of all handlers that are known here, with their bindings.

        A publish does so by itself. Once declared they stay, so a deployment may call this in place of importing the
        handlers into every producer.
        """
        with self.app.producer_or_acquire(producer) as free:
            self._route(free, "")

    def _route(self, producer: Any, topic: str) -> set[str]:
        """Return the queues that an event of *topic* will go to."""
        conf = self.app.conf
        policy = (
            dict(conf.task_publish_retry_policy) if conf.task_publish_retry else {"max_retries": 0}
        )

        def look() -> set[str]:
            channel = producer.channel
            for entity in self._undeclared(producer):
                maybe_declare(entity, channel)
            return topics.queues_for(channel, self.exchange.name, topic)

        connection = producer.connection
        if not isinstance(connection.transport, TransportMixin):
            raise NotOurTransport(connection.transport.driver_type)
        queues: set[str] = connection.ensure(producer, look, **policy)()
        return queues

    def _undeclared(self, producer: Any) -> list[Any]:
        # By hash, as Kombu keeps them.
        declared = producer.connection.declared_entities
        entities = (self.exchange, *self._declarations.values())
        return [entity for entity in entities if hash(entity) not in declared]

    def _default_priority(self) -> int:
        """Return the level of an event that names none: one for all its queues."""
        settings, _ = self._plan
        # "" stands for queues whose handlers are not known here.
        found = [settings.levels_for(queue) for queue in (*self.handlers, "")]
        levels = max((count for count in found if count is not None), default=None)
        return 0 if levels is None else settings.default_level(levels)

    @cached_property
    def _plan(self) -> tuple[Settings, Tagger | None]:
        """Hold the settings, and what says the key of an event; looked at once, when an event is published."""
        settings = settings_module.load(self.app.conf)
        return settings, settings.tagger("event_fair_share")

    def _marked(self, producer: Any, event: Event) -> dict[str, Any]:
        """Return the headers of *event*, with its key and weight."""
        settings, tagger = self._plan
        options: dict[str, Any] = {
            "headers": dict(event.headers),
            "exchange": self.exchange.name,
            "routing_key": event.topic,
        }
        if settings.fair or tagger is not None:
            marker = Marker(
                "strategies_event_fair_share",
                settings.fair_key_header,
                settings.fair_weight_header,
                None if tagger is None else lambda _: tagger(event),
                read_tag,
            )
            fields = {"id": event.id, "retries": 0}
            message: Any = (fields, {}, ((event.topic, event.payload), {}, {}))
            marker.mark(self.app, producer, EVENT_TASK, message, options)
        headers: dict[str, Any] = options["headers"]
        if settings.fair:
            # strategies_fair_share speaks of tasks, so it is not asked: a key that is None is none on purpose.
            headers.setdefault(settings.fair_key_header, None)
        return headers

    def _handle_here(self, event: Event, event_id: str, *, mandatory: bool) -> None:
        """Run the handlers at once, as ``task_always_eager`` wants it."""
        handlers = [handler for handler in self.handlers.values() if handler.handles(event.topic)]
        if mandatory and not handlers:
            raise UnroutableEvent(f"no handler is bound to the topic {event.topic!r}")
        for handler in handlers:
            self.app.tasks[handler.task].apply(
                (event.topic, event.payload),
                task_id=task_id(event_id, handler.queue),
                headers={**event.headers, ID_HEADER: event_id},
            )


def _check_name(what: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise invalid(what, value, "must be a string, and not empty")


def _check_pattern(pattern: Any) -> None:
    _check_name("pattern", pattern)
    for word in pattern.split("."):
        if word not in ("*", "#") and ("*" in word or "#" in word):
            raise invalid("pattern", pattern, "* and # stand for whole words between dots")
