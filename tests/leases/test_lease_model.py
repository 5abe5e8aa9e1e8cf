"""The model of a lease, and the scripts beside it, over every order of events."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from celery_strategies.core.lease import LATE, Lease, may_start
from celery_strategies.core.strategies import Strategy
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import Grant, SourceKeys, Store, TakePlan
from celery_strategies.transport import reader as reader_module
from celery_strategies.transport.reader import Reader
from celery_strategies.transport.settler import Held
from tests.store.tools import NOW, Caller, job_of, message, push

QUEUE = "q"
LEASE_TTL = 10_000
BEGIN = NOW // 1000
_KEYS = Keys()
NAMES = ("u", "v", "w")
workers = st.sampled_from(NAMES)


# -- by hand --------------------------------------------------------------------------------------------------


def test_a_lease_is_kept_by_asking_and_by_signs_of_life() -> None:
    lease = Lease(LEASE_TTL)
    assert lease.ask("u", BEGIN) == (BEGIN, None)
    assert lease.ask("v", BEGIN + 9000) == (-1000, None)
    assert lease.renew("u", BEGIN + 9000)
    assert not lease.renew("v", BEGIN + 9000)
    assert lease.ask("v", BEGIN + 18_000) == (-1000, None)
    assert lease.ask("u", BEGIN + 18_500) == (BEGIN, None)
    assert lease.until == BEGIN + 28_500


def test_one_that_ran_out_is_its_owners_for_a_moment() -> None:
    lease = Lease(LEASE_TTL)
    lease.ask("u", BEGIN)
    lease.took("u", "job")
    late = BEGIN + 60_000
    assert lease.ask("v", late) == (-LATE, None)
    assert lease.ask("w", late + 500) == (-1500, None)
    assert lease.renew("u", late + 600)
    assert lease.ask("v", late + LATE) == (-(LEASE_TTL - 1400), None)
    later = late + 60_000
    lease.ask("v", later)
    assert lease.ask("w", later + LATE) == (later + LATE, "job")
    assert not lease.renew("u", later + LATE)


def test_a_lease_is_released_after_its_job() -> None:
    lease = Lease(LEASE_TTL)
    lease.ask("u", BEGIN)
    lease.took("u", "job")
    assert lease.ask("u", BEGIN) == (0, None)
    assert not lease.release("u")
    lease.ended("job")
    assert lease.release("u")
    assert lease.release("v")
    assert lease.ask("v", BEGIN) == (BEGIN + 1, None)
    assert lease.buried("v") is None
    assert lease.holder is None


def test_half_a_lease_is_time_enough_to_start() -> None:
    assert may_start(100.0, 104.9, 10.0)
    assert not may_start(100.0, 105.0, 10.0)


def test_a_worker_times_a_start_from_before_its_take(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader("w", strategy=Strategy.PRIORITY, capacity=lambda: 1, stale_after=10.0)
    reader.held["w:1.1l"] = Held(QUEUE, 0, since=100.0)
    reader.held["w:1.2"] = Held(QUEUE, 0, since=0.0)
    for now, may in ((104.9, True), (105.0, False)):
        monkeypatch.setattr(reader_module, "boot_time", lambda: now)  # noqa: B023
        assert reader.may_start("w:1.1l") is may
        # Not taken under a lease, or not held any more: no business of this.
        assert reader.may_start("w:1.2")
        assert reader.may_start("w:1.3l")
    reader.waker.close()


# -- every order ----------------------------------------------------------------------------------------------


class Side:
    """One worker as the machine sees it: what it runs, and the last term it was told."""

    def __init__(self) -> None:
        self.job: str | None = None
        self.term = 0


class LeaseMachine(RuleBasedStateMachine):
    """Workers take, end, freeze, die and come back, in any order; the jobs are a row of numbers.

    What must hold: a job is taken by nobody else while its taker is the leader; terms only rise; whatever a former
    leader had is back before the next job is taken, so that the row has no gap and no swap.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lease = Lease(LEASE_TTL)
        self.now = BEGIN
        self.sides = {name: Side() for name in NAMES}
        self.waiting: list[int] = []
        self.published = 0
        #: Job numbers as they were taken.
        self.taken: list[tuple[int, int]] = []

    # -- what a side does; overridden where the scripts do it too ---------------------------------------------

    def take(self, name: str) -> tuple[int, int | None]:
        """Ask, and take; returns the term and the job."""
        answer = self.lease.ask(name, self.now)
        if answer.back is not None:
            self.waiting.insert(0, int(answer.back))
        job = None
        if answer.term > 0 and self.waiting:
            job = self.waiting.pop(0)
            self.lease.took(name, str(job))
        return answer.term, job

    def put(self, number: int) -> None:
        self.waiting.append(number)

    def settle(self, name: str, job: str) -> None:
        self.lease.ended(job)

    def beats(self, name: str) -> bool:
        return self.lease.renew(name, self.now)

    def leaves(self, name: str) -> bool:
        return self.lease.release(name)

    def dies(self, name: str) -> None:
        back = self.lease.buried(name)
        if back is not None:
            self.waiting.insert(0, int(back))

    # -- events ------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.put(self.published)
            self.published += 1

    @rule(milliseconds=st.sampled_from([1, 500, LATE, LEASE_TTL // 2, LEASE_TTL + 1]))
    def time_passes(self, milliseconds: int) -> None:
        self.now += milliseconds

    @rule(name=workers)
    def asks(self, name: str) -> None:
        side = self.sides[name]
        leader, busy = self.lease.holder, self.lease.job
        highest = max(s.term for s in self.sides.values())
        term, job = self.take(name)
        if term > 0:
            assert term >= highest
            assert term == side.term or term > highest
            side.term = term
        if job is not None:
            assert term > 0
            # Whoever took it before does not act in this term any more.
            assert not self.taken or self.taken[-1][1] <= term
            assert busy is None or leader != self.lease.holder
            self.taken.append((job, term))
            side.job = str(job)

    @rule(name=workers)
    def ends(self, name: str) -> None:
        side = self.sides[name]
        if side.job is not None:
            self.settle(name, side.job)
            side.job = None

    @rule(name=workers)
    def beat(self, name: str) -> None:
        assert self.beats(name) == (self.lease.holder == name)

    @rule(name=workers)
    def shuts_down(self, name: str) -> None:
        if self.sides[name].job is None:
            assert self.leaves(name)

    @rule(name=workers)
    def is_buried(self, name: str) -> None:
        self.dies(name)
        self.sides[name].job = None

    # -- what holds ---------------------------------------------------------------------------------------------

    @invariant()
    def row_has_no_gap_and_no_swap(self) -> None:
        numbers = [number for number, _ in self.taken]
        before = -1
        for number in numbers:
            # The next one, or once more the one that was in flight.
            assert number in (before, before + 1)
            before = number

    @invariant()
    def terms_only_rise(self) -> None:
        terms = [term for _, term in self.taken]
        assert terms == sorted(terms)

    def teardown(self) -> None:
        """Somebody always gets it in the end, and everything runs."""
        super().teardown()
        self.publish(1)
        for _ in range(4 * self.published + 10):
            self.now += LEASE_TTL
            self.asks("u")
            self.ends("u")
        assert self.taken[-1][0] == self.published - 1


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class LeaseMachineOnRedis(LeaseMachine):
    """The same, with the scripts doing all of it beside the model."""

    def __init__(self, client: redis.Redis, caller: Caller) -> None:
        super().__init__()
        client.flushall()
        self.client, self.caller = client, caller
        self.stores: dict[str, Store] = {}
        self.plans: dict[str, TakePlan] = {}
        self.sessions = dict.fromkeys(NAMES, 0)
        self.tags: dict[str, str] = {}
        for name in NAMES:
            store = Store(_KEYS, name)
            self.stores[name] = store
            source = SourceKeys(QUEUE, None, (0,), single=True)
            self.plans[name] = TakePlan(
                _KEYS, name, Strategy.PRIORITY, [source], lease_ttl=LEASE_TTL
            )
            self._join(name)

    def _join(self, name: str) -> None:
        self.sessions[name] += 1
        self.caller(self.stores[name].join(str(self.sessions[name]), 60_000))

    def take(self, name: str) -> tuple[int, int | None]:
        expected = super().take(name)
        packed = self.plans[name].call(str(self.sessions[name]), 3, now=self.now * 1000)
        grant = Grant.parse(self.caller(packed))
        ((_, term),) = grant.terms
        jobs = [int(job_of(delivery.raw)) for delivery in grant.deliveries]
        assert (term, jobs) == (expected[0], [expected[1]] if expected[1] is not None else [])
        if jobs:
            self.tags[name] = grant.deliveries[0].tag
        return expected

    def put(self, number: int) -> None:
        super().put(number)
        push(self.client, _KEYS.inbox(QUEUE, 0), message(str(number)))

    def settle(self, name: str, job: str) -> None:
        mine = self.lease.runner == name and self.lease.job == job
        if mine:
            super().settle(name, job)
        lost = self.caller(self.stores[name].settle([self.tags[name]]))
        assert bool(lost) is not mine

    def beats(self, name: str) -> bool:
        packed = self.stores[name].beat(
            [],
            1500,
            60_000,
            60_000,
            queues=[QUEUE],
            lease_ttl=LEASE_TTL,
            now=self.now * 1000,
        )
        self.caller(packed)
        leads = super().beats(name)
        if leads:
            assert self._lease()["until"] == str(self.now + LEASE_TTL)
        return leads

    def leaves(self, name: str) -> bool:
        self.caller(self.stores[name].step_down())
        return super().leaves(name)

    def dies(self, name: str) -> None:
        self.beats(name)
        super().dies(name)
        beat = int(self.client.zscore(_KEYS.alive, name))
        _, left, _ = self.caller(self.stores[name].bury(name, beat))
        assert left == 0
        self._join(name)

    def _lease(self) -> dict[str, str]:
        found: Any = self.client.hgetall(_KEYS.lease(QUEUE))
        return {field.decode(): value.decode() for field, value in found.items()}

    @invariant()
    def redis_agrees(self) -> None:
        found = self._lease()
        assert found.get("worker") == self.lease.holder
        assert int(found.get("term", 0)) == self.lease.term
        assert ("tag" in found) is (self.lease.job is not None)
        assert int(found.get("late", 0)) == self.lease.late
        free = bool(self.client.exists(_KEYS.free(QUEUE)))
        assert not (free and self.lease.holder)
        for name in NAMES:
            leads = self.lease.holder == name
            assert self.client.sismember(_KEYS.leases(name), _KEYS.base(QUEUE)) or not leads


def test_the_scripts_do_what_the_model_does(redis_db: redis.Redis, caller: Caller) -> None:
    run_state_machine_as_test(
        partial(LeaseMachineOnRedis, redis_db, caller),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
