"""Own the app of the stand-by example: `celery -A example_project.pair`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery, Task

import celery_strategies  # noqa: F401  # in producers too

app = Celery("example_project.pair")
app.conf.update(
    broker_url=os.environ.get("EXAMPLE_BROKER_URL", "redis://127.0.0.1:6379/0"),
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    imports=("celery_strategies",),
    # Whatever runs is acknowledged at its end, so that a killed worker's jobs run elsewhere.
    task_acks_late=True,
    strategies_single_active_consumer=["ordered_events"],
)


@app.task(bind=True, name="example.work")
def work(self: Task, number: int, seconds: float) -> None:
    """Take a while, and tell the file named by EXAMPLE_RAN who began and ended what, and when."""
    for event, pause in (("start", seconds), ("end", 0.0)):
        name = str(self.request.hostname).partition("@")[0]
        with Path(os.environ["EXAMPLE_RAN"]).open("a") as ran:
            ran.write(f"{name} {number} {event} {time.monotonic():.6f}\n")
        time.sleep(pause)
