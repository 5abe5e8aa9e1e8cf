"""Worker and broker end and come back: nothing is lost, nothing runs twice that need not."""

from __future__ import annotations

import pytest
from pytest_celery.vendors.worker.tasks import add

from tests.smoke.tasks import hold, hold_late, record
from tests.support.smoke import StrategiesSetup
from tests.support.waiting import wait_until

pytestmark = pytest.mark.smoke

TIMEOUT = 30
LABELS = [f"j{number}" for number in range(30)]


@pytest.mark.parametrize("smoke_inner_pool", ["prefork", "threads", "solo"])
def test_a_warm_restart_keeps_jobs(celery_setup: StrategiesSetup) -> None:
    """What runs ends first, what waits waits, each job runs once."""
    running = hold.delay("running")
    celery_setup.wait_ran("running")
    results = [record.delay(label) for label in LABELS]
    celery_setup.worker.kill("SIGTERM", reload_container=False)
    celery_setup.worker.assert_log_exists("Warm shutdown")
    celery_setup.open()
    wait_until(
        lambda: celery_setup.worker.container.status == "exited", TIMEOUT, "the worker ended"
    )
    assert running.get(timeout=TIMEOUT) == "running"
    celery_setup.worker.restart()
    assert [result.get(timeout=TIMEOUT) for result in results] == LABELS
    assert sorted(celery_setup.ran()) == sorted([*LABELS, "running"])
    celery_setup.wait_settled()


@pytest.mark.parametrize("smoke_args", [("-c", "1")])
@pytest.mark.parametrize(
    "smoke_settings", [{"broker_transport_options": {"visibility_timeout": 2}}]
)
def test_a_killed_workers_jobs_come_back(celery_setup: StrategiesSetup) -> None:
    """`kill -9`: after the visibility timeout the next worker runs what was not acknowledged."""
    late = hold_late.delay("late")
    celery_setup.wait_ran("late")
    waiting = record.delay("waiting")
    celery_setup.worker.kill()
    assert celery_setup.worker.container.status == "exited"
    celery_setup.open()
    celery_setup.worker.restart()
    assert waiting.get(timeout=TIMEOUT) == "waiting"
    assert late.get(timeout=TIMEOUT) == "late"
    assert sorted(celery_setup.ran()) == ["late", "late", "waiting"]
    celery_setup.wait_settled()


@pytest.mark.parametrize("smoke_inner_pool", ["prefork", "threads", "gevent"])
def test_a_broker_restart_loses_nothing(celery_setup: StrategiesSetup) -> None:
    """A running job ends and is acknowledged; what waited runs, after the worker reconnected."""
    running = [hold_late.delay(label) for label in ("a", "b")]
    celery_setup.wait_ran("a", "b")
    results = [record.delay(label) for label in LABELS]
    celery_setup.broker.restart()
    celery_setup.open(2)
    assert [result.get(timeout=TIMEOUT) for result in (*running, *results)] == ["a", "b", *LABELS]
    assert sorted(celery_setup.ran()) == sorted(["a", "b", *LABELS])
    assert add.delay(1, 2).get(timeout=TIMEOUT) == 3
    celery_setup.wait_settled()
    assert celery_setup.worker.reads()["held"] == 0
