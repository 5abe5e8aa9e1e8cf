"""What a worker held when it died: its places free, its jobs come back, and no cap or group is broken meanwhile."""

from __future__ import annotations

import pytest

from celery_strategies.transport.keeper import BEAT_INTERVAL, GRACE
from tests.fair.lab import CAPPED, FIFO, FairLab, names, once_each, overlaps
from tests.support.waiting import stays, wait_until

#: By its session, a death is seen within this time, with as much again for a slow machine.
SOON = 2 * (GRACE + 4 * BEAT_INTERVAL) + 5
#: For what only silence tells, tests do not wait the usual 10 s.
STALE_AFTER = 2
IMPATIENT = {"strategies_stale_after": STALE_AFTER}


@pytest.mark.parametrize("task", ["hold", "hold_late"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_16_a_killed_workers_place_frees(lab: FairLab, pool: str, task: str) -> None:
    """Cap 1: the next of the key starts soon; a late acknowledged job comes back before it."""
    worker = lab.worker(pool, settings=CAPPED)
    lab.keyed(["k-0"], task=task)
    lab.wait_started("k-0")
    if task == "hold":
        lab.wait_settled()
    lab.worker(pool, settings=CAPPED)
    lab.keyed(["k-1"])
    stays(lambda: lab.started() == ["k-0"], 0.5, "the key is full")
    worker.kill()
    lab.open()
    lab.wait_ended("k-1", timeout=SOON)
    assert lab.started() == (["k-0", "k-1"] if task == "hold" else ["k-0", "k-0", "k-1"])
    lab.wait_none_in_flight()


def test_case_16_with_nobody_left_the_next_worker_frees_it(lab: FairLab) -> None:
    """It has never seen the dead one live: it waits until it has seen it quiet for long enough."""
    worker = lab.worker("threads", settings=CAPPED)
    lab.keyed(["k-0"], task="hold")
    lab.wait_started("k-0")
    lab.keyed(["k-1"])
    worker.kill()
    lab.worker("threads", settings={**CAPPED, **IMPATIENT})
    lab.wait_ended("k-1", timeout=STALE_AFTER + SOON)
    lab.wait_none_in_flight()


@pytest.mark.parametrize("settings", [CAPPED, FIFO], ids=["cap", "group"])
@pytest.mark.parametrize("how", ["kill", "quit"])
def test_case_17_two_that_start_after_a_forced_shutdown_never_run_two(
    lab: FairLab, settings: dict[str, object], how: str
) -> None:
    """Three jobs of one key, two workers that start together: one at a time, and in order."""
    header = "group_key" if "strategies_group_mode" in settings else "fair_key"
    settings = {**settings, **IMPATIENT}
    worker = lab.plain("prefork", settings=settings, concurrency=3)
    lab.keyed(names("k", 3), task="hold_late", header=header)
    lab.wait_started("k-0")
    if how == "kill":
        worker.kill()
    else:
        worker.quit()
        worker.wait_exit()
    two = [lab.plain("prefork", settings=settings, concurrency=3, wait=False) for _ in range(2)]
    for other in two:
        other.wait_ready()
    for number in range(3):
        wait_until(lambda n=number: len(lab.started()) == n + 2, STALE_AFTER + SOON, "the next")  # type: ignore[misc]
        stays(lambda n=number: len(lab.started()) == n + 2, 0.3, "one at a time")  # type: ignore[misc]
        lab.open()
        wait_until(lambda n=number: len(lab.ended()) == n + 1, 10, "it ends")  # type: ignore[misc]
    assert lab.started() == ["k-0", *names("k", 3)]
    assert overlaps(lab.events()[1:]) == []
    lab.wait_none_in_flight()


def test_a_forced_shutdown_of_threads_never_runs_two(lab: FairLab) -> None:
    """Nothing can end a thread: its job runs on, and counts, until the process goes."""
    worker = lab.worker("threads", settings=CAPPED)
    lab.keyed(["k-0"], task="hold")
    lab.wait_started("k-0")
    lab.wait_settled()
    lab.worker("threads", settings=CAPPED)
    lab.keyed(["k-1"])
    worker.quit()
    worker.wait_log("Running jobs cannot be cancelled")
    stays(lambda: lab.started() == ["k-0"], 2, "the key is full")
    lab.open()
    lab.wait_ended("k-1", timeout=SOON)
    assert overlaps(lab.events()) == []
    lab.wait_none_in_flight()


def test_a_stopped_worker_that_goes_on_breaks_no_cap_of_what_it_did_not_start(lab: FairLab) -> None:
    """A machine that hangs for a while and comes back: what it ran was given to another, as after a death."""
    worker = lab.worker("prefork", settings={**CAPPED, **IMPATIENT})
    lab.keyed(["k-0"], task="hold_late")
    lab.wait_started("k-0")
    lab.keyed(names("k", 3)[1:], task="hold_late")
    lab.worker("prefork", settings={**CAPPED, **IMPATIENT})
    worker.pause()
    wait_until(lambda: len(lab.started()) == 2, STALE_AFTER + SOON, "another has it")
    worker.resume()
    # Its settle is void: the place belongs to the other's job.
    lab.open()
    wait_until(lambda: len(lab.ended()) >= 1, 10, "one of the two ends")
    lab.open(3)
    lab.wait_ended(*names("k", 3))
    lab.wait_none_in_flight()
    assert set(lab.started()) == set(names("k", 3))
    assert worker.running


def test_a_lost_connection_breaks_no_cap(lab: FairLab) -> None:
    """The job runs on, and counts, over the reconnect."""
    lab.worker("prefork", settings=CAPPED, concurrency=2)
    lab.keyed(["k-0"], task="hold")
    lab.wait_started("k-0")
    lab.wait_settled()
    lab.keyed(["k-1"])
    for _ in range(2):
        lab.db.client_kill_filter(_type="normal", skipme=True)
        stays(lambda: lab.started() == ["k-0"], 1.5, "the key is full")
    lab.open()
    lab.wait_ended("k-1", timeout=15)
    assert overlaps(lab.events()) == []
    lab.wait_none_in_flight()


@pytest.mark.parametrize("pool", ["gevent", "eventlet", "threads"])
def test_case_27_jobs_longer_than_the_visibility_timeout_run_once(lab: FairLab, pool: str) -> None:
    """Two workers renew what they hold, sorted by key or not, several times over."""
    settings = {"broker_transport_options": {"visibility_timeout": 1}}
    labels = [*names("k", 3), *names("l", 3)]
    for _ in range(2):
        lab.worker(pool, concurrency=2, settings={**settings, **CAPPED, **IMPATIENT})
    lab.keyed(labels, task="hold_late")
    lab.wait_started("k-0", "l-0")
    stays(lambda: sorted(lab.started()) == ["k-0", "l-0"], 4, "nothing is delivered again")
    lab.open(6)
    lab.wait_count(6)
    once_each(lab, labels)
    lab.wait_none_in_flight()
