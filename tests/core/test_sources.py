"""The list of sources and its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_strategies.core.sources import Source, SourceList


def names(sources: SourceList) -> list[str]:
    return [source.queue for source in sources.ordered()]


def bound(ranks: dict[str, int], *queues: str) -> SourceList:
    sources = SourceList(ranks)
    for queue in queues:
        sources.bind(queue)
    return sources


def test_lowest_rank_first_then_bind_order_then_unset() -> None:
    ranks = {"low": 10, "high": 1, "med": 5, "high2": 1, "minus": -1, "zero": 0}
    sources = bound(ranks, "none", "low", "high", "med", "none2", "high2", "zero", "minus")
    assert names(sources) == ["minus", "zero", "high", "high2", "med", "low", "none", "none2"]


def test_unset_goes_after_the_largest_rank() -> None:
    assert names(bound({"b": 2**80}, "a", "b")) == ["b", "a"]


def test_bind_order_is_kept_without_ranks() -> None:
    assert names(bound({}, "b", "a")) == ["b", "a"]


def test_binding_twice_changes_nothing() -> None:
    sources = bound({}, "a", "b")
    first = sources.ordered()
    sources.bind("a")
    assert sources.ordered() == first
    assert len(sources) == 2


def test_binding_again_may_set_levels_and_none_keeps_them() -> None:
    sources = SourceList()
    assert sources.bind("a") == Source("a", None, 0, None)
    assert sources.bind("a", 3).levels == 3
    assert sources.bind("a").levels == 3
    assert list(sources) == [Source("a", None, 0, 3)]


@pytest.mark.parametrize("levels", [0, 11, "3"])
def test_wrong_levels_are_refused_and_nothing_is_bound(levels: object) -> None:
    sources = SourceList()
    with pytest.raises(ValueError, match="1 to 10"):
        sources.bind("a", levels)  # type: ignore[arg-type]
    assert "a" not in sources


def test_a_queue_that_comes_back_keeps_rank_and_position() -> None:
    sources = bound({"c": 1}, "a", "b", "c")
    before = sources.ordered()
    sources.unbind("a")
    sources.unbind("c")
    sources.bind("d")
    assert "a" not in sources
    assert names(sources) == ["b", "d"]
    sources.bind("c")
    sources.bind("a")
    assert names(sources) == ["c", "a", "b", "d"]
    assert sources.ordered()[:3] == before


def test_unbinding_an_unknown_queue_is_harmless() -> None:
    sources = SourceList()
    sources.unbind("a")
    assert sources.ordered() == ()


def test_describe() -> None:
    sources = SourceList({"alerts": 1})
    assert sources.describe() == ""
    sources.bind("emails", 1)
    sources.bind("alerts", 3)
    sources.bind("a")
    assert sources.describe().splitlines() == [
        "alerts  rank 1, 3 levels",
        "emails  rank unset, 1 level",
        "a       rank unset",
    ]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(-2, 2)),
    st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"))),
)
def test_the_order_depends_on_first_binds_only(
    ranks: dict[str, int], calls: list[tuple[bool, str]]
) -> None:
    sources, first, present = SourceList(ranks), [], set()
    for bind, queue in calls:
        if bind:
            sources.bind(queue)
            present.add(queue)
            if queue not in first:
                first.append(queue)
        else:
            sources.unbind(queue)
            present.discard(queue)
    expected = sorted(first, key=lambda queue: ranks.get(queue, 1000))
    assert names(sources) == [queue for queue in expected if queue in present]
