"""What keys get on a real Redis, as they come and go: the bound of fair queueing, and nobody starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_strategies.core.policy import Policy
from celery_strategies.store.store import SORT_LIMIT
from tests.store.sorted_scenarios import sorted_source
from tests.store.tools import Caller, Worker, job_of, message, push, tagged

POLICY = Policy("fair", False, "fair_key", "fair_weight")
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.3, "d": 10.0, "": 1.0, "e": 1 / 7}
#: Of sums of floats.
ROUNDING = 1e-9


@dataclass
class Shares:
    """What each key has waiting and has been given, and between which differences of each two it went."""

    waiting: Counter[str] = field(default_factory=Counter)
    #: What came while nobody looked, and waits from the next take on.
    new: Counter[str] = field(default_factory=Counter)
    given: Counter[str] = field(default_factory=Counter)
    seen: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    #: 1/w for each job given back since: it goes first, and its key enters anew behind it.
    free: Counter[str] = field(default_factory=Counter)
    most: float = 0.0

    def begin(self) -> None:
        """Start a take: what is new is sorted."""
        self.waiting += self.new
        self.new.clear()
        self._look()

    def give(self, key: str, again: bool) -> None:
        """Note that a key was given a job."""
        self.waiting[key] -= 1
        if not again:
            self.given[key] += 1
        self._look()

    def _look(self) -> None:
        for pair in combinations(WEIGHTS, 2):
            if not all(self.waiting[key] > 0 for key in pair):
                self.seen.pop(pair, None)
                continue
            one, other = (self.given[key] / WEIGHTS[key] for key in pair)
            differences = self.seen.setdefault(pair, [])
            differences.append(one - other)
            bound = sum((1 + self.free[key]) / WEIGHTS[key] for key in pair)
            apart = max(differences) - min(differences)
            assert apart <= bound + ROUNDING, (pair, differences)
            self.most = max(self.most, apart / bound)


pushes = st.tuples(st.just("push"), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 12))
takes = st.tuples(st.just("take"), st.integers(0, 1), st.sampled_from([1, 1, 1, 2, 5, 9]))
backs = st.tuples(st.just("back"), st.integers(0, 1), st.integers(0, 9))
RUNS = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Run:
    """Two workers on one sorted queue, beside what the shares should be."""

    def __init__(self, client: redis.Redis, caller: Caller) -> None:
        client.flushall()
        self.client = client
        self.workers = [Worker(caller, name, sorted_source("q")) for name in ("w", "x")]
        for worker in self.workers:
            worker.join()
        self.workers[0].adopt("q", POLICY)
        self.shares = Shares()
        self.keys: dict[str, str] = {}
        self.held: list[list[str]] = [[], []]
        self.tags: dict[str, str] = {}
        self.taken: set[str] = set()

    def push(self, key: str, count: int) -> None:
        for _ in range(count):
            name = f"{len(self.keys)}"
            self.keys[name] = key
            push(self.client, "q", message(name, **tagged(POLICY, key, WEIGHTS[key])))
        self.shares.new[key] += count

    def take(self, who: int, n: int) -> list[str]:
        """Take *n*, and have those held before settled; returns the keys."""
        worker = self.workers[who]
        tags = [self.tags[name] for name in self.held[who]]
        self.shares.begin()
        grant = worker.take(n, tags=tags)
        self.held[who] = [job_of(delivery.raw) for delivery in grant.deliveries]
        for delivery, name in zip(grant.deliveries, self.held[who], strict=True):
            self.tags[name] = delivery.tag
            self.shares.give(self.keys[name], name in self.taken)
            self.taken.add(name)
        return [self.keys[name] for name in self.held[who]]

    def back(self, who: int, index: int) -> None:
        """Give one job back."""
        if self.held[who]:
            name = self.held[who].pop(index % len(self.held[who]))
            self.workers[who].restore(self.client, self.tags[name])
            self.shares.free[self.keys[name]] += 1
            self.shares.waiting[self.keys[name]] += 1


@pytest.mark.timeout(600)  # a failure is shrunk first
@RUNS
@given(steps=st.lists(pushes | takes, min_size=10, max_size=120))
def test_two_keys_with_work_are_never_further_apart_than_a_job_each(
    steps: list, redis_db: redis.Redis, caller: Caller
) -> None:
    run = Run(redis_db, caller)
    for step, *arguments in steps:
        getattr(run, step)(*arguments)
    while run.take(0, 3):
        pass
    assert not +run.shares.waiting


@pytest.mark.timeout(600)  # a failure is shrunk first
@RUNS
@given(steps=st.lists(pushes | takes | backs, min_size=10, max_size=120))
def test_jobs_that_are_given_back_cost_their_key_a_turn_at_most(
    steps: list, redis_db: redis.Redis, caller: Caller
) -> None:
    run = Run(redis_db, caller)
    for step, *arguments in steps:
        getattr(run, step)(*arguments)
    run.take(1, 0)
    while run.take(0, 3):
        pass
    assert not +run.shares.waiting


def test_the_bound_is_not_far_from_what_happens(redis_db: redis.Redis, caller: Caller) -> None:
    # Were the measure itself too kind, all of the above would say nothing.
    run = Run(redis_db, caller)
    for key in WEIGHTS:
        run.push(key, 40)
    while run.take(0, 1):
        pass
    assert 0.5 < run.shares.most <= 1 + ROUNDING


@pytest.mark.parametrize("n", [1, 8])
def test_minnows_do_not_wait_behind_a_whale(n: int, redis_db: redis.Redis, caller: Caller) -> None:
    run = Run(redis_db, caller)
    worker = run.workers[0]
    whale = [message(f"w{number}", fair_key="whale") for number in range(10_000)]
    for start in range(0, len(whale), 1000):
        redis_db.lpush("q", *whale[start : start + 1000])
    for number in range(20):
        push(redis_db, "q", message(f"m{number}", fair_key=f"minnow-{number}"))
    worker.sort(worker.sources[0])
    assert redis_db.llen("q") == 0
    tags: list[str] = []

    def work(count: int) -> list[str]:
        nonlocal tags
        got: list[str] = []
        while len(got) < count:
            grant = worker.take(n, tags=tags)
            tags = [delivery.tag for delivery in grant.deliveries]
            got += [job_of(delivery.raw) for delivery in grant.deliveries]
        return got

    assert Counter(job[0] for job in work(24)) == {"m": 20, "w": 4}
    assert Counter(job[0] for job in work(80)) == {"w": 80}
    # Later ones are sorted by the take itself, and do not wait either.
    for number in range(5):
        push(redis_db, "q", message(f"n{number}", fair_key=f"later-{number}"))
    assert Counter(job[0] for job in work(8)) == {"n": 5, "w": 3}


def test_a_minnow_in_an_unsorted_backlog_comes_as_soon_as_it_is_sorted(
    redis_db: redis.Redis, caller: Caller
) -> None:
    run = Run(redis_db, caller)
    worker, sorter = run.workers
    redis_db.lpush("q", *(message(f"w{number}", fair_key="whale") for number in range(3000)))
    push(redis_db, "q", message("minnow", fair_key="minnow"))
    taken, tags, sorts = [], [], 0
    while "minnow" not in taken:
        grant = worker.take(1, tags=tags)
        taken += [job_of(delivery.raw) for delivery in grant.deliveries]
        tags = [delivery.tag for delivery in grant.deliveries]
        assert len(tags) == 1
        sorts += 1
        caller(sorter.store.sort(sorter.sources[0], sorter.now))
    # One of the next two takes after the last call finds it.
    assert sorts <= ceil(3000 / SORT_LIMIT) + 3
