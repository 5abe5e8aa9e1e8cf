"""One queue has one policy: who may start, what changes it, and living side by side with workers that have none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from celery_strategies.store import admin
from tests.fair.lab import CAPPED, FIFO, FairLab, key_of, names, once_each, overlaps
from tests.support.waiting import stays, wait_until
from tests.support.workers import celery, job, publish

BASE: dict[str, Any] = {"strategies_fair_share": True}
#: Settings that differ from BASE, and what of them the message names.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "memory": ({**BASE, "strategies_fair_share_memory": "batch"}, "order='batch'"),
    "groups": ({"strategies_group_mode": "fifo"}, "order='age'"),
    "groups in turn": ({"strategies_group_mode": "round_robin"}, "order='turn'"),
    "key header": ({**BASE, "strategies_fair_key_header": "tenant"}, "key_header='tenant'"),
    "weight header": ({**BASE, "strategies_fair_weight_header": "plan"}, "weight_header='plan'"),
}


def occupy(lab: FairLab) -> None:
    """Have one job run and two be sorted in queue a."""
    lab.keyed(["k-0"], task="hold")
    lab.wait_started("k-0")
    lab.keyed([*names("k", 3)[1:], "l-0"], task="hold")
    wait_until(lambda: lab.sorted_count() >= 2, 10, "some are sorted")


@pytest.mark.parametrize("how", OTHERS)
def test_a_worker_with_another_policy_does_not_start(lab: FairLab, how: str) -> None:
    worker = lab.worker("threads", settings=CAPPED, concurrency=2)
    occupy(lab)
    settings, told = OTHERS[how]
    other = lab.plain("threads", settings=settings, wait=False)
    assert other.wait_exit() != 0
    lines = [line for line in other.log().splitlines() if "is sorted by" in line]
    assert len(lines) == 1, other.log()
    assert "'a'" in lines[0]
    assert "order='fair'" in lines[0]
    assert told in lines[0]
    assert "Traceback" not in other.log()
    lab.open(4)
    lab.wait_count(4)
    assert worker.running


def test_a_worker_without_a_policy_serves_what_is_sorted(lab: FairLab) -> None:
    """By key, with the caps of the others."""
    lab.worker("threads", settings=CAPPED, concurrency=2)
    occupy(lab)
    plain = lab.plain("threads", concurrency=4)
    plain.wait_log("serving that")
    lab.keyed([*names("x", 3), *names("y", 3)])
    lab.wait_ended(*names("x", 3), *names("y", 3))
    assert overlaps(lab.events()) == []
    assert {event.worker for event in lab.starts() if key_of(event.label) in "xy"} >= {
        plain.hostname
    }
    lab.open(4)
    lab.wait_count(10)
    lab.wait_none_in_flight()


def test_a_policy_with_nothing_sorted_is_replaced_and_the_others_follow(lab: FairLab) -> None:
    """Also over a reconnect: a worker that runs is not ended by somebody else's settings."""
    first = lab.worker("threads")
    lab.keyed(["k-0"])
    lab.wait_ended("k-0")
    second = lab.worker("threads", settings={"strategies_fair_share_memory": "batch"})
    assert lab.db.hget(lab.keys.policy("a"), "order") == b"batch"
    occupied = [*names("k", 4)[1:], *names("l", 3)]
    lab.keyed(occupied, task="hold")
    wait_until(lambda: len(lab.started()) == 3, 10, "both are busy")
    lab.open()
    wait_until(lambda: len(lab.started()) == 4, 10, "one went on")
    wait_until(lambda: lab.sorted_count() == 3, 10, "the rest is sorted")
    lab.db.client_kill_filter(_type="normal", skipme=True)
    first.wait_log("serving that")
    lab.open(5)
    lab.wait_ended(*occupied)
    once_each(lab, ["k-0", *occupied])
    assert lab.db.hget(lab.keys.policy("a"), "order") == b"batch"
    assert first.running
    assert second.running


# -- roll-out and roll-back ------------------------------------------------------------------------


def test_a_backlog_that_was_there_before(lab: FairLab) -> None:
    """From stock producers and a stock worker: what waits is sorted, by the headers that it has."""
    stock = lab.stock()
    jobs = [job("record", "u0", queue="a"), job("record", "u1", queue="a")]
    jobs += [job("record", x, queue="a", headers={"fair_key": key_of(x)}) for x in names("a", 3)]
    jobs += [job("record", x, queue="a", headers={"fair_key": key_of(x)}) for x in names("b", 3)]
    publish(lab.url, [job("record", "first", queue="a")])
    lab.wait_ended("first")
    assert stock.stop() == 0
    publish(lab.url, jobs)
    lab.worker("solo")
    lab.wait_count(9)
    assert lab.started()[1:] == ["u0", "a-0", "b-0", "u1", "a-1", "b-1", "a-2", "b-2"]


def test_a_plain_worker_learns_of_a_policy_while_it_runs(lab: FairLab) -> None:
    plain = lab.plain("threads", concurrency=2)
    lab.keyed(names("h", 2), task="hold")
    lab.wait_started(*names("h", 2))
    lab.worker("threads", settings=CAPPED)
    lab.keyed(["k-0"], task="hold")
    lab.wait_started("k-0")
    plain.wait_log("serving that")
    lab.keyed(["k-1"])
    lab.open(2)
    wait_until(lambda: len(lab.ended()) >= 2, 10, "two end")
    if "k-0" not in lab.ended():
        stays(lambda: "k-1" not in lab.started(), 0.5, "the key is full, for it as well")
    lab.open()
    lab.wait_ended("k-1")
    lab.wait_none_in_flight()


def test_stock_and_ours_on_one_queue(lab: FairLab) -> None:
    """Nothing is lost, nothing runs twice; what is sorted is out of the stock worker's sight."""
    lab.worker("threads", concurrency=2)
    lab.stock(concurrency=2)
    labels = [f"{key}-{i}" for i in range(100) for key in "abc"]
    publish(
        lab.url,
        [job("record", x, queue="a", headers={"fair_key": key_of(x)}) for x in labels],
    )
    lab.wait_count(300)
    once_each(lab, labels)
    assert len({event.worker for event in lab.starts()}) == 2
    lab.wait_none_in_flight()
    assert lab.count() == 0


@pytest.mark.parametrize("settings", [BASE, FIFO], ids=["fair", "groups"])
def test_unsort_gives_everything_to_stock_workers(lab: FairLab, settings: dict[str, Any]) -> None:
    header = "fair_key" if settings is BASE else "group_key"
    caps = {"strategies_max_in_flight": {"*": 1}} if settings is BASE else {}
    worker = lab.plain("prefork", settings={**settings, **caps}, concurrency=2)
    labels = [*names("k", 4), *names("l", 4)]
    lab.keyed(["later-0"], countdown=3, header=header)
    wait_until(lambda: lab.delayed("a"), description="one is delayed")
    lab.keyed(labels, task="hold_late", header=header)
    lab.wait_started("k-0", "l-0")
    worker.quit()
    worker.wait_exit()
    assert lab.count() == 9
    done = celery("strategies", "unsort", broker_url=lab.url)
    assert "messages moved" in done.stdout
    assert lab.count() == 9
    left = {name.decode() for name in lab.db.keys("strategies:{a}:*")}
    assert left <= {lab.keys.caps("a")}, left
    lab.db.delete("test:ran")
    lab.open(10)
    lab.stock()
    lab.wait_count(9)
    assert Counter(lab.started()) == Counter([*labels, "later-0"])


def test_unsort_says_which_names_had_nothing(lab: FairLab) -> None:
    lab.worker("threads", settings=BASE).stop()
    lab.keyed(names("k", 2))
    done = celery("strategies", "unsort", "b", "a", broker_url=lab.url)
    assert done.stderr.count("Note: ") == 1
    assert "Note: 'b' has no messages that only our workers see" in done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["b", "a"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("weight", "k", "abc"), "a weight is a number from 1e-06 to 1e+06, or none, not 'abc'"),
        (("weight", "k", "-1"), "a weight is a number from 1e-06 to 1e+06, or none, not '-1'"),
        (("weight", "k", "nan"), "a weight is a number from 1e-06 to 1e+06, or none, not 'nan'"),
        (("cap", "k", "-1"), "a cap is an integer, 1 or more, or none, not '-1'"),
        (("cap", "k", "0"), "a cap is an integer, 1 or more, or none, not '0'"),
        (("weight", "k", "2", "--quue", "a"), "Got unexpected extra arguments (--quue a)"),
    ],
)
def test_a_wrong_number_is_refused_with_the_rule(
    lab: FairLab, words: tuple[str, ...], said: str
) -> None:
    done = celery("strategies", *words, broker_url=lab.url, check=False)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_a_queue_that_was_unsorted_is_sorted_again(lab: FairLab) -> None:
    """While a worker with fair share runs: it goes on with a new policy."""
    lab.worker("threads", settings=CAPPED)
    lab.keyed(["gate-0"], task="hold")
    lab.wait_started("gate-0")
    lab.keyed([*names("a", 3), *names("b", 3)])
    admin.unsort_queue(lab.db, lab.keys, "a")
    assert not lab.db.exists(lab.keys.policy("a"))
    lab.open()
    lab.wait_count(7)
    assert [key_of(label) for label in lab.started()[1:]] == [*"ababab"]
    assert lab.db.exists(lab.keys.policy("a"))
    lab.wait_none_in_flight()


def test_purge_and_depth_count_everything(lab: FairLab) -> None:
    """Sorted, full, given back and delayed, from a process that has never seen a worker."""
    worker = lab.worker("prefork", settings=CAPPED, concurrency=2)
    lab.keyed(["k-0", "l-0"], task="hold_late")
    lab.wait_started("k-0", "l-0")
    lab.keyed([*names("k", 5)[1:], *names("m", 3)], task="hold_late")
    lab.keyed(["later-0"], countdown=60)
    lab.open()
    wait_until(lambda: len(lab.started()) == 3, 10, "one ended, and another began")
    assert lab.delayed("a") == ["later-0"]
    assert not lab.db.exists("a")
    worker.quit()
    worker.wait_exit()
    assert len(lab.ended()) == 1
    assert len(lab.waiting("a")) == 8
    assert lab.count() == 9
    done = celery("purge", "-f", "-Q", "a", broker_url=lab.url)
    assert "Purged 9 messages" in done.stdout
    assert lab.count() == 0
    assert lab.waiting("a") == lab.delayed("a") == []
    lab.worker("prefork", settings=CAPPED)
    lab.keyed(["k-new"])
    lab.wait_ended("k-new")
    lab.wait_none_in_flight()
