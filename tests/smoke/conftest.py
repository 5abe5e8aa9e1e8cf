"""Fixtures of the smoke tests: pytest-celery's, with our nodes."""

from __future__ import annotations

from tests.support.smoke import *  # noqa: F403  # fixtures are found by name
