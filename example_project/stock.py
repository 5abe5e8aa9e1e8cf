"""Own the same app without celery-strategies, for the comparison: `celery -A example_project.stock`."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("stock", broker=os.environ.get("EXAMPLE_BROKER_URL", "redis://127.0.0.1:6379/0"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    imports=("example_project.tasks",),
)
