"""Who gets which share: keys, weights, levels, strategies, and several workers."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_strategies.core.strategies import Strategy
from tests.fair.lab import CALLABLE, FairLab, key_of, names, once_each
from tests.support.waiting import wait_until
from tests.support.workers import job, publish


def keys_of(labels: list[str]) -> list[str]:
    return [key_of(label) for label in labels]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_minnow_does_not_wait_for_a_whale(lab: FairLab, pool: str) -> None:
    """1,000 of one key are waiting; two of each of five others come behind: each is among the first."""
    whale, minnows = names("whale", 1000), [f"m{i}-{n}" for n in range(2) for i in range(5)]
    lab.keyed(whale)
    lab.keyed(minnows)
    lab.worker(pool)
    lab.wait_count(1010, timeout=100)
    started = lab.started()
    places = [started.index(label) for label in minnows]
    # A take sorts 256 messages at most, so what lies behind 1,000 is seen after four takes, or once it is sorted.
    assert max(places) < 200, places
    assert [label for label in started if label.startswith("whale")] == whale
    once_each(lab, whale + minnows)
    lab.wait_none_in_flight()


@pytest.mark.parametrize("by", ["header", "callable"])
def test_keys_take_turns(lab: FairLab, by: str) -> None:
    """The key comes from a header that a stock producer wrote, or from the producer's callable."""
    labels = [*names("a", 6), *names("b", 6), *names("c", 3)]
    if by == "header":
        jobs = [job("record", x, queue="a", headers={"fair_key": key_of(x)}) for x in labels]
        publish(lab.url, jobs)
    else:
        settings = {"strategies_fair_share": CALLABLE}
        publish(lab.url, [job("record", x, queue="a") for x in labels], settings, stock=False)
    lab.worker("solo")
    started = lab.wait_count(15)
    # In turns, and the jobs of a key in their order.
    turns = [[f"{key}-{i}" for key in ("abc" if i < 3 else "ab")] for i in range(6)]
    assert started == [label for turn in turns for label in turn]


def test_jobs_without_a_key_are_one_key(lab: FairLab) -> None:
    lab.keyed(names("a", 4))
    lab.fill("a", ["u0", "u1", "u2", "u3"])
    lab.keyed(names("b", 4))
    lab.worker("solo")
    started = lab.wait_count(12)
    assert [x[0] for x in started] == [*"aub" * 4]


def test_levels_are_strict_and_fair_within(lab: FairLab) -> None:
    levels = {"strategies_priority_levels": 2, "strategies_fair_share": True}
    jobs = [
        job(
            "record",
            f"{key}-{priority}{i}",
            queue="a",
            priority=priority,
            headers={"fair_key": key},
        )
        for priority in (1, 0)
        for key in ("whale", "minnow")
        for i in range(4)
    ]
    publish(lab.url, jobs, levels, stock=False)
    lab.worker("solo", settings=levels)
    started = lab.wait_count(16)
    expected = [
        f"{key}-{priority}{i}"
        for priority in (0, 1)
        for i in range(4)
        for key in ("whale", "minnow")
    ]
    assert started == expected


@pytest.mark.parametrize("strategy", list(Strategy), ids=lambda strategy: strategy.label)
def test_a_strategy_keeps_its_order_between_sources(lab: FairLab, strategy: Strategy) -> None:
    """It sees what waits in each source, whatever the keys are; within each, keys take turns."""
    lengths = {"x": 8, "y": 4, "z": 6}
    for queue, length in lengths.items():
        lab.keyed([f"{key}{queue}-{i}" for key in "ab" for i in range(length // 2)], queue)
    lab.worker("solo", queues="xyz", settings={"strategies_strategy": strategy.label})
    lab.wait_count(18)
    order = [event.queue for event in lab.starts()]
    assert order == list(queues_by(strategy, lengths))
    for queue, length in lengths.items():
        its = [key_of(event.label)[0] for event in lab.starts() if event.queue == queue]
        assert its == [*"ab" * (length // 2)]


def queues_by(strategy: Strategy, lengths: dict[str, int]) -> list[str]:
    """Return the order of queues that holds for plain sources."""
    left, turn, found = dict(lengths), 0, []
    queues = list(lengths)
    while any(left.values()):
        some = [queue for queue in queues if left[queue]]
        if strategy is Strategy.PRIORITY:
            chosen = some[0]
        elif strategy is Strategy.ROUND_ROBIN:
            chosen = min(some, key=lambda queue: (queues.index(queue) - turn) % len(queues))
            turn = queues.index(chosen) + 1
        else:
            pick = max if strategy is Strategy.MAX_LEN else min
            chosen = pick(some, key=lambda queue: left[queue])
        left[chosen] -= 1
        found.append(chosen)
    return found


def test_a_plain_source_beside_a_sorted_one(lab: FairLab) -> None:
    """A worker without fair share serves both; what nobody sorts stays plain."""
    fair = lab.worker("solo", queues="a")
    lab.keyed(["k-0"])
    lab.wait_ended("k-0")
    assert fair.stop() == 0
    lab.keyed([*names("a", 3), *names("b", 3)], "a")
    lab.keyed([*names("c", 3), *names("d", 3)], "b")
    lab.plain("solo", queues="ab")
    started = lab.wait_count(13)[1:]
    assert keys_of(started) == [*"ababab", *"cccddd"]
    assert not lab.db.exists(lab.keys.policy("b"))


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["shared", "batch"])
def test_weights_with_and_without_memory(lab: FairLab, memory: str) -> None:
    """One job a take: remembering, 3 : 1 is served 3 : 1; from zero each time, the heavier goes first."""
    lab.keyed(names("a", 10), weight=1)
    lab.keyed(names("b", 30), weight=3)
    lab.worker("solo", settings={"strategies_fair_share_memory": memory})
    keys = keys_of(lab.wait_count(40))
    if memory == "shared":
        for n in range(4, 41, 4):
            assert abs(keys[:n].count("b") - 3 * n / 4) <= 1, keys
    else:
        assert keys == [*"b" * 30, *"a" * 10]


def test_batches_divide_the_slots_of_a_take(lab: FairLab) -> None:
    """Four slots: each take starts from zero, and gives 3 : 1 of its four."""
    lab.keyed(names("a", 4), task="hold", weight=1)
    lab.keyed(names("b", 12), task="hold", weight=3)
    lab.worker("threads", concurrency=4, settings={"strategies_fair_share_memory": "batch"})
    wait_until(lambda: len(lab.started()) == 4, 20, "four run")
    assert Counter(keys_of(lab.started())) == {"b": 3, "a": 1}
    lab.open(16)
    lab.wait_count(16)


def test_a_weight_that_an_operator_sets_acts_on_what_waits(lab: FairLab) -> None:
    lab.keyed(names("gate", 3), task="hold", weight=1000)
    lab.worker("threads")
    lab.wait_started("gate-0")
    lab.keyed(names("a", 60), weight=2)
    lab.keyed(names("b", 60))
    lab.open()
    lab.wait_started("gate-1")
    assert lab.sorted_count() == 121
    lab.set_weight("b", 6)
    lab.set_weight("gate", 2000)
    lab.open(2)
    lab.wait_count(123)
    keys = keys_of(lab.started()[3:])
    for n in range(8, 73, 8):
        assert abs(keys[:n].count("b") - 3 * n / 4) <= 1, keys


def test_an_operators_weight_ends(lab: FairLab) -> None:
    """And the weights of the headers hold again, for what waits too."""
    lab.keyed(names("gate", 3), task="hold", weight=1000)
    lab.worker("threads")
    lab.wait_started("gate-0")
    lab.keyed(names("a", 20))
    lab.keyed(names("b", 20), weight=3)
    lab.set_weight("a", 100)
    lab.open()
    lab.wait_started("gate-1")
    lab.set_weight("a", None)
    lab.open(2)
    lab.wait_count(43)
    keys = keys_of(lab.started()[3:])
    for n in range(4, 25, 4):
        assert abs(keys[:n].count("b") - 3 * n / 4) <= 1, keys


# -- several workers -------------------------------------------------------------------------------


def test_two_workers_share_one_fairness(lab: FairLab) -> None:
    """What each key had is in Redis: over both workers 3 : 1 is kept, also when one of them comes later."""
    lab.keyed(names("a", 40), task="hold")
    lab.keyed(names("b", 120), task="hold", weight=3)
    lab.worker("threads", concurrency=2)
    lab.open(38)
    wait_until(lambda: len(lab.started()) == 40, 30, "the first alone")
    lab.worker("threads", concurrency=2)
    lab.open(120)
    wait_until(lambda: len(lab.started()) == 160, 60, "both")
    keys = keys_of(lab.started())
    for n in range(4, 161, 4):
        # A job that was taken first may be recorded a little later: four slots.
        assert abs(keys[:n].count("b") - 3 * n / 4) <= 5, (n, keys)
    assert len({event.worker for event in lab.starts()}) == 2
    lab.open(2)
    lab.wait_count(160)
    lab.wait_none_in_flight()
