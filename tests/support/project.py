"""The project that worker and producer processes load with `-A tests.support.project`.

Everything comes from the environment: TEST_BROKER_URL, TEST_SETTINGS (a JSON object of Celery
settings), TEST_RECORD_URL, TEST_READY_FILE (made when the worker is ready), and STOCK=1 for one
that never imports celery_strategies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery.signals import worker_ready

from tests.support.apps import make_app

app = make_app(
    os.environ["TEST_BROKER_URL"],
    json.loads(os.environ.get("TEST_SETTINGS", "{}")),
    stock=os.environ.get("STOCK") == "1",
    record_url=os.environ.get("TEST_RECORD_URL"),
)
app.set_current()


@worker_ready.connect(weak=False)
def say_ready(**kwargs: Any) -> None:
    """Tell the test, at any log level."""
    if "TEST_READY_FILE" in os.environ:
        Path(os.environ["TEST_READY_FILE"]).touch()
