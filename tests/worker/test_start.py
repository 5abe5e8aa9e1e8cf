"""How a strategies worker starts, and how it refuses to."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import WorkerFactory
from tests.support.apps import ended
from tests.support.waiting import wait_until
from tests.support.workers import Worker, celery, celery_command, clean_environment, job, publish
from tests.worker.lab import CONSUMER, Lab

#: A project that has never heard of us.
INNOCENT = """
import os
from celery import Celery
import redis
app = Celery("proj", broker=os.environ["TEST_BROKER_URL"])
app.conf.update(task_ignore_result=True, {settings})

@app.task
def note(label):
    redis.Redis.from_url(os.environ["TEST_BROKER_URL"]).rpush("noted", label)
"""


def refused(*arguments: str, url: str, settings: dict[str, Any] | None = None) -> str:
    """Start a worker that cannot start; return its one error line, without the prefix."""
    done = celery(
        "worker",
        "--without-mingle",
        "--without-gossip",
        *(arguments or ("-P", "strategies")),
        broker_url=url,
        settings=settings,
        check=False,
        timeout=40,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if re.search(r"\bError: |ERROR|CRITICAL", line)]
    assert len(errors) == 1, output
    assert errors[0].startswith("Error: ")
    return errors[0].removeprefix("Error: ")


# -- from a clean shell ------------------------------------------------------------------------


def innocent(worker_factory: WorkerFactory, settings: str = "", **options: Any) -> Worker:
    """Start a worker of the project that never imports us."""
    options.setdefault("pool", "strategies")
    return worker_factory(
        app="proj", project={"proj.py": INNOCENT.format(settings=settings)}, **options
    )


def test_case_50_help_lists_the_pool_and_the_options() -> None:
    text = re.sub(r"\s+", " ", celery("worker", "--help", app=None).stdout)
    assert re.search(r"--pool \[[^]]*\bstrategies\b[^]]*\]", text)
    assert "--strategy NAME" in text
    assert "--rank QUEUE=N" in text
    assert "priority, round_robin, max_len, min_len" in text


@pytest.mark.parametrize("way", ["-P strategies", "worker_pool", "worker_consumer"])
def test_case_50_a_clean_shell_is_enough(
    worker_factory: WorkerFactory, broker_url: str, redis_db: redis.Redis, way: str
) -> None:
    options: dict[str, Any] = {}
    settings = ""
    if way == "worker_pool":
        options, settings = {"pool": None}, "worker_pool='strategies'"
    elif way == "worker_consumer":
        options, settings = {"pool": "threads"}, f"worker_consumer={CONSUMER!r}"
    publish(broker_url, [job("proj.note", "hello", queue="celery")])
    worker = innocent(worker_factory, settings, **options)
    wait_until(lambda: redis_db.lrange("noted", 0, -1) == [b"hello"], description="it ran")
    assert "Reading by strategy priority; celery  rank unset" in worker.log()


def test_a_stock_pool_without_our_consumer_stays_stock(
    worker_factory: WorkerFactory, broker_url: str, redis_db: redis.Redis
) -> None:
    """Importing us changes nothing of a worker that did not ask for it."""
    publish(broker_url, [job("proj.note", "hello", queue="celery")])
    worker = innocent(worker_factory, "imports=('celery_strategies',)", pool="prefork")
    wait_until(lambda: redis_db.lrange("noted", 0, -1) == [b"hello"], description="it ran")
    assert "Reading by" not in worker.log()
    assert worker.stop() == 0
    assert not redis_db.keys("strategies:*")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_the_inner_pool_is_the_one_that_was_asked_for(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool)
    module = {"threads": "thread"}.get(pool, pool)
    assert re.search(rf"concurrency: +1 \({module}\)", worker.log())
    implementation = lab.control("stats", worker)["pool"]["implementation"]
    assert module in implementation


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["redis-cluster://127.0.0.1:7000/0", "rediscluster://127.0.0.1:7000", "rediss-cluster://h:1"],
)
def test_case_14_a_cluster_url_is_refused_in_one_line(url: str) -> None:
    line = refused(url=url)
    assert "Redis Cluster is not supported" in line
    assert "redis://" in line


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("amqp://guest:secret@127.0.0.1:1//", "amqp"),
        ("pyamqp://guest:secret@127.0.0.1:1//", "amqp"),
        ("memory://", "memory"),
        ("filesystem://", "filesystem"),
    ],
)
@pytest.mark.parametrize("way", ["pool", "consumer"])
def test_case_51_another_broker_is_refused_in_one_line(url: str, name: str, way: str) -> None:
    if way == "pool":
        line = refused(url=url)
    else:
        line = refused("-P", "threads", url=url, settings={"worker_consumer": CONSUMER})
    assert repr(name) in line
    assert "redis://" in line
    assert "secret" not in line


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"strategies_strategy": "fastest"},
        "strategies_strategy = 'fastest': must be one of priority, round_robin, max_len, min_len",
    ),
    (
        {"strategies_ranks": {"a": "x"}},
        "strategies_ranks['a'] = 'x': must be an integer (lower goes first)",
    ),
    (
        {"strategies_priority_levels": 11},
        (
            "strategies_priority_levels = 11: must be an integer from 1 to 10, or a dict of queue "
            "names and such integers"
        ),
    ),
    (
        {"strategies_priority_levels": {"a": 0}},
        "strategies_priority_levels['a'] = 0: must be an integer from 1 to 10",
    ),
    (
        {"strategies_default_priority": 10},
        "strategies_default_priority = 10: must be an integer from 0 (highest) to 9",
    ),
    (
        {"strategies_default_priority": 3, "strategies_priority_levels": 3},
        "strategies_default_priority = 3: must be below the number of levels of every queue, which is 3",
    ),
    (
        {"strategies_pool": "fork"},
        "strategies_pool = 'fork': must be one of prefork, threads, solo, gevent, eventlet",
    ),
    ({"strategies_read_ahead": -1}, "strategies_read_ahead = -1: must be an integer, 0 or more"),
    (
        {"strategies_polling_interval": 0},
        "strategies_polling_interval = 0: must be a number of seconds above 0, at most 60",
    ),
    (
        {"strategies_rank": {"a": 1}},
        "strategies_rank is not a setting; did you mean 'strategies_ranks'?",
    ),
    (
        {"CELERY_STRATEGIES_READAHEAD": 1},
        "CELERY_STRATEGIES_READAHEAD is not a setting; did you mean 'CELERY_STRATEGIES_READ_AHEAD'?",
    ),
    (
        {"strategies_read_ahead": 1, "STRATEGIES_READ_AHEAD": 2},
        (
            "strategies_read_ahead = 1 and STRATEGIES_READ_AHEAD = 2 are two spellings of one setting: "
            "set only one of them, or both to the same value"
        ),
    ),
]


@pytest.mark.parametrize(
    ("settings", "message"), WRONG, ids=lambda v: ",".join(v) if isinstance(v, dict) else ""
)
def test_a_wrong_setting_stops_the_worker_with_one_line(
    broker_url: str, settings: dict[str, Any], message: str
) -> None:
    assert refused(url=broker_url, settings=settings) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--strategy", "fastest"],
            "--strategy = 'fastest': must be one of priority, round_robin, max_len, min_len",
        ),
        (
            ["--rank", "a"],
            "--rank = 'a': must be QUEUE=N, where N is an integer (lower goes first)",
        ),
        (
            ["--rank", "a=high"],
            "--rank = 'a=high': must be QUEUE=N, where N is an integer (lower goes first)",
        ),
    ],
)
def test_a_wrong_option_stops_the_worker_with_one_line(
    broker_url: str, arguments: list[str], message: str
) -> None:
    assert refused("-P", "strategies", *arguments, url=broker_url) == message


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_green_inner_pool_without_patching_names_the_way(broker_url: str, pool: str) -> None:
    line = refused(url=broker_url, settings={"strategies_pool": pool})
    assert line.startswith(f"strategies_pool = {pool!r}: ")
    assert f"-P {pool}" in line
    assert f"worker_consumer = {CONSUMER!r}" in line


# -- spellings ---------------------------------------------------------------------------------

DJANGO = """
import os
from celery import Celery
app = Celery("proj")
app.config_from_object("settings", namespace="CELERY")
from tests.support.apps import Recorder, _add_plain_tasks
_add_plain_tasks(app, Recorder(os.environ["TEST_BROKER_URL"]))
"""
SPELLINGS = {
    "django": (
        'namespace="CELERY"',
        """
import os
CELERY_BROKER_URL = os.environ["TEST_BROKER_URL"]
CELERY_IMPORTS = ("celery_strategies",)
CELERY_TASK_IGNORE_RESULT = True
CELERY_STRATEGIES_STRATEGY = "round_robin"
CELERY_STRATEGIES_RANKS = {"b": 1}
CELERY_STRATEGIES_POOL = "threads"
DEBUG = True
""",
    ),
    "lower case": (
        "",
        """
import os
broker_url = os.environ["TEST_BROKER_URL"]
imports = ("celery_strategies",)
task_ignore_result = True
strategies_strategy = "round_robin"
strategies_ranks = {"b": 1}
strategies_pool = "threads"
""",
    ),
    "lower case beside old names": (
        "",
        """
import os
BROKER_URL = os.environ["TEST_BROKER_URL"]
CELERY_IMPORTS = ("celery_strategies",)
CELERY_IGNORE_RESULT = True
strategies_strategy = "round_robin"
strategies_ranks = {"b": 1}
strategies_pool = "threads"
""",
    ),
    "old names": (
        "",
        """
import os
BROKER_URL = os.environ["TEST_BROKER_URL"]
CELERY_IMPORTS = ("celery_strategies",)
CELERY_IGNORE_RESULT = True
STRATEGIES_STRATEGY = "round_robin"
CELERY_STRATEGIES_RANKS = {"b": 1}
STRATEGIES_POOL = "threads"
""",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_case_52_every_spelling_of_the_settings(lab: Lab, spelling: str) -> None:
    namespace, settings = SPELLINGS[spelling]
    project = DJANGO.replace(', namespace="CELERY"', f", {namespace}" if namespace else "")
    for queue in "ab":
        lab.fill(queue, [f"{queue}{i}" for i in range(2)])
    worker = lab.worker(
        queues="ab", app="proj", project={"proj.py": project, "settings.py": settings}
    )
    assert lab.wait_count(4) == "b0 a0 b1 a1".split()
    log = worker.log()
    assert "Reading by strategy round_robin; b  rank 1; a  rank unset" in log
    assert re.search(r"concurrency: +1 \(thread\)", log)


# -- beside the worker -------------------------------------------------------------------------

BEAT = """
from tests.worker.project import app
app.conf.beat_schedule = {"tick": {"task": "test.record", "args": ["tick"], "schedule": 0.3}}
"""


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_embedded_beat(lab: Lab, pool: str) -> None:
    worker = lab.worker(pool, app="proj", project={"proj.py": BEAT}, args=["-B"])
    wait_until(lambda: len(lab.ended()) >= 3, description="three ticks ran")
    assert worker.stop() == 0


def test_celery_multi_starts_and_stops_nodes(lab: Lab, tmp_path: Path) -> None:
    env = {
        "TEST_BROKER_URL": lab.url,
        "TEST_SETTINGS": json.dumps({"strategies_pool": "threads"}),
        "C_FORCE_ROOT": "1",
    }
    places = [f"--pidfile={tmp_path}/%n.pid", f"--logfile={tmp_path}/%n.log"]

    def multi(verb: str, *arguments: str) -> None:
        _run("multi", verb, "one", "two", *places, *arguments, env=env, folder=tmp_path)

    def running() -> list[int]:
        pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
        return [pid for pid in pids if Path("/proc", str(pid)).exists()]

    lab.fill("a", ["before"])
    multi(
        "start",
        "-A",
        "tests.worker.project",
        "-P",
        "strategies",
        "-c",
        "1",
        "-Q",
        "a",
        "-l",
        "INFO",
    )
    try:
        wait_until(lambda: len(running()) == 2, 30, "two nodes run")
        lab.wait_ended("before")
        logs = [file.read_text() for file in tmp_path.glob("*.log")]
        wait_until(
            lambda: all(
                "Reading by strategy priority; a  rank unset" in file.read_text()
                for file in tmp_path.glob("*.log")
            ),
            description="both read by strategy",
        )
        assert len(logs) == 2
    finally:
        pids = running()
        multi("stopwait", "-A", "tests.worker.project")
    wait_until(
        lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), 30, "both nodes are gone"
    )
    assert lab.unacked() == 0


def test_detach(lab: Lab, tmp_path: Path) -> None:
    pidfile = tmp_path / "worker.pid"
    env = {"TEST_BROKER_URL": lab.url, "C_FORCE_ROOT": "1"}
    _run(
        *("-A", "tests.worker.project", "worker", "--detach", "-P", "strategies", "-c", "1"),
        *("-Q", "b,a", "--rank", "a=1", f"--pidfile={pidfile}", f"--logfile={tmp_path}/w.log"),
        *("-l", "INFO", "-n", "detached@test"),
        env=env,
        folder=tmp_path,
    )
    lab.fill("b", ["b"])
    lab.fill("a", ["a"])
    assert set(lab.wait_ended("a", "b")) == {"a", "b"}
    log = (tmp_path / "w.log").read_text()
    assert "Reading by strategy priority; a  rank 1; b  rank unset" in log
    pid = int(pidfile.read_text())
    lab.app.control.shutdown(destination=["detached@test"])
    wait_until(lambda: not Path("/proc", str(pid)).exists(), 30, "it is gone")


def _run(*arguments: str, env: dict[str, str], folder: Path) -> None:
    """Run a celery command that leaves daemons behind: its output goes to a file, not to a pipe."""
    with (folder / "output").open("ab") as output:
        subprocess.run(
            [*celery_command(), *arguments],
            cwd=folder,
            env=clean_environment([Path(__file__).parents[2]], env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=60,
            check=True,
        )


def test_worker_disable_prefetch_changes_nothing(lab: Lab) -> None:
    """It replaces what gates much more than prefetching; with us it is neither needed nor harmful."""
    worker = lab.worker(queues="a", settings={"worker_disable_prefetch": True})
    lab.send("hold", "h", queue="a")
    lab.wait_started("h")
    lab.fill("a", ["n"])
    assert lab.control("ping", worker) == {"ok": "pong"}
    assert lab.waiting("a") == ["n"]
    lab.open()
    assert ended(lab.db) is not None
    assert lab.wait_count(2) == ["h", "n"]


def test_nothing_of_the_shell_is_needed() -> None:
    """The worker tests themselves run without a variable that could help."""
    assert not [name for name in clean_environment() if name.startswith("CELERY_")]
    assert "PYTHONPATH" in clean_environment()
    assert os.environ.get("STRATEGIES_POOL") is None
