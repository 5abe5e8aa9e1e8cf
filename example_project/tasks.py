"""Own the example's task."""

from __future__ import annotations

import os
from pathlib import Path

from celery import shared_task
from celery.utils.log import get_task_logger

logger = get_task_logger(__name__)


@shared_task(name="example.handle")
def handle(job: str) -> None:
    """Say which job this is, and add it to the file named by EXAMPLE_RAN, if any."""
    logger.info("handling %s", job)
    if "EXAMPLE_RAN" in os.environ:
        with Path(os.environ["EXAMPLE_RAN"]).open("a") as ran:
            ran.write(f"{job}\n")
