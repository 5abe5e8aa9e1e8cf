"""Limits among real workers: how many run, in which order, and what gives a permit up."""

from __future__ import annotations

import pytest

from tests.support.waiting import stays, wait_until

from .lab import Lab

PLAIN_POOLS = ("prefork", "threads")


@pytest.mark.parametrize("pool", PLAIN_POOLS)
def test_the_fourth_waits(lab: Lab, pool: str) -> None:
    lab.worker(pool, queues=("a",), concurrency=4)
    lab.worker(pool, queues=("b",), concurrency=4)
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
