"""What a slot is: taken by one job, free again after every outcome, never more taken than there are."""

from __future__ import annotations

import datetime as dt
import itertools

import pytest

from tests.support.waiting import stays, wait_until
from tests.worker.lab import ALL_POOLS, PLAIN_POOLS, Lab, cpu_seconds

PARALLEL = ("prefork", "threads", "gevent")


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


@pytest.mark.parametrize("pool", ALL_POOLS)
@pytest.mark.parametrize("task", ["record", "record_late"])
def test_case_03_a_freed_slot_wakes_the_reader(lab: Lab, pool: str, task: str) -> None:
    """One slot, 50 no-ops: no gaps of about a second between them, in any pool, with either ack."""
    lab.worker(pool, queues="a")
    labels = names("n", 50)
    lab.fill("a", labels, task)
    assert lab.wait_count(50, timeout=60) == labels
    starts = [e.at for e in lab.events() if e.event == "start"]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    # Without a wake-up every gap is about a second; a busy machine may make one or two.
    assert len([gap for gap in gaps if gap > 0.7]) <= 3, gaps
    lab.wait_settled()


def test_case_04_waiting_etas_do_not_keep_a_plain_job_waiting(lab: Lab) -> None:
    worker = lab.worker("threads", queues="a")
    lab.fill("a", names("eta", 20), countdown=60)
    lab.fill("a", ["plain"])
    lab.wait_ended("plain", timeout=10)
    assert lab.started() == ["plain"]
    # And nothing of them is lost when the worker goes.
    assert worker.stop() == 0
    assert lab.delayed("a") == names("eta", 20)
    assert lab.unacked() == 0


@pytest.mark.parametrize("pool", PARALLEL)
def test_case_05_a_busy_worker_keeps_nothing_from_an_idle_one(lab: Lab, pool: str) -> None:
    workers = {w.hostname: w for w in (lab.worker(pool, queues="a"), lab.worker(pool, queues="a"))}
    lab.send("hold", "long", queue="a")
    lab.wait_started("long")
    busy = workers.pop(lab.events()[0].worker)
    (idle,) = workers
    lab.fill("a", names("n", 5))
    lab.wait_ended(*names("n", 5))
    assert {e.worker for e in lab.events() if e.label != "long"} == {idle}
    assert lab.control("reserved", busy) == []
    assert [t["args"] for t in lab.control("active", busy)] == [["long"]]
    assert lab.control("stats", busy)["strategies"]["held"] == 0
    lab.open()
    lab.wait_ended("long")


@pytest.mark.parametrize("pool", PARALLEL)
@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_no_more_is_taken_than_there_are_slots(lab: Lab, pool: str, task: str) -> None:
    worker = lab.worker(pool, queues="a", concurrency=3)
    labels = names("h", 8)
    lab.fill("a", labels, task)
    lab.wait_started(*labels[:3])
    stays(lambda: lab.waiting("a") == labels[3:], 0.3, "five wait")
    assert lab.control("reserved", worker) == []
    lab.open()
    lab.wait_started(labels[3])
    stays(lambda: lab.waiting("a") == labels[4:], 0.3, "four wait")
    lab.open(7)
    assert sorted(lab.wait_count(8)) == labels
    lab.wait_settled()


def test_read_ahead_takes_so_many_more(lab: Lab) -> None:
    worker = lab.worker(queues="a", settings={"strategies_read_ahead": 2})
    lab.send("hold_late", "h", queue="a")
    lab.wait_started("h")
    lab.fill("a", names("n", 5), "record_late")
    wait_until(lambda: lab.waiting("a") == ["n2", "n3", "n4"], description="two are read ahead")
    assert lab.control("stats", worker)["strategies"]["held"] == 3
    assert sorted(t["args"][0] for t in lab.control("reserved", worker)) == ["n0", "n1"]
    lab.open()
    assert lab.wait_count(6) == ["h", *names("n", 5)]
    lab.wait_settled()


# -- busy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", PARALLEL)
def test_a_full_worker_answers_and_does_not_spin(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, queues="ab")
    lab.fill("a", names("h", 3), "hold")
    lab.fill("b", names("n", 20))
    lab.wait_started("h0")
    for _ in range(3):
        assert lab.control("ping", worker) == {"ok": "pong"}
    before = cpu_seconds(worker.pid)
    stays(lambda: worker.running, 2.0, "it runs")
    used = cpu_seconds(worker.pid) - before
    assert used < 1.0, f"{used:.2f} s of CPU in 2 s while all slots are busy"
    assert lab.control("ping", worker) == {"ok": "pong"}
    lab.open(3)
    assert lab.wait_count(23) == names("h", 3) + names("n", 20)


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_an_idle_worker_answers_and_does_not_spin(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, queues="ab")
    before = cpu_seconds(worker.pid)
    stays(lambda: worker.running, 1.5, "it runs")
    assert cpu_seconds(worker.pid) - before < 0.75
    assert lab.control("ping", worker) == {"ok": "pong"}


# -- outcomes --------------------------------------------------------------------------------------

EVERYWHERE = ("success", "error", "retry", "reject", "requeue", "ignore")
IN_A_CHILD = ("soft", "hard", "killed", "exit", "unpicklable")


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_case_39_every_outcome_frees_its_slot(lab: Lab, pool: str) -> None:
    """One slot; after each outcome the next job runs and nothing is held."""
    worker = lab.worker(pool, queues="a")
    outcomes = EVERYWHERE + (IN_A_CHILD if pool == "prefork" else ())
    for how in outcomes:
        limits = {"soft": {"soft_time_limit": 1}, "hard": {"time_limit": 1}}.get(how, {})
        lab.send("outcome", how, queue="a", **limits)
        _probe(lab, how)
        again = 1 if how in ("retry", "requeue") else 0
        starts = [label for label in lab.started() if label == how]
        wait_until(
            lambda n=1 + again, how=how: lab.started().count(how) >= n, 30, f"{how} ran again"
        )
        assert len(starts) <= 1 + again
    assert worker.running


@pytest.mark.parametrize("pool", ALL_POOLS)
def test_case_39_what_never_runs_frees_its_slot(lab: Lab, pool: str) -> None:
    """Expired, revoked, unknown, undecodable: the next job runs, nothing is held."""
    worker = lab.worker(pool, queues="a")
    past = dt.datetime.now(dt.timezone.utc) - dt.timedelta(hours=1)
    lab.send("record", "expired", queue="a", expires=past)
    _probe(lab, "expired")
    lab.control("revoke", worker, task_id="revoked-id")
    lab.send("record", "revoked", queue="a", task_id="revoked-id")
    _probe(lab, "revoked")
    lab.send("no_such_task", "unknown", queue="a")
    _probe(lab, "unknown")
    lab.db.lpush("a", b"{not json")
    _probe(lab, "undecodable")
    assert {"expired", "revoked", "unknown"}.isdisjoint(lab.started())
    assert worker.running


def _probe(lab: Lab, what: str) -> None:
    """Show that a slot is free and nothing is held after *what*."""
    probe = f"after {what}"
    lab.send("record", probe, queue="a")
    wait_until(lambda: probe in lab.ended(), 30, f"a job {probe}")
    wait_until(lambda: lab.unacked() == 0, 30, f"nothing is held {probe}")


def test_case_40_a_hard_limit_frees_its_slot_at_once(lab: Lab) -> None:
    lab.worker(queues="a")
    lab.send("outcome", "hard", queue="a", time_limit=1)
    lab.wait_started("hard")
    lab.fill("a", ["next"])
    lab.wait_ended("next", timeout=10)
    lab.wait_settled()


NOT_ON_TIMEOUT = """
from tests.worker.project import PREFIX, app, recorder, task, time

@task(acks_late=True, acks_on_failure_or_timeout=False, time_limit=1)
def stubborn(self, label):
    recorder.write(self, label, "start")
    if recorder.count(self) == 1:
        time.sleep(30)
    recorder.write(self, label, "end")
"""


@pytest.mark.slow
def test_case_40_a_timeout_is_not_acknowledged_where_the_task_forbids_it(lab: Lab) -> None:
    """The message stays held by nobody's job, so it goes back and runs again."""
    lab.worker(app="proj", project={"proj.py": NOT_ON_TIMEOUT}, queues="a")
    lab.send("stubborn", "s", queue="a")
    lab.wait_started("s")
    lab.fill("a", ["next"])
    lab.wait_ended("next", timeout=10)
    lab.wait_ended("s", timeout=40)
    starts = [e for e in lab.events() if e.label == "s" and e.event == "start"]
    assert [e.redelivered for e in starts] == [False, True]
    lab.wait_settled()


@pytest.mark.slow
def test_case_41_large_payloads_with_a_new_child_for_each(lab: Lab) -> None:
    """8 MB each, two slots, one job per child: all run, once."""
    lab.worker(queues="a", concurrency=2, settings={"worker_max_tasks_per_child": 1})
    payload = "x" * (8 * 1024 * 1024)
    labels = names("m", 12)
    for label in labels:
        lab.send("measure", payload, label, queue="a")
    wait_until(lambda: len(lab.ended()) == 12, 60, "all ran")
    lab.wait_settled()
    assert sorted(lab.started()) == sorted(f"{label}:{len(payload)}" for label in labels)
    assert len({e.pid for e in lab.events()}) == 12


def test_max_tasks_per_child_replaces_the_child(lab: Lab) -> None:
    lab.worker(queues="a", settings={"worker_max_tasks_per_child": 2})
    lab.fill("a", names("n", 6))
    assert lab.wait_count(6) == names("n", 6)
    pids = [e.pid for e in lab.events() if e.event == "start"]
    assert len(set(pids)) == 3
    assert pids[0] == pids[1]
    assert pids[2] == pids[3]


# -- the pool's size -------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_case_38_no_slots_take_nothing_two_take_two(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, queues="a")
    assert "ok" in lab.control("pool_shrink", worker, n=1)
    lab.fill("a", names("h", 5), "hold")
    stays(lambda: lab.waiting("a") == names("h", 5), 1.0, "nothing is taken")
    assert "ok" in lab.control("pool_grow", worker, n=2)
    lab.wait_started("h0", "h1")
    stays(lambda: lab.waiting("a") == names("h", 5)[2:], 0.5, "exactly two are taken")
    lab.open(5)
    assert sorted(lab.wait_count(5)) == names("h", 5)


def test_autoscale_grows_to_its_maximum_and_shrinks_again(lab: Lab) -> None:
    worker = lab.worker(
        queues="a",
        concurrency=None,
        args=["--autoscale=3,1"],
        env={"AUTOSCALE_KEEPALIVE": "0.5"},
    )

    def size() -> int:
        return len(lab.control("stats", worker)["pool"]["processes"])

    assert size() == 1
    lab.fill("a", names("h", 5), "hold")
    lab.wait_started("h0", "h1", "h2")
    assert size() == 3
    assert lab.waiting("a") == ["h3", "h4"]
    lab.open(5)
    lab.wait_count(5)
    wait_until(lambda: size() == 1, 30, "it shrinks")
    lab.fill("a", ["last"])
    lab.wait_ended("last")


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", PLAIN_POOLS)
def test_case_37_revoked_jobs_in_the_queue_do_not_block(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, queues="a")
    ids = [lab.send("record", f"r{i}", queue="b") for i in range(20)]
    lab.control("revoke", worker, task_id=ids)
    lab.send("hold", "h", queue="a")
    lab.wait_started("h")
    lab.db.rename("b", "a")
    lab.fill("a", ["live"])
    lab.open()
    lab.wait_ended("live")
    assert lab.started() == ["h", "live"]
    lab.wait_settled()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_49_a_rate_limit_has_effect_at_once(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, queues="a", concurrency=2)
    assert "ok" in lab.control("rate_limit", worker, task_name="test.record", rate_limit="1/h")
    lab.fill("a", names("n", 6))
    wait_until(lambda: len(lab.started()) == 1, 10, "the first one runs")
    stays(lambda: len(lab.started()) == 1, 0.5, "and no other")
    # No limit again: whatever waited runs, in its order, each once.
    assert "ok" in lab.control("rate_limit", worker, task_name="test.record", rate_limit="0")
    assert sorted(lab.wait_count(6)) == names("n", 6)
    lab.wait_settled()


def test_a_rate_limited_task_runs_at_its_rate(lab: Lab) -> None:
    worker = lab.worker(
        queues="a", settings={"task_annotations": {"test.record": {"rate_limit": "20/s"}}}
    )
    lab.fill("a", names("n", 10))
    assert lab.wait_count(10) == names("n", 10)
    starts = [e.at for e in lab.events() if e.event == "start"]
    assert starts[-1] - starts[0] > 0.2
    lab.idle(worker)
    lab.wait_settled()


@pytest.mark.parametrize("pool", PLAIN_POOLS)
def test_an_eta_job_runs_when_it_is_due(lab: Lab, pool: str) -> None:
    lab.worker(pool, queues="a")
    lab.send("record_late", "later", queue="a", countdown=1.5)
    lab.send("record", "now", queue="a")
    assert lab.wait_count(2) == ["now", "later"]
    lab.wait_settled()


def test_time_limits_of_the_worker(lab: Lab) -> None:
    worker = lab.worker(queues="a", args=["--soft-time-limit", "1", "--time-limit", "2"])
    lab.send("outcome", "soft", queue="a")
    _probe(lab, "soft")
    lab.send("outcome", "deaf", queue="a")
    _probe(lab, "deaf")
    log = worker.log()
    assert log.count("Soft time limit (1.0s) exceeded") == 2
    assert log.count("Hard time limit (2.0s) exceeded") == 1


def test_case_39_a_memory_error_ends_the_worker_and_loses_nothing(lab: Lab) -> None:
    """Celery ends the worker then; the job is back at the head and runs in the next worker."""
    worker = lab.worker(queues="a")
    lab.send("outcome", "memory", queue="a")
    lab.wait_started("memory")
    lab.fill("a", ["next"])
    worker.wait_exit()
    assert lab.unacked() == 0
    waiting = lab.waiting("a")
    assert waiting[0] == "memory"
    lab.worker(queues="a")
    lab.wait_ended("next")
    lab.wait_settled()
    assert lab.started().count("memory") == 2


@pytest.mark.slow
def test_case_42_a_job_that_kills_its_child_does_not_hold_the_head(lab: Lab) -> None:
    """`reject_on_worker_lost`: it goes behind the others each time, and they finish."""
    lab.send("poison", "poison", queue="a")
    lab.fill("a", names("n", 5), "record_late")
    lab.worker(queues="a")
    lab.wait_ended(*names("n", 5))
    assert lab.started()[:6] == ["poison", *names("n", 5)]
    assert lab.started().count("poison") <= 2
