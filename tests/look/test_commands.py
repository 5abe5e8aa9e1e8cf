"""`status`, `tenants`, `top`, `explain`: what they print, as text and JSON, their exit codes, and wrong names."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.look.shares import KeySeen, before, due, got
from celery_strategies.store.keys import Keys
from tests.store.tools import Caller, SourceKeys, Worker, message, push
from tests.support.waiting import wait_until
from tests.worker.lab import Lab

FAIR = Policy("fair", False, "fair_key", "fair_weight")
Run = Callable[..., subprocess.CompletedProcess[str]]
Answer = Callable[..., Any]


def worker_of(caller: Caller, queue: str = "jobs", **caps: int) -> Worker:
    """Return a worker that has sorted what waits in *queue*."""
    source = SourceKeys(queue, None, tuple(range(10)), True)
    worker = Worker(caller, "w", source)
    worker.join()
    worker.now = ""  # type: ignore[assignment]  # the server's clock
    assert worker.adopt(queue, FAIR, caps or None).agreed
    worker.sort(source)
    return worker


def fill(db: redis.Redis, **counts: int) -> None:
    for key, number in counts.items():
        push(db, "jobs", *(message(f"{key}-{n}", fair_key=key) for n in range(number)))


def readable(done: subprocess.CompletedProcess[str]) -> str:
    """Return what was printed: within 80 columns, and without colour."""
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    return done.stdout


# -- status ------------------------------------------------------------------------------------------


def test_status_of_an_empty_redis(command: Run, answer: Answer) -> None:
    assert "No strategies workers." in command("status").stdout
    data = answer("status")
    assert [queue["queue"] for queue in data["queues"]] == ["celery"]
    assert data["workers"] == []


def test_status_counts_every_place(
    redis_db: redis.Redis, caller: Caller, answer: Answer, command: Run
) -> None:
    keys = Keys()
    fill(redis_db, a=5, b=2)
    worker = worker_of(caller, a=1)
    worker.take(1)
    push(redis_db, keys.inbox("jobs", 3), message("low"))
    redis_db.xadd(keys.dead("jobs"), {"message": "x"})
    redis_db.xadd(keys.set_aside("jobs"), {"message": "x"})
    redis_db.zadd(keys.delayed("jobs"), {"0000000000000001:0:x": 4e15})
    data = answer("status", "jobs")
    (jobs,) = data["queues"]
    assert jobs["places"] == {
        "inbox": 1,
        "sorted": 2,
        "full": 4,
        "given_back": 0,
        "delayed": 1,
        "in_line": 0,
        "unsorting": 0,
        "set_aside": 1,
        "dead": 1,
    }
    assert (jobs["waiting"], jobs["ready"]) == (8, 3)
    assert jobs["levels"]["3"] == {"inbox": 1, "sorted": 0, "given_back": 0}
    assert jobs["policy"]["words"] == "fair share"
    assert jobs["policy"]["full_keys"] == 1
    assert jobs["oldest_age"] is None
    text = readable(command("status"))
    assert "jobs: fair share, key in fair_key, caps, 1 keys full" in text


def test_status_finds_queues_of_stock_workers(redis_db: redis.Redis, answer: Answer) -> None:
    redis_db.sadd("_kombu.binding.shop", "shop\x06\x16\x06\x16shop")
    redis_db.sadd("_kombu.binding.celery.pidbox", "\x06\x16\x06\x16w@h.celery.pidbox")
    redis_db.sadd("_kombu.binding.celeryev", "worker.#\x06\x16\x06\x16celeryev.x")
    push(redis_db, "shop", message("1"))
    assert [queue["queue"] for queue in answer("status")["queues"]] == ["celery", "shop"]
    assert answer("explain", "1")["queue"] == "shop"


def test_status_shows_workers_and_leases(lab: Lab, answer: Answer, command: Run) -> None:
    settings = {"strategies_single_active_consumer": ["a"]}
    worker = lab.worker("threads", queues=["a", "b"], concurrency=2, settings=settings)
    wait_until(lambda: lab.db.hget(lab.keys.lease("a"), "worker"), 20, "it leads")
    lab.send("hold_late", "x", queue="a")
    lab.wait_started("x")
    # It may introduce itself before it has been told all its queues.
    wait_until(lambda: len(answer("status")["workers"][0]["queues"]) == 2, 20, "it is on record")
    data = answer("status")
    (seen,) = data["workers"]
    assert (seen["worker"], seen["alive"], seen["strategy"]) == (worker.hostname, True, "priority")
    assert (seen["queues"], seen["held"]) == (["a", "b"], 1)
    lease = next(queue["lease"] for queue in data["queues"] if queue["queue"] == "a")
    assert lease["job_in_flight"]
    assert 0 < lease["for_seconds"] <= 10
    text = readable(command("status"))
    assert f"a: single active, led by {worker.hostname} (term " in text.replace("\n", " ")
    lab.open()


def test_a_key_of_a_wrong_type_is_noted(
    redis_db: redis.Redis, answer: Answer, command: Run
) -> None:
    redis_db.set(Keys().delayed("celery"), "x")
    push(redis_db, "celery", message("1"))
    assert "WRONGTYPE" in answer("status")["notes"][0]
    assert "Note: ZCARD" in command("status").stdout
    assert answer("explain", "1")["state"] == "inbox"


def test_a_prefix(redis_db: redis.Redis, answer: Answer) -> None:
    settings = {"broker_transport_options": {"global_keyprefix": "p:"}}
    redis_db.sadd("p:_kombu.binding.shop", "shop\x06\x16\x06\x16shop")
    push(redis_db, "p:shop", message("1"))
    redis_db.xadd("p:strategies:{odd: {name}}:dead", {"message": "x", "list": "0", "reason": "r"})
    data = answer("status", settings=settings)
    found = {queue["queue"]: queue["waiting"] for queue in data["queues"]}
    assert found == {"celery": 0, "odd: {name}": 0, "shop": 1}
    assert answer("explain", "1", settings=settings)["queue"] == "shop"


# -- tenants -----------------------------------------------------------------------------------------


def test_tenants(redis_db: redis.Redis, caller: Caller, answer: Answer, command: Run) -> None:
    fill(redis_db, acme=6, zed=2)
    push(redis_db, "jobs", *(message(f"h-{n}", fair_key="heavy", fair_weight=3) for n in range(4)))
    push(redis_db, "jobs", message("nobody"))
    worker_of(caller, zed=1).take(4)
    rows = {row["key"]: row for row in answer("tenants", "jobs")["tenants"]}
    assert sum(row["backlog"] for row in rows.values()) == 13 - 4
    assert sum(row["in_flight"] for row in rows.values()) == 4
    assert rows["heavy"]["weight"] == 3
    assert rows["zed"]["cap"] == 1
    assert sum(row["share_due"] for row in rows.values()) == pytest.approx(1, abs=1e-4)
    text = readable(command("tenants", "jobs", "--limit", "2"))
    assert "others)" in text
    assert text.startswith("jobs: fair share; 4 keys\n")
    (row,) = answer("tenants", "jobs", "-k", "acme")["tenants"]
    assert row["key"] == "acme"


def test_share_got_is_what_was_taken(lab: Lab, answer: Answer) -> None:
    options = {"strategies_fair_share": True}
    for n in range(200):
        for key in "ab":
            weight = 3 if key == "a" else 1
            headers = {"fair_key": key, "fair_weight": weight}
            lab.send("sleep_for", 0.01, queue="jobs", headers=headers, task_id=f"{key}-{n}")
    lab.worker("threads", queues=["jobs"], concurrency=1, settings=options)
    wait_until(lambda: lab.db.exists(lab.keys.policy("jobs")), 20, "it sorts")
    data = answer("tenants", "jobs", "--seconds", "1")
    rows = {row["key"]: row for row in data["tenants"]}
    assert 0.9 < data["window"] < 5
    assert rows["a"]["share_got"] == pytest.approx(0.75, abs=0.06)
    assert rows["a"]["share_due"] == 0.75
    assert 20 < rows["a"]["jobs_got"] + rows["b"]["jobs_got"] < 120 * data["window"]


def test_tenants_of_a_queue_that_is_not_sorted(redis_db: redis.Redis, command: Run) -> None:
    push(redis_db, "celery", message("1"))
    said = command("tenants", "celery").stdout.replace("\n", " ")
    assert "celery: not sorted by key; 0 keys; 1 messages are not sorted" in said


# -- top ---------------------------------------------------------------------------------------------


def test_top_prints_frames(redis_db: redis.Redis, caller: Caller, command: Run) -> None:
    fill(redis_db, acme=8, zed=4)
    worker_of(caller).take(2)
    text = readable(command("top", "-n", "2", "--interval", "0.1"))
    assert text.count("Tenants of jobs") == 2
    assert "acme     | ####" in text
    frames = [
        json.loads(line)
        for line in command(
            "top", "jobs", "-n", "2", "--interval", "0.1", "--json"
        ).stdout.splitlines()
    ]
    assert [frame["queues"][0]["queue"] for frame in frames] == ["jobs", "jobs"]
    assert {row["key"] for row in frames[1]["queues"][0]["tenants"]} == {"acme", "zed"}


# -- what is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "jbos"], "queue 'jbos' does not exist; did you mean 'jobs'?"),
        (["tenants", "job"], "queue 'job' does not exist; did you mean 'jobs'?"),
        (["top", "xyz", "-n", "1"], "queue 'xyz' does not exist; known: celery, jobs"),
        (["explain", "acme-0", "-q", "job"], "queue 'job' does not exist; did you mean 'jobs'?"),
        (["tenants", "jobs", "-k", "acne"], "key 'acne' does not exist; did you mean 'acme'?"),
        (["explain", "x", "-q", "jobs", "-k", "acne"], "did you mean 'acme'?"),
        (["explain", "amce-1"], "task amce-1 is unknown; did you mean 'acme-1'?"),
        (["explain", "acme-"], "task acme- is unknown; did you mean 'acme-"),
        (["explain", "no such"], "task no such is unknown. Searched: all queues (2 messages"),
    ],
)
def test_wrong_names(
    redis_db: redis.Redis, caller: Caller, command: Run, words: list[str], said: str
) -> None:
    fill(redis_db, acme=2)
    worker_of(caller)
    done = command(*words, code=1)
    assert said in done.stderr
    assert done.stdout == ""


def test_an_unknown_task_as_json(redis_db: redis.Redis, answer: Answer) -> None:
    push(redis_db, "celery", message("job-1"))
    found = answer("explain", "jb-1", code=1)
    assert (found["state"], found["did_you_mean"]) == ("unknown", "job-1")
    assert found["searched"]["everything"]


def test_usage(command: Run) -> None:
    command("explain", "x", "-k", "key", code=2)
    command("tenants", code=2)
    command("status", "--nonsense", code=2)


def test_no_broker(command: Run) -> None:
    options = {"broker_url": "redis://127.0.0.1:1/0"}
    for words in (["status"], ["tenants", "q"], ["top", "-n", "1"], ["explain", "x"]):
        assert "cannot read from the broker" in command(*words, code=1, settings=options).stderr


# -- shares ------------------------------------------------------------------------------------------


def key(name: str, tag: float | None, jobs: int = 10, weight: float = 1, level: int = 0) -> KeySeen:
    return KeySeen(name, level, tag, jobs, 0, 0, weight, None)


def test_due_is_by_weight_among_the_keys_of_the_highest_level_that_may_run() -> None:
    keys = [key("full", None), key("a", 1, weight=3), key("b", 1), key("low", 1, level=1)]
    assert due(keys) == {"a": 0.75, "b": 0.25}
    assert due([key("full", None), key("low", 1, level=1)]) == {"low": 1}
    assert due([]) == {}


def test_got_is_how_far_the_tags_went() -> None:
    old = [key("a", 1.0, weight=2), key("gone", 1.0, jobs=3), key("idle", 9.0)]
    new = [key("a", 3.0, weight=2), key("new", 3.0), key("idle", 9.0)]
    assert got(old, new, {0: 1.0}) == {"a": 4, "gone": 3, "idle": 0, "new": 1}


def test_before_counts_the_turns_of_others() -> None:
    mine = key("m", 1.0)
    assert before("fair", mine, 0, [mine, key("later", 1.5), key("sooner", 0.5)]) == 1
    assert before("fair", mine, 3, [key("heavy", 1.0, jobs=99, weight=2)]) == 7
    assert before("fair", mine, 3, [key("short", 1.0, jobs=2)]) == 2
    assert before("turn", mine, 2, [key("a", 0.5), key("b", 2.0), key("c", 0.5, jobs=1)]) == 6
    assert before("age", mine, 2, [key("a", 0.5)]) is None
