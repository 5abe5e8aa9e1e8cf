"""What the worker tests share: a lab around one Redis, with a producer, a remote control and eyes."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from celery_strategies.store.keys import Keys
from tests.support.apps import PREFIX, ended, make_app, read_events, started
from tests.support.waiting import wait_until
from tests.support.workers import Worker

PROJECT = "tests.worker.project"
#: The inner pools that need no patched process.
PLAIN_POOLS = ("prefork", "threads", "solo")
ALL_POOLS = (*PLAIN_POOLS, "gevent")
CONSUMER = "celery_strategies:StrategyConsumer"


def label_of(raw: bytes) -> str:
    """Return the first argument of a task message, which our tests use as its label."""
    message = json.loads(raw)
    body = message["body"]
    if message["properties"].get("body_encoding") == "base64":
        body = base64.b64decode(body)
    return str(json.loads(body)[0][0])


class Lab:
    """One broker, and everything a test wants to do to it and to the workers on it."""

    def __init__(
        self, url: str, db: redis.Redis, workers: Callable[..., Worker], **settings: Any
    ) -> None:
        self.url = url
        self.db = db
        self.keys = Keys()
        self._workers = workers
        self.app: Celery = make_app(url, settings)
        self._answering: set[str] = set()

    def close(self) -> None:
        """Close the producer's connections."""
        self.app.close()

    # -- workers ------------------------------------------------------------------------------

    def worker(
        self,
        pool: str = "prefork",
        *,
        queues: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Worker:
        """Start one of our workers with this inner pool."""
        conf = dict(settings or {})
        options.setdefault("app", PROJECT)
        if pool in ("gevent", "eventlet"):
            conf.setdefault("worker_consumer", CONSUMER)
            marker = pool
        else:
            conf.setdefault("strategies_pool", pool)
            marker = "strategies"
        url = options.pop("url", self.url)
        if url != self.url:
            options.setdefault("record_url", self.url)
        return self._workers(url, pool=marker, queues=queues, settings=conf, **options)

    def stock(self, pool: str = "prefork", **options: Any) -> Worker:
        """Start a worker that has never heard of us."""
        options.setdefault("app", PROJECT)
        return self._workers(self.url, pool=pool, stock=True, **options)

    # -- producing ----------------------------------------------------------------------------

    def send(self, task: str, *args: Any, **options: Any) -> str:
        """Publish one task and return its id."""
        return str(self.app.send_task(PREFIX + task, args, **options).id)

    def fill(self, queue: str, labels: Iterable[str], task: str = "record", **options: Any) -> None:
        """Publish one task for each label."""
        for label in labels:
            self.send(task, label, queue=queue, **options)

    def open(self, count: int = 1, gate: str = "gate") -> None:
        """Let *count* held jobs end."""
        self.db.rpush(gate, *["go"] * count)

    # -- looking ------------------------------------------------------------------------------

    def started(self) -> list[str]:
        return started(self.db)

    def ended(self) -> list[str]:
        return ended(self.db)

    def events(self) -> list[Any]:
        return read_events(self.db)

    def wait_started(self, *labels: str, timeout: float = 30) -> list[str]:
        """Wait until all of *labels* have started; return every start so far, in order."""
        wait_until(lambda: set(labels) <= set(self.started()), timeout, f"{labels} started")
        return self.started()

    def wait_ended(self, *labels: str, timeout: float = 30) -> list[str]:
        """Wait until all of *labels* have ended; return every end so far, in order."""
        wait_until(lambda: set(labels) <= set(self.ended()), timeout, f"{labels} ended")
        return self.ended()

    def wait_count(self, count: int, timeout: float = 30) -> list[str]:
        """Wait until *count* jobs have ended; return the order in which they *started*."""
        wait_until(lambda: len(self.ended()) >= count, timeout, f"{count} jobs ended")
        return self.started()

    def unacked(self) -> int:
        """Return how many messages somebody holds."""
        return int(self.db.hlen(self.keys.unacked))  # type: ignore[arg-type]

    def wait_settled(self, timeout: float = 20) -> None:
        """Wait until nobody holds a message."""
        wait_until(lambda: not self.unacked(), timeout, "no message is unacked")

    def waiting(self, queue: str) -> list[str]:
        """Return the labels that wait in *queue* and are due, in the order in which they will run.

        Where jobs are sorted by key: in the order in which they were sorted, as if all had one key.
        """
        found = []
        for member, score in self.db.zrange(self.keys.returned(queue), 0, -1, withscores=True):
            raw = member.split(b":", 3)[3]
            level = int(score // 2**47)
            found.append((level, 0, len(found), label_of(raw)))
        for level, sequence, _key, raw in self.sorted_jobs(queue):
            found.append((level, 1, sequence, label_of(raw)))
        for step in range(10):
            lines: Any = self.db.lrange(self.keys.inbox(queue, step), 0, -1)
            for raw in reversed(lines):
                found.append((step, 2, len(found), label_of(raw)))
        return [entry[3] for entry in sorted(found)]

    def sorted_jobs(self, queue: str) -> list[tuple[int, int, str, bytes]]:
        """Return level, sequence, key and message of the jobs of *queue* that are sorted by key."""
        found = []
        base = self.keys.base(queue)
        for kind, read in (("jobs", self.db.lrange), ("front", self.db.zrange)):
            for name in self.db.scan_iter(match=f"{_escaped(base)}{kind}:*", count=1000):
                level, key = name.decode().removeprefix(f"{base}{kind}:").split(":", 1)
                elements: Any = read(name, 0, -1)
                for element in elements:
                    sequence, _deliveries, _weight, raw = element.split(b":", 3)
                    found.append((int(level), int(sequence), key, raw))
        return sorted(found)

    def delayed(self, queue: str) -> list[str]:
        """Return the labels that wait in *queue* for their time, in the order in which they are due."""
        members: Any = self.db.zrange(self.keys.delayed(queue), 0, -1)
        return [label_of(member.split(b":", 2)[2]) for member in members]

    def set_aside(self, queue: str) -> list[dict[str, str]]:
        """Return what was set aside from *queue*."""
        entries: Any = self.db.xrange(self.keys.set_aside(queue))
        return [
            {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}
            for _, fields in entries
        ]

    # -- remote control -----------------------------------------------------------------------

    def control(self, command: str, worker: Worker, **arguments: Any) -> Any:
        """Send a remote control command to one worker and return its reply."""
        if worker.hostname not in self._answering:
            # A worker is ready a moment before Redis has its subscription, and what is published in
            # between reaches nobody: the first command is one that may be repeated.
            wait_until(
                lambda: self._ask("ping", worker, 1.0, {}),
                20,
                f"{worker.hostname} answers",
                # The app's own connection may have outlived its server in an earlier test.
                swallow=(redis.ConnectionError,),
            )
            self._answering.add(worker.hostname)
        replies = self._ask(command, worker, 10.0, arguments)
        assert replies, f"{worker.hostname} did not answer {command}\n{worker.log()}"
        return replies[0][worker.hostname]

    def _ask(self, command: str, worker: Worker, timeout: float, arguments: dict[str, Any]) -> Any:
        return self.app.control.broadcast(
            command,
            arguments=arguments,
            destination=[worker.hostname],
            reply=True,
            limit=1,
            timeout=timeout,
        )

    def idle(self, worker: Worker) -> None:
        """Wait until *worker* holds nothing."""
        wait_until(
            lambda: self.control("stats", worker)["strategies"]["held"] == 0, 20, "holds nothing"
        )


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
