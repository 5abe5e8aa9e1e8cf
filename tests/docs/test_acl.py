"""The ACL in the documentation is enough for a worker, and what it must not miss is there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.conftest import RedisFactory, WorkerFactory
from tests.support.apps import started
from tests.support.waiting import wait_until
from tests.support.workers import celery, job, publish

from . import pages

SCRIPTS = pages.ROOT / "celery_strategies" / "store" / "lua"
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


def test_every_command_of_a_script_is_allowed() -> None:
    text = "".join(path.read_text("utf-8") for path in SCRIPTS.glob("*.lua"))
    used = set(re.findall(r"\b(?:call|try)\(\s*'([A-Z]+)'", text))
    # What is named in a table of calls, or chosen between two.
    used |= set(re.findall(r"[{(](?:i == 0 and )?'([A-Z]+)'(?:,| or)", text))
    assert {"EVALSHA", "SORT"}.isdisjoint(used)
    allowed = {rule[1:].partition("|")[0].upper() for rule in rules() if rule.startswith("+")}
    assert len(used) > 40
    assert used <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    "sorted_by",
    [
        {},
        {"strategies_fair_share": True, "strategies_max_in_flight": {"*": 2}},
        {"strategies_group_mode": "fifo"},
    ],
    ids=["plain", "fair", "groups"],
)
def test_a_worker_and_a_producer_with_these_rights_do_all_they_do(
    redis_factory: RedisFactory, worker_factory: WorkerFactory, sorted_by: dict[str, Any]
) -> None:
    settings = {**SETTINGS, **sorted_by}
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
    publish(server.url(), [job("record", "old", queue="alerts")], settings)
    raw = admin.rpop("p:alerts")
    tag = json.loads(raw)["properties"]["delivery_tag"]
    admin.hset("p:unacked", tag, json.dumps([json.loads(raw), "", "alerts"]))
    admin.zadd("p:unacked_index", {tag: 1})
    admin.lpush("p:alerts", "not JSON")

    worker = worker_factory(
        as_worker,
        queues=("alerts", "emails"),
        concurrency=2,
        settings=settings,
        record_url=server.url(),
        gossip=True,
        mingle=True,
        heartbeat=True,
    )
    tags = {"headers": {"fair_key": "acme", "fair_weight": 3, "group_key": "acme"}}
    jobs = [job("record", str(number), queue="emails", **tags) for number in range(10)]
    jobs += [
        job("reject", "again", True, queue="alerts"),
        job("retry_once", "retry", queue="alerts"),
    ]
    jobs += [
        job("record", "later", queue="alerts", countdown=1),
        job("kill_self", "killed", queue="alerts"),
    ]
    publish(as_producer, jobs, settings, stock=False)
    wait_until(
        lambda: {"old", "later", "again", "retry", "killed"} <= set(started(admin)),
        timeout=40,
        description="all jobs ran",
    )
    wait_until(lambda: admin.hlen("p:unacked") == 0, description="all are settled")
    assert admin.xlen("p:strategies:{alerts}:set_aside") == 1

    celery("inspect", "ping", broker_url=as_worker, settings=settings)
    celery("control", "cancel_consumer", "emails", broker_url=as_worker, settings=settings)
    if sorted_by:
        for words in (["weight", "acme", "2"], ["cap", "acme", "1"], ["cap", "*", "none"]):
            celery("strategies", *words, "-q", "emails", broker_url=as_worker, settings=settings)
    worker.stop()
    publish(as_producer, [job("record", "left", queue="emails", **tags)], settings, stock=False)
    celery("strategies", "unsort", "alerts", "emails", broker_url=as_worker, settings=settings)
    celery("purge", "-f", "-Q", "alerts", broker_url=as_worker, settings=settings)

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    entries = [
        {text(key): text(value) for key, value in entry.items()} for entry in admin.acl_log()
    ]
    # redis-py introduces itself with CLIENT SETINFO, which servers before 7.2 cannot allow.
    refused = [entry for entry in entries if entry["object"] not in ("client", "client|setinfo")]
    assert refused == []
