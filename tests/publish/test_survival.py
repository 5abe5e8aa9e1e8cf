"""Keys and weights in real workers: what survives, and what is handed down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WorkerFactory
from tests.publish import tenancy
from tests.publish.lab import Producer, send
from tests.support.apps import PREFIX
from tests.support.waiting import wait_until
from tests.support.workers import ROOT, clean_environment, job, project_environment, publish

PROJECT = "tests.publish.project"
PATH = "tests.publish.tenancy:fair_share"
TAGS = "test:tags"

ACME = ("acme", 2)

Tag = tuple[Any, Any]


class Seen:
    """What tasks have written down."""

    def __init__(self, producer: Producer) -> None:
        self._db = producer.db

    def __call__(self) -> dict[str, set[Tag]]:
        found: dict[str, set[Tag]] = {}
        lines: Any = self._db.lrange(TAGS, 0, -1)
        for label, key, weight in map(json.loads, lines):
            found.setdefault(label, set()).add((key, weight))
        return found

    def wait(self, *labels: str, timeout: float = 60) -> dict[str, set[Tag]]:
        """Wait until tasks of all *labels* have run, and return what they saw."""
        missing: Any = set()

        def ran() -> bool:
            nonlocal missing
            missing = set(labels) - self().keys()
            return not missing

        try:
            wait_until(ran, timeout, "all tasks ran")
        except AssertionError as error:
            raise AssertionError(f"{error}; missing: {sorted(missing)}") from None
        return self()


@pytest.fixture
def seen(producer: Producer) -> Seen:
    return Seen(producer)


def publish_everything(url: str, settings: dict[str, Any], *options: str) -> dict[str, set[Tag]]:
    """Publish all there is from a process of its own; return what each task must see."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.publish.everything", *options],
        env=clean_environment([ROOT], project_environment(url, settings)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.returncode, done.stderr
    return {label: {(key, weight)} for label, (key, weight) in json.loads(done.stdout).items()}


def settings_for(producer: Producer, backend: str, **more: Any) -> dict[str, Any]:
    return {
        "task_protocol": producer.protocol,
        "strategies_fair_share": PATH,
        "task_ignore_result": False,
        "result_backend": backend,
        "result_chord_retry_interval": 0.2,
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["strategies", "prefork"])
def test_tags_survive_and_are_handed_down(
    producer: Producer, seen: Seen, worker_factory: WorkerFactory, pool: str
) -> None:
    settings = settings_for(producer, producer.url)
    worker_factory(producer.url, pool=pool, concurrency=2, app=PROJECT, settings=settings)
    expected = publish_everything(producer.url, settings)
    assert seen.wait(*expected) == expected


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_tags_are_handed_down_where_many_tasks_run_in_one_process(
    producer: Producer, seen: Seen, worker_factory: WorkerFactory, pool: str
) -> None:
    settings = settings_for(producer, producer.url)
    worker_factory(producer.url, pool=pool, concurrency=8, app=PROJECT, settings=settings)
    expected = publish_everything(producer.url, settings, "--no-kill")
    assert seen.wait(*expected) == expected


@pytest.mark.slow
def test_a_chord_that_is_unlocked_by_a_task(
    producer: Producer, seen: Seen, worker_factory: WorkerFactory, tmp_path: Path
) -> None:
    settings = settings_for(producer, f"file://{tmp_path}")
    worker_factory(producer.url, concurrency=2, app=PROJECT, settings=settings)
    expected = publish_everything(producer.url, settings)
    # The task, celery.chord_unlock, hands its key down to the body. It is published before the
    # header, by the process that publishes the chord: here nobody said a key for it.
    for label in ("body", "chord error", "hard chord error"):
        expected[label] = {(None, None)}
    assert seen.wait(*expected) == expected


@pytest.mark.slow
def test_a_redelivery_after_the_worker_was_killed(
    producer: Producer, seen: Seen, worker_factory: WorkerFactory
) -> None:
    short = {"broker_transport_options": {"visibility_timeout": 2}}
    app = producer.app(strategies_fair_share=tenancy.fair_share, **short)
    worker = worker_factory(producer.url, app=PROJECT, settings=short)
    send(app, "hold", "held", kwargs={"tenant": "acme"})
    seen.wait("held 1")
    worker.kill()
    worker_factory(producer.url, app=PROJECT, settings=short)
    assert seen.wait("held 2") == {"held 1": {ACME}, "held 2": {ACME}}


@pytest.mark.slow
def test_what_a_worker_without_the_package_does_to_tags(
    producer: Producer, seen: Seen, worker_factory: WorkerFactory
) -> None:
    app = producer.app(strategies_fair_share=tenancy.fair_share)
    worker_factory(producer.url, pool="prefork", app=PROJECT, stock=True)
    see = app.signature(PREFIX + "see")
    send(app, "retry", "retry", kwargs={"tenant": "acme"})
    app.send_task(
        PREFIX + "break_down",
        kwargs={"label": "breaks down", "tenant": "acme"},
        link_error=see.clone(kwargs={"label": "link_error"}),
    )
    app.send_task(
        PREFIX + "see",
        kwargs={"label": "linked", "tenant": "acme"},
        link=see.clone(kwargs={"label": "link"}),
    )
    found = seen.wait("retry 1", "link_error", "link")
    assert found.pop("link") == {(None, None)}
    assert set(found) == {"retry 0", "retry 1", "breaks down", "link_error", "linked"}
    assert all(tags == {ACME} for tags in found.values())


@pytest.mark.slow
def test_a_producer_that_knows_only_the_header_needs_nothing(
    producer: Producer, seen: Seen, worker_factory: WorkerFactory
) -> None:
    settings = {"strategies_fair_share": True, "strategies_fair_key_header": "_schema_name"}
    worker_factory(producer.url, app=PROJECT, settings=settings)
    nest = job("nest", kwargs={"label": "nest"}, headers={"_schema_name": "acme"})
    publish(producer.url, [nest], {"task_protocol": producer.protocol})
    found = seen.wait("nest", "nest > delay", "nest > signature", "nest > explicit")
    assert set().union(*found.values()) == {("acme", None)}


@pytest.mark.slow
def test_beat_asks_the_callable(
    producer: Producer, worker_factory: WorkerFactory, tmp_path: Path
) -> None:
    def entry(**kwargs: Any) -> dict[str, Any]:
        return {"task": PREFIX + "see", "schedule": 0.2, "kwargs": {"label": "beat", **kwargs}}

    explicit = {**entry(tenant="acme"), "options": {"headers": {"fair_key": "explicit"}}}
    settings = {
        "task_protocol": producer.protocol,
        "strategies_fair_share": PATH,
        "beat_schedule": {"a": entry(tenant="acme"), "b": entry(), "c": explicit},
        "beat_max_loop_interval": 0.1,
    }
    beat = ["-A", PROJECT, "beat", "-s", str(tmp_path / "schedule"), "--pidfile="]
    worker_factory(producer.url, wait=False, settings=settings, command=beat)
    tags = [ACME, ("explicit", None), (None, None)]
    wait_until(lambda: set(tags) <= set(producer.tags()), 30, "beat has published all three")
    assert set(producer.tags()) == set(tags)
