"""The test project with one more remote command: what a worker keeps open and registered."""

from __future__ import annotations

import os
import threading
from typing import Any

from celery.worker.control import inspect_command

from tests.support.project import app

__all__ = ["app"]


@inspect_command()
def internals(state: Any) -> dict[str, Any]:
    """Count what could grow with every reconnect."""
    consumer = state.consumer
    hub = consumer.hub
    found = {
        "fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count(),
        "steps": sorted(step.alias for step in consumer.steps if step),
        "held": len(consumer.reader.held),
        "hungry": consumer.reader._hungry,
    }
    if hub is not None:
        found |= {
            "on_tick": len(hub.on_tick),
            "readers": len(hub.readers),
            "timers": sum(not entry.entry.canceled for entry in hub.timer._queue),
        }
    return found
