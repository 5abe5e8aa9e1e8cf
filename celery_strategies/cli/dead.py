"""Commands for the jobs that outlived too many workers: ``dead list``, ``dead requeue``, ``dead drop``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_strategies.cli.group import broker, strategies
from celery_strategies.store import admin
from celery_strategies.store.keys import Keys


@strategies.group(name="dead")
def dead() -> None:
    """Look after the jobs that were held by too many workers when these died (strategies_max_deliveries)."""


@dead.command(name="list", cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@click.pass_context
def dead_list(ctx: click.Context, queues: tuple[str, ...]) -> None:
    """List dead jobs: queue, id of the entry, task, id of the task, level, key, reason."""
    with broker(ctx) as (client, keys):
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
    with broker(ctx) as (client, keys):
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
