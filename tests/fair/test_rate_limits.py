"""A task type with a used-up rate limit fills neither slots nor memory; what cannot start soon waits in Redis."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.fair.lab import CAPPED, POOLS, FairLab, names
from tests.support.waiting import stays, wait_until

SOURCES = ("fair", "plain")
SLOW = {"task_annotations": {"test.record": {"rate_limit": "1/m"}}}


@pytest.mark.parametrize(
    ("source", "pool"), [*(("fair", pool) for pool in POOLS), ("plain", "threads")]
)
def test_case_12_a_rate_limited_task_type_blocks_nobody(
    lab: FairLab, source: str, pool: str
) -> None:
    """Two slots, 50 of A at one a minute, then five of B: B is done at once, and A's rest is not lost."""
    slots = None if pool == "solo" else 2
    start = lab.worker if source == "fair" else lab.plain
    limited, free = names("A", 50), names("B", 5)
    lab.keyed(limited)
    lab.keyed(free, task="record_late")
    worker = start(pool, concurrency=slots, settings=SLOW)
    lab.wait_ended(*free, timeout=20)
    wait_until(lambda: len(lab.delayed("a")) == 49, 20, "the rest of A waits")
    assert [label for label in lab.started() if label[0] == "A"] == ["A-0"]
    lab.wait_settled()
    assert lab.control("stats", worker)["strategies"]["held"] == 0
    assert lab.delayed("a") == limited[1:]
    # They come back one by one, a minute apart.
    scores = [score for _, score in lab.db.zrange(lab.keys.delayed("a"), 0, -1, withscores=True)]
    steps = [after - before for before, after in itertools.pairwise(scores)]
    assert all(step == pytest.approx(60_000, abs=5) for step in steps)
    # Without the limit each runs, once.
    assert "ok" in lab.control("rate_limit", worker, task_name="test.record", rate_limit="0")
    lab.wait_count(55)
    assert Counter(lab.started()) == Counter(limited + free)
    lab.wait_settled()


@pytest.mark.parametrize("source", SOURCES)
def test_case_49_a_new_rate_limit_acts_at_once(lab: FairLab, source: str) -> None:
    """Also on those that were sent away under the old one, by a worker that is gone."""
    start = lab.worker if source == "fair" else lab.plain
    first = start("threads", settings=SLOW)
    lab.keyed(names("A", 6))
    wait_until(lambda: len(lab.delayed("a")) == 5, 20, "five wait")
    assert first.stop() == 0
    second = start("threads", settings=SLOW)
    stays(lambda: len(lab.started()) == 1, 0.3, "and wait on")
    assert "ok" in lab.control("rate_limit", second, task_name="test.record", rate_limit="100/s")
    assert lab.wait_count(6, timeout=15) == names("A", 6)


def test_a_job_that_waits_for_its_limit_is_not_in_flight(lab: FairLab) -> None:
    """Its key has room for others meanwhile."""
    lab.worker("threads", concurrency=2, settings={**SLOW, **CAPPED})
    lab.keyed(names("A", 5))
    wait_until(lambda: len(lab.delayed("a")) == 4, 20, "four wait")
    lab.keyed(["A-other"], task="record_late")
    lab.wait_ended("A-other", timeout=20)
    lab.wait_none_in_flight()


def test_a_limited_job_keeps_its_key_and_its_level(lab: FairLab) -> None:
    levels = {"strategies_priority_levels": 3}
    worker = lab.worker("threads", settings={**SLOW, **levels})
    lab.keyed(["x-0"], priority=0)
    lab.wait_ended("x-0")
    lab.keyed(["gate-0"], task="hold")
    lab.wait_started("gate-0")
    lab.keyed(names("a", 3), priority=3)
    lab.keyed(names("b", 3), priority=3)
    lab.keyed(["c-0"], priority=0)
    lab.open()
    wait_until(lambda: len(lab.delayed("a")) == 7, 20, "all wait")
    lab.keyed(["gate-1"], task="hold")
    lab.wait_started("gate-1")
    assert "ok" in lab.control("rate_limit", worker, task_name="test.record", rate_limit="0")
    wait_until(lambda: not lab.delayed("a"), 20, "all come back")
    lab.open()
    lab.wait_count(10)
    assert lab.started()[3:] == ["c-0", "a-0", "b-0", "a-1", "b-1", "a-2", "b-2"]
