"""What is a key, what is a weight, and what a callable may return."""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_strategies.core.tags import (
    KEY_BYTES,
    MAX_WEIGHT,
    MIN_WEIGHT,
    UNKEYED,
    Tag,
    check_key,
    check_weight,
    heed,
    read_key,
    read_tag,
)


class Name(str, enum.Enum):
    ACME = "acme"


class Number(enum.IntEnum):
    SEVEN = 7


class Odd(float):
    """A number of another library's."""


@pytest.mark.parametrize(
    ("returned", "tag"),
    [
        ("tenant-42", Tag("tenant-42", 1)),
        (42, Tag("42", 1)),
        (0, Tag("0", 1)),
        (-1, Tag("-1", 1)),
        (("t", 3), Tag("t", 3)),
        (["t", 3], Tag("t", 3)),
        (("t", 0.5), Tag("t", 0.5)),
        (("t", None), Tag("t", 1)),
        ((42, 1e-6), Tag("42", 1e-6)),
        (("t", 1_000_000), Tag("t", 1e6)),
        (("t", Odd(2.5)), Tag("t", 2.5)),
        (None, Tag(None)),
        ((None, 3), Tag(None)),
        ((None, None), Tag(None)),
        (UNKEYED, Tag(UNKEYED)),
        ((UNKEYED, 3), Tag(UNKEYED)),
        (Name.ACME, Tag("acme")),
        (Number.SEVEN, Tag("7")),
        ("x" * KEY_BYTES, Tag("x" * KEY_BYTES)),
        ("é" * (KEY_BYTES // 2), Tag("é" * (KEY_BYTES // 2))),
        (" ", Tag(" ")),
        (10**400, Tag("1" + "0" * 400)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_a_callable_may_return(returned: Any, tag: Tag) -> None:
    found = read_tag(returned)
    assert found == tag
    assert type(found.key) in (str, type(None), type(UNKEYED))
    assert type(found.weight) in (int, float)


@pytest.mark.parametrize("wrap", [lambda key: key, lambda key: (key, 2)], ids=["key", "pair"])
@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("", "a key must not be empty"),
        *(
            (key, "a key must be a string or an integer")
            for key in (object(), True, False, 3.5, math.nan, b"t", {}, {"key": "t"}, {"t"})
        ),
        ("x" * (KEY_BYTES + 1), "a key must be at most 512 bytes long in UTF-8"),
        ("é" * (KEY_BYTES // 2 + 1), "a key must be at most 512 bytes long in UTF-8"),
        (10**KEY_BYTES, "a key must be at most 512 bytes long in UTF-8"),
        (10**100_000, "a key must be at most 512 bytes long in UTF-8"),
        ("a\0b", "a key must not contain a NUL character"),
        ("\0", "a key must not contain a NUL character"),
        ("\ud800", "a key must be text that UTF-8 can hold"),
    ],
    ids=lambda value: ascii(type(value)),
)
def test_wrong_keys(key: Any, rule: str, wrap: Any) -> None:
    with pytest.raises(ValueError, match=rule):
        read_tag(wrap(key))


@pytest.mark.parametrize("key", ["t", None, UNKEYED], ids=repr)
@pytest.mark.parametrize(
    "weight",
    [0, -1, "3", True, False, math.nan, math.inf, -math.inf, 1e-7, 1e-17, 1e6 + 1, 10**400, [1]],
    ids=lambda value: repr(value)[:20],
)
def test_wrong_weights(key: Any, weight: Any) -> None:
    with pytest.raises(ValueError, match="a weight must be a number from 1e-06 to 1e\\+06"):
        read_tag((key, weight))


@pytest.mark.parametrize("returned", [(), [], ("t",), ("t", 1, 2), [None] * 3])
def test_a_pair_has_two_parts(returned: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a key, or a pair \(key, weight\)"):
        read_tag(returned)


@pytest.mark.parametrize("returned", [("t", 1), ["t"]])
def test_a_key_alone_is_no_pair(returned: Any) -> None:
    with pytest.raises(ValueError, match="a key must be a string or an integer"):
        read_key(returned)


def test_unkeyed_is_one_object() -> None:
    assert pickle.loads(pickle.dumps(UNKEYED)) is UNKEYED
    assert copy.deepcopy(UNKEYED) is UNKEYED
    assert repr(UNKEYED) == "celery_strategies.UNKEYED"


@given(
    st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.booleans(), st.none()),
    st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none()),
)
def test_a_tag_is_fit_to_be_sent_or_an_error(key: Any, weight: Any) -> None:
    heeded = heed(key, weight)
    assert heeded.key is None or check_key(heeded.key) == heeded.key
    assert check_weight(heeded.weight) == heeded.weight
    assert json.loads(json.dumps(heeded)) == list(heeded)
    with contextlib.suppress(ValueError):
        tag = read_tag((key, weight))
        assert heeded == (tag if tag.key is not None else Tag(None, heeded.weight))


@pytest.mark.parametrize(
    ("key", "weight", "tag"),
    [
        ("t", 2, Tag("t", 2)),
        (42, None, Tag("42")),
        (None, 2, Tag(None, 2)),
        (3.5, 2, Tag(None, 2)),
        ("", "3", Tag(None)),
        ("t", "3", Tag("t")),
        ("t", True, Tag("t")),
        ("t", 0, Tag("t")),
        ("t", -5, Tag("t")),
        ("t", math.nan, Tag("t")),
        ("t", 1e-17, Tag("t", MIN_WEIGHT)),
        ("t", 1e17, Tag("t", MAX_WEIGHT)),
        ("t", math.inf, Tag("t", MAX_WEIGHT)),
        ([], {}, Tag(None)),
    ],
)
def test_what_others_have_set_is_made_the_best_of(key: Any, weight: Any, tag: Tag) -> None:
    assert heed(key, weight) == tag
