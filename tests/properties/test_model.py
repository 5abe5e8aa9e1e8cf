"""The scripts do to the jobs of a broker what the pure model does, step by step.

One difference is known: `requeue` marks the payload and starts the count of deliveries anew, which a
task sees as the same thing.
"""

from __future__ import annotations

from collections import deque
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

from celery_strategies.core.model import Model, Taken
from celery_strategies.core.strategies import Strategy
from celery_strategies.store import store as calls
from tests.store.broker import RedisBroker
from tests.store.tools import TTL, Caller, job_of

QUEUES = ("a", "b", 'c {"odd"}')
STEPS = range(10)
SECOND = 1_000_000
TIMEOUT = 50.0

levels = st.none() | st.integers(1, 4) | st.integers(1, 10)
steps = st.sampled_from([0, 0, 0, 1, 2, 3, 9]) | st.sampled_from(STEPS)
source_lists = st.permutations(QUEUES).flatmap(
    lambda order: st.integers(0, len(order)).flatmap(
        lambda count: st.tuples(*(st.tuples(st.just(queue), levels) for queue in order[:count]))
    )
)


class World:
    """What the models of all workers share."""

    def __init__(self) -> None:
        self.queues: dict[str, Any] = {}
        self.known: set[Any] = set()
        self.places = 0


class WorkerModel(Model):
    """One of several workers on one broker."""

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.world = world
        places = world.places
        super().__init__(strategy, [])
        world.places = places
        self._queues = world.queues
        self._known = world.known

    @property
    def _places(self) -> int:
        return self.world.places

    @_places.setter
    def _places(self, value: int) -> None:
        self.world.places = value


class ModelBesideRedis(RuleBasedStateMachine):
    """Two workers of one strategy; every step is made on both sides."""

    def __init__(self, client: redis.Redis, caller: Caller, strategy: Strategy) -> None:
        super().__init__()
        client.flushall()
        self.client = client
        self.world = World()
        self.models = [WorkerModel(self.world, strategy) for _ in range(2)]
        self.brokers = [RedisBroker(client, caller, strategy, name=name) for name in ("w", "x")]
        self.store = self.brokers[0].worker.store
        self.caller = caller
        self.jobs = 0
        self.requeued: set[str] = set()
        for who in (0, 1):
            self.read(who, [(queue, None) for queue in QUEUES])

    def read(self, who: int, sources: Any) -> None:
        for side in (self.models[who], self.brokers[who]):
            side.set_sources(sources)
        for queue in QUEUES:
            self.world.queues.setdefault(queue, type(self.models[0]._queues[QUEUES[0]])())

    @rule(who=st.integers(0, 1), sources=source_lists)
    def change_sources(self, who: int, sources: Any) -> None:
        self.read(who, sources)

    @rule(queue=st.sampled_from(QUEUES), step=steps, count=st.integers(1, 6))
    def push(self, queue: str, step: int, count: int) -> None:
        for _ in range(count):
            self.jobs += 1
            for side in (self.models[0], self.brokers[0]):
                side.push(queue, f"job-{self.jobs}", step)

    @rule(who=st.integers(0, 1), n=st.integers(1, 4) | st.sampled_from([0, 17, 64, 70]))
    def take(self, who: int, n: int) -> None:
        expected = self.models[who].take(n)
        got = self.brokers[who].take(n)
        assert got == expected
        assert all(isinstance(taken, Taken) for taken in got)

    def _some(self, data: st.DataObject, who: int, most: int = 9) -> list[str]:
        held = sorted(self.brokers[who].tags, key=lambda job: int(job[4:]))
        return data.draw(
            st.lists(st.sampled_from(held), min_size=1, max_size=most, unique=True), label="jobs"
        )

    def _anyone_holds(self) -> bool:
        return any(broker.tags for broker in self.brokers)

    def _holder(self, data: st.DataObject) -> int:
        return data.draw(
            st.sampled_from([who for who in (0, 1) if self.brokers[who].tags]), label="who"
        )

    @precondition(_anyone_holds)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        who = self._holder(data)
        for job in self._some(data, who):
            self.models[who].ack(job)
            self.brokers[who].ack(job)

    @precondition(_anyone_holds)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        who = self._holder(data)
        some = self._some(data, who)
        self.models[who].give_back(*some)
        self.brokers[who].give_back(*some)

    @precondition(_anyone_holds)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        who = self._holder(data)
        (job,) = self._some(data, who, 1)
        self.models[who].requeue(job)
        self.brokers[who].requeue(job)
        self.requeued.add(job)

    @precondition(_anyone_holds)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """A worker stops refreshing; the other keeps its own and restores the rest."""
        who = self._holder(data)
        dead, keeper = self.brokers[who], self.brokers[1 - who]
        for broker in self.brokers:
            broker.worker.now += 100 * SECOND
        now = keeper.worker.now
        own = [delivery.tag for delivery in keeper.tags.values()]
        assert self.caller(keeper.worker.store.refresh(own, TTL, now)) == len(own)
        lost = {delivery.tag: job for job, delivery in dead.tags.items()}
        limit, *expired = self.caller(keeper.worker.store.expired(TIMEOUT, 1000, now))
        assert {tag.decode() for tag in expired} == lost.keys()
        items = [(tag, dead.worker.entry(tag, self.client)) for tag in lost]
        for start in range(0, len(items), calls.TAKE_LIMIT):
            part = items[start : start + calls.TAKE_LIMIT]
            assert self.caller(keeper.worker.store.restore(part, limit=limit, started=True)) == len(
                part
            )
        self.models[who].give_back(*lost.values())
        dead.tags.clear()
        # It lived after all: nothing that it says of those counts any more.
        assert self.caller(dead.worker.store.settle(list(lost))) == [tag.encode() for tag in lost]

    @rule(queue=st.sampled_from(QUEUES))
    def unsort(self, queue: str) -> None:
        while self.caller(calls.unsort(self.brokers[0].keys, queue)) == calls.TAKE_LIMIT:
            pass
        waiting = self.world.queues[queue]
        for entry in sorted(waiting.returned, key=lambda entry: entry.place, reverse=True):
            # A message in Kombu's list has no place, and says no more than its payload.
            entry.place, entry.redelivered = 0, entry.job in self.requeued
            waiting.lists[entry.list_index].appendleft(entry)
        waiting.returned.clear()

    @invariant()
    def all_is_in_the_same_place_and_order(self) -> None:
        keys = self.brokers[0].keys
        pipe = self.client.pipeline(transaction=False)
        for queue in QUEUES:
            for inbox in keys.inboxes(queue):
                pipe.lrange(inbox, 0, -1)
            pipe.zrange(keys.returned(queue), 0, -1)
        replies = deque(pipe.execute())
        for queue in QUEUES:
            waiting = self.world.queues[queue]
            for step in STEPS:
                lying = [job_of(raw) for raw in reversed(replies.popleft())]
                assert lying == [entry.job for entry in waiting.lists[step]]
            members = [member.split(b":", 3) for member in replies.popleft()]
            back = sorted(waiting.returned, key=lambda entry: (entry.list_index, entry.place))
            assert [(int(step), job_of(raw)) for step, _, _, raw in members] == [
                (entry.list_index, entry.job) for entry in back
            ]

    @invariant()
    def the_same_is_held_and_counted(self) -> None:
        held = 0
        for model, broker in zip(self.models, self.brokers, strict=True):
            assert broker.tags.keys() == model.held
            assert broker.turn == model.turn
            held += len(model.held)
            assert self.client.hlen(broker.keys.holder(broker.worker.name)) == len(model.held) + 1
        assert self.brokers[0].lengths() == self.models[0].lengths()
        assert self.client.hlen("unacked") == self.client.zcard("unacked_index") == held


@pytest.mark.timeout(600)  # a failure is shrunk first
@pytest.mark.parametrize("strategy", Strategy, ids=lambda strategy: strategy.label)
def test_the_scripts_follow_the_model(
    strategy: Strategy, redis_db: redis.Redis, caller: Caller
) -> None:
    run_state_machine_as_test(
        lambda: ModelBesideRedis(redis_db, caller, strategy),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
