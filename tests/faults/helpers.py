"""Own what the tests here share: pools, accounts of where messages are, and a producer that numbers."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from celery import Celery

from celery_strategies.core.levels import LISTS
from celery_strategies.store.keys import Keys
from tests.support.apps import PREFIX, make_app
from tests.support.waiting import wait_until
from tests.support.workers import Worker

#: Every pool that a strategies worker may have inside.
POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")
QUEUE = "celery"


def pool_options(pool: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the `Worker` options for an inner pool: green ones go in by `worker_consumer`."""
    settings = dict(settings or {})
    if pool in ("gevent", "eventlet"):
        settings["worker_consumer"] = "celery_strategies:StrategyConsumer"
        return {"pool": pool, "settings": settings}
    settings["strategies_pool"] = pool
    return {"pool": "strategies", "settings": settings}


def label_of(raw: bytes) -> str:
    """Return the first argument of the job in a raw message; of `sleep_for` the second."""
    message = json.loads(raw)
    body = message["body"]
    if message["properties"].get("body_encoding") == "base64":
        body = base64.b64decode(body)
    arguments = json.loads(body)[0]
    return str(arguments[1] if len(arguments) > 1 else arguments[0])


def places(
    client: redis.Redis, queue: str = QUEUE, keys: Keys | None = None, *, at_once: bool = True
) -> dict[str, list[str]]:
    """Return the labels of the jobs in each place where a message of `queue` can be.

    Of jobs that are sorted by key, those without a key. `at_once=False` does without a transaction, which a full
    Redis refuses.
    """
    keys = keys or Keys()
    base = keys.base(queue)
    with client.pipeline(transaction=at_once) as pipe:
        for step in range(LISTS):
            pipe.lrange(keys.inbox(queue, step), 0, -1)
        for level in range(LISTS):
            pipe.zrange(f"{base}front:{level}:", 0, -1)
            pipe.lrange(f"{base}jobs:{level}:", 0, -1)
        pipe.zrange(keys.returned(queue), 0, -1)
        pipe.zrange(keys.delayed(queue), 0, -1)
        pipe.hvals(keys.unacked)
        pipe.xrange(keys.set_aside(queue))
        *lists, returned, delayed, unacked, aside = pipe.execute()
    fronts, jobs = lists[LISTS::2], lists[LISTS + 1 :: 2]
    in_order = [
        element
        for front, listed in zip(fronts, jobs, strict=True)
        for element in [*front, *reversed(listed)]
    ]
    return {
        "inbox": [label_of(raw) for step in lists[:LISTS] for raw in reversed(step)],
        "sorted": [label_of(element.split(b":", 3)[3]) for element in in_order],
        "returned": [label_of(member.split(b":", 3)[3]) for member in returned],
        "delayed": [label_of(member.split(b":", 2)[2]) for member in delayed],
        "unacked": [label_of(record[1 : record.rindex(b',"",')]) for record in unacked],
        "set aside": [label_of(fields[b"message"]) for _, fields in aside],
    }


def everywhere(client: redis.Redis, queue: str = QUEUE, keys: Keys | None = None) -> Counter[str]:
    """Return how often each label lies somewhere in Redis."""
    return Counter(label for labels in places(client, queue, keys).values() for label in labels)


def nothing_left(client: redis.Redis, keys: Keys | None = None) -> bool:
    """Whether no message waits and none is held, in any bookkeeping."""
    keys = keys or Keys()
    if any(places(client, keys=keys, at_once=False).values()) or client.zcard(keys.unacked_index):
        return False
    # Only the session stands in a holder.
    return all(
        client.hlen(key) <= 1 for key in client.scan_iter(f"{keys.prefix}strategies:holder:*")
    )


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def moment(seconds: float) -> None:
    """Let a chosen stretch of time pass, where the instant itself is what is tested."""
    at = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= at, seconds + 5, "the chosen moment has come")


def internals(worker: Worker, timeout: float = 5) -> dict[str, Any]:
    """Ask a worker of `tests.faults.project` for its counts."""
    with Celery(broker=worker.broker_url, set_as_current=False) as app:

        def ask() -> dict[str, Any]:
            # A connection of its own: Kombu's pools keep ones that the test has cut.
            with app.connection_for_write() as connection:
                replies = app.control.broadcast(
                    "internals",
                    destination=[worker.hostname],
                    reply=True,
                    timeout=1,
                    limit=1,
                    connection=connection,
                )
            return dict(replies[0][worker.hostname]) if replies else {}

        return wait_until(ask, timeout + 10, f"{worker.hostname} answers")


def send(app: Celery, task: str, *args: Any, **options: Any) -> str:
    """Publish one job and return its id."""
    return str(app.send_task(PREFIX + task, args, **options).id)


class Producer:
    """A stock producer in a thread that numbers its jobs: `with Producer(url) as producer`."""

    def __init__(self, url: str, *, rate: float = 60, task: str = "record") -> None:
        self._app = make_app(url, stock=True)
        self._task = task
        self._pause = 1 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="producer")
        self.published: list[str] = []
        self.error: BaseException | None = None

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.wait(self._pause):
                label = str(number)
                send(self._app, self._task, label)
                self.published.append(label)
                number += 1
        except BaseException as error:  # noqa: BLE001  # shown by stop()
            self.error = error

    def stop(self) -> list[str]:
        """Stop and return the labels of all that Redis has accepted."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(20)
        self._app.close()
        if self.error is not None:
            raise self.error
        return self.published

    def __enter__(self) -> Producer:  # noqa: PYI034  # Self is new in Python 3.11
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
