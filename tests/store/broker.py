"""Own a broker on real Redis with the interface of the pure model, so that both can be given the same steps."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from celery_strategies.core.model import SourceSpec, Taken
from celery_strategies.core.policy import Policy
from celery_strategies.core.strategies import Strategy, turn_from
from celery_strategies.store import admin
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import HAS_ENDED, STILL_RUNS, Delivery, Place, SourceKeys

from .tools import Caller, Worker, job_of, message, push, tagged

#: Where a queue has no cap at all, nobody counts what is in flight.
SOME_CAPS = {"nobody": 99}


class RedisBroker:
    """One worker on one broker; jobs are strings, and unique.

    With *sort_first*, a backlog is sorted before each take, as if a sorter had had the time; else takes sort.
    """

    def __init__(
        self,
        client: redis.Redis,
        caller: Caller,
        strategy: Strategy,
        *,
        name: str = "w",
        keys: Keys = Keys(),  # noqa: B008
        sort_first: bool = False,
    ) -> None:
        self.client = client
        self.sort_first = sort_first
        self.keys = keys
        self.worker = Worker(caller, name, keys=keys, strategy=strategy)
        self.worker.join()
        self.tags: dict[str, Delivery] = {}
        self.running: dict[str, str] = {}
        self.policies: dict[str, Policy] = {}
        self.order: tuple[str, ...] = ()
        self.last: str | None = None
        self.turn_order: tuple[str, ...] = ()

    def set_sources(self, sources: Iterable[SourceSpec]) -> None:
        """Replace the list of sources: what has a policy, its own or somebody else's, is read as sorted."""
        specs = list(sources)
        self.order = tuple(spec[0] for spec in specs)
        found = []
        for queue, levels, *rest in specs:
            agreement = self.worker.adopt(queue, rest[0] if rest else None, SOME_CAPS)
            assert agreement.agreed
            if agreement.policy is not None:
                self.policies[queue] = agreement.policy
            lists = tuple(range(10))
            found.append(SourceKeys(queue, levels, lists, agreement.policy is not None))
        self.worker.read(*found)

    def push(
        self, queue: str, job: str, list_index: int = 0, key: str = "", weight: float = 1.0
    ) -> None:
        """Publish a job as a stock producer does, with the headers that its queue's policy names."""
        policy = self.policies.get(queue)
        headers = tagged(policy, key, weight) if policy else {}
        raw = message(job, queue=queue, **headers)
        push(self.client, self.keys.inbox(queue, list_index), raw)

    def sort(self) -> None:
        """Sort all that is new in the sources, in as many calls as it takes."""
        for source in self.worker.sources:
            if source.sorted:
                self.worker.sort(source)

    @property
    def turn(self) -> int:
        """The index at which round robin looks next."""
        return turn_from(self.last, self.order, self.turn_order)

    def take(self, n: int = 1) -> list[Taken]:
        """Take up to *n* jobs, as many calls as the reader would make."""
        taken: list[Taken] = []
        if self.sort_first and n > 0:
            self.sort()
        for _ in range(500):
            grant = self.worker.take(min(n - len(taken), 64), turn=self.turn)
            assert grant.valid
            assert (grant.broken, grant.set_aside, grant.lost) == ((), (), ())
            for delivery in grant.deliveries:
                queue = self.order[delivery.source]
                job = job_of(delivery.raw)
                self.tags[job] = delivery
                self.last, self.turn_order = queue, self.order
                redelivered = delivery.deliveries > 0 or b'"redelivered": true' in delivery.raw
                taken.append(Taken(queue, delivery.list, job, redelivered))
            assert grant.turn == self.turn or not grant.deliveries
            if len(taken) == n or not (grant.deliveries or grant.more):
                return taken
        raise AssertionError("there is always more, and never anything")

    def give_back(self, *jobs: str, started: bool = True) -> None:
        """Give held jobs back."""
        tags = [self.tags.pop(job).tag for job in jobs]
        assert self.worker.restore(self.client, *tags, started=started) == len(tags)

    def requeue(self, job: str) -> None:
        """Requeue a held job."""
        delivery = self.tags.pop(job)
        entry = self.worker.entry(delivery.tag, self.client)
        queue = Place.parse(entry).queue
        assert (
            self.worker.caller(self.worker.store.requeue(delivery.tag, queue, delivery.list)) == 1
        )

    def ack(self, job: str, running: bool = False) -> None:
        """Settle a held job; *running*: it has only started."""
        tag = self.tags.pop(job).tag
        if running:
            self.running[job] = tag
        assert self._settle(f"{STILL_RUNS}{tag}" if running else tag) == []

    def end(self, job: str) -> None:
        """Say that a job has ended that was acknowledged while it ran."""
        assert self._settle(f"{HAS_ENDED}{self.running.pop(job)}") == []

    def _settle(self, tag: str) -> list[bytes]:
        lost: list[bytes] = self.worker.caller(self.worker.store.settle([tag]))
        return lost

    def set_weight(self, queue: str, key: str, weight: float | None) -> None:
        """Override the weights of a key."""
        assert admin.set_weight(self.client, self.keys, queue, key, weight)

    def set_cap(self, queue: str, key: str, cap: int | None) -> None:
        """Limit how many jobs of a key may be in flight at once."""
        assert admin.set_cap(self.client, self.keys, queue, key, cap)

    def lengths(self) -> dict[str, int]:
        """Return how many jobs wait in each source, as a strategy counts them."""
        return {
            queue: sum(self.client.llen(key) for key in self.keys.inboxes(queue))
            + self.client.zcard(self.keys.returned(queue))
            + sum(
                int(value)
                for field, value in self.client.hgetall(self.keys.state(queue)).items()
                if field.startswith(b"r")
            )
            for queue in self.order
        }
