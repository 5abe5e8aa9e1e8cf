"""A Kombu program without Celery that reads its queues by a strategy.

Owns :class:`StrategyConsumerMixin`: where a program's connection meets a reader, how many messages it may hold, and
what becomes of them when it ends.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kombu.mixins import ConsumerMixin

from celery_strategies import settings as settings_module
from celery_strategies.core.strategies import Strategy
from celery_strategies.errors import ImproperlyConfigured, NotOurTransport, invalid
from celery_strategies.settings import Settings
from celery_strategies.transport.reader import Reader
from celery_strategies.transport.redis import (
    LEVELS_OPTION,
    READ_TIMEOUT,
    READER_OPTION,
    TransportMixin,
)

logger = logging.getLogger("celery_strategies")


class _StoppedError(Exception):
    """Leave the wait for a broker, since the program is to end."""


class StrategyConsumerMixin(ConsumerMixin):
    """Kombu's :class:`~kombu.mixins.ConsumerMixin`, reading by a strategy.

    Everything is as there: set ``connection``, define ``get_consumers``, call ``run``, set ``should_stop``. The queues
    of the consumers are the sources, in the order in which they are consumed.

    The attributes below are looked at when ``run`` begins. They follow the rules of the settings of the same names;
    a wrong one raises ImproperlyConfigured.
    """

    #: Which queue the next message comes from: a :class:`Strategy` or its name.
    strategy: str | Strategy = Strategy.PRIORITY
    #: Rank of each queue, lower first; a queue without one goes last.
    ranks: Mapping[str, int] = {}
    #: Levels of all queues, or of each; see also ``Queue(max_priority=...)``.
    priority_levels: int | Mapping[str, int] | None = None
    #: How many messages the program holds at most without having settled them.
    prefetch: int = 10
    #: Seconds between looks where Redis does not tell when something comes.
    polling_interval: float = 0.1
    #: What this program is called in Redis; by default the class and the machine.
    name: str | None = None

    _reader: Reader | None = None

    def is_source(self, queue: str) -> bool:  # noqa: ARG002  # for subclasses
        """Whether the reader reads *queue*; what it does not read is read by Kombu, in its way."""
        return True

    def stop(self) -> None:
        """Have ``run`` end, soon. Any thread, or a signal handler."""
        self.should_stop = True
        reader = self._reader
        if reader is not None:
            reader.waker.wake()

    # -- the life of a connection -------------------------------------------------------------------------------

    def run(self, _tokens: int = 1, **kwargs: Any) -> None:
        """Consume until ``should_stop``, over as many connections as it takes, then give back what is not settled."""
        try:
            with suppress(_StoppedError):
                super().run(_tokens, **kwargs)
        finally:
            self._finish()

    def create_connection(self) -> Any:
        """Return the connection to consume over, which does not share its options with the one it was made from."""
        connection = super().create_connection()
        options = {"socket_timeout": READ_TIMEOUT, **(connection.transport_options or {})}
        options[READER_OPTION] = True
        levels = self._settings().priority_levels
        if levels is not None:
            options[LEVELS_OPTION] = dict(levels) if isinstance(levels, Mapping) else levels
        connection.transport_options = options
        return connection

    @contextmanager
    def establish_connection(self) -> Iterator[Any]:
        """Connect, and begin the reader's session; what is held stays held until the next one."""
        with self.create_connection() as connection:
            connection.ensure_connection(
                self.on_connection_error, self.connect_max_retries, callback=self._still_wanted
            )
            reader = self._attach(connection)
            try:
                yield connection
            except (*connection.connection_errors, *connection.channel_errors):
                reader.detach()
                raise
            except BaseException:
                self._finish()
                raise
            else:
                self._finish()

    def _still_wanted(self) -> None:
        if self.should_stop:
            raise _StoppedError

    def _attach(self, connection: Any) -> Reader:
        transport = connection.transport
        if not isinstance(transport, TransportMixin):
            raise NotOurTransport(transport.driver_type)
        reader = self._reader
        if reader is None:
            reader = self._reader = self._make_reader()
        reader.attach(connection.default_channel)
        # What is settled in this thread goes out in the turn of the loop that follows.
        reader.loop_thread = threading.get_ident()
        transport.cycle.reader = reader
        return reader

    def _make_reader(self) -> Reader:
        settings = self._settings()
        return Reader(
            self.name or f"{type(self).__name__}@{socket.gethostname()}",
            strategy=settings.strategy,
            capacity=self._capacity,
            accepts=self.is_source,
            ranks=settings.ranks,
            polling_interval=settings.polling_interval,
            # Its callbacks run in the loop, however long they take.
            delivery_blocks=True,
        )

    def _settings(self) -> Settings:
        prefetch: Any = self.prefetch
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
            raise invalid(
                f"{type(self).__name__}.prefetch", prefetch, "must be an integer, 1 or more"
            )
        try:
            return settings_module.load(
                {
                    "strategies_strategy": self.strategy,
                    "strategies_ranks": self.ranks,
                    "strategies_priority_levels": self.priority_levels,
                    "strategies_polling_interval": self.polling_interval,
                }
            )
        except ImproperlyConfigured as exc:
            raise ImproperlyConfigured(f"{type(self).__name__}: {exc}") from None

    def _capacity(self) -> int:
        reader = self._reader
        return 0 if reader is None or self.should_stop else self.prefetch - len(reader.held)

    def _finish(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.shutdown()

    # -- messages -----------------------------------------------------------------------------------------------

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Set aside a message whose body cannot be decoded, where an operator can look at it."""
        reader = self._reader
        held = reader.held.get(message.delivery_tag) if reader is not None else None
        if reader is None or held is None:
            super().on_decode_error(message, exc)
            return
        logger.error("Set aside a message of queue %r that cannot be decoded: %r", held.queue, exc)
        reader.settler.set_aside(message.delivery_tag, f"body cannot be decoded: {exc!r}")
