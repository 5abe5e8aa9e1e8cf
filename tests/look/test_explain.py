"""`explain` is right for a job in every state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.look import find, reach, status
from celery_strategies.look.answer import Answer, as_json
from celery_strategies.look.explain import explain
from celery_strategies.look.find import Search
from celery_strategies.look.reach import Reach
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import Ask
from tests.store.tools import TTL, Caller, SourceKeys, Worker, message, push
from tests.support.waiting import wait_until
from tests.worker.lab import Lab

FAIR = Policy("fair", False, "fair_key", "fair_weight")
GROUPS = Policy("age", True, "group_key", "")
LISTS = tuple(range(10))


def live(
    db: redis.Redis,
    name: str,
    *queues: str,
    keys: Keys = Keys(),  # noqa: B008  # immutable
    strategy: str = "priority",
    priority: int = 0,
    age: float = 0,
    slots: int = 99,
) -> None:
    """Register a worker as its keeper does."""
    entry = {
        "name": f"{name}@host",
        "queues": json.dumps(queues),
        "strategy": strategy,
        "priority": priority,
        "slots": slots,
    }
    db.zadd(keys.alive, {name: int((time.time() - age) * 1000)})
    db.hset(keys.entry(name), mapping=entry)
    for queue in queues:
        db.zadd(keys.consumers(queue), {name: priority})


def hired(
    caller: Caller,
    name: str,
    *sources: SourceKeys | str,
    keys: Keys = Keys(),  # noqa: B008  # immutable
) -> Worker:
    worker = Worker(caller, name, *sources, keys=keys)
    worker.join()
    worker.now = ""  # type: ignore[assignment]  # the server's clock
    return worker


def by_key(queue: str, *, single: bool = False) -> SourceKeys:
    return SourceKeys(queue, None, LISTS, True, single)


def explained(
    db: redis.Redis,
    task: str,
    *queues: str,
    keys: Keys = Keys(),  # noqa: B008  # immutable
    seconds: float | None = find.SEARCH_SECONDS,
    key: str | None = None,
) -> Answer:
    eye = Reach(db, keys)
    workers = reach.find_workers(eye)
    seen = status.read_queues(eye, queues or ("q",), workers)
    found = explain(eye, Search(eye, task, seconds=seconds), seen, workers, key=key)
    assert eye.notes == []
    # Whatever it says, JSON can hold it.
    json.dumps(as_json(found))
    return found


def why(found: Answer) -> dict[str, str]:
    return dict(found.reasons)


# -- waiting -----------------------------------------------------------------------------------------


def test_in_the_inbox_of_a_plain_queue(redis_db: redis.Redis) -> None:
    live(redis_db, "w", "first", "q")
    push(redis_db, "q", *(message(f"job-{n}") for n in range(30)))
    push(redis_db, Keys().inbox("q", 3), message("low"), message("lower"))
    push(redis_db, "first", message("other"))
    found = explained(redis_db, "job-10", "q", "first")
    assert found.state == "inbox"
    assert (found.of_level, found.of_queue) == (10, 10)
    assert why(found) == {
        "strategy": "w@host (priority): first (1 jobs) goes first",
        "oldest": "10 messages of its level are before it",
    }
    found = explained(redis_db, "lower", "q", "first")
    assert (found.found.level, found.of_level, found.of_queue) == (3, 1, 31)  # type: ignore[union-attr]
    assert why(found)["level"] == "level 0 has 30, and it is on level 3"


def test_the_next_one_has_nothing_that_keeps_it(redis_db: redis.Redis) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", message("1"))
    found = explained(redis_db, "1")
    assert found.reasons == []
    assert found.of_queue == 0


def test_nobody_reads_its_queue(redis_db: redis.Redis) -> None:
    push(redis_db, "q", message("1"))
    assert "no strategies worker reads q" in why(explained(redis_db, "1"))["readers"]
    live(redis_db, "w", "q", age=60)
    assert "silent: w@host (60 s)" in why(explained(redis_db, "1"))["readers"]


@pytest.mark.parametrize(
    ("strategy", "other", "words"),
    [
        ("max_len", 5, "other (5 jobs) is longer"),
        ("min_len", 1, "other (1 jobs) is shorter"),
        ("round_robin", 5, None),
    ],
)
def test_the_strategy_of_its_readers(
    redis_db: redis.Redis, strategy: str, other: int, words: str | None
) -> None:
    live(redis_db, "w", "q", "other", strategy=strategy)
    push(redis_db, "q", *map(message, "abc"))
    push(redis_db, "other", *(message(f"o{n}") for n in range(other)))
    said = why(explained(redis_db, "a", "q", "other")).get("strategy")
    assert said == (words and f"w@host ({strategy}): {words}")


def test_one_idle_reader_is_enough(redis_db: redis.Redis) -> None:
    live(redis_db, "busy", "other", "q")
    live(redis_db, "idle", "q")
    push(redis_db, "q", message("1"))
    push(redis_db, "other", message("2"))
    assert "strategy" not in why(explained(redis_db, "1", "q", "other"))


def test_a_stand_by_is_named(redis_db: redis.Redis) -> None:
    live(redis_db, "main", "q", priority=10)
    live(redis_db, "spare", "q")
    push(redis_db, "q", message("1"))
    said = why(explained(redis_db, "1"))["consumer priority"]
    assert said == "only main@host (10) takes at full speed; spare@host (0) stands by"


def sorted_up(redis_db: redis.Redis, worker: Worker, policy: Policy, **caps: int) -> None:
    """Have all that waits in the worker's one queue sorted."""
    (source,) = worker.sources
    assert worker.adopt(source.queue, policy, caps or None).agreed
    assert worker.sort(source) == []


def test_sorted_by_key(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", *(message(f"a-{n}", fair_key="a") for n in range(20)))
    push(redis_db, "q", *(message(f"b-{n}", fair_key="b", fair_weight=2) for n in range(20)))
    worker = hired(caller, "w", by_key("q"))
    sorted_up(redis_db, worker, FAIR)
    found = explained(redis_db, "a-5")
    assert found.state == "sorted"
    assert found.found is not None
    assert (found.found.key, found.found.level, found.of_key) == ("a", 0, 5)
    # Six turns of a are twelve of b.
    assert found.of_level is not None
    assert abs(found.of_level - (5 + 12)) <= 1
    assert why(found) == {
        "key": f"about {found.of_level - 5} jobs of other keys have their turn before it",
        "oldest": "5 jobs of a are before it",
    }
    # It is what happens.
    taken = 0
    while json.loads(worker.take(1).deliveries[0].raw)["headers"]["id"] != "a-5":
        taken += 1
    assert abs(taken - found.of_level) <= 1


def test_not_sorted_yet(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", message("old", fair_key="a"))
    sorted_up(redis_db, hired(caller, "w", by_key("q")), FAIR)
    push(redis_db, "q", message("new", fair_key="b"))
    found = explained(redis_db, "new")
    assert (found.state, found.of_queue) == ("inbox", 1)
    assert why(found)["key"] == "it is not sorted yet, behind 1 jobs that are"


def test_its_key_is_full(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", *(message(f"a-{n}", fair_key="a") for n in range(3)))
    worker = hired(caller, "w", by_key("q"))
    sorted_up(redis_db, worker, FAIR, a=1)
    worker.take(1)
    found = explained(redis_db, "a-2")
    assert (found.state, found.of_key, found.of_level) == ("sorted", 1, None)
    assert why(found)["caps"] == "a is full: 1 in flight, and its cap is 1"


def test_its_group_runs(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", *(message(f"a-{n}", group_key="a") for n in range(2)))
    worker = hired(caller, "w", by_key("q"))
    sorted_up(redis_db, worker, GROUPS)
    worker.take(1)
    assert why(explained(redis_db, "a-1"))["caps"] == "a runs one at a time, and one is in flight"


def test_given_back(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", *map(message, "abc"))
    worker = hired(caller, "w", "q")
    tags = [delivery.tag for delivery in worker.take(2).deliveries]
    worker.restore(redis_db, *tags, started=True)
    found = explained(redis_db, "b")
    assert (found.state, found.of_queue) == ("given back", 1)
    assert found.found is not None
    assert found.found.deliveries == 1
    assert why(found)["oldest"] == "1 messages were given back before it"


def test_given_back_to_its_key(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", *(message(f"a-{n}", fair_key="a") for n in range(3)))
    worker = hired(caller, "w", by_key("q"))
    sorted_up(redis_db, worker, FAIR)
    worker.restore(redis_db, *(delivery.tag for delivery in worker.take(2).deliveries))
    assert [explained(redis_db, f"a-{n}").of_key for n in range(3)] == [0, 1, 2]
    assert explained(redis_db, "a-1").state == "given back"


def test_delayed(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", message("1"))
    worker = hired(caller, "w", "q")
    due = int(time.time()) + 60
    caller(worker.store.delay(worker.take_one(), "q", due))
    found = explained(redis_db, "1")
    assert found.state == "delayed"
    assert found.due == due
    assert 55 < (found.seconds or 0) < 61
    assert why(found)["visible"].startswith("its ETA has not come: due in ")


def test_in_line_for_a_limit(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", *map(message, "abc"))
    worker = hired(caller, "w", "q")
    for delivery in worker.take(3).deliveries:
        caller(worker.store.acquire(delivery.tag, Ask("task:key", 1, 300_000), TTL))
    assert explained(redis_db, "a").state == "in flight"
    found = explained(redis_db, "c")
    assert found.state == "in line"
    assert found.limit is not None
    assert vars(found.limit) == {"name": "task:key", "to": 1, "permits": 1, "before": 1}
    assert why(found)["limit"] == (
        "limit task:key: 1 of 1 permits are taken, and 1 jobs are before it in the line"
    )


def test_a_sorted_one_in_line(redis_db: redis.Redis, caller: Caller) -> None:
    push(redis_db, "q", *(message(f"j-{n}", fair_key="a:b") for n in range(2)))
    worker = hired(caller, "w", by_key("q"))
    sorted_up(redis_db, worker, FAIR)
    for delivery in worker.take(2).deliveries:
        caller(worker.store.acquire(delivery.tag, Ask("task:key", 1, 300_000), TTL))
    found = explained(redis_db, "j-1").found
    assert found is not None
    assert (found.key, found.level, found.what) == ("a:b", 0, "in_line")


# -- taken -------------------------------------------------------------------------------------------


def test_in_flight(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "w", "q")
    push(redis_db, "q", message("1"))
    hired(caller, "w", "q").take(1)
    found = explained(redis_db, "1")
    assert (found.state, found.reasons) == ("in flight", [])
    assert found.worker is not None
    assert as_json(found)["worker"] == "w@host"
    live(redis_db, "w", "q", age=60)
    assert as_json(explained(redis_db, "1"))["worker_alive"] is False


def test_held_by_a_stock_worker(redis_db: redis.Redis) -> None:
    raw = json.loads(message("1"))
    redis_db.hset("unacked", "a-tag", json.dumps([raw, "", "q"]))
    found = explained(redis_db, "1")
    assert found.state == "in flight"
    assert as_json(found)["worker"] is None


def test_dead_and_set_aside(redis_db: redis.Redis, caller: Caller) -> None:
    keys = Keys()
    fields = {"reason": "5 workers died", "list": "2", "key": "a", "weight": "", "worker": "w"}
    redis_db.xadd(keys.dead("q"), {**fields, "message": message("1")})
    found = explained(redis_db, "1")
    assert (found.state, found.found and found.found.why) == ("dead", "5 workers died")
    push(redis_db, "q", message("2"))
    worker = hired(caller, "w", "q")
    caller(worker.store.set_aside(worker.take_one(), "q", "unregistered task"))
    found = explained(redis_db, "2")
    assert (found.state, found.found and found.found.why) == ("set aside", "unregistered task")


def test_another_has_the_lease(redis_db: redis.Redis, caller: Caller) -> None:
    live(redis_db, "leader", "q")
    live(redis_db, "other", "q")
    push(redis_db, "q", *map(message, "ab"))
    leader = hired(caller, "leader", SourceKeys("q", None, LISTS, False, True))
    leader.take(1)
    said = why(explained(redis_db, "b"))["lease"]
    assert said.startswith("leader@host has the lease (term ")
    assert said.endswith("and the queue's one job is in flight there")
    live(redis_db, "leader", "q", age=60)
    redis_db.hdel(Keys().lease("q"), "tag")
    assert why(explained(redis_db, "b"))["lease"].endswith("shows no signs of life")


# -- searching ---------------------------------------------------------------------------------------


def test_unknown_is_said_only_if_everything_was_searched(redis_db: redis.Redis) -> None:
    push(redis_db, "q", *(message(f"job-{n}") for n in range(3000)))
    found = explained(redis_db, "nobody")
    assert found.state == "unknown"
    assert (found.searched.messages, found.searched.total) == (3000, 3000)
    found = explained(redis_db, "nobody", seconds=0)
    assert found.state == "not found"
    assert found.searched.messages < found.searched.total
    assert not found.searched.everything


def test_every_place_in_a_list_is_searched_once(redis_db: redis.Redis) -> None:
    push(redis_db, "q", *(message(f"job-{n}") for n in range(700)))
    for n in (0, 1, 3, 4, 17, 349, 350, 351, 500, 698, 699):
        assert explained(redis_db, f"job-{n}", seconds=None).of_queue == n
    for length in range(1, 200):
        place = find.Place("l", "x", "inbox", "q", 0, None, length)
        seen = [
            index
            for stretch in find.rounds([place], lambda _: None)
            for index in range(stretch.first, stretch.first + stretch.size)
        ]
        assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("limit", [10, 40, 1000])
def test_far_places_are_read_from_the_other_end(limit: int) -> None:
    place = find.Place("l", "x", "inbox", "q", 0, None, 900)
    seen = [
        899 - index if stretch.kind == "t" else index
        for stretch in find.rounds([place], lambda _: limit)
        for index in range(stretch.first, stretch.first + stretch.size)
    ]
    assert len(seen) == len(set(seen))
    assert set(seen) == set(range(min(limit, 900))) | set(range(max(0, 900 - find.TAIL), 900))


def test_the_tail_of_a_list_on_an_old_server(
    redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(redis_db, "q", *(message(f"job-{n}") for n in range(700)))
    monkeypatch.setattr(Search, "_reach_of", lambda *_: 20)
    assert explained(redis_db, "job-100").of_queue == 100
    assert explained(redis_db, "job-690").of_queue == 690
    assert explained(redis_db, "job-300").state == "not found"


def test_relatives_that_name_it_are_not_it(redis_db: redis.Redis) -> None:
    push(redis_db, "q", message("child", root_id="root", parent_id="root"), message("root-2"))
    found = explained(redis_db, "root")
    assert (found.state, found.near) == ("unknown", "root-2")
    push(redis_db, "q", message("root"))
    assert explained(redis_db, "root").of_queue == 2


@pytest.mark.parametrize("task", ['a "quoted" id', "käse", "a\\b", "x" * 500, "[%d]*"])
def test_any_id(redis_db: redis.Redis, task: str) -> None:
    push(redis_db, "q", message("1"), message(task))
    assert explained(redis_db, task).of_queue == 1


def test_protocol_1_has_its_id_in_the_properties(redis_db: redis.Redis) -> None:
    raw = json.loads(message("1"))
    del raw["headers"]["id"]
    push(redis_db, "q", json.dumps(raw).encode())
    assert explained(redis_db, "1").state == "inbox"


def test_large_messages_do_not_make_large_calls(redis_db: redis.Redis) -> None:
    body = "x" * 1_000_000
    push(redis_db, "q", *(message(f"{n}", body=body) for n in range(40)))
    redis_db.config_set("slowlog-log-slower-than", 30_000)
    redis_db.slowlog_reset()
    try:
        assert explained(redis_db, "20", seconds=None).of_queue == 20
        assert [
            entry for entry in redis_db.slowlog_get(100) if b"EVALSHA" in entry["command"]
        ] == []
    finally:
        redis_db.config_set("slowlog-log-slower-than", 10_000)


def test_a_key_prefix(redis_db: redis.Redis, caller: Caller) -> None:
    keys = Keys(prefix="p:")
    live(redis_db, "w", "q", keys=keys)
    push(redis_db, "p:q", *(message(f"a-{n}", fair_key="a") for n in range(3)))
    worker = hired(caller, "w", by_key("q"), keys=keys)
    sorted_up(redis_db, worker, FAIR)
    assert explained(redis_db, "a-2", keys=keys).of_key == 2
    assert explained(redis_db, "a-2").state == "unknown"


def test_a_hint_narrows_the_search(redis_db: redis.Redis, caller: Caller) -> None:
    push(redis_db, "q", *(message(f"{key}-1", fair_key=key) for key in "abc"))
    sorted_up(redis_db, hired(caller, "w", by_key("q")), FAIR)
    assert explained(redis_db, "b-1", key="b").state == "sorted"
    found = explained(redis_db, "b-1", key="c")
    assert (found.state, found.searched.total) == ("unknown", 1)


# -- real workers ------------------------------------------------------------------------------------


def reads(db: redis.Redis, queue: str) -> bool:
    """Whether a worker has said that it reads *queue*; it may introduce itself before it knows."""
    return any(queue in worker.queues for worker in reach.find_workers(Reach(db, Keys())))


def test_a_job_that_runs(lab: Lab, answer: Callable[..., Any]) -> None:
    worker = lab.worker("threads", queues=["a"], concurrency=1)
    wait_until(lambda: reads(lab.db, "a"), 10, "the worker is on record")
    late = lab.send("hold_late", "x", queue="a")
    lab.wait_started("x")
    found = answer("explain", late)
    assert (found["state"], found["worker"], found["running"]) == (
        "in flight",
        worker.hostname,
        True,
    )
    assert abs(found["since"] - time.time()) < 30
    early = lab.send("hold", "y", queue="a")
    assert answer("explain", early)["waits_because"] == [
        {"step": "slots", "text": f"all slots of {worker.hostname} are taken"}
    ]
    lab.open()
    lab.wait_started("y")
    lab.wait_settled()
    # Acknowledged: only its worker knows it.
    found = answer("explain", early)
    assert (found["state"], found["worker"]) == ("in flight", worker.hostname)
    lab.open()


def test_how_fast_its_queue_is(lab: Lab, answer: Callable[..., Any]) -> None:
    for n in range(60):
        lab.send("sleep_for", 0.05, queue="a", task_id=f"job-{n}")
    lab.worker("threads", queues=["a"], concurrency=1)
    wait_until(lambda: reads(lab.db, "a"), 10, "the worker is on record")
    found = answer("explain", "job-59")
    assert found["state"] == "inbox"
    rate = found["estimate"]["jobs_per_second"]
    assert 0 < rate < 60
    assert found["estimate"]["seconds"] == pytest.approx(
        (found["before"]["of_queue"] + 1) / rate, 0.1
    )
