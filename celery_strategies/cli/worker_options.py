"""Own our options on ``celery worker``."""

from __future__ import annotations

from celery.bin.base import CeleryOption
from celery.bin.worker import worker

from celery_strategies.core.strategies import Strategy

_GROUP = "Strategies Options"


def add_worker_options() -> None:
    """Give ``celery worker`` our options, once."""
    known = {param.name for param in worker.params}
    if "strategy" in known:
        return
    worker.params += [
        CeleryOption(
            ["--strategy"],
            metavar="NAME",
            help_group=_GROUP,
            help=f"How this worker picks the next source: {', '.join(Strategy.labels())} "
            "(with -P strategies; default: the setting strategies_strategy).",
        ),
        CeleryOption(
            ["--rank"],
            metavar="QUEUE=N",
            multiple=True,
            help_group=_GROUP,
            help="Rank of a queue for this worker, lower first; may be repeated "
            "(default: the setting strategies_ranks).",
        ),
        CeleryOption(
            ["--consumer-priority"],
            type=int,
            metavar="N",
            help_group=_GROUP,
            help="Consumer priority of this worker: while a worker with a higher one reads the same queue, this one "
            "takes from it only now and then (default: the setting strategies_consumer_priority).",
        ),
    ]
