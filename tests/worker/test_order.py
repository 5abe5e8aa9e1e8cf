"""Which job comes next: strategies, ranks, bind order and levels, end to end."""

from __future__ import annotations

import json

import pytest

from tests.support.waiting import wait_until
from tests.support.workers import celery, job, publish
from tests.worker.lab import Lab

#: What each strategy makes of a1-a3, b1, c1-c2 on `-Q a,b,c`, one slot.
BACKLOG = {"a": 3, "b": 1, "c": 2}
PROMISED = {
    "priority": "a1 a2 a3 b1 c1 c2",
    "round_robin": "a1 b1 c1 a2 c2 a3",
    "max_len": "a1 a2 c1 a3 b1 c2",
    "min_len": "b1 c1 c2 a1 a2 a3",
}


def fill(lab: Lab, backlog: dict[str, int] | None = None) -> int:
    """Fill the queues, the last one first."""
    backlog = backlog or BACKLOG
    for queue in reversed(backlog):
        lab.fill(queue, [f"{queue}{i}" for i in range(1, backlog[queue] + 1)])
    return sum(backlog.values())


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("strategy", PROMISED)
def test_each_strategy_keeps_its_order(lab: Lab, pool: str, strategy: str) -> None:
    total = fill(lab)
    lab.worker(pool, queues="abc", settings={"strategies_strategy": strategy})
    assert lab.wait_count(total) == PROMISED[strategy].split()
    lab.wait_settled()


@pytest.mark.parametrize("seed", range(10))
def test_case_06_order_does_not_depend_on_hashing(lab: Lab, seed: int) -> None:
    total = fill(lab, {"a": 2, "b": 2, "c": 2})
    lab.worker("solo", queues="abc", env={"PYTHONHASHSEED": str(seed)})
    assert lab.wait_count(total) == "a1 a2 b1 b2 c1 c2".split()


def test_case_07_round_robin_moves_past_the_source_that_yielded(lab: Lab) -> None:
    worker = lab.worker("threads", queues="abcd", settings={"strategies_strategy": "round_robin"})
    # b and d are empty: they neither take a turn nor cost one.
    lab.send("hold", "h", queue="a")
    lab.wait_started("h")
    lab.fill("a", ["a1", "a2"])
    lab.fill("c", ["c1", "c2"])
    lab.open()
    assert lab.wait_count(5) == "h c1 a1 c2 a2".split()
    # The turn stands behind a, so that d comes before a, though a is first in the list.
    lab.idle(worker)
    lab.send("hold", "h2", queue="a")
    lab.wait_started("h2")
    lab.fill("a", ["a3"])
    lab.fill("d", ["d1"])
    lab.open()
    assert lab.wait_count(8)[5:] == "h2 d1 a3".split()


def test_command_line_names_strategy_and_ranks(lab: Lab) -> None:
    total = fill(lab)
    worker = lab.worker(
        queues="abc",
        settings={"strategies_strategy": "round_robin", "strategies_ranks": {"a": 1, "c": 5}},
        args=["--strategy", "Priority", "--rank", "c=0", "--rank", "b=7"],
    )
    assert lab.wait_count(total) == "c1 c2 a1 a2 a3 b1".split()
    stats = lab.control("stats", worker)["strategies"]
    assert stats["strategy"] == "priority"
    assert [(s["queue"], s["rank"]) for s in stats["sources"]] == [("c", 0), ("a", 1), ("b", 7)]
    log = worker.log()
    assert "Reading by strategy priority" in log
    assert log.index("c  rank 0") < log.index("a  rank 1") < log.index("b  rank 7")


def test_ranks_order_the_queues_and_unset_comes_last(lab: Lab) -> None:
    total = fill(lab)
    lab.worker(queues="abc", settings={"strategies_ranks": {"c": 1, "b": 1}})
    assert lab.wait_count(total) == "b1 c1 c2 a1 a2 a3".split()


# -- levels -----------------------------------------------------------------------------------

LEVELS = {"strategies_priority_levels": 3}


def test_levels_of_every_queue(lab: Lab) -> None:
    jobs = [job("record", f"{q}-{p}", queue=q, priority=p) for p in (2, 1, 0) for q in "ba"]
    jobs += [job("record", f"{q}-unset", queue=q) for q in "ba"]
    publish(lab.url, jobs, LEVELS, stock=False)
    worker = lab.worker(queues="ab", settings=LEVELS)
    # Unset is level 1, behind the one that was published before it.
    assert lab.wait_count(8) == "a-0 a-1 a-unset a-2 b-0 b-1 b-unset b-2".split()
    assert "a  rank unset, 3 levels" in worker.log()


def test_levels_per_queue_and_default_priority(lab: Lab) -> None:
    settings = {"strategies_priority_levels": {"a": 4}, "strategies_default_priority": 3}
    jobs = [job("record", "a-unset", queue="a")]
    jobs += [job("record", f"a-{p}", queue="a", priority=p) for p in (3, 2, 0)]
    jobs += [job("record", "b-unset", queue="b"), job("record", "b-9", queue="b", priority=9)]
    publish(lab.url, jobs, settings, stock=False)
    worker = lab.worker(queues="ab", settings=settings)
    assert lab.wait_count(6) == "a-0 a-2 a-unset a-3 b-unset b-9".split()
    sources = lab.control("stats", worker)["strategies"]["sources"]
    assert [s["levels"] for s in sources] == [4, None]


MAX_PRIORITY = """
import os
from kombu import Queue
from tests.worker.project import app
app.conf.task_queues = [Queue("a", max_priority=2), Queue("b")]
"""


def test_max_priority_of_a_queue_gives_levels(lab: Lab) -> None:
    """`Queue(max_priority=2)` is three levels, for the worker and for a producer that knows it."""
    worker = lab.worker(app="proj", project={"proj.py": MAX_PRIORITY}, wait=True)
    sources = lab.control("stats", worker)["strategies"]["sources"]
    assert [(s["queue"], s["levels"]) for s in sources] == [("a", 3), ("b", None)]
    lab.send("hold", "h", queue="b")
    lab.wait_started("h")
    # From a process of its own: apps in one process share the connections to one broker.
    jobs = [job("record", f"a-{one}", queue="a", priority=one) for one in (9, 2, 1, 0)]
    publish(lab.url, jobs)
    lab.open()
    # A producer that knows nothing of the levels wrote 9, 2, 1, 0 by Kombu's steps (0, 3, 6, 9):
    # 9 is the last level, the rest stands in level 0 in its order.
    assert lab.wait_count(5)[1:] == "a-2 a-1 a-0 a-9".split()


def test_a_tasks_own_priority_and_the_calls_own(lab: Lab) -> None:
    """`priority=` of the task, and of `apply_async`, which wins."""
    project = {
        "proj.py": "from tests.worker.project import app, urgent, hold, record_late\n"
        "from celery_strategies import *\n"
    }
    script = (
        "from tests.worker.project import app, urgent, record_late\n"
        "record_late.apply_async(['unset'], queue='a')\n"
        "urgent.apply_async(['urgent'], queue='a')\n"
        "urgent.apply_async(['call'], queue='a', priority=2)\n"
        "record_late.apply_async(['zero'], queue='a', priority=0)\n"
    )
    run_script(lab, script, LEVELS)
    lab.worker(queues="a", settings=LEVELS, project=project)
    assert lab.wait_count(4) == "urgent zero unset call".split()


def run_script(lab: Lab, script: str, settings: dict[str, object]) -> str:
    """Run Python code in a process of its own that has our project."""
    import subprocess
    import sys

    from tests.support.workers import ROOT, clean_environment, project_environment

    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment([ROOT], project_environment(lab.url, settings)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_sources_with_levels_under_round_robin(lab: Lab) -> None:
    jobs = [job("record", f"{q}-{p}", queue=q, priority=p) for p in (2, 0, 1) for q in "ab"]
    publish(lab.url, jobs, LEVELS, stock=False)
    lab.worker(queues="ab", settings={**LEVELS, "strategies_strategy": "round_robin"})
    assert lab.wait_count(6) == "a-0 b-0 a-1 b-1 a-2 b-2".split()


@pytest.mark.parametrize("stock", [True, False])
def test_case_15_every_priority_lands_on_a_level_and_is_read(lab: Lab, stock: bool) -> None:
    """None, -1, 4, 50 and "3", from a plain producer and from ours, with three levels."""
    priorities = [None, -1, 4, 50, "3", 1]
    jobs = [job("record", f"p{p}", queue="a", priority=p) for p in priorities]
    publish(lab.url, jobs, {} if stock else LEVELS, stock=stock)
    lab.worker(queues="a", settings=LEVELS)
    order = lab.wait_count(6)
    if stock:
        # Kombu's steps 0, 3, 6, 9: None, -1 and 1 are level 0; 4 and "3" list 3; 50 list 9.
        # Lists behind the last level are the last level, in numeric order.
        assert order == "pNone p-1 p1 p4 p3 p50".split()
    else:
        assert order == "p-1 pNone p1 p4 p50 p3".split()
    assert lab.waiting("a") == []
    lab.wait_settled()


def test_case_15_lists_of_other_steps_are_read_too(lab: Lab) -> None:
    """A producer with priority_steps of its own fills lists that our steps do not name."""
    steps = {"broker_transport_options": {"priority_steps": list(range(10))}}
    jobs = [job("record", f"p{p}", queue="a", priority=p) for p in (8, 7, 4, 2, 1)]
    publish(lab.url, jobs, steps)
    worker = lab.worker(queues="a")
    assert lab.wait_count(5) == "p1 p2 p4 p7 p8".split()
    # Also when they appear while it sleeps.
    lab.idle(worker)
    publish(lab.url, [job("record", "late", queue="a", priority=5)], steps)
    lab.wait_ended("late")


def test_case_08_a_redelivered_message_keeps_its_level(lab: Lab) -> None:
    """Given back by a cold shutdown, a level 1 job waits behind level 0 and before level 2."""
    publish(
        lab.url,
        [job("hold_late", "mid", queue="a", priority=1)],
        LEVELS,
        stock=False,
    )
    worker = lab.worker(queues="a", settings=LEVELS)
    lab.wait_started("mid")
    jobs = [job("record", f"p{p}", queue="a", priority=p) for p in (2, 1, 0)]
    publish(lab.url, jobs, LEVELS, stock=False)
    worker.quit()
    worker.wait_exit()
    assert lab.waiting("a") == ["p0", "mid", "p1", "p2"]
    lab.open()
    lab.worker(queues="a", settings=LEVELS)
    lab.wait_count(4)
    assert lab.started()[1:] == ["p0", "mid", "p1", "p2"]
    again = [e for e in lab.events() if e.label == "mid" and e.event == "start"]
    assert [e.redelivered for e in again] == [False, True]


def test_case_08_a_requeued_message_keeps_its_level(lab: Lab) -> None:
    """`Reject(requeue=True)`: behind its own level, before the next."""
    jobs = [job("outcome", "requeue", queue="a", priority=1)]
    jobs += [job("record", f"p{p}", queue="a", priority=p) for p in (2, 1)]
    publish(lab.url, jobs, LEVELS, stock=False)
    lab.worker(queues="a", settings=LEVELS)
    lab.wait_count(2)
    lab.wait_settled()
    assert lab.started() == ["requeue", "p1", "requeue", "p2"]


def test_case_10_a_separator_inside_a_queue_name(lab: Lab) -> None:
    settings = {"broker_transport_options": {"sep": ":"}}
    publish(lab.url, [job("record", "plain", queue="eu:mail")], settings)
    publish(lab.url, [job("record", "three", queue="eu:mail", priority=3)], settings)
    publish(lab.url, [job("record", "other", queue="eu")], settings)
    worker = lab.worker(queues=["eu:mail", "eu"], settings=settings)
    assert lab.wait_count(3) == "plain three other".split()
    assert {e.label: e.queue for e in lab.events()} == {
        "plain": "eu:mail",
        "three": "eu:mail",
        "other": "eu",
    }
    shown = celery(
        "inspect",
        "active_queues",
        "-d",
        worker.hostname,
        "-j",
        broker_url=lab.url,
        settings=settings,
    )
    names = {queue["name"] for queue in json.loads(shown.stdout)[worker.hostname]}
    assert names == {"eu:mail", "eu"}


# -- topic exchanges --------------------------------------------------------------------------

TOPIC = """
from kombu import Exchange, Queue
from tests.worker.project import app
news = Exchange("news", type="topic")
app.conf.task_queues = [
    Queue("eu", exchange=news, routing_key="eu.#"),
    Queue("plain"),
    Queue("all", exchange=news, routing_key="#"),
]
"""


def test_a_queue_bound_to_a_topic_exchange_is_a_source(lab: Lab) -> None:
    worker = lab.worker(app="proj", project={"proj.py": TOPIC})
    lab.send("hold", "h", queue="plain")
    lab.wait_started("h")
    script = (
        f"import sys; sys.path.insert(0, {str(worker.folder)!r})\n"
        "from proj import app, news\n"
        "for key, label in (('eu.de', 'x'), ('us.ny', 'y')):\n"
        "    app.send_task('test.record', [label], exchange='news', routing_key=key, declare=[news])\n"
        "app.send_task('test.record', ['p'], queue='plain')\n"
    )
    run_script(lab, script, {})
    lab.open()
    # One publish, two queues: both get it (and both are settled), in the order of the list.
    assert lab.wait_count(5)[1:] == "x p x y".split()
    lab.wait_settled()


def test_case_59_after_queue_unbind_the_old_pattern_delivers_no_more(lab: Lab) -> None:
    """A pattern that was changed stays bound (Kombu never removes one) until it is unbound."""
    from kombu import Exchange, Queue

    news = Exchange("news", type="topic")
    with lab.app.connection_for_write() as connection:
        old = Queue("eu", news, routing_key="eu.#")(connection.default_channel)
        old.declare()
    worker = lab.worker(app="proj", project={"proj.py": TOPIC.replace("eu.#", "europe.#")})

    def publish_to(key: str, label: str) -> None:
        lab.app.send_task("test.record", [label], exchange="news", routing_key=key, declare=[news])

    publish_to("eu.de", "both")
    lab.wait_count(2)
    with lab.app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.queue_unbind("eu", "news", "eu.#")
        bound = {key for key, _, queue in channel.get_table("news") if queue == "eu"}
    assert bound == {"europe.#"}
    publish_to("eu.de", "one")
    publish_to("europe.de", "new")
    wait_until(lambda: lab.ended().count("new") == 2, description="the new pattern delivers twice")
    assert lab.ended().count("one") == 1
    lab.idle(worker)
