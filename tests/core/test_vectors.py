"""The pure model reproduces the table of exact orders."""

from __future__ import annotations

import pytest

from celery_strategies.core.model import Model
from celery_strategies.core.strategies import Strategy

from .vectors import VECTORS, Vector, play


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_the_model_takes_in_the_expected_order(vector: Vector) -> None:
    results = play(vector, Model(Strategy.parse(vector.strategy), []))
    assert results
    assert [got for _, got in results] == [take.expected for take, _ in results]


def test_names_are_unique() -> None:
    assert len({vector.name for vector in VECTORS}) == len(VECTORS)
