"""Every way to reach a Redis, and what the server or the client may be lacking: case 9 and its kin."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_strategies.store.keys import Keys
from tests.conftest import RedisFactory
from tests.faults.conftest import Starter
from tests.faults.helpers import places, send
from tests.support import redis_server as servers
from tests.support.apps import ended, make_app, started
from tests.support.redis_server import RedisServer, SentinelCluster
from tests.support.waiting import wait_until
from tests.support.workers import Worker

LATE = {"task_acks_late": True}


def _jobs(
    server: RedisServer,
    worker: Worker,
    records: redis.Redis,
    settings: dict[str, Any] | None = None,
    within: float = 5,
) -> None:
    """Run jobs one by one, each from idle, then reconnect and run one more."""
    with make_app(worker.broker_url, settings, stock=True) as app:
        for label in ("a", "b", "c"):
            send(app, "record", label)
            wait_until(lambda label=label: ended(records)[-1:] == [label], within, f"{label} runs")
        send(app, "reject", "again", True)
        wait_until(lambda: ended(records)[-1:] == ["again"], 2, "the requeued one runs at once")
        send(app, "no_such_task", "unknown")
        with server.client() as client:
            mine = client.client_id()
            for entry in client.client_list():
                if int(entry["id"]) != mine:
                    client.execute_command("CLIENT", "KILL", "ID", entry["id"])
    with make_app(worker.broker_url, settings, stock=True) as app:
        send(app, "record", "d")
        wait_until(lambda: ended(records)[-1:] == ["d"], 15, "a job runs after a reconnect")
    assert started(records) == ["a", "b", "c", "again", "again", "d"]
    assert worker.running


@pytest.mark.parametrize("transport", ["tcp", "unix", "tls"])
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_transports(
    redis_factory: RedisFactory, start: Starter, records: redis.Redis, transport: str, pool: str
) -> None:
    with_tls = [binary for binary in servers.find_all() if binary.has_tls]
    if transport == "tls":
        # Whatever this run's server is: the client's side is what differs.
        with RedisServer(with_tls[0], transport="tls") as server:
            _jobs(server, start(pool, LATE, url=server.url()), records)
        return
    server = redis_factory(transport=transport)
    _jobs(server, start(pool, LATE, url=server.url()), records)


@pytest.mark.slow
def test_sentinel(sentinel: SentinelCluster, start: Starter, records: redis.Redis) -> None:
    options = {"broker_transport_options": sentinel.transport_options}
    worker = start("threads", LATE | options, url=sentinel.url())
    _jobs(sentinel.master, worker, records, options)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_case_9_prefix_and_a_user_limited_to_it(
    redis_factory: RedisFactory, start: Starter, records: redis.Redis, pool: str
) -> None:
    """Every feature on; the server's ACL log is empty, and no key lies outside the prefix."""
    server = redis_factory(
        acl=[
            "user default on nopass ~* &* +@all",
            "user app on >secret resetchannels ~p:* &p:* +@all",
        ]
    )
    url = server.url().replace("redis://", "redis://app:secret@")
    options = {"global_keyprefix": "p:", "visibility_timeout": 3}
    settings = LATE | {"broker_transport_options": options, "strategies_priority_levels": 3}
    worker = start(pool, settings, url=url, concurrency=2, mingle=True, heartbeat=True)
    with server.client() as client:
        _jobs(server, worker, records, {"broker_transport_options": options})
        wait_until(lambda: client.zcard("p:unacked_index") == 0, 10, "nothing is held")
        assert places(client, keys=Keys(prefix="p:"))["set aside"] == ["unknown"]
        assert worker.running
        with make_app(url, {"broker_transport_options": options}, stock=True) as app:
            assert app.control.ping([worker.hostname], timeout=5), "remote control answers"
            for label in ("k1", "k2", "k3", "k4"):
                send(app, "sleep_for", 1, label)
            wait_until(lambda: "k2" in started(records), description="two jobs run")
            # What a dead worker held, a warm shutdown's way back, purge: each has its own keys.
            worker.kill()
            second = start(pool, settings, url=url, concurrency=2)
            wait_until(lambda: {"k1", "k2", "k3", "k4"} <= set(ended(records)), 30, "recovered")
            second.stop(30)
            send(app, "record", "purged")
            assert app.control.purge() == 1
        assert [key for key in client.scan_iter() if not key.startswith(b"p:")] == []
        denied = [entry for entry in client.acl_log() if entry["username"] == "app"]
        assert denied == []


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_tracking_refused_by_acl_falls_back_to_polling(
    redis_factory: RedisFactory, start: Starter, records: redis.Redis, pool: str
) -> None:
    # 6.2 cannot take a subcommand away, only allow those that are left.
    allowed = "-client +client|setname +client|id"
    server = redis_factory(
        acl=["user default on nopass ~* &* +@all", f"user app on >secret ~* &* +@all {allowed}"]
    )
    url = server.url().replace("redis://", "redis://app:secret@")
    worker = start(pool, LATE | {"strategies_polling_interval": 0.2}, url=url)
    worker.wait_log("refuses client tracking")
    _jobs(server, worker, records, within=2)
    assert worker.log().count("refuses client tracking") == 1


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_without_hiredis(
    broker: RedisServer, start: Starter, records: redis.Redis, pool: str
) -> None:
    """The pure Python parser tells pushes from replies as well."""
    hidden = {"hiredis.py": "raise ImportError('hidden by the test')\n"}
    worker = start(pool, LATE, project=hidden)
    _jobs(broker, worker, records, within=2)
    assert "polling" not in worker.log()


def test_with_a_hiredis_that_knows_no_pushes(
    broker: RedisServer, start: Starter, records: redis.Redis
) -> None:
    shim = (
        "import hiredis\n"
        "if hasattr(hiredis, 'PushNotification'):\n"
        "    del hiredis.PushNotification\n"
        "hiredis.__version__ = '3.1.0'\n"
    )
    worker = start("threads", LATE, project={"sitecustomize.py": shim})
    worker.wait_log("older than 3.2")
    _jobs(broker, worker, records, within=2)


def test_a_job_wakes_an_idle_worker_at_once(
    broker: RedisServer, start: Starter, records: redis.Redis
) -> None:
    """What the fallbacks above are compared with: no polling at all."""
    worker = start("threads")
    _jobs(broker, worker, records, within=2)
    with broker.client() as client:
        flags = {entry["flags"] for entry in client.client_list()}
        assert any("t" in flag for flag in flags), "a connection tracks"
