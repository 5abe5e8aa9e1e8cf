"""What `simulate` says is what the scripts of a live worker do: 200 random configurations, replayed on Redis."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import redis

from celery_strategies.core.levels import level_of_list
from celery_strategies.core.model import SourceSpec
from celery_strategies.core.policy import Policy
from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy
from celery_strategies.simulation.engine import Arrival, Result, Setup, simulate
from tests.store.broker import RedisBroker
from tests.store.tools import Caller

HEADERS = ("fair_key", "fair_weight")
POLICIES = (
    None,
    None,
    Policy("fair", False, *HEADERS),
    Policy("fair", False, *HEADERS),
    Policy("batch", False, *HEADERS),
    Policy("age", False, *HEADERS),
    Policy("age", True, "group_key", ""),
    Policy("turn", True, "group_key", ""),
)
WEIGHTS = (0.1, 0.3, 0.5, 1, 1, 1, 2, 3, 10, 1e6)


def draw(seed: int) -> tuple[Setup, list[Arrival]]:
    """Return one worker and its jobs."""
    rng = random.Random(seed)
    names = rng.sample(["a", "b", "c d", 'e {"odd"}'], rng.randint(1, 4))
    bound = SourceList({name: rng.randint(-2, 3) for name in names if rng.random() < 0.5})
    levels = {name: rng.choice([None, None, 1, 2, 3, 10]) for name in names}
    for name in names:
        bound.bind(name, levels[name])
    policy = rng.choice(POLICIES)
    keys = ["", *rng.sample(["acme", "zed", "minnow", "ü", "long " * 20], rng.randint(1, 5))]
    caps: dict[str, int] = {}
    if policy and not policy.single and (policy.order == "age" or rng.random() < 0.4):
        caps = {key or "*": rng.randint(1, 3) for key in keys if rng.random() < 0.5}
    weights = {}
    if policy and policy.weight_header and rng.random() < 0.3:
        weights = {key: float(rng.choice(WEIGHTS)) for key in keys if key and rng.random() < 0.5}
    setup = Setup(
        strategy=rng.choice(list(Strategy)),
        sources=bound.ordered(),
        policy=policy,
        slots=rng.choice([1, 1, 2, 3, 8, 20]),
        read_ahead=rng.choice([0, 0, 0, 1, 5]),
        weights=weights,
        caps=caps,
        single=frozenset(name for name in names if rng.random() < 0.15),
        paused=frozenset(name for name in names if rng.random() < 0.1),
    )
    span = rng.choice([0, 1, 10, 30])
    return setup, [
        Arrival(
            number,
            rng.choice(names),
            # Few different times, so that much happens at once.
            at=rng.randint(0, span * 4) / 4,
            run=rng.choice([0, 0.25, 0.25, 0.5, 1, 3, rng.random()]),
            list=rng.choice([0, 0, 0, 1, 2, 5, 9]),
            key=rng.choice(keys) if rng.random() < 0.7 else keys[-1],
            weight=float(rng.choice(WEIGHTS)) if rng.random() < 0.5 else 1.0,
        )
        for number in range(1, rng.randint(0, 120) + 1)
    ]


class LiveBroker(RedisBroker):
    """A worker's calls on Redis, with queues that have a single active consumer, and some that it leaves alone."""

    def serve(self, setup: Setup) -> None:
        self.setup = setup
        self.set_sources((s.queue, s.levels, setup.policy) for s in setup.sources)
        skip = bytes(queue in setup.paused for queue in self.order)
        if any(skip):
            self.worker.take = partial(self.worker.take, skip=skip)  # type: ignore[method-assign]

    def set_sources(self, sources: Iterable[SourceSpec]) -> None:
        super().set_sources(sources)
        single = self.setup.single
        found = [replace(one, single=one.queue in single) for one in self.worker.sources]
        self.worker.read(*found)


def replay(result: Result, broker: LiveBroker) -> list[str]:
    """Give Redis what happened, step by step, and assert that each take gives the same jobs; returns them."""
    setup = result.setup
    broker.serve(setup)
    for source in setup.sources:
        for key, weight in setup.weights.items():
            broker.set_weight(source.queue, key, weight)
        for key, cap in setup.caps.items():
            broker.set_cap(source.queue, key, cap)
    order: list[str] = []
    for event in result.events:
        names = [f"job-{job.number}" for job in event.jobs]
        if event.what == "push":
            (job,) = event.jobs
            broker.push(job.queue, names[0], job.list, job.key, job.weight)
        elif event.what == "end":
            broker.ack(names[0])
        else:
            assert [taken.job for taken in broker.take(event.n)] == names
            order += names
    return order


@pytest.mark.parametrize("seed", range(200))
def test_simulate_is_the_order_of_a_live_worker(
    seed: int, redis_db: redis.Redis, caller: Caller
) -> None:
    setup, jobs = draw(seed)
    result = simulate(setup, jobs)
    broker = LiveBroker(redis_db, caller, setup.strategy)
    order = replay(result, broker)
    assert order == [f"job-{pick.job.number}" for pick in result.picks]
    # What neither is paused nor waits behind a key that nothing can free has run.
    assert {job.number for job in jobs if job.queue not in setup.paused} == set(result.ends)
    for pick in result.picks:
        source = next(s for s in setup.sources if s.queue == pick.job.queue)
        assert pick.level == level_of_list(pick.job.list, source.levels)
        assert pick.reasons
        assert all(text.strip() for _, text in pick.reasons)


def test_the_configurations_cover_what_there_is() -> None:
    drawn = [draw(seed) for seed in range(200)]
    setups = [setup for setup, _ in drawn]
    assert {setup.strategy for setup in setups} == set(Strategy)
    assert {setup.policy for setup in setups} == set(POLICIES)
    for name in ("weights", "caps", "single", "paused", "read_ahead"):
        assert sum(bool(getattr(setup, name)) for setup in setups) >= 15, name
    assert sum(len(setup.sources) > 1 for setup in setups) > 100
    assert sum(len(jobs) for _, jobs in drawn) > 10_000
