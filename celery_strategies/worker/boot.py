"""What happens between ``celery worker -P strategies`` and the first bootstep.

Owns the ``worker_init`` receiver. It swaps the marker pool for the real one and Celery's consumer for ours, and it
must not raise: Celery logs an exception of a receiver and runs on. What is wrong with the configuration is
raised by :class:`~celery_strategies.worker.consumer.StrategyConsumer`, where it stops the worker.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import concurrency

from celery_strategies import settings
from celery_strategies.errors import ImproperlyConfigured, invalid
from celery_strategies.worker.pool import NAME, TaskPool

logger = logging.getLogger("celery_strategies")

#: Our consumer, as Celery's ``worker_consumer`` setting names it.
CONSUMER = "celery_strategies.worker.consumer:StrategyConsumer"
#: Pools that must patch the process before anything else is imported.
GREEN = ("gevent", "eventlet")


def is_marker(pool: Any) -> bool:
    """Whether *pool*, a class or an alias, is the marker."""
    return pool is TaskPool or pool in (NAME, concurrency.ALIASES.get(NAME))


def prepare(sender: Any = None, **_: Any) -> None:
    """Make *sender*, a ``WorkController`` that is about to be built, a strategies worker if it was asked for."""
    if not is_marker(sender.pool_cls):
        return
    sender.consumer_cls = CONSUMER
    sender.pool_cls = concurrency.get_implementation("prefork")
    try:
        pool = settings.load(sender.app.conf).pool
        if pool in GREEN and not _patched(pool):
            raise invalid(
                "strategies_pool",
                pool,
                "green pools must patch the process first; start the worker with: celery -A PROJ worker "
                f"-P {pool}, and set worker_consumer = 'celery_strategies:StrategyConsumer'",
            )
        sender.pool_cls = concurrency.get_implementation(pool)
    except ImproperlyConfigured as exc:
        sender.strategies_error = exc
    except Exception as exc:  # noqa: BLE001  # a receiver must not raise: the consumer raises it
        sender.strategies_error = ImproperlyConfigured(f"strategies_pool cannot be loaded: {exc!r}")


def warn_unused(instance: Any = None, **_: Any) -> None:
    """Say that our worker options have no effect on a worker that is not ours; logging is set up by now."""
    names = ("strategy", "rank", "consumer_priority")
    given = [name for name in names if instance.options.get(name)]
    if given and not hasattr(getattr(instance, "consumer", None), "strategies_settings"):
        logger.warning(
            "%s has no effect: this worker was not started with -P strategies",
            " and ".join(f"--{name.replace('_', '-')}" for name in given),
        )


def _patched(pool: str) -> bool:
    try:
        if pool == "gevent":
            from gevent.monkey import is_module_patched

            return bool(is_module_patched("socket"))
        from eventlet.patcher import is_monkey_patched

        return bool(is_monkey_patched("socket"))
    except ImportError as exc:
        raise invalid("strategies_pool", pool, f"the package is not installed ({exc})") from exc
