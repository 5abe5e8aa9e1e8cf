"""Our workers beside stock ones, on the same queues."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_until
from tests.worker.lab import Lab

SHORT = {"broker_transport_options": {"visibility_timeout": 2}}


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_stock_worker_and_ours_share_a_queue(lab: Lab, pool: str) -> None:
    ours = lab.worker(pool, queues="a")
    stock = lab.stock(queues=["a"], settings={"worker_prefetch_multiplier": 1})
    lab.fill("a", ["h0", "h1"], "hold_late")
    lab.wait_started("h0", "h1")
    assert {e.worker for e in lab.events()} == {ours.hostname, stock.hostname}
    labels = names("n", 60)
    lab.fill("a", labels, "record_late")
    lab.open(2)
    lab.wait_ended(*labels)
    lab.wait_settled()
    assert sorted(lab.started()) == sorted(["h0", "h1", *labels])
    assert ours.stop() == 0
    assert stock.stop() == 0
    assert lab.waiting("a") == []


@pytest.mark.slow
def test_a_stock_worker_recovers_what_ours_held(lab: Lab) -> None:
    """Kill -9 ours: a stock worker alone restores the record, to its own queue and to no other."""
    ours = lab.worker(queues="ab", settings=SHORT)
    lab.send("hold_late", "orphan", queue="b")
    lab.wait_started("orphan")
    ours.kill()
    assert lab.unacked() == 1
    lab.open()

    def overdue() -> bool:
        ((_, score),) = lab.db.zrange(lab.keys.unacked_index, 0, -1, withscores=True)
        return bool(lab.db.time()[0] - score > 3)

    # A stock worker looks when it starts, and then only every 100 s.
    wait_until(overdue, description="the visibility timeout has passed")
    lab.stock(queues=["a", "b"], settings=SHORT)
    lab.wait_ended("orphan", timeout=60)
    lab.wait_settled()
    starts = [e for e in lab.events() if e.event == "start"]
    assert [(e.label, e.queue) for e in starts] == [("orphan", "b")] * 2
    assert starts[1].redelivered
    assert lab.waiting("a") == lab.waiting("b") == []


@pytest.mark.slow
def test_ours_recovers_what_a_stock_worker_held(lab: Lab) -> None:
    stock = lab.stock(queues=["a"], settings={**SHORT, "worker_prefetch_multiplier": 2})
    lab.send("hold_late", "orphan", queue="a")
    lab.wait_started("orphan")
    lab.fill("a", ["prefetched"], "record_late")
    wait_until(lambda: lab.unacked() == 2, description="it has prefetched one")
    stock.kill()
    lab.open()
    lab.worker(queues="a", settings=SHORT)
    lab.wait_ended("orphan", "prefetched", timeout=60)
    lab.wait_settled()
    assert sorted(lab.started()) == ["orphan", "orphan", "prefetched"]


@pytest.mark.slow
def test_ours_recovers_what_ours_held_in_its_place(lab: Lab) -> None:
    """Kill -9: after the visibility timeout the job is at the head again, not at the tail."""
    ours = lab.worker(queues="a", settings=SHORT)
    lab.send("hold_late", "orphan", queue="a")
    lab.wait_started("orphan")
    ours.kill()
    lab.fill("a", ["h", "n1"], "hold")
    lab.worker(queues="a", settings=SHORT)
    lab.wait_started("h")
    wait_until(lambda: lab.waiting("a") == ["orphan", "n1"], 30, "it is back in front")
    lab.open(3)
    assert lab.wait_count(3)[1:] == ["h", "orphan", "n1"]
    lab.wait_settled()


@pytest.mark.slow
def test_a_long_job_is_not_recovered_from_a_living_worker(lab: Lab) -> None:
    """Three visibility timeouts long, with a stock worker and one of ours looking on."""
    lab.worker(queues="a", settings=SHORT)
    lab.send("hold_late", "long", queue="a")
    lab.wait_started("long")
    first = lab.db.zrange(lab.keys.unacked_index, 0, -1, withscores=True)
    ours = lab.worker(queues="a", settings=SHORT)
    lab.stock(queues=["a"], settings=SHORT)

    def refreshed() -> bool:
        ((tag, score),) = lab.db.zrange(lab.keys.unacked_index, 0, -1, withscores=True)
        return bool(tag == first[0][0] and score > first[0][1] + 6)

    wait_until(refreshed, 30, "the record was refreshed for three timeouts")
    lab.open(3)
    lab.wait_ended("long")
    lab.wait_settled()
    assert lab.started() == ["long"]
    assert ours.running


def test_unsort_hands_given_back_messages_to_stock_workers(lab: Lab) -> None:
    """The way back: `celery strategies unsort`, then any worker sees everything in its order."""
    from tests.support.workers import celery

    lab.fill("a", names("j", 4), "hold_late")
    ours = lab.worker(queues="a", concurrency=2)
    lab.wait_started("j0", "j1")
    ours.quit()
    ours.wait_exit()
    assert lab.waiting("a") == names("j", 4)
    done = celery("strategies", "unsort", "a", broker_url=lab.url)
    assert "messages moved" in done.stdout
    assert lab.db.llen("a") == 4
    assert lab.waiting("a") == names("j", 4)
    lab.db.delete("test:ran")
    lab.open(4)
    lab.stock("solo", queues=["a"])
    assert lab.wait_count(4) == names("j", 4)
