"""The project of these tests in a worker that does not look by itself, when idle: somebody has to tell it."""

from __future__ import annotations

from celery_strategies.transport import idle

idle.LOOK_INTERVAL, idle.STALE_AFTER = 60.0, 180.0

from tests.fair.project import app  # noqa: E402  # as in a worker: the intervals first

__all__ = ["app"]
