"""Kombu's Redis transport with a reader behind the channels that have one.

Owns what differs from :mod:`kombu.transport.redis`: a channel whose *sources* are read by a
:class:`~celery_strategies.transport.reader.Reader`, priority levels, and counts that include what only our
workers can see. A channel without sources is Kombu's: reply queues, fanout, ``basic_get`` and producers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from time import monotonic
from typing import Any, cast

import redis
from kombu.transport import redis as kombu_redis
from kombu.utils.encoding import bytes_to_str
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from celery_strategies.core.levels import LISTS, list_for
from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.settings import Settings
from celery_strategies.store import admin
from celery_strategies.store.keys import Keys
from celery_strategies.transport import topics
from celery_strategies.transport.reader import Reader

try:
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError:  # redis-py before 7
    MaintNotificationsConfig = None  # type: ignore[assignment]

logger = logging.getLogger("celery_strategies")

#: Transport option that carries ``strategies_priority_levels`` to channels.
LEVELS_OPTION = "strategies_levels"
#: Transport option of a strategies worker's connection: recovery is the reader's.
READER_OPTION = "strategies_reader"
#: Seconds that the reader waits for the rest of a reply where the user set no ``socket_timeout``.
READ_TIMEOUT = 15.0
#: Seconds between two looks at whether the bindings of consumed queues are still there.
BINDINGS_EVERY = 10.0
#: What makes a pattern of a topic.
_GLOB = re.compile(r"[*?\[\]\\]")


def _by_name(names: Any, patterns: Any, topics: Any = (), *more: Any) -> None:
    """Call *names* with the topics that are plain names and *patterns* with the others."""
    topics = [*([topics] if isinstance(topics, str) else topics), *more]
    for call, chosen in (
        (names, [topic for topic in topics if not _GLOB.search(topic)]),
        (patterns, [topic for topic in topics if _GLOB.search(topic)]),
    ):
        if chosen:
            call(*chosen)


class StrategyQoS(kombu_redis.QoS):
    """Kombu's bookkeeping, except for the delivery tags that a reader's take minted."""

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge: ours go to the reader, which batches them."""
        reader = self.channel.reader
        if reader is not None and reader.settler.owns(delivery_tag):
            reader.settler.settle(delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject: a requeued message of ours goes to the tail of its level."""
        reader = self.channel.reader
        if reader is None or not reader.settler.owns(delivery_tag):
            super().reject(delivery_tag, requeue=requeue)
        elif requeue:
            reader.settler.requeue(delivery_tag)
        else:
            reader.settler.settle(delivery_tag)

    def restore_visible(self, *args: Any, **kwargs: Any) -> Any:
        """Leave recovery to the reader where there is one: it keeps a message's place."""
        if self.channel.connection.client.transport_options.get(READER_OPTION):
            return None
        return super().restore_visible(*args, **kwargs)


class ChannelMixin:
    """What our channels add to Kombu's, plain or Sentinel."""

    QoS = StrategyQoS
    exchange_types = {**kombu_redis.Channel.exchange_types, **topics.EXCHANGE_TYPES}  # noqa: RUF012  # Kombu's own way
    reader: Reader | None = None
    _for_reader = False
    _publishing = False

    # -- the reader's side ------------------------------------------------------------------------------------

    def strategy_keys(self: Any) -> Keys:
        """Return the key names of this channel's broker."""
        return Keys(
            prefix=self.global_keyprefix,
            sep=self.sep,
            unacked_name=self.unacked_key,
            unacked_index_name=self.unacked_index_key,
        )

    def reader_pool(self: Any) -> redis.ConnectionPool:
        """Return a connection pool for a reader: RESP3, and nothing is ever sent twice by itself."""
        manager = getattr(self, "_sentinel_manager", None)
        self._for_reader = True
        try:
            return self._get_pool()
        finally:
            self._for_reader = False
            mine = getattr(self, "_sentinel_manager", None)
            if mine is not manager:
                self._reader_sentinel, self._sentinel_manager = mine, manager

    def _connparams(self: Any, asynchronous: bool = False) -> dict[str, Any]:
        params: dict[str, Any] = super()._connparams(asynchronous)
        if self._for_reader:
            params.update(
                protocol=3,
                retry=Retry(NoBackoff(), 0),
                retry_on_timeout=False,
                health_check_interval=0,
                socket_timeout=params.get("socket_timeout") or READ_TIMEOUT,
            )
            if MaintNotificationsConfig is not None:
                # They would move the connection under the reader, outside of any session.
                params["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
            # A pool of its own, so that publishing never waits for it.
            params["max_connections"] = 4
        return params

    def attach_reader(self: Any, reader: Reader) -> None:
        """Have the task queues consumed on this channel read by *reader*."""
        self.reader = reader
        # ``ack_emulation = False`` made Kombu pick a class that would never settle our tags.
        self.QoS = StrategyQoS
        self._qos = None

    def restore_foreign(self: Any, tags: Iterable[str], limit: float) -> int:
        """Restore unacked messages of stock workers by Kombu's own rules; returns how many.

        A tag that was refreshed or delivered again after *limit* (seconds) is left alone: Kombu uses it again.
        """
        count = 0
        with self.conn_or_acquire() as client:
            try:
                with kombu_redis.Mutex(client, self.unacked_mutex_key, self.unacked_mutex_expire):
                    for tag in tags:
                        count += self._restore_one(client, tag, limit)
            except kombu_redis.MutexHeld:
                pass
        return count

    # -- fanout -------------------------------------------------------------------------------------------------

    @cached_property
    def subclient(self: Any) -> Any:
        """Kombu's pub/sub client, which subscribes by name where a topic is no pattern.

        Redis allows a user with ``&prefix*`` to subscribe to every name behind the prefix, but to no pattern except
        that very one; Kombu makes a pattern of every topic.
        """
        client = super().subclient
        client.psubscribe = partial(_by_name, client.subscribe, client.psubscribe)
        client.punsubscribe = partial(_by_name, client.unsubscribe, client.punsubscribe)
        return client

    def _restore_one(self: Any, client: Any, tag: str, limit: float) -> int:
        index = self.strategy_keys().unacked_index
        score = redis.Redis(connection_pool=self.pool).zscore(index, tag)
        if score is None or score > limit:
            return 0
        try:
            self.qos.restore_by_tag(tag, client)
        except (ValueError, TypeError) as exc:
            # No record of Kombu's. It stays in `unacked`, but out of the index: there it would stop every
            # worker's recovery, stock ones' too, at this very record.
            logger.error("The unacked record %s cannot be restored: %r", tag, exc)  # noqa: TRY400
            client.zrem(self.unacked_index_key, tag)
            return 0
        return 1

    # -- consuming ----------------------------------------------------------------------------------------------

    def basic_consume(
        self: Any, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        """Consume *queue*: by the reader if it is one of its task queues, else by Kombu."""
        reader = self.reader
        if reader is None or queue in self._fanout_queues or not reader.accepts(queue):
            return super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        self._tag_to_queue[consumer_tag] = queue
        self._consumers.add(consumer_tag)
        if queue in self.connection.single_active:
            reader.leads.exclusive.add(queue)
        reader.bind(self, queue, callback, no_ack=no_ack, levels=self._levels_of(queue))
        return None

    def _basic_cancel(self: Any, consumer_tag: str) -> Any:
        queue = self._tag_to_queue.get(consumer_tag)
        reader = self.reader
        if (
            reader is None
            or queue is None
            or queue in self._active_queues
            or not reader.bound(queue)
        ):
            return super()._basic_cancel(consumer_tag)
        self._consumers.discard(consumer_tag)
        self._tag_to_queue.pop(consumer_tag, None)
        reader.unbind(self, queue)
        return None

    # -- levels -------------------------------------------------------------------------------------------------

    def _levels_of(self: Any, queue: str) -> int | None:
        levels = self.connection.client.transport_options.get(LEVELS_OPTION)
        maximum = self.connection.max_priorities.get(queue)
        if levels is None and maximum is None:
            return None
        return Settings(priority_levels=levels).levels_for(queue, maximum)

    def _new_queue(self: Any, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:
        arguments = kwargs.get("arguments") or {}
        if arguments.get("x-single-active-consumer"):
            self.connection.single_active.add(queue)
        maximum = arguments.get("x-max-priority")
        if maximum is not None:
            self.connection.max_priorities[queue] = maximum
        super()._new_queue(queue, auto_delete, **kwargs)

    def _q_for_pri(self: Any, queue: str, pri: int) -> str:
        levels = self._levels_of(queue) if self._publishing else None
        if levels is None:
            return str(super()._q_for_pri(queue, pri))
        return Keys(sep=self.sep).inbox(queue, list_for(pri, levels, 0))

    def _put(self: Any, queue: str, message: Any, **kwargs: Any) -> None:
        with self._set("_publishing", True):
            super()._put(queue, message, **kwargs)

    def _do_restore_message(self: Any, *args: Any, **kwargs: Any) -> None:
        with self._set("_publishing", True):
            super()._do_restore_message(*args, **kwargs)

    def _brpop_start(self: Any, timeout: float | None = None) -> None:
        with self._reading(self.active_queues):
            super()._brpop_start(timeout)

    def _get(self: Any, queue: str) -> Any:
        with self._reading([queue]):
            return super()._get(queue)

    def _reading(self: Any, queues: Iterable[str]) -> AbstractContextManager[None]:
        """Have Kombu look into all ten lists, if one of *queues* has levels that its steps do not know."""
        if any(self._levels_of(queue) is not None for queue in queues):
            return cast("AbstractContextManager[None]", self._set("priority_steps", range(LISTS)))
        return nullcontext()

    @contextmanager
    def _set(self: Any, name: str, value: Any) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    # -- counting: everything that waits, wherever it is --------------------------------------------------------

    def _raw_call(self: Any, *commands: tuple[Any, ...], atomic: bool = False) -> list[Any]:
        """Run commands on keys that carry the prefix already."""
        with redis.Redis(connection_pool=self.pool).pipeline(transaction=atomic) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(pipe.execute())

    def _size(self: Any, queue: str) -> int:
        sorted_jobs = ("HGET", self.strategy_keys().state(queue), "t")
        return sum(int(size or 0) for size in self._raw_call(*self._lengths_of(queue), sorted_jobs))

    def _lengths_of(self: Any, queue: str) -> list[tuple[str, str]]:
        keys = self.strategy_keys()
        return [
            *(("LLEN", inbox) for inbox in keys.inboxes(queue)),
            ("ZCARD", keys.returned(queue)),
            ("ZCARD", keys.delayed(queue)),
            ("ZCARD", keys.in_line(queue)),
            ("LLEN", keys.unsorted(queue)),
        ]

    def _purge(self: Any, queue: str) -> int:
        lengths = self._lengths_of(queue)
        # UNLINK: freeing a million messages must not stop the server.
        *sizes, _ = self._raw_call(*lengths, ("UNLINK", *(key for _, key in lengths)), atomic=True)
        with redis.Redis(connection_pool=self.pool) as client:
            return sum(sizes) + admin.purge_sorted(client, self.strategy_keys(), queue)

    def _has_queue(self: Any, queue: str, **_: Any) -> bool:
        keys = self.strategy_keys()
        names = [key for _, key in self._lengths_of(queue)]
        return bool(self._raw_call(("EXISTS", *names, keys.policy(queue)))[0])

    def _delete(
        self: Any,
        queue: str,
        exchange: str,
        routing_key: str,
        pattern: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super()._delete(queue, exchange, routing_key, pattern, *args, **kwargs)
        self._purge(queue)

    # -- bindings -----------------------------------------------------------------------------------------------

    def _binding_tables(self: Any, exchange: str) -> list[str]:
        """Return the keys that hold the bindings of *exchange*, that for lookups first."""
        names = [self.keyprefix_queue, getattr(self, "keyprefix_binding_permanent", None)]
        return [f"{self.global_keyprefix}{name % (exchange,)}" for name in names if name]

    def get_table(self: Any, exchange: str) -> list[topics.Row]:
        """Return the bindings of *exchange*; those declared here are made anew if somebody deleted them all."""
        found = self._raw_call(("SMEMBERS", self._binding_tables(exchange)[0]))[0]
        rows = [topics.split_row(bytes_to_str(member), self.sep) for member in found]
        return [row for row in rows if row is not None] or self._bind_again(exchange)

    def _bind_again(self: Any, exchange: str) -> list[topics.Row]:
        """Write the bindings of *exchange* that were declared over this connection."""
        here = [binding for binding in tuple(self.state.bindings) if binding.exchange == exchange]
        rows = []
        for queue, _, routing_key in here:
            row = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, None)
            self._queue_bind(exchange, *row)
            rows.append(row)
        return rows

    def keep_bindings(self: Any) -> None:
        """Bind the queues that are consumed here again, if somebody deleted the bindings of an exchange."""
        consumed = set(self._tag_to_queue.values())
        exchanges = {
            exchange
            for queue, exchange, routing_key in tuple(self.state.bindings)
            # Nobody publishes to a plain Celery queue by way of its exchange.
            if queue in consumed
            and not queue == exchange == routing_key
            and self.typeof(exchange).type != "fanout"
        }
        tables = {self._binding_tables(exchange)[0]: exchange for exchange in exchanges}
        if tables and self._raw_call(("EXISTS", *tables))[0] < len(tables):
            there = self._raw_call(*(("EXISTS", table) for table in tables))
            for exchange, exists in zip(tables.values(), there, strict=True):
                if not exists:
                    self._bind_again(exchange)

    def queue_bind(
        self: Any,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write a binding, also one that this process has written before: it may have been deleted since."""
        known = self.state.has_binding(queue, exchange or "amq.direct", routing_key)
        super().queue_bind(queue, exchange, routing_key, arguments, **kwargs)
        if known:
            exchange = exchange or "amq.direct"
            row = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
            self._queue_bind(exchange, *row)

    def _queue_bind(self: Any, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        super()._queue_bind(exchange, routing_key, pattern, queue)
        if pattern:
            # What a stock process may have written before us; stock producers would go by both.
            others = {
                self.sep.join([routing_key, other, queue]) for other in topics.kombus(routing_key)
            }
            tables = self._binding_tables(exchange)
            # Without the right to, a stock producer matches by them: nothing to fail a publish for.
            with suppress(NoPermissionError):
                self._raw_call(*(("SREM", table, *others) for table in tables))

    def queue_unbind(
        self: Any,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        """Remove a binding from Redis too: Kombu forgets it in this process only, and its pattern delivers on."""
        super().queue_unbind(queue, exchange, routing_key, arguments, **kwargs)
        tables = self._binding_tables(exchange or "amq.direct")
        # Whatever the pattern between the two: this process need not know the exchange's type.
        start, end = f"{routing_key}{self.sep}".encode(), f"{self.sep}{queue}".encode()
        found = self._raw_call(("SMEMBERS", tables[0]))[0]
        members = [member for member in found if member.startswith(start) and member.endswith(end)]
        if members:
            self._raw_call(*(("SREM", table, *members) for table in tables))

    def close(self: Any) -> None:
        """Close the channel; what a reader holds outlives it."""
        super().close()
        manager = self.__dict__.pop("_reader_sentinel", None)
        if manager is not None and hasattr(manager, "close"):
            manager.close()


class Poller(kombu_redis.MultiChannelPoller):
    """Kombu's poller, with a reader's descriptors where no hub polls them (green pools, programs)."""

    reader: Reader | None = None
    #: The hub that polls for us, if one does.
    hub: Any = None
    _bindings_due = 0.0

    @property
    def fds(self) -> dict[int, Any]:
        """Descriptors to poll; with a hub, those it does not poll yet, since Kombu adds all of these at every turn."""
        fds: dict[int, Any] = super().fds
        if self.hub is None or not fds:
            return fds
        readers = self.hub.readers
        return {fd: channel for fd, channel in fds.items() if fd not in readers}

    def on_poll_start(self) -> None:
        """Let Kombu's channels and the reader send what they have to send."""
        if self.hub is None or self._has_work():
            super().on_poll_start()
        if self.reader is not None:
            self.reader.on_tick()
            for fd in self._reader_fds():
                self.poller.register(fd, self.eventflags)

    def _has_work(self) -> bool:
        """Whether Kombu has anything to do before a poll: cheap, since it is asked at every turn of a busy loop."""
        for channel in self._channels:
            fanout = channel.active_fanout_queues
            if len(channel._active_queues) > len(fanout) or (fanout and not channel._in_listen):
                return True
        return bool(getattr(self, "_paused_brpop", None))

    def _reader_fds(self) -> list[int]:
        reader = self.reader
        if reader is None:
            return []
        fd = reader.fileno()
        return [reader.waker.fileno()] + ([fd] if fd is not None else [])

    def handle_event(self, fileno: int, event: int) -> Any:
        """Handle a readable or broken descriptor."""
        reader = self.reader
        if reader is not None and fileno in self._reader_fds():
            if fileno == reader.waker.fileno():
                # Nothing need have come over the connection: reading it would wait.
                reader.waker.drain()
                reader.on_tick()
            else:
                before = reader.delivered
                reader.on_readable()
                if reader.delivered == before:
                    # Bookkeeping: who waits for a message waits on, and not for a whole timeout anew.
                    return None
            return True, self
        return super().handle_event(fileno, event)

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        """Poll once, waking in time for the reader."""
        if self.reader is not None:
            pause = self.reader.timeout()
            timeout = pause if timeout is None else min(timeout, pause)
            # Kombu before 5.7 registers its channels in there without asking.
            self.on_poll_start()
        return super().get(callback, timeout=timeout)

    def maybe_restore_messages(self) -> None:
        """Look for what was lost: messages, as Kombu does, and bindings."""
        super().maybe_restore_messages()
        if monotonic() < self._bindings_due:
            return
        self._bindings_due = monotonic() + BINDINGS_EVERY
        for channel in self._channels:
            try:
                channel.keep_bindings()
            except (*channel.connection_errors, channel.ResponseError):  # noqa: PERF203  # each 10 s
                logger.debug("Could not look after the bindings", exc_info=True)
                return


class TransportMixin:
    """What our transports add to Kombu's."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = Poller()
        #: ``x-max-priority`` of the queues declared over this connection.
        self.max_priorities: dict[str, int] = {}
        #: Queues declared over this connection with ``x-single-active-consumer``.
        self.single_active: set[str] = set()

    def register_with_event_loop(self: Any, connection: Any, loop: Any) -> None:
        """Have *loop*, a hub, poll Kombu's channels."""
        self.cycle.hub = loop
        super().register_with_event_loop(connection, loop)


class Channel(ChannelMixin, kombu_redis.Channel):
    """Channel of a plain Redis broker."""


class SentinelChannel(ChannelMixin, kombu_redis.SentinelChannel):
    """Channel of a Redis broker behind Sentinel."""


class Transport(TransportMixin, kombu_redis.Transport):
    """``redis://``, ``rediss://`` and unix sockets."""

    Channel = Channel


class SentinelTransport(TransportMixin, kombu_redis.SentinelTransport):
    """``sentinel://``."""

    Channel = SentinelChannel


class ClusterTransport:
    """Stand-in for Redis Cluster URLs, which Kombu cannot serve: refuses with one line."""

    #: Whether Kombu leaves the URL alone; it asks before it makes the transport.
    can_parse_url = True

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImproperlyConfigured(
            "Redis Cluster is not supported as a broker: use redis://, rediss://, redis+socket:// or sentinel://"
        )
