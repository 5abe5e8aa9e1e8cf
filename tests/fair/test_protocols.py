"""Keys and weights whatever the producer's protocol, and what a job that comes again has."""

from __future__ import annotations

import pytest

from tests.fair.lab import CALLABLE, FairLab, key_of, names
from tests.support.workers import job, publish

PROTOCOLS = (1, 2)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("by", ["header", "callable"])
def test_case_54_the_share_is_the_same_with_either_protocol(
    lab: FairLab, protocol: int, by: str
) -> None:
    settings = {"task_protocol": protocol}
    if by == "callable":
        settings["strategies_fair_share"] = CALLABLE
    labels = [*names("a", 12), *names("b", 4)]
    weights = {"a": 3, "b": 1}
    jobs = []
    for label in labels:
        headers = {"fair_weight": weights[key_of(label)]}
        if by == "header":
            headers["fair_key"] = key_of(label)
        jobs.append(job("record", label, queue="a", headers=headers))
    publish(lab.url, jobs, settings, stock=by == "header")
    lab.worker("solo")
    keys = [key_of(label) for label in lab.wait_count(16)]
    assert keys == [*"aaab" * 4]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("task", ["again", "autoretried", "outcome"])
def test_case_53_a_job_that_comes_again_has_its_key_and_weight(
    lab: FairLab, protocol: int, task: str
) -> None:
    """By retry, by autoretry, by requeueing: it waits among the jobs of its key, and is served by its weight."""
    label = "requeue" if task == "outcome" else "k-0"
    headers = {"fair_key": "k", "fair_weight": 3}
    publish(
        lab.url,
        [job(task, label, queue="a", headers=headers)],
        {"task_protocol": protocol},
    )
    lab.keyed(["gate-0"], task="hold")
    # It runs, comes again while the gate is held, and then stands before jobs of the same age and a lower weight.
    worker = lab.worker("threads", settings={"strategies_max_in_flight": {"k": 1}})
    lab.wait_started(label, "gate-0")
    lab.keyed(["x-0", "x-1", "gate-1"])
    lab.open()
    lab.wait_ended("x-1", "gate-1")
    assert lab.started().count(label) == 2
    assert lab.started().index("x-0") > max(
        place for place, started in enumerate(lab.started()) if started == label
    )
    lab.wait_none_in_flight()
    assert worker.running


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_task_publishes_is_in_its_share(lab: FairLab, protocol: int) -> None:
    """A worker with a callable that has no opinion: its tasks' jobs have the key of the task."""
    settings = {"task_protocol": protocol, "strategies_fair_share": CALLABLE}
    publish(
        lab.url,
        [job("spread", "k-0", 4, queue="a"), *(job("record", x, queue="a") for x in names("o", 4))],
        settings,
        stock=False,
    )
    lab.worker("solo", settings=settings)
    labels = lab.wait_count(9)
    # The four of the task take turns with those of the other key; they joined when the task had run.
    turns = [("o-0", "o-1"), ("part 0", "o-2"), ("part 1", "o-3"), ("part 2", "part 3")]
    assert labels == ["k-0", *(label for turn in turns for label in turn)]
