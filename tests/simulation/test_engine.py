"""The engine: worked timelines, exact vectors, slots over time, and the words of each reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from celery_strategies.core.policy import Policy
from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy
from celery_strategies.simulation.engine import Arrival, Result, Setup, simulate
from celery_strategies.simulation.reasons import ORDER
from celery_strategies.simulation.report import waits, why
from celery_strategies.simulation.trace import parse_backlog
from tests.core.vectors import FAIR, VECTORS, Cap, Push, Take, Vector, Weight
from tests.docs import pages

FAIR_SHARE = Policy("fair", False, "fair_key", "fair_weight")
RANKS = {"alerts": 1, "reports": 2}


def setup(
    *queues: str, ranks: dict[str, int] | None = None, levels: int | None = None, **more: object
) -> Setup:
    bound = SourceList(ranks)
    for queue in queues:
        bound.bind(queue, levels)
    return Setup(**{"strategy": Strategy.PRIORITY, "sources": bound.ordered(), **more})  # type: ignore[arg-type]


def backlog(*words: str) -> list[Arrival]:
    return parse_backlog(words).jobs(1.0, lambda _: 0)


def order(result: Result) -> list[str]:
    return [pick.job.queue for pick in result.picks]


def keys(result: Result) -> list[str]:
    return [pick.job.key for pick in result.picks]


# -- worked timelines ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", Strategy)
def test_the_worked_timelines_come_out_line_by_line(strategy: Strategy) -> None:
    section = pages.section(pages.read("README.md"), "The four strategies")
    title = next(
        t for t in ("priority, the default", *Strategy.labels()[1:]) if t.startswith(strategy.label)
    )
    (_, *queues, _, _), *lines = list(pages.rows(pages.section(section, title)))
    result = simulate(
        setup(*queues, ranks=RANKS, strategy=strategy),
        backlog(*(f"{queue}={n}" for queue, n in zip(queues, lines[0][1:-2], strict=True))),
    )
    found = [
        [str(pick.number), *(str(pick.lengths[queue]) for queue in queues), pick.job.queue]
        for pick in result.picks
    ]
    assert found == [line[:-1] for line in lines]


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        # One worker, alerts rank 1 (2 jobs), reports rank 2 (1), emails without a rank (3): the strategy picker.
        ("priority", RANKS, "A A R E E E"),
        ("round_robin", RANKS, "A R E A E E"),
        ("max_len", RANKS, "E A E A R E"),
        ("min_len", RANKS, "R A A E E E"),
        ("round_robin", {}, "A R E A E E"),
        ("max_len", {}, "E A E A R E"),
        ("min_len", {}, "R A A E E E"),
    ],
)
@pytest.mark.parametrize("emails_first", [False, True])
def test_the_strategy_picker(
    strategy: str, ranks: dict[str, int], expected: str, emails_first: bool
) -> None:
    words = ["alerts=2", "reports=1", "emails=3"]
    jobs = backlog(*(reversed(words) if emails_first else words))
    worker = setup("alerts", "reports", "emails", ranks=ranks, strategy=Strategy.parse(strategy))
    result = simulate(worker, jobs)
    assert [name[0].upper() for name in order(result)] == expected.split()
    assert all(pick.reasons for pick in result.picks)


def _plain(vector: Vector) -> bool:
    """Whether a vector is one backlog, settings before it, and takes of which none is about anything else."""
    kinds = [type(step) for step in vector.steps]
    takes = [step for step in vector.steps if isinstance(step, Take)]
    return (
        set(kinds) <= {Push, Take, Cap, Weight}
        and kinds == sorted(kinds, key=lambda kind: kind is Take)
        and len(takes) == 1
        and len({bound.policy for bound in vector.sources}) == 1
    )


@pytest.mark.parametrize(
    "vector", [vector for vector in [*VECTORS, *FAIR] if _plain(vector)], ids=lambda v: v.name
)
def test_the_exact_vectors(vector: Vector) -> None:
    bound = SourceList({b.queue: b.rank for b in vector.sources if b.rank is not None})
    for source in vector.sources:
        bound.bind(source.queue, source.levels)
    pushes = [step for step in vector.steps if isinstance(step, Push)]
    (take,) = [step for step in vector.steps if isinstance(step, Take)]
    worker = Setup(
        Strategy.parse(vector.strategy),
        bound.ordered(),
        vector.sources[0].policy,
        slots=take.n,
        caps={s.key: s.cap for s in vector.steps if isinstance(s, Cap) and s.cap is not None},
        weights={s.key: s.weight for s in vector.steps if isinstance(s, Weight) and s.weight},
    )
    jobs = [
        Arrival(n, p.queue, 0.0, 1.0, p.list_index, p.key, p.weight, p.job)
        for n, p in enumerate(pushes, 1)
    ]
    picks = [pick for pick in simulate(worker, jobs).picks if pick.at == 0]
    assert tuple(pick.job.name for pick in picks) == take.expected


def test_enough_vectors_are_played() -> None:
    assert sum(map(_plain, [*VECTORS, *FAIR])) >= 15


# -- time ----------------------------------------------------------------------------------------


def test_slots_run_side_by_side_and_a_free_one_takes_at_once() -> None:
    jobs = [
        Arrival(1, "q", 0, 5),
        Arrival(2, "q", 0, 1),
        Arrival(3, "q", 0, 1),
        Arrival(4, "q", 9, 1),
    ]
    result = simulate(setup("q", slots=2), jobs)
    assert result.starts == {1: 0, 2: 0, 3: 1, 4: 9}
    assert result.ends == {1: 5, 2: 1, 3: 2, 4: 10}
    assert [result.wait(job) for job in jobs] == [0, 0, 1, 0]


def test_times_that_are_the_same_are_the_same() -> None:
    # 0.1 + 0.2 is not 0.3 in floating point.
    jobs = [Arrival(1, "a", 0.1, 0.2), Arrival(2, "a", 0.1, 1), Arrival(3, "b", 0.3, 1)]
    result = simulate(setup("b", "a"), jobs)
    assert [pick.job.number for pick in result.picks] == [1, 3, 2]


def test_jobs_without_run_time_end_at_once() -> None:
    result = simulate(setup("q"), [Arrival(n, "q", 1.0, 0.0) for n in range(1, 4)])
    assert set(result.ends.values()) == {1.0}
    assert len(result.picks) == 3


def test_what_is_read_ahead_is_picked_before_it_starts() -> None:
    jobs = [Arrival(1, "low", 0, 2), Arrival(2, "low", 0, 1), Arrival(3, "high", 1, 1)]
    result = simulate(setup("high", "low", read_ahead=1), jobs)
    assert order(result) == ["low", "low", "high"]
    assert result.starts == {1: 0, 2: 2, 3: 3}


def test_nothing_is_lost_and_nothing_runs_twice() -> None:
    jobs = [Arrival(n, "ab"[n % 2], n % 7, 0.5, key=str(n % 3)) for n in range(1, 200)]
    result = simulate(setup("a", "b", policy=FAIR_SHARE, slots=3), jobs)
    assert Counter(pick.job.number for pick in result.picks) == Counter(range(1, 200))
    for moment in result.starts.values():
        running = [n for n, start in result.starts.items() if start <= moment < result.ends[n]]
        assert len(running) <= 3


def test_a_paused_queue_is_never_served_and_the_rest_is() -> None:
    result = simulate(setup("a", "b", paused=frozenset("a")), backlog("a=2", "b=2"))
    assert order(result) == ["b", "b"]
    assert why(result.picks[0]) == "a is paused; the only queue with jobs"
    queues, _ = waits(result)
    assert [(row.started, row.never) for row in queues] == [(0, 2), (2, 0)]


# -- reasons -------------------------------------------------------------------------------------


def test_reasons_follow_the_order_of_decisions() -> None:
    jobs = backlog("p=1", "s=2", "q=acme:5,minnow:3", "r=1")
    worker = setup(
        "p", "s", "q", "r", levels=3, slots=4, policy=FAIR_SHARE,
        caps={"minnow": 1}, paused=frozenset("p"), single=frozenset("s"),
    )  # fmt: skip
    seen = [[step for step, _ in pick.reasons] for pick in simulate(worker, jobs).picks]
    for steps in seen:
        assert [ORDER.index(step) for step in steps] == sorted(ORDER.index(step) for step in steps)
    assert {step for steps in seen for step in steps} == set(ORDER)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            "priority",
            [
                "rank 1, lowest with jobs",
                "rank 1, lowest with jobs",
                "rank 2, lowest with jobs; alerts has none",
                "the only queue with jobs",
            ],
        ),
        (
            "round_robin",
            [
                "first turn",
                "the turn after alerts",
                "the turn after reports",
                "the turn after emails",
            ],
        ),
        (
            "max_len",
            [
                "emails has 3, the most",
                "alerts has 2, the most; ties with emails, first in the list",
                "emails has 2, the most",
                "alerts has 1, the most; ties with reports and emails, first in the list",
            ],
        ),
        (
            "min_len",
            [
                "reports has 1, the fewest",
                "alerts has 2, the fewest",
                "alerts has 1, the fewest",
                "the only queue with jobs",
            ],
        ),
    ],
)
def test_the_words_of_each_strategy(strategy: str, expected: list[str]) -> None:
    worker = setup("alerts", "reports", "emails", ranks=RANKS, strategy=Strategy.parse(strategy))
    result = simulate(worker, backlog("alerts=2", "reports=1", "emails=3"))
    assert [why(pick) for pick in result.picks][:4] == expected


def test_the_words_of_fair_share() -> None:
    jobs = [Arrival(n, "q", key="acme", weight=3.0) for n in (1, 2, 3)]
    jobs += [Arrival(n, "q", key="zed") for n in (4, 5)]
    result = simulate(setup("q", policy=FAIR_SHARE), jobs)
    assert [why(pick) for pick in result.picks] == [
        "the only queue; acme at 0.3333 before zed at 1",
        "the only queue; acme at 0.6667 before zed at 1",
        "the only queue; acme at 1 as zed, and its job is older",
        "the only queue; zed is the only key that may run",
        "the only queue; zed is the only key that may run",
    ]


def test_the_words_of_groups_and_caps() -> None:
    fifo, turn = Policy("age", True, "group_key", ""), Policy("turn", True, "group_key", "")
    jobs = backlog("q=a:2,b:2")
    first = simulate(setup("q", policy=fifo, slots=2), jobs).picks
    assert why(first[0]) == "the only queue; a: its job is the oldest"
    assert (
        why(first[1])
        == "the only queue; b is the only key that may run; a (1 of 1) is full and is passed over"
    )
    assert why(simulate(setup("q", policy=turn), jobs).picks[1]) == "the only queue; b's turn"


def test_the_words_of_levels() -> None:
    jobs = backlog("q=a:2,b:1@1")
    worker = setup("q", levels=3, policy=FAIR_SHARE, caps={"a": 1}, slots=2)
    texts = [why(pick) for pick in simulate(worker, jobs).picks]
    assert texts[0] == "the only queue; level 0, the highest; a is the only key that may run"
    assert (
        texts[1]
        == "the only queue; level 1; level 0 has only full keys; b is the only key that may run"
    )
    plain = replace(worker, policy=None, caps={})
    assert why(simulate(plain, jobs).picks[2]) == "the only queue; level 1; level 0 is empty"


def test_a_queue_whose_keys_are_all_full_is_said_to_be() -> None:
    jobs = backlog("a=x:2", "b=y:1")
    worker = setup("a", "b", policy=FAIR_SHARE, caps={"x": 1}, slots=2)
    second = simulate(worker, jobs).picks[1]
    assert why(second).startswith("a has only full keys; the only queue with jobs")


def test_only_as_many_picks_are_explained_as_asked_for() -> None:
    result = simulate(setup("q"), backlog("q=5"), explain=2)
    assert [bool(pick.reasons) for pick in result.picks] == [True, True, False, False, False]


def test_waits_per_queue_and_tenant() -> None:
    result = simulate(setup("q", policy=FAIR_SHARE), backlog("q=whale:6,minnow:2"))
    queues, tenants = waits(result)
    assert [(row.queue, row.jobs, row.longest) for row in queues] == [("q", 8, 7)]
    assert [(row.key, row.median, row.p95, row.longest) for row in tenants] == [
        ("whale", 4, 7, 7),
        ("minnow", 1, 3, 3),
    ]
