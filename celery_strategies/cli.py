"""The ``celery strategies`` command, and our options on ``celery worker``.

Loaded by Celery's command line through the ``celery.commands`` entry point at every start, so importing this module
is what makes ``-P strategies`` known in a clean shell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import redis
from celery.bin.base import CeleryCommand, CeleryOption, handle_preload_options
from celery.bin.worker import worker

from celery_strategies.core.strategies import Strategy
from celery_strategies.core.tags import check_key, check_weight
from celery_strategies.errors import NotOurTransport
from celery_strategies.install import install, offer_pool
from celery_strategies.store import admin
from celery_strategies.store.keys import Keys

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
        CeleryOption(
            ["--consumer-priority"],
            type=int,
            metavar="N",
            help_group=_GROUP,
            help="Consumer priority of this worker: while a worker with a higher one reads the same queue, this one "
            "takes from it only now and then (default: the setting strategies_consumer_priority).",
        ),
    ]


_add_worker_options()


@click.group(name="strategies")
@click.pass_context
@handle_preload_options
def strategies(ctx: click.Context) -> None:
    """Look at and steer queues that strategies workers read."""


@contextmanager
def _broker(ctx: click.Context) -> Iterator[tuple[Any, Keys]]:
    """Connect to the app's broker; gives a client and the names of its keys."""
    app: Any = ctx.obj.app
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        if not hasattr(channel, "strategy_keys"):
            raise NotOurTransport(connection.transport.driver_type)
        yield redis.Redis(connection_pool=channel.pool), channel.strategy_keys()


@strategies.command(cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@click.pass_context
def unsort(ctx: click.Context, queues: tuple[str, ...]) -> None:
    """Give messages that only our workers see to Kombu's own lists, for stock workers: sorted, given back, delayed.

    Without QUEUES: every queue that has such messages. Can be interrupted and repeated. Stop the workers that
    sort a queue first, or they sort it again.
    """
    with _broker(ctx) as (client, keys):
        names = queues or admin.queues_to_unsort(client, keys)
        for name in names:
            moved = admin.unsort_queue(client, keys, name)
            ctx.obj.echo(f"{name}: {moved} messages moved to Kombu's lists")
        if not names:
            ctx.obj.echo("No queue has messages that only our workers see.")


_QUEUES = click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="Queue for which it holds; may be repeated (default: every queue that is sorted by key).",
)


@strategies.command(cls=CeleryCommand)
@click.argument("key")
@click.argument("weight")
@_QUEUES
@click.pass_context
def weight(ctx: click.Context, key: str, weight: str, queues: tuple[str, ...]) -> None:
    """Serve the jobs of KEY with WEIGHT, those that wait too, whatever their headers say.

    WEIGHT is a number from 1e-6 to 1e6, or "none": with their own weights again.
    """
    try:
        check_key(key)
        value = None if weight == "none" else float(check_weight(float(weight)))
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None

    def set_it(client: Any, keys: Keys, queue: str) -> bool:
        return admin.set_weight(client, keys, queue, key, value)

    _steer(ctx, queues, set_it, f"{key} has weight {weight}")


@strategies.command(cls=CeleryCommand)
@click.argument("key")
@click.argument("cap")
@_QUEUES
@click.pass_context
def cap(ctx: click.Context, key: str, cap: str, queues: tuple[str, ...]) -> None:
    """Have at most CAP jobs of KEY ("*": of every key that has no cap of its own) in flight.

    CAP is an integer, 1 or more, or "none": as the settings say. Jobs taken from now on count.
    """
    if cap != "none" and not (cap.isascii() and cap.isdigit() and int(cap) >= 1):
        raise click.BadParameter(f"a cap is an integer, 1 or more, or none, not {cap!r}")
    try:
        check_key(key)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None

    def set_it(client: Any, keys: Keys, queue: str) -> bool:
        return admin.set_cap(client, keys, queue, key, None if cap == "none" else int(cap))

    _steer(ctx, queues, set_it, f"{key} has cap {cap}")


@strategies.group(name="dead")
def dead() -> None:
    """Look after the jobs that were held by too many workers when these died (strategies_max_deliveries)."""


@dead.command(name="list", cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@click.pass_context
def dead_list(ctx: click.Context, queues: tuple[str, ...]) -> None:
    """List dead jobs: queue, id of the entry, task, id of the task, level, key, reason."""
    with _broker(ctx) as (client, keys):
        found = False
        for queue in queues or admin.queues_with_dead(client, keys):
            after = "-"
            while messages := admin.dead_messages(client, keys, queue, after=after):
                for message in messages:
                    task, task_id = _task_of(message.message)
                    line = (queue, message.id, task, task_id, f"level {message.list}")
                    ctx.obj.echo("  ".join((*line, f"key {message.key!r}", message.reason)))
                found, after = True, messages[-1].id
        if not found:
            ctx.obj.echo("No dead jobs.")


def _task_of(raw: bytes) -> tuple[str, str]:
    try:
        headers = json.loads(raw)["headers"]
        return str(headers.get("task", "?")), str(headers.get("id", "?"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "?", "?"


@dead.command(name="requeue", cls=CeleryCommand)
@click.argument("queue")
@click.argument("entries", nargs=-1, required=True)
@click.pass_context
def dead_requeue(ctx: click.Context, queue: str, entries: tuple[str, ...]) -> None:
    """Put dead jobs back at the tail of their level of QUEUE; ENTRIES are ids from the list, or "all"."""
    _each_dead(ctx, queue, entries, admin.revive, "requeued")


@dead.command(name="drop", cls=CeleryCommand)
@click.argument("queue")
@click.argument("entries", nargs=-1, required=True)
@click.pass_context
def dead_drop(ctx: click.Context, queue: str, entries: tuple[str, ...]) -> None:
    """Remove dead jobs of QUEUE for good; ENTRIES are ids from the list, or "all"."""
    _each_dead(ctx, queue, entries, admin.drop_dead, "dropped")


def _each_dead(
    ctx: click.Context,
    queue: str,
    entries: tuple[str, ...],
    act: Callable[[Any, Keys, str, str], bool],
    done: str,
) -> None:
    with _broker(ctx) as (client, keys):
        if entries == ("all",):
            number = 0
            while messages := admin.dead_messages(client, keys, queue):
                number += sum(act(client, keys, queue, message.id) for message in messages)
            ctx.obj.echo(f"{queue}: {number} {done}")
            return
        for entry in entries:
            if not re.fullmatch(r"[0-9]+-[0-9]+", entry):
                raise click.BadParameter(f"{entry!r} is no id of an entry, such as 1700000000000-0")
            if not act(client, keys, queue, entry):
                raise click.ClickException(f"{queue} has no dead job {entry}")
            ctx.obj.echo(f"{queue}: {entry} {done}")


def _steer(
    ctx: click.Context,
    queues: tuple[str, ...],
    set_it: Callable[[Any, Keys, str], bool],
    what: str,
) -> None:
    with _broker(ctx) as (client, keys):
        sorted_ones = admin.sorted_queues(client, keys)
        unknown = [queue for queue in queues if queue not in sorted_ones]
        if unknown or not sorted_ones:
            names = ", ".join(map(repr, unknown)) or "nothing"
            known = ", ".join(sorted_ones) or "none"
            raise click.ClickException(f"{names} is not sorted by key; sorted queues: {known}")
        for queue in queues or sorted_ones:
            if not set_it(client, keys, queue):
                raise click.ClickException(f"{queue}: not sorted by key any more")
            ctx.obj.echo(f"{queue}: {what}")
