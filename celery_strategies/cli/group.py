"""Own the ``celery strategies`` group, and the way of its commands to the broker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import redis
from celery.bin.base import handle_preload_options

from celery_strategies.errors import NotOurTransport
from celery_strategies.store.keys import Keys


@click.group(name="strategies")
@click.pass_context
@handle_preload_options
def strategies(ctx: click.Context) -> None:
    """Look at and steer queues that strategies workers read."""


@contextmanager
def broker(ctx: click.Context) -> Iterator[tuple[Any, Keys]]:
    """Connect to the app's broker; gives a client and the names of its keys."""
    app: Any = ctx.obj.app
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        if not hasattr(channel, "strategy_keys"):
            raise NotOurTransport(connection.transport.driver_type)
        yield redis.Redis(connection_pool=channel.pool), channel.strategy_keys()


def console_of(ctx: click.Context) -> Any:
    """Return a ``rich.console.Console`` that heeds ``--no-color``, and colours nothing where stdout is no terminal."""
    # Not above: every start of `celery` imports this module.
    from celery_strategies.simulation import tables

    return tables.console(color=not ctx.obj.no_color and sys.stdout.isatty())
