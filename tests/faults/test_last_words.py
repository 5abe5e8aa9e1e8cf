"""What a worker must still manage when several things go wrong at once: a shutdown in an outage, late loops, ruins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import redis
from celery import Celery
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_strategies.store.keys import Keys
from celery_strategies.transport import reader as reader_module
from celery_strategies.transport import session as session_module
from celery_strategies.transport.patience import Patience
from tests.conftest import ProxyFactory
from tests.faults.conftest import Publisher, Starter
from tests.faults.helpers import QUEUE, nothing_left
from tests.faults.test_refusals import Loop
from tests.support.apps import ended, make_app, started
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


@pytest.fixture
def app(broker_url: str) -> Iterator[Celery]:
    app = make_app(broker_url)
    yield app
    app.close()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_job_that_ends_in_a_drain_begun_during_a_reconnect_is_acknowledged(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
    pool: str,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(pool, {"task_acks_late": True}, url=proxy.url(), concurrency=1)
    publish("sleep_for", 5, "long")
    wait_until(lambda: started(records) == ["long"], description="the job runs")
    proxy.refuse()
    proxy.drop_all()
    wait_until(lambda: "Cannot connect to redis" in worker.log(), 15, "it tries to reconnect")
    worker.terminate()
    wait_until(lambda: "Warm shutdown" in worker.log(), 15, "it was told to stop")
    proxy.accept()
    worker.wait_exit(30)
    assert ended(records) == ["long"]
    with broker.client() as client:
        assert nothing_left(client)


def test_many_failed_connections_in_a_drain_leave_room_for_one_that_works(
    app: Celery, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(app)
    monkeypatch.setattr(loop, "work", lambda: None)
    loop.turn()
    app.send_task("test.record", ["one"], argsrepr="one")
    wait_until(lambda: loop.turn() or loop.unsettled, description="a message is held", interval=0)
    open_session = session_module.Session.open
    failures = iter(range(12))

    def failing(self: Any, patience: Patience) -> dict[str, bytes]:
        if next(failures, None) is not None:
            raise RedisConnectionError("not yet")
        return open_session(self, patience)

    monkeypatch.setattr(session_module.Session, "open", failing)
    loop.reader.drain()
    loop.reader.detach()
    # Two attempts for each settle: all but the last find nobody.
    Loop.work(loop)
    wait_until(
        lambda: loop.reader.drained.settle_now() or nothing_left(redis_db),
        description="the ack arrives in the end",
        interval=0,
    )
    loop.reader.shutdown()
    loop.disconnect()


def test_a_loop_that_was_late_does_not_take_redis_for_dead(
    app: Celery, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(app)
    loop.turn()
    wait_until(lambda: loop.turn() or not loop.reader._hungry, description="it is idle")
    session = loop.reader.session
    assert session is not None
    monkeypatch.setattr(reader_module, "REPLY_TIMEOUT", 0.05)
    began = monotonic()
    session.link.send(session.store.refresh([], 1000), lambda _reply: None)
    # The reply lies there unread for longer than Redis would be waited for, as after a long solo job.
    wait_until(lambda: monotonic() - began > 0.2, description="the loop is late", interval=0.02)
    loop.reader.on_tick()
    assert session.link.alive
    loop.reader.shutdown()
    loop.disconnect()


@pytest.mark.parametrize("record", [b"\xff\xfe", b"{}", b"[1]", b"not json", b"[1, 2, 3, 4]"])
def test_an_unacked_record_that_nobody_can_read_stops_no_recovery(
    app: Celery, redis_db: redis.Redis, record: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys()
    message = json.dumps(
        {
            "body": "W1tdLCB7fSwge31d",
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"task": "test.record", "id": "good", "argsrepr": "good"},
            "properties": {
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": QUEUE},
                "delivery_tag": "stock",
                "priority": 0,
            },
        }
    )
    redis_db.hset(keys.unacked, mapping={"bad": record, "stock": f'[{message}, "", "{QUEUE}"]'})
    redis_db.zadd(keys.unacked_index, {"bad": 1, "stock": 2})
    loop = Loop(app)
    wait_until(
        lambda: loop.turn() or loop.done == ["good"],
        description="the record behind it came back and ran",
        interval=0,
    )
    assert redis_db.hget(keys.unacked, "bad") == record
    assert redis_db.zscore(keys.unacked_index, "bad") is None
    assert sum("cannot be restored" in line.getMessage() for line in caplog.records) == 1
    loop.reader.shutdown()
    loop.disconnect()


def test_one_refused_kind_of_call_neither_stops_nor_is_forgiven_by_the_others(
    app: Celery, redis_db: redis.Redis
) -> None:
    loop = Loop(app)
    loop.turn()
    loop.connection.default_channel.basic_consume("other", False, loop.message, "other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "work", lambda: None)
        app.send_task("test.record", ["a"], argsrepr="a", queue="other")
        wait_until(lambda: loop.turn() or loop.unsettled, description="it is held", interval=0)
    # A returned set that is none: nothing can be given back to that queue.
    redis_db.set(Keys().returned("other"), "in the way")
    loop.unsettled.clear()
    loop.reader.settler.give_back(list(loop.reader.held))
    app.send_task("test.record", ["b"], argsrepr="b")
    wait_until(
        lambda: loop.turn() or len(loop.done) == 1,
        description="another queue is read on",
        interval=0,
    )
    redis_db.delete(Keys().returned("other"))
    wait_until(
        lambda: loop.turn() or len(loop.done) == 2,
        15,
        "the message goes back and runs once it can",
        interval=0,
    )
    loop.reader.shutdown()
    loop.disconnect()
    assert nothing_left(redis_db)
