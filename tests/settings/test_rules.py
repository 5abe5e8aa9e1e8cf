"""Every rule for a value, and the error that names setting, value and rule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from celery_strategies.core.strategies import Strategy
from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.settings import NAMES, Settings, load


def test_the_defaults() -> None:
    assert load({}) == Settings(
        strategy=Strategy.PRIORITY,
        ranks={},
        priority_levels=None,
        default_priority=None,
        pool="prefork",
        read_ahead=0,
        polling_interval=0.1,
    )
    assert load({}) == Settings()


def test_none_means_not_set() -> None:
    assert load(dict.fromkeys(NAMES)) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("strategy", "max_len", Strategy.MAX_LEN),
        ("strategy", "Round-Robin", Strategy.ROUND_ROBIN),
        ("strategy", 0, Strategy.ROUND_ROBIN),
        ("strategy", Strategy.MIN_LEN, Strategy.MIN_LEN),
        ("ranks", {"a": 1, "b": 0, "c": -3}, {"a": 1, "b": 0, "c": -3}),
        ("ranks", [("a", 1), ("b", 2), ("a", 3)], {"a": 3, "b": 2}),
        ("ranks", (["a", 1],), {"a": 1}),
        ("priority_levels", 1, 1),
        ("priority_levels", 10, 10),
        ("priority_levels", {"a": 1, "b": 10}, {"a": 1, "b": 10}),
        ("priority_levels", {}, {}),
        ("default_priority", 0, 0),
        ("default_priority", 9, 9),
        ("pool", "threads", "threads"),
        ("pool", "solo", "solo"),
        ("pool", "gevent", "gevent"),
        ("pool", "eventlet", "eventlet"),
        ("read_ahead", 0, 0),
        ("read_ahead", 100, 100),
        ("polling_interval", 0.001, 0.001),
        ("polling_interval", 60, 60.0),
    ],
)
def test_good_values(name: str, value: Any, expected: Any) -> None:
    settings = load({f"strategies_{name}": value})
    assert getattr(settings, name) == expected
    assert type(getattr(settings, name)) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(
            ("strategy", value, "one of priority, round_robin, max_len, min_len")
            for value in ("fifo", "", 4, -1, True, 1.0, ["priority"])
        ),
        *(("ranks", value, "dict of queue names") for value in ("a=1", 3, True, {"a"}, 1.5)),
        *(("ranks", [value], "pair") for value in ("a1", ("a",), ("a", 1, 2), 3)),
        *(
            ("priority_levels", value, "integer from 1 to 10")
            for value in (0, 11, -1, "3", 2.5, True, [3], math.nan)
        ),
        *(
            ("default_priority", value, "integer from 0 (highest) to 9")
            for value in (-1, 10, "high", "1", True, 1.0, {"a": 1})
        ),
        *(
            ("pool", value, "prefork, threads, solo, gevent, eventlet")
            for value in ("processes", "Prefork", "", "strategies", 1, True, ["solo"])
        ),
        *(("read_ahead", value, "integer, 0 or more") for value in (-1, 1.0, "1", True)),
        *(
            ("polling_interval", value, "above 0, at most 60")
            for value in (0, 0.0, -1, 60.1, math.inf, -math.inf, math.nan, "0.1", True, [1])
        ),
    ],
)
def test_wrong_values_name_setting_value_and_rule(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({f"strategies_{name}": value})
    message = str(caught.value)
    assert f"strategies_{name}" in message
    assert repr(value).strip("[]") in message
    assert rule in message
    assert "\n" not in message


@pytest.mark.parametrize("rank", [True, 1.0, "1", None])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_rank_is_an_integer(rank: Any, pairs: bool) -> None:
    with pytest.raises(ImproperlyConfigured, match="must be an integer") as caught:
        load({"strategies_ranks": [("a b", rank)] if pairs else {"a b": rank}})
    assert str(caught.value).startswith(f"strategies_ranks['a b'] = {rank!r}: ")


@pytest.mark.parametrize("levels", [0, 11, "3", 2.5, True, None])
def test_levels_of_a_queue_are_1_to_10(levels: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="must be an integer from 1 to 10") as caught:
        load({"strategies_priority_levels": {"a": 3, "b": levels}})
    assert str(caught.value).startswith(f"strategies_priority_levels['b'] = {levels!r}: ")


@pytest.mark.parametrize("name", ["ranks", "priority_levels"])
@pytest.mark.parametrize("queue", ["", None, 3])
def test_a_queue_name_is_a_string(name: str, queue: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"strategies_{name} = {queue!r}: a queue name"):
        load({f"strategies_{name}": {queue: 1}})


@pytest.mark.parametrize(
    ("levels", "default", "whose"),
    [
        (3, 3, "every queue, which is 3"),
        (1, 1, "every queue, which is 1"),
        ({"a": 5, "b": 2}, 2, "queue 'b', which is 2"),
    ],
)
def test_the_default_priority_is_a_level_of_every_queue(
    levels: Any, default: int, whose: str
) -> None:
    conf = {"strategies_priority_levels": levels, "strategies_default_priority": default}
    rule = f"strategies_default_priority = {default}: must be below the number of levels of {whose}"
    with pytest.raises(ImproperlyConfigured, match=rule):
        load(conf)
    assert load({**conf, "strategies_default_priority": default - 1})


def test_a_default_priority_may_stand_without_levels() -> None:
    # Queues may have levels of their own, by their argument x-max-priority.
    settings = load({"strategies_default_priority": 2})
    assert settings.levels_for("q") is None
    assert settings.levels_for("q", 4) == 5
    assert settings.default_level(5) == 2
    with pytest.raises(ImproperlyConfigured, match="strategies_default_priority = 2: must be bel"):
        settings.default_level(2)


def test_the_built_in_default_level_gives_way() -> None:
    assert [Settings().default_level(levels) for levels in (1, 2, 3, 10)] == [0, 1, 1, 1]


def test_levels_for() -> None:
    assert Settings().levels_for("a") is None
    assert Settings().levels_for("a", 0) == 1
    assert Settings().levels_for("a", 255) == 10
    assert Settings(priority_levels=3).levels_for("a") == 3
    assert Settings(priority_levels=3).levels_for("a", 4) == 5
    per_queue = Settings(priority_levels={"a": 3})
    assert per_queue.levels_for("a", 4) == 3
    assert per_queue.levels_for("b", 4) == 5
    assert per_queue.levels_for("b") is None


@pytest.mark.parametrize("value", [-1, "3", 2.5, True])
def test_a_wrong_max_priority_names_the_queue(value: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="x-max-priority of queue 'q'") as caught:
        Settings().levels_for("q", value)
    assert repr(value) in str(caught.value)
    assert Settings(priority_levels={"q": 2}).levels_for("q", value) == 2


def test_the_command_line_wins() -> None:
    conf = {"strategies_strategy": "max_len", "strategies_ranks": {"a": 1, "b": 2}}
    settings = load(conf, strategy="min-len", ranks=["b=5", ("c", 7), "b=-6", "x=y=0"])
    assert settings.strategy is Strategy.MIN_LEN
    assert settings.ranks == {"a": 1, "b": -6, "c": 7, "x=y": 0}
    assert load(conf).ranks == {"a": 1, "b": 2}
    assert conf["strategies_ranks"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fifo"}, "--strategy = 'fifo': must be one of priority, "),
        ({"strategy": ""}, "--strategy = '': must be one of priority, "),
        ({"ranks": ["a"]}, "--rank = 'a': must be QUEUE=N"),
        ({"ranks": ["=1"]}, "--rank = '=1': must be QUEUE=N"),
        ({"ranks": ["a="]}, "--rank = 'a=': must be QUEUE=N"),
        ({"ranks": ["a=1.5"]}, "--rank = 'a=1.5': must be QUEUE=N"),
        ({"ranks": ["a=1_0"]}, "--rank = 'a=1_0': must be QUEUE=N"),
        ({"ranks": [("a", True)]}, "--rank['a'] = True: must be an integer"),
        ({"ranks": [("", 1)]}, "--rank = '': a queue name"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({}, **options)
    assert str(caught.value).startswith(message)


def test_a_wrong_setting_is_an_error_even_under_an_option() -> None:
    with pytest.raises(ImproperlyConfigured, match="strategies_strategy = 'fifo'"):
        load({"strategies_strategy": "fifo"}, strategy="priority")


def test_ranks_may_be_any_iterable() -> None:
    ranks: Iterable[str] = (f"{queue}=1" for queue in "ab")
    assert load({}, ranks=ranks).ranks == {"a": 1, "b": 1}
