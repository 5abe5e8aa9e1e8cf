"""The rule of the keys: shares, their bound, caps and groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_strategies.core.interleave import ANY_KEY, REBASE_AT, Entry, Interleave, Job, Run

KEYS = ("", "a", "b", "c")
ORDERS = ("fair", "batch", "age", "turn")
#: Whatever the weights, rounding stays far below one job of the heaviest key.
SLACK = 1e-9

keys = st.sampled_from(KEYS)
levels = st.sampled_from([0, 0, 0, 1])
orders = st.sampled_from(ORDERS)
weights = st.sampled_from([1.0, 1.0, 3.0, 7.0, 0.1, 10.0, 0.3]) | st.floats(0.01, 100)
dyadic = st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
rebases = st.sampled_from([0.5, 3.0, 10.0, REBASE_AT])


def operations(weight: st.SearchStrategy[float] = weights, *others: str) -> st.SearchStrategy:
    """Many pushes and takes, ends of what runs, and some of the ``others``."""
    some = {
        "restore": st.tuples(st.just("restore"), st.integers(0, 9), st.integers(1, 3)),
        "requeue": st.tuples(st.just("requeue"), st.integers(0, 9)),
        "cap": st.tuples(
            st.just("cap"), st.sampled_from(["a", "b", ANY_KEY]), st.none() | st.integers(1, 3)
        ),
        "weight": st.tuples(st.just("weight"), keys, st.none() | weight),
    }
    push = st.tuples(st.just("push"), keys, weight, levels, st.integers(1, 6))
    take = st.tuples(st.just("take"), st.integers(1, 12))
    end = st.tuples(st.just("end"), st.integers(0, 9))
    return st.lists(st.one_of(push, take, take, end, *(some[name] for name in others)), max_size=60)


class Player:
    """Play operations one small step at a time, and say after each what it was."""

    def __init__(self, interleave: Interleave, fixed: dict[str, float] | None = None) -> None:
        self.interleave = interleave
        #: The weights of all jobs of a key, where they do not differ from job to job.
        self.fixed = fixed
        self.flight: list[Job] = []
        #: Jobs that were taken before: the next take of one is free.
        self.known: set[int] = set()
        self.pushed = 0
        self.ended = 0
        self.order: list[int] = []

    def play(self, steps: list) -> Iterator[tuple[str, Job | None, set[str]]]:
        """Yield (verb, the job taken if one was, the keys whose tags were set anew)."""
        for verb, *arguments in steps:
            yield from getattr(self, verb)(*arguments)

    def push(self, key: str, weight: float, level: int, count: int) -> Iterator:
        for _ in range(count):
            self.pushed += 1
            own = self.fixed[key] if self.fixed else weight
            self.interleave.push(self.pushed, key, own, level)
            yield "push", None, set()

    def take(self, n: int) -> Iterator:
        self.interleave.begin()
        for _ in range(n):
            job = self.interleave.pop()
            if job is None:
                return
            self.flight.append(job)
            self.order.append(job.job)
            yield "free" if job.job in self.known else "paid", job, set()
            self.known.add(job.job)

    def _pick(self, index: int) -> Job:
        return self.flight.pop(index % len(self.flight))

    def end(self, index: int) -> Iterator:
        if self.flight:
            self.interleave.end(self._pick(index).job)
            self.ended += 1
            yield "end", None, set()

    def restore(self, index: int, count: int) -> Iterator:
        back = [self._pick(index) for _ in range(min(count, len(self.flight)))]
        self.interleave.restore(*(job.job for job in back))
        yield "restore", None, {job.key for job in back}

    def requeue(self, index: int) -> Iterator:
        if self.flight:
            job = self._pick(index)
            self.known.discard(job.job)
            self.interleave.requeue(job.job)
            yield "requeue", None, set()

    def cap(self, key: str, cap: int | None) -> Iterator:
        self.interleave.set_cap(key, cap)
        yield "cap", None, set()

    def weight(self, key: str, weight: float | None) -> Iterator:
        self.interleave.set_weight(key, weight)
        yield "weight", None, {key}

    def drain(self) -> Iterator:
        """Lift all caps, then take and end until nothing is left."""
        for key in (*KEYS[1:], ANY_KEY):
            yield from self.cap(key, None)
        while self.flight or self.interleave.waiting:
            yield from self.take(3)
            yield from self.end(0)


class Bound:
    """Watch, for each pair of keys of each level, how far the one gets ahead of the other.

    Over any interval in which both are in the index, and ``restart`` was called for neither, the
    paid jobs of i may get ahead of all jobs of j, each job counting 1/w, by 1/w of i's next job at
    the start plus 1/w of j's next job at the end.
    """

    def __init__(self, interleave: Interleave) -> None:
        self.interleave = interleave
        self.paid: dict[tuple[int, str], float] = defaultdict(float)
        self.all: dict[tuple[int, str], float] = defaultdict(float)
        self.least: dict[tuple[int, str, str], float] = {}
        self.intervals = 0

    def took(self, job: Job, *, free: bool) -> None:
        share = 1 / self.interleave.weight(job)
        self.all[job.level, job.key] += share
        if not free:
            self.paid[job.level, job.key] += share

    def restart(self, key: str) -> None:
        for pair in [pair for pair in self.least if key in pair[1:]]:
            del self.least[pair]

    def check(self) -> None:
        for level in (0, 1):
            present = self.interleave.index(level)
            for key in KEYS:
                if key not in present:
                    for pair in [p for p in self.least if p[0] == level and key in p[1:]]:
                        del self.least[pair]
            for i, j in permutations(present, 2):
                ahead = self.paid[level, i] - self.all[level, j]
                next_i, next_j = (
                    1 / self.interleave.weight(self.interleave.jobs(key, level)[0])
                    for key in (i, j)
                )
                start = self.least.get((level, i, j), inf)
                self.intervals += start < inf
                assert ahead - next_j <= start + SLACK * (1 + abs(ahead))
                self.least[level, i, j] = min(start, ahead + next_i)


def coherent(interleave: Interleave) -> None:
    """Check what holds of the state after every operation."""
    full = {key for key in KEYS if interleave.is_full(key)}
    runnable = 0
    for level in (0, 1):
        index, v = interleave.index(level), interleave.virtual_time(level)
        have = {key: interleave.jobs(key, level) for key in KEYS}
        assert set(index) == {key for key in KEYS if have[key] and key not in full}
        runnable += sum(len(have[key]) for key in index)
        for key, (finish, run) in index.items():
            assert [job.seq for job in have[key]] == sorted(job.seq for job in have[key])
            weight = interleave.weight(have[key][0])
            if interleave.order == "turn":
                assert run is None
                # A counter: fronts first, nobody's turn twice, and no turn that was not given.
                assert finish <= v
            elif interleave.order != "fair":
                assert (v, run) == (0, None)
            elif finish != v:
                assert v <= finish + SLACK * (1 + v)
                assert finish <= v + 1 / weight + SLACK * (1 + v)
            if run is not None:
                assert run.weight == weight
                assert finish == pytest.approx(run.start + run.n / run.weight, abs=SLACK)
    assert interleave.runnable == runnable
    assert interleave.runnable <= interleave.waiting


# -- shares --------------------------------------------------------------------------------------


@given(
    st.sampled_from(["fair", "turn"]),
    st.fixed_dictionaries(dict.fromkeys(KEYS, weights)),
    operations(weights, "restore", "requeue", "cap"),
    rebases,
)
def test_no_key_gets_ahead_of_another_by_more_than_one_job_of_each(
    order: str, fixed: dict, steps: list, rebase_at: float
) -> None:
    interleave = Interleave(order, rebase_at=rebase_at)
    player, bound = Player(interleave, fixed), Bound(interleave)
    for verb, job, _ in player.play(steps):
        if job is not None:
            bound.took(job, free=verb == "free")
        bound.check()
        coherent(interleave)


@given(operations(weights, "weight", "restore", "requeue", "cap"), rebases)
def test_the_bound_holds_for_sums_of_1_by_w_when_weights_differ(
    steps: list, rebase_at: float
) -> None:
    interleave = Interleave("fair", rebase_at=rebase_at)
    player, bound = Player(interleave), Bound(interleave)
    for verb, job, anew in player.play(steps):
        if job is not None:
            bound.took(job, free=verb == "free")
        # A key that enters anew, behind what was given back too, starts anew.
        for key in anew | ({job.key} if job is not None and verb == "free" else set()):
            bound.restart(key)
        bound.check()
        coherent(interleave)


def test_the_bound_is_reached_and_watched() -> None:
    interleave = Interleave("fair")
    for number, key in enumerate("abbaab"):
        interleave.push(number, key)
    bound = Bound(interleave)
    interleave.take()
    bound.check()
    # Two of b and none of a, which is 1/1 + 1/1.
    for job in interleave.take(2):
        assert job.key == "b"
        bound.took(job, free=False)
    bound.check()
    assert bound.intervals == 2
    bound.paid[0, "b"] += 0.01
    with pytest.raises(AssertionError):
        bound.check()


@given(
    st.sampled_from(["fair", "turn"]),
    st.fixed_dictionaries(dict.fromkeys(KEYS, weights)),
    operations(weights, "restore", "requeue", "cap"),
    rebases,
)
def test_no_key_waits_for_more_than_its_weight_says(
    order: str, fixed: dict, steps: list, rebase_at: float
) -> None:
    interleave = Interleave(order, rebase_at=rebase_at)
    player = Player(interleave, fixed)
    weight = dict.fromkeys(KEYS, 1.0) if order == "turn" else fixed
    #: (level, key in the index) -> jobs that others were given since it entered or was served.
    others: dict[tuple[int, str], Counter[str]] = {}
    for verb, job, anew in player.play(steps):
        if job is not None:
            others.pop((job.level, job.key), None)
        for level in (0, 1):
            for key in KEYS:
                if key not in interleave.index(level) or key in anew:
                    others.pop((level, key), None)
                    continue
                since = others.setdefault((level, key), Counter())
                if verb == "paid" and job.level == level and job.key != key:
                    since[job.key] += 1
                    assert since[job.key] <= weight[job.key] / weight[key] + 1 + SLACK


@given(
    st.dictionaries(keys, st.floats(1e-6, 1e6), min_size=1),
    st.lists(keys, max_size=40),
    st.integers(1, 40),
)
def test_a_fresh_backlog_goes_by_rank_through_weight(
    fixed: dict[str, float], arrivals: list[str], n: int
) -> None:
    fair, batch = Interleave("fair"), Interleave("batch")
    ranks, expected = Counter(), []
    for seq, key in enumerate(key for key in arrivals if key in fixed):
        ranks[key] += 1
        expected.append((ranks[key] / fixed[key], seq))
        fair.push(seq, key, fixed[key])
        batch.push(seq, key, fixed[key])
    order = [seq for _, seq in sorted(expected)[:n]]
    assert [job.job for job in fair.take(n)] == order
    assert [job.job for job in batch.take(n)] == order


@given(
    st.sampled_from(["fair", "turn"]),
    operations(dyadic, "restore", "requeue", "cap", "weight"),
    st.sampled_from([0.125, 1.0, 3.0, 10.0]),
)
def test_a_rebase_changes_no_order(order: str, steps: list, rebase_at: float) -> None:
    often, never = (Player(Interleave(order, rebase_at=at)) for at in (rebase_at, inf))
    for player in (often, never):
        for _ in player.play(steps):
            pass
        for _ in player.drain():
            pass
    assert often.order == never.order


@given(
    st.sampled_from(["fair", "age", "turn"]),
    operations(weights, "restore", "requeue", "cap", "weight"),
)
def test_the_order_is_the_same_for_any_number_of_slots(order: str, steps: list) -> None:
    at_once, single = Player(Interleave(order)), Player(Interleave(order))
    one_by_one = []
    for step in steps:
        one_by_one += [("take", 1)] * step[1] if step[0] == "take" else [step]
    for player, played in ((at_once, steps), (single, one_by_one)):
        for _ in player.play(played):
            pass
    assert at_once.order == single.order


def test_in_turn_it_does_not_matter_who_waited_longer() -> None:
    interleave = Interleave("turn")
    for number, key in enumerate("abba"):
        interleave.push(number, key)
    assert "".join(job.key for job in interleave.take(4)) == "abab"


@given(st.integers(1, 30), st.lists(st.integers(1, 5), max_size=6))
def test_in_turn_keys_alternate_whatever_their_weights(count: int, takes: list[int]) -> None:
    interleave = Interleave("turn")
    for number in range(count * 3):
        interleave.push(number, "abc"[number // count], number % 7 + 1)
    order = "".join(job.key for n in takes for job in interleave.take(n))
    assert order == ("abc" * count)[: len(order)]


# -- what holds for every order ------------------------------------------------------------------


@given(
    orders,
    st.booleans(),
    operations(weights, "restore", "requeue", "cap", "weight"),
    rebases,
)
@settings(max_examples=200)
def test_every_job_is_taken_in_its_key_s_order_and_ends_once(
    order: str, single: bool, steps: list, rebase_at: float
) -> None:
    interleave = Interleave(order, single=single, rebase_at=rebase_at)
    player = Player(interleave)
    expected: dict[tuple[int, str], list[Job]] = {}

    def note() -> None:
        for level in (0, 1):
            for key in KEYS:
                expected[level, key] = interleave.jobs(key, level)

    note()
    for operation in (player.play(steps), player.drain()):
        for verb, job, _ in operation:
            coherent(interleave)
            if job is not None:
                first, *rest = expected[job.level, job.key]
                assert job == first
                assert interleave.jobs(job.key, job.level) == rest
                # Levels are strict: no lower one had a job that might have run.
                assert job.level == 0 or not interleave.index(0)
                cap = interleave.cap(job.key)
                assert cap is None or interleave.in_flight(job.key) <= cap
                if single and job.key:
                    assert interleave.in_flight(job.key) == 1
            # A job is in one place.
            assert interleave.waiting + len(player.flight) + player.ended == player.pushed
            assert set(interleave.running) == {flying.job for flying in player.flight}
            note()
            assert verb != "paid" or job is not None
    assert player.ended == player.pushed
    assert not interleave.waiting


@given(orders, operations(weights, "restore", "requeue", "cap", "weight"), st.integers(1, 20))
def test_what_was_given_back_goes_first_unless_batch_weighs_it(
    order: str, steps: list, n: int
) -> None:
    player = Player(Interleave(order))
    for _ in player.play(steps):
        pass
    for verb, job, _ in player.take(n):
        left = [
            waiting
            for key in player.interleave.index(job.level)
            for waiting in player.interleave.jobs(key, job.level)
        ]
        if verb == "paid" and order != "batch":
            assert not any(waiting.job in player.known for waiting in left)


@given(orders, st.lists(weights, min_size=1, max_size=20), st.integers(1, 25))
def test_a_lone_key_gets_everything(order: str, own: list[float], n: int) -> None:
    interleave = Interleave(order)
    for number, weight in enumerate(own):
        interleave.push(number, "a", weight)
    assert [job.job for job in interleave.take(n)] == list(range(len(own)))[:n]


@given(
    orders,
    st.booleans(),
    operations(weights, "restore", "requeue", "cap", "weight"),
    st.integers(0, 20),
)
def test_a_preview_changes_nothing(order: str, single: bool, steps: list, n: int) -> None:
    interleave = Interleave(order, single=single)
    for _ in Player(interleave).play(steps):
        pass
    before = (interleave.waiting, dict(interleave.running), dict(interleave.index()))
    preview = interleave.preview(n)
    assert before == (interleave.waiting, dict(interleave.running), dict(interleave.index()))
    assert interleave.take(n) == preview


# -- the arithmetic ------------------------------------------------------------------------------


def filled(order: str = "fair", **options: object) -> Interleave:
    interleave = Interleave(order, **options)
    for number in range(5):
        interleave.push(f"a{number}", "a", 10)
    interleave.push("b0", "b", 0.5)
    return interleave


def test_the_tags_of_a_run_are_start_plus_n_through_weight() -> None:
    interleave = filled()
    assert interleave.index() == {"a": Entry(0.1), "b": Entry(2.0)}
    interleave.take(2)
    assert interleave.index()["a"] == Entry(3 / 10, Run(0.0, 3, 10.0))
    assert interleave.virtual_time() == 0.2
    assert interleave.index(1) == {}
    assert interleave.virtual_time(1) == 0


def test_a_weight_that_changes_ends_the_run() -> None:
    interleave = Interleave()
    for number, weight in enumerate([2, 2, 5, 5, 1]):
        interleave.push(number, "a", weight)
    entries = []
    while interleave.index():
        entries.append(interleave.index()["a"])
        interleave.take()
    assert entries == [
        Entry(0.5),
        # Sums of 1/2 are exact.
        Entry(1.0),
        Entry(1.0 + 1 / 5),
        Entry(1.4, Run(1.0, 2, 5.0)),
        Entry(2.4),
    ]


def test_an_override_is_the_weight_and_sets_the_tag_anew_once() -> None:
    interleave = filled()
    interleave.take(2)
    interleave.set_weight("a", 5)
    entered = Entry(0.2 + 1 / 5)
    assert interleave.index()["a"] == entered
    interleave.take()
    following = interleave.index()["a"]
    interleave.set_weight("a", 5.0)
    assert interleave.index()["a"] == following
    assert following.run is not None
    interleave.set_weight("a", None)
    assert interleave.index()["a"] == Entry(entered.finish + 1 / 10)


@pytest.mark.parametrize("order", ["batch", "age", "turn"])
def test_an_override_sets_no_tag_anew_where_tags_know_no_weight(order: str) -> None:
    interleave = filled(order)
    interleave.take()
    before = dict(interleave.index())
    interleave.set_weight("a", 3)
    assert interleave.index() == before


def test_given_back_jobs_stand_at_the_virtual_time_and_do_not_move_it() -> None:
    interleave = filled()
    taken = interleave.take(3)
    v = interleave.virtual_time()
    interleave.restore(*(job.job for job in reversed(taken)))
    assert interleave.index()["a"] == Entry(v)
    assert interleave.take(2) == taken[:2]
    assert interleave.index()["a"] == Entry(v)
    assert interleave.take() == taken[2:]
    assert interleave.virtual_time() == v
    assert interleave.index()["a"] == Entry(v + 1 / 10)


def test_the_virtual_time_is_zero_again_when_a_level_has_none_to_run() -> None:
    interleave = filled()
    interleave.set_cap("a", 5)
    interleave.push("a5", "a", 10)
    assert len(interleave.take(9)) == 6
    # What waits belongs to a key that is full.
    assert interleave.waiting == 1
    assert interleave.runnable == 0
    assert interleave.virtual_time() == 0
    interleave.end("a0")
    assert interleave.index() == {"a": Entry(0.1)}


def test_a_rebase_moves_tags_and_runs() -> None:
    interleave = filled(rebase_at=0.3)
    interleave.take(2)
    finish, run = interleave.index()["a"]
    assert (finish, run) == (0.3, Run(0.0, 3, 10.0))
    interleave.take()
    assert interleave.virtual_time() == 0
    assert interleave.index() == {
        "a": Entry(4 / 10 - 0.3, Run(-0.3, 4, 10.0)),
        "b": Entry(2.0 - 0.3),
    }


def test_a_cap_lowered_and_raised_is_heeded_at_once() -> None:
    interleave = filled()
    interleave.take(2)
    interleave.set_cap("a", 2)
    assert set(interleave.index()) == {"b"}
    assert interleave.runnable == 1
    interleave.set_cap("a", 3)
    assert interleave.index()["a"] == Entry(0.2 + 1 / 10)
    interleave.set_cap(ANY_KEY, 1)
    assert interleave.cap("a") == 3
    assert interleave.cap("b") == 1
    interleave.set_cap("a", None)
    assert set(interleave.index()) == {"b"}
    interleave.set_cap(ANY_KEY, None)
    assert set(interleave.index()) == {"a", "b"}


def test_a_key_that_is_filled_on_one_level_leaves_the_others() -> None:
    interleave = Interleave(single=True)
    for level in (0, 1):
        interleave.push(f"a{level}", "a", level=level)
    interleave.push("u", level=1)
    assert [job.job for job in interleave.take(3)] == ["a0", "u"]
    interleave.end("a0")
    assert [job.job for job in interleave.take(3)] == ["a1"]


def test_what_is_given_back_goes_before_an_older_job_with_the_same_tag() -> None:
    interleave = Interleave()
    for seq, (key, weight) in enumerate([("d", 1), ("c", 1), ("x", 2)]):
        interleave.push(f"{key}{seq}", key, weight)
    assert [job.job for job in interleave.take(2)] == ["x2", "d0"]
    assert interleave.index() == {"c": Entry(1.0)}
    interleave.restore("x2")
    assert interleave.index()["x"] == Entry(1.0)
    assert [job.job for job in interleave.take(2)] == ["x2", "c1"]


def test_every_take_of_a_batch_counts_from_zero() -> None:
    interleave = filled("batch")
    for number in range(1, 4):
        interleave.push(f"b{number}", "b", 0.5)
    interleave.set_weight("b", 5)
    for _ in range(2):
        assert "".join(job.key for job in interleave.take(2)) == "aa"
        interleave.restore(*interleave.running)
    assert "".join(job.key for job in interleave.take(4)) == "aaba"
    assert interleave.index() == {"a": Entry(0.0), "b": Entry(0.0)}


def test_jobs_without_a_key_are_in_no_group_and_have_no_cap() -> None:
    interleave = Interleave("age", single=True)
    for number in range(3):
        interleave.push(number)
    interleave.set_cap(ANY_KEY, 1)
    assert interleave.cap("") is None
    assert interleave.cap("a") == 1
    assert len(interleave.take(9)) == 3


def test_seq_may_be_the_caller_s_and_front_is_for_what_was_taken_elsewhere() -> None:
    interleave = Interleave()
    interleave.push("new", "a", seq=7)
    interleave.push("old2", "a", seq=5, front=True)
    interleave.push("old1", "a", seq=3, front=True)
    interleave.push("newer", "a")
    taken = interleave.take(9)
    assert [(job.job, job.seq) for job in taken] == [
        ("old1", 3),
        ("old2", 5),
        ("new", 7),
        ("newer", 8),
    ]


@pytest.mark.parametrize("verb", ["end", "restore", "requeue"])
def test_a_job_that_is_not_in_flight_is_refused(verb: str) -> None:
    interleave = filled()
    call: Callable[[str], None] = getattr(interleave, verb)
    with pytest.raises(KeyError):
        call("a0")
    interleave.take()
    if verb == "restore":
        with pytest.raises(KeyError):
            interleave.restore("a0", "a1")
        assert interleave.in_flight("a") == 1
    call("a0")
    with pytest.raises(KeyError):
        call("a0")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="fair, batch, age, turn"):
        Interleave("lifo")  # type: ignore[arg-type]
    interleave = Interleave()
    for weight in (0, -1, float("nan"), inf, 1e7, "3", True):
        with pytest.raises(ValueError, match="weight"):
            interleave.push("x", "a", weight)
        with pytest.raises(ValueError, match="weight"):
            interleave.set_weight("a", weight)
    with pytest.raises(ValueError, match="1 or more"):
        interleave.set_cap("a", 0)
    with pytest.raises(ValueError, match="without a key"):
        interleave.set_cap("", 3)
    assert interleave.waiting == 0
