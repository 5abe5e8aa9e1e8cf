"""Limits over lost replies, lost connections, missing scripts and a full Redis."""

from __future__ import annotations

import pytest

from tests.conftest import ProxyFactory, RedisFactory, WorkerFactory
from tests.support.proxy import command
from tests.support.redis_server import RedisServer
from tests.support.waiting import stays, wait_until

from .lab import Lab

ASKING = command("EVALSHA", containing=b"test.one:k")


def _lab(server: RedisServer, workers: WorkerFactory) -> Lab:
    return Lab(server.url(), server.client(), workers)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_permit_whose_reply_was_lost(
    lab: Lab, redis_server: RedisServer, proxy_factory: ProxyFactory, pool: str
) -> None:
    """The worker asks again and finds it: the job runs, once."""
    proxy = proxy_factory(redis_server)
    url = redis_server.url().replace(str(redis_server.port), str(proxy.port))
    lab.worker(pool, queues="a", concurrency=2, url=url)
    order = proxy.discard_reply(ASKING)
    lab.send("one", "first", queue="a")
    order.wait()
    lab.wait_started("first")
    lab.send("one", "second", queue="a")
    lab.wait_line("test.one:k", 1)
    lab.open(2)
    lab.wait_ended("first", "second")
    assert lab.started() == ["first", "second"]
    lab.wait_free("test.one:k")
    lab.wait_settled()


@pytest.mark.parametrize("early", [True, False])
def test_a_question_or_its_answer_no_is_lost(
    lab: Lab, redis_server: RedisServer, proxy_factory: ProxyFactory, early: bool
) -> None:
    """Whether Redis put it in line or never heard: it runs once, when it is its turn."""
    proxy = proxy_factory(redis_server)
    url = redis_server.url().replace(str(redis_server.port), str(proxy.port))
    worker = lab.worker("threads", queues="a", concurrency=2, url=url)
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    lose = proxy.discard_request if early else proxy.discard_reply
    order = lose(ASKING)
    lab.send("one", "second", queue="a")
    order.wait()
    lab.wait_line("test.one:k", 1)
    lab.idle(worker)
    lab.send("record", "plain", queue="a")
    lab.wait_ended("plain")
    lab.open(2)
    lab.wait_ended("first", "second")
    assert lab.started() == ["first", "plain", "second"]
    lab.wait_free("test.one:k")


def test_running_jobs_keep_their_permits_over_a_restart_of_redis(
    own_redis: RedisServer, redis_server: RedisServer, worker_factory: WorkerFactory
) -> None:
    lab = _lab(own_redis, worker_factory)
    lab.worker("threads", queues="a", concurrency=2, record_url=redis_server.url())
    records = redis_server.client()
    lab.db, broker = records, lab.db
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    lab.send("one", "second", queue="a")
    wait_until(lambda: broker.zcard(lab.keys.line("test.one:k")) == 1, description="it waits")
    own_redis.restart()
    lab.send("one", "third", queue="a")
    wait_until(
        lambda: broker.zcard(lab.keys.line("test.one:k")) == 2,
        description="two wait",
        swallow=(Exception,),
    )
    assert lab.started() == ["first"]
    lab.open(3)
    lab.wait_ended("first", "second", "third")
    assert lab.started() == ["first", "second", "third"]
    wait_until(lambda: not broker.exists(lab.keys.permits("test.one:k")), description="it is free")
    lab.close()
    broker.close()
    records.close()


def test_scripts_that_are_missing(lab: Lab) -> None:
    lab.worker("threads", queues="a", concurrency=2)
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    lab.db.script_flush()
    lab.send("one", "second", queue="a")
    lab.wait_line("test.one:k", 1)
    lab.db.script_flush()
    lab.open(2)
    lab.wait_ended("first", "second")
    lab.wait_free("test.one:k")


def test_a_full_redis_can_be_drained(
    redis_factory: RedisFactory, redis_server: RedisServer, worker_factory: WorkerFactory
) -> None:
    server = redis_factory(config={"maxmemory-policy": "noeviction"})
    lab = _lab(server, worker_factory)
    lab.worker("threads", queues="a", concurrency=4, record_url=redis_server.url())
    lab.db, broker = redis_server.client(), lab.db
    lab.send("three", "busy", queue="a")
    lab.wait_started("busy")
    broker.config_set("maxmemory", "100mb")
    for number in range(8):
        lab.send("three", f"n{number}", queue="a")
    wait_until(lambda: broker.zcard(lab.keys.line("test.three:k")) == 6, description="six wait")
    broker.config_set("maxmemory", "1")
    lab.open(9)
    lab.wait_count(9)
    assert lab.at_once("three") == 3
    wait_until(lambda: not broker.exists(lab.keys.line("test.three:k")), description="none waits")
    lab.close()
    broker.close()
    lab.db.close()


def test_a_cancelled_queue_keeps_its_jobs(lab: Lab) -> None:
    """What gets its permit after the queue was cancelled here runs elsewhere."""
    first = lab.worker("threads", queues="a", concurrency=2)
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    lab.send("one", "second", queue="a")
    lab.wait_line("test.one:k", 1)
    lab.control("cancel_consumer", first, queue="a")
    lab.open()
    lab.wait_ended("first")
    stays(lambda: lab.started() == ["first"], 0.5, "nobody reads the queue")
    assert lab.waiting("a") == ["second"]
    lab.worker("threads", queues="a")
    lab.open()
    lab.wait_ended("second")
    lab.wait_free("test.one:k")
