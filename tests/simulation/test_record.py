"""`record`: what is seen in Redis and in events becomes a trace that replays in `simulate`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import Result

from celery_strategies import settings
from celery_strategies.cli.recorder import Recording, Survey, settings_of
from celery_strategies.core.policy import Policy
from celery_strategies.core.strategies import Strategy
from celery_strategies.simulation.trace import parse
from celery_strategies.store.keys import Keys
from tests.conftest import WorkerFactory
from tests.store.broker import RedisBroker
from tests.store.tools import Caller, message, push
from tests.support.waiting import wait_until
from tests.worker.lab import Lab

FAIR = Policy("fair", False, "fair_key", "fair_weight")


def recording(*queues: str) -> Recording:
    return Recording(100.0, list(queues or ("q",)), "fair_key", "fair_weight")


def event(kind: str, uuid: str, at: float, **more: Any) -> dict[str, Any]:
    return {"type": kind, "uuid": uuid, "timestamp": at, **more}


# -- events ----------------------------------------------------------------------------------------


def test_events_alone_are_enough_where_producers_send_them() -> None:
    found = recording()
    found.event(
        event(
            "task-sent", "1", 101, queue="q", name="t", fair_key="acme", fair_weight=3, priority=2
        )
    )
    found.event(event("task-received", "1", 101.5))
    found.event(event("task-started", "1", 102))
    found.event(event("task-succeeded", "1", 104, runtime=1.75))
    found.event(event("worker-heartbeat", "x", 104))
    trace, facts = found.trace(10)
    (entry,) = trace.entries
    assert (entry.queue, entry.at, entry.run, entry.level) == ("q", 1.0, 1.75, 2)
    assert (entry.key, entry.weight, entry.name) == ("acme", 3.0, "t")
    assert facts == {"seconds": 10, "jobs": 1, "guessed_queue": 0, "guessed_run": 0, "left_out": 0}


def test_a_failed_job_ran_from_its_start_to_its_end() -> None:
    found = recording()
    found.message(message("1", fair_key="a"), "q", 0, 101)
    found.event(event("task-started", "1", 102))
    found.event(event("task-failed", "1", 105))
    assert [entry.run for entry in found.trace(9)[0].entries] == [3]


def test_what_is_not_known_is_guessed_and_counted() -> None:
    found = recording()
    found.message(message("1"), "q", 0, 101)
    found.event(event("task-succeeded", "1", 102, runtime=0.5))
    found.message(message("2"), "q", 0, 101)
    # Too quick for a look, from a producer without events; then one of a task that nobody has seen.
    found.event(event("task-received", "3", 103, name="tasks.add"))
    found.event(event("task-received", "4", 103, name="tasks.other"))
    found.event(event("task-succeeded", "5", 103, runtime=1))
    found.message(b"nonsense", "q", 0, 101)
    trace, facts = found.trace(9)
    assert [(entry.at, entry.run) for entry in trace.entries] == [(1, 0.5), (1, 0.5), (3, 0.5)]
    assert facts == {"seconds": 9, "jobs": 3, "guessed_queue": 1, "guessed_run": 2, "left_out": 1}


def test_bad_tags_are_read_as_a_worker_reads_them() -> None:
    found = recording()
    found.message(message("1", fair_key=["no"], fair_weight=-1), "q", 0, 100)
    found.message(message("2", fair_key=42, fair_weight=1e9), "q", 0, 100)
    assert [(e.key, e.weight) for e in found.trace(1)[0].entries] == [("", None), ("42", 1e6)]


# -- Redis -----------------------------------------------------------------------------------------


class Watched:
    """A client that counts the calls, and the bytes of their largest reply."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.largest = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def call(*args: Any, **options: Any) -> Any:
            found = method(*args, **options)
            self.largest = max(self.largest, len(repr(found)) if name != "pipeline" else 0)
            return found

        return call


def surveyed(client: Any, found: Recording, backlog: int = 10_000) -> Survey:
    survey = Survey(client, Keys(), found, backlog)
    survey.start(100.0)
    return survey


def test_a_plain_backlog_and_what_comes_after_it(redis_db: redis.Redis) -> None:
    for n in range(120):
        push(redis_db, Keys().inbox("q", n % 2), message(f"old-{n}"))
    found = recording("q", "empty")
    survey = surveyed(redis_db, found)
    push(redis_db, "q", *(message(f"new-{n}", fair_key="k") for n in range(60)))
    survey.look(101.0)
    survey.look(102.0)
    entries = found.trace(9)[0].entries
    assert [entry.at for entry in entries] == [0.0] * 120 + [1.0] * 60
    assert [entry.level for entry in entries[:120]] == [0] * 60 + [1] * 60
    assert {entry.key for entry in entries[120:]} == {"k"}
    assert list(found.jobs)[:2] == ["old-0", "old-2"]


def test_a_sorted_backlog_comes_in_the_order_of_its_sorting(
    redis_db: redis.Redis, caller: Caller
) -> None:
    broker = RedisBroker(redis_db, caller, Strategy.PRIORITY)
    broker.set_sources([("q", None, FAIR)])
    broker.set_cap("q", "b", 1)
    jobs = [("j1", "a"), ("j2", "b"), ("j3", "a"), ("j4", ""), ("j5", "b"), ("j6", "c:d")]
    for job, key in jobs:
        broker.push("q", job, 0, key, 2.0)
    # One is held, one comes back, and a full key still waits.
    assert [taken.job for taken in broker.take(2)] == ["j1", "j2"]
    broker.give_back("j1")
    found = recording()
    surveyed(redis_db, found)
    trace, facts = found.trace(1)
    named = {id(seen): name for name, seen in found.jobs.items()}
    order = sorted(found.jobs.values(), key=lambda seen: seen.backlog or (9e9, 0))
    assert [named[id(seen)] for seen in order] == ["j2", "j1", "j3", "j4", "j5", "j6"]
    assert [entry.key for entry in trace.entries] == ["b", "a", "a", "", "b", "c:d"]
    assert {entry.weight for entry in trace.entries} == {2.0}
    assert facts["left_out"] == 0


def test_a_backlog_beyond_the_limit_is_counted(redis_db: redis.Redis) -> None:
    push(redis_db, "q", *(message(str(n)) for n in range(30)))
    found = recording()
    survey = surveyed(redis_db, found, backlog=10)
    survey.look(101.0)
    assert list(found.jobs) == [str(n) for n in range(10)]
    assert found.trace(1)[1]["left_out"] == 20


def test_what_is_held_is_seen_though_its_list_never_showed_it(
    redis_db: redis.Redis, caller: Caller
) -> None:
    broker = RedisBroker(redis_db, caller, Strategy.PRIORITY)
    broker.set_sources([("q", None)])
    found = recording()
    survey = surveyed(redis_db, found)
    broker.push("q", "quick")
    broker.take(1)
    survey.look(101.0)
    assert [(seen.queue, seen.at) for seen in found.jobs.values()] == [("q", 101.0)]


def test_large_messages_make_small_calls(redis_db: redis.Redis) -> None:
    size = 100_000
    push(redis_db, "q", *(message(str(n), body="x" * size) for n in range(40)))
    watched = Watched(redis_db)
    found = recording()
    surveyed(watched, found)
    assert len(found.jobs) == 40
    assert watched.largest < 4 * size


def test_the_settings_of_the_app_go_into_the_trace() -> None:
    loaded = settings.load(
        {
            "strategies_ranks": {"q": 1, "other": 2},
            "strategies_fair_share": "proj.tenancy:fair_share",
            "strategies_max_in_flight": {"*": 5},
            "strategies_priority_levels": 3,
        }
    )
    found = settings_of(loaded, ["q"])
    assert json.loads(json.dumps(found)) == {
        "strategies_strategy": "priority",
        "strategies_ranks": {"q": 1},
        "strategies_priority_levels": 3,
        "strategies_fair_share": True,
        "strategies_fair_share_memory": "shared",
        "strategies_max_in_flight": {"*": 5},
    }
    assert settings.load(found).policy() == loaded.policy()


# -- a live system ---------------------------------------------------------------------------------


@pytest.fixture
def lab(
    run: Callable[..., Result],
    broker_url: str,
    redis_db: redis.Redis,
    worker_factory: WorkerFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    monkeypatch.setenv("CELERY_BROKER_URL", broker_url)
    lab = Lab(
        broker_url, redis_db, worker_factory, strategies_fair_share=True, task_send_sent_event=True
    )
    yield lab
    lab.close()


def test_a_recorded_trace_replays_in_the_order_in_which_it_ran(
    lab: Lab, run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "sim_live.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('live', broker={lab.url!r})\n"
        "app.conf.update(strategies_fair_share=True, strategies_strategy='max_len')\n"
    )
    labels = {"whale": 9, "minnow": 2, "": 1}
    for key, count in labels.items():
        headers = {"fair_key": key} if key else {}
        lab.fill("jobs", [f"{key or 'none'}-{n}" for n in range(count)], headers=headers)
    lab.fill("alerts", ["alert-0", "alert-1"])
    done: list[Result] = []
    words = ("record", "-q", "jobs", "-q", "alerts", "--seconds", "8", "-o", "trace.json")
    thread = threading.Thread(
        target=lambda: done.append(run("-A", "sim_live", "strategies", *words))
    )
    thread.start()
    wait_until(lambda: b"hscan" in _commands(lab.db), 20, "the backlog has been read")
    conf = {"strategies_fair_share": True, "strategies_strategy": "max_len"}
    lab.worker("threads", queues=["jobs", "alerts"], concurrency=1, settings=conf, args=["-E"])
    ran = lab.wait_count(14)
    lab.send("record", "late-0", queue="alerts")
    lab.wait_ended("late-0")
    thread.join(30)
    assert done
    trace = parse((tmp_path / "trace.json").read_text())
    assert trace.queues == ["jobs", "alerts"]
    assert len(trace.entries) == 15
    assert all(entry.run is not None for entry in trace.entries)
    late = trace.entries[-1]
    assert late.at > 0
    assert late.queue == "alerts"
    shown = json.loads(run("strategies", "simulate", "--trace", "trace.json", "--json").stdout)
    assert [pick["key"] or pick["queue"] for pick in shown["picks"]] == [
        {"none": "jobs", "alert": "alerts", "late": "alerts"}.get(name, name)
        for name in (label.partition("-")[0] for label in [*ran, "late-0"])
    ]


def _commands(client: redis.Redis) -> set[bytes]:
    return {name.removeprefix("cmdstat_").encode() for name in client.info("commandstats")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "x"], "'x' is not a valid float"),
        (["-o", "no/where.json", "--seconds", "0", "-q", "q"], "-o no/where.json: No such file"),
    ],
)
def test_what_is_wrong_is_said(
    lab: Lab, run: Callable[..., Result], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "sim_wrong.py").write_text(
        f"from celery import Celery\napp = Celery('live', broker={lab.url!r})\n"
    )
    code = 2 if "float" in said else 1
    done = run("-A", "sim_wrong", "strategies", "record", *words, code=code)
    assert said in done.output


def test_events_that_end_before_their_time_are_told(
    lab: Lab, run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "sim_cut.py").write_text(
        f"from celery import Celery\napp = Celery('cut', broker={lab.url!r})\n"
    )
    done: list[Result] = []
    words = ("record", "-q", "a", "--seconds", "4", "-o", "cut.json")
    thread = threading.Thread(
        target=lambda: done.append(run("-A", "sim_cut", "strategies", *words))
    )
    thread.start()
    wait_until(lambda: lab.db.pubsub_numpat() or lab.db.pubsub_channels(), 20, "it listens")
    wait_until(lambda: b"hscan" in _commands(lab.db), 20, "the backlog has been read")
    lab.db.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    thread.join(30)
    assert "Events could not be received to the end: " in done[0].output
    assert "Recorded: " in done[0].output


def test_without_redis_it_says_so(run: Callable[..., Result]) -> None:
    done = run("strategies", "record", "--seconds", "0", code=1)
    assert "Error: cannot read from the broker" in done.output
