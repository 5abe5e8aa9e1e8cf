"""Own the fixtures of the comparison with Redis, and a way to run the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner, Result

from celery_strategies import cli


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `celery strategies` in an empty folder; the broker is one that does not exist."""
    assert cli.strategies.name in celery.commands or celery.add_command(cli.strategies) is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://127.0.0.1:1/0")
    monkeypatch.syspath_prepend(str(tmp_path))

    def invoke(*words: str, code: int = 0, stdin: str | None = None) -> Result:
        done = CliRunner().invoke(celery, words, input=stdin, env={"COLUMNS": "80"})
        assert done.exit_code == code, done.output
        # click ends by SystemExit; anything else is a traceback to the user.
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return invoke
