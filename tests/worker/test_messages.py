"""What lies in the queues: bad messages, depth, retries, canvas, bindings."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.conftest import ProxyFactory
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.workers import celery, job, publish
from tests.worker.lab import ALL_POOLS, Lab
from tests.worker.test_order import TOPIC, run_script

LEVELS = {"strategies_priority_levels": 3}


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


# -- retry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_55_a_retry_keeps_queue_and_level(lab: Lab, pool: str) -> None:
    jobs = [job("record", "p2", queue="a", priority=2)]
    jobs += [job("outcome", "retry", queue="a", priority=1)]
    jobs += [job("record", "b", queue="b")]
    publish(lab.url, jobs, LEVELS, stock=False)
    lab.worker(pool, queues="ab", settings=LEVELS)
    lab.wait_count(2)
    # The second try stands in level 1 of the same queue: before p2, before b.
    assert lab.wait_started("b") == ["retry", "retry", "p2", "b"]
    assert [e.queue for e in lab.events() if e.label == "retry"] == ["a", "a"]
    lab.wait_settled()


# -- bad messages ------------------------------------------------------------------------------


def sample(lab: Lab) -> dict[str, Any]:
    """Return a real message, as a producer wrote it."""
    lab.send("record", "bad", queue="sample")
    return dict(json.loads(lab.db.rpop("sample")))  # type: ignore[arg-type]


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Lab], bytes]:
    def make(lab: Lab) -> bytes:
        message = copy.deepcopy(sample(lab))
        change(message)
        return json.dumps(message).encode()

    return make


BAD: dict[str, Callable[[Lab], bytes]] = {
    "not JSON": lambda lab: b"{nonsense",
    "not text": lambda lab: b"\xff\xfe\x00\x80",
    "empty": lambda lab: b"",
    "a number": lambda lab: b"12",
    "a list": lambda lab: b"[1, 2]",
    "null headers": changed(lambda m: m.update(headers=None)),
    "headers as a list": changed(lambda m: m.update(headers=[])),
    "no headers": changed(lambda m: m.pop("headers")),
    "no properties": changed(lambda m: m.pop("properties")),
    "no delivery_info": changed(lambda m: m["properties"].pop("delivery_info")),
    "no delivery_tag": changed(lambda m: m["properties"].pop("delivery_tag")),
    "unknown task": changed(lambda m: m["headers"].update(task="no.such.task")),
    "no task": changed(lambda m: m.update(headers={})),
    "task is a list": changed(lambda m: m["headers"].update(task=["test.record"])),
    "no id": changed(lambda m: m["headers"].pop("id")),
    "time limits are a number": changed(lambda m: m["headers"].update(timelimit=3)),
    "a time limit is text": changed(lambda m: m["headers"].update(timelimit=["1", None])),
    "stamps are a number": changed(lambda m: m["headers"].update(stamped_headers=7, stamps=8)),
    "eta is no time": changed(lambda m: m["headers"].update(eta="tomorrow")),
    "expires is a list": changed(lambda m: m["headers"].update(expires=[1])),
    "body is no base64": changed(lambda m: m.update(body="!")),
    "body is no JSON": changed(lambda m: m.update(body=base64.b64encode(b"{x").decode())),
    "body is null": changed(lambda m: m.update(body=None)),
    "pickle": changed(
        lambda m: m.update(
            {
                "content-type": "application/x-python-serialize",
                "content-encoding": "binary",
                "body": base64.b64encode(b"cos\nsystem\n(S'true'\ntR.").decode(),
            }
        )
    ),
    "unknown content type": changed(lambda m: m.update({"content-type": "application/x-none"})),
    "unknown body encoding": changed(lambda m: m["properties"].update(body_encoding="rot13")),
    "8 MB of nonsense": lambda lab: b"x" * (8 * 1024 * 1024),
    "8 MB unknown": changed(
        lambda m: m.update(
            headers={**m["headers"], "task": "no.such.task"},
            body=base64.b64encode(json.dumps([["x" * 6_000_000], {}, {}]).encode()).decode(),
        )
    ),
}


def test_case_56_the_next_good_job_runs_after_each_bad_message(lab: Lab) -> None:
    """All of them through one worker: set aside as they were, one log line each."""
    worker = lab.worker(queues="a")
    failures = []
    for name, make in BAD.items():
        raw = make(lab)
        lab.db.delete(lab.keys.set_aside("a"))
        lines = _errors(worker.log())
        lab.db.lpush("a", raw)
        lab.send("record", name, queue="a")
        lab.wait_ended(name)
        lab.wait_settled()
        aside: Any = lab.db.xrange(lab.keys.set_aside("a"))
        kept = [fields[b"message"] for _, fields in aside]
        if kept != [raw]:
            failures.append(f"{name}: {len(kept)} messages set aside")
        new = _errors(worker.log())[len(lines) :]
        if len(new) != 1:
            failures.append(f"{name}: {len(new)} lines: {new}")
    assert failures == []
    assert "bad" not in lab.started()
    assert worker.running


def test_case_56_a_call_with_unfit_arguments_is_a_failed_task(lab: Lab) -> None:
    """It is a task, and it fails as one: Celery's own outcome, with its slot free again."""
    body = base64.b64encode(b"[1, 2, 3]").decode()
    lab.db.lpush("a", changed(lambda m: m.update(body=body))(lab))
    lab.send("record", "good", queue="a")
    lab.worker(queues="a")
    lab.wait_ended("good")
    lab.wait_settled()
    assert lab.started() == ["good"]
    assert lab.set_aside("a") == []


def _errors(log: str) -> list[str]:
    """Return the first lines of what was logged above INFO, without our preface to Celery's own."""
    levels = (": WARNING/", ": ERROR/", ": CRITICAL/")
    return [
        line[:200]
        for line in log.splitlines()
        if line.startswith("[")
        and any(level in line for level in levels)
        and "The message that follows is not discarded" not in line
    ]


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_case_56_bad_messages_in_every_pool(lab: Lab, pool: str) -> None:
    for name in ("not JSON", "null headers", "unknown task", "pickle", "no task"):
        lab.db.lpush("a", BAD[name](lab))
        lab.send("record", f"after {name}", queue="a")
    worker = lab.worker(pool, queues="a")
    lab.wait_count(5)
    lab.wait_settled()
    assert len(lab.set_aside("a")) == 5
    assert all(entry["reason"] for entry in lab.set_aside("a"))
    assert worker.stop() == 0


def test_case_56_a_large_good_message_runs(lab: Lab) -> None:
    lab.worker(queues="a")
    lab.send("measure", "x" * (8 * 1024 * 1024), "big", queue="a")
    lab.wait_ended(f"big:{8 * 1024 * 1024}")
    lab.wait_settled()


def test_a_stock_worker_is_not_harmed_by_what_was_set_aside(lab: Lab) -> None:
    """No bad entry is in `unacked`, where it would end every stock worker's recovery."""
    lab.db.lpush("a", BAD["null headers"](lab), BAD["not JSON"](lab))
    lab.send("hold_late", "h", queue="a")
    lab.worker(queues="a")
    lab.wait_started("h")
    records: Any = lab.db.hvals(lab.keys.unacked)
    assert len(records) == 1
    message, exchange, routing_key = json.loads(records[0])
    assert message["headers"]["task"] == "test.hold_late"
    assert (exchange, routing_key) == ("", "a")
    lab.open()
    lab.wait_ended("h")


# -- depth -------------------------------------------------------------------------------------


def test_case_57_depth_counts_all_that_waits_and_purge_empties_it(lab: Lab) -> None:
    jobs = [job("hold_late", "mid", queue="a", priority=1)]
    publish(lab.url, jobs, LEVELS, stock=False)
    worker = lab.worker(queues="a", settings=LEVELS)
    lab.wait_started("mid")
    publish(
        lab.url, [job("record", f"p{p}", queue="a", priority=p) for p in (0, 1, 2, 2)], LEVELS,
        stock=False,
    )  # fmt: skip
    worker.quit()
    worker.wait_exit()
    assert lab.waiting("a") == ["p0", "mid", "p1", "p2", "p2"]
    # A list of a producer with other steps counts as well.
    lab.db.lpush(lab.keys.inbox("a", 7), sample_raw := json.dumps(sample(lab)))
    assert sample_raw
    lists = sum(lab.db.llen(key) for key in lab.keys.inboxes("a"))  # type: ignore[misc]
    assert lists == 5
    assert len(lab.waiting("a")) == 6
    with lab.app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.queue_declare("a", passive=True).message_count == 6
    done = celery("purge", "-f", "-Q", "a", broker_url=lab.url)
    assert "Purged 6 messages" in done.stdout
    assert lab.waiting("a") == []
    with lab.app.connection_for_read() as connection:
        assert connection.default_channel._size("a") == 0


# -- canvas ------------------------------------------------------------------------------------


CANVAS = """
import json
from celery import chain, chord, group
from tests.worker.project import app, gather
add = app.tasks["test.add"]
chained = chain(add.s(1, 2).set(queue="a"), add.s(3).set(queue="b")).apply_async()
grouped = group(add.s(i, i).set(queue="a") for i in range(4)).apply_async()
gathered = chord([add.s(i, 1).set(queue="a") for i in range(3)], gather.s().set(queue="b"))()
print(json.dumps([result.get(timeout=20) for result in (chained, grouped, gathered)]))
"""


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_chain_group_and_chord(lab: Lab, pool: str, protocol: int) -> None:
    settings = {"result_backend": lab.url, "task_protocol": protocol}
    lab.worker(pool, queues="ab", concurrency=2, settings=settings)
    chained, grouped, gathered = json.loads(run_script(lab, CANVAS, settings))
    assert (chained, grouped) == (6, [0, 2, 4, 6])
    # Celery knows the place of a result in a chord with protocol 2 only.
    assert (gathered if protocol == 2 else sorted(gathered)) == [1, 2, 3]
    lab.wait_settled()


# -- bindings ----------------------------------------------------------------------------------


def test_case_58_without_binding_keys_plain_queues_work_on(lab: Lab) -> None:
    worker = lab.worker(queues="a")
    lab.control("ping", worker)
    keys = lab.db.keys("_kombu.binding.*")
    assert keys
    lab.db.delete(*keys)
    lab.fill("a", ["after"])
    lab.wait_ended("after")
    assert lab.control("ping", worker) == {"ok": "pong"}


def test_case_58_a_deleted_topic_binding_is_declared_again(
    lab: Lab, redis_server: RedisServer, proxy_factory: ProxyFactory
) -> None:
    """By the worker when it connects anew, and by a producer that names the queue."""
    proxy = proxy_factory(redis_server)
    worker = lab.worker(app="proj", project={"proj.py": TOPIC}, url=proxy.url())
    wait_until(lambda: lab.db.scard("_kombu.binding.news") == 2, description="it is bound")
    lab.db.delete("_kombu.binding.news")
    news = Exchange("news", type="topic")
    lab.app.send_task(
        "test.record", ["named"], queue=Queue("eu", news, routing_key="eu.#"), routing_key="eu.de"
    )
    lab.wait_ended("named")
    lab.db.delete("_kombu.binding.news")
    proxy.drop_all()
    worker.wait_log("Trying to re-establish")
    wait_until(lambda: lab.db.scard("_kombu.binding.news") == 2, description="it is bound again")
    lab.app.send_task(
        "test.record", ["again"], exchange="news", routing_key="eu.de", declare=[news]
    )
    wait_until(lambda: lab.ended().count("again") == 2, description="both queues got it")
