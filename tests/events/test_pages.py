"""The examples of docs/events.md and docs/programs.md do what the pages say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import redis

from celery_strategies.transport import topics
from tests.conftest import WorkerFactory
from tests.docs import pages
from tests.support.waiting import wait_until
from tests.support.workers import ROOT, clean_environment

URL = "redis://localhost:6379/0"


def files(page: str, url: str) -> dict[str, str]:
    """Return the examples of a page that name a file in their first line."""
    found = {}
    for block in pages.blocks("python"):
        first, _, _ = block.code.partition("\n")
        if block.page == page and first.startswith("# ") and first.endswith(".py"):
            found[first.removeprefix("# ")] = block.code.replace(URL, url)
    return found


def write(folder: Path, project: Mapping[str, str]) -> None:
    for name, code in project.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=clean_environment([folder, ROOT]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_bus(
    broker_url: str, redis_db: redis.Redis, tmp_path: Path, worker_factory: WorkerFactory
) -> None:
    project = files("docs/events.md", broker_url)
    assert set(project) == {
        "proj/celery.py",
        "proj/handlers.py",
        "proj/publish.py",
        "proj/tenancy.py",
    }
    write(tmp_path, project)
    run(tmp_path, "-m", "proj.publish")
    assert [redis_db.llen(queue) for queue in ("billing", "mail")] == [2, 2]
    stock = next(
        block.code
        for block in pages.blocks("python")
        if block.page == "docs/events.md" and '"celery_strategies.event"' in block.code
    )
    run(tmp_path, "-c", stock.replace(URL, broker_url))
    worker = worker_factory(app="proj", project=project)
    expected = ["bill orders.created 1", "bill orders.paid 1", "mail orders.created 1"]
    expected += ["mail users 2", "bill orders.created 3", "mail orders.created 3"]
    for line in expected:
        worker.wait_log(line)
    log = worker.log()
    assert all(log.count(line) == 1 for line in expected)
    assert "billing  rank 1" in log


def test_the_program(broker_url: str, redis_db: redis.Redis, tmp_path: Path) -> None:
    project = files("docs/programs.md", broker_url)
    write(tmp_path, project)
    run(tmp_path, "produce.py")
    run(tmp_path, "produce.py")
    with subprocess.Popen(
        [sys.executable, "consume.py"],
        cwd=tmp_path,
        env=clean_environment([tmp_path, ROOT]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_until(
                lambda: not redis_db.exists("orders", "alerts", "unacked"),
                description="all is consumed",
            )
            process.terminate()
            printed, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, printed
    assert printed.splitlines() == ["alerts {'id': 1}"] * 2 + ["orders {'id': 1}"] * 2


def patterns() -> list[tuple[str, list[str], list[str]]]:
    section = pages.section(pages.read("docs/events.md"), "What a pattern matches")
    table = [row for row in pages.rows(section) if row[0] != "pattern"]
    cells = [[cell.replace("`", "").split(", ") for cell in row] for row in table]
    return [(pattern, matching, others) for (pattern,), matching, others in cells]


@pytest.mark.parametrize(("pattern", "matching", "others"), patterns(), ids=str)
def test_the_table_of_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    if pattern == "#":
        matching, others = ["", "a", "a.b"], []
    assert all(topics.matches(pattern, key) for key in matching)
    assert not any(topics.matches(pattern, key) for key in others)
