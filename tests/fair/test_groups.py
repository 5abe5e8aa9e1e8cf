"""Groups: one job of a group at a time, in order, over all workers."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.fair.lab import FairLab, key_of, names, once_each, overlaps
from tests.support.waiting import wait_until
from tests.support.workers import job, publish

GROUP_KEY = "tests.fair.tenancy:group_key"
MODES = ("fifo", "round_robin")


def orders(labels: list[str]) -> dict[str, list[str]]:
    """Return the labels of each group, in the order given."""
    found = defaultdict(list)
    for label in labels:
        found[key_of(label)].append(label)
    return dict(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("pool", "slots"), [("prefork", 2), ("threads", 10)])
def test_case_19_groups_do_not_overlap_and_keep_their_order(
    lab: FairLab, mode: str, pool: str, slots: int
) -> None:
    """3 groups of 20, two workers, random durations."""
    for _ in range(2):
        lab.grouped(pool, mode, concurrency=slots)
    labels = [f"{group}-{i}" for i in range(20) for group in "xyz"]
    settings = {"strategies_group_mode": mode, "strategies_group_key": GROUP_KEY}
    publish(lab.url, [job("nap", label, queue="a") for label in labels], settings, stock=False)
    lab.wait_count(60, timeout=60)
    once_each(lab, labels)
    assert overlaps(lab.events()) == []
    assert orders(lab.started()) == orders(labels)
    if slots < 3:
        assert len({event.worker for event in lab.starts()}) == 2
    lab.wait_none_in_flight()


def test_fifo_goes_by_age_and_round_robin_in_turn(lab: FairLab) -> None:
    labels = [*names("x", 3), *names("y", 3), "x-3", *names("z", 2)]
    lab.keyed(labels, header="group_key")
    worker = lab.grouped("solo", "fifo")
    assert lab.wait_count(9) == labels
    assert worker.stop() == 0
    lab.db.delete("test:ran")
    lab.keyed(labels, header="group_key")
    lab.grouped("solo", "round_robin")
    keys = [key_of(label) for label in lab.wait_count(9)]
    assert keys == [*"xyz", *"xyz", *"xy", "x"]


def test_a_busy_group_does_not_hold_up_the_next(lab: FairLab) -> None:
    lab.grouped("threads", concurrency=2)
    lab.keyed(["x-0"], task="hold", header="group_key")
    lab.wait_started("x-0")
    lab.keyed([*names("x", 3)[1:], *names("y", 3)], header="group_key")
    lab.fill("a", ["alone"])
    lab.wait_ended(*names("y", 3), "alone", timeout=10)
    assert [label for label in lab.started() if label.startswith("x")] == ["x-0"]
    lab.open()
    lab.wait_ended(*names("x", 3))
    assert overlaps(lab.events()) == []


def test_jobs_without_a_group_run_side_by_side(lab: FairLab) -> None:
    lab.fill("a", ["u0", "u1", "u2"], "hold")
    lab.grouped("threads", concurrency=3)
    lab.wait_started("u0", "u1", "u2")
    lab.open(3)
    lab.wait_count(3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_case_18_a_retry_goes_before_the_rest_of_its_group(
    lab: FairLab, mode: str, pool: str
) -> None:
    """A, B, C of a group; A fails once and retries without a pause: A, A, B, C."""
    lab.keyed(["g-A"], task="again", header="group_key")
    lab.keyed(["g-B", "g-C"], header="group_key")
    lab.grouped(pool, mode)
    lab.wait_ended("g-A", "g-B", "g-C")
    assert lab.started() == ["g-A", "g-A", "g-B", "g-C"]
    assert overlaps([e for e in lab.events() if e.label != "g-A"]) == []
    lab.wait_none_in_flight()


def test_case_18_a_retry_with_a_pause_lets_its_group_go_on(lab: FairLab) -> None:
    """While it waits for its time, the group is free: A, B, C, A."""
    lab.send("again", "g-A", queue="a", headers={"group_key": "g"}, kwargs={"countdown": 1})
    lab.keyed(["g-B", "g-C"], header="group_key")
    lab.grouped("prefork")
    lab.wait_ended("g-A", "g-B", "g-C")
    assert lab.started() == ["g-A", "g-B", "g-C", "g-A"]


def test_a_job_given_back_goes_before_the_rest_of_its_group(lab: FairLab) -> None:
    """By a cold shutdown: late acknowledged, it runs again, and first."""
    lab.keyed(names("g", 3), task="hold_late", header="group_key")
    worker = lab.grouped("prefork", concurrency=3)
    lab.wait_started("g-0")
    worker.quit()
    worker.wait_exit()
    assert lab.waiting("a") == names("g", 3)
    lab.open(3)
    lab.grouped("prefork", concurrency=3)
    lab.wait_count(3)
    assert lab.started() == ["g-0", *names("g", 3)]
    assert [event.redelivered for event in lab.starts()] == [False, True, False, False]
    lab.wait_none_in_flight()
    wait_until(lambda: not lab.count(), description="nothing is left")
