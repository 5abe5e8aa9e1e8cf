"""Limits among real workers: how many run, in which order, and what gives a permit up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.waiting import stays, wait_until
from tests.support.workers import celery

from .lab import SHORT, Lab

PARALLEL = ("prefork", "threads")
ALL_POOLS = (*PARALLEL, "solo", "gevent")


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


# -- how many, and in which order ----------------------------------------------------------------------


@pytest.mark.parametrize("pool", PARALLEL)
def test_the_fourth_waits(lab: Lab, pool: str) -> None:
    lab.worker(pool, queues="a", concurrency=4)
    lab.worker(pool, queues="b", concurrency=4)
    for number in range(8):
        lab.send("three", f"job-{number}", queue="ab"[number % 2])
    lab.wait_line("test.three:k", 5)
    assert lab.permits("test.three:k") == 3
    wait_until(lambda: len(lab.started()) == 3, description="three run")
    stays(lambda: len(lab.started()) == 3, 0.5, "three run")
    lab.open(8)
    lab.wait_count(8)
    assert lab.at_once("three") == 3
    lab.wait_free("test.three:k")
    lab.wait_settled()


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_one_at_a_time_in_every_pool(lab: Lab, pool: str) -> None:
    lab.worker(pool, queues="a", concurrency=None if pool == "solo" else 4)
    lab.worker(pool, queues="ab", concurrency=None if pool == "solo" else 4)
    labels = names("n", 30)
    for number, label in enumerate(labels):
        lab.send("quick", label, queue="ab"[number % 2])
    assert sorted(lab.wait_count(30)) == sorted(labels)
    assert lab.at_once("quick") == 1
    lab.wait_free("test.quick:")
    lab.wait_settled()


def test_the_line_is_in_order_over_queues_and_workers(lab: Lab) -> None:
    lab.worker("threads", queues="a", concurrency=2)
    lab.worker("threads", queues="b", concurrency=2)
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    labels = names("n", 6)
    for number, label in enumerate(labels):
        lab.send("one", label, queue="ab"[number % 2])
        lab.wait_line("test.one:k", number + 1)
    for number, label in enumerate(labels, 1):
        lab.open()
        lab.wait_started(label)
        assert lab.started() == ["first", *labels[:number]]
    lab.open()
    lab.wait_count(7)
    assert lab.at_once("one") == 1


def test_a_full_key_hides_nobody(lab: Lab) -> None:
    """Case 11, for limits: 500 of one key wait, then one of another starts at once."""
    lab.worker("threads", queues="a", concurrency=2)
    lab.send("one", "first", "k", queue="a")
    lab.wait_started("first")
    for label in names("n", 500):
        lab.send("one", label, "k", queue="a")
    lab.send("one", "other", "another", "other-gate", queue="a")
    lab.wait_started("other", timeout=10)
    assert lab.started() == ["first", "other"]
    assert lab.line("test.one:k") == 500
    lab.send("record", "plain", queue="a")
    lab.open(gate="other-gate")
    lab.wait_ended("plain")


def test_tasks_of_a_group_share_a_limit(lab: Lab) -> None:
    lab.worker("threads", queues="a", concurrency=4)
    lab.send("left", "l", queue="a")
    lab.wait_started("l")
    lab.send("right", "r", queue="a")
    lab.wait_line("shared:", 1)
    assert lab.started() == ["l"]
    lab.open(2)
    lab.wait_ended("l", "r")
    lab.wait_free("shared:")


def test_case_17_never_two_at_once_after_a_forced_shutdown(lab: Lab) -> None:
    first = lab.worker("threads", queues="a", concurrency=3)
    for label in names("n", 3):
        lab.send("short", label, queue="a")
    lab.wait_line("test.short:k", 2)
    lab.wait_started("n0")
    first.kill()
    killed_at = time.monotonic()
    for _ in range(2):
        lab.worker("threads", queues="a", concurrency=3)
    lab.wait_started("n1", timeout=SHORT + 10)
    (start,) = [event.at for event in lab.events() if event.label == "n1"]
    # The last renewal was before the kill, by a third of the duration at most.
    assert start - killed_at > SHORT / 2
    stays(lambda: lab.started() == ["n0", "n1"], 1.0, "one runs")
    lab.open(2)
    lab.wait_ended("n1", "n2")
    events = [event for event in lab.events() if event.label != "n0"]
    assert [event.label for event in events] == ["n1", "n1", "n2", "n2"]


# -- what gives a permit up ----------------------------------------------------------------------------

ENDINGS = ("error", "retry", "reject", "requeue", "ignore")
IN_A_CHILD = ("soft", "hard", "killed", "exit", "unpicklable")


@pytest.mark.parametrize("pool", PARALLEL)
@pytest.mark.parametrize("name", ["ends_late", "ends_early"])
def test_every_ending_gives_it_up(lab: Lab, pool: str, name: str) -> None:
    worker = lab.worker(pool, queues="a", concurrency=2)
    for how in ENDINGS + (IN_A_CHILD if pool == "prefork" else ()):
        limits = {"soft": {"soft_time_limit": 1}, "hard": {"time_limit": 1}}.get(how, {})
        again = how in ("retry", "requeue") and not (how == "requeue" and name == "ends_early")
        before = len(lab.ended()) + len(lab.started())
        lab.send(name, how, queue="a", **limits)
        wait_until(lambda how=how: how in lab.started(), 20, f"{how} started")
        if again:
            wait_until(lambda how=how: lab.started().count(how) == 2, 20, f"{how} ran again")
        lab.wait_free(f"{name}:")
        lab.send(name, "success", queue="a")
        wait_until(lambda n=before: len(lab.started()) > n, 20, f"a job runs after {how}")
        lab.wait_free(f"{name}:")
    assert worker.running
    lab.wait_settled()


def test_what_never_runs_gives_it_up(lab: Lab) -> None:
    worker = lab.worker("threads", queues="a", concurrency=2)
    lab.control("revoke", worker, task_id="revoked-id")
    lab.send("quick", "revoked", queue="a", task_id="revoked-id")
    lab.send("quick", "expired", queue="a", expires=-10)
    lab.send("quick", "runs", queue="a")
    lab.wait_ended("runs")
    assert lab.started() == ["runs"]
    lab.wait_free("test.quick:")
    # Its rate is used up: it waits for that without a permit.
    lab.send("seldom", "first", queue="a")
    lab.wait_ended("first")
    lab.send("seldom", "second", queue="a")
    wait_until(lambda: lab.db.zcard(lab.keys.delayed("a")) == 1, description="it waits")
    lab.wait_free("test.seldom:")


def test_a_revoked_job_in_line_passes_its_permit_on(lab: Lab) -> None:
    """Case 37, in line."""
    worker = lab.worker("threads", queues="a", concurrency=2)
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    ids = [lab.send("one", label, queue="a") for label in names("n", 20)]
    lab.wait_line("test.one:k", 20)
    lab.control("revoke", worker, task_id=ids)
    lab.send("one", "last", queue="a")
    lab.wait_line("test.one:k", 21)
    lab.open(2)
    lab.wait_ended("first", "last")
    assert lab.started() == ["first", "last"]
    lab.wait_free("test.one:k")


def test_a_terminated_job_gives_it_up(lab: Lab) -> None:
    worker = lab.worker(queues="a", concurrency=2)
    task_id = lab.send("one", "first", queue="a")
    lab.send("one", "second", queue="a")
    lab.wait_started("first")
    lab.wait_line("test.one:k", 1)
    lab.control("revoke", worker, task_id=task_id, terminate=True, signal="SIGKILL")
    lab.wait_started("second")
    lab.open()
    lab.wait_ended("second")
    lab.wait_free("test.one:k")


def test_a_long_job_keeps_its_permit(lab: Lab) -> None:
    lab.worker("threads", queues="a", concurrency=2)
    lab.send("short", "long", queue="a")
    lab.wait_started("long")
    lab.send("short", "next", queue="a")
    lab.wait_line("test.short:k", 1)
    stays(lambda: lab.started() == ["long"], 2.5 * SHORT, "it is renewed")
    lab.open(2)
    lab.wait_ended("next")


def test_a_long_job_that_blocks_the_loop_keeps_its_permit(lab: Lab) -> None:
    lab.worker("solo", queues="a", concurrency=None)
    lab.send("short", "long", queue="a")
    lab.wait_started("long")
    lab.worker("threads", queues="a")
    lab.send("short", "next", queue="a")
    lab.wait_line("test.short:k", 1)
    stays(lambda: lab.started() == ["long"], 2.5 * SHORT, "it is renewed")
    lab.open(2)
    lab.wait_ended("next")


# -- workers that die ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", PARALLEL)
def test_case_16_a_dead_workers_permit_ends_after_its_duration(lab: Lab, pool: str) -> None:
    first = lab.worker(pool, queues="a")
    lab.send("short", "dies", queue="a")
    lab.wait_started("dies")
    lab.worker(pool, queues="b")
    lab.send("short", "next", queue="b")
    lab.wait_line("test.short:k", 1)
    first.kill()
    lab.wait_started("next", timeout=SHORT + 7)
    lab.open()
    lab.wait_ended("next")
    assert lab.started() == ["dies", "next"]
    lab.wait_free("test.short:k")


def test_a_late_job_of_a_dead_worker_runs_again_once(lab: Lab) -> None:
    first = lab.worker("threads", queues="a")
    lab.send("one_late", "dies", queue="a")
    lab.wait_started("dies")
    lab.worker("threads", queues="ab", concurrency=3)
    lab.send("one_late", "next", queue="b")
    lab.wait_line("test.one_late:k", 1)
    first.kill()
    # It has its permit still, so it goes first.
    wait_until(lambda: lab.started() == ["dies", "dies"], 40, "it runs again")
    stays(lambda: lab.started() == ["dies", "dies"], 0.5, "the other waits")
    lab.open(2)
    lab.wait_ended("dies", "next")
    assert lab.started() == ["dies", "dies", "next"]
    assert [event.redelivered for event in lab.events() if event.event == "start"] == [
        False,
        True,
        False,
    ]
    lab.wait_free("test.one_late:k")
    lab.wait_settled()


@pytest.mark.parametrize("pool", PARALLEL)
def test_a_warm_shutdown_hands_the_permit_on(lab: Lab, pool: str) -> None:
    first = lab.worker(pool, queues="a", concurrency=2)
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    for label in names("n", 3):
        lab.send("one", label, queue="a")
    lab.wait_line("test.one:k", 3)
    first.terminate()
    first.wait_log("Warm shutdown")
    lab.open()
    assert first.wait_exit() == 0
    assert lab.ended() == ["first"]
    lab.worker(pool, queues="a", concurrency=2)
    lab.open(3)
    assert lab.wait_count(4) == ["first", *names("n", 3)]
    assert lab.at_once("one") == 1
    lab.wait_free("test.one:k")


# -- messages ------------------------------------------------------------------------------------------


def test_a_key_that_cannot_be_told_sets_the_message_aside(lab: Lab) -> None:
    worker = lab.worker("threads", queues="a", concurrency=2)
    lab.send("broken", "", queue="a")
    lab.send("broken", "free", queue="a")
    lab.wait_ended("free")
    wait_until(lambda: lab.set_aside("a"), description="it is set aside")
    (entry,) = lab.set_aside("a")
    assert "the key of a job of test.broken is unknown: ZeroDivisionError" in entry["reason"]
    lab.wait_settled()
    assert worker.log().count("Received invalid task message") == 1
    assert lab.started() == ["free"]


def test_a_limit_that_cannot_be_read_sets_the_message_aside(lab: Lab) -> None:
    lab.db.set(lab.keys.line("test.quick:"), "x")
    lab.worker("threads", queues="a")
    lab.send("quick", "one", queue="a")
    lab.send("record", "two", queue="a")
    lab.wait_ended("two")
    wait_until(lambda: lab.set_aside("a"), description="it is set aside")
    (entry,) = lab.set_aside("a")
    assert "its limit cannot be read: strategies:line:test.quick:" in entry["reason"]


@pytest.mark.parametrize("protocol", [1, 2])
def test_both_protocols(lab: Lab, protocol: int) -> None:
    lab.app.conf.task_protocol = protocol
    lab.worker("threads", queues="a", concurrency=3)
    lab.send("one", "a1", "a", queue="a")
    lab.send("one", "a2", "a", queue="a")
    lab.send("one", "b1", "b", queue="a")
    lab.wait_started("a1", "b1")
    lab.wait_line("test.one:a", 1)
    lab.open(3)
    lab.wait_ended("a1", "a2", "b1")


def test_an_eta_takes_no_permit_before_its_time(lab: Lab) -> None:
    lab.worker("threads", queues="a", concurrency=2)
    lab.send("one", "later", queue="a", countdown=2)
    wait_until(lambda: lab.db.zcard(lab.keys.delayed("a")) == 1, description="it waits")
    lab.send("one", "first", queue="a")
    lab.wait_started("first")
    lab.wait_line("test.one:k", 1)
    lab.open(2)
    assert lab.wait_count(2) == ["first", "later"]


def test_levels_are_kept(lab: Lab) -> None:
    conf = {"strategies_priority_levels": {"a": 3}}
    lab.app.conf.update(conf)
    lab.worker("threads", queues="a", settings=conf, concurrency=2)
    lab.send("one", "first", queue="a", priority=0)
    lab.wait_started("first")
    lab.send("one", "low", queue="a", priority=2)
    lab.wait_line("test.one:k", 1)
    entries: Any = lab.db.zrange(lab.keys.in_line("a"), 0, -1)
    assert entries[0].startswith(b"p2:")
    lab.open(2)
    lab.wait_ended("first", "low")
    assert [e.queue for e in lab.events()] == ["a"] * 4


def test_fair_share_keeps_key_and_weight(lab: Lab) -> None:
    conf = {"strategies_fair_share": True, "strategies_max_in_flight": {"*": 2}}
    lab.app.conf.update(conf)
    for _ in range(2):
        lab.worker("threads", queues="a", concurrency=2, settings=conf)
    for number, label in enumerate(names("n", 24)):
        headers = {"fair_key": "xyz"[number % 3], "fair_weight": 1 + number % 3}
        lab.send("quick", label, queue="a", headers=headers)
    lab.wait_count(24)
    assert sorted(lab.started()) == sorted(names("n", 24))
    assert lab.at_once("quick") == 1
    lab.wait_free("test.quick:")
    lab.wait_settled()
    wait_until(
        lambda: not lab.db.keys("strategies:{a}:running:*"), description="nothing is in flight"
    )


# -- looking -------------------------------------------------------------------------------------------


def test_depth_purge_and_unsort_see_what_stands_in_line(lab: Lab) -> None:
    worker = lab.worker("threads", queues="a", concurrency=2)
    lab.send("short", "first", queue="a")
    lab.wait_started("first")
    for label in names("n", 4):
        lab.send("short", label, queue="a")
    lab.wait_line("test.short:k", 4)

    def depth() -> int:
        with lab.app.connection_for_read() as connection:
            found = connection.default_channel.queue_declare("a", passive=True)
        return int(found.message_count)

    assert depth() == 4
    lab.open()
    lab.wait_started("n0")
    lab.wait_line("test.short:k", 3)
    assert depth() == 3
    worker.terminate()
    worker.wait_log("Warm shutdown")
    lab.open()
    worker.wait_exit()
    # n1 has its permit, and is where given-back messages are.
    assert lab.waiting("a") == ["n1"]
    assert depth() == 3
    done = celery("strategies", "unsort", "a", broker_url=lab.url)
    assert "a: 3 messages moved" in done.stdout
    assert lab.waiting("a") == ["n1", "n2", "n3"]
    assert depth() == 3

    worker = lab.worker("threads", queues="a", concurrency=2)
    # The permit that it had as a given-back message ends with its duration.
    lab.wait_started("n1", timeout=SHORT + 10)
    lab.wait_line("test.short:k", 2)
    assert depth() == 2
    celery("purge", "-f", "-Q", "a", broker_url=lab.url)
    assert lab.db.exists(lab.keys.in_line("a")) == 0
    lab.open()
    lab.wait_ended("n1")
    lab.wait_free("test.short:k")
    lab.send("quick", "works", queue="a")
    lab.wait_ended("works")
