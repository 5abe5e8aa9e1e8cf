"""The pure model serves keys in the exact orders of the table."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_strategies.core.model import Model
from celery_strategies.core.strategies import Strategy

from .vectors import FAIR, VECTORS, Take, Vector, play


@pytest.mark.parametrize("vector", FAIR, ids=lambda vector: vector.name)
def test_the_model_takes_in_the_expected_order(vector: Vector) -> None:
    results = play(vector, Model(Strategy.parse(vector.strategy), []))
    assert results
    assert [got for _, got in results] == [take.expected for take, _ in results]


def test_names_are_unique() -> None:
    names = [vector.name for vector in (*VECTORS, *FAIR)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("a x100, b x20: 5 and 5 of 10", [{"a": 5, "b": 5}]),
        ("heavy x50 w3, light x50: 6 and 2 of 8", [{"h": 6, "l": 2}]),
        ("a lone key gets all 10", [{"o": 10}]),
        ("whale x500, minnow x3: 3 and 3 of 6, then all whale", [{"w": 3, "m": 3}, {"w": 6}]),
        ("jobs without a key are one key: 3 and 3 of 6", [{"a": 3, "u": 3}]),
        ("heavy x8 w3, light x4, bulk x2: 3, 1 and 1 of 5", [{"h": 3, "l": 1, "b": 1}]),
        ("weight 1e6 leaves nothing to others", [{"a": 10}]),
    ],
)
def test_the_orders_are_the_shares_that_the_names_say(name: str, shares: list) -> None:
    (vector,) = (vector for vector in FAIR if vector.name == name)
    takes = [step for step in vector.steps if isinstance(step, Take)]
    assert [Counter(job[0] for job in take.expected) for take in takes] == shares
