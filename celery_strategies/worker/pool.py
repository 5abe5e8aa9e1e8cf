"""``-P strategies``: the name under which Celery's command line knows our worker.

Owns the marker pool class. It never runs a task: :mod:`celery_strategies.worker.boot` swaps it for the pool that
``strategies_pool`` names before Celery looks at it.
"""

from __future__ import annotations

from celery.concurrency.base import BasePool

#: Name of the pool, for ``celery worker -P`` and ``worker_pool``.
NAME = "strategies"


class TaskPool(BasePool):
    """Marker: a worker started with this pool reads by strategy, with a real pool inside."""
