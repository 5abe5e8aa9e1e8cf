"""Case 35, and what else must hold for a job that runs while the connection is lost."""

from __future__ import annotations

import pytest
import redis

from celery_strategies import Strategy
from celery_strategies.store.keys import Keys
from celery_strategies.store.link import Link
from celery_strategies.store.store import Grant, SourceKeys, TakePlan
from tests.conftest import ProxyFactory
from tests.faults.conftest import Publisher, Starter
from tests.faults.helpers import QUEUE, internals, nothing_left
from tests.support.apps import ended, started
from tests.support.redis_server import RedisServer
from tests.support.waiting import stays, wait_until

CANCEL = "worker_cancel_long_running_tasks_on_connection_loss"


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_case_35_a_running_job_goes_on_and_is_acknowledged_once(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
    pool: str,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(pool, {"task_acks_late": True, CANCEL: False}, url=proxy.url(), concurrency=2)
    publish("sleep_for", 4, "long")
    wait_until(lambda: started(records) == ["long"], description="the long job runs")
    connected = worker.log().count("] Connected to redis")
    proxy.drop_all()
    wait_until(
        lambda: worker.log().count("] Connected to redis") > connected, 10, "the worker reconnects"
    )
    # One slot is taken by the long job, the other one is free.
    publish("sleep_for", 1, "second")
    publish("record", "third")
    wait_until(lambda: "second" in started(records), 5, "the free slot is used")
    assert "third" not in started(records)
    with broker.client() as client:
        wait_until(lambda: sorted(ended(records)) == ["long", "second", "third"], 15, "all end")
        wait_until(lambda: nothing_left(client), 10, "all are acknowledged")
    assert sorted(started(records)) == ["long", "second", "third"]
    assert internals(worker)["held"] == 0


@pytest.mark.slow
def test_case_35_cancelled_jobs_run_again(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(
        "prefork", {"task_acks_late": True, CANCEL: True}, url=proxy.url(), concurrency=2
    )
    for label in ("a", "b"):
        publish("sleep_for", 5, label)
    wait_until(lambda: sorted(started(records)) == ["a", "b"], description="both run")
    proxy.drop_all()
    wait_until(lambda: sorted(ended(records)) == ["a", "b"], 40, "both run again, to their end")
    assert sorted(started(records)) == ["a", "a", "b", "b"]
    with broker.client() as client:
        wait_until(lambda: nothing_left(client), 10, "all are acknowledged")
    # Both slots came back.
    for label in ("c", "d"):
        publish("sleep_for", 1, label)
    wait_until(lambda: {"c", "d"} <= set(started(records)), 5, "both slots are free")
    assert internals(worker)["held"] <= 2


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_job_that_ends_while_disconnected_is_acknowledged_afterwards(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
    pool: str,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(pool, {"task_acks_late": True, CANCEL: False}, url=proxy.url())
    publish("sleep_for", 1, "one")
    wait_until(lambda: started(records) == ["one"], description="the job runs")
    proxy.refuse()
    wait_until(lambda: ended(records) == ["one"], 10, "the job ends")
    with broker.client() as client:
        assert client.hlen("unacked") == 1, "still recorded: nobody could be told"
        proxy.accept()
        wait_until(lambda: nothing_left(client), 15, "it is acknowledged")
    publish("record", "two")
    wait_until(lambda: ended(records) == ["one", "two"], 10, "the next job runs")
    assert started(records) == ["one", "two"]
    assert worker.running


def test_orphans_of_a_living_worker_go_back(
    start: Starter,
    broker: RedisServer,
    publish: Publisher,
    records: redis.Redis,
    proxy_factory: ProxyFactory,
) -> None:
    """A holder entry whose message the worker never saw goes back when it next joins."""
    proxy = proxy_factory(broker)
    worker = start("threads", {"task_acks_late": True}, url=proxy.url())
    with broker.client() as client:
        (holder,) = client.scan_iter("strategies:holder:*")
        session = client.hget(holder, "").decode()
        name = holder.decode().removeprefix("strategies:holder:")
        # A take in the worker's name that it knows nothing of.
        worker.pause()
        publish("record", "orphan")
        plan = TakePlan(Keys(), name, Strategy.PRIORITY, [SourceKeys(QUEUE, None, (0,))])
        link = Link(broker.client(protocol=3).connection_pool.get_connection(), lambda: None)
        assert len(Grant.parse(link.call(plan.call(session, 1))).deliveries) == 1
        link.close()
        worker.resume()
        proxy.drop_all()
        wait_until(lambda: ended(records) == ["orphan"], 15, "the orphan runs")
        wait_until(lambda: nothing_left(client), 10, "it is acknowledged")
    assert worker.running


@pytest.mark.slow
def test_a_job_that_never_started_keeps_its_place_over_a_reconnect(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
) -> None:
    proxy = proxy_factory(broker)
    settings = {"task_acks_late": True, CANCEL: False, "strategies_read_ahead": 2}
    worker = start("prefork", settings, url=proxy.url())
    for label in "abcde":
        publish("sleep_for", 1, label)
    wait_until(lambda: started(records) == ["a"], description="the first runs")
    for _ in range(3):
        connected = worker.log().count("] Connected to redis")
        proxy.drop_all()
        wait_until(
            lambda connected=connected: worker.log().count("] Connected to redis") > connected,
            10,
            "the worker reconnects",
        )
    wait_until(lambda: ended(records) == list("abcde"), 20, "all run, in their order")
    assert started(records) == list("abcde")
    with broker.client() as client:
        wait_until(lambda: nothing_left(client), 10, "all are acknowledged")
        stays(lambda: nothing_left(client), 1, "nothing comes back")
