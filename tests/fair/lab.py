"""What the fair share tests share: a lab whose jobs have keys, and eyes for the sorted state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import redis
from amqp import ChannelError

from celery_strategies.store import admin
from tests.support.apps import Event
from tests.support.waiting import wait_until
from tests.support.workers import Worker
from tests.worker.lab import Lab

PROJECT = "tests.fair.project"
#: The same, where an idle worker does not look by itself.
PATIENT = "tests.fair.patient"
#: Every pool that a strategies worker may have inside.
POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")

FAIR: Mapping[str, Any] = {"strategies_fair_share": True}
CAPPED: Mapping[str, Any] = {**FAIR, "strategies_max_in_flight": {"*": 1}}
FIFO: Mapping[str, Any] = {"strategies_group_mode": "fifo"}
CALLABLE = "tests.fair.tenancy:fair_share"


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{i}" for i in range(count)]


def key_of(label: str) -> str:
    """Return the key of a job, which stands before the dash of its label."""
    return label.partition("-")[0]


class FairLab(Lab):
    """A lab where fair share is on: the key of a job is what stands before the dash of its label."""

    #: What workers run, unless a test says otherwise: what nobody tells them, they do not find by chance.
    project = PATIENT

    def worker(
        self,
        pool: str = "prefork",
        *,
        queues: Sequence[str] = "a",
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Worker:
        options.setdefault("app", self.project)
        return super().worker(pool, queues=queues, settings={**FAIR, **(settings or {})}, **options)

    def plain(self, pool: str = "prefork", **options: Any) -> Worker:
        """Start one of our workers with no setting of fair share."""
        options.setdefault("app", self.project)
        options.setdefault("queues", "a")
        return super().worker(pool, **options)

    def grouped(self, pool: str = "prefork", mode: str = "fifo", **options: Any) -> Worker:
        """Start one of our workers with groups."""
        settings = {"strategies_group_mode": mode, **options.pop("settings", {})}
        return self.plain(pool, settings=settings, **options)

    def stock(self, pool: str = "threads", **options: Any) -> Worker:
        """Start a worker that has never heard of us."""
        return super().stock(pool, **{"app": PROJECT, "queues": "a", **options})

    # -- producing ----------------------------------------------------------------------------

    def keyed(
        self,
        labels: Iterable[str],
        queue: str = "a",
        task: str = "record",
        *,
        header: str = "fair_key",
        weight: float | None = None,
        **options: Any,
    ) -> list[str]:
        """Publish one job for each label, with its key in the header; return their ids."""
        ids = []
        for label in labels:
            headers: dict[str, Any] = {header: key_of(label)}
            if weight is not None:
                headers["fair_weight"] = weight
            ids.append(self.send(task, label, queue=queue, headers=headers, **options))
        return ids

    # -- looking ------------------------------------------------------------------------------

    def starts(self) -> list[Event]:
        return [event for event in self.events() if event.event == "start"]

    def running(self, queue: str = "a") -> dict[str, int]:
        """Return how many jobs of each key count as in flight."""
        start = self.keys.base(queue) + "running:"
        return {
            name.decode().removeprefix(start): int(self.db.scard(name))  # type: ignore[arg-type]
            for name in self.db.keys(f"strategies:{{{queue}}}:running:*")
        }

    def wait_none_in_flight(self, queue: str = "a", timeout: float = 30) -> None:
        """Wait until no message is held and no job counts as in flight."""
        wait_until(
            lambda: not self.unacked() and not self.running(queue), timeout, "nothing is in flight"
        )

    def count(self, queue: str = "a") -> int:
        """Return the depth that a passive declare reports, 0 for a queue that is not there."""
        with self.app.connection_for_read() as connection:
            channel: Any = connection.default_channel
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except ChannelError:
                return 0

    def sorted_count(self, queue: str = "a") -> int:
        """Return how many jobs are sorted, as their state says."""
        return int(self.db.hget(self.keys.state(queue), "t") or 0)  # type: ignore[arg-type]

    # -- steering -----------------------------------------------------------------------------

    def set_weight(self, key: str, weight: float | None, queue: str = "a") -> None:
        assert admin.set_weight(self.db, self.keys, queue, key, weight)

    def set_cap(self, key: str, cap: int | None, queue: str = "a") -> None:
        assert admin.set_cap(self.db, self.keys, queue, key, cap)


def overlaps(events: Iterable[Event], key: Callable[[str], str] = key_of) -> list[str]:
    """Return what ran at the same time as another job of its key, in words."""
    running: dict[str, str] = {}
    found = []
    for event in events:
        its_key = key(event.label)
        if event.event == "start":
            if its_key in running:
                found.append(f"{event.label} began while {running[its_key]} ran")
            running[its_key] = event.label
        elif running.get(its_key) == event.label:
            del running[its_key]
    return found


def once_each(lab: Lab, labels: Iterable[str]) -> None:
    """Assert that each of *labels* started once, and nothing else did."""
    assert Counter(lab.started()) == Counter(labels)


def redis_keys(db: redis.Redis) -> set[str]:
    return {name.decode() for name in db.keys("*")}
