"""The scripts serve the keys of a queue as the pure model does, step by step: the same jobs, tags, places and counts.

Two workers share the queue: one with the policy among its settings, one that has none and serves what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from celery_strategies.core.interleave import ANY_KEY, Interleave
from celery_strategies.core.model import SourceSpec
from celery_strategies.core.policy import Policy
from celery_strategies.core.strategies import Strategy
from celery_strategies.store import admin
from tests.store import sorted_state
from tests.store.broker import RedisBroker
from tests.store.tools import Caller, job_of

from .test_model import SECOND, TIMEOUT, WorkerModel, World

QUEUE, PLAIN = 'q {"odd"}:ż%', "plain"
LEVELS = 2
KEYS = ("", "a", "b", "c", '1:"{ż}%s')
WEIGHTS = (1.0, 3.0, 0.1, 1 / 3, 7.0, 1e-6, 1e6)
#: All sums of their inverses are exact, so that it does not matter when a level counts from zero again.
EXACT = (1.0, 2.0, 0.5, 4.0, 0.125)


@dataclass(frozen=True)
class Setup:
    """One way to run the machine."""

    policy: Policy
    strategy: Strategy = Strategy.PRIORITY
    rebase_at: float | None = None
    #: A sorter sorts before each take, and there is a plain source too; else each take sorts.
    sorter: bool = True

    @property
    def weights(self) -> tuple[float, ...]:
        return EXACT if self.rebase_at else WEIGHTS


FAIR = Policy("fair", False, "fair_key", "fair_weight")
BATCH = Policy("batch", False, "fair_key", "fair_weight")
CAPS = Policy("age", False, "tenant", "weight")
GROUPS = Policy("age", True, "group_key", "")
TURNS = Policy("turn", True, "group_key", "")
SETUPS = {
    "fair": Setup(FAIR),
    "fair, takes sort": Setup(FAIR, sorter=False),
    "fair, longest source": Setup(FAIR, Strategy.MAX_LEN),
    "fair, counting from zero again": Setup(FAIR, Strategy.ROUND_ROBIN, rebase_at=8.0),
    "batch": Setup(BATCH, Strategy.ROUND_ROBIN),
    "batch, takes sort": Setup(BATCH, sorter=False),
    "caps": Setup(CAPS, Strategy.MIN_LEN),
    "groups": Setup(GROUPS, Strategy.MAX_LEN),
    "groups, takes sort": Setup(GROUPS, sorter=False),
    "groups in turn": Setup(TURNS),
}


class KeysBesideRedis(RuleBasedStateMachine):
    """Every step is made on both sides."""

    def __init__(self, client: redis.Redis, caller: Caller, setup: Setup) -> None:
        super().__init__()
        client.flushall()
        self.client, self.caller, self.setup = client, caller, setup
        self.world = World()
        self.models = [WorkerModel(self.world, setup.strategy) for _ in range(2)]
        self.brokers = [
            RedisBroker(client, caller, setup.strategy, name=name, sort_first=setup.sorter)
            for name in ("w: {1}", "%w2")
        ]
        self.names = self.brokers[0].keys
        self.jobs = 0
        self.running: dict[str, int] = {}
        own: list[SourceSpec] = [(QUEUE, LEVELS, setup.policy)]
        others: list[SourceSpec] = [(QUEUE, LEVELS)]
        if setup.sorter:
            own.append((PLAIN, None))
            others.insert(0, (PLAIN, None))
        self.sources = (own, others)
        self.models[0].set_sources(own)
        self.models[1].set_sources(others)
        self.keys = self.fresh()
        self.adopt()

    def fresh(self) -> Interleave:
        """Let the model begin anew, with nothing waiting."""
        old = self.world.queues[QUEUE].keys
        policy = self.setup.policy
        keys = Interleave(policy.order, single=policy.single)
        if self.setup.rebase_at:
            keys.rebase_at = self.setup.rebase_at
        if old is not None:
            keys._weights, keys._caps, keys._flight = old._weights, old._caps, old._flight
            keys._seq = old._seq
        self.world.queues[QUEUE].keys = self.keys = keys
        return keys

    def adopt(self) -> None:
        for broker, sources in zip(self.brokers, self.sources, strict=True):
            broker.set_sources(sources)
            assert broker.policies[QUEUE] == self.setup.policy
        if self.setup.rebase_at:
            self.client.hset(self.names.policy(QUEUE), "rebase", self.setup.rebase_at)

    # -- steps ----------------------------------------------------------------------------------

    @rule(
        key=st.sampled_from(KEYS),
        number=st.integers(0, 6),
        level=st.sampled_from([0, 0, 1]),
        count=st.integers(1, 5),
    )
    def push(self, key: str, number: int, level: int, count: int) -> None:
        weights = self.setup.weights if self.setup.policy.weight_header else (1.0,)
        weight = weights[number % len(weights)]
        for _ in range(count):
            self.jobs += 1
            for side in (self.models[0], self.brokers[0]):
                side.push(QUEUE, f"job-{self.jobs}", level, key, weight)

    @precondition(lambda self: self.setup.sorter)
    @rule(count=st.integers(1, 4))
    def push_plain(self, count: int) -> None:
        for _ in range(count):
            self.jobs += 1
            for side in (self.models[0], self.brokers[0]):
                side.push(PLAIN, f"job-{self.jobs}")

    @rule(who=st.integers(0, 1), n=st.integers(1, 4) | st.sampled_from([0, 1, 9, 30]))
    def take(self, who: int, n: int) -> None:
        if self.setup.sorter and n > 0:
            self.models[who].sort()
        expected = [(taken.queue, taken.job) for taken in self.models[who].take(n)]
        got = [(taken.queue, taken.job) for taken in self.brokers[who].take(n)]
        assert got == expected

    @rule(who=st.integers(0, 1))
    def sort(self, who: int) -> None:
        self.models[who].sort()
        self.brokers[who].sort()

    def _anyone_holds(self) -> bool:
        return any(broker.tags for broker in self.brokers)

    def _some(self, data: st.DataObject, most: int = 9) -> tuple[int, list[str]]:
        who = data.draw(
            st.sampled_from([who for who in (0, 1) if self.brokers[who].tags]), label="who"
        )
        held = sorted(self.brokers[who].tags, key=lambda job: int(job[4:]))
        some = st.lists(st.sampled_from(held), min_size=1, max_size=most, unique=True)
        return who, data.draw(some, label="jobs")

    @precondition(_anyone_holds)
    @rule(data=st.data(), running=st.booleans())
    def ack(self, data: st.DataObject, running: bool) -> None:
        who, some = self._some(data)
        for job in some:
            early = running and self.brokers[who].tags[job].tag.endswith("k")
            self.models[who].ack(job, running=early)
            self.brokers[who].ack(job, running=early)
            if early:
                self.running[job] = who

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.running)))
        who = self.running.pop(job)
        self.models[who].end(job)
        self.brokers[who].end(job)

    @precondition(_anyone_holds)
    @rule(data=st.data(), started=st.booleans())
    def give_back(self, data: st.DataObject, started: bool) -> None:
        who, some = self._some(data)
        self.models[who].give_back(*some)
        self.brokers[who].give_back(*some, started=started)

    @precondition(_anyone_holds)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        who, (job,) = self._some(data, 1)
        self.models[who].requeue(job)
        self.brokers[who].requeue(job)

    @precondition(_anyone_holds)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """A worker stops refreshing what it holds; the other puts that back."""
        who, _ = self._some(data, 1)
        dead, keeper = self.brokers[who], self.brokers[1 - who]
        for broker in self.brokers:
            broker.worker.now += 100 * SECOND
        store, now = keeper.worker.store, keeper.worker.now
        own = [delivery.tag for delivery in keeper.tags.values()]
        self.caller(store.refresh(own, 60_000, now))
        limit, *expired = self.caller(store.expired(TIMEOUT, 1000, now))
        lost = {delivery.tag: job for job, delivery in dead.tags.items()}
        assert {tag.decode() for tag in expired} == lost.keys()
        items = [(tag, dead.worker.entry(tag, self.client)) for tag in lost]
        assert self.caller(store.restore(items, limit=limit, started=True)) == len(items)
        self.models[who].give_back(*lost.values())
        dead.tags.clear()
        # It lived after all: nothing that it says of those counts any more.
        assert self.caller(dead.worker.store.settle(list(lost))) == [tag.encode() for tag in lost]

    @rule(key=st.sampled_from(KEYS), number=st.none() | st.integers(0, 6))
    def set_weight(self, key: str, number: int | None) -> None:
        weights = self.setup.weights
        weight = None if number is None else weights[number % len(weights)]
        for side in (self.models[0], self.brokers[0]):
            side.set_weight(QUEUE, key, weight)

    @rule(key=st.sampled_from([key for key in KEYS if key]), cap=st.none() | st.integers(1, 3))
    def set_cap(self, key: str, cap: int | None) -> None:
        for side in (self.models[0], self.brokers[0]):
            side.set_cap(QUEUE, key, cap)

    def _safe_caps(self) -> list[int | None]:
        """Return the caps for every key that fill none that is not full: such a key leaves when it is next."""
        counts = [
            self.keys.in_flight(key)
            for key in KEYS
            if key and key not in self.keys._caps and not self.keys.is_full(key)
        ]
        return [None, *range(max(counts, default=0) + 1, 5)]

    @rule(data=st.data())
    def set_cap_of_all(self, data: st.DataObject) -> None:
        cap = data.draw(st.sampled_from(self._safe_caps()))
        # An own cap that ends may leave a key with this one.
        for side in (self.models[0], self.brokers[0]):
            side.set_cap(QUEUE, ANY_KEY, cap)

    @rule()
    def unsort(self) -> None:
        """Everything goes back to Kombu's lists, in the order in which it would run if nothing were full."""
        queue = self.world.queues[QUEUE]
        expected = {level: [e.job for e in queue.lists[level]] for level in range(LEVELS)}
        free = self.keys.copy()
        free.single, free._caps = False, {}
        full = {key for key in KEYS if self.keys.is_full(key)}
        for key in KEYS:
            free._look(key)
        taken = free.take(self.keys.waiting)
        entries = {job.job.job: job.job for job in taken}
        for job in reversed(taken):
            expected[job.level].insert(0, job.job.job)
        count = admin.unsort_queue(self.client, self.names, QUEUE)
        assert count == len(taken)
        assert not self.client.exists(self.names.policy(QUEUE), self.names.state(QUEUE))
        for level in range(LEVELS):
            raws = self.client.lrange(self.names.inbox(QUEUE, level), 0, -1)
            lying = [job_of(raw) for raw in reversed(raws)]
            assert sorted(lying) == sorted(expected[level])
            if not (full and self.setup.policy.order == "turn"):
                # In which of several full keys comes first in turn is left open.
                assert lying == expected[level]
            entries |= {entry.job: entry for entry in queue.lists[level]}
            queue.lists[level].clear()
            for job in lying:
                entries[job].place, entries[job].list_index = 0, level
                queue.lists[level].append(entries[job])
        self.fresh()
        self.adopt()

    @rule()
    def purge(self) -> None:
        waiting = {
            job.job.job
            for level in range(LEVELS)
            for key in KEYS
            for job in self.keys.jobs(key, level)
        }
        assert admin.purge_sorted(self.client, self.names, QUEUE) == len(waiting)
        self.world.known -= waiting
        self.fresh()

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        wrong = sorted_state.audit(self.client, self.names, QUEUE)
        assert not wrong, "\n".join(wrong)

    @invariant()
    def all_is_in_the_same_place_and_order(self) -> None:
        found = sorted_state.look(self.client, self.names, QUEUE)
        for level in range(LEVELS):
            raws = self.client.lrange(self.names.inbox(QUEUE, level), 0, -1)
            new = [entry.job for entry in self.world.queues[QUEUE].lists[level]]
            assert [job_of(raw) for raw in reversed(raws)] == new
            for key in KEYS:
                lying = [job_of(job.raw) for job in found.waiting((level, key))]
                assert lying == [job.job.job for job in self.keys.jobs(key, level)]
            self.the_tags_are_the_same(found, level)
        assert self.brokers[0].lengths() == self.models[0].lengths()

    def the_tags_are_the_same(self, found: sorted_state.Sorted, level: int) -> None:
        index = self.keys.index(level)
        assert {key for at, key in found.index if at == level} == index.keys()
        if self.setup.policy.order == "turn":
            # A model counts a turn also for a key that is full then; what counts is who is before whom.
            turns = {key: found.index[level, key][0].finish for key in index}
            assert sorted(index, key=turns.__getitem__) == sorted(
                index, key=lambda key: index[key].finish
            )
        if self.setup.policy.order != "fair":
            return
        past = 0.0
        if self.setup.rebase_at:
            past = self.keys.virtual_time(level) - found.state.get(f"v{level}", 0.0)
        else:
            assert found.state.get(f"v{level}", 0.0) == self.keys.virtual_time(level)
        for key, (finish, run) in index.items():
            (member,) = found.index[level, key]
            assert member.finish + past == finish
            told = found.tags.get((level, key))
            if self.setup.rebase_at or run is None:
                assert (told is None) == (run is None), (key, told, run)
            else:
                assert told is not None
                start, number, weight = told.split()
                assert (float(start), int(number), float(weight)) == tuple(run)

    @invariant()
    def the_same_is_held(self) -> None:
        held = 0
        for model, broker in zip(self.models, self.brokers, strict=True):
            assert broker.tags.keys() == model.held
            held += len(model.held)
        assert self.client.hlen("unacked") == self.client.zcard("unacked_index") == held


@pytest.mark.timeout(600)  # a failure is shrunk first
@pytest.mark.parametrize("name", SETUPS)
def test_the_scripts_follow_the_model(name: str, redis_db: redis.Redis, caller: Caller) -> None:
    run_state_machine_as_test(
        lambda: KeysBesideRedis(redis_db, caller, SETUPS[name]),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
