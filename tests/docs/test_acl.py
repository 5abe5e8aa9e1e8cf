"""The ACL in the documentation is enough for a worker, and what it must not miss is there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import RedisFactory, WorkerFactory
from tests.support.apps import started
from tests.support.waiting import wait_until
from tests.support.workers import celery, job, publish

from . import pages

SETTINGS: dict[str, Any] = {
    "broker_transport_options": {"global_keyprefix": "p:", "visibility_timeout": 5},
    "worker_send_task_events": True,
}


def rules() -> list[str]:
    """Return the words of the ACL SETUSER line in the documentation, after the user's name."""
    text = pages.section(pages.read("docs/operating.md"), "ACL")
    line = text.partition("ACL SETUSER worker ")[2].partition("```")[0]
    return line.split()


def producer_rules() -> list[str]:
    text = pages.section(pages.read("docs/operating.md"), "ACL")
    line = text.partition("A producer needs `")[2].partition("`")[0]
    return ["on", ">secret", "~p:*", "resetchannels", "&p:*", "-@all", *line.split()]


def test_the_rules_are_read() -> None:
    assert {"~p:*", "-@all", "+evalsha"} <= set(rules())
    assert "+lpush" in producer_rules()


@pytest.mark.slow
def test_a_worker_and_a_producer_with_these_rights_do_all_they_do(
    redis_factory: RedisFactory, worker_factory: WorkerFactory
) -> None:
    server = redis_factory()
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "worker", *rules())
    admin.execute_command("ACL", "SETUSER", "producer", *producer_rules())
    admin.execute_command("ACL", "LOG", "RESET")
    as_worker, as_producer = (
        server.url().replace("redis://", f"redis://{user}:secret@")
        for user in ("worker", "producer")
    )

    # What a stock worker that died long ago held, and what nobody can run.
    publish(server.url(), [job("record", "old", queue="alerts")], SETTINGS)
    raw = admin.rpop("p:alerts")
    tag = json.loads(raw)["properties"]["delivery_tag"]
    admin.hset("p:unacked", tag, json.dumps([json.loads(raw), "", "alerts"]))
    admin.zadd("p:unacked_index", {tag: 1})
    admin.lpush("p:alerts", "not JSON")

    worker = worker_factory(
        as_worker,
        queues=("alerts", "emails"),
        concurrency=2,
        settings=SETTINGS,
        record_url=server.url(),
        gossip=True,
        mingle=True,
        heartbeat=True,
    )
    jobs = [job("record", str(number), queue="emails") for number in range(10)]
    jobs += [
        job("reject", "again", True, queue="alerts"),
        job("retry_once", "retry", queue="alerts"),
    ]
    jobs += [
        job("record", "later", queue="alerts", countdown=1),
        job("kill_self", "killed", queue="alerts"),
    ]
    publish(as_producer, jobs, SETTINGS, stock=False)
    wait_until(
        lambda: {"old", "later", "again", "retry", "killed"} <= set(started(admin)),
        timeout=40,
        description="all jobs ran",
    )
    wait_until(lambda: admin.hlen("p:unacked") == 0, description="all are settled")
    assert admin.xlen("p:strategies:{alerts}:set_aside") == 1

    celery("inspect", "ping", broker_url=as_worker, settings=SETTINGS)
    celery("control", "cancel_consumer", "emails", broker_url=as_worker, settings=SETTINGS)
    worker.stop()
    celery("strategies", "unsort", "alerts", broker_url=as_worker, settings=SETTINGS)
    celery("purge", "-f", "-Q", "alerts", broker_url=as_worker, settings=SETTINGS)

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    entries = [
        {text(key): text(value) for key, value in entry.items()} for entry in admin.acl_log()
    ]
    # redis-py introduces itself with CLIENT SETINFO, which servers before 7.2 cannot allow.
    refused = [entry for entry in entries if entry["object"] not in ("client", "client|setinfo")]
    assert refused == []
