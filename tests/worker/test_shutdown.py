"""Every kind of shutdown, in every pool: what ran is settled, what did not is back in its place."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_until
from tests.worker.lab import ALL_POOLS, Lab

PARALLEL = ("prefork", "threads", "gevent")


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


@pytest.mark.parametrize("pool", ALL_POOLS)
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_case_43_a_warm_shutdown_lets_the_job_end_and_acknowledges_it(
    lab: Lab, pool: str, task: str
) -> None:
    worker = lab.worker(pool, queues="a")
    lab.send(task, "long", queue="a")
    lab.wait_started("long")
    lab.fill("a", names("n", 3))
    worker.terminate()
    worker.wait_log("Warm shutdown")
    lab.open()
    assert worker.wait_exit() == 0
    assert lab.started() == lab.ended() == ["long"]
    assert lab.unacked() == 0
    assert lab.waiting("a") == names("n", 3)
    lab.worker(pool, queues="a")
    assert lab.wait_count(4) == ["long", *names("n", 3)]


@pytest.mark.parametrize("pool", PARALLEL)
@pytest.mark.parametrize("task", ["hold", "hold_late"])
@pytest.mark.parametrize("read_ahead", [0, 3])
def test_case_44_a_warm_shutdown_runs_nothing_more(
    lab: Lab, pool: str, task: str, read_ahead: int
) -> None:
    """Two slots, ten jobs: two end, eight are in their place, also those that were read ahead."""
    labels = names("j", 10)
    lab.fill("a", labels, task)
    worker = lab.worker(
        pool, queues="a", concurrency=2, settings={"strategies_read_ahead": read_ahead}
    )
    lab.wait_started("j0", "j1")
    wait_until(lambda: len(lab.waiting("a")) == 8 - read_ahead, description="read ahead")
    worker.terminate()
    worker.wait_log("Warm shutdown")
    lab.open(10)
    assert worker.wait_exit() == 0
    assert lab.unacked() == 0
    ran = sorted(lab.ended())
    assert sorted(lab.started()) == ran, "what started has ended"
    if read_ahead and pool != "prefork":
        # Threads and greenlets have accepted what was read ahead: it runs, once.
        assert ran == labels[: len(ran)]
    else:
        assert ran == labels[:2]
    assert lab.waiting("a") == labels[len(ran) :]
    # Once each, in the end.
    lab.db.delete("gate")
    lab.open(10)
    lab.worker(pool, queues="a", concurrency=2)
    lab.wait_count(10)
    assert sorted(lab.started()) == labels


@pytest.mark.parametrize("pool", ALL_POOLS)
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_cold_shutdown_gives_back_what_was_not_acknowledged(
    lab: Lab, pool: str, task: str
) -> None:
    """Late ack: the job is back at the head. Early ack: it is gone, and never runs twice."""
    labels = names("j", 4)
    lab.fill("a", labels, task)
    worker = lab.worker(pool, queues="a")
    lab.wait_started("j0")
    if task == "hold":
        lab.wait_settled()
    worker.quit()
    if pool in ("threads", "solo"):
        # Nothing can end a thread: the job runs on until the process goes.
        worker.wait_log("Running jobs cannot be cancelled")
        lab.open()
    worker.wait_exit()
    assert lab.unacked() == 0
    waiting = lab.waiting("a")
    if task == "hold_late" and "j0" not in lab.ended():
        assert waiting == labels
    else:
        assert waiting == labels[1:]
    assert lab.started() == ["j0"]
    lab.open(4)
    lab.worker(pool, queues="a")
    lab.wait_ended(*waiting)
    assert lab.started() == ["j0", *waiting]
    lab.wait_settled()


@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_a_cold_shutdown_gives_back_what_was_read_ahead(lab: Lab, task: str) -> None:
    """In its order, before everything that was never taken, and unmarked: it never started."""
    labels = names("j", 6)
    lab.fill("a", labels, task)
    worker = lab.worker(queues="a", settings={"strategies_read_ahead": 3})
    lab.wait_started("j0")
    wait_until(lambda: lab.waiting("a") == labels[4:], description="three are read ahead")
    worker.quit()
    worker.wait_exit()
    assert lab.unacked() == 0
    assert lab.waiting("a") == (labels if task == "hold_late" else labels[1:])
    lab.open(6)
    lab.worker(queues="a")
    lab.wait_ended(*labels[1:])
    again = [e for e in lab.events() if e.event == "start"][1:]
    assert [e.label for e in again] == (labels if task == "hold_late" else labels[1:])
    assert [e.label for e in again if e.redelivered] == (["j0"] if task == "hold_late" else [])


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_45_a_soft_shutdown_lets_a_job_end_in_its_time(lab: Lab, pool: str) -> None:
    worker = lab.worker(
        pool,
        queues="a",
        settings={"worker_soft_shutdown_timeout": 3.0, "result_backend": lab.url},
    )
    done = lab.send("hold_result", "soft", queue="a")
    lab.wait_started("soft")
    lab.fill("a", names("n", 2))
    worker.quit()
    worker.wait_log("Initiating Soft Shutdown")
    lab.open()
    worker.wait_exit()
    assert lab.ended() == ["soft"]
    assert b'"SUCCESS"' in lab.db.get(f"celery-task-meta-{done}")
    assert lab.unacked() == 0
    assert lab.waiting("a") == names("n", 2)


LATE_RESULT = """
from tests.worker.project import *

@task(acks_late=True, ignore_result=False)
def hold_late_result(self, label):
    with recorder.recorded(self, label):
        wait_for("gate")
    return label

from tests.worker.project import wait_for
"""


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_45_a_late_ack_job_that_ended_in_time_does_not_run_again(lab: Lab, pool: str) -> None:
    worker = lab.worker(
        pool,
        queues="a",
        app="proj",
        project={"proj.py": LATE_RESULT},
        settings={"worker_soft_shutdown_timeout": 3.0, "result_backend": lab.url},
    )
    done = lab.send("hold_late_result", "soft", queue="a")
    lab.wait_started("soft")
    lab.fill("a", names("n", 2))
    worker.quit()
    worker.wait_log("Initiating Soft Shutdown")
    lab.open()
    worker.wait_exit()
    assert lab.ended() == ["soft"]
    assert b'"SUCCESS"' in lab.db.get(f"celery-task-meta-{done}")
    assert lab.unacked() == 0
    assert lab.waiting("a") == names("n", 2)


@pytest.mark.parametrize("busy", [True, False])
def test_a_remote_shutdown_is_warm(lab: Lab, busy: bool) -> None:
    worker = lab.worker(queues="a")
    lab.control("ping", worker)
    if busy:
        lab.send("hold_late", "h", queue="a")
        lab.wait_started("h")
        lab.fill("a", ["n"])
    lab.app.control.shutdown(destination=[worker.hostname])
    worker.wait_log("Got shutdown from remote")
    lab.open()
    assert worker.wait_exit() == 0
    assert lab.ended() == (["h"] if busy else [])
    assert lab.waiting("a") == (["n"] if busy else [])
    assert lab.unacked() == 0


def test_nothing_of_a_worker_is_left_behind(lab: Lab) -> None:
    """After a warm shutdown no holder, no watcher and no wake key of it stays."""
    worker = lab.worker(queues="ab")
    lab.fill("a", names("n", 5))
    lab.wait_count(5)
    assert worker.stop() == 0
    left = {
        key.decode()
        for key in lab.db.keys("*")
        if not key.startswith((b"_kombu", b"test:", b"unacked_mutex"))
    }
    # A policy stays, where jobs are sorted by key.
    assert left <= {"strategies:sequence", *map(lab.keys.policy, "ab")}
