"""Own the example's tasks."""

from __future__ import annotations

import os
import time
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


@shared_task(name="example.serve")
def serve(number: int, *, tenant: str, seconds: float) -> None:
    """Note when this job of a tenant started, in the file named by EXAMPLE_RAN, and take a while."""
    with Path(os.environ["EXAMPLE_RAN"]).open("a") as ran:
        ran.write(f"{tenant} {number} {time.monotonic():.6f}\n")
    time.sleep(seconds)
