"""Commands that change what comes next: ``weight``, ``cap``, ``unsort``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_strategies.cli.group import broker, strategies
from celery_strategies.core.tags import MAX_WEIGHT, MIN_WEIGHT, check_key, check_weight
from celery_strategies.simulation.errors import meant
from celery_strategies.store import admin
from celery_strategies.store.keys import Keys


@strategies.command(cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@click.pass_context
def unsort(ctx: click.Context, queues: tuple[str, ...]) -> None:
    """Give messages that only our workers see to Kombu's own lists, for stock workers: sorted, given back, delayed.

    Without QUEUES: every queue that has such messages. Can be interrupted and repeated. Stop the workers that
    sort a queue first, or they sort it again.
    """
    with broker(ctx) as (client, keys):
        found = admin.queues_to_unsort(client, keys)
        for name in queues:
            if name not in found:
                # A name that was mistyped must not pass for a queue that was given back.
                hint = meant(name, found)
                click.echo(
                    f"Note: {name!r} has no messages that only our workers see{hint}", err=True
                )
        for name in queues or found:
            moved = admin.unsort_queue(client, keys, name)
            ctx.obj.echo(f"{name}: {moved} messages moved to Kombu's lists")
        if not queues and not found:
            ctx.obj.echo("No queue has messages that only our workers see.")


_QUEUES = click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="Queue for which it holds; may be repeated (default: every queue that is sorted by key).",
)


# A weight below zero is told so; to click it would look like an option.
@strategies.command(cls=CeleryCommand, context_settings={"ignore_unknown_options": True})
@click.argument("key")
@click.argument("weight")
@_QUEUES
@click.pass_context
def weight(ctx: click.Context, key: str, weight: str, queues: tuple[str, ...]) -> None:
    """Serve the jobs of KEY with WEIGHT, those that wait too, whatever their headers say.

    WEIGHT is a number from 1e-6 to 1e6, or "none": with their own weights again.
    """
    value = _weight(weight)
    try:
        check_key(key)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None

    def set_it(client: Any, keys: Keys, queue: str) -> bool:
        return admin.set_weight(client, keys, queue, key, value)

    _steer(ctx, queues, set_it, f"{key} has weight {weight}")


def _weight(text: str) -> float | None:
    """Return what WEIGHT says, None for "none"."""
    if text == "none":
        return None
    try:
        return float(check_weight(float(text)))
    except ValueError:
        rule = f"a weight is a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, or none"
        raise click.BadParameter(f"{rule}, not {text!r}") from None


@strategies.command(cls=CeleryCommand, context_settings={"ignore_unknown_options": True})
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


def _steer(
    ctx: click.Context,
    queues: tuple[str, ...],
    set_it: Callable[[Any, Keys, str], bool],
    what: str,
) -> None:
    with broker(ctx) as (client, keys):
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
