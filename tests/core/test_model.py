"""The model of take and settle keeps its promises."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_strategies.core.levels import level_of_list
from celery_strategies.core.model import Model, Taken
from celery_strategies.core.policy import Policy
from celery_strategies.core.strategies import Strategy

QUEUES = "abcd"
SOURCES = st.lists(
    st.tuples(st.sampled_from(QUEUES), st.none() | st.integers(1, 10)),
    min_size=1,
    unique_by=lambda source: source[0],
)
STRATEGY = st.sampled_from(Strategy)
#: (queue, list) of each job, in push order; the job is its number.
PUSHES = st.lists(st.tuples(st.sampled_from(QUEUES), st.integers(0, 9)), max_size=40)
#: What happens after each push: slots offered, then what becomes of the jobs held.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(QUEUES), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["ack", "back", "requeue"]), st.integers(0, 5)),
    ),
    max_size=60,
)


def filled(strategy: Strategy, sources: list[tuple[str, int | None]], pushes: list) -> Model:
    model = Model(strategy, sources)
    for job, (queue, index) in enumerate(pushes):
        model.push(queue, job, index)
    return model


def test_results_name_queue_list_job_and_redelivery() -> None:
    model = Model(Strategy.PRIORITY, [("q", 3)])
    model.push("q", "x", 2)
    assert model.take() == [Taken("q", 2, "x", redelivered=False)]
    assert model.take() == []
    model.give_back("x")
    assert model.lengths() == {"q": 1}
    assert model.take() == [("q", 2, "x", True)]


def test_give_back_restores_the_order_of_first_take_over_several_rounds() -> None:
    model = Model(Strategy.PRIORITY, [("q", None)])
    for job in "abcd":
        model.push("q", job)
    model.take(3)
    model.give_back("c")
    model.give_back("a")
    assert [taken.job for taken in model.take(1)] == ["a"]
    model.give_back("b", "a", "a")
    assert [taken.job for taken in model.take(9)] == ["a", "b", "c", "d"]


def test_requeue_goes_to_the_tail_and_forgets_the_place() -> None:
    model = Model(Strategy.PRIORITY, [("q", None)])
    for job in "abc":
        model.push("q", job)
    model.take(1)
    model.requeue("a")
    assert [taken.job for taken in model.take(9)] == ["b", "c", "a"]
    model.give_back("a", "c", "b")
    assert [taken.job for taken in model.take(9)] == ["b", "c", "a"]


def test_an_acked_job_is_gone() -> None:
    model = Model(Strategy.PRIORITY, [("q", None)])
    model.push("q", "a")
    model.take()
    assert model.held == {"a"}
    model.ack("a")
    assert not model.held
    for settle in (model.ack, model.give_back, model.requeue):
        with pytest.raises(KeyError):
            settle("a")
    model.push("q", "a")  # the name is free again


def test_give_back_of_a_job_not_held_has_no_effect() -> None:
    model = Model(Strategy.PRIORITY, [("q", None)])
    model.push("q", "a")
    model.take()
    with pytest.raises(KeyError):
        model.give_back("a", "b")
    assert model.held == {"a"}
    assert model.lengths() == {"q": 0}


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Model(Strategy.PRIORITY, [("q", None), ("q", 3)])
    with pytest.raises(ValueError, match="1 to 10"):
        Model(Strategy.PRIORITY, [("q", 11)])
    model = Model(Strategy.PRIORITY, [("q", None)])
    model.push("q", "a")
    with pytest.raises(ValueError, match="already"):
        model.push("q", "a")
    with pytest.raises(ValueError, match="0 to 9"):
        model.push("q", "b", 10)


def test_a_queue_off_the_list_keeps_its_jobs() -> None:
    model = Model(Strategy.PRIORITY, [("a", None), ("b", None)])
    model.push("a", 1)
    model.set_sources([("b", None)])
    assert model.take() == []
    model.set_sources([("b", None), ("a", None)])
    assert [taken.job for taken in model.take()] == [1]


@given(STRATEGY, SOURCES, PUSHES, st.integers(1, 7))
def test_every_job_of_a_source_is_taken_once_in_the_same_order_for_any_batch(
    strategy: Strategy, sources: list, pushes: list, n: int
) -> None:
    single, batches = filled(strategy, sources, pushes), filled(strategy, sources, pushes)
    one = [taken for _ in pushes for taken in single.take()]
    many = [taken for _ in pushes for taken in batches.take(n)]
    assert one == many
    served = {queue for queue, _ in sources}
    expected = [job for job, (queue, _) in enumerate(pushes) if queue in served]
    assert sorted(taken.job for taken in one) == expected
    assert not any(single.lengths().values())


@given(STRATEGY, SOURCES, PUSHES)
def test_levels_are_strict_and_each_list_is_first_in_first_out(
    strategy: Strategy, sources: list, pushes: list
) -> None:
    taken = filled(strategy, sources, pushes).take(len(pushes))
    for queue, levels in sources:
        mine = [entry for entry in taken if entry.queue == queue]
        order = [(level_of_list(e.list_index, levels), e.list_index, e.job) for e in mine]
        assert order == sorted(order)


@given(STRATEGY, SOURCES, ACTIONS)
def test_no_job_is_lost_or_held_twice_whatever_happens(
    strategy: Strategy, sources: list, actions: list
) -> None:
    model = Model(strategy, sources)
    pushed, acked, held = Counter(), 0, []
    for number, (verb, *args) in enumerate(actions):
        if verb == "push":
            model.push(args[0], number, args[1])
            pushed[args[0]] += 1
        elif verb == "take":
            taken = model.take(args[0])
            assert len(taken) <= args[0]
            held += [entry.job for entry in taken]
            assert len(taken) == args[0] or not any(model.lengths().values())
        elif held:
            job = held.pop(args[0] % len(held))
            {"ack": model.ack, "back": model.give_back, "requeue": model.requeue}[verb](job)
            acked += verb == "ack"
        assert model.held == set(held)
        assert len(held) == len(model.held)
        served = sum(pushed[queue] for queue, _ in sources)
        assert sum(model.lengths().values()) + len(held) + acked == served


@given(STRATEGY, SOURCES, PUSHES, st.data())
def test_what_is_given_back_is_taken_again_in_the_same_order_within_a_source(
    strategy: Strategy, sources: list, pushes: list, data: st.DataObject
) -> None:
    model = filled(strategy, sources, pushes)
    taken = model.take(data.draw(st.integers(0, len(pushes))))
    model.give_back(*data.draw(st.permutations([entry.job for entry in taken])))
    again = model.take(len(pushes))
    for queue, _ in sources:
        first = [entry.job for entry in taken if entry.queue == queue]
        second = [entry.job for entry in again if entry.queue == queue]
        assert second[: len(first)] == first
    assert {entry.job for entry in again if entry.redelivered} == {entry.job for entry in taken}


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
)
def test_between_two_turns_of_a_source_no_other_yields_twice(
    counts: list[int], batches: list[int]
) -> None:
    queues = QUEUES[: len(counts)]
    model = Model(Strategy.ROUND_ROBIN, [(queue, None) for queue in queues])
    for queue, count in zip(queues, counts, strict=True):
        for number in range(count):
            model.push(queue, (queue, number))
    order = [entry.queue for n in batches for entry in model.take(n)]
    # While no source is empty, the order is the list over and over.
    full = min(counts) * len(queues)
    assert "".join(order)[:full] == (queues * min(counts))[: len(order)]


@given(SOURCES, st.lists(SOURCES, max_size=5))
def test_round_robin_starves_nobody_while_the_list_changes(first: list, later: list) -> None:
    model = Model(Strategy.ROUND_ROBIN, first)
    for queue in QUEUES:
        for number in range(60):
            model.push(queue, (queue, number))
    for sources in later:
        model.set_sources(sources)
        queues = [queue for queue, _ in sources]
        turn = model.turn
        order = [entry.queue for entry in model.take(len(queues))]
        assert order == queues[turn:] + queues[:turn]


# -- queues with a policy ------------------------------------------------------------------------

SHARED = Policy("fair", False, "fair_key", "fair_weight")
GROUPS = Policy("age", True, "group_key", "")
POLICIES = st.builds(
    Policy,
    st.sampled_from(["fair", "batch", "age", "turn"]),
    st.booleans(),
    st.just("k"),
    st.just("w"),
)
KEYED_SOURCES = st.lists(
    st.tuples(
        st.sampled_from(QUEUES), st.none() | st.integers(1, 10), st.one_of(st.none(), POLICIES)
    ),
    min_size=1,
    unique_by=lambda source: source[0],
)
KEYED_ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.sampled_from(QUEUES),
            st.integers(0, 9),
            st.sampled_from(["", "k", "l"]),
            st.floats(0.1, 10),
        ),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["start", "end"]), st.integers(0, 5)),
        st.tuples(
            st.just("settle"),
            st.sampled_from(["ack", "give_back", "requeue"]),
            st.integers(0, 5),
        ),
        st.tuples(st.just("cap"), st.sampled_from(QUEUES), st.none() | st.integers(1, 3)),
    ),
    max_size=60,
)


def keyed(policy: Policy = SHARED, levels: int | None = None) -> Model:
    return Model(Strategy.PRIORITY, [("q", levels, policy)])


def drawn(model: Model, n: int = 9) -> list:
    return [taken.job for taken in model.take(n)]


def test_a_policy_belongs_to_the_queue_and_stays() -> None:
    model = keyed()
    for job, key in ((1, "a"), (2, "a"), (3, "b"), (4, "b")):
        model.push("q", job, key=key)
    assert drawn(model, 1) == [1]
    with pytest.raises(ValueError, match="another policy"):
        model.set_sources([("other", None), ("q", None, GROUPS)])
    assert model.lengths() == {"q": 3}
    model.set_sources([("q", None)])
    assert drawn(model, 2) == [3, 2]
    model.set_sources([("q", 3, SHARED)])
    assert drawn(model) == [4]


def test_what_waited_before_there_was_a_policy_is_sorted_and_what_was_taken_goes_first() -> None:
    model = Model(Strategy.PRIORITY, [("q", None)])
    for job in range(6):
        model.push("q", job, key="ab"[job // 3])
    assert drawn(model, 3) == [0, 1, 2]
    model.give_back(1)
    model.set_sources([("q", None, SHARED)])
    assert model.lengths() == {"q": 4}
    model.give_back(0)
    model.requeue(2)
    assert drawn(model) == [0, 1, 3, 2, 4, 5]
    model.give_back(1, 0)
    assert drawn(model) == [0, 1]


def test_new_jobs_are_sorted_list_by_list_when_they_are_first_looked_for() -> None:
    model = keyed(levels=2)
    for index in (9, 3, 1, 0):
        model.push("q", index, index, key="a")
    assert model.lengths() == {"q": 4}
    assert drawn(model, 2) == [0, 1]
    model.push("q", "later", 1, key="a")
    assert drawn(model) == [3, 9, "later"]


def test_in_flight_ends_with_the_task_and_not_with_an_early_acknowledgement() -> None:
    model = keyed(GROUPS)
    for job in "abc":
        model.push("q", job, key="group")
    assert model.take(2) == [Taken("q", 0, "a", redelivered=False)]
    assert model.lengths() == {"q": 0}
    model.ack("a", running=True)
    assert (model.held, model.running) == (set(), {"a"})
    assert drawn(model) == []
    with pytest.raises(ValueError, match="already"):
        model.push("q", "a")
    for settle in (model.ack, model.give_back, model.requeue):
        with pytest.raises(KeyError):
            settle("a")
    model.end("a")
    assert not model.running
    with pytest.raises(KeyError):
        model.end("a")
    assert drawn(model) == ["b"]
    with pytest.raises(KeyError):
        model.end("b")
    model.requeue("b")
    assert drawn(model) == ["c"]
    model.ack("c")
    assert model.take() == [Taken("q", 0, "b", redelivered=True)]


def test_weights_and_caps_are_of_queues_with_a_policy() -> None:
    model = Model(Strategy.PRIORITY, [("plain", None), ("q", None, SHARED)])
    for queue in ("plain", "unknown"):
        with pytest.raises(ValueError, match="has no policy"):
            model.set_weight(queue, "a", 3)
        with pytest.raises(ValueError, match="has no policy"):
            model.set_cap(queue, "a", 3)
    with pytest.raises(ValueError, match="weight"):
        model.push("q", 1, weight=0)
    model.push("q", 1)  # what was refused left nothing behind
    assert drawn(model) == [1]


class Desk:
    """Do what happens to a model, and know better where every job is."""

    def __init__(self, model: Model, sources: list) -> None:
        self.model = model
        self.policies = {queue: policy for queue, _, policy in sources if policy}
        self.caps: dict[str, int | None] = {}
        #: Where each job is: queue and key.
        self.all: dict[int, tuple[str, str]] = {}
        self.held: dict[int, tuple[str, str]] = {}
        self.running: dict[int, tuple[str, str]] = {}
        self.done = 0

    def push(self, queue: str, index: int, key: str, weight: float) -> None:
        job = len(self.all)
        self.all[job] = (queue, key)
        self.model.push(queue, job, index, key, weight)

    def take(self, n: int) -> None:
        taken = self.model.take(n)
        assert len(taken) == n or not any(self.model.lengths().values())
        for entry in taken:
            assert entry.job not in self.held
            assert self.all[entry.job][0] == entry.queue
            self.held[entry.job] = self.all[entry.job]
        for queue, key in {self.all[entry.job] for entry in taken}:
            flying = [*self.held.values(), *self.running.values()].count((queue, key))
            if key and queue in self.policies:
                single = self.policies[queue].single
                assert flying <= (1 if single else self.caps.get(queue) or flying)

    def cap(self, queue: str, cap: int | None) -> None:
        if queue in self.policies:
            self.caps[queue] = cap
            self.model.set_cap(queue, "*", cap)

    def _some(self, jobs: dict[int, tuple[str, str]], index: int) -> int:
        return sorted(jobs)[index % len(jobs)]

    def start(self, index: int) -> None:
        if self.held:
            job = self._some(self.held, index)
            self.model.ack(job, running=True)
            self.running[job] = self.held.pop(job)

    def end(self, index: int) -> None:
        if self.running:
            job = self._some(self.running, index)
            self.model.end(job)
            del self.running[job]
            self.done += 1

    def settle(self, verb: str, index: int) -> None:
        if self.held:
            job = self._some(self.held, index)
            getattr(self.model, verb)(job)
            del self.held[job]
            self.done += verb == "ack"

    def check(self) -> None:
        assert self.model.held == set(self.held)
        assert self.model.running == set(self.running)
        waiting = 0
        for queue in self.model._queues.values():
            waiting += len(queue.returned) + sum(map(len, queue.lists))
            waiting += queue.keys.waiting if queue.keys else 0
        assert waiting + len(self.held) + len(self.running) + self.done == len(self.all)


@given(STRATEGY, KEYED_SOURCES, KEYED_ACTIONS)
def test_no_job_is_lost_held_twice_or_over_a_cap_whatever_happens(
    strategy: Strategy, sources: list, actions: list
) -> None:
    desk = Desk(Model(strategy, sources), sources)
    for verb, *args in actions:
        getattr(desk, verb)(*args)
        desk.check()
