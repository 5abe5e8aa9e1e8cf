"""The project of the event tests, for workers: the test project with a bus."""

from __future__ import annotations

import os

from celery_strategies.events import EventBus
from tests.events.handlers import add_handlers
from tests.support.apps import Recorder
from tests.support.project import app

bus = EventBus(app)
add_handlers(bus, Recorder(os.environ.get("TEST_RECORD_URL") or os.environ["TEST_BROKER_URL"]))
