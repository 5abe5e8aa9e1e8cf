"""The ``celery strategies`` command, and our options on ``celery worker``.

Loaded by Celery's command line through the ``celery.commands`` entry point at every start, so importing this package
is what makes ``-P strategies`` known in a clean shell. Each module owns the commands of one purpose.
"""

from celery_strategies.cli import dead, look, record, simulate, steer, worker_options
from celery_strategies.cli.group import strategies
from celery_strategies.install import install, offer_pool

__all__ = ("dead", "look", "record", "simulate", "steer", "strategies", "worker_options")

install()
offer_pool()
worker_options.add_worker_options()
