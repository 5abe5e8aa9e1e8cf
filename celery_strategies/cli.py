"""The ``celery strategies`` command, and our options on ``celery worker``.

Loaded by Celery's command line through the ``celery.commands`` entry point at every start, so importing this module
is what makes ``-P strategies`` known in a clean shell.
"""

from __future__ import annotations

from typing import Any

import click
import redis
from celery.bin.base import CeleryCommand, CeleryOption, handle_preload_options
from celery.bin.worker import worker

from celery_strategies.core.strategies import Strategy
from celery_strategies.errors import NotOurTransport
from celery_strategies.install import install, offer_pool
from celery_strategies.store import admin

install()
offer_pool()

_GROUP = "Strategies Options"


def _add_worker_options() -> None:
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
    ]


_add_worker_options()


@click.group(name="strategies")
@click.pass_context
@handle_preload_options
def strategies(ctx: click.Context) -> None:
    """Look at and steer queues that strategies workers read."""


@strategies.command(cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@click.pass_context
def unsort(ctx: click.Context, queues: tuple[str, ...]) -> None:
    """Give messages that only our workers see to Kombu's own lists, for stock workers: sorted, given back, delayed.

    Without QUEUES: every queue that has such messages. Can be interrupted and repeated. Stop the workers that
    sort a queue first, or they sort it again.
    """
    app: Any = ctx.obj.app
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        if not hasattr(channel, "strategy_keys"):
            raise NotOurTransport(connection.transport.driver_type)
        client, keys = redis.Redis(connection_pool=channel.pool), channel.strategy_keys()
        names = queues or admin.queues_to_unsort(client, keys)
        for name in names:
            moved = admin.unsort_queue(client, keys, name)
            ctx.obj.echo(f"{name}: {moved} messages moved to Kombu's lists")
        if not names:
            ctx.obj.echo("No queue has messages that only our workers see.")
