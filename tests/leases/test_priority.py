"""Workers of lower consumer priority leave a queue to those of higher one, while these live."""

from __future__ import annotations

from itertools import pairwise

import pytest

from celery_strategies.store.store import Grant, SourceKeys
from celery_strategies.transport.leads import Leads
from tests.fair.lab import PATIENT
from tests.leases.lab import QUEUE, QUICK, SINGLE, LeaseLab, numbers
from tests.support.waiting import stays, wait_until
from tests.support.workers import Worker

INTERVAL = 0.1
A, B = (SourceKeys(queue, None, (0,)) for queue in "ab")


def waits(leads: Leads, now: float, *sources: SourceKeys) -> bytes:
    """Have a take ask what it may, and return what it left alone."""
    skip = leads.skip(sources, now)
    leads.asked(sources, skip, now)
    return skip


# -- what one worker knows ------------------------------------------------------------------------------------


def test_nothing_is_left_alone_without_a_peer() -> None:
    leads = Leads((), INTERVAL)
    assert waits(leads, 100.0, A, B) == b""
    assert leads.next_turn(100.0) is None


def test_takes_from_a_peers_queue_are_three_intervals_apart() -> None:
    leads = Leads((), INTERVAL)
    assert leads.outranked_on(["a"])
    assert not leads.outranked_on(["a"])
    assert waits(leads, 100.0, A, B) == b"\0\0"
    assert leads.next_turn(100.0) == pytest.approx(0.3)
    for woken in (100.001, 100.1, 100.29):
        assert waits(leads, woken, A, B) == b"\1\0"
    assert leads.next_turn(100.29) == pytest.approx(0.01)
    assert waits(leads, 100.301, A, B) == b"\0\0"
    assert leads.outranked_on([])
    assert waits(leads, 100.302, A, B) == b""


def test_a_lease_is_given_up_but_not_for_nobody() -> None:
    leads = Leads(["a"], INTERVAL)
    leads.report([A], Grant(valid=True, terms=((0, 7),)), 100.0)
    leads.outranked_on(["a"])
    # Until the script has done so, which it does not while a job is in flight.
    for now in (100.0, 100.1, 101.0):
        assert waits(leads, now, A) == b"\2"
    leads.report([A], Grant(valid=True, terms=((0, -1),)), 101.0)
    assert waits(leads, 101.2, A) == b"\1"
    assert waits(leads, 101.31, A) == b"\0"
    leads.report([A], Grant(valid=True, terms=((0, 8),)), 101.31)
    assert waits(leads, 101.32, A) == b"\2"


def test_a_stand_by_looks_again_when_the_lease_runs_out() -> None:
    leads = Leads(["a"], INTERVAL)
    leads.report([A], Grant(valid=True, terms=((0, -1500),)), 100.0)
    assert leads.stands_by("a")
    assert leads.next_turn(100.5) == pytest.approx(1.0)
    leads.asked([A], b"", 101.5)
    assert leads.next_turn(101.5) is None
    leads.report([A], Grant(valid=True, terms=((0, 7),)), 101.6)
    assert not leads.stands_by("a")
    assert leads.terms == {"a": 7}


# -- workers --------------------------------------------------------------------------------------------------


def pair(
    lab: LeaseLab, high: int = 10, low: int = 0, *, queues: str = "a", slots: int = 1
) -> tuple[Worker, Worker]:
    """Start a worker of each priority, and wait until the lower one knows of the higher."""
    options = {"queues": queues, "settings": QUICK, "concurrency": slots}
    one = lab.worker(wait=False, args=["--consumer-priority", str(high)], **options)
    conf = {**QUICK, "strategies_consumer_priority": low}
    two = lab.worker(wait=False, **{**options, "settings": conf})
    for worker in (one, two):
        worker.wait_ready()
    lab.acquainted(one, two)
    return one, two


def spread(lab: LeaseLab, count: int) -> dict[str, int]:
    """Publish jobs one at a time, each when the one before has ended; return who ran how many."""
    before = len(lab.ended())
    for number in range(count):
        lab.send("record", f"s{before}-{number}", queue="a")
        wait_until(lambda: len(lab.ended()) > before + number, 20, "it ran")  # noqa: B023
    by: dict[str, int] = {}
    for event in [event for event in lab.events() if event.event == "end"][before:]:
        by[event.worker] = by.get(event.worker, 0) + 1
    return by


def starts_of(lab: LeaseLab, worker: Worker, labels: list[str]) -> list[float]:
    return [
        event.at
        for event in lab.events()
        if event.event == "start" and event.worker == worker.hostname and event.label in labels
    ]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_lower_one_runs_nothing_until_the_higher_one_is_gone(lab: LeaseLab, end: str) -> None:
    high, low = pair(lab)
    by = spread(lab, 30)
    # A look of the lower one may fall into the very moment in which a job lies there.
    assert by.get(low.hostname, 0) <= 2
    getattr(high, end)()
    labels = numbers(40)
    lab.fill("a", labels, "record")
    lab.wait_ended(*labels, timeout=20)
    times = starts_of(lab, low, labels)
    assert len(times) == 40
    # Back-off would need 0.3 s for each.
    assert times[-1] - times[10] < 30 * 0.3 / 2


def test_the_lower_one_takes_what_the_higher_one_has_no_slot_for(lab: LeaseLab) -> None:
    high, low = pair(lab)
    lab.send("hold", "long", "gate-long", queue="a")
    lab.wait_started("long")
    # Whoever got it keeps it; the other one has a slot.
    busy = lab.ran_by("long")
    assert busy == {high.hostname}
    labels = numbers(8)
    lab.fill("a", labels, "record")
    lab.wait_ended(*labels)
    times = starts_of(lab, low, labels)
    assert len(times) == 8
    # Also when it is woken: each end of a job and each new message wakes it.
    assert min(later - earlier for earlier, later in pairwise(times)) > 3 * INTERVAL * 0.9
    lab.open(1, "gate-long")
    lab.wait_ended("long")


def test_equals_do_not_wait_for_each_other(lab: LeaseLab) -> None:
    one, two = pair(lab, 7, 7)
    labels = numbers(60)
    for label in labels:
        lab.send("number", label, 0.02, queue="a")
    lab.wait_ended(*labels)
    times = [starts_of(lab, worker, labels) for worker in (one, two)]
    assert min(map(len, times)) > 10
    for its in times:
        assert sum(later - earlier for earlier, later in pairwise(its)) / len(its) < 0.2


def test_a_peer_on_another_queue_or_a_stale_one_changes_nothing(lab: LeaseLab) -> None:
    seconds, _ = lab.db.time()
    lab.db.zadd(lab.keys.alive, {"stale@x-0": seconds * 1000 - 60_000, "there@x-0": 2**45})
    lab.db.zadd(lab.keys.consumers("a"), {"stale@x-0": 50, "gone@x-0": 60})
    lab.db.zadd(lab.keys.consumers("b"), {"there@x-0": 70})
    worker = lab.worker(queues="a")
    lab.acquainted(worker)
    labels = numbers(40)
    lab.fill("a", labels, "record")
    lab.wait_ended(*labels)
    times = starts_of(lab, worker, labels)
    assert times[-1] - times[0] < 40 * 0.3 / 2
    # The same peer on the same queue does.
    lab.db.zadd(lab.keys.consumers("a"), {"there@x-0": 70})
    lab.acquainted(worker)
    more = numbers(4, 100)
    lab.fill("a", more, "record")
    lab.wait_ended(*more)
    times = starts_of(lab, worker, more)
    assert min(later - earlier for earlier, later in pairwise(times)) > 3 * INTERVAL * 0.9


def test_a_registry_that_cannot_be_read_changes_nothing(lab: LeaseLab) -> None:
    lab.db.set(lab.keys.consumers("a"), "in the way")
    worker = lab.worker(queues="a")
    labels = numbers(40)
    lab.fill("a", labels, "record")
    lab.wait_ended(*labels)
    times = starts_of(lab, worker, labels)
    assert times[-1] - times[0] < 40 * 0.3 / 2
    worker.wait_log("The consumer priorities of queue 'a' cannot be used: WRONGTYPE")
    assert "does not reach Redis" not in worker.log()


def test_the_higher_one_leads(lab: LeaseLab) -> None:
    """Whoever comes first leads, until one of higher priority is there and has a slot."""
    low = lab.worker(queues=(QUEUE, "a"))
    lab.fill(QUEUE, ["a"], "number")
    lab.wait_ended("a")
    high = lab.worker(queues=(QUEUE, "a"), args=["--consumer-priority", "10"])
    wait_until(lambda: lab.leader() is high, 20, "it took over")
    labels = numbers(20)
    for label in labels:
        lab.send("number", label, 0.01, queue=QUEUE)
    lab.wait_ended(*labels)
    assert lab.ran_by(*labels) == {high.hostname}
    high.kill()
    lab.fill(QUEUE, ["b"], "number")
    lab.wait_ended("b", timeout=20)
    # Whoever has no free slot at the moment gives the lease up: another may read.
    wait_until(lambda: lab.leader() is low, 20, "the lower one leads again")


def test_the_lower_one_leads_while_the_higher_one_leaves_the_lease_alone(lab: LeaseLab) -> None:
    high = lab.worker(queues="a", settings={**SINGLE, "strategies_consumer_priority": 10})
    lab.db.zadd(lab.keys.consumers(QUEUE), {lab.alive()[0]: 10})
    low = lab.worker()
    labels = numbers(5)
    lab.fill(QUEUE, labels, "number")
    lab.wait_ended(*labels)
    assert lab.ran_by(*labels) == {low.hostname}
    stays(lambda: high.running, 0.1)


def test_who_stands_by_does_not_keep_the_watch(lab: LeaseLab) -> None:
    """Its watch would keep the others parked, and it does not come when something is there."""

    def watchers() -> set[str]:
        names = lab.db.zrange(lab.keys.watchers("a"), 0, -1)
        return {name.decode().rpartition(":")[2].rpartition("-")[0] for name in names}

    # Else its watch ends by itself after 15 s.
    low = lab.worker(queues="a", app=PATIENT)
    wait_until(lambda: watchers() == {low.hostname}, 20, "it watches")
    high = lab.worker(queues="a", app=PATIENT, args=["--consumer-priority", "1"])
    wait_until(lambda: watchers() == {high.hostname}, 20, "only the higher one watches")
    lab.fill("a", ["x"])
    lab.wait_ended("x")
    assert lab.ran_by("x") == {high.hostname}
