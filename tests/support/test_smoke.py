"""pytest-celery's own setup runs on the nodes of `smoke` (with a stock pool)."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup, RedisTestBackend, RedisTestBroker
from pytest_celery.vendors.worker.tasks import add

from tests.support.smoke import *  # noqa: F403  # fixtures are found by name

pytestmark = pytest.mark.smoke


@pytest.fixture
def smoke_pool() -> str:
    return "prefork"


def test_the_setup_is_ready_and_works(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    assert isinstance(celery_setup.broker, RedisTestBroker)
    assert isinstance(celery_setup.backend, RedisTestBackend)
    assert add.s(1, 2).apply_async(queue=celery_setup.worker.worker_queue).get(timeout=20) == 3
    celery_setup.worker.assert_log_exists("succeeded")


def test_the_worker_node_can_be_killed_and_restarted(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    worker.kill()
    assert worker.container.status == "exited"
    worker.restart()
    assert add.s(1, 2).apply_async(queue=worker.worker_queue).get(timeout=20) == 3
    assert celery_setup.app.control.ping(destination=[worker.hostname()])


def test_the_broker_node_can_be_restarted(celery_setup: CeleryTestSetup) -> None:
    celery_setup.broker.restart()
    assert add.s(1, 2).apply_async(queue=celery_setup.worker.worker_queue).get(timeout=30) == 3
