"""One worker at a time reads a queue, in order, over deaths and hand-overs."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from tests.leases.lab import (
    QUEUE,
    QUICK,
    LeaseLab,
    broken_order,
    no_burial,
    numbers,
    repeated,
)
from tests.support.waiting import stays, wait_until
from tests.support.workers import Worker

#: Changes of the leader, and jobs between two of them.
TAKE_OVERS = int(os.environ.get("LEASE_TAKE_OVERS", "5"))
JOBS = int(os.environ.get("LEASE_JOBS", "100"))


def rises(values: list[int]) -> bool:
    return all(before <= after for before, after in pairwise(values))


@pytest.mark.slow
@pytest.mark.timeout(120 + TAKE_OVERS * JOBS // 20)
def test_the_order_holds_over_deaths_and_hand_overs(lab: LeaseLab) -> None:
    labels = numbers(TAKE_OVERS * JOBS)
    workers = lab.fleet(min(TAKE_OVERS, 5) + 1, concurrency=2)
    deaths: list[str] = []
    for change in range(TAKE_OVERS):
        lab.fill(QUEUE, labels[change * JOBS : (change + 1) * JOBS], "number")
        middle = change * JOBS + JOBS // 2
        wait_until(lambda: len(lab.ended()) >= middle, 60, "half of them ran")  # noqa: B023
        leader = lab.wait_leader()
        before = lab.lease()["worker"]
        if change % 2:
            leader.terminate()
            assert leader.wait_exit(20) == 0
        else:
            leader.kill()
            deaths.append(leader.hostname)
        if TAKE_OVERS - change >= len(workers):
            leader.start()
        # Perhaps the same one, begun anew.
        wait_until(
            lambda: lab.lease().get("worker") not in (None, before),  # noqa: B023
            20,
            "somebody else leads",
        )
    lab.wait_ended(*labels, timeout=60)
    lab.wait_settled()
    events = lab.events()
    assert broken_order(events, labels) == []
    assert len(repeated(events)) <= len(deaths)
    terms = [term for _, term in lab.terms()]
    assert None not in terms
    assert rises([term for term in terms if term is not None])
    assert len(set(terms)) > TAKE_OVERS / 2


def test_a_job_is_repeated_only_where_its_worker_died(lab: LeaseLab) -> None:
    first, second = lab.fleet(2)
    lab.fill(QUEUE, ["a", "b", "c"], "hold_number")
    lab.wait_started("a")
    leader = lab.wait_leader()
    other = second if leader is first else first
    before = lab.term()
    lab.open()
    lab.wait_started("b")
    leader.kill()
    wait_until(lambda: lab.started() == ["a", "b", "b"], 10, "its job runs again")
    lab.open(2)
    lab.wait_ended("a", "b", "c")
    assert lab.started() == ["a", "b", "b", "c"]
    assert lab.leader() is other
    assert lab.term() > before
    assert [term for _, term in lab.terms()] == [before, before, lab.term(), lab.term()]


def test_two_slots_run_one_job_and_others_serve_other_queues(lab: LeaseLab) -> None:
    workers = lab.fleet(2, queues=(QUEUE, "other"), concurrency=2)
    lab.fill(QUEUE, ["a", "b"], "hold_number")
    lab.wait_started("a")
    leader = lab.wait_leader()
    lab.fill("other", ["x", "y", "z"], "hold")
    lab.wait_started("x", "y", "z")
    assert sorted(e.worker for e in lab.events() if e.label in "xyz").count(leader.hostname) == 1
    stays(lambda: "b" not in lab.started(), 0.5, "b waits for a, whatever slots are free")
    lab.open(5)
    lab.wait_ended("a", "b", "x", "y", "z")
    assert lab.ran_by("a", "b") == {leader.hostname}
    no_burial(*workers)


def test_a_worker_leads_one_queue_and_follows_on_another(lab: LeaseLab) -> None:
    both = {"strategies_single_active_consumer": ["x", "y"]}
    one = lab.worker(queues="x", settings=both)
    lab.wait_leader(queue="x")
    two = lab.worker(queues="yx", settings=both, concurrency=2)
    lab.wait_leader(queue="y")
    assert (lab.leader("x"), lab.leader("y")) == (one, two)
    for queue in "xy":
        for label in (f"{queue}1", f"{queue}2"):
            lab.send("hold_number", label, f"gate-{queue}", queue=queue)
    lab.wait_started("x1", "y1")
    stays(lambda: len(lab.started()) == 2, 0.5, "each leads one")
    lab.open(1, "gate-x")
    lab.open(1, "gate-y")
    lab.wait_started("x2", "y2")
    lab.acquainted(one, two)
    one.kill()
    wait_until(lambda: lab.leader("x") is two, 10, "it leads both")
    lab.open(2, "gate-x")
    lab.open(1, "gate-y")
    lab.wait_ended("x1", "x2", "y1", "y2")
    assert lab.ran_by("y1", "y2") == {two.hostname}
    assert repeated(lab.events()) == ["x2"]


def test_levels_and_keys_order_what_the_leader_takes(lab: LeaseLab) -> None:
    settings = {"strategies_fair_share": True, "strategies_priority_levels": 2}
    lab.app.conf.update(settings)
    sent = [("b1", "b", 1), ("a1", "a", 1), ("a2", "a", 1), ("a3", "a", 1), ("u2", "b", 0)]
    sent += [("b2", "b", 1), ("u1", "a", 0)]
    for label, key, level in sent:
        headers = {"fair_key": key}
        lab.send("hold_number", label, queue=QUEUE, priority=level, headers=headers)
    one, two = lab.fleet(2, settings=settings, concurrency=3)
    lab.wait_started("u2")
    leader, order = lab.wait_leader(), ["u2", "u1", "b1", "a1", "a2", "b2", "a3"]
    for label in order[:3]:
        lab.wait_started(label)
        stays(lambda: len(lab.started()) - len(lab.ended()) == 1, 0.2, "one at a time")
        lab.open()
    lab.wait_started("a1")
    leader.kill()
    wait_until(lambda: lab.started().count("a1") == 2, 10, "the dead leader's job first")
    lab.open(4)
    lab.wait_ended(*order)
    assert lab.started() == [*order[:4], "a1", *order[4:]]
    assert lab.ran_by(*order[4:]) == {(two if leader is one else one).hostname}


def test_a_queue_argument_is_as_good_as_the_setting(lab: LeaseLab) -> None:
    options = {
        "settings": {"strategies_single_active_consumer": []},
        "env": {"TEST_ARGUED": QUEUE},
        "concurrency": 2,
    }
    workers = lab.fleet(2, **options)
    lab.fill(QUEUE, ["a", "b"], "hold_number")
    lab.wait_started("a")
    leader = lab.wait_leader()
    stays(lambda: lab.started() == ["a"], 0.5, "one at a time")
    leader.kill()
    lab.open(3)
    lab.wait_ended("a", "b")
    assert broken_order(lab.events(), ["a", "b"]) == []
    assert lab.leader() in workers
    assert lab.leader() is not leader


def test_a_worker_that_was_not_told_reads_under_the_lease_too(lab: LeaseLab) -> None:
    """Settings may differ during a roll-out: the order must hold all the same."""
    leader = lab.worker()
    lab.wait_leader()
    other = lab.worker(settings={"strategies_single_active_consumer": []})
    other.wait_log("reading it under the lease, too", timeout=20)
    labels = numbers(30)
    lab.fill(QUEUE, labels, "number")
    lab.wait_ended(*labels)
    assert lab.ran_by(*labels) == {leader.hostname}
    assert broken_order(lab.events(), labels) == []
    leader.kill()
    assert lab.wait_leader(leader) is other


def test_a_worker_without_the_setting_follows_one_that_comes_later(lab: LeaseLab) -> None:
    other = lab.worker(settings={"strategies_single_active_consumer": []})
    lab.fill(QUEUE, ["first"], "number")
    lab.wait_ended("first")
    leader = lab.worker()
    other.wait_log("reading it under the lease, too", timeout=20)
    labels = numbers(30)
    lab.fill(QUEUE, labels, "number")
    lab.wait_ended(*labels)
    assert len(lab.ran_by(*labels)) == 1
    assert leader.running


@pytest.mark.parametrize("pool", ["threads", "prefork", "gevent"])
def test_a_leader_that_shuts_down_hands_over_when_its_last_job_has_ended(
    lab: LeaseLab, pool: str
) -> None:
    one, two = lab.fleet(2, pool, queues=(QUEUE, "other"), concurrency=2)
    lab.fill(QUEUE, ["a", "b"], "hold_number")
    lab.wait_started("a")
    leader = lab.wait_leader()
    leader.terminate()
    leader.wait_log("Warm shutdown")
    stays(lambda: lab.started() == ["a"], 0.5, "a still runs")
    lab.open()
    lab.wait_started("b")
    events = {(event.label, event.event): event for event in lab.events()}
    assert events["a", "end"].at <= events["b", "start"].at
    assert events["b", "start"].worker == (two if leader is one else one).hostname
    assert leader.wait_exit(20) == 0
    lab.open()
    lab.wait_ended("b")
    assert repeated(lab.events()) == []


def test_a_long_job_of_another_queue_does_not_hold_up_the_hand_over(lab: LeaseLab) -> None:
    one = lab.worker(queues=(QUEUE, "other"), concurrency=2)
    lab.send("hold", "long", "long-gate", queue="other")
    lab.send("hold_number", "a", queue=QUEUE)
    lab.wait_started("long", "a")
    two = lab.worker()
    one.terminate()
    one.wait_log("Warm shutdown")
    lab.send("hold_number", "b", queue=QUEUE)
    lab.open()
    lab.wait_started("b", timeout=10)
    assert lab.leader() is two
    assert one.running
    lab.open(1, "long-gate")
    lab.open()
    lab.wait_ended("long", "b")
    assert one.wait_exit(20) == 0


def test_a_lease_that_is_deleted_is_acquired_again(lab: LeaseLab) -> None:
    worker = lab.worker()
    lab.fill(QUEUE, ["a"], "number")
    lab.wait_ended("a")
    before = lab.term()
    lab.db.delete(lab.keys.lease(QUEUE))
    lab.fill(QUEUE, ["b"], "number")
    lab.wait_ended("b")
    assert worker.running
    assert lab.leader() is worker
    assert lab.term() > before
    assert [term for _, term in lab.terms()] == [before, lab.term()]
    assert "Traceback" not in worker.log()


def test_a_leader_that_is_told_to_stop_reading_gives_the_lease_up(lab: LeaseLab) -> None:
    one, two = lab.fleet(2, queues=(QUEUE, "other"))
    lab.send("hold_number", "a", queue=QUEUE)
    lab.wait_started("a")
    leader = lab.wait_leader()
    lab.control("cancel_consumer", leader, queue=QUEUE)
    lab.fill(QUEUE, ["b"], "number")
    stays(lambda: lab.started() == ["a"], 1, "a still runs")
    lab.open()
    lab.wait_ended("b", timeout=10)
    assert lab.leader() is (two if leader is one else one)
    assert repeated(lab.events()) == []


@pytest.mark.parametrize("left", [-60_000, 1000])
def test_a_lease_of_somebody_who_never_was_runs_out(lab: LeaseLab, left: int) -> None:
    seconds, _ = lab.db.time()
    planted = {"worker": "ghost@nowhere-0", "term": 2**45, "until": seconds * 1000 + left}
    lab.db.hset(lab.keys.lease(QUEUE), mapping=planted)
    lab.fill(QUEUE, ["a"], "number")
    lab.worker(settings=QUICK)
    lab.wait_ended("a", timeout=10)
    assert lab.terms() == [("a", 2**45 + 1)]


def test_a_task_sees_its_term_and_a_retry_does_not_inherit_it(lab: LeaseLab) -> None:
    worker = lab.worker(queues=(QUEUE, "plain"))
    lab.fill(QUEUE, ["a"], "number_again")
    lab.send("number_again", "b", "plain", queue=QUEUE)
    lab.fill("plain", ["c"], "number")
    wait_until(lambda: len(lab.terms()) == 5, description="all ran")
    found: dict[str, list[int | None]] = {}
    for label, its_term in lab.terms():
        found.setdefault(label, []).append(its_term)
    assert all(found["a"])
    assert found["b"][0]
    assert found["b"][1:] == [None]
    assert found["c"] == [None]
    assert worker.running


def test_an_early_acknowledgement_keeps_the_next_job_waiting_too(lab: LeaseLab) -> None:
    lab.fleet(2, concurrency=2)
    labels = numbers(10)
    for label in labels:
        lab.send("number_early", label, 0.02, queue=QUEUE)
    lab.wait_ended(*labels)
    assert broken_order(lab.events(), labels) == []
    assert repeated(lab.events()) == []


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent", "eventlet"])
def test_every_pool_hands_over(lab: LeaseLab, pool: str) -> None:
    workers: list[Worker] = lab.fleet(2, pool)
    labels = numbers(30)
    for label in labels:
        lab.send("number", label, 0.02, queue=QUEUE)
    lab.wait_started("00005")
    leader = lab.wait_leader()
    leader.kill()
    lab.wait_ended(*labels, timeout=40)
    assert broken_order(lab.events(), labels) == []
    assert len(repeated(lab.events())) <= 1
    assert lab.leader() in workers
    assert lab.leader() is not leader
