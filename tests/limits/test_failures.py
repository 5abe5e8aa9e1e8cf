"""Any call may fail halfway and any worker may die: never too many jobs, never out of order, none lost.

The workers here keep the books as the reader does: what failed is said again, and what a dead worker held is put back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_strategies.store import store as calls
from celery_strategies.store.store import HAS_PERMIT, IN_LINE, NOT_HELD, Answer, Ask, Place
from tests.store.tools import TTL, Caller, failing, in_line_message, job_of, keyspace

from .tools import KEYS, Worker, adopt, hire, nothing_is_left, permits, publish, source

ASKS = {"one": Ask("t:one", 1, 300_000), "two": Ask("t:two", 2, 300_000)}
SORTED = re.compile(r":(?:jobs|front):\d:")


class Injected(Exception):  # noqa: N818  # no error of the test
    """A call failed halfway."""


def raws(client: redis.Redis) -> Iterator[bytes]:
    """Yield the raw messages, once for each place."""
    for key, value in keyspace(client).items():
        if key == KEYS.unacked:
            yield from (text[1:].rpartition(b',"",')[0] for text in value.values())
        elif SORTED.search(key) or key.endswith(":returned"):
            yield from (element.split(b":", 3)[3] for element in value)
        elif key.endswith(":in_line"):
            yield from map(in_line_message, value)
        elif isinstance(value, list):
            yield from value


class Member:
    """One worker: what it holds and has not asked for, what it runs, and what it has to say again."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.held: dict[str, str] = {}
        self.running: dict[str, str] = {}
        self.acked: set[str] = set()
        self.unsaid: dict[str, Callable[[], bytes]] = {}

    def number(self, client: redis.Redis, tag: str) -> str:
        """Return the number of a held message."""
        return str(Place.parse(self.worker.entry(tag, client)).number)


class Machine(RuleBasedStateMachine):
    """A broker with a plain and a sorted queue, two limits, and workers."""

    faults = False

    def __init__(self, client: redis.Redis, caller: Caller) -> None:
        super().__init__()
        client.flushall()
        self.client = client
        self.caller = caller
        self.names = self.jobs = 0
        self.failed = False
        #: Job to the limit that it is under; jobs that have ended; how often each was started.
        self.limit: dict[str, str] = {}
        self.done: set[str] = set()
        self.starts: Counter[str] = Counter()
        self.finished: list[tuple[Member, str]] = []
        adopt(caller, "s")
        self.members = [self.hire(), self.hire()]

    def hire(self) -> Member:
        self.names += 1
        sources = source("q"), source("s", by_key=True)
        return Member(hire(self.caller, f"w{self.names}", *sources))

    # -- calls ---------------------------------------------------------------------------------

    def call(self, packed: bytes, fail_at: int = 0, mine: str = "") -> Any:
        """Make a call that may fail at its so-manieth Redis call, and look at the lines before and after."""
        before = {name: self.line(name) for name in ASKS}
        reply = None
        try:
            if fail_at and self.faults:
                reply = self.client.execute_command(*failing(packed, fail_at))
            else:
                reply = self.caller(packed)
        except redis.ResponseError as error:
            if "injected" not in str(error):
                raise
            self.failed = True
            raise Injected from None
        finally:
            for name, line in before.items():
                now = self.line(name)
                gone = [number for number in line if number not in now and number != mine]
                kept = [number for number in line if number != mine]
                assert gone == kept[: len(gone)], f"out of order: {line} became {now}"
        return reply

    def line(self, name: str) -> list[str]:
        members: Any = self.client.zrange(KEYS.line(ASKS[name].limit), 0, -1)
        return [member.partition(b",")[0].decode() for member in members]

    def say(self, member: Member, tag: str, pack: Callable[[], bytes], fail_at: int = 0) -> None:
        """Say what became of *tag*; what fails is said again later."""
        member.unsaid[tag] = pack
        packed = pack()
        if packed:
            try:
                self.call(packed, fail_at)
            except Injected:
                return
        del member.unsaid[tag]

    # -- steps ---------------------------------------------------------------------------------

    @rule(
        queue=st.sampled_from("qs"),
        limit=st.sampled_from([*ASKS]),
        count=st.integers(1, 3),
        step=st.sampled_from([0, 3]),
        key=st.sampled_from("ab"),
    )
    def publish(self, queue: str, limit: str, count: int, step: int, key: str) -> None:
        names = [f"{limit}-{self.jobs + n}" for n in range(count)]
        self.jobs += count
        self.limit.update(dict.fromkeys(names, limit))
        publish(self.client, queue, names, step, fair_key=key)

    @rule(data=st.data(), n=st.integers(1, 4))
    def take(self, data: st.DataObject, n: int) -> None:
        member = data.draw(st.sampled_from(self.members))
        for delivery in member.worker.grab(n):
            member.held[delivery.tag] = job_of(delivery.raw)

    @precondition(lambda self: any(member.held for member in self.members))
    @rule(data=st.data(), fail_at=st.integers(0, 40))
    def ask(self, data: st.DataObject, fail_at: int) -> None:
        member = data.draw(st.sampled_from([m for m in self.members if m.held]))
        self._ask(member, data.draw(st.sampled_from(sorted(member.held))), fail_at)

    def _ask(self, member: Member, tag: str, fail_at: int = 0) -> None:
        job = member.held[tag]
        place = self.client.hget(KEYS.holder(member.worker.name), tag)
        number = str(Place.parse(place).number) if place else ""
        packed = member.worker.store.acquire(tag, ASKS[self.limit[job]], TTL)
        try:
            answer = Answer.parse(self.call(packed, fail_at, number))
        except Injected:
            return
        del member.held[tag]
        if answer.state == HAS_PERMIT:
            member.running[tag] = job
            self.starts[job] += 1
        else:
            assert answer.state == IN_LINE or (answer.state == NOT_HELD and self.failed)

    @precondition(lambda self: any(member.running for member in self.members))
    @rule(data=st.data(), fail_at=st.integers(0, 40))
    def finish(self, data: st.DataObject, fail_at: int) -> None:
        member = data.draw(st.sampled_from([m for m in self.members if m.running]))
        self._finish(member, data.draw(st.sampled_from(sorted(member.running))), fail_at)

    def _finish(self, member: Member, tag: str, fail_at: int = 0) -> None:
        self.done.add(member.running.pop(tag))
        mark = calls.HAS_ENDED if tag in member.acked else calls.HAD_PERMIT
        self.finished.append((member, tag))
        self.say(member, tag, lambda: member.worker.store.settle([mark + tag]), fail_at)

    @precondition(lambda self: any(set(m.running) - m.acked for m in self.members))
    @rule(data=st.data())
    def acknowledge_early(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from([m for m in self.members if set(m.running) - m.acked]))
        tag = data.draw(st.sampled_from(sorted(set(member.running) - member.acked)))
        member.acked.add(tag)
        self.call(member.worker.store.settle([calls.STILL_RUNS + tag]))

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        member, tag = data.draw(st.sampled_from(self.finished))
        if tag not in member.unsaid:
            before = {name: permits(self.client, ask.limit) for name, ask in ASKS.items()}
            self.call(member.worker.store.settle([calls.HAD_PERMIT + tag]))
            assert before == {name: permits(self.client, ask.limit) for name, ask in ASKS.items()}

    @precondition(lambda self: any(self.on_hand(member) for member in self.members))
    @rule(data=st.data(), fail_at=st.integers(0, 40), requeue=st.booleans())
    def put_back(self, data: st.DataObject, fail_at: int, requeue: bool) -> None:
        member = data.draw(st.sampled_from([m for m in self.members if self.on_hand(m)]))
        tag = data.draw(st.sampled_from(self.on_hand(member)))
        # A worker rejects what it has started.
        requeue = requeue and tag in member.running
        member.held.pop(tag, None)
        member.running.pop(tag, None)
        store, holder = member.worker.store, KEYS.holder(member.worker.name)

        def back() -> bytes:
            place = self.client.hget(holder, tag)
            if place is None:
                return b""
            if requeue:
                parsed = Place.parse(place)
                return store.requeue(tag, parsed.queue, parsed.list)
            return store.restore([(tag, place)])

        # That restore may fail is tested elsewhere; its copies share a number.
        self.say(member, tag, back, fail_at if requeue else 0)

    def on_hand(self, member: Member) -> list[str]:
        return sorted({*member.held, *member.running} - member.acked)

    @rule(data=st.data(), lapse=st.booleans(), fail_at=st.integers(0, 60))
    def die(self, data: st.DataObject, lapse: bool, fail_at: int) -> None:
        """A worker is gone; what it had acknowledged is gone with it."""
        member = data.draw(st.sampled_from(self.members))
        self.members.remove(member)
        self.members.append(self.hire())
        self.done.update(job for tag, job in member.running.items() if tag in member.acked)
        self.finished = [(m, tag) for m, tag in self.finished if m is not member]
        if lapse:
            self.lapse()
        name, witness = member.worker.name, self.members[0].worker.store
        self.client.zadd(KEYS.alive, {name: 1})
        left = 1
        while left:
            with suppress(Injected):
                _, left, _ = self.call(witness.bury(name, 1), fail_at)
            fail_at = 0

    def lapse(self) -> None:
        """Have the permits expire that no living worker renews."""
        alive = set()
        for member in self.members:
            for tag in member.running:
                alive.add(member.number(self.client, tag))
        for ask in ASKS.values():
            old = [number for number in permits(self.client, ask.limit) if number not in alive]
            if old:
                self.client.zadd(KEYS.permits(ask.limit), dict.fromkeys(old, 1))
                self.client.zadd(KEYS.lines, {ask.limit: 1}, xx=True)

    @rule(lapse=st.booleans(), fail_at=st.integers(0, 60))
    def serve(self, lapse: bool, fail_at: int) -> None:
        if lapse:
            self.lapse()
        try:
            self.call(self.members[0].worker.store.serve(), fail_at)
        except Injected:
            self.call(self.members[0].worker.store.serve())

    @rule()
    def say_again(self) -> None:
        for member in self.members:
            for tag, pack in list(member.unsaid.items()):
                self.say(member, tag, pack)

    # -- what always holds ---------------------------------------------------------------------

    @invariant()
    def never_too_many(self) -> None:
        running: dict[str, set[str]] = {name: set() for name in ASKS}
        for member in self.members:
            for tag, job in member.running.items():
                running[self.limit[job]].add(job)
                mine = permits(self.client, ASKS[self.limit[job]].limit)
                # A call that failed halfway may leave two copies of a message, which share a permit.
                assert member.number(self.client, tag) in mine or self.starts[job] > 1
        for name, ask in ASKS.items():
            assert len(running[name]) <= ask.to
            assert len(permits(self.client, ask.limit)) <= ask.to

    @invariant()
    def nothing_is_lost(self) -> None:
        found = Counter(map(job_of, raws(self.client)))
        acked = {
            member.running[tag]
            for member in self.members
            for tag in member.acked & {*member.running}
        }
        assert {*self.limit} - self.done - acked <= {*found}
        if not self.failed:
            assert set(found.values()) <= {1}

    def teardown(self) -> None:
        """Run everything to its end: each job runs, once if nothing failed, and nothing is left."""
        self.faults = False
        for _ in range(30 + 3 * self.jobs):
            self.say_again()
            started = sum(self.starts.values())
            for member in self.members:
                for delivery in member.worker.grab(9):
                    member.held[delivery.tag] = job_of(delivery.raw)
                for tag in list(member.held):
                    self._ask(member, tag)
                for tag in list(member.running):
                    self._finish(member, tag)
            if sum(self.starts.values()) == started:
                self.lapse()
            self.call(self.members[0].worker.store.serve())
            if {*self.limit} <= self.done and not list(raws(self.client)):
                break
        else:
            raise AssertionError(f"jobs do not end: {keyspace(self.client)}")
        # A call that failed may leave a limit without a line among those to look at, until its time comes.
        for limit in self.client.zrange(KEYS.lines, 0, -1):
            self.client.zadd(KEYS.lines, {limit: 1})
        self.call(self.members[0].worker.store.serve())
        nothing_is_left(self.client)


@pytest.mark.parametrize("faults", [False, True])
def test_limits_hold(redis_db: redis.Redis, caller: Caller, faults: bool) -> None:
    machine = type("Machine", (Machine,), {"faults": faults})
    run_state_machine_as_test(
        lambda: machine(redis_db, caller),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
