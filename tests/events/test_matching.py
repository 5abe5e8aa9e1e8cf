"""What `*` and `#` match, against a matcher that follows the words of the AMQP specification one by one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.transport.virtual.exchange import TopicExchange as KombuTopicExchange

from celery_strategies.transport import topics

SEPARATORS = ["\x06\x16", ":", "|"]
WORDS = st.sampled_from(["a", "b", "ab", "", "a+", "ö\n", "(", "\x06"])
KEYS = st.lists(WORDS, max_size=6).map(".".join)
PATTERNS = st.lists(st.one_of(WORDS, st.sampled_from("*##")), max_size=7).map(".".join)


def words(text: str) -> list[str]:
    return text.split(".") if text else []


def naive(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    first, *rest = pattern
    if first == "#":
        return naive(rest, key) or (bool(key) and naive(pattern, key[1:]))
    return bool(key) and first in ("*", key[0]) and naive(rest, key[1:])


@given(PATTERNS, KEYS)
@example("*.*", "a")
@example("#", "")
@example("*", "")
@example("#.*", "a.")
@example("*.#.b", "a.b")
@example("a", "a\n")
def test_a_pattern_matches_what_amqp_says(pattern: str, key: str) -> None:
    expected = naive(words(pattern), words(key))
    assert topics.matches(pattern, key) is expected
    # As a stock producer does it.
    assert bool(re.compile(topics.expression(pattern), re.UNICODE).match(key)) is expected


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.*", ["a.b"], ["a", "a.b.c", "b.a", ""]),
        ("a.#", ["a", "a.b", "a.b.c"], ["b", "ab", "b.a", ""]),
        ("#.b", ["b", "a.b", "a.c.b"], ["b.a", "ab", ""]),
        ("a.#.b", ["a.b", "a.c.b", "a.c.d.b"], ["a", "b", "a.b.c"]),
        ("#", ["", "a", "a.b"], []),
        ("*", ["a"], ["", "a.b"]),
        ("*.orders.*", ["eu.orders.new"], ["orders.new", "eu.orders", "eu.orders.new.x"]),
        ("*.#", ["a", "a.b"], [""]),
        ("#.*", ["a", "a.b"], [""]),
        ("a.b", ["a.b"], ["a.c", "axb"]),
    ],
)
def test_examples(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [key for key in matching if not topics.matches(pattern, key)] == []
    assert [key for key in others if topics.matches(pattern, key)] == []


@given(PATTERNS)
def test_kombus_own_expression_is_known(pattern: str) -> None:
    assert KombuTopicExchange(None).key_to_pattern(pattern) in topics.kombus(pattern)


def test_kombus_own_expressions_are_looser_and_stricter() -> None:
    """Why there is ours."""
    assert all(re.match(written, "a") is None for written in topics.kombus("a.#"))
    assert [bool(re.match(written, "a.b.c")) for written in topics.kombus("a.*")] == [True, False]


@given(PATTERNS.filter(lambda pattern: not {":", "|"} & set(pattern)))
def test_an_expression_is_free_of_what_may_separate_the_parts(pattern: str) -> None:
    assert ":" not in topics.expression(pattern)
    assert "|" not in topics.expression(pattern)


@given(
    PATTERNS,
    st.sampled_from([topics.expression, lambda key: topics.kombus(key)[0], lambda _: ""]),
    st.sampled_from(["q", "eu:mail", "a|b", "x"]),
    st.sampled_from(SEPARATORS),
)
def test_a_binding_is_read_as_it_was_written(pattern, write, queue, sep) -> None:
    row = (pattern, write(pattern), queue)
    if any(sep in part for part in row[:2]):
        return
    assert topics.split_row(sep.join(row), sep) == row


def test_a_routing_key_with_the_separator_inside() -> None:
    """As a plain queue of such a name has it."""
    assert topics.split_row("eu:mail::eu:mail", ":") == ("eu:mail", "", "eu:mail")
    assert topics.split_row("not a binding", ":") is None


def test_many_wildcards_do_not_take_for_ever() -> None:
    pattern = ".".join(["#", "a"] * 8)
    assert not topics.matches(pattern, ".".join(["a"] * 40 + ["b"]))
