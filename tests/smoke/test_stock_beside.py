"""Our worker and a stock one on the same queue, as in the middle of a roll-out or a roll-back."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestWorker, CeleryWorkerCluster

from tests.smoke.tasks import whereabouts
from tests.support.smoke import StrategiesSetup, StrategiesWorker

pytestmark = pytest.mark.smoke

LABELS = [f"j{number}" for number in range(40)]


@pytest.fixture
def celery_worker_cluster(
    celery_worker: StrategiesWorker, smoke_stock_worker: CeleryTestWorker
) -> CeleryWorkerCluster:
    return CeleryWorkerCluster(celery_worker, smoke_stock_worker)


def test_both_work_and_each_job_runs_once(celery_setup: StrategiesSetup) -> None:
    results = [whereabouts.delay(label) for label in LABELS]
    nodes = {result.get(timeout=30).partition("@")[0] for result in results}
    assert nodes == {celery_setup.worker.worker_name, "stock"}
    assert sorted(celery_setup.ran()) == sorted(LABELS)
    celery_setup.wait_settled()
