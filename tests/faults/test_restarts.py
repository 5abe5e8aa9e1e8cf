"""Cases 2, 30, 31, 32, 33, 36 and 46: a lost connection is an ordinary event."""

from __future__ import annotations

import pytest
import redis
from kombu.exceptions import OperationalError

from tests.conftest import ProxyFactory
from tests.faults.conftest import Publisher, Starter
from tests.faults.helpers import POOLS, cpu_seconds, internals, moment
from tests.support.apps import ended, started
from tests.support.redis_server import RedisServer
from tests.support.waiting import stays, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_case_2_and_33_five_restarts_in_three_seconds(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis, pool: str
) -> None:
    worker = start(pool)
    for number in range(5):
        broker.restart(kill=bool(number % 2))
    publish("record", "after")
    wait_until(lambda: ended(records) == ["after"], 8, "the job runs")
    # A green pool's remote control has a connection of its own, which may be back a little later.
    wait_until(lambda: worker.ping(1), 8, "inspect ping answers")
    assert worker.running
    publish("record", "once more")
    wait_until(lambda: ended(records) == ["after", "once more"], 5, "the next job runs")


def test_case_32_ping_at_once_after_a_restart(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis
) -> None:
    worker = start("threads")
    for number in range(3):
        broker.restart()
        wait_until(
            lambda: worker.ping(1),
            15,
            "inspect ping answers",
            swallow=(redis.RedisError, OperationalError),
        )
        publish("record", f"{number}")
        wait_until(lambda number=number: ended(records)[-1:] == [f"{number}"], 10, "the job runs")
    assert worker.running


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_case_30_idle_with_a_short_socket_timeout(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis, pool: str
) -> None:
    worker = start(pool, {"broker_transport_options": {"socket_timeout": 1}})
    if pool == "gevent":
        # Its remote control connects beside, after the worker is ready.
        worker.wait_log("pidbox: Connected")
    before = worker.log()
    stays(lambda: worker.running, 8, "the worker lives")
    assert worker.log()[len(before) :] == "", "nothing happened"
    publish("record", "after")
    wait_until(lambda: ended(records) == ["after"], 3, "the job runs")


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_case_30_a_timeout_in_a_call_recovers(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis, pool: str
) -> None:
    settings = {"broker_transport_options": {"socket_timeout": 1}, "task_acks_late": True}
    worker = start(pool, settings, concurrency=2)
    for round_ in range(3):
        for number in range(4):
            publish("sleep_for", 0.2, f"{round_} {number}")
        wait_until(lambda round_=round_: f"{round_} 0" in started(records), 15, "a job runs")
        broker.pause()
        moment(2.5)
        broker.resume()
    expected = sorted(f"{round_} {number}" for round_ in range(3) for number in range(4))
    wait_until(lambda: sorted(ended(records)) == expected, 30, "every job runs once")
    assert worker.running
    assert sorted(started(records)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_case_31_redis_closes_idle_connections(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis, pool: str
) -> None:
    with broker.client() as client:
        client.config_set("timeout", 5)
    worker = start(pool, {"task_acks_late": True})
    publish("sleep_for", 11, "long")
    wait_until(lambda: started(records) == ["long"], description="the long job runs")
    begin, before = cpu_seconds(worker.pid), worker.log()
    moment(10)
    used = cpu_seconds(worker.pid) - begin
    assert used < 0.5, f"{used:.2f} s of processor time in 10 s\n{worker.log()[len(before) :]}"
    assert "broker lost" not in worker.log(), "the connection is kept alive"
    wait_until(lambda: ended(records) == ["long"], 10, "the long job ends")
    publish("record", "next")
    wait_until(lambda: ended(records) == ["long", "next"], 5, "the next job runs")
    assert started(records) == ["long", "next"]
    assert worker.running


def _kill_connections(client: redis.Redis) -> None:
    """Cut all connections but the caller's."""
    mine = client.client_id()
    for entry in client.client_list():
        if int(entry["id"]) != mine:
            client.execute_command("CLIENT", "KILL", "ID", entry["id"])


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_case_36_and_46_twenty_reconnects_leave_nothing_behind(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis, pool: str
) -> None:
    worker = start(pool)
    with broker.client() as client:
        client.ping()
        for round_ in range(21):
            if round_:
                _kill_connections(client)
                wait_until(
                    lambda round_=round_: worker.log().count("] Connected to redis") == round_ + 1,
                    15,
                    f"reconnect {round_}",
                )
            publish("record", f"{round_}")
            wait_until(
                lambda round_=round_: ended(records)[-1:] == [f"{round_}"], 10, f"job {round_} runs"
            )
            if round_ == 2:  # what a first reconnect sets up once is part of the baseline
                internals(worker)  # its reply needs a connection too
                counts = internals(worker)
                moment(1)
                clients = len(client.client_list())
        wait_until(
            lambda: len(client.client_list()) <= clients, 15, f"CLIENT LIST is back to {clients}"
        )
    after = internals(worker)
    assert after["steps"] == counts["steps"]
    assert len(set(after["steps"])) == len(after["steps"])
    for what in ("on_tick", "readers", "timers", "threads", "fds"):
        assert after.get(what, 0) <= counts.get(what, 0), f"{what}: {counts} became {after}"
    assert sorted(started(records)) == sorted(map(str, range(21)))


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_half_open_connections_are_noticed(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    records: redis.Redis,
    publish: Publisher,
    pool: str,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(pool, url=proxy.url())
    assert internals(worker)["held"] == 0
    proxy.black_hole()
    # The connections stay open and silent; a peer that vanished without a word is like this.
    worker.wait_log(lambda log: "Connection to broker lost" in log, 60)
    publish("record", "after")
    proxy.heal()
    wait_until(lambda: ended(records) == ["after"], 30, "the job runs")
    assert worker.running
