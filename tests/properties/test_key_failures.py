"""Sorted jobs, and any call lost, unheard, late or stopped in its middle: no job is lost, doubled or hidden.

Where a script was stopped a job may be doubled. Once all is drained, nothing may say that there is more.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from celery_strategies.core.policy import Policy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.store import HAS_ENDED, STILL_RUNS, SourceKeys
from tests.store import sorted_state
from tests.store.tools import Caller, everywhere, failing, job_of, keyspace, message, split, tagged

from .test_failures import QUEUES, Broken, Fate, Gone, Member, _run, jobs_of, troubles

KEYS = ("", "a", "b", "c")
WEIGHTS = (1.0, 3.0, 0.3)
POLICIES = {
    "fair": Policy("fair", False, "fair_key", "fair_weight"),
    "groups": Policy("age", True, "group_key", ""),
    "turns": Policy("turn", True, "group_key", ""),
    "batch": Policy("batch", False, "fair_key", "fair_weight"),
}
CAPS = {"a": 2, "*": 3}
MINUTE = 60


class KeyMember(Member):
    """A worker that acknowledges some of its jobs when they start."""

    def __init__(self, machine: Any, name: str) -> None:
        super().__init__(machine, name)
        self.running: set[str] = set()

    def known(self) -> set[str]:
        bare = {tag.lstrip(STILL_RUNS + HAS_ENDED) for tag in self.unconfirmed}
        return {*super().known(), *bare, *self.running}

    def start(self, tag: str) -> None:
        """Acknowledge a job that goes on."""
        _, _, job = self.held.pop(tag)
        self.machine.finished[tag] = job
        if tag.endswith("k"):
            self.running.add(tag)
            settle = STILL_RUNS + tag
            self.unconfirmed[settle] = lambda: self.store.settle([settle])
        else:
            self.unconfirmed[tag] = None

    def end(self, tag: str) -> None:
        """Note that the job of *tag*, which was acknowledged, has ended."""
        self.running.discard(tag)
        settle = HAS_ENDED + tag
        self.unconfirmed[settle] = lambda: self.store.settle([settle])


class BrokenKeys(Broken):
    """The queues are sorted, and what sorts, steers, delays and unsorts them is at fault as well."""

    sources = (
        SourceKeys("a", None, tuple(range(10)), True),
        SourceKeys("b", 2, tuple(range(10)), True),
    )

    def __init__(self, client: redis.Redis, caller: Caller, policy: Policy) -> None:
        self.policy = policy
        self.dead: set[str] = set()
        super().__init__(client, caller)
        self.adopt()

    def adopt(self) -> None:
        for queue in QUEUES:
            reply = self.caller(self.members[0].store.adopt(queue, self.policy, CAPS))
            assert reply[0] == 1
            # A level counts from zero again after a few jobs.
            self.client.hset(self.keys.policy(queue), "rebase", 4)

    def hire(self) -> KeyMember:
        self.names += 1
        return KeyMember(self, f"worker-{self.names}")

    def publish(self, queue: str) -> bytes:
        key, weight = KEYS[self.jobs * 7 % 5 % 4], WEIGHTS[self.jobs % 3]
        headers = tagged(self.policy, key, weight)
        if self.jobs % 11 == 0:
            headers["eta"] = "2023-11-14T22:13:30+00:00"
        return message(f"job-{self.jobs}", queue=queue, **headers)

    # -- steps ----------------------------------------------------------------------------------

    @rule(queue=st.sampled_from(QUEUES), step=st.sampled_from([0, 1, 5]), n=st.integers(1, 9))
    def push_and_take(self, queue: str, step: int, n: int) -> None:
        self.push(queue, step, 7)
        member = self.members[n % 2]
        self.attempt(member, lambda: member.take(n, []), [], False)

    def try_to(self, make: Callable[[], Any], some: list[Fate], who: int = 0) -> None:
        member = self.members[who]
        self.attempt(member, lambda: member.ask(make()), some, False)

    @rule(who=st.integers(0, 1), index=st.integers(0, 1), some=troubles)
    def sort(self, who: int, index: int, some: list[Fate]) -> None:
        self.try_to(lambda: self.members[who].store.sort(self.sources[index], self.now), some, who)

    @precondition(Broken._held)
    @rule(data=st.data(), some=troubles, rough=st.booleans())
    def start(self, data: st.DataObject, some: list[Fate], rough: bool) -> None:
        member = data.draw(st.sampled_from([member for member in self.members if member.held]))
        member.start(data.draw(st.sampled_from(sorted(member.held))))
        self.attempt(member, member.say, some, rough)

    @precondition(lambda self: any(member.running for member in self.members))
    @rule(data=st.data(), some=troubles, rough=st.booleans())
    def end(self, data: st.DataObject, some: list[Fate], rough: bool) -> None:
        member = data.draw(st.sampled_from([member for member in self.members if member.running]))
        member.end(data.draw(st.sampled_from(sorted(member.running))))
        self.attempt(member, member.say, some, rough)

    @precondition(Broken._held)
    @rule(data=st.data(), seconds=st.integers(-1, 200), some=troubles)
    def delay(self, data: st.DataObject, seconds: int, some: list[Fate]) -> None:
        member = data.draw(st.sampled_from([member for member in self.members if member.held]))
        tag = data.draw(st.sampled_from(sorted(member.held)))
        queue, _, _ = member.held.pop(tag)
        due = self.now / 1e6 + seconds
        member.unconfirmed[tag] = lambda: member.store.delay(tag, queue, due, limited=seconds > 99)
        self.attempt(member, member.say, some, False)

    @rule(queue=st.sampled_from(QUEUES), some=troubles, wait=st.booleans())
    def promote(self, queue: str, some: list[Fate], wait: bool) -> None:
        self.now += 10 * 1_000_000 * wait
        store = self.members[0].store
        self.try_to(lambda: store.promote(queue, 3, self.now), some)
        self.try_to(lambda: store.release(queue), some)

    @rule(
        queue=st.sampled_from(QUEUES),
        key=st.sampled_from(KEYS),
        weight=st.sampled_from(["", *map(repr, WEIGHTS)]),
        some=troubles,
    )
    def set_weight(self, queue: str, key: str, weight: str, some: list[Fate]) -> None:
        self.try_to(lambda: calls.steer(self.keys, queue, "weights", f"!k{key}", weight), some)

    @rule(
        queue=st.sampled_from(QUEUES),
        field=st.sampled_from(["", "!*", "!ka", "!kb"]),
        cap=st.sampled_from(["", "1", "2"]),
        some=troubles,
    )
    def set_cap(self, queue: str, field: str, cap: str, some: list[Fate]) -> None:
        self.try_to(lambda: calls.steer(self.keys, queue, "caps", field, cap), some)

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(1, 9), some=troubles)
    def unsort(self, queue: str, count: int, some: list[Fate]) -> None:
        """Give a part back to Kombu's lists; the policy may go with it, and comes back."""
        names = [self.keys.scratch, self.keys.policy(queue), self.keys.unsorted(queue)]
        self.try_to(lambda: calls.evalsha(scripts.GATHER, names, count), some)
        self.try_to(lambda: calls.unsort(self.keys, queue, count), some)
        self.adopt()

    @precondition(Broken._held)
    @rule(who=st.integers(0, 1))
    def die(self, who: int) -> None:
        self.dead.add(self.members[who].name)
        super().die(who)

    @precondition(lambda self: self.dead)
    @rule(some=troubles)
    def bury(self, some: list[Fate]) -> None:
        """Put back what a dead worker held, and what it had in flight."""
        for name in sorted(self.dead):
            self.client.zadd(self.keys.alive, {name: 5})
            self.try_to(lambda name=name: self.members[0].store.bury(name, 5), some)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        for queue in QUEUES:
            wrong = sorted_state.audit(self.client, self.keys, queue, lowered=True)
            assert not wrong, "\n".join(wrong)

    @invariant()
    def records_are_whole(self) -> None:
        records = set(self.client.hkeys("unacked"))
        assert records == set(self.client.zrange("unacked_index", 0, -1))
        held: set[bytes] = set()
        for key in self.client.scan_iter("strategies:holder:*"):
            held |= {tag for tag in self.client.hkeys(key) if tag}
        assert records <= held
        assert {tag.decode() for tag in held - records} <= self.finished.keys()

    def teardown(self) -> None:
        """All is mended and everybody comes back: everything can be run and done, and nothing is left."""
        self.fates = []
        for packed in self.late:
            self.caller(packed)
        for member in self.members:
            member.join()
            for tag in list(member.held):
                member.finish(tag)
            for tag in list(member.running):
                member.end(tag)
            member.say()
        self.now += 1000 * 1_000_000
        for name in sorted(self.dead):
            self.client.zadd(self.keys.alive, {name: 5})
            assert self.caller(self.members[0].store.bury(name, 5))[1] == 0
        self.sweep()
        self.adopt()
        last = self.hire()
        last.join()
        before: Any = None
        while before != self.jobs_seen(last):
            before = self.jobs_seen(last)
            for queue in QUEUES:
                self.caller(calls.unsort(self.keys, queue))
                self.caller(last.store.promote(queue, now=self.now))
            last.take(64, list(last.held))
        last.say()
        aside = {
            job_of(fields[b"message"])
            for queue in QUEUES
            for _, fields in self.client.xrange(self.keys.set_aside(queue))
        }
        jobs = {f"job-{n}" for n in range(1, self.jobs + 1)}
        assert {*self.finished.values()} | aside == jobs, keyspace(self.client)
        left = {job_of(raw) for raw in everywhere(self.client)}
        assert left == aside, keyspace(self.client)
        for queue in QUEUES:
            state = sorted_state.look(self.client, self.keys, queue)
            assert state == sorted_state.Sorted(policy=state.policy, caps=state.caps)

    def jobs_seen(self, last: Member) -> tuple[int, int]:
        return len(self.finished), len(last.held)


@pytest.mark.timeout(600)  # a failure is shrunk first
@pytest.mark.parametrize("name", POLICIES)
def test_calls_that_are_lost_unheard_or_late(
    name: str, redis_db: redis.Redis, caller: Caller
) -> None:
    _run(lambda: BrokenKeys(redis_db, caller, POLICIES[name]), examples=60)


class HalfwayKeys(BrokenKeys):
    """Scripts that stop in the middle: then a job may be in two places, but never in none."""

    may_stop = True
    random = Random(0)
    mended = False

    @initialize(seed=st.integers(0, 2**16))
    def start_over(self, seed: int) -> None:
        self.random = Random(seed)

    def make(self, packed: bytes, member: Member) -> Any:
        # Every second call is stopped at one of its own, if it makes that many.
        at = self.random.choice([0, self.random.randint(1, 70)])
        if self.mended or not at or split(packed)[0] != b"EVALSHA":
            return self.caller(packed)
        try:
            return self.client.execute_command(*failing(packed, at))
        except redis.ResponseError as error:
            if "injected" not in str(error):
                raise
            member.joined = False
            raise Gone from error

    @invariant()
    def every_job_is_in_one_place_or_done(self) -> None:
        places = jobs_of(self.client)
        for number in range(1, self.jobs + 1):
            assert f"job-{number}" in places or f"job-{number}" in self.finished.values()

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Nothing to say until all is drained: counters may be too high, and an index have too many."""

    @invariant()
    def records_are_whole(self) -> None:
        """Nothing to say: a script that stopped between two writes leaves half of what it wrote."""

    def teardown(self) -> None:
        self.mended = True
        self.every_job_is_in_one_place_or_done()
        super().teardown()


@pytest.mark.timeout(600)  # a failure is shrunk first
@pytest.mark.parametrize("name", POLICIES)
def test_scripts_that_stop_halfway(name: str, redis_db: redis.Redis, caller: Caller) -> None:
    _run(lambda: HalfwayKeys(redis_db, caller, POLICIES[name]), examples=60)
