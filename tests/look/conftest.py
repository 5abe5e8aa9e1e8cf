"""Own the fixtures of the tests of looking: calls like a worker's, and the commands as a user runs them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.conftest import WorkerFactory
from tests.support.workers import celery
from tests.worker.lab import Lab

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(broker_url: str) -> Command:
    """Run `celery strategies`; asserts the exit code, and that nobody sees a traceback."""

    def run(
        *words: str, code: int = 0, settings: Any = None, env: Any = None
    ) -> subprocess.CompletedProcess[str]:
        done = celery(
            "strategies",
            *words,
            broker_url=broker_url,
            settings=settings,
            check=False,
            env={"COLUMNS": "80", **(env or {})},
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def answer(command: Command) -> Callable[..., Any]:
    """Run a command with --json; returns what it printed."""

    def run(*words: str, **options: Any) -> Any:
        return json.loads(command(*words, "--json", **options).stdout)

    return run


@pytest.fixture
def lab(broker_url: str, redis_db: redis.Redis, worker_factory: WorkerFactory) -> Iterator[Lab]:
    """The shared server with a producer of our own."""
    lab = Lab(broker_url, redis_db, worker_factory)
    yield lab
    lab.close()
