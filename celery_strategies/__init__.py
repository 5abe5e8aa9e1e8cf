"""Strategies for Celery workers on Redis: which queue, which priority level and which message comes next.

Importing this package installs it in the process (:func:`install`): put it into ``imports`` (``CELERY_IMPORTS``) for
workers, and import it where the app or its configuration is made for producers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_strategies.concurrency import limits_concurrency
from celery_strategies.core.strategies import Strategy
from celery_strategies.core.tags import UNKEYED
from celery_strategies.errors import (
    FairShareError,
    ImproperlyConfigured,
    LimitError,
    NotOurTransport,
    StrategiesError,
)
from celery_strategies.fencing import fencing_term
from celery_strategies.install import install
from celery_strategies.publish.fair import Publication
from celery_strategies.version import __version__ as __version__

if TYPE_CHECKING:
    from celery_strategies.transport.mixins import StrategyConsumerMixin
    from celery_strategies.worker.consumer import StrategyConsumer

__all__ = (
    "UNKEYED",
    "FairShareError",
    "ImproperlyConfigured",
    "LimitError",
    "NotOurTransport",
    "Publication",
    "StrategiesError",
    "Strategy",
    "StrategyConsumer",
    "StrategyConsumerMixin",
    "fencing_term",
    "install",
    "limits_concurrency",
)


def __getattr__(name: str) -> Any:
    # Celery's consumer is heavy and of no use to a producer.
    if name == "StrategyConsumer":
        from celery_strategies.worker.consumer import StrategyConsumer

        return StrategyConsumer
    if name == "StrategyConsumerMixin":
        from celery_strategies.transport.mixins import StrategyConsumerMixin

        return StrategyConsumerMixin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
