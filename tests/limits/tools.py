"""What the tests of the scripts share: workers that ask for permits, and looks at who has one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import Answer, Ask, Delivery
from tests.store import tools
from tests.store.tools import TTL, Caller, SourceKeys, in_line_message, job_of, message, push

KEYS = Keys()
#: A limit that nothing outlives within a test.
ONE = Ask("task:key", 1, 300_000)
POLICY = Policy("fair", False, "fair_key", "fair_weight")


def source(queue: str, *, by_key: bool = False) -> SourceKeys:
    """Return a source that reads all lists; *by_key*: its jobs are sorted."""
    return SourceKeys(queue, None, tuple(range(10)), by_key)


class Worker(tools.Worker):
    """One worker's calls."""

    def ask(self, tag: str, ask: Ask = ONE, now: int | str = "") -> Answer:
        """Ask for a permit for *tag*."""
        return Answer.parse(self.caller(self.store.acquire(tag, ask, TTL, now)))

    def settle(self, *tags: str) -> list[bytes]:
        """Settle *tags* as the settler does for jobs that have a permit."""
        return list(self.caller(self.store.settle([calls.HAD_PERMIT + tag for tag in tags])))

    def grab(self, n: int = 1) -> list[Delivery]:
        """Take up to *n* messages, with the server's clock."""
        self.now: Any = ""
        return list(self.take(n).deliveries)


def hire(caller: Caller, name: str, *sources: SourceKeys | str) -> Worker:
    """Return a worker that has joined."""
    worker = Worker(caller, name, *sources)
    worker.join()
    return worker


def publish(
    client: redis.Redis, queue: str, jobs: Iterable[str], step: int = 0, **headers: Any
) -> None:
    """Publish jobs."""
    push(client, KEYS.inbox(queue, step), *(message(job, queue=queue, **headers) for job in jobs))


def adopt(caller: Caller, queue: str, policy: Policy = POLICY) -> None:
    """Have the jobs of *queue* sorted."""
    assert caller(calls.Store(KEYS, "x").adopt(queue, policy))[0] == 1


def permits(client: redis.Redis, limit: str = ONE.limit) -> list[str]:
    """Return the numbers of the messages that have a permit, the first to expire first."""
    members: Any = client.zrange(KEYS.permits(limit), 0, -1)
    return [member.decode() for member in members]


def in_line(client: redis.Redis, limit: str = ONE.limit) -> list[str]:
    """Return the jobs that wait for a permit, in order; '-' for one that is not there any more."""
    found = []
    members: Any = client.zrange(KEYS.line(limit), 0, -1)
    for member in members:
        number, _, suffix = member.partition(b",")
        queue = json.loads(b"[0," + suffix)[2]
        entries: Any = client.zrangebyscore(KEYS.in_line(queue), float(number), float(number))
        found.append(job_of(in_line_message(entries[0])) if entries else "-")
    return found


def expire(client: redis.Redis, limit: str = ONE.limit) -> None:
    """Have all permits of *limit* expire, and its line looked at."""
    client.zadd(KEYS.permits(limit), dict.fromkeys(permits(client, limit), 1))
    client.zadd(KEYS.lines, {limit: 1}, xx=True)


def nothing_is_left(client: redis.Redis) -> None:
    """Assert that no permit and no line is left."""
    marks = (":permits:", ":line:", ":in_line", ":lines", ":limits", ":limited:")
    found: list[Any] = client.keys("*")  # type: ignore[assignment]
    assert [key for key in found if any(mark in key.decode() for mark in marks)] == []
