"""A prefix, and a user who may do what the documentation lists and nothing else: every feature works."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_strategies.store import admin
from celery_strategies.store.keys import Keys
from tests.conftest import RedisFactory, WorkerFactory
from tests.docs.test_acl import producer_rules, rules
from tests.fair.lab import CAPPED, FairLab, names
from tests.support.apps import RAN
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.workers import celery, job, publish

OPTIONS: dict[str, Any] = {
    "broker_transport_options": {"global_keyprefix": "p:", "visibility_timeout": 5},
    "worker_send_task_events": True,
    "strategies_stale_after": 2,
}
FAIR = {**OPTIONS, **CAPPED}
GROUPS = {**OPTIONS, "strategies_group_mode": "fifo"}


@pytest.mark.slow
def test_case_09_every_feature_with_a_prefix_and_the_documented_rights(  # noqa: PLR0915  # a list
    redis_factory: RedisFactory,
    worker_factory: WorkerFactory,
    redis_server: RedisServer,
    redis_db: redis.Redis,
) -> None:
    server = redis_factory()
    db, keys = server.client(), Keys(prefix="p:")
    db.execute_command("ACL", "SETUSER", "worker", *rules())
    db.execute_command("ACL", "SETUSER", "producer", *producer_rules())
    db.execute_command("ACL", "LOG", "RESET")
    as_worker, as_producer = (
        server.url().replace("redis://", f"redis://{user}:secret@")
        for user in ("worker", "producer")
    )
    lab = FairLab(as_worker, db, worker_factory, **OPTIONS)
    lab.keys = keys
    records = FairLab(redis_server.url(), redis_db, worker_factory)

    def start(settings: dict[str, Any], queue: str, **options: Any) -> Any:
        options = {"record_url": redis_server.url(), "concurrency": 2, **options}
        return lab.plain("prefork", queues=[queue], settings=settings, **options)

    def keyed(labels: list[str], queue: str, header: str, task: str = "record", **options: Any):
        return [
            job(task, label, queue=queue, headers={header: label[0]}, **options) for label in labels
        ]

    fair = start(FAIR, "fair", gossip=True, mingle=True, heartbeat=True)
    groups = start(GROUPS, "groups")
    jobs = keyed(names("a", 20), "fair", "fair_key") + keyed(names("b", 20), "fair", "fair_key")
    jobs += keyed(names("g", 10), "groups", "group_key") + keyed(
        ["g-r"], "groups", "group_key", "again"
    )
    jobs += keyed(["a-later"], "fair", "fair_key", countdown=1.5)
    jobs += keyed(["g-later"], "groups", "group_key", countdown=1.5)
    jobs += keyed(["a-killed"], "fair", "fair_key", "kill_self")
    jobs += [job("no_such_task", "unknown", queue="fair", headers={"fair_key": "a"})]
    publish(as_producer, jobs, OPTIONS, stock=False)
    records.wait_ended("a-later", "g-later", "a-killed", "g-r", *names("a", 20), *names("g", 10))
    wait_until(lambda: db.xlen(keys.set_aside("fair")) == 1, description="the unknown one")

    # Steering, while jobs wait behind the caps.
    publish(as_producer, keyed(names("h", 6), "fair", "fair_key", "hold"), OPTIONS, stock=False)
    records.wait_started("h-0")
    client = redis.Redis.from_url(as_worker)
    admin.set_weight(client, keys, "fair", "h", 3)
    admin.set_cap(client, keys, "fair", "*", 2)
    wait_until(lambda: len([x for x in records.started() if x[0] == "h"]) == 2, 20, "two at once")
    admin.set_cap(client, keys, "fair", "*", None)
    admin.set_weight(client, keys, "fair", "h", None)

    # A rate limit, and its end.
    limit = ["rate_limit", "test.again", "1/h"]
    celery("control", *limit, broker_url=as_worker, settings=OPTIONS)
    again = keyed(["k-1", "k-2", "k-3"], "groups", "group_key", "again")
    publish(as_producer, again, OPTIONS, stock=False)
    wait_until(lambda: db.zcard(keys.delayed("groups")) >= 2, 20, "they wait for their limit")
    celery("control", "rate_limit", "test.again", "0", broker_url=as_worker, settings=OPTIONS)
    records.wait_ended("k-1", "k-2", "k-3")

    # A death: others bury. A large backlog: somebody sorts.
    fair.kill()
    second = start(FAIR, "fair")
    publish(as_producer, keyed(names("x", 700), "fair", "fair_key"), OPTIONS, stock=False)
    wait_until(lambda: db.llen("p:fair") == 0, 30, "all is sorted")
    records.open(10)
    records.wait_ended("h-5", timeout=30)
    celery("inspect", "scheduled", broker_url=as_worker, settings=OPTIONS)
    second.stop()
    groups.stop()

    publish(as_producer, keyed(names("z", 5), "fair", "fair_key"), OPTIONS, stock=False)
    done = celery("strategies", "unsort", "fair", "groups", broker_url=as_worker, settings=OPTIONS)
    assert "fair:" in done.stdout
    celery("purge", "-f", "-Q", "fair,groups", broker_url=as_worker, settings=OPTIONS)
    assert db.llen("p:fair") == 0

    outside = {name for name in db.keys("*") if not name.startswith(b"p:")}
    assert outside <= {RAN.encode()}
    entries = [
        {_text(name): _text(value) for name, value in entry.items()} for entry in db.acl_log()
    ]
    # redis-py introduces itself with CLIENT SETINFO, which servers before 7.2 cannot allow.
    refused = [entry for entry in entries if entry["object"] not in ("client", "client|setinfo")]
    assert refused == []
    lab.close()
    records.close()
    client.close()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
