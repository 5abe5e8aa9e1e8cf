"""Priorities, levels and lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_strategies.core.levels import (
    LISTS,
    check_levels,
    clamp_priority,
    level_of_list,
    levels_for_max_priority,
    list_for,
)


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(0, 0), (2, 2), (None, 1), (99, 2), (-1, 0), ("3", 2), ("1", 1), ("high", 1), ([], 1)],
)
def test_list_for_three_levels_with_default_one(priority: object, expected: int) -> None:
    assert list_for(priority, 3, 1) == expected


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), "", b"x", object(), {}])
def test_an_unusable_priority_is_none(priority: object) -> None:
    assert clamp_priority(priority) is None
    assert list_for(priority, 5, 4) == 4


@pytest.mark.parametrize("default", [-1, 3, 10])
def test_the_default_must_be_a_level(default: int) -> None:
    with pytest.raises(ValueError, match="default level must be 0 to 2"):
        list_for(0, 3, default)


def test_a_list_maps_to_its_level_and_the_rest_to_the_last() -> None:
    assert [level_of_list(index, 3) for index in range(LISTS)] == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [level_of_list(index, 1) for index in range(LISTS)] == [0] * LISTS


def test_without_levels_each_list_stands_for_itself() -> None:
    assert [level_of_list(index, None) for index in range(LISTS)] == list(range(LISTS))


@pytest.mark.parametrize("index", [-1, 10])
def test_there_are_ten_lists(index: int) -> None:
    with pytest.raises(ValueError, match="0 to 9"):
        level_of_list(index, 3)


@pytest.mark.parametrize(("n", "levels"), [(0, 1), (2, 3), (9, 10), (10, 10), (255, 10)])
def test_levels_for_max_priority(n: int, levels: int) -> None:
    assert levels_for_max_priority(n) == levels


@pytest.mark.parametrize("n", [-1, "3", 2.0, True, None])
def test_levels_for_max_priority_refuses(n: object) -> None:
    with pytest.raises(ValueError, match="x-max-priority"):
        levels_for_max_priority(n)  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", [0, 11, "3", 2.5, True])
def test_check_levels_refuses(levels: object) -> None:
    with pytest.raises(ValueError, match="1 to 10"):
        check_levels(levels)  # type: ignore[arg-type]


@given(st.integers(1, LISTS), st.one_of(st.none(), st.integers(), st.text()), st.data())
def test_what_is_published_is_read_at_its_level(
    levels: int, priority: object, data: st.DataObject
) -> None:
    default = data.draw(st.integers(0, levels - 1))
    index = list_for(priority, levels, default)
    assert 0 <= index < levels
    assert level_of_list(index, levels) == index
