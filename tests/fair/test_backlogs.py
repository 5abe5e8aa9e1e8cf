"""Large backlogs: sorted by one worker while others serve, and no call of a script that stops the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fair.lab import FairLab, key_of, names
from tests.support.waiting import wait_until


def pour(lab: FairLab, labels: list[str], queue: str = "a", task: str = "record") -> None:
    """Put many jobs into a queue, as producers write them, faster than they could."""
    lab.keyed(["template-0"], "template", task)
    raw = lab.db.rpop("template")
    assert isinstance(raw, bytes)
    message = json.loads(raw)
    with lab.db.pipeline(transaction=False) as pipe:
        for number, label in enumerate(labels):
            message["headers"]["fair_key"] = key_of(label)
            message["headers"]["argsrepr"] = message["properties"]["delivery_tag"] = str(number)
            message["headers"]["id"] = message["properties"]["correlation_id"] = label
            message["body"] = json.dumps([[label], {}, {}])
            message["properties"]["body_encoding"] = ""
            pipe.lpush(queue, json.dumps(message))
        pipe.execute()


@pytest.mark.slow
def test_case_13_keys_behind_a_large_backlog_are_served_early(lab: FairLab) -> None:
    """Many of one key in front, 200 keys behind: all are served while the backlog is still there."""
    whale, minnows = names("whale", 20_000), [f"m{i}-0" for i in range(200)]
    pour(lab, [*whale, *minnows])
    lab.worker("threads", concurrency=2)
    lab.wait_ended(*minnows, timeout=60)
    started = lab.started()
    # They are seen once what is before them is sorted, which is much faster than running it.
    before = max(started.index(label) for label in minnows)
    assert before < 15_000, before
    assert lab.count() > 2_000


@pytest.mark.slow
def test_one_worker_sorts_while_others_serve_and_another_goes_on_if_it_dies(lab: FairLab) -> None:
    """20,000 appear at once. They are served meanwhile, each once."""
    labels = [f"{'abcd'[i % 4]}-{i}" for i in range(20_000)]
    pour(lab, labels, "poured", "record_late")
    workers = [lab.worker("threads", concurrency=2) for _ in range(2)]
    by_name = {worker.hostname: worker for worker in workers}
    lab.keyed(["first-0", "first-1"])
    lab.wait_ended("first-0", "first-1")
    lab.db.rename("poured", "a")
    sorter: Any = wait_until(
        lambda: lab.db.get(lab.keys.sorter("a")), 20, "somebody sorts", interval=0
    )
    dead = by_name[sorter.decode().rpartition("-")[0]]
    dead.kill()
    left = int(lab.db.llen("a"))  # type: ignore[arg-type]
    assert left > 1000, "it was killed too late to mean anything"
    alive = next(worker for worker in workers if worker is not dead)
    wait_until(lambda: lab.db.llen("a") == 0, 60, "all is sorted")
    wait_until(lambda: not lab.db.exists(lab.keys.sorter("a")), 10, "nobody sorts")
    assert alive.running
    served = {event.worker for event in lab.starts() if "first" not in event.label}
    assert alive.hostname in served
    wait_until(lambda: lab.unacked() <= 2, 20, "what the dead one held came back")
    alive.stop()
    ran, waiting = lab.ended(), lab.waiting("a")
    assert {*ran, *waiting} == {"first-0", "first-1", *labels}
    assert len(waiting) == len(set(waiting))
    # What the dead one had done and not acknowledged, two at most, runs again.
    assert 20_002 <= len(ran) + len(waiting) <= 20_004


def test_a_backlog_is_sorted_while_all_slots_are_busy(lab: FairLab) -> None:
    """Once it has been seen, nobody has to be free for it."""
    lab.worker("threads", concurrency=1)
    lab.keyed(["gate-0"], task="hold")
    lab.wait_started("gate-0")
    lab.keyed(["gate-1"], task="hold")
    pour(lab, names("k", 3000))
    lab.open()
    lab.wait_started("gate-1")
    wait_until(lambda: lab.db.llen("a") == 0, 30, "all is sorted")
    assert lab.sorted_count() == 3000
    assert lab.started() == ["gate-0", "gate-1"]
