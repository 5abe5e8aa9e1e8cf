"""Own the table of exact orders that every implementation of the scheduler must reproduce.

Plain data, and one function that plays a vector: the pure model and the scripts in Redis go
through the same table. Nothing in here may import a test framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from celery_strategies.core.levels import list_for
from celery_strategies.core.policy import Policy
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
    policy: Policy | None = None


class Push(NamedTuple):
    """Publish a job to list ``list_index`` (0 to 9) of a queue."""

    queue: str
    job: str
    list_index: int = 0
    key: str = ""
    weight: float = 1.0


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


class Requeue(NamedTuple):
    """Put a taken job at the tail."""

    job: str


class Ack(NamedTuple):
    """Acknowledge a taken job; ``running``: it has only started."""

    job: str
    running: bool = False


class End(NamedTuple):
    """End a job that was acknowledged while it ran."""

    job: str


class Weight(NamedTuple):
    """Override the weights of a key; None ends that."""

    queue: str
    key: str
    weight: float | None


class Cap(NamedTuple):
    """Limit how many jobs of a key may be in flight; None ends that."""

    queue: str
    key: str
    cap: int | None


#: Steps that are one call of the broker each.
METHODS = {Requeue: "requeue", Ack: "ack", End: "end", Weight: "set_weight", Cap: "set_cap"}

Step = Push | Bind | Unbind | Take | GiveBack | Requeue | Ack | End | Weight | Cap


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
    """Say what a vector without keys is played on; ``core.model.Model`` is one."""

    def set_sources(self, sources: Iterable[tuple[str, int | None]]) -> None:
        """Replace the list of sources: (queue, levels) in list order."""

    def push(self, queue: str, job: str, list_index: int = 0) -> None:
        """Publish a job to a list of a queue."""

    def take(self, n: int = 1) -> Sequence[object]:
        """Take up to ``n`` jobs; each result has the job as its attribute ``job``."""

    def give_back(self, *jobs: str) -> None:
        """Give taken jobs back."""


class FairBroker(Broker, Protocol):
    """Say what a vector of :data:`FAIR` is played on; ``core.model.Model`` is one."""

    def set_sources(
        self, sources: Iterable[tuple[str, int | None] | tuple[str, int | None, Policy]]
    ) -> None:
        """Replace the list of sources: (queue, levels) or (queue, levels, policy)."""

    def push(
        self, queue: str, job: str, list_index: int = 0, key: str = "", weight: float = 1.0
    ) -> None:
        """Publish a job to a list of a queue."""

    def requeue(self, job: str) -> None:
        """Put a taken job at the tail."""

    def ack(self, job: str, running: bool = False) -> None:
        """Acknowledge a taken job."""

    def end(self, job: str) -> None:
        """End a job that was acknowledged while it ran."""

    def set_weight(self, queue: str, key: str, weight: float | None) -> None:
        """Override the weights of a key."""

    def set_cap(self, queue: str, key: str, cap: int | None) -> None:
        """Limit how many jobs of a key may be in flight."""


def play(vector: Vector, broker: Broker | FairBroker) -> list[tuple[Take, tuple[str, ...]]]:
    """Play ``vector`` on ``broker`` and return each take beside the jobs that it gave.

    The broker has the vector's strategy and no sources yet.
    """
    bindings = [*vector.sources, *(step.source for step in vector.steps if isinstance(step, Bind))]
    sources = SourceList({bound.queue: bound.rank for bound in bindings if bound.rank is not None})
    policies = {bound.queue: bound.policy for bound in bindings if bound.policy is not None}

    def read() -> None:
        broker.set_sources(
            [
                (source.queue, source.levels, policies[source.queue])
                if source.queue in policies
                else (source.queue, source.levels)
                for source in sources
            ]
        )

    def push(queue: str, job: str, list_index: int, key: str, weight: float) -> None:
        tag = {"key": key, "weight": weight} if queue in policies else {}
        broker.push(queue, job, list_index, **tag)

    for bound in vector.sources:
        sources.bind(bound.queue, bound.levels)
    read()
    results = []
    for step in vector.steps:
        if isinstance(step, Take):
            results.append((step, tuple(taken.job for taken in broker.take(step.n))))
        elif isinstance(step, Push):
            push(*step)
        elif isinstance(step, GiveBack):
            broker.give_back(*step.jobs)
        elif isinstance(step, Bind):
            sources.bind(step.source.queue, step.source.levels)
            read()
        elif isinstance(step, Unbind):
            sources.unbind(step.queue)
            read()
        else:
            getattr(broker, METHODS[type(step)])(*step)
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

SHARED = Policy("fair", False, "fair_key", "fair_weight")
BATCH = Policy("batch", False, "fair_key", "fair_weight")
CAPPED = Policy("age", False, "fair_key", "fair_weight")
GROUPS = Policy("age", True, "group_key", "")
GROUPS_IN_TURN = Policy("turn", True, "group_key", "")


class Of(NamedTuple):
    """Stand for ``count`` jobs of a key, queued one after the other."""

    key: str
    count: int = 1
    weight: float = 1.0
    list_index: int = 0


def queued(*tenants: Of, queue: str = "q", start: int = 1) -> list[Push]:
    """Return pushes, named by the first letter of the key (u without) + a number over all."""
    pushes: list[Push] = []
    for key, count, weight, list_index in tenants:
        for _ in range(count):
            job = f"{(key or 'u')[0]}{start + len(pushes)}"
            pushes.append(Push(queue, job, list_index, key, weight))
    return pushes


def some(first: str, count: int) -> tuple[str, ...]:
    """Return the names of ``count`` jobs from ``first`` on: ``b21 b22 b23``."""
    return tuple(f"{first[0]}{int(first[1:]) + number}" for number in range(count))


def get(order: str) -> Take:
    """Return the take of as many slots as ``order`` has words, which must give just them."""
    return Take(len(order.split()), tuple(order.split()))


def one_queue(name: str, policy: Policy, *steps: Step, levels: int | None = None) -> Vector:
    """Return a vector of one queue ``q``."""
    return Vector(name, PRIORITY, (Bound("q", levels=levels, policy=policy),), steps)


#: Fair share, seen by one worker. In a fresh state and a single take, ``rank / weight``.
SHARES = [
    one_queue(
        "a x100, b x20: 5 and 5 of 10",
        SHARED,
        *queued(Of("a", 100), Of("b", 20)),
        get("a1 b101 a2 b102 a3 b103 a4 b104 a5 b105"),
    ),
    one_queue(
        "heavy x50 w3, light x50: 6 and 2 of 8",
        SHARED,
        *queued(Of("heavy", 50, 3), Of("light", 50)),
        get("h1 h2 h3 l51 h4 h5 h6 l52"),
    ),
    one_queue("a lone key gets all 10", SHARED, *queued(Of("only", 100)), Take(10, some("o1", 10))),
    one_queue(
        "whale x500, minnow x3: 3 and 3 of 6, then all whale",
        SHARED,
        *queued(Of("whale", 500), Of("minnow", 3)),
        get("w1 m501 w2 m502 w3 m503"),
        Take(6, some("w4", 6)),
    ),
    one_queue(
        "jobs without a key are one key: 3 and 3 of 6",
        SHARED,
        *queued(Of("a", 20), Of("", 5)),
        get("a1 u21 a2 u22 a3 u23"),
    ),
    one_queue("first in, first out within a key", SHARED, *queued(Of("a", 5)), get("a1 a2 a3")),
    one_queue(
        "what is taken is not taken again",
        SHARED,
        *queued(Of("a", 2)),
        Take(2, ("a1", "a2")),
        Take(2, ()),
    ),
    one_queue(
        "of 14 with 10 taken, the other 4",
        SHARED,
        *queued(Of("ready", 14)),
        Take(10, some("r1", 10)),
        Take(10, some("r11", 4)),
    ),
    one_queue(
        "heavy x8 w3, light x4, bulk x2: 3, 1 and 1 of 5",
        SHARED,
        *queued(Of("heavy", 8, 3), Of("light", 4), Of("bulk", 2)),
        get("h1 h2 h3 l9 b13"),
    ),
    one_queue(
        "a w2, b, c: 4, 2 and 2 of 8",
        SHARED,
        *queued(Of("a", 10, 2), Of("b", 10), Of("c", 10)),
        get("a1 a2 b11 c21 a3 a4 b12 c22"),
    ),
    one_queue(
        "a w0.1, b: 1 of 11, the tenth to go, before the newer one of its time",
        SHARED,
        *queued(Of("a", 20, 0.1), Of("b", 20)),
        Take(11, (*some("b21", 9), "a1", "b30")),
    ),
    one_queue(
        "weight 1e6 leaves nothing to others",
        SHARED,
        *queued(Of("b", 20), Of("a", 20, 1e6)),
        Take(10, some("a21", 10)),
    ),
    one_queue(
        "60 jobs in takes of 10 come once each",
        SHARED,
        *queued(Of("a", 15), Of("b", 15), Of("c", 15), Of("d", 15)),
        *(
            Take(10, tuple("abcd"[n % 4] + str(n % 4 * 15 + n // 4 + 1) for n in range(i, i + 10)))
            for i in range(0, 60, 10)
        ),
        Take(10, ()),
    ),
    one_queue(
        "a w3, b one slot at a time: 12 and 4 of 16, b's first the fourth",
        SHARED,
        *queued(Of("a", 40, 3), Of("b", 40)),
        *one_by_one("a1 a2 a3 b41 a4 a5 a6 b42 a7 a8 a9 b43 a10 a11 a12 b44")[:-1],
    ),
    one_queue(
        "ten jobs of weight 10 are one of weight 1, not a little less",
        SHARED,
        *queued(Of("b"), Of("a", 12, 10)),
        Take(11, (*some("a2", 9), "b1", "a11")),
    ),
    one_queue(
        "a newcomer neither waits behind a backlog nor catches up",
        SHARED,
        *queued(Of("a", 20)),
        Take(6, some("a1", 6)),
        *queued(Of("b", 3), start=21),
        get("a7 b21 a8 b22 a9 b23 a10"),
    ),
    one_queue(
        "an idle key saves nothing up",
        SHARED,
        *queued(Of("a", 20), Of("b", 1)),
        get("a1 b21 a2 a3 a4 a5"),
        *queued(Of("b", 4), start=22),
        get("a6 b22 a7 b23"),
    ),
    one_queue(
        "a weight is that of its own message",
        SHARED,
        *queued(Of("a", 1, 0.5), Of("a", 3, 2), Of("b", 6)),
        # a: 2, then 2.5, 3, 3.5; b: 1, 2, 3, 4 ...
        get("b5 a1 b6 a2 a3 b7 a4 b8"),
    ),
    one_queue(
        "an override acts on the backlog at once, and ends",
        SHARED,
        *queued(Of("a", 20), Of("b", 20)),
        get("a1 b21 a2 b22"),
        Weight("q", "a", 3),
        get("a3 a4 a5 b23 a6 a7"),
        Weight("q", "a", None),
        # V is 3 2/3: b's next stands at 4, a's at V + 1 now.
        get("b24 a8 b25 a9"),
    ),
    one_queue(
        "what is given back goes first and is not charged again",
        SHARED,
        *queued(Of("a", 10), Of("b", 10)),
        get("a1 b11 a2 b12"),
        GiveBack(("a2", "a1")),
        get("a1 a2 a3 b13 a4 b14"),
    ),
    one_queue(
        "a requeued job is the last of its key",
        SHARED,
        *queued(Of("a", 2), Of("b", 2)),
        get("a1 b3"),
        Requeue("a1"),
        get("a2 b4 a1"),
    ),
    one_queue(
        "a key at its cap hides nobody, early acknowledgement or not",
        SHARED,
        Cap("q", "a", 1),
        *queued(Of("a", 3), Of("b", 2)),
        get("a1 b4"),
        Ack("a1", running=True),
        get("b5"),
        Take(1, ()),
        End("a1"),
        Take(2, ("a2",)),
        Ack("a2"),
        Take(2, ("a3",)),
    ),
    one_queue(
        "a cap counts over all levels, and * is everybody's but that of jobs without a key",
        SHARED,
        Cap("q", "*", 1),
        Cap("q", "b", 2),
        *queued(Of("a", 1, 1, 1), Of("b", 3, 1, 1), Of("", 3, 1, 1), Of("a", 2)),
        Take(9, ("a8", "b2", "u5", "b3", "u6", "u7")),
        GiveBack(("a8",)),
        Take(9, ("a8",)),
        Ack("a8"),
        Take(9, ("a9",)),
        Ack("a9"),
        Take(9, ("a1",)),
        Cap("q", "*", None),
        Cap("q", "b", None),
        Take(9, ("b4",)),
    ),
    one_queue(
        "a lowered cap counts at once",
        SHARED,
        *queued(Of("a", 6), Of("b", 6)),
        get("a1 b7 a2 b8"),
        Cap("q", "a", 2),
        get("b9 b10"),
        Ack("a1"),
        Cap("q", "a", 1),
        get("b11"),
        Ack("a2"),
        get("a3 b12"),
    ),
]

#: Each take on its own.
BATCHES = [
    one_queue(
        "batch: heavy x50 w3, light x50: 6 and 2 of 8, every time",
        BATCH,
        *queued(Of("heavy", 50, 3), Of("light", 50)),
        get("h1 h2 h3 l51 h4 h5 h6 l52"),
        get("h7 h8 h9 l53 h10 h11 h12 l54"),
    ),
    one_queue(
        "batch counts from zero where memory would go on",
        BATCH,
        *queued(Of("a", 10), Of("b", 10)),
        get("a1 b11 a2"),
        get("a3 b12 a4"),
    ),
    one_queue(
        "memory goes on where batch would count from zero",
        SHARED,
        *queued(Of("a", 10), Of("b", 10)),
        get("a1 b11 a2"),
        get("b12 a3 b13"),
    ),
    one_queue(
        "batch with one slot is first in, first out at equal weights",
        BATCH,
        *queued(Of("a", 3), Of("b", 2), Of("a", 1)),
        *one_by_one("a1 a2 a3 b4 b5 a6"),
    ),
    one_queue(
        "batch with one slot takes the heaviest key",
        BATCH,
        *queued(Of("light", 2), Of("heavy", 3, 3)),
        *one_by_one("h3 h4 h5 l1 l2"),
    ),
    one_queue(
        "batch: what is given back is the first of its key",
        BATCH,
        *queued(Of("a", 3), Of("b", 3, 2)),
        get("b4 a1 b5"),
        GiveBack(("a1",)),
        get("b6 a1"),
        GiveBack(("b6", "a1")),
        Weight("q", "a", 2),
        get("a1 b6"),
    ),
]

#: One at a time for each group, and caps without fair share.
ONE_AT_A_TIME = [
    one_queue(
        "fifo groups: one of each, the oldest first; jobs in no group never wait",
        GROUPS,
        *queued(Of("a", 2), Of("b", 2), Of("", 2), Of("c", 1)),
        Take(9, ("a1", "b3", "u5", "u6", "c7")),
        Ack("b3", running=True),
        Take(9, ()),
        End("b3"),
        Take(9, ("b4",)),
        Ack("a1"),
        Take(9, ("a2",)),
    ),
    one_queue(
        "a group's job that is given back is the next of its group, and of all",
        GROUPS,
        *queued(Of("a", 2), Of("b", 2)),
        get("a1 b3"),
        GiveBack(("b3",)),
        Take(2, ("b3",)),
        Ack("a1"),
        GiveBack(("b3",)),
        Take(2, ("b3", "a2")),
    ),
    one_queue(
        "groups in turn",
        GROUPS_IN_TURN,
        *queued(Of("a", 3), Of("b", 2), Of("c", 1)),
        *(
            step
            for job in ("a1", "b4", "c6", "a2", "b5", "a3")
            for step in (Take(1, (job,)), Ack(job))
        ),
    ),
    one_queue(
        "turn heeds no weights",
        Policy("turn", False, "group_key", ""),
        *queued(Of("a", 3, 5), Of("b", 3)),
        Weight("q", "b", 5),
        *one_by_one("a1 b4 a2 b5 a3 b6"),
    ),
    one_queue(
        "caps alone: the oldest of those below their cap",
        CAPPED,
        Cap("q", "a", 1),
        *queued(Of("a", 2), Of("b", 2, 9), Of("", 1)),
        Take(9, ("a1", "b3", "b4", "u5")),
        Ack("a1"),
        Take(9, ("a2",)),
    ),
]

#: Keys, levels and sources together.
TOGETHER = [
    one_queue(
        "levels are strict, shares are within each",
        SHARED,
        *queued(Of("a", 2, 1, 1), Of("b", 2, 1, 1), Of("a", 2), Of("b", 2)),
        Take(9, ("a5", "b7", "a6", "b8", "a1", "b3", "a2", "b4")),
        levels=2,
    ),
    one_queue(
        "a returned job of level 1 waits for a new one of level 0",
        SHARED,
        *queued(Of("a", 2, 1, 1)),
        get("a1"),
        GiveBack(("a1",)),
        *queued(Of("b"), start=3),
        get("b3 a1 a2"),
        levels=2,
    ),
    *(
        Vector(
            f"{strategy.label} chooses among sources, shares are within each",
            strategy,
            (Bound("p", policy=SHARED), Bound("q", policy=SHARED)),
            (
                *queued(Of("a", 2), Of("b", 1), queue="p"),
                *queued(Of("c", 2), Of("d", 2), start=4),
                *one_by_one(order),
            ),
        )
        for strategy, order in (
            (PRIORITY, "a1 b3 a2 c4 d6 c5 d7"),
            (ROUND_ROBIN, "a1 c4 b3 d6 a2 c5 d7"),
            (MAX_LEN, "c4 a1 d6 b3 c5 a2 d7"),
            (MIN_LEN, "a1 b3 a2 c4 d6 c5 d7"),
        )
    ),
    *(
        Vector(
            f"{strategy.label} does not count jobs of full keys",
            strategy,
            (Bound("p", policy=SHARED), Bound("q")),
            (
                Cap("p", "a", 1),
                *queued(Of("a", 5), queue="p"),
                *jobs("q", 2),
                *one_by_one(order),
                Ack("a1"),
                Take(1, ("a2",)),
            ),
        )
        for strategy, order in (
            (PRIORITY, "a1 q1 q2"),
            (ROUND_ROBIN, "a1 q1 q2"),
            (MAX_LEN, "a1 q1 q2"),
            (MIN_LEN, "q1 q2 a1"),
        )
    ),
]

FAIR = [*SHARES, *BATCHES, *ONE_AT_A_TIME, *TOGETHER]
