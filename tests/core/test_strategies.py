"""The rule that picks the source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_strategies.core.strategies import Strategy, choose, turn_after, turn_from

LENGTHS = st.lists(st.integers(0, 4), max_size=8)
TURNS = st.integers(0, 20)


def test_the_values_are_fixed_and_zero_is_not_the_default() -> None:
    assert {s.name: s.value for s in Strategy} == {
        "ROUND_ROBIN": 0,
        "MAX_LEN": 1,
        "MIN_LEN": 2,
        "PRIORITY": 3,
    }
    assert Strategy.parse(None) is Strategy.PRIORITY
    assert Strategy.labels()[0] == "priority"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("priority", Strategy.PRIORITY),
        ("PRIORITY", Strategy.PRIORITY),
        ("round_robin", Strategy.ROUND_ROBIN),
        ("Round-Robin", Strategy.ROUND_ROBIN),
        ("round robin", Strategy.ROUND_ROBIN),
        ("RoundRobin", Strategy.ROUND_ROBIN),
        ("MAX_LEN", Strategy.MAX_LEN),
        ("MaxLen", Strategy.MAX_LEN),
        ("min-len", Strategy.MIN_LEN),
        (0, Strategy.ROUND_ROBIN),
        (3, Strategy.PRIORITY),
        (Strategy.MIN_LEN, Strategy.MIN_LEN),
    ],
)
def test_parse(value: Strategy | str | int, expected: Strategy) -> None:
    assert Strategy.parse(value) is expected


@pytest.mark.parametrize("value", ["", "fifo", "max__len", "3", 4, -1, True, False, 1.0, [], b"x"])
def test_parse_refuses_and_lists_the_names(value: object) -> None:
    with pytest.raises(ValueError, match="priority, round_robin, max_len, min_len") as caught:
        Strategy.parse(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_label_and_parse_are_inverse() -> None:
    for strategy in Strategy:
        assert Strategy.parse(strategy.label) is strategy


def test_a_source_that_yields_nothing_gives_way_to_the_next() -> None:
    lengths = [1, 3]
    assert choose(Strategy.PRIORITY, lengths) == 0
    lengths[0] = 0
    assert choose(Strategy.PRIORITY, lengths) == 1


@pytest.mark.parametrize(
    ("strategy", "lengths", "expected"),
    [
        (Strategy.MAX_LEN, [3, 5, 2, 7], 3),
        (Strategy.MAX_LEN, [2, 7, 7], 1),
        (Strategy.MIN_LEN, [3, 5, 2], 2),
        (Strategy.MIN_LEN, [3, 5, 2, 0], 2),
        (Strategy.MIN_LEN, [0, 2, 2], 1),
        (Strategy.PRIORITY, [0, 0, 1, 9], 2),
    ],
)
def test_choose(strategy: Strategy, lengths: list[int], expected: int) -> None:
    assert choose(strategy, lengths) == expected


def test_round_robin_wraps_and_starts_at_the_turn() -> None:
    assert choose(Strategy.ROUND_ROBIN, [1, 0, 1], turn=1) == 2
    assert choose(Strategy.ROUND_ROBIN, [1, 1, 0], turn=2) == 0
    assert choose(Strategy.ROUND_ROBIN, [1, 1], turn=3) == 1


@given(st.sampled_from(Strategy), LENGTHS, TURNS)
def test_choose_finds_a_waiting_source_if_there_is_one(
    strategy: Strategy, lengths: list[int], turn: int
) -> None:
    index = choose(strategy, lengths, turn)
    assert (index is None) == (not any(lengths))
    assert index is None or lengths[index] > 0
    assert index == choose(strategy, tuple(lengths), turn)


@given(LENGTHS.filter(any), TURNS)
def test_choose_keeps_the_rule_of_each_strategy(lengths: list[int], turn: int) -> None:
    waiting = [length for length in lengths if length]
    assert choose(Strategy.MAX_LEN, lengths, turn) == lengths.index(max(waiting))
    assert choose(Strategy.MIN_LEN, lengths, turn) == lengths.index(min(waiting))
    assert choose(Strategy.PRIORITY, lengths, turn) == next(
        index for index, length in enumerate(lengths) if length
    )
    count = len(lengths)
    walk = [(turn + step) % count for step in range(count)]
    assert choose(Strategy.ROUND_ROBIN, lengths, turn) == next(i for i in walk if lengths[i])


def test_turn_after() -> None:
    assert [turn_after(index, 3) for index in range(3)] == [1, 2, 0]
    assert turn_after(0, 1) == 0
    assert turn_after(0, 0) == 0


@pytest.mark.parametrize(
    ("last", "order", "before", "expected"),
    [
        (None, "abc", "", 0),
        ("a", "abc", "", 1),
        ("c", "abc", "", 0),
        ("a", "xabc", "abc", 2),  # the list grew in front: b is still next
        ("b", "ac", "abc", 1),  # b has left: c was next
        ("c", "ab", "abc", 0),  # c has left: a was next
        ("b", "ad", "abcd", 1),  # b and c have left: d was next
        ("b", "xy", "abc", 0),  # nothing of the old list is left
        ("b", "ac", "", 0),
        ("b", "", "abc", 0),
    ],
)
def test_turn_from(last: str | None, order: str, before: str, expected: int) -> None:
    assert turn_from(last, tuple(order), tuple(before)) == expected
