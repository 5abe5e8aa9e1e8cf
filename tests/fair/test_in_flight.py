"""A job is in flight until its task has ended, whatever the end and whenever its message is acknowledged."""

from __future__ import annotations

import base64
import datetime as dt
import json

import pytest

from tests.fair.lab import CAPPED, POOLS, FairLab
from tests.support.waiting import stays, wait_until

#: How a task can end in every pool, and where only a child process can.
EVERYWHERE = ("success", "error", "retry", "reject", "requeue", "ignore")
IN_A_CHILD = ("soft", "hard", "killed", "exit", "unpicklable")


def probe(lab: FairLab, what: str) -> None:
    """Show that the next of the key runs, and nothing is in flight, after *what*."""
    label = f"k-after {what}"
    lab.keyed([label])
    lab.wait_ended(label, timeout=15)
    lab.wait_none_in_flight()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("ack", ["early", "late"])
def test_every_outcome_ends_it(lab: FairLab, pool: str, ack: str) -> None:
    """Cap 1, two slots: after each outcome the next job of the key runs."""
    worker = lab.worker(pool, concurrency=None if pool == "solo" else 2, settings=CAPPED)
    outcomes = EVERYWHERE
    if pool == "prefork":
        # Two that Celery notices by its own look, each 5 s, are the same for it with either acknowledgement.
        outcomes += IN_A_CHILD if ack == "late" else IN_A_CHILD[:2]
    task = "outcome" if ack == "late" else "outcome_early"
    for how in outcomes:
        limits = {"soft": {"soft_time_limit": 1}, "hard": {"time_limit": 1}}.get(how, {})
        lab.send(task, how, queue="a", headers={"fair_key": "k"}, **limits)
        probe(lab, how)
        # An early acknowledged message cannot go back to its queue.
        again = how == "retry" or (how == "requeue" and ack == "late")
        wait_until(
            lambda how=how, n=1 + again: lab.started().count(how) == n, 20, f"{how} ran {1 + again}"
        )
    lab.wait_none_in_flight()
    assert worker.running


@pytest.mark.parametrize("pool", POOLS)
def test_what_never_runs_ends_it(lab: FairLab, pool: str) -> None:
    worker = lab.worker(pool, settings=CAPPED)
    k = {"fair_key": "k"}
    past = dt.datetime.now(dt.timezone.utc) - dt.timedelta(hours=1)
    lab.send("record", "expired", queue="a", expires=past, headers=k)
    probe(lab, "expired")
    lab.control("revoke", worker, task_id="revoked-id")
    lab.send("record", "revoked", queue="a", task_id="revoked-id", headers=k)
    probe(lab, "revoked")
    lab.send("no_such_task", "unknown", queue="a", headers=k)
    probe(lab, "unknown")
    lab.send("record", "unreadable", queue="b", headers=k)
    message = json.loads(lab.db.rpop("b"))  # type: ignore[arg-type]
    message["body"] = base64.b64encode(b"{not json").decode()
    lab.db.lpush("a", json.dumps(message))
    probe(lab, "unreadable")
    assert {"expired", "revoked", "unknown", "unreadable"}.isdisjoint(lab.started())
    assert len(lab.set_aside("a")) == 2
    assert worker.running


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_terminated_job_ends_it(lab: FairLab, pool: str, task: str) -> None:
    worker = lab.worker(pool, settings=CAPPED)
    (job,) = lab.keyed(["k-0"], task=task)
    lab.wait_started("k-0")
    lab.keyed(["k-1"])
    lab.control("revoke", worker, task_id=job, terminate=True, signal="SIGTERM")
    assert lab.wait_ended("k-1", timeout=15) == ["k-1"]
    lab.wait_none_in_flight()


def test_a_terminated_job_ends_when_its_child_is_gone(lab: FairLab) -> None:
    """Its child takes its time with the signal: the next of the key starts after that."""
    worker = lab.worker("prefork", concurrency=2, settings=CAPPED)
    (job,) = lab.keyed(["k-0"], task="deaf")
    lab.wait_started("k-0")
    lab.keyed(["k-1"])
    lab.control("revoke", worker, task_id=job, terminate=True, signal="SIGTERM")
    worker.wait_log("Terminating")
    stays(lambda: "k-1" not in lab.started(), 1, "the child still works")
    lab.open()
    lab.wait_ended("k-1", timeout=15)
    assert lab.started() == ["k-0", "k-1"]
    lab.wait_none_in_flight()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_an_early_acknowledged_job_counts_until_it_ends(lab: FairLab, pool: str) -> None:
    """Its message is gone, it is not."""
    lab.worker(pool, concurrency=3, settings=CAPPED)
    lab.keyed(["k-0"], task="hold")
    lab.wait_started("k-0")
    lab.keyed(["k-1"], task="hold")
    lab.wait_settled()
    assert lab.running() == {"k": 1}
    stays(lambda: lab.started() == ["k-0"], 0.5, "the key is full")
    lab.open()
    lab.wait_started("k-1")
    lab.open()
    lab.wait_count(2)
    lab.wait_none_in_flight()
