"""A task and its result, in each inner pool; canvas; revoke; time limits; beat."""

from __future__ import annotations

import time

import pytest
from celery import chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from pytest_celery.vendors.worker.tasks import add, add_replaced, fail, sleep

from tests.smoke.tasks import hold, record, third_time, total
from tests.support.smoke import GREEN, StrategiesSetup
from tests.support.waiting import wait_until

pytestmark = pytest.mark.smoke

TIMEOUT = 30
POOLS = {
    "prefork": "celery.concurrency.prefork:TaskPool",
    "threads": "celery.concurrency.thread:TaskPool",
    "solo": "celery.concurrency.solo:TaskPool",
    "gevent": "celery.concurrency.gevent:TaskPool",
    "eventlet": "celery.concurrency.eventlet:TaskPool",
}


@pytest.mark.parametrize("smoke_neighbours", [True])
@pytest.mark.parametrize("smoke_inner_pool", POOLS)
def test_results_control_and_settles_in_each_pool(
    celery_setup: StrategiesSetup, smoke_inner_pool: str
) -> None:
    worker = celery_setup.worker
    assert celery_setup.ready(ping=True, control=True, docker=True)
    results = [add.delay(i, i) for i in range(20)]
    assert [result.get(timeout=TIMEOUT) for result in results] == [i + i for i in range(20)]
    with pytest.raises(RuntimeError, match="expected to fail"):
        fail.delay().get(timeout=TIMEOUT)
    assert third_time.delay("t").get(timeout=TIMEOUT) == 2
    assert celery_setup.ran() == ["t"] * 3
    assert worker.control("ping") == {"ok": "pong"}
    stats = worker.control("stats")
    assert stats["pool"]["implementation"] == POOLS[smoke_inner_pool]
    assert stats["strategies"]["slots"] == (1 if smoke_inner_pool == "solo" else 2)
    assert stats["strategies"]["held"] == 0
    celery_setup.wait_settled()
    worker.assert_log_exists("Reading by strategy priority")


@pytest.mark.parametrize("smoke_inner_pool", [pool for pool in POOLS if pool != "solo"])
def test_a_slot_that_frees_takes_the_next_job(celery_setup: StrategiesSetup) -> None:
    """Two slots: two run, no third is held; one ends, the third runs."""
    for label in "abc":
        hold.delay(label)
    assert sorted(celery_setup.wait_ran("a", "b")) == ["a", "b"]
    assert celery_setup.worker.reads()["reserved"] == 2
    assert celery_setup.messages.llen("celery") == 1
    celery_setup.open()
    assert celery_setup.wait_ran("c")[2:] == ["c"]
    celery_setup.open(2)
    celery_setup.wait_settled()


def test_canvas(celery_setup: StrategiesSetup) -> None:
    assert chain(add.s(1, 2), add.s(3), add.s(4))().get(timeout=TIMEOUT) == 10
    assert group(add.s(i, i) for i in range(8))().get(timeout=TIMEOUT) == [i + i for i in range(8)]
    assert chord([add.s(i, i) for i in range(8)], total.s())().get(timeout=TIMEOUT) == 56
    nested = chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s("nested"), add.s(1))
    assert nested().get(timeout=TIMEOUT) == 8
    assert add_replaced.delay(2, 3).get(timeout=TIMEOUT) == 5
    assert celery_setup.ran() == ["total", "nested"]
    celery_setup.wait_settled()


@pytest.mark.parametrize("smoke_args", [("-c", "1")])
def test_revoke(celery_setup: StrategiesSetup) -> None:
    running = hold.delay("running")
    celery_setup.wait_ran("running")
    waiting, kept = record.delay("waiting"), record.delay("kept")
    revoke = {"command": "revoke", "task_id": waiting.id}
    assert "ok" in celery_setup.worker.control(**revoke)
    revoke |= {"task_id": running.id, "terminate": True, "signal": "SIGKILL"}
    assert "ok" in celery_setup.worker.control(**revoke)
    for result in (running, waiting):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=TIMEOUT)
    # The slot of the terminated job is free again.
    assert kept.get(timeout=TIMEOUT) == "kept"
    assert celery_setup.ran() == ["running", "kept"]
    celery_setup.wait_settled()


@pytest.mark.parametrize("smoke_args", [("-c", "1")])
def test_time_limits(celery_setup: StrategiesSetup) -> None:
    with pytest.raises(SoftTimeLimitExceeded):
        sleep.apply_async((30,), soft_time_limit=0.5).get(timeout=TIMEOUT)
    with pytest.raises(TimeLimitExceeded):
        sleep.apply_async((30,), time_limit=0.5).get(timeout=TIMEOUT)
    assert add.delay(1, 2).get(timeout=TIMEOUT) == 3
    celery_setup.wait_settled()


@pytest.mark.parametrize("smoke_inner_pool", ["prefork", *GREEN])
def test_countdown(celery_setup: StrategiesSetup) -> None:
    begin = time.monotonic()
    late = record.apply_async(("late",), countdown=1)
    assert record.delay("soon").get(timeout=TIMEOUT) == "soon"
    assert late.get(timeout=TIMEOUT) == "late"
    assert time.monotonic() - begin >= 0.9
    assert celery_setup.ran() == ["soon", "late"]
    celery_setup.wait_settled()


@pytest.mark.parametrize("smoke_args", [("-c", "1", "-B")])
@pytest.mark.parametrize(
    "smoke_settings",
    [{"beat_schedule": {"t": {"task": record.name, "schedule": 0.5, "args": ["tick"]}}}],
)
@pytest.mark.parametrize("smoke_inner_pool", ["prefork", "threads"])
def test_embedded_beat(celery_setup: StrategiesSetup) -> None:
    wait_until(lambda: celery_setup.ran().count("tick") >= 2, TIMEOUT, "beat sent two tasks")
    assert set(celery_setup.ran()) == {"tick"}


@pytest.mark.parametrize("smoke_args", [("--autoscale", "3,1")])
def test_autoscale(celery_setup: StrategiesSetup) -> None:
    for label in "abcd":
        hold.delay(label)
    assert sorted(celery_setup.wait_ran("a", "b", "c")) == ["a", "b", "c"]
    celery_setup.open(4)
    celery_setup.wait_ran("d")
    celery_setup.wait_settled()
