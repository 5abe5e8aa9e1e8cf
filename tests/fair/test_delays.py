"""Jobs with an ETA wait in Redis: not in a worker, not in a slot, through restarts, and run once when they are due."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_strategies.store import admin, scripts
from tests.conftest import RedisFactory, WorkerFactory
from tests.fair.lab import POOLS, FairLab, names, once_each
from tests.support.waiting import stays, wait_until
from tests.support.workers import celery, job, publish

#: A source whose jobs are sorted, where the ETA is seen at sorting, and a plain one, where the worker sees it.
SOURCES = ("fair", "plain")


def start(lab: FairLab, source: str, pool: str = "threads", **options: Any) -> Any:
    return lab.worker(pool, **options) if source == "fair" else lab.plain(pool, **options)


def rush(lab: FairLab, queue: str = "a") -> None:
    """Have what waits for its time be due, as if years had passed: nobody waits a minute for a test."""
    key = lab.keys.delayed(queue)
    members: Any = lab.db.zrange(key, 0, -1)
    with lab.db.pipeline() as pipe:
        for place, member in enumerate(members):
            pipe.zrem(key, member)
            pipe.zadd(key, {re.sub(rb'"eta": "\d{4}', b'"eta": "2001', member): place + 1})
        pipe.execute()
    # As any worker does, now and not at its next look.
    names = [lab.keys.scratch, key, *lab.keys.inboxes(queue)]
    assert admin.run(lab.db, scripts.PROMOTE, names, len(members), "") == len(members)


@pytest.mark.parametrize(
    ("source", "pool"), [*(("fair", pool) for pool in POOLS), ("plain", "prefork")]
)
def test_case_04_jobs_with_a_countdown_do_not_fill_a_worker(
    lab: FairLab, source: str, pool: str
) -> None:
    """One slot, 100 jobs with a countdown, then a plain one: it runs at once, and the 100 are in Redis."""
    worker = start(lab, source, pool)
    later = names("later", 100)
    lab.keyed(later, countdown=60)
    lab.keyed(["now-0"])
    lab.wait_ended("now-0", timeout=20)
    wait_until(lambda: lab.delayed("a") == later, description="all of the others are delayed")
    assert lab.started() == ["now-0"]
    assert lab.unacked() == 0
    stats = lab.control("stats", worker)["strategies"]
    assert (stats["held"], stats["reserved"]) == (0, 0)
    assert lab.control("reserved", worker) == []
    rush(lab)
    assert lab.wait_count(101) == ["now-0", *later]
    lab.wait_settled()


def test_two_thousand_delayed_jobs_are_not_in_the_worker(lab: FairLab) -> None:
    worker = lab.worker("threads")
    jobs = [job("record", label, queue="a", countdown=600) for label in names("later", 2000)]
    publish(lab.url, jobs)
    wait_until(lambda: len(lab.delayed("a")) == 2000, 60, "all are delayed")
    assert lab.unacked() == 0
    assert lab.control("memory", worker) == {"held": 0, "requests": 0, "timers": 0}


@pytest.mark.parametrize(
    ("source", "protocol", "pool"),
    [
        ("fair", 2, "prefork"),
        ("fair", 2, "gevent"),
        ("fair", 1, "solo"),
        ("plain", 2, "solo"),
        ("plain", 1, "prefork"),
    ],
)
def test_a_short_countdown_is_kept(lab: FairLab, source: str, protocol: int, pool: str) -> None:
    """Not before its time, and not much later; the task sees its ETA."""
    start(lab, source, pool)
    eta = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=1)
    at = time.monotonic() + 1
    settings = {"task_protocol": protocol}
    publish(lab.url, [job("see_eta", "k-0", queue="a", eta=eta.isoformat())], settings)
    lab.wait_ended("k-0", timeout=10)
    (begun,) = (event.at for event in lab.starts())
    assert begun > at - 0.1
    # It would be up to 5 s if nobody knew when it is due.
    assert begun - at < 2.5, f"{begun - at:.1f} s late"
    seen = lab.db.get("test:eta:k-0")
    assert dt.datetime.fromisoformat(str(seen, "utf-8")) == eta


@pytest.mark.parametrize("source", SOURCES)
def test_every_form_of_an_eta(lab: FairLab, source: str) -> None:
    """With a zone or without: a naive one is UTC, as Celery has it, whatever the app's zone."""
    zone = {"timezone": "Asia/Tokyo", "enable_utc": False}
    start(lab, source, settings=zone)
    hour = dt.timedelta(hours=1)
    forms: dict[str, Callable[[dt.datetime], str]] = {
        "naive": lambda moment: moment.replace(tzinfo=None).isoformat(),
        "offset": lambda moment: moment.isoformat(),
        "zulu": lambda moment: moment.replace(tzinfo=None).isoformat() + "Z",
        "other zone": lambda moment: moment.astimezone(dt.timezone(-5 * hour)).isoformat(),
    }
    now = dt.datetime.now(dt.timezone.utc)
    jobs = [
        job("record", f"{form} {when}", queue="a", eta=text(now + shift))
        for form, text in forms.items()
        for when, shift in (("past", -hour), ("future", hour))
    ]
    publish(lab.url, jobs, zone)
    lab.wait_ended(*(f"{form} past" for form in forms), timeout=10)
    wait_until(lambda: len(lab.delayed("a")) == len(forms), description="the others are delayed")
    assert set(lab.delayed("a")) == {f"{form} future" for form in forms}
    assert len(lab.started()) == len(forms)


@pytest.mark.parametrize("source", SOURCES)
def test_a_retry_with_a_countdown_waits_in_redis(lab: FairLab, source: str) -> None:
    worker = start(lab, source, "prefork")
    lab.send("again", "k-0", queue="a", headers={"fair_key": "k"}, kwargs={"countdown": 60})
    wait_until(lambda: lab.delayed("a") == ["k-0"], 10, "it waits")
    wait_until(
        lambda: lab.control("stats", worker)["strategies"]["held"] == 0, description="not here"
    )
    lab.keyed(["now-0"])
    lab.wait_ended("now-0", timeout=20)
    rush(lab)
    lab.wait_ended("k-0")
    assert lab.started() == ["k-0", "now-0", "k-0"]


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_due_joins_behind_what_was_visible_before(lab: FairLab, source: str) -> None:
    start(lab, source)
    lab.fill("a", ["gate"], "hold")
    lab.wait_started("gate")
    lab.fill("a", ["later"], countdown=60)
    lab.fill("a", ["before 1", "before 2"])
    lab.open()
    lab.wait_ended("before 1", "before 2")
    wait_until(lambda: lab.delayed("a") == ["later"], description="it is delayed")
    lab.fill("a", ["gate"], "hold")
    wait_until(lambda: lab.started().count("gate") == 2, description="busy again")
    lab.fill("a", ["before 3"])
    rush(lab)
    wait_until(lambda: not lab.delayed("a"), description="it is due, and moved")
    lab.fill("a", ["after"])
    lab.open()
    lab.wait_ended("before 3", "later", "after")
    assert lab.started()[-3:] == ["before 3", "later", "after"]


@pytest.mark.parametrize("source", SOURCES)
def test_expired_while_delayed(lab: FairLab, source: str) -> None:
    start(lab, source)
    now = dt.datetime.now(dt.timezone.utc)
    lab.send("record", "stale", queue="a", countdown=60, expires=now + dt.timedelta(seconds=1))
    wait_until(lambda: lab.delayed("a") == ["stale"], description="it is delayed")
    wait_until(
        lambda: dt.datetime.now(dt.timezone.utc) > now + dt.timedelta(seconds=1.1),
        description="it has expired",
    )
    rush(lab)
    lab.fill("a", ["next"])
    lab.wait_ended("next")
    wait_until(lambda: lab.count() == 0, description="it is gone")
    lab.wait_settled()
    assert lab.started() == ["next"]


@pytest.mark.parametrize("source", SOURCES)
def test_revoked_while_delayed(lab: FairLab, source: str) -> None:
    worker = start(lab, source)
    lab.send("record", "unwanted", queue="a", countdown=60, task_id="unwanted-id")
    wait_until(lambda: lab.delayed("a") == ["unwanted"], description="it is delayed")
    lab.control("revoke", worker, task_id="unwanted-id")
    rush(lab)
    lab.fill("a", ["next"])
    lab.wait_ended("next")
    wait_until(lambda: lab.count() == 0, description="it is gone")
    lab.wait_settled()
    assert lab.started() == ["next"]


@pytest.mark.parametrize("source", SOURCES)
def test_levels_of_delayed_jobs_are_kept(lab: FairLab, source: str) -> None:
    levels = {"strategies_priority_levels": 3, "strategies_default_priority": 1}
    jobs = [job("record", f"p{p}", queue="a", priority=p, countdown=60) for p in (2, 1, 0)]
    publish(lab.url, jobs, levels, stock=False)
    start(lab, source, settings=levels)
    wait_until(
        lambda: sorted(lab.delayed("a")) == ["p0", "p1", "p2"], description="all are delayed"
    )
    lab.fill("a", ["gate"], "hold", priority=0)
    lab.wait_started("gate")
    rush(lab)
    wait_until(lambda: not lab.delayed("a"), description="all are due")
    lab.open()
    assert lab.wait_count(4) == ["gate", "p0", "p1", "p2"]


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_case_20_etas_survive_a_restart_of_redis(
    redis_factory: RedisFactory, worker_factory: WorkerFactory, redis_db: redis.Redis,
    redis_server: Any, source: str,
) -> None:  # fmt: skip
    """An append-only file, a kill: the job runs once, at its time, in the worker that was connected."""
    server = redis_factory(aof=True)
    with server.client() as client:
        lab = FairLab(server.url(), client, worker_factory)
        start(lab, source, record_url=redis_server.url())
        at = time.monotonic() + 4
        lab.keyed(["later-0"], countdown=4)
        wait_until(lambda: lab.delayed("a") == ["later-0"], description="it is delayed")
        lab.close()
        server.restart(kill=True)
        records = FairLab(redis_server.url(), redis_db, worker_factory)
        records.wait_ended("later-0", timeout=30)
        assert records.starts()[0].at > at - 0.1
        wait_until(lambda: client.hlen("unacked") == 0, description="it is acknowledged")
        stays(lambda: records.started() == ["later-0"], 0.5, "once")
        records.close()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_21_etas_survive_term_and_quit(lab: FairLab, source: str, pool: str) -> None:
    """20 with an ETA and one that runs; SIGTERM, then SIGQUIT: all 20 are there, and each runs once later."""
    worker = start(lab, source, pool)
    lab.keyed(["busy-0"], task="hold")
    lab.wait_started("busy-0")
    later = names("later", 20)
    lab.keyed(later, countdown=60)
    worker.terminate()
    worker.wait_log("Warm shutdown")
    worker.quit()
    lab.open()
    worker.wait_exit()
    assert lab.unacked() == 0
    assert sorted([*lab.delayed("a"), *lab.waiting("a")]) == sorted(later)
    # Another worker takes them up.
    lab.keyed(["probe-0"])
    start(lab, source, pool)
    lab.wait_ended("probe-0")
    wait_until(lambda: lab.delayed("a") == later, description="all are delayed")
    rush(lab)
    lab.wait_ended(*later)
    once_each(lab, ["busy-0", "probe-0", *later])


def test_purge_and_depth_count_them(lab: FairLab) -> None:
    lab.worker()
    lab.keyed(names("later", 3), countdown=60)
    wait_until(lambda: len(lab.delayed("a")) == 3, description="they are delayed")
    assert lab.count() == 3
    done = celery("purge", "-f", "-Q", "a", broker_url=lab.url)
    assert "Purged 3 messages" in done.stdout
    assert lab.count() == 0
    assert lab.delayed("a") == []


def test_unsort_hands_them_to_stock_workers(lab: FairLab) -> None:
    worker = lab.worker()
    lab.keyed(names("later", 3), countdown=2)
    wait_until(lambda: len(lab.delayed("a")) == 3, description="they are delayed")
    assert worker.stop() == 0
    assert admin.unsort_queue(lab.db, lab.keys, "a") == 3
    lab.stock()
    lab.wait_ended(*names("later", 3))
    once_each(lab, names("later", 3))


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("ahead", [-60, 60])
def test_a_workers_own_clock_does_not_matter(lab: FairLab, source: str, ahead: int) -> None:
    """By the server's clock, one job is due and one is not; the worker's is a minute off."""
    start(lab, source, app="tests.fair.late", env={"TEST_CLOCK_AHEAD": str(ahead)})
    lab.keyed(["past-0"], eta=dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=30))
    lab.keyed(["future-0"], countdown=30)
    lab.wait_ended("past-0", timeout=10)
    wait_until(lambda: lab.delayed("a") == ["future-0"], description="the other is delayed")
    assert lab.started() == ["past-0"]


def test_inspect_tells_of_delayed_jobs_from_redis(lab: FairLab) -> None:
    worker = lab.worker()
    (waiting,) = lab.keyed(["later-0"], countdown=60)
    wait_until(lambda: lab.delayed("a"), description="it is delayed")
    (entry,) = lab.control("scheduled", worker)
    assert entry["request"]["id"] == waiting
    assert lab.control("query_task", worker, ids=[waiting])[waiting][0] == "scheduled"
    assert lab.control("memory", worker) == {"held": 0, "requests": 0, "timers": 0}
