"""Case 28: the master changes under a running worker."""

from __future__ import annotations

import pytest
import redis
from celery import Celery

from tests.faults.conftest import Starter
from tests.faults.helpers import nothing_left
from tests.support.apps import ended, started
from tests.support.redis_server import SentinelCluster
from tests.support.waiting import wait_until
from tests.support.workers import Worker, job, publish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def _active(worker: Worker, options: dict[str, str]) -> int:
    with Celery(broker=worker.broker_url, set_as_current=False) as app:
        app.conf.broker_transport_options = options
        said = app.control.inspect([worker.hostname], timeout=2).active() or {}
        return len(said.get(worker.hostname, [None]))


@pytest.mark.parametrize("kill_master", [False, True])
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_case_28_sentinel_failover(
    sentinel: SentinelCluster, start: Starter, records: redis.Redis, pool: str, kill_master: bool
) -> None:
    options = sentinel.transport_options
    settings = {"broker_transport_options": options, "task_acks_late": True}
    worker = start(pool, settings, url=sentinel.url(), concurrency=2)
    publish(sentinel.url(), [job("sleep_for", 6, "long")], {"broker_transport_options": options})
    wait_until(lambda: started(records) == ["long"], description="the job runs")
    with sentinel.client() as client:
        client.wait(1, 5000)
    new = sentinel.failover(kill_master=kill_master)
    publish(sentinel.url(), [job("record", "after")], {"broker_transport_options": options})
    wait_until(lambda: "after" in ended(records), 15, "a new job runs")
    wait_until(lambda: "long" in ended(records), 10, "the running job ended")
    with new.client() as client:
        wait_until(lambda: nothing_left(client), 15, "both are acknowledged")
    wait_until(lambda: _active(worker, options) == 0, 15, "nothing is active any more")
    assert sorted(started(records)) == ["after", "long"]
    assert worker.running
