"""The reader: asks Redis for the next messages whenever there are free slots.

Owns the loop of a worker's reading: its sources, its outstanding take, and handing messages to their consumers.
Belongs to the worker, not to a connection: :meth:`Reader.attach` and :meth:`Reader.detach` come and go. Knows
Kombu's channel, nothing of Celery; whoever owns the slots tells how many are free (*capacity*).

A turn of the loop (:meth:`Reader.on_tick`)::

    settles go out ──► free slots, and something may be there? ──► take ──► deliver
                              │ nothing there
                              ▼
         join the idle workers (watch or park) ──► track the keys ──► sleep until one changes

The connection is in :mod:`.connector`, settling in :mod:`.settler`, waiting in :mod:`.idle`, what is sorted by key in
:mod:`.sorting`, delayed messages in :mod:`.delays`, recovery in :mod:`.upkeep`, the worker's sign of life in
:mod:`.presence`, the end in :mod:`.drain`. Methods are called from the loop's thread except where they say otherwise.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

from kombu.utils.json import object_hook
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_strategies.core.lease import may_start
from celery_strategies.core.policy import Policy
from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy, turn_from
from celery_strategies.core.tags import TERM_HEADER
from celery_strategies.store import store as calls
from celery_strategies.store.link import ignore
from celery_strategies.store.store import Delivery, Grant, SourceKeys, TakePlan
from celery_strategies.transport.connector import Connector
from celery_strategies.transport.delays import Delays
from celery_strategies.transport.drain import Drain
from celery_strategies.transport.idle import Idle
from celery_strategies.transport.keeper import STALE_AFTER
from celery_strategies.transport.leads import Leads
from celery_strategies.transport.patience import Patience
from celery_strategies.transport.permits import Permits
from celery_strategies.transport.presence import Presence
from celery_strategies.transport.session import Session
from celery_strategies.transport.settler import Held, Settler, boot_time
from celery_strategies.transport.sorting import Sorting
from celery_strategies.transport.strays import Strays
from celery_strategies.transport.upkeep import Upkeep
from celery_strategies.transport.waker import Waker

logger = logging.getLogger("celery_strategies.reader")

#: Seconds without a reply after which the connection counts as dead; as long as a blocking read may take.
REPLY_TIMEOUT = 15.0
#: Seconds after a take within which the first free slot waits for others.
LINGER = 0.001
#: Seconds that acks of short jobs wait at most for a take to ride on.
ACK_DELAY = 0.005

#: What ``kombu.utils.json.loads`` does to a text, without making a decoder for each message.
_decode = json.JSONDecoder(object_hook=object_hook).decode


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
    where client tracking is refused. *policy* says how jobs are sorted by key, with these *caps* (core/policy.py);
    *runs* says whether what was told to ``settler.run_by`` still runs; *delivery_blocks*, that a message is worked on
    while it is delivered, so that a loop that does not turn meanwhile is no sign of death. A message that has outlived
    *max_deliveries* workers (0: any number) does not come back; *stale_after* is in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        strategy: Strategy,
        capacity: Callable[[], int],
        accepts: Callable[[str], bool] = lambda _queue: True,
        ranks: Mapping[str, int] | None = None,
        polling_interval: float = 0.1,
        policy: Policy | None = None,
        caps: Mapping[str, int] | None = None,
        runs: Callable[[Any], bool] = lambda _job: False,
        delivery_blocks: bool = False,
        max_deliveries: int = 0,
        stale_after: float = STALE_AFTER,
        single_active: Iterable[str] = (),
        consumer_priority: int = 0,
    ) -> None:
        self.worker = f"{name}-{uuid4().hex[:12]}"
        self.strategy = strategy
        self.capacity = capacity
        self.accepts = accepts
        self.polling_interval = polling_interval
        self.sources = SourceList(ranks)
        self.waker = Waker()
        #: Set by a hub: its thread, in which no wake is needed since a turn follows anyway, and its timer.
        self.loop_thread: int | None = None
        self.call_later: Callable[[float], Any] | None = None
        self.patience = Patience(self._pause)
        self.settler = Settler(self.worker, self.patience, self._settle_pending, runs)
        self.idle = Idle(
            self.worker,
            polling_interval,
            self._look,
            partial(self._refused, "watch"),
            partial(self.patience.accepted, "watch"),
        )
        self.strays = Strays(
            self._stray_found,
            partial(self._refused, "survey"),
            partial(self.patience.accepted, "survey"),
        )
        self.delays = Delays(
            self.patience, look=self._look, refused=self._refused, later=self._pause
        )
        self.sorting = Sorting(
            policy,
            caps,
            self.patience,
            changed=self._sources_changed,
            look=self._look,
            refused=self._refused,
            later=self._pause,
            expect=self.delays.expect,
            leads=lambda queue: queue in self.leads.exclusive,
            led=self._led,
        )
        self.permits = Permits(
            self.settler,
            self.patience,
            may_start=self._may_start,
            look=self._look,
            refused=self._refused,
            later=self._pause,
        )
        #: Number of messages handed to their consumers so far.
        self.delivered = 0
        #: The server's time, in seconds since the epoch, when the messages that are being delivered were taken.
        self.granted_at = 0.0
        self._stale_after = stale_after
        self.upkeep = Upkeep(
            self.settler, self.patience, self._restore_foreign, self._look, max_deliveries
        )
        self.leads = Leads(single_active, polling_interval)
        self.consumer_priority = consumer_priority
        self._delivery_blocks = delivery_blocks
        self.connector = Connector(
            self.worker, self.settler, self.patience, look=self._look, begun=self._begun
        )
        self.drained = Drain(self.connector, self.settler, self.idle, self.patience)
        self.presence = Presence(
            {"name": name, "strategy": strategy.label},
            self.connector,
            self.drained,
            self.leads,
            self.permits,
            queues=lambda: [source.queue for source in self.sources.ordered()],
            tags=lambda: tuple(self.held),
            look=self._look_now,
            consumer_priority=consumer_priority,
            stale_after=stale_after,
            max_deliveries=max_deliveries,
        )
        self._bindings: dict[str, Binding] = {}
        self._plan: TakePlan | None = None
        self._order: tuple[str, ...] = ()
        self._turn = 0
        self._last_yield: str | None = None
        self._asked = False
        self._hungry = True
        self._took_at = self._asked_at = 0.0
        self._granted_last = 0
        self._lingering = False
        self._acks_due = 0.0

    @property
    def held(self) -> dict[str, Held]:
        """The messages that this worker holds, by delivery tag."""
        return self.settler.held

    @property
    def session(self) -> Session | None:
        """The session on the broker, None without a connection."""
        return self.connector.session

    @property
    def tracking(self) -> bool:
        """Whether the server tells when keys change, so that waiting needs no polling."""
        return self.session is not None and self.session.tracking

    # -- connection -----------------------------------------------------------------------------

    def attach(self, channel: Any) -> None:
        """Begin a session on *channel*'s broker, and take up what this worker still holds there.

        Raises:
            Exception: the transport's connection errors; nothing is attached then.
        """
        self.connector.use(channel)
        for queue in tuple(self._bindings):
            self.sources.unbind(queue)
        self._bindings.clear()
        self._sources_changed()
        try:
            session = self.connector.connect()
        except BaseException:
            self.detach()
            raise
        channel.attach_reader(self)
        self.presence.begin(session)

    def detach(self) -> None:
        """Drop the connection; what is held stays held, settles wait for the next session."""
        self.connector.detach()

    def _begun(self) -> None:
        self._asked = False
        self._plan = None
        self.patience.reset()
        self.idle.reset()
        self.upkeep.reset()
        self.sorting.reset()
        self.delays.reset()
        self.permits.reset()
        self.leads.reset()
        self.strays.reset(channel_steps=self.connector.channel.priority_steps)

    def _look_now(self) -> None:
        # From any thread: the loop looks at its next turn.
        self._hungry = True
        self.wake()

    # -- sources --------------------------------------------------------------------------------

    def bind(
        self,
        channel: Any,
        queue: str,
        callback: Callable[[Any], Any],
        *,
        no_ack: bool,
        levels: int | None,
    ) -> None:
        """Make *queue* a source whose messages go to *callback*."""
        self._bindings[queue] = Binding(channel, callback, no_ack)
        self.sources.bind(queue, levels)
        self._sources_changed()

    def unbind(self, channel: Any, queue: str) -> None:
        """Stop reading *queue*, whose place in the list is remembered.

        Ignored if another channel has bound it since.
        """
        binding = self._bindings.get(queue)
        if binding is not None and binding.channel is channel:
            del self._bindings[queue]
            self.sources.unbind(queue)
            session = self.session
            if session is not None and session.link.alive and not self.drained.active:
                # Nobody is to wait for this worker to look at the queue.
                self.idle.leave(session)
            self._sources_changed()

    def bound(self, queue: str) -> bool:
        """Whether *queue* is a source of this reader."""
        return queue in self._bindings

    def _may_start(self, queue: str) -> bool:
        return queue in self._bindings and not self.drained.active

    def _sources_changed(self) -> None:
        self._plan = None
        self._hungry = True
        self.strays.due = True

    def _led(self, queue: str) -> None:
        logger.warning(
            "Queue %r has a single active consumer, say other workers, but not this one's settings: "
            "reading it under the lease, too",
            queue,
        )
        self.leads.exclusive.add(queue)
        self._sources_changed()

    def _stray_found(self) -> None:
        self._plan = None

    def _prepare(self, session: Session) -> TakePlan:
        # A queue waits for its policy, lest its jobs be taken in another order.
        sources = [
            SourceKeys(
                source.queue,
                source.levels,
                self.strays.lists(source.queue, source.levels),
                self.sorting.sorted(source.queue),
                source.queue in self.leads.exclusive,
            )
            for source in self.sources.ordered()
            if self.sorting.known(source.queue)
        ]
        order = tuple(source.queue for source in sources)
        self._turn = turn_from(self._last_yield, order, self._order)
        self._order = order
        self._plan = TakePlan(
            session.keys,
            self.worker,
            self.strategy,
            sources,
            lease_ttl=int(self._stale_after * 1000),
        )
        return self._plan

    # -- the loop -------------------------------------------------------------------------------

    def fileno(self) -> int | None:
        """Return the connection's file descriptor, None without a connection."""
        session = self.session
        return session.link.fileno() if session is not None and session.link.alive else None

    def on_readable(self) -> None:
        """Handle what Redis sent, then go on as after a turn."""
        if self.session is not None and not self.drained.active:
            self.session.link.pump()
            self.on_tick()

    def on_tick(self) -> None:
        """Do what can be done now: send settles, ask for messages, or arrange to be woken.

        Raises:
            redis.exceptions.ConnectionError: the connection is gone or silent; the owner reconnects.
        """
        session = self.session
        now = monotonic()
        self.presence.turned(now)
        if session is None or self.drained.active:
            return
        self._check(session, now)
        resting = partial(self.patience.remaining, now)
        if self.settler.others and not resting("settle", "give back"):
            self.settler.send_others(session)
            # What goes back may be ours to run again, and nobody tells us of our own writes.
            self._hungry = True
        # Before the take, after which a turn ends: a worker that is never idle has upkeep too.
        self.upkeep.run(session, now)
        queues = tuple(self._bindings)
        self.sorting.agree(session, queues, now)
        self.delays.run(session, queues, now)
        self.permits.run(session, now)
        if self.settler.note_ended():
            # Whoever may run now may be ours to run, and nobody tells us of our own writes.
            self._hungry = True
        if self._asked or self.strays.surveying or self.settler.returning:
            return
        plan = self._plan or self._prepare(session)
        self.sorting.run(session, plan.sources, now)
        if plan.sources and (self._hungry or now >= self.idle.next_look) and not resting("take"):
            self._hungry = True
            n = self.capacity()
            if 0 < n < self._worth_while(now):
                return
            if n > 0:
                due = self.strays.due and not resting("survey")
                if not (due and self.strays.survey(session, plan.sources)):
                    self._take(session, plan, min(n, calls.TAKE_LIMIT), now)
                return
            self.idle.leave(session)
            self._step_aside(session)
        if self.settler.acks and not resting("settle") and not self._wait_for_take(now):
            self.settler.send_acks(session)

    def _step_aside(self, session: Session) -> None:
        """Give up leases of queues of which no job is here: with no free slot this worker cannot read them."""
        tags = (*self.held, *self.settler.running)
        if self.leads.terms and not any(map(calls.is_leased, tags)):
            self.leads.terms.clear()
            session.link.send(session.store.step_down(), ignore)

    def _check(self, session: Session, now: float) -> None:
        link = session.link
        if not link.alive:
            raise RedisConnectionError("Connection to Redis is closed")
        # What is readable has come: then this loop was late, after a long solo job say, not Redis.
        if link.waited(now) > REPLY_TIMEOUT and not link.readable():
            link.close()
            raise RedisTimeoutError(f"Redis did not answer for {REPLY_TIMEOUT:g} s")

    def _worth_while(self, now: float) -> int:
        """Return how many free slots make a take worth while.

        Jobs that came together and are very short end together: half of them share one take, instead of one take
        each, if the first of them waits for a moment. One long job among them does not hold the others up.
        """
        if self._granted_last < 3 or now - self._took_at > LINGER or self.call_later is None:
            return 1
        if not self._lingering:
            self._lingering = True
            self.call_later(LINGER)
        return (self._granted_last + 1) // 2

    def _wait_for_take(self, now: float) -> bool:
        """Whether acks may wait for the next take: while jobs are short, and not for long."""
        if self.call_later is None or now - self._took_at > ACK_DELAY:
            self._acks_due = 0.0
            return False
        if not self._acks_due:
            self._acks_due = now + ACK_DELAY
            self.call_later(ACK_DELAY)
        if now < self._acks_due:
            return True
        self._acks_due = 0.0
        return False

    @property
    def pulse(self) -> float:
        """For how long, in seconds, the loop may sleep at most."""
        session = self.session
        if session is None:
            return 1.0
        if not session.tracking:
            return self.polling_interval
        # Renewal is due five times within the visibility timeout.
        return min(1.0, max(0.2, session.visibility_timeout / 5))

    def timeout(self) -> float:
        """Return for how long, in seconds, to sleep now."""
        now = monotonic()
        pause = self.patience.remaining(now, "take", "settle", "give back")
        soon = min(self.delays.remaining(now), self.permits.remaining(now))
        limit = min(self.pulse, max(0.001, soon))
        return min(limit, pause) if pause else limit

    def _pause(self, pause: float) -> None:
        if self.call_later is not None:
            self.call_later(pause)

    def wake(self) -> None:
        """Have the loop turn once more: a slot or a settle is waiting. Any thread."""
        if threading.get_ident() != self.loop_thread:
            self.waker.wake()

    def _look(self, strays: bool) -> None:
        """Take again at the next turn; *strays*: something lies where no take looks."""
        self._hungry = True
        if strays:
            self.strays.due = True

    def _refused(self, what: str, error: RedisError, batch: int = 0) -> None:
        self._hungry = True
        if self.session is not None:
            self.settler.refuse(self.session, what, error, batch)

    # -- take -----------------------------------------------------------------------------------

    def _take(self, session: Session, plan: TakePlan, n: int, now: float) -> None:
        acks = self.settler.pop_acks()
        skip = self.leads.skip(plan.sources, now)
        self.leads.asked(plan.sources, skip, now)
        packed = plan.call(
            session.number,
            n,
            turn=self._turn,
            idle=bool(self.idle.registered),
            tags=acks,
            skip=skip,
        )
        batch = self.settler.expect(acks)
        self._asked = True
        self._hungry = False
        self._took_at = now
        # From before the take: its lease is not older than that.
        self._asked_at = boot_time()
        self._acks_due = 0.0
        session.link.send(packed, partial(self._granted, session, plan, n, batch))

    def _granted(self, session: Session, plan: TakePlan, n: int, batch: int, reply: Any) -> None:
        self._asked = False
        if isinstance(reply, RedisError):
            self._refused("take", reply, batch)
            self.connector.look_for_half_a_take(session)
            return
        grant = Grant.parse(reply)
        if not grant.valid:
            raise RedisConnectionError(
                "Redis does not know this session: another has begun, or Redis lost its data"
            )
        self.settler.confirm(batch, "take", grant.lost)
        self._report(plan, grant)
        deliveries = grant.deliveries
        full = len(deliveries) == n
        self._granted_last = len(deliveries)
        self._lingering = False
        if deliveries:
            self.granted_at = grant.now or 0.0
            self._last_yield = plan.sources[deliveries[-1].source].queue
            self._turn = grant.turn
        if deliveries or grant.moved or grant.set_aside:
            self.idle.yielded(full=full)
        if full or grant.more or plan is not self._plan:
            self._hungry = True
        elif pause := self.patience.remaining(monotonic(), "watch"):
            # It cannot wait to be told: it looks again.
            self.idle.next_look = monotonic() + pause
        else:
            self._rest(session)
        self._deliver(plan, deliveries)

    def _rest(self, session: Session) -> None:
        """Wait to be told that there is something, or that there is something to lead."""
        mine = [queue for queue in self._order if not self.leads.stands_by(queue)]
        others = [queue for queue in self.leads.exclusive if self.leads.stands_by(queue)]
        extra = [session.keys.free(queue) for queue in others if queue in self._order]
        more = {queue: session.keys.ready(queue) for queue in mine if self.sorting.sorted(queue)}
        self.idle.wait(session, mine, more, extra)
        pause = self.leads.next_turn(monotonic())
        if pause is not None:
            # A queue that a worker of higher priority reads is looked at now and then, and one whose leader is silent.
            self.idle.next_look = min(self.idle.next_look, monotonic() + pause)
            self._pause(pause)

    def _report(self, plan: TakePlan, grant: Grant) -> None:
        self.sorting.report(plan.sources, grant)
        self.leads.report(plan.sources, grant, monotonic())
        for index, reason in grant.broken:
            queue = plan.sources[index].queue
            self.patience.complain(
                f"broken {queue}", "A key of queue %r cannot be read: %s", queue, reason
            )
        for index, entry, reason in grant.set_aside:
            logger.error(
                "Set aside a message of queue %r that cannot be run: %s (entry %s)",
                plan.sources[index].queue,
                reason,
                entry,
            )

    def _deliver(self, plan: TakePlan, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            queue = plan.sources[delivery.source].queue
            self.settler.hold(delivery.tag, queue, delivery.list, self._asked_at)
        for index, delivery in enumerate(deliveries):
            try:
                self._deliver_one(plan.sources[delivery.source].queue, delivery)
            except BaseException:  # noqa: PERF203
                # The loop ends here: what was not delivered must not stay hidden behind a living worker.
                self.settler.give_back([rest.tag for rest in deliveries[index + 1 :]])
                raise

    def _deliver_one(self, queue: str, delivery: Delivery) -> None:
        binding = self._bindings.get(queue)
        if binding is None or self.drained.active:
            # Cancelled between take and delivery.
            self.settler.give_back([delivery.tag])
            return
        channel = binding.channel
        try:
            payload = _decode(delivery.raw.decode("utf-8", "replace"))
            if calls.is_leased(delivery.tag):
                payload["headers"][TERM_HEADER] = self.leads.terms.get(queue)
            if delivery.deliveries:
                payload["headers"]["redelivered"] = True
                payload["properties"]["delivery_info"]["redelivered"] = True
            message = channel.Message(payload, channel=channel)
        except Exception as exc:  # noqa: BLE001  # whatever is wrong with it, the next message is read
            logger.error("Set aside a message of queue %r that cannot be decoded: %r", queue, exc)  # noqa: TRY400
            self.settler.set_aside(delivery.tag, f"cannot be decoded: {exc!r}")
            return
        message.delivery_tag = delivery.tag
        if binding.no_ack:
            self.settler.settle(delivery.tag)
        else:
            self.settler.work_on(delivery.tag, message)
        presence = self.presence
        presence.blocked = presence.blocked or self._delivery_blocks
        self.delivered += 1
        try:
            binding.callback(message)
        finally:
            presence.blocked = presence.blocked and not self._delivery_blocks

    def may_start(self, tag: str) -> bool:
        """Whether the job of *tag* may start now: not if its lease may have run out since it was taken."""
        held = self.settler.held.get(tag)
        if held is None or not calls.is_leased(tag):
            return True
        return may_start(held.since, boot_time(), self._stale_after)

    def release_limited(self) -> None:
        """Have delayed messages that wait for a rate limit come back at once."""
        session = self.session
        if session is not None and session.link.alive and not self.drained.active:
            for queue in tuple(self._bindings):
                self.delays.release(session, queue)

    # -- settling -------------------------------------------------------------------------------

    def _settle_pending(self) -> None:
        if self.drained.active:
            self.drained.settle_now()
        else:
            self.wake()

    def flush(self) -> None:
        """Hand pending settles to the kernel, for pools that block the loop; does not wait, does not raise.

        What the kernel has reaches Redis even if this process is killed now. Waiting for the reply would double the
        time of a short job; raising would end the delivery of a job whose ack is already on its way.
        """
        session = self.session
        if session is None or self.drained.active:
            return
        try:
            self.settler.send_others(session)
            self.settler.send_acks(session)
        except (RedisError, OSError) as exc:
            # The next turn of the loop finds the link closed; the next session sends these settles again.
            logger.warning("Settles did not reach Redis, they are sent again later: %s", exc)
            session.link.close()

    def _restore_foreign(self, tags: Iterable[str], limit: float) -> int:
        return int(self.connector.channel.restore_foreign(tags, limit))

    # -- shutdown -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Stop taking: the outstanding take goes back, and from here on every settle is sent at once."""
        self.drained.begin(self._bindings.clear)
        self.presence.nudge()

    def shutdown(self, started: Callable[[str], bool] = lambda _tag: True) -> None:
        """Give back whatever is still held, and leave. *started* tells whether a tag's job had begun."""
        self.drain()
        # It beats on while the last settles try to reach Redis.
        self.drained.finish(list(self.held), started, self.presence.end)
        self.waker.close()

    # -- looking --------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return the strategy and the sources in list order, for the banner and the log."""
        lines = self.sources.describe()
        return f"strategy {self.strategy.label}" + (f"\n{lines}" if lines else "")
