"""Own a broker on real Redis with the interface of the pure model, so that both can be given the same steps."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from celery_strategies.core.model import Taken
from celery_strategies.core.strategies import Strategy, turn_from
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import Delivery, Place

from .tools import Caller, Worker, job_of, message, push, source


class RedisBroker:
    """One worker on one broker; jobs are strings, and unique."""

    def __init__(
        self,
        client: redis.Redis,
        caller: Caller,
        strategy: Strategy,
        *,
        name: str = "w",
        keys: Keys = Keys(),  # noqa: B008
    ) -> None:
        self.client = client
        self.keys = keys
        self.worker = Worker(caller, name, keys=keys, strategy=strategy)
        self.worker.join()
        self.tags: dict[str, Delivery] = {}
        self.order: tuple[str, ...] = ()
        self.last: str | None = None
        self.turn_order: tuple[str, ...] = ()

    def set_sources(self, sources: Iterable[tuple[str, int | None]]) -> None:
        """Replace the list of sources."""
        pairs = list(sources)
        self.order = tuple(queue for queue, _ in pairs)
        self.worker.read(*(source(queue, levels) for queue, levels in pairs))

    def push(self, queue: str, job: str, list_index: int = 0) -> None:
        """Publish a job as a stock producer does."""
        push(self.client, self.keys.inbox(queue, list_index), message(job, queue=queue))

    @property
    def turn(self) -> int:
        """The index at which round robin looks next."""
        return turn_from(self.last, self.order, self.turn_order)

    def take(self, n: int = 1) -> list[Taken]:
        """Take up to *n* jobs, as many calls as the reader would make."""
        taken: list[Taken] = []
        while True:
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

    def ack(self, job: str) -> None:
        """Settle a held job."""
        assert self.worker.caller(self.worker.store.settle([self.tags.pop(job).tag])) == []

    def lengths(self) -> dict[str, int]:
        """Return how many jobs wait in each source."""
        return {
            queue: sum(self.client.llen(key) for key in self.keys.inboxes(queue))
            + self.client.zcard(self.keys.returned(queue))
            for queue in self.order
        }
