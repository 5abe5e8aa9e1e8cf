"""The reader: asks Redis for the next messages whenever there are free slots.

Owns what a worker holds (delivery tags), its outstanding take, its pending settles and its waiting. Belongs
to the worker, not to a connection: :meth:`Reader.attach` and :meth:`Reader.detach` may come and go. Knows Kombu's
channel, nothing of Celery; whoever owns the slots tells how many are free (*capacity*).

Life of a loop's turn (:meth:`Reader.on_tick`)::

    settles go out ──► free slots and something may be there? ──► take ──► deliver
                              │ nothing there
                              ▼
         register as idle (watch or parked) ──► track the keys ──► sleep until one changes

Every method but :meth:`Reader.settle` and its siblings is called from the loop's thread.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from uuid import uuid4

from kombu.utils.json import object_hook
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy, turn_from
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys
from celery_strategies.store.link import SUPPORTS_PUSH, Link
from celery_strategies.store.store import Delivery, Grant, SourceKeys, Store, TakePlan
from celery_strategies.transport.waker import Waker

logger = logging.getLogger("celery_strategies.reader")

#: What ``kombu.utils.json.loads`` does to a text, without making a decoder for each message.
_decode = json.JSONDecoder(object_hook=object_hook).decode

#: Idle workers that watch one source; the others park.
WATCHERS = 2
#: Seconds between the looks of an idle worker that nothing wakes.
LOOK_INTERVAL = 5.0
#: Seconds after which an idle worker that was not seen is forgotten.
STALE_AFTER = 3 * LOOK_INTERVAL
#: Seconds without a reply after which the connection counts as dead.
REPLY_TIMEOUT = 15.0
#: Longest pause, in seconds, between attempts while Redis refuses.
BACKOFF_MAX = 5.0
#: Seconds that acks of short jobs wait at most for a take to ride on.
ACK_DELAY = 0.005
#: Milliseconds that a worker's holder outlives its last sign of life, at least.
HOLDER_TTL = 24 * 3600 * 1000


@dataclass(slots=True)
class Held:
    """One message that this worker holds."""

    queue: str
    list: int
    since: float
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """A source's consumer: what to call with a message, and whether it is settled on delivery."""

    channel: Any
    callback: Callable[[Any], Any]
    no_ack: bool


class Reader:
    """Read the sources of one worker by one strategy.

    *name* is the worker's node name; *capacity* returns how many more messages may be held now (0 or less: none).
    *accepts* says which consumed queues become sources; *ranks* orders them; *polling_interval* (seconds) is used
    where client tracking is refused.
    """

    def __init__(
        self,
        name: str,
        *,
        strategy: Strategy,
        capacity: Callable[[], int],
        accepts: Callable[[str], bool] = lambda queue: True,
        ranks: Mapping[str, int] | None = None,
        polling_interval: float = 0.1,
    ) -> None:
        self.worker = f"{name}-{uuid4().hex[:12]}"
        self.strategy = strategy
        self.capacity = capacity
        self.accepts = accepts
        self.polling_interval = polling_interval
        self.sources = SourceList(ranks)
        self.held: dict[str, Held] = {}
        self.channel: Any = None
        self.store: Store = Store(Keys(), self.worker)
        self.waker = Waker()
        #: Set by a hub: its thread, in which no wake is needed since a turn follows anyway, and its timer.
        self.loop_thread: int | None = None
        self.call_later: Callable[[float], Any] | None = None
        self.tracking = False
        self._link: Link | None = None
        self._pool: Any = None
        self._keys = Keys()
        self._bindings: dict[str, Binding] = {}
        self._lists: dict[str, set[int]] = {}
        self._steps: tuple[int, ...] = (0,)
        self._session = 0
        self._plan: TakePlan | None = None
        self._order: tuple[str, ...] = ()
        self._turn = 0
        self._last_yield: str | None = None
        # Settles: acks are batched; the rest are packed one by one. Both may be appended by any thread.
        self._acks: deque[str] = deque()
        self._others: deque[tuple[str, bytes]] = deque()
        self._unconfirmed: dict[int, tuple[list[str], list[tuple[str, bytes]]]] = {}
        self._batch = 0
        self._acks_due = 0.0
        self._took_at = 0.0
        self._resent: set[str] = set()
        # Waiting
        self._asked = False
        self._hungry = True
        self._arming = False
        self._registered: tuple[str, ...] = ()
        self._next_look = 0.0
        self._suspicious = True
        self._surveying = False
        self._retry_at = 0.0
        self._delay = 0.0
        self._complaints: set[str] = set()
        self._draining = False
        self._drain_lock = threading.RLock()
        self._visibility_timeout = 3600.0
        self._next_refresh = 0.0
        self._next_sweep = 0.0

    # -- connection ---------------------------------------------------------------------------------------------

    def attach(self, channel: Any) -> None:
        """Begin a session on *channel*'s broker, and take up what this worker still holds there.

        Raises:
            Exception: the transport's connection errors; nothing is attached then.
        """
        self.detach()
        pool = channel.reader_pool()
        try:
            self._keys = channel.strategy_keys()
            self.store = Store(self._keys, self.worker)
            self._steps = tuple(channel.priority_steps)
            self._visibility_timeout = float(channel.visibility_timeout)
            self._pool = pool
            self._connect()
        except BaseException:
            self._link = None
            self._pool = None
            pool.disconnect()
            raise
        self.channel = channel
        channel.attach_reader(self)
        self._bindings.clear()
        self._plan = None
        self._asked = self._arming = self._surveying = False
        self._suspicious = self._hungry = True
        self._registered = ()
        self._retry_at = self._delay = 0.0
        now = monotonic()
        self._next_refresh = now
        self._next_sweep = now + random.uniform(0, self._sweep_interval)

    def _connect(self) -> None:
        link = Link(self._pool.get_connection(), self._changed)
        try:
            for error in link.call_all(calls.load_scripts()):
                if isinstance(error, RedisError):
                    raise error
            self.tracking = self._start_tracking(link)
            self._session += 1
            entries = link.call(self.store.join(str(self._session), self._ttl))
            self._link = link
            self._reconcile(dict(zip((tag.decode() for tag in entries[::2]), entries[1::2], strict=True)))
        except BaseException:
            self._link = None
            link.close()
            raise

    def _start_tracking(self, link: Link) -> bool:
        if not SUPPORTS_PUSH:
            self._complain("hiredis", "hiredis is older than 3.2: polling every %s s", self.polling_interval)
            return False
        try:
            link.call(calls.command(calls.pack("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")))
        except RedisConnectionError:
            raise
        except RedisError as exc:
            self._complain(
                "tracking", "Redis refuses client tracking (%s): polling every %s s", exc, self.polling_interval
            )
            return False
        return True

    def _reconcile(self, entries: dict[str, bytes]) -> None:
        """Compare what Redis says this worker holds with what it knows; unknown messages go back."""
        for acks, others in self._unconfirmed.values():
            # The call may have been executed or not: settling again does no harm.
            self._resent.update(acks, (tag for tag, _ in others))
            self._acks.extendleft(reversed(acks))
            self._others.extendleft(reversed(others))
        self._unconfirmed.clear()
        settling = {*self._acks, *(tag for tag, _ in self._others)}
        unknown = [(tag, place) for tag, place in entries.items() if tag not in self.held and tag not in settling]
        for start in range(0, len(unknown), calls.TAKE_LIMIT):
            self._require_link().call(self.store.restore(unknown[start : start + calls.TAKE_LIMIT]))
        if unknown:
            logger.warning("%d messages of a take whose reply was lost went back to their queues", len(unknown))

    def detach(self) -> None:
        """Drop the connection; what is held stays held, settles wait for the next session."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.disconnect()
        self._asked = self._arming = self._surveying = False

    def _require_link(self) -> Link:
        if self._link is None:
            raise RedisConnectionError("The reader has no connection to Redis")
        return self._link

    @property
    def _ttl(self) -> int:
        return max(HOLDER_TTL, int(2000 * self._visibility_timeout))

    @property
    def _sweep_interval(self) -> float:
        return min(60.0, max(0.5, self._visibility_timeout / 10))

    # -- sources ------------------------------------------------------------------------------------------------

    def bind(
        self, channel: Any, queue: str, callback: Callable[[Any], Any], *, no_ack: bool, levels: int | None
    ) -> None:
        """Make *queue* a source whose messages go to *callback*."""
        self._bindings[queue] = Binding(channel, callback, no_ack)
        self.sources.bind(queue, levels)
        self._sources_changed()

    def unbind(self, channel: Any, queue: str) -> None:
        """Stop reading *queue*; its place in the list is remembered. Ignored if another channel bound it since."""
        binding = self._bindings.get(queue)
        if binding is None or binding.channel is not channel:
            return
        del self._bindings[queue]
        self.sources.unbind(queue)
        self._sources_changed()

    def bound(self, queue: str) -> bool:
        """Whether *queue* is a source of this reader."""
        return queue in self._bindings

    def _sources_changed(self) -> None:
        self._plan = None
        self._suspicious = self._hungry = True

    def _steps_of(self, levels: int | None) -> Iterable[int]:
        return range(levels) if levels is not None else self._steps

    def _prepare(self) -> TakePlan:
        sources = []
        for source in self.sources.ordered():
            active = self._lists.setdefault(source.queue, set())
            active.update(self._steps_of(source.levels))
            sources.append(SourceKeys(source.queue, source.levels, tuple(sorted(active))))
        order = tuple(source.queue for source in sources)
        self._turn = turn_from(self._last_yield, order, self._order)
        self._order = order
        self._plan = TakePlan(self._keys, self.worker, self.strategy, sources)
        return self._plan

    # -- the loop -----------------------------------------------------------------------------------------------

    def fileno(self) -> int | None:
        """Return the connection's file descriptor, None without a connection."""
        link = self._link
        return link.fileno() if link is not None and link.alive else None

    def on_readable(self) -> None:
        """Handle what Redis sent, then go on as after a turn."""
        link = self._link
        if link is not None:
            link.pump()
            self.on_tick()

    def on_tick(self) -> None:
        """Do what can be done now: send settles, ask for messages, or arrange to be woken.

        Raises:
            redis.exceptions.ConnectionError: the connection is gone or silent; the owner reconnects.
        """
        link = self._link
        if link is None or self._draining:
            return
        if not link.alive:
            raise RedisConnectionError("Connection to Redis is closed")
        now = monotonic()
        if link.waited() > REPLY_TIMEOUT:
            link.close()
            raise RedisTimeoutError(f"Redis did not answer for {REPLY_TIMEOUT:g} s")
        if now < self._retry_at:
            return
        if self._others:
            self._send_others(link)
        if self._asked or self._surveying:
            return
        plan = self._plan or self._prepare()
        if self._suspicious and plan.sources:
            self._survey(link, plan)
            return
        if not self._hungry and now >= self._next_look:
            self._hungry = True
        if self._hungry and plan.sources:
            n = self.capacity()
            if n > 0:
                self._take(link, plan, min(n, calls.TAKE_LIMIT))
                return
            if self._registered:
                self._unwatch(link)
        if self._acks and not self._wait_for_take(now):
            self._send_acks(link)
        if now >= self._next_refresh:
            self._refresh(link, now)
        if now >= self._next_sweep:
            self._sweep(now)

    def _wait_for_take(self, now: float) -> bool:
        """Whether acks may wait for the next take to carry them: while jobs are short, and not for long."""
        if self.call_later is None or now - self._took_at > ACK_DELAY:
            return False
        if not self._acks_due:
            self._acks_due = now + ACK_DELAY
            self.call_later(ACK_DELAY)
        return now < self._acks_due

    def timeout(self) -> float:
        """Return for how long, in seconds, the loop may sleep at most."""
        if not self.tracking and not self._draining:
            return self.polling_interval
        return max(0.0, self._retry_at - monotonic()) or 1.0

    # -- take ---------------------------------------------------------------------------------------------------

    def _take(self, link: Link, plan: TakePlan, n: int) -> None:
        acks = self._pop_acks()
        packed = plan.call(
            str(self._session), n, turn=self._turn % max(1, len(plan.sources)), idle=bool(self._registered), tags=acks
        )
        batch = self._expect(acks)
        self._asked = True
        self._hungry = False
        self._took_at = monotonic()
        link.send(packed, lambda reply: self._granted(reply, plan, n, batch))

    def _granted(self, reply: Any, plan: TakePlan, n: int, batch: int) -> None:
        self._asked = False
        if isinstance(reply, RedisError):
            self._hungry = True
            self._refused("take", reply, batch)
            return
        acks, _ = self._unconfirmed.pop(batch, ([], []))
        grant = Grant.parse(reply)
        if not grant.valid:
            self._acks.extendleft(reversed(acks))
            raise RedisConnectionError("Another session of this worker has begun")
        self._recovered()
        self._report_lost(grant.lost)
        self._resent.difference_update(acks)
        for index, reason in grant.broken:
            queue = plan.sources[index].queue
            self._complain(f"broken {queue}", "A key of queue %r cannot be read: %s", queue, reason)
        for index, entry, reason in grant.set_aside:
            queue = plan.sources[index].queue
            logger.error("Set aside a message of queue %r that cannot be run: %s (entry %s)", queue, reason, entry)
        deliveries = grant.deliveries
        if deliveries:
            self._last_yield = plan.sources[deliveries[-1].source].queue
            if plan is self._plan:
                self._turn = grant.turn
        if len(deliveries) == n or grant.more or plan is not self._plan:
            self._hungry = True
            if len(deliveries) == n:
                self._registered = ()
        elif self.tracking:
            self._register(plan)
        else:
            self._next_look = monotonic() + self.polling_interval
        self._deliver(plan, deliveries)

    def _deliver(self, plan: TakePlan, deliveries: Sequence[Delivery]) -> None:
        now = monotonic()
        for delivery in deliveries:
            self.held[delivery.tag] = Held(plan.sources[delivery.source].queue, delivery.list, now)
        for index, delivery in enumerate(deliveries):
            try:
                self._deliver_one(plan.sources[delivery.source].queue, delivery)
            except BaseException:
                # The loop ends here: what was not delivered must not stay hidden behind a living worker.
                self.give_back([rest.tag for rest in deliveries[index + 1 :]])
                raise

    def _deliver_one(self, queue: str, delivery: Delivery) -> None:
        binding = self._bindings.get(queue)
        if binding is None or self._draining:
            # Cancelled between take and delivery.
            self.give_back([delivery.tag])
            return
        channel = binding.channel
        try:
            payload = _decode(delivery.raw.decode("utf-8", "replace"))
            if delivery.deliveries:
                payload["headers"]["redelivered"] = True
                payload["properties"]["delivery_info"]["redelivered"] = True
            message = channel.Message(payload, channel=channel)
        except Exception as exc:
            # Whatever is wrong with a message, the reader goes on with the next.
            logger.error("Set aside a message of queue %r that cannot be decoded: %r", queue, exc)
            self.set_aside(delivery.tag, f"cannot be decoded: {exc!r}")
            return
        message.delivery_tag = delivery.tag
        if binding.no_ack:
            self.settle(delivery.tag)
        binding.callback(message)

    # -- settling -----------------------------------------------------------------------------------------------

    def owns(self, tag: str) -> bool:
        """Whether *tag* was minted for this worker."""
        return isinstance(tag, str) and calls.worker_of(tag) == self.worker

    def _release(self, tag: str, verb: str) -> Held | None:
        held = self.held.pop(tag, None)
        if held is None:
            self._complain(f"{verb} {tag}", "%s of a message that is not held any more: %s", verb, tag)
        return held

    def settle(self, tag: str) -> None:
        """Acknowledge *tag* (or reject it for good). Any thread."""
        if self._release(tag, "Settling") is None:
            return
        self._acks.append(tag)
        self._after_settle()

    def requeue(self, tag: str) -> None:
        """Put *tag*'s message at the tail of its level. Any thread."""
        held = self._release(tag, "Requeueing")
        if held is not None:
            self._others.append((tag, self.store.requeue(tag, held.queue, held.list)))
            self._after_settle()

    def set_aside(self, tag: str, reason: str) -> None:
        """Move *tag*'s message to where an operator can look at it. Any thread."""
        held = self._release(tag, "Setting aside")
        if held is not None:
            self._others.append((tag, self.store.set_aside(tag, held.queue, reason)))
            self._after_settle()

    def give_back(self, tags: Iterable[str], *, started: bool = False) -> None:
        """Put messages back where they were, in their order. Any thread."""
        for tag in tags:
            if self.held.pop(tag, None) is not None:
                self._others.append((tag, b"started" if started else b""))
        self._after_settle()

    def _after_settle(self) -> None:
        if self._draining:
            self._settle_now()
        else:
            self.wake()

    def wake(self) -> None:
        """Have the loop turn once more: a slot or a settle is waiting. Any thread."""
        if threading.get_ident() != self.loop_thread:
            self.waker.wake()

    def flush(self) -> None:
        """Hand pending settles to the kernel, for pools that block the loop; does not wait, does not raise.

        What the kernel has reaches Redis even if this process is killed now. Waiting for the reply would double the
        time of a short job; raising would end the delivery of a job whose ack is already on its way.
        """
        link = self._link
        if link is None or self._draining:
            return
        try:
            self._send_others(link)
            self._send_acks(link)
        except (RedisError, OSError) as exc:
            # The next turn of the loop finds the link closed; the next session sends these settles again.
            logger.warning("Settles did not reach Redis, they are sent again after reconnecting: %s", exc)
            link.close()

    def _pop_acks(self) -> list[str]:
        self._acks_due = 0.0
        acks: list[str] = []
        pop = self._acks.popleft
        while self._acks and len(acks) < calls.TAG_LIMIT:
            acks.append(pop())
        return acks

    def _expect(self, acks: list[str], others: list[tuple[str, bytes]] | None = None) -> int:
        self._batch += 1
        if acks or others:
            self._unconfirmed[self._batch] = (acks, others or [])
        return self._batch

    def _send_acks(self, link: Link) -> None:
        while self._acks:
            acks = self._pop_acks()
            batch = self._expect(acks)
            link.send(self.store.settle(acks), lambda reply, batch=batch: self._settled(reply, batch))

    def _send_others(self, link: Link) -> None:
        while self._others:
            tag, packed = self._others.popleft()
            batch = self._expect([], [(tag, packed)])
            if packed in (b"", b"started"):
                self._send_restore(link, tag, packed, batch)
            else:
                link.send(packed, lambda reply, batch=batch: self._settled(reply, batch))

    def _send_restore(self, link: Link, tag: str, how: bytes, batch: int) -> None:
        def placed(reply: Any) -> None:
            if isinstance(reply, RedisError):
                self._refused("give back", reply, batch)
            elif reply is None:
                self._settled([], batch)
            else:
                packed = self.store.restore([(tag, reply)], started=how == b"started")
                link.send(packed, lambda moved: self._settled(moved, batch))
                self._hungry = True

        link.send(calls.command(calls.pack("HGET", self._keys.holder(self.worker), tag)), placed)

    def _settled(self, reply: Any, batch: int) -> None:
        if isinstance(reply, RedisError):
            self._refused("settle", reply, batch)
            return
        acks, others = self._unconfirmed.pop(batch, ([], []))
        self._recovered()
        if isinstance(reply, list):
            self._report_lost(tag.decode() for tag in reply)
        self._resent.difference_update(acks, (tag for tag, _ in others))

    def _report_lost(self, tags: Iterable[str]) -> None:
        for tag in tags:
            if tag not in self._resent:
                logger.warning("Message %s was finished here but had been given to another worker meanwhile", tag)

    def _refused(self, what: str, error: RedisError, batch: int) -> None:
        """Take up what Redis did not execute, and pause; a script that is missing is loaded again."""
        acks, others = self._unconfirmed.pop(batch, ([], []))
        self._acks.extendleft(reversed(acks))
        self._others.extendleft(reversed(others))
        link = self._require_link()
        if isinstance(error, NoScriptError):
            commands = calls.load_scripts()
            link.send(b"".join(commands), *([lambda _: None] * len(commands)))
            return
        self._delay = min(BACKOFF_MAX, max(0.1, 2 * self._delay))
        self._retry_at = monotonic() + self._delay * random.uniform(0.8, 1.2)
        kind = str(error).partition(" ")[0]
        self._complain(f"refused {kind}", "Redis refused %s (%s): trying again, nothing is lost", what, error)
        if isinstance(error, ReadOnlyError):
            # This server is a replica now: the connection must be made anew to find the master.
            link.close()

    def _recovered(self) -> None:
        if self._delay:
            self._delay = 0.0
            logger.info("Redis accepts calls again")
            self._complaints = {known for known in self._complaints if not known.startswith("refused ")}

    # -- waiting ------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._hungry = True

    def _register(self, plan: TakePlan) -> None:
        """Join the idle workers, then track the keys of the sources that are ours to watch."""
        link = self._require_link()
        queues = [source.queue for source in plan.sources]
        self._registered = tuple(queues)
        self._arming = True
        self._next_look = monotonic() + LOOK_INTERVAL * random.uniform(0.8, 1.2)
        packed = self.store.watch(queues, watchers=WATCHERS, stale=int(STALE_AFTER * 1000))
        link.send(packed, lambda reply: self._arm(reply, queues))

    def _arm(self, roles: Any, queues: Sequence[str]) -> None:
        if isinstance(roles, RedisError):
            self._arming = False
            self._hungry = True
            self._refused("watch", roles, 0)
            return
        keys = [self._keys.wake(self.worker)]
        for queue, role in zip(queues, roles, strict=True):
            if role:
                keys += [self._keys.returned(queue), *self._keys.inboxes(queue)]
        link = self._require_link()
        # EXISTS both says whether something came meanwhile and has the server remember the keys.
        packed = calls.command(calls.pack("CLIENT", "CACHING", "YES")) + calls.command(calls.pack("EXISTS", *keys))
        link.send(packed, lambda _: None, self._armed)

    def _armed(self, reply: Any) -> None:
        self._arming = False
        if isinstance(reply, RedisError):
            self._hungry = True
            self._refused("watch", reply, 0)
        elif reply:
            # Something lies there that the take before did not see: new, or in a list nobody expected.
            self._hungry = self._suspicious = True

    def _unwatch(self, link: Link) -> None:
        queues, self._registered = self._registered, ()
        link.send(self.store.unwatch(queues), lambda _: None)

    def _survey(self, link: Link, plan: TakePlan) -> None:
        """Look for messages in lists that the producers' priority steps do not explain."""
        self._suspicious = False
        places = [
            (source.queue, step)
            for source in plan.sources
            for step in range(len(self._keys.inboxes(source.queue)))
            if step not in source.lists
        ]
        if not places:
            return
        self._surveying = True

        def pinpoint(reply: Any) -> None:
            if isinstance(reply, RedisError):
                self._surveying = False
                self._suspicious = True
                self._refused("survey", reply, 0)
            elif not reply:
                self._surveying = False
            else:
                packed = b"".join(
                    calls.command(calls.pack("EXISTS", self._keys.inbox(queue, step))) for queue, step in places
                )
                handlers = [lambda found, place=place: self._found(place, found) for place in places]
                last = places[-1]
                handlers[-1] = lambda found: self._surveyed(last, found)
                link.send(packed, *handlers)

        names = [self._keys.inbox(queue, step) for queue, step in places]
        link.send(calls.command(calls.pack("EXISTS", *names)), pinpoint)

    def _found(self, place: tuple[str, int], reply: Any) -> None:
        if reply == 1:
            queue, step = place
            self._lists.setdefault(queue, set()).add(step)
            self._plan = None
            logger.info("Queue %r has messages at priority step %d: reading it too", queue, step)

    def _surveyed(self, place: tuple[str, int], reply: Any) -> None:
        self._found(place, reply)
        self._surveying = False

    # -- upkeep -------------------------------------------------------------------------------------------------

    def _refresh(self, link: Link, now: float) -> None:
        """Renew the time stamps of what is held, well within the visibility timeout."""
        self._next_refresh = now + min(60.0, max(0.2, self._visibility_timeout / 5))
        self._suspicious = True
        tags = list(self.held)
        for start in range(0, max(1, len(tags)), calls.TAG_LIMIT):
            link.send(self.store.refresh(tags[start : start + calls.TAG_LIMIT], self._ttl), lambda _: None)

    def _sweep(self, now: float) -> None:
        """Put back what dead workers held, ours and stock ones, once its visibility timeout has passed."""
        self._next_sweep = now + self._sweep_interval * random.uniform(0.8, 1.2)
        try:
            self.restore_expired()
        except RedisError as exc:
            self._complain("sweep", "Could not look for messages of dead workers: %s", exc)

    def restore_expired(self) -> int:
        """Put back messages whose visibility timeout has passed; returns how many. Blocks for a few round trips."""
        link = self._require_link()
        limit, *tags = link.call(self.store.expired(self._visibility_timeout, calls.TAKE_LIMIT))
        names = [tag.decode() for tag in tags]
        settling = {*self._acks, *(tag for tag, _ in self._others)}
        for acks, others in self._unconfirmed.values():
            settling.update(acks, (tag for tag, _ in others))
        names = [tag for tag in names if tag not in self.held and tag not in settling]
        if not names:
            return 0
        places = link.call_all(
            [calls.command(calls.pack("HGET", self._keys.holder(calls.worker_of(tag)), tag)) for tag in names]
        )
        ours = [(tag, place) for tag, place in zip(names, places, strict=True) if isinstance(place, bytes)]
        moved = int(link.call(self.store.restore(ours, limit=limit, started=True))) if ours else 0
        foreign = [tag for tag, place in zip(names, places, strict=True) if place is None]
        if foreign:
            moved += self.channel.restore_foreign(foreign)
        if moved:
            self._hungry = True
            logger.warning("Restored %d messages whose worker did not finish them", moved)
        return moved

    def reconcile(self, known: Callable[[], set[str]]) -> None:
        """Give back messages that nobody works on: *known* returns the tags that somebody does.

        Celery leaves some messages unacknowledged on purpose and trusts the channel's close to return them.
        A tag must be missing twice, a call apart, before it goes back.
        """
        if not self.held:
            return
        tags = known()
        orphans = []
        for tag, held in list(self.held.items()):
            if tag in tags:
                held.suspect = False
            elif held.suspect:
                orphans.append(tag)
            else:
                held.suspect = True
        if orphans:
            logger.info("%d messages that nobody works on go back to their queues", len(orphans))
            self.give_back(orphans, started=True)

    # -- shutdown -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Stop taking: the outstanding take goes back, and from here on every settle is sent at once.

        Called when the loop has ended, or from a signal handler in the middle of a read.
        """
        if self._draining:
            return
        with self._drain_lock:
            link = self._link
            interrupted = link is not None and link.busy
            if link is not None and not interrupted and link.alive:
                try:
                    while link.pending:
                        self._draining_read(link)
                    if self._registered:
                        link.call(self.store.unwatch(self._registered))
                        self._registered = ()
                except RedisError as exc:
                    logger.info("Connection to Redis was lost at shutdown: %s", exc)
                    interrupted = True
            self._draining = True
            if interrupted and link is not None:
                link.close()
            self._settle_now()

    def _draining_read(self, link: Link) -> None:
        # Grants read from here on are given back, not delivered.
        self._bindings.clear()
        link.read_one()

    def _settle_now(self) -> None:
        with self._drain_lock:
            for attempt in (1, 2):
                try:
                    link = self._link
                    if link is None or not link.alive:
                        if self._pool is None:
                            return
                        self._connect()
                        link = self._require_link()
                    self._send_others(link)
                    self._send_acks(link)
                    while link.pending:
                        link.read_one()
                except (RedisError, OSError) as exc:
                    if attempt == 2:
                        logger.error("%d settles did not reach Redis: %s", len(self._acks) + len(self._others), exc)
                else:
                    return

    def shutdown(self, started: Callable[[str], bool] = lambda tag: True) -> None:
        """Give back whatever is still held, and leave. *started* tells whether a tag's job had begun."""
        self.drain()
        tags = list(self.held)
        if tags:
            logger.warning("%d messages that were not finished go back to their queues", len(tags))
            begun = {tag: started(tag) for tag in tags}
            for flag in (False, True):
                self.give_back([tag for tag in tags if begun[tag] is flag], started=flag)
        with self._drain_lock:
            if self._link is not None and self._link.alive:
                try:
                    self._link.call(self.store.leave())
                except RedisError as exc:
                    logger.info("Could not leave: %s", exc)
            self.detach()
        self.waker.close()

    # -- log ----------------------------------------------------------------------------------------------------

    def _complain(self, key: str, message: str, *args: object) -> None:
        """Log a warning once for each *key*."""
        if key not in self._complaints:
            if len(self._complaints) > 1000:
                self._complaints.clear()
            self._complaints.add(key)
            logger.warning(message, *args)

    def describe(self) -> str:
        """Return the strategy and the sources in list order, for the banner and the log."""
        lines = self.sources.describe()
        return f"strategy {self.strategy.label}" + (f"\n{lines}" if lines else "")
