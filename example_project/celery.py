"""Own the example's Celery app, the one that `celery -A example_project` finds."""

from __future__ import annotations

from celery import Celery

app = Celery("example_project")
app.config_from_object("example_project.celeryconfig")
