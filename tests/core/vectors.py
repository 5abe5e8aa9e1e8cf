"""Own the table of exact orders that every implementation of the scheduler must reproduce.

Plain data, and one function that plays a vector: the pure model and the scripts in Redis go
through the same table. Nothing in here may import a test framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from celery_strategies.core.levels import list_for
from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy

PRIORITY = Strategy.PRIORITY
ROUND_ROBIN = Strategy.ROUND_ROBIN
MAX_LEN = Strategy.MAX_LEN
MIN_LEN = Strategy.MIN_LEN


class Bound(NamedTuple):
    """Name a source as it is bound: bind order is the order in the vector."""

    queue: str
    rank: int | None = None
    levels: int | None = None


class Push(NamedTuple):
    """Publish a job to list ``list_index`` (0 to 9) of a queue."""

    queue: str
    job: str
    list_index: int = 0


class Bind(NamedTuple):
    """Bind one more source, while the worker runs."""

    source: Bound


class Unbind(NamedTuple):
    """Take a source off the list, while the worker runs."""

    queue: str


class Take(NamedTuple):
    """Offer ``n`` free slots; ``expected`` are the jobs, in the order taken."""

    n: int
    expected: tuple[str, ...]


class GiveBack(NamedTuple):
    """Give taken jobs back to the head of their source."""

    jobs: tuple[str, ...]


Step = Push | Bind | Unbind | Take | GiveBack


@dataclass(frozen=True)
class Vector:
    """Describe one case: what is bound, what happens, and what each take must give.

    ``strategy`` None means unset. Job names are unique within a vector.
    """

    name: str
    strategy: Strategy | None
    sources: tuple[Bound, ...]
    steps: tuple[Step, ...]


class Broker(Protocol):
    """Say what a vector is played on; ``core.model.Model`` is one."""

    def set_sources(self, sources: Iterable[tuple[str, int | None]]) -> None:
        """Replace the list of sources: (queue, levels) in list order."""

    def push(self, queue: str, job: str, list_index: int = 0) -> None:
        """Publish a job to a list of a queue."""

    def take(self, n: int = 1) -> Sequence[object]:
        """Take up to ``n`` jobs; each result has the job as its attribute ``job``."""

    def give_back(self, *jobs: str) -> None:
        """Give taken jobs back."""


def play(vector: Vector, broker: Broker) -> list[tuple[Take, tuple[str, ...]]]:
    """Play ``vector`` on ``broker`` and return each take beside the jobs that it gave.

    The broker has the vector's strategy and no sources yet.
    """
    ranks = {source.queue: source.rank for source in vector.sources if source.rank is not None}
    for step in vector.steps:
        if isinstance(step, Bind) and step.source.rank is not None:
            ranks[step.source.queue] = step.source.rank
    sources = SourceList(ranks)
    for bound in vector.sources:
        sources.bind(bound.queue, bound.levels)
    results = []
    broker.set_sources([(source.queue, source.levels) for source in sources])
    for step in vector.steps:
        if isinstance(step, Push):
            broker.push(step.queue, step.job, step.list_index)
        elif isinstance(step, Take):
            results.append((step, tuple(taken.job for taken in broker.take(step.n))))
        elif isinstance(step, GiveBack):
            broker.give_back(*step.jobs)
        else:
            if isinstance(step, Bind):
                sources.bind(step.source.queue, step.source.levels)
            else:
                sources.unbind(step.queue)
            broker.set_sources([(source.queue, source.levels) for source in sources])
    return results


def jobs(queue: str, count: int, prefix: str | None = None, list_index: int = 0) -> list[Push]:
    """Return ``count`` pushes to ``queue``, named by ``prefix`` (or its first letter) + number."""
    start = queue[0] if prefix is None else prefix
    return [Push(queue, f"{start}{number}", list_index) for number in range(1, count + 1)]


def one_by_one(order: str) -> list[Take]:
    """Return takes of one slot for each word of ``order``, then one that must give nothing."""
    return [*(Take(1, (job,)) for job in order.split()), Take(1, ())]


ALERTS, REPORTS, EMAILS = jobs("alerts", 2), jobs("reports", 1), jobs("emails", 3)
UNRANKED = (Bound("alerts"), Bound("reports"), Bound("emails"))

#: The strategies over alerts = 2, reports = 1, emails = 3, and the rules of the list.
STRATEGIES = [
    Vector(
        "priority takes the lowest rank, whatever was queued first",
        PRIORITY,
        (Bound("alerts", 1), Bound("reports", 2), Bound("emails")),
        (*EMAILS, *REPORTS, *ALERTS, *one_by_one("a1 a2 r1 e1 e2 e3")),
    ),
    Vector(
        "an unset strategy is priority",
        None,
        (Bound("emails"), Bound("reports", 2), Bound("alerts", 1)),
        (*EMAILS, *REPORTS, *ALERTS, *one_by_one("a1 a2 r1 e1 e2 e3")),
    ),
    Vector(
        "round_robin goes through the bind order",
        ROUND_ROBIN,
        UNRANKED,
        (*ALERTS, *REPORTS, *EMAILS, *one_by_one("a1 r1 e1 a2 e2 e3")),
    ),
    Vector(
        "max_len",
        MAX_LEN,
        UNRANKED,
        (*ALERTS, *REPORTS, *EMAILS, *one_by_one("e1 a1 e2 a2 r1 e3")),
    ),
    Vector(
        "min_len",
        MIN_LEN,
        UNRANKED,
        (*ALERTS, *REPORTS, *EMAILS, *one_by_one("r1 a1 a2 e1 e2 e3")),
    ),
    Vector(
        "ranks set the order of the round_robin turns",
        ROUND_ROBIN,
        (Bound("alerts", 3), Bound("reports", 2), Bound("emails", 1)),
        (*ALERTS, *REPORTS, *EMAILS, *one_by_one("e1 r1 a1 e2 a2 e3")),
    ),
    *(
        Vector(
            f"{strategy.label} gives nothing when all is empty",
            strategy,
            UNRANKED,
            (Take(1, ()), Take(10, ())),
        )
        for strategy in Strategy
    ),
    *(
        Vector(
            f"{strategy.label} decides every slot of a larger take",
            strategy,
            UNRANKED,
            (*ALERTS, *REPORTS, *EMAILS, Take(4, order[:4]), Take(4, order[4:]), Take(4, ())),
        )
        for strategy, order in (
            (PRIORITY, ("a1", "a2", "r1", "e1", "e2", "e3")),
            (ROUND_ROBIN, ("a1", "r1", "e1", "a2", "e2", "e3")),
            (MAX_LEN, ("e1", "a1", "e2", "a2", "r1", "e3")),
            (MIN_LEN, ("r1", "a1", "a2", "e1", "e2", "e3")),
        )
    ),
    Vector(
        "a source bound later takes its place by rank, once it has jobs",
        PRIORITY,
        (Bound("ten", 10), Bound("five", 5)),
        (
            Push("ten", "ten-1"),
            Push("five", "five-1"),
            Take(1, ("five-1",)),
            GiveBack(("five-1",)),
            Bind(Bound("one", 1)),
            Take(1, ("five-1",)),
            GiveBack(("five-1",)),
            Bind(Bound("three", 3)),
            *jobs("three", 4, "three-"),
            Take(1, ("three-1",)),
        ),
    ),
    Vector(
        "equal ranks go in bind order",
        PRIORITY,
        (Bound("low", 10), Bound("high", 1), Bound("med", 5), Bound("high2", 1)),
        (
            *(Push(queue, queue) for queue in ("low", "med", "high2", "high")),
            *one_by_one("high high2 med low"),
        ),
    ),
    Vector(
        "max_len of 3, 5, 2, 7 is the fourth",
        MAX_LEN,
        tuple(map(Bound, "abcd")),
        (*jobs("a", 3), *jobs("b", 5), *jobs("c", 2), *jobs("d", 7), Take(1, ("d1",))),
    ),
    Vector(
        "min_len of 3, 5, 2 is the third, also beside an empty source",
        MIN_LEN,
        tuple(map(Bound, "abc")),
        (
            *(*jobs("a", 3), *jobs("b", 5), *jobs("c", 2)),
            Take(1, ("c1",)),
            GiveBack(("c1",)),
            Bind(Bound("d")),
            Take(1, ("c1",)),
        ),
    ),
    Vector(
        "without ranks the list is the bind order, not the alphabet",
        PRIORITY,
        (Bound("b"), Bound("a")),
        (Push("a", "a1"), Push("b", "b1"), *one_by_one("b1 a1")),
    ),
    Vector(
        "rank 0 and negative ranks sort first",
        PRIORITY,
        (Bound("unset"), Bound("one", 1), Bound("zero", 0), Bound("minus", -5)),
        (
            *(Push(queue, queue) for queue in ("unset", "one", "zero", "minus")),
            *one_by_one("minus zero one unset"),
        ),
    ),
    Vector(
        "empty sources do not hold up round_robin",
        ROUND_ROBIN,
        tuple(map(Bound, "ABCDE")),
        (Take(2, ()), *jobs("D", 1000), *jobs("E", 1), Take(2, ("D1", "E1"))),
    ),
    Vector(
        "the round_robin turn stays with its source when the list changes",
        ROUND_ROBIN,
        tuple(map(Bound, "abc")),
        (
            *(*jobs("a", 2), *jobs("b", 2), *jobs("c", 2), *jobs("z", 2)),
            Take(1, ("a1",)),
            Bind(Bound("z", 1)),
            Take(1, ("b1",)),
            Unbind("b"),
            *one_by_one("c1 z1 a2 c2 z2"),
        ),
    ),
    Vector(
        "a source that comes back keeps its place in the list",
        PRIORITY,
        tuple(map(Bound, "abc")),
        (
            *(Push(queue, queue) for queue in "cba"),
            Unbind("a"),
            Take(1, ("b",)),
            Bind(Bound("a")),
            *one_by_one("a c"),
        ),
    ),
    *(
        Vector(
            f"one source is taken in one go under {strategy.label}",
            strategy,
            (Bound("only"),),
            (*jobs("only", 12), Take(10, tuple(f"o{n}" for n in range(1, 11)))),
        )
        for strategy in Strategy
    ),
]

#: Published with priorities 0, 2, unset (the default level is 1), 99 and -1, three levels.
CLAMPED = [
    Push("q", job, list_for(priority, 3, 1))
    for job, priority in (("zero", 0), ("two", 2), ("unset", None), ("99", 99), ("minus", -1))
]

#: Priority levels inside a source.
LEVELS = [
    Vector(
        "priorities are clamped to the levels and unset means the default",
        PRIORITY,
        (Bound("q", levels=3),),
        (*CLAMPED, *one_by_one("zero minus unset two 99")),
    ),
    Vector(
        "level 0 goes before level 1",
        PRIORITY,
        (Bound("q", levels=3),),
        (Push("q", "p1", 1), Push("q", "p0", 0), Take(5, ("p0", "p1"))),
    ),
    Vector(
        "level 1 is not touched while level 0 fills the slots",
        PRIORITY,
        (Bound("q", levels=3),),
        (*jobs("q", 2, "low", 1), *jobs("q", 3, "high", 0), Take(3, ("high1", "high2", "high3"))),
    ),
    Vector(
        "all levels of the first source go before level 0 of the second",
        PRIORITY,
        (Bound("first", 1, levels=3), Bound("second", 2, levels=3)),
        (
            *jobs("second", 1, "s", 0),
            *(Push("first", f"f{index}", index) for index in (2, 1, 0)),
            *one_by_one("f0 f1 f2 s1"),
        ),
    ),
    Vector(
        "a returned job of level 2 waits for a new one of level 1",
        PRIORITY,
        (Bound("q", levels=3),),
        (
            Push("q", "two", 2),
            Take(1, ("two",)),
            GiveBack(("two",)),
            Push("q", "one", 1),
            *one_by_one("one two"),
        ),
    ),
    Vector(
        "returned jobs go before waiting ones of their level, in the order first taken",
        PRIORITY,
        (Bound("q", levels=2),),
        (
            *jobs("q", 4, "j", 1),
            Take(3, ("j1", "j2", "j3")),
            GiveBack(("j3",)),
            GiveBack(("j2", "j1")),
            *one_by_one("j1 j2 j3 j4"),
        ),
    ),
    Vector(
        "lists beyond the last level belong to it and are read in numeric order",
        PRIORITY,
        (Bound("q", levels=2),),
        (*(Push("q", f"l{index}", index) for index in (9, 3, 1, 0)), *one_by_one("l0 l1 l3 l9")),
    ),
    Vector(
        "without levels all ten lists are read in numeric order",
        PRIORITY,
        (Bound("q"),),
        (
            *(Push("q", f"l{index}", index) for index in reversed(range(10))),
            *one_by_one(" ".join(f"l{index}" for index in range(10))),
        ),
    ),
    Vector(
        "lengths count every level",
        MAX_LEN,
        (Bound("plain"), Bound("levels", levels=3)),
        (
            *jobs("plain", 2),
            *(Push("levels", f"l{index}", index) for index in (2, 1, 0)),
            *one_by_one("l0 p1 l1 p2 l2"),
        ),
    ),
]

VECTORS = [*STRATEGIES, *LEVELS]
