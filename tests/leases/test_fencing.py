"""The fencing of the documentation keeps a replaced leader out."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import celery_strategies
from tests.docs import pages

(BLOCK,) = [block for block in pages.blocks("python") if "def is_newest" in block.code]


def test_a_lower_term_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outside.db"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(file)

    with connect() as db:
        db.execute("CREATE TABLE fences (queue TEXT PRIMARY KEY, term INTEGER)")
        db.execute("CREATE TABLE events (event TEXT)")
    db.close()
    names: dict[str, Any] = {}
    for term, event in ((5, "a"), (5, "b"), (7, "c"), (5, "late"), (7, "d"), (6, "late")):
        monkeypatch.setattr(celery_strategies, "fencing_term", lambda: term)  # noqa: B023
        exec(BLOCK.code, names)
        names["apply_event"](connect, event)
    db = connect()
    assert [row[0] for row in db.execute("SELECT event FROM events")] == ["a", "b", "c", "d"]
    db.close()


def test_there_is_no_term_outside_of_tasks() -> None:
    assert celery_strategies.fencing_term() is None
