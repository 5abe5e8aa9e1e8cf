"""Caps: never more of a key at once, nobody hidden behind a full key, and a place that frees is filled."""

from __future__ import annotations

import pytest

from tests.fair.lab import CAPPED, FairLab, names, once_each, overlaps
from tests.support.waiting import stays, wait_until

PARALLEL = ("prefork", "threads", "gevent")


@pytest.mark.parametrize("pool", PARALLEL)
def test_case_11_a_full_key_at_the_front_hides_nobody(lab: FairLab, pool: str) -> None:
    """One of A runs, 500 of A wait, then one of B: B starts at once."""
    lab.worker(pool, concurrency=2, settings=CAPPED)
    lab.keyed(["A-first"], task="hold")
    lab.wait_started("A-first")
    lab.keyed(names("A", 500))
    lab.keyed(["B-0"])
    lab.wait_ended("B-0", timeout=20)
    assert lab.started() == ["A-first", "B-0"]
    lab.open()
    lab.wait_count(502, timeout=60)
    once_each(lab, ["A-first", "B-0", *names("A", 500)])
    assert overlaps(lab.events()) == []
    lab.wait_none_in_flight()


@pytest.mark.parametrize("pool", PARALLEL)
@pytest.mark.parametrize("task", ["record", "record_late"])
def test_a_place_that_frees_is_filled_at_once(lab: FairLab, pool: str, task: str) -> None:
    """The worker has a second slot, which is idle all the time: nobody but itself can tell it that a place is free."""
    lab.worker(pool, concurrency=2, settings=CAPPED)
    lab.keyed(names("A", 10), task=task)
    assert lab.wait_count(10) == names("A", 10)
    assert overlaps(lab.events()) == []
    lab.wait_none_in_flight()


def test_another_worker_is_told_of_a_place_that_frees(lab: FairLab) -> None:
    """The one that runs the job has no slot free; an idle one takes the next of the key at once."""
    lab.worker("threads", settings=CAPPED)
    lab.keyed(["A-0"], task="hold")
    lab.wait_started("A-0")
    other = lab.worker("threads", concurrency=2, settings=CAPPED)
    lab.keyed(["B-0"], task="hold", queue="a")
    lab.wait_started("B-0")
    lab.keyed(["B-1"], task="hold")
    lab.keyed(names("A", 2)[1:], task="hold")
    stays(lambda: len(lab.started()) == 2, 0.5, "both keys are full")
    lab.open()
    wait_until(lambda: len(lab.started()) == 3, 20, "the next of a key that has room")
    lab.open(3)
    lab.wait_count(4)
    assert other.running
    assert overlaps(lab.events()) == []
    lab.wait_none_in_flight()


def test_a_cap_is_changed_while_jobs_wait(lab: FairLab) -> None:
    """Lowered: what runs ends, and nothing new of the key until it has room. Raised: at once."""
    caps = {"strategies_max_in_flight": {"*": 3}}
    lab.worker("threads", concurrency=4, settings=caps)
    lab.keyed(names("A", 10), task="hold")
    wait_until(lambda: len(lab.started()) == 3, 20, "three run")
    stays(lambda: len(lab.started()) == 3, 0.3, "and no more")
    lab.set_cap("A", 1)
    lab.open(2)
    wait_until(lambda: len(lab.ended()) == 2, 20, "two end")
    stays(lambda: len(lab.started()) == 3, 0.3, "nothing new")
    lab.open()
    wait_until(lambda: len(lab.started()) == 4, 20, "one at a time")
    stays(lambda: len(lab.started()) == 4, 0.3, "one at a time")
    lab.set_cap("A", None)
    wait_until(lambda: len(lab.started()) == 6, 20, "three again")
    lab.set_cap("*", 4)
    wait_until(lambda: len(lab.started()) == 7, 20, "four")
    lab.set_cap("*", None)
    lab.open(10)
    lab.wait_count(10)
    lab.wait_none_in_flight()


def test_caps_of_single_keys_and_of_the_rest(lab: FairLab) -> None:
    caps = {"strategies_max_in_flight": {"*": 2, "A": 1, "B": 3}}
    lab.worker("threads", concurrency=8, settings=caps)
    for key in ("A", "B", "C"):
        lab.keyed(names(key, 5), task="hold")
    wait_until(lambda: len(lab.started()) == 6, 20, "1 + 3 + 2")
    stays(lambda: lab.running() == {"A": 1, "B": 3, "C": 2}, 0.3, "and no more")
    lab.open(15)
    lab.wait_count(15)
    lab.wait_none_in_flight()


def test_caps_of_the_settings_take_effect_when_a_worker_boots(lab: FairLab) -> None:
    """Also on jobs that were sorted, and held back, under the former caps."""
    first = lab.worker("threads", concurrency=4, settings=CAPPED)
    lab.keyed(names("A", 6), task="hold")
    lab.wait_started("A-0")
    stays(lambda: len(lab.started()) == 1, 0.3, "one")
    lab.worker("threads", concurrency=4, settings={"strategies_max_in_flight": {"*": 3}})
    wait_until(lambda: len(lab.started()) == 3, 20, "three")
    lab.worker("threads", settings={"strategies_max_in_flight": {"A": 2}})
    lab.open(2)
    wait_until(lambda: len(lab.ended()) == 2, 20, "two end")
    wait_until(lambda: len(lab.started()) == 4, 20, "two at a time")
    stays(lambda: len(lab.started()) == 4, 0.3, "two at a time")
    lab.open(6)
    lab.wait_count(6)
    assert first.running
    lab.wait_none_in_flight()


# -- the end of a worker ---------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_warm_shutdown_frees_the_place(lab: FairLab, pool: str, task: str) -> None:
    worker = lab.worker(pool, settings=CAPPED)
    lab.keyed(["A-0"], task=task)
    lab.wait_started("A-0")
    lab.keyed(["A-1"])
    worker.terminate()
    worker.wait_log("Warm shutdown")
    lab.worker("threads", settings=CAPPED)
    stays(lambda: lab.started() == ["A-0"], 0.3, "it counts until it ends")
    lab.open()
    assert worker.wait_exit() == 0
    assert lab.wait_ended("A-1", timeout=20) == ["A-0", "A-1"]
    lab.wait_none_in_flight()


@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_cold_shutdown_frees_the_place(lab: FairLab, task: str) -> None:
    worker = lab.worker("prefork", settings=CAPPED)
    lab.keyed(["A-0"], task=task)
    lab.wait_started("A-0")
    if task == "hold":
        lab.wait_settled()
    lab.keyed(["A-1"])
    worker.quit()
    worker.wait_exit()
    lab.open(2)
    lab.worker("threads", settings=CAPPED)
    lab.wait_ended("A-1", timeout=20)
    # A job that was acknowledged early is gone; a late one runs again, before the next of its key.
    assert lab.ended() == (["A-0", "A-1"] if task == "hold_late" else ["A-1"])
    lab.wait_none_in_flight()
