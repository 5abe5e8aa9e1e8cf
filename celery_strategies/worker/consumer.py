"""Celery's consumer with our reader in the place of prefetching.

Owns the joints between Celery's consumer and the reader: where a connection is made, registered, lost and
closed, and where a message is found to be unfit.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from celery.concurrency.prefork import TaskPool as Prefork
from celery.exceptions import CPendingDeprecationWarning, WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.worker import state
from celery.worker.consumer import Consumer
from redis.exceptions import ResponseError

from celery_strategies import settings as settings_module
from celery_strategies.errors import ImproperlyConfigured, NotOurTransport
from celery_strategies.publish.levels import carry_levels
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.reader import Reader
from celery_strategies.transport.redis import READ_TIMEOUT, READER_OPTION, TransportMixin
from celery_strategies.version import __version__
from celery_strategies.worker import (
    banner,
    control,  # noqa: F401  # importing it is what replaces Celery's commands
    pools,
    slots,
)
from celery_strategies.worker.later import Later
from celery_strategies.worker.messages import MessageConsumer, nothing
from celery_strategies.worker.ranks import ranks_of

logger = logging.getLogger("celery_strategies")


class StrategyConsumer(MessageConsumer):
    """Consumer whose task messages come from a reader, one for each free slot."""

    class Blueprint(Consumer.Blueprint):
        """Celery's steps and the reader's."""

        default_steps = (
            *Consumer.Blueprint.default_steps,
            "celery_strategies.worker.steps:ReaderStep",
        )

    def __init__(
        self,
        on_task_request: Any,
        *args: Any,
        strategy: str | None = None,
        rank: tuple[str, ...] = (),
        consumer_priority: int | None = None,
        app: Any = None,
        controller: Any = None,
        hostname: str | None = None,
        pool: Any = None,
        worker_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        error = getattr(controller, "strategies_error", None)
        if error is not None:
            raise error
        options = worker_options or {}
        self.strategies_settings = settings_module.load(
            app.conf,
            strategy=strategy or options.get("strategy"),
            ranks=rank or options.get("rank") or (),
            consumer_priority=(
                options.get("consumer_priority") if consumer_priority is None else consumer_priority
            ),
        )
        self.strategies_settings.check_taggers()
        transport = app.connection_for_read().transport
        if transport.driver_type != "redis":
            raise NotOurTransport(transport.driver_type)
        banner.extend(controller, app, self.strategies_settings)
        self._lost_connection = False
        self._announced: str | None = None
        self._transport_ticks: set[Any] = set()
        self._refusals = Patience()
        if app.conf.worker_disable_prefetch:
            # It replaces the channel's can_consume, which gates much more than prefetching.
            app.conf.worker_disable_prefetch = False
        self.reader = Reader(
            hostname or "celery",
            strategy=self.strategies_settings.strategy,
            capacity=self._capacity,
            accepts=lambda queue: queue in self.app.amqp.queues.consume_from,
            ranks=ranks_of(app, self.strategies_settings),
            polling_interval=self.strategies_settings.polling_interval,
            policy=self.strategies_settings.policy(),
            caps=self.strategies_settings.max_in_flight,
            single_active=self.strategies_settings.single_active_consumer,
            consumer_priority=self.strategies_settings.consumer_priority,
            max_deliveries=self.strategies_settings.max_deliveries,
            stale_after=self.strategies_settings.stale_after,
            # Celery's own truth: a request is reserved until it is ready.
            runs=lambda request: (
                request in state.reserved_requests or pools.works_on(self.pool, request)
            ),
        )
        self.reader.presence.more = self._introduction
        self.later = Later(self.reader, app)
        pools.watch_slots(
            pool,
            self.reader.wake,
            self.reader.flush,
            in_loop=kwargs.get("hub") is not None and isinstance(pool, Prefork),
            blocks=lambda blocked: setattr(self.reader.presence, "blocked", blocked),
        )
        if on_task_request == getattr(controller, "_process_task", None):
            on_task_request = pools.guard_starts(controller, self._on_unfit, self._starting)
        elif controller is not None:
            pools.guard_starts(controller, self._on_unfit, self._starting)
        super().__init__(
            on_task_request,
            *args,
            app=app,
            controller=controller,
            hostname=hostname,
            pool=pool,
            worker_options=worker_options,
            **kwargs,
        )
        run: Any = self.loop  # type: ignore[has-type]

        def loop(*args: Any) -> Any:
            with self._misconfiguration_ends_the_worker():
                return run(*args)

        self.loop = loop
        # MISCONF, OOM, READONLY or missing permissions end some time; Celery would end the worker.
        self.connection_errors = (*self.connection_errors, ResponseError)  # type: ignore[has-type]

    #: The buckets of the tasks that have a rate limit now.
    rate_limits: list[Any] = []  # noqa: RUF012  # replaced, never changed

    # -- slots ------------------------------------------------------------------------------------------------

    def _introduction(self) -> dict[str, Any]:
        # The pool may not be there yet.
        number = slots.total(self) if self.pool is not None else 0
        return {"slots": number, "version": __version__}

    def _capacity(self) -> int:
        if slots.leaving():
            return 0
        # What waits for a permit of a limit is not reserved yet.
        return slots.free(self, self.strategies_settings.read_ahead) - self.reader.permits.pending

    def _starting(self, request: Any) -> bool:
        """Note that *request* is about to start; False if it must not, which gives its message back."""
        tag = request._message.delivery_tag
        if not self.reader.may_start(tag):
            logger.warning(
                "Task %s[%s] waited too long for its start, its lease may be somebody else's: it goes back",
                request.name,
                request.id,
            )
            self.reader.settler.give_back([tag])
            return False
        self.later.starting(request)
        self.reader.settler.run_by(tag, request)
        return True

    def _limit_task(self, request: Any, bucket: Any, tokens: int) -> Any:
        if self.later.wait_for_limit(request, bucket, tokens):
            return None
        return super()._limit_task(request, bucket, tokens)

    def reset_rate_limits(self) -> None:
        """Apply the tasks' rate limits anew, also to the requests that wait for the old ones.

        Celery drops the old buckets: what waits in them would wait out the old limit.
        """
        waiting = []
        for bucket in self.task_buckets.values():
            if bucket:
                waiting += bucket.contents
                bucket.clear_pending()
        super().reset_rate_limits()
        self.later.limits_changed()
        self.rate_limits = [bucket for bucket in self.task_buckets.values() if bucket]
        for request, tokens in waiting:
            bucket = self.task_buckets[request.task.name]
            if bucket:
                self._limit_task(request, bucket, tokens)
            else:
                self._limit_move_to_pool(request)

    # -- connection -------------------------------------------------------------------------------------------

    def connection_for_read(self, heartbeat: Any = None) -> Any:
        """Return a connection whose channels know the levels."""
        connection = self.app.connection_for_read(heartbeat=heartbeat)
        carry_levels(connection, self.strategies_settings)
        # Kombu's own calls block the loop: without a limit, a peer that vanished would do so for ever.
        connection.transport_options.setdefault("socket_timeout", READ_TIMEOUT)
        connection.transport_options[READER_OPTION] = True
        return self.ensure_connected(connection)

    def connect(self) -> Any:
        """Connect, and begin the reader's session."""
        connection = self._connect_transport()
        try:
            if not isinstance(connection.transport, TransportMixin):
                raise ImproperlyConfigured(
                    "celery_strategies was imported after the broker connection was made: "
                    "put it into imports (CELERY_IMPORTS) or import it where the app is made"
                )
            self._attach(connection)
            if self.hub is None:
                connection.transport.cycle.reader = self.reader
        except BaseException:
            self.reader.detach()
            connection.close()
            raise
        return connection

    def _attach(self, connection: Any) -> None:
        with self._misconfiguration_ends_the_worker():
            self.reader.attach(connection.default_channel)

    @contextmanager
    def _misconfiguration_ends_the_worker(self) -> Iterator[None]:
        try:
            yield
        except ImproperlyConfigured as exc:
            # Trying again would not help; an exception here would end the worker with a traceback.
            logger.critical("%s", exc)
            raise WorkerShutdown(EX_FAILURE) from exc

    def _connect_transport(self) -> Any:
        """Connect; Kombu leaves a callback in the loop for each connection, so the last one's goes first."""
        if self.hub is None:
            return super().connect()
        self.hub.on_tick -= self._transport_ticks
        before = set(self.hub.on_tick)
        try:
            return super().connect()
        finally:
            self._transport_ticks = self.hub.on_tick - before

    def register_with_event_loop(self, hub: Any) -> None:
        """Have *hub* poll the reader."""
        super().register_with_event_loop(hub)
        reader = self.reader
        registered: set[int] = set()

        def readable() -> None:
            reader.on_readable()

        def woken() -> None:
            reader.waker.drain()

        def tick() -> None:
            reader.on_tick()
            fd = reader.fileno()
            if fd is not None and fd not in registered:
                registered.clear()
                registered.add(fd)
                hub.add_reader(fd, readable)

        reader.loop_thread = threading.get_ident()
        reader.call_later = lambda delay: hub.call_later(delay, nothing)
        self._forget_tick(hub)
        self._tick = tick
        hub.on_tick.add(tick)
        hub.add_reader(reader.waker.fileno(), woken)
        hub.call_repeatedly(reader.pulse, nothing)

    def _forget_tick(self, hub: Any) -> None:
        tick = getattr(self, "_tick", None)
        if tick is not None:
            hub.on_tick.discard(tick)

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Note that the broker went away, as against a shutdown."""
        self._lost_connection = True
        super().on_connection_error_before_connected(exc)
        self._pause_if_refused(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Note that the broker went away, as against a shutdown."""
        self._lost_connection = True
        self.reader.detach()
        with warnings.catch_warnings():
            # Celery warns that late acks are lost with the connection: not here.
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)
        self._pause_if_refused(exc)

    def _pause_if_refused(self, exc: BaseException) -> None:
        """Wait before the next attempt if the server is there but refuses; longer each time."""
        if not isinstance(exc, ResponseError):
            return
        self._refusals.refused("a connection", exc)
        while (pause := self._refusals.remaining(monotonic(), "a connection")) > 0:
            state.maybe_shutdown()
            sleep(min(pause, 0.1))

    def on_close(self) -> None:
        """Keep what is held over a reconnect; at shutdown, drop what no child process has seen.

        Celery clears its semaphore, its reserved requests and the pool's buffer here, because their tags died with
        the channel. Ours live on, so a job that waits still runs and one that ran is still acknowledged.
        """
        if self.hub is not None:
            self._forget_tick(self.hub)
        lost, self._lost_connection = self._lost_connection, False
        # A shutdown during the pause after a lost connection comes by here once, as a shutdown.
        if lost and not slots.leaving():
            pools.finish_writes(self.pool)
        else:
            semaphore = getattr(self.controller, "semaphore", None)
            if semaphore is not None:
                semaphore.clear()
            pools.drop_unwritten(self.pool)

    def add_task_queue(self, queue: str, *args: Any, **options: Any) -> None:
        """Consume from one more queue, also one that was cancelled before.

        Celery 5.6 consumes that again without selecting it: it would not be ours to read, and
        forgotten with the connection.
        """
        queues = self.app.amqp.queues
        if queue in queues:
            queues.select_add(queues[queue])
        super().add_task_queue(queue, *args, **options)
        self.announce()

    def cancel_active_requests(self) -> None:
        """Cancel what runs at a cold shutdown, where the pool can: threads and solo have to let it end."""
        try:
            super().cancel_active_requests()
        except NotImplementedError as exc:
            # Out of a signal handler it would end the loop, or the very job that it interrupted.
            logger.warning("Running jobs cannot be cancelled, waiting for their end: %s", exc)

    # -- looking ------------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """Tell the log what is read and how: the sources are known once the loop consumes."""
        self.announce()
        self._refusals.accepted("a connection")
        super().on_ready()

    def announce(self) -> None:
        """Log strategy and sources, when they changed."""
        text = self.reader.describe()
        if text != self._announced:
            self._announced = text
            logger.info("Reading by %s", text.replace("\n", "; ", 1).replace("\n", "; "))

    def cancel_task_queue(self, queue: Any) -> None:
        """Stop consuming a queue; its place in the list is remembered."""
        super().cancel_task_queue(queue)
        self.announce()

    def strategies_info(self) -> dict[str, Any]:
        """Return what ``inspect stats`` shows of the reader."""
        return {
            "strategy": self.reader.strategy.label,
            "sources": [
                {"queue": source.queue, "rank": source.rank, "levels": source.levels}
                for source in self.reader.sources.ordered()
            ],
            "slots": slots.total(self),
            "reserved": len(state.reserved_requests),
            "held": len(self.reader.held),
            "tracking": self.reader.tracking,
        }
