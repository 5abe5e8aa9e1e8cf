"""Any call may be lost, on its way or on its way back, or arrive late: no job is lost, and none is doubled.

The workers here keep the books as the reader does: what was not confirmed is said again after the next
join, and what Redis says they hold and they do not know goes back.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_strategies.core.strategies import Strategy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.store import Grant, SourceKeys, Store, TakePlan
from tests.store.tools import (
    NOW,
    STALE,
    TTL,
    Caller,
    everywhere,
    failing,
    job_of,
    message,
    push,
    source,
    split,
)

QUEUES = ("a", "b")
SECOND = 1_000_000
TIMEOUT = 50.0


class Fate(enum.Enum):
    """What becomes of a call."""

    FINE = "fine"
    LOST = "never arrives"
    UNHEARD = "is executed, and its reply is lost"
    LATE = "is executed some time after its sender gave it up"


class Gone(Exception):  # noqa: N818  # the connection, not an error of the test
    """The connection ended."""


#: What becomes of the next calls, the last first; after them all is fine.
troubles = st.lists(st.sampled_from([*Fate, Fate.FINE]), max_size=3)
Say = Callable[[], bytes]


def jobs_of(client: redis.Redis) -> Counter[str]:
    """Return in how many places each job is."""
    return Counter(job_of(raw) for raw in everywhere(client))


class Member:
    """One worker's memory, over sessions."""

    def __init__(self, machine: Broken, name: str) -> None:
        self.machine = machine
        self.name = name
        self.store = Store(machine.keys, name)
        self.session = 0
        self.joined = False
        self.held: dict[str, tuple[str, int, str]] = {}
        # Tag -> how to say what became of it, None to settle it; said again until it was confirmed.
        self.unconfirmed: dict[str, Say | None] = {}
        self.plan = TakePlan(machine.keys, name, Strategy.ROUND_ROBIN, machine.sources)

    def ask(self, packed: bytes) -> Any:
        """Make a call; raises Gone as the connection does."""
        fate = self.machine.next_fate()
        if fate is Fate.LATE:
            self.machine.late.append(packed)
        if fate in {Fate.FINE, Fate.UNHEARD}:
            reply = self.machine.make(packed, self)
        if fate is not Fate.FINE:
            self.joined = False
            raise Gone
        return reply

    def join(self) -> None:
        """Begin a session and reconcile; may fail at any of its calls."""
        self.session += 1
        reply = self.ask(self.store.join(str(self.session), TTL))
        entries = {tag.decode(): entry for tag, entry in zip(reply[::2], reply[1::2], strict=True)}
        unknown = [(tag, entry) for tag, entry in entries.items() if tag not in self.known()]
        if unknown:
            self.ask(self.store.restore(unknown))
        self.joined = True
        self.say()

    def known(self) -> set[str]:
        """Return the tags of which this worker knows."""
        return {*self.held, *self.unconfirmed}

    def say(self) -> None:
        """Say what is not confirmed yet: settles in one call, the rest one by one."""
        settles = [tag for tag, how in self.unconfirmed.items() if how is None]
        if settles:
            lost = {tag.decode() for tag in self.ask(self.store.settle(settles))}
            for tag in settles:
                del self.unconfirmed[tag]
                self.machine.confirmed(tag, lost)
        for tag, how in list(self.unconfirmed.items()):
            packed = how() if how else b""
            if packed:
                self.ask(packed)
            del self.unconfirmed[tag]

    def take(self, n: int, acks: list[str]) -> None:
        """Take, with *acks* riding along."""
        for tag in acks:
            self.finish(tag)
        packed = self.plan.call(str(self.session), n, tags=acks, now=self.machine.now)
        grant = Grant.parse(self.ask(packed))
        assert grant.valid
        assert (grant.broken, grant.set_aside) == ((), ())
        for tag in acks:
            del self.unconfirmed[tag]
            self.machine.confirmed(tag, grant.lost)
        for delivery in grant.deliveries:
            assert delivery.tag not in self.held
            queue = QUEUES[delivery.source]
            self.held[delivery.tag] = (queue, delivery.list, job_of(delivery.raw))

    def idle(self) -> None:
        """Wait, and say that all that is held is in good hands."""
        self.ask(self.store.watch(QUEUES, watchers=1, stale=STALE, now=self.machine.now))
        self.ask(self.store.unwatch(QUEUES))
        self.ask(self.store.refresh([*self.held, *self.unconfirmed], TTL, self.machine.now))

    def finish(self, tag: str) -> None:
        """Note that the job of *tag* has ended."""
        _, _, job = self.held.pop(tag)
        self.machine.finished[tag] = job
        self.unconfirmed[tag] = None

    def give_back(self, tag: str) -> bytes:
        """Return the packed call that gives *tag* back, if Redis still says that it is held."""
        reply = self.ask(
            calls.command(calls.pack("HGET", self.machine.keys.holder(self.name), tag))
        )
        return self.store.restore([(tag, reply)]) if reply else b""


class Broken(RuleBasedStateMachine):
    """A broker, its workers, and a network that is at fault."""

    may_stop = False
    sources: tuple[SourceKeys, ...] = (source("a"), source("b", 2))

    def __init__(self, client: redis.Redis, caller: Caller) -> None:
        super().__init__()
        client.flushall()
        self.client = client
        self.caller = caller
        self.keys = calls.Keys()
        self.now = NOW
        self.jobs = 0
        self.names = 0
        self.late: list[bytes] = []
        self.fates: list[Fate] = []
        # Tags that a worker said are done, with the job; and the jobs for which Redis confirmed it in time.
        self.finished: dict[str, str] = {}
        self.done: set[str] = set()
        self.members = [self.hire(), self.hire()]

    def hire(self) -> Member:
        self.names += 1
        return Member(self, f"worker-{self.names}")

    def next_fate(self) -> Fate:
        return self.fates.pop() if self.fates else Fate.FINE

    def confirmed(self, tag: str, lost: Any) -> None:
        if tag not in lost:
            self.done.add(self.finished[tag])

    def make(self, packed: bytes, member: Member) -> Any:  # for those who break calls
        return self.caller(packed)

    # -- steps --------------------------------------------------------------------------------------------------

    @rule(
        queue=st.sampled_from(QUEUES), step=st.sampled_from([0, 0, 1, 5]), count=st.integers(1, 5)
    )
    def push(self, queue: str, step: int, count: int) -> None:
        for _ in range(count):
            self.jobs += 1
            push(self.client, self.keys.inbox(queue, step), self.publish(queue))

    def publish(self, queue: str) -> bytes:
        """Return the message of the next job."""
        return message(f"job-{self.jobs}", queue=queue)

    def attempt(
        self, member: Member, action: Callable[[], object], some: list[Fate], rough: bool
    ) -> None:
        try:
            if not member.joined:
                self.fates = some if rough else []
                member.join()
            self.fates = some
            action()
        except Gone:
            pass
        self.fates = []

    @rule(
        who=st.integers(0, 1),
        n=st.integers(1, 9),
        data=st.data(),
        some=troubles,
        rough=st.booleans(),
    )
    def take(self, who: int, n: int, data: st.DataObject, some: list[Fate], rough: bool) -> None:
        member = self.members[who]
        held = sorted(member.held)
        acks = data.draw(
            st.lists(st.sampled_from(held), unique=True, max_size=4) if held else st.just([])
        )
        self.attempt(
            member, lambda: member.take(n, [tag for tag in acks if tag in member.held]), some, rough
        )

    def _held(self) -> bool:
        return any(member.held for member in self.members)

    @precondition(_held)
    @rule(
        data=st.data(),
        verbs=st.lists(
            st.sampled_from(["settle", "requeue", "give back", "set aside", "idle"]),
            min_size=1,
            max_size=3,
        ),
        some=troubles,
        rough=st.booleans(),
    )
    def say(self, data: st.DataObject, verbs: list[str], some: list[Fate], rough: bool) -> None:
        """Say what becomes of some messages, between signs of life."""
        member = data.draw(st.sampled_from([member for member in self.members if member.held]))
        for verb in verbs:
            if verb == "idle":
                self.attempt(member, member.idle, some, rough)
            elif member.held:
                self.decide(member, data.draw(st.sampled_from(sorted(member.held))), verb)
        self.attempt(member, member.say, some, rough)

    def decide(self, member: Member, tag: str, verb: str) -> None:
        if verb == "settle":
            member.finish(tag)
            return
        queue, step, _ = member.held.pop(tag)
        member.unconfirmed[tag] = {
            "requeue": lambda: member.store.requeue(tag, queue, step),
            "set aside": lambda: member.store.set_aside(tag, queue, "why"),
            "give back": lambda: member.give_back(tag),
        }[verb]

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A call arrives that its sender has given up."""
        packed = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        before = jobs_of(self.client)
        reply = self.caller(packed)
        if packed.find(scripts.TAKE.sha.encode()) >= 0 and reply[0]:
            # Its session goes on: the worker has not come back yet, and will give these back when it does.
            assert not any(
                member.joined for member in self.members if member.name.encode() in packed
            )
        assert jobs_of(self.client) <= before

    @rule(who=st.integers(0, 1))
    def die(self, who: int) -> None:
        """A worker is killed; what it held comes back when its time is over."""
        self.members[who] = self.hire()

    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        """Time passes; the living have refreshed what they hold, as far as they are connected."""
        alive = [member for member in self.members if member.joined or data.draw(st.booleans())]
        self.now += 100 * SECOND
        for member in alive:
            tags = [*member.held, *member.unconfirmed]
            self.caller(member.store.refresh(tags, TTL, self.now))
        self.sweep()

    def sweep(self) -> None:
        store = self.members[0].store
        limit, *tags = self.caller(store.expired(TIMEOUT, 1000, self.now))
        items = []
        for tag in tags:
            entry = self.client.hget(self.keys.holder(calls.worker_of(tag.decode())), tag)
            if entry is None:
                # The reader leaves these to Kombu's recovery; only a script that stopped halfway makes them.
                assert self.may_stop
            else:
                items.append((tag.decode(), entry))
        for start in range(0, len(items), calls.TAKE_LIMIT):
            part = items[start : start + calls.TAKE_LIMIT]
            self.caller(store.restore(part, limit=limit, started=True))

    # -- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def every_job_is_in_one_place_or_done(self) -> None:
        places = jobs_of(self.client)
        assert set(places.values()) <= {1}
        for number in range(1, self.jobs + 1):
            job = f"job-{number}"
            if job not in places:
                assert job in self.finished.values()
            else:
                assert job not in self.done

    @invariant()
    def records_are_whole(self) -> None:
        records = self.client.hkeys("unacked")
        assert set(records) == set(self.client.zrange("unacked_index", 0, -1))
        held: set[bytes] = set()
        for key in self.client.scan_iter("strategies:holder:*"):
            held |= {tag for tag in self.client.hkeys(key) if tag}
        assert held == set(records)

    def teardown(self) -> None:
        """The network is mended: everybody comes back, and all that is left can be run and done."""
        self.fates = []
        for packed in self.late:
            self.caller(packed)
        for member in self.members:
            member.join()
            assert not member.unconfirmed
            for tag in list(member.held):
                member.finish(tag)
            member.say()
        self.now += 100 * SECOND
        self.sweep()
        last = self.hire()
        last.join()
        before = -1
        while before != len(last.held):
            before = len(last.held)
            last.take(64, [])
        for tag in list(last.held):
            last.finish(tag)
        last.say()
        aside = {
            job_of(fields[b"message"])
            for queue in QUEUES
            for _, fields in self.client.xrange(self.keys.set_aside(queue))
        }
        assert {*self.finished.values()} | aside == {f"job-{n}" for n in range(1, self.jobs + 1)}
        left = {job_of(raw) for raw in everywhere(self.client)}
        assert left == aside
        assert not self.client.exists("unacked", "unacked_index")


def _run(machine: Callable[[], RuleBasedStateMachine], examples: int = 150) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)  # a failure is shrunk first
def test_calls_that_are_lost_unheard_or_late(redis_db: redis.Redis, caller: Caller) -> None:
    _run(lambda: Broken(redis_db, caller))


class Halfway(Broken):
    """Scripts that stop in the middle: then a job may be in two places, but never in none."""

    may_stop = True
    stop_at = 0

    def make(self, packed: bytes, member: Member) -> Any:
        at, self.stop_at = self.stop_at, 0
        if not at or split(packed)[0] != b"EVALSHA":
            return self.caller(packed)
        try:
            return self.client.execute_command(*failing(packed, at))
        except redis.ResponseError as error:
            if "injected" not in str(error):
                raise
            member.joined = False
            raise Gone from error

    @rule(at=st.integers(1, 25))
    def stop(self, at: int) -> None:
        self.stop_at = at

    @invariant()
    def every_job_is_in_one_place_or_done(self) -> None:
        places = jobs_of(self.client)
        for number in range(1, self.jobs + 1):
            assert f"job-{number}" in places or f"job-{number}" in self.finished.values()

    @invariant()
    def records_are_whole(self) -> None:
        """Nothing to say: a script that stopped between two writes leaves half of what it wrote."""

    def teardown(self) -> None:
        self.stop_at = 0
        self.every_job_is_in_one_place_or_done()
        for member in self.members:
            member.join()
            assert member.joined


@pytest.mark.timeout(600)  # a failure is shrunk first
def test_scripts_that_stop_halfway(redis_db: redis.Redis, caller: Caller) -> None:
    _run(lambda: Halfway(redis_db, caller))
