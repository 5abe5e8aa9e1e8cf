"""The scripts reproduce the table of exact orders."""

from __future__ import annotations

import pytest
import redis

from celery_strategies.core.strategies import Strategy
from celery_strategies.store.keys import Keys
from tests.core.vectors import FAIR, VECTORS, Push, Vector, play

from .broker import RedisBroker
from .tools import Caller


@pytest.mark.parametrize("prefix", ["", "p:"])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_the_scripts_take_in_the_expected_order(
    vector: Vector, prefix: str, redis_db: redis.Redis, caller: Caller
) -> None:
    broker = RedisBroker(
        redis_db, caller, Strategy.parse(vector.strategy), keys=Keys(prefix=prefix)
    )
    results = play(vector, broker)
    assert results
    assert [got for _, got in results] == [take.expected for take, _ in results]


#: Most messages in an inbox that one take sorts at once; a larger one has a sorter.
AT_ONCE = 256


@pytest.mark.parametrize("sort_first", [True, False], ids=["sorted first", "sorted by takes"])
@pytest.mark.parametrize("vector", FAIR, ids=lambda vector: vector.name)
def test_the_scripts_serve_keys_in_the_expected_order(
    vector: Vector, sort_first: bool, redis_db: redis.Redis, caller: Caller
) -> None:
    sort_first |= sum(isinstance(step, Push) for step in vector.steps) > AT_ONCE
    broker = RedisBroker(redis_db, caller, Strategy.parse(vector.strategy), sort_first=sort_first)
    results = play(vector, broker)
    assert results
    assert [got for _, got in results] == [take.expected for take, _ in results]
