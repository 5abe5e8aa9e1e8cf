"""Remote control of a strategies worker, and changes of its queues while it runs."""

from __future__ import annotations

import pytest

from tests.conftest import ProxyFactory
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.worker.lab import ALL_POOLS, Lab


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_looking_at_a_busy_worker(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, queues="ab", concurrency=2, settings={"strategies_ranks": {"b": 1}})
    ids = [lab.send("hold", f"h{i}", queue="b") for i in range(2)]
    lab.wait_started("h0", "h1")
    lab.fill("a", ["n0"])
    assert lab.control("ping", worker) == {"ok": "pong"}
    assert {task["id"] for task in lab.control("active", worker)} == set(ids)
    active = lab.control("active", worker)[0]
    assert active["delivery_info"]["routing_key"] == "b"
    assert lab.control("reserved", worker) == []
    assert lab.control("scheduled", worker) == []
    stats = lab.control("stats", worker)
    assert stats["strategies"]["strategy"] == "priority"
    assert stats["strategies"]["slots"] == 2
    assert stats["strategies"]["tracking"] is True
    assert [source["queue"] for source in stats["strategies"]["sources"]] == ["b", "a"]
    assert stats["prefetch_count"] is not None
    assert set(lab.control("query_task", worker, ids=ids)) == set(ids)
    assert "test.hold" in lab.control("registered", worker)
    assert [queue["name"] for queue in lab.control("active_queues", worker)] == ["a", "b"]
    lab.open(2)
    lab.wait_count(3)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
def test_revoke_with_terminate_frees_the_slot(lab: Lab, signal: str) -> None:
    worker = lab.worker(queues="a")
    doomed = lab.send("hold_late", "doomed", queue="a")
    lab.wait_started("doomed")
    lab.fill("a", ["next"])
    lab.control("revoke", worker, task_id=doomed, terminate=True, signal=signal)
    lab.wait_ended("next")
    lab.wait_settled()
    assert lab.started() == ["doomed", "next"]


def test_revoke_of_what_was_read_ahead(lab: Lab) -> None:
    worker = lab.worker(queues="a", settings={"strategies_read_ahead": 2})
    lab.send("hold", "h", queue="a")
    lab.wait_started("h")
    ids = [lab.send("record", f"n{i}", queue="a") for i in range(4)]
    wait_until(lambda: lab.waiting("a") == ["n2", "n3"], description="two are read ahead")
    lab.control("revoke", worker, task_id=ids[0])
    lab.open()
    assert lab.wait_count(4) == ["h", "n1", "n2", "n3"]
    lab.wait_settled()


# -- queues ------------------------------------------------------------------------------------


def test_an_added_queue_takes_the_place_of_its_rank(lab: Lab) -> None:
    worker = lab.worker(queues="ab", settings={"strategies_ranks": {"first": 0, "b": 5}})
    assert "ok" in lab.control("add_consumer", worker, queue="first")
    assert "ok" in lab.control("add_consumer", worker, queue="last")
    sources = lab.control("stats", worker)["strategies"]["sources"]
    assert [s["queue"] for s in sources] == ["first", "b", "a", "last"]
    lab.send("hold", "h", queue="a")
    lab.wait_started("h")
    for queue in ("last", "a", "b", "first"):
        lab.fill(queue, [queue])
    lab.open()
    assert lab.wait_count(5)[1:] == ["first", "b", "a", "last"]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_case_47_queues_survive_a_lost_connection(
    lab: Lab, pool: str, redis_server: RedisServer, proxy_factory: ProxyFactory
) -> None:
    """Cancelled and added again, or added: same rank, same place, also over a reconnect."""
    proxy = proxy_factory(redis_server)
    worker = lab.worker(
        pool, queues="abc", url=proxy.url(), settings={"strategies_ranks": {"new": 1, "c": 0}}
    )

    def order() -> list[str]:
        return [s["queue"] for s in lab.control("stats", worker)["strategies"]["sources"]]

    # One after the other: without a hub, Celery changes consumers up to two seconds after its
    # answer, and Celery 5.6 then takes the last command first.
    for command, queue, then in (
        ("cancel_consumer", "a", "cb"),
        ("cancel_consumer", "b", "c"),
        ("add_consumer", "new", ["c", "new"]),
        ("add_consumer", "a", ["c", "new", "a"]),
    ):
        lab.control(command, worker, queue=queue)
        wait_until(lambda then=then: order() == list(then), description=f"{command} {queue}")
    lab.send("hold", "h", queue="a")
    lab.wait_started("h")
    assert proxy.drop_all()
    worker.wait_log("Trying to re-establish")
    lab._answering.clear()
    assert order() == ["c", "new", "a"]
    for queue in ("b", "a", "new", "c"):
        lab.fill(queue, [queue])
    lab.open()
    assert lab.wait_count(4) == ["h", "c", "new", "a"]
    assert lab.waiting("b") == ["b"]


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_case_48_cancelling_in_the_middle_of_reads(lab: Lab, pool: str) -> None:
    """Many times, while messages come: no exit, and every message in its order, once."""
    worker = lab.worker(pool, queues="ab")
    lab.control("ping", worker)
    to = {"destination": [worker.hostname]}
    labels = names("n", 100)
    for label in labels:
        lab.app.control.cancel_consumer("a", **to)
        lab.send("record", label, queue="a")
        lab.app.control.add_consumer("a", **to)
    # Celery does not keep the order of two commands that arrive together: the last word is one
    # that comes alone.
    worker.wait_log(lambda log: log.count("Canceling queue a") == len(labels))
    lab.control("add_consumer", worker, queue="a")
    assert lab.wait_count(100) == labels
    lab.wait_settled()
    assert worker.running
    assert "Traceback" not in worker.log()


def test_case_48_a_message_of_a_cancelled_queue_waits_at_the_front(lab: Lab) -> None:
    worker = lab.worker(queues="ab", settings={"strategies_read_ahead": 3})
    lab.send("hold", "h", queue="b")
    lab.wait_started("h")
    lab.control("cancel_consumer", worker, queue="a")
    lab.fill("a", names("n", 3))
    lab.open()
    lab.fill("b", ["b"])
    lab.wait_ended("b")
    assert lab.waiting("a") == names("n", 3)
    lab.control("add_consumer", worker, queue="a")
    assert lab.wait_count(5)[2:] == names("n", 3)
