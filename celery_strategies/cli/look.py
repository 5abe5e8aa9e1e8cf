"""Commands that look and change nothing: ``status``, ``top``, ``tenants``, ``explain``.

They end with 0 if they could answer, with 1 if they could not (no broker, no such name, a task that was not found), and
with 2 if they were called wrongly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from celery.bin.base import CeleryCommand
from kombu.exceptions import OperationalError

from celery_strategies.cli.group import broker, console_of, strategies
from celery_strategies.look import find, reach, status, tenants
from celery_strategies.look.answer import Answer, as_json
from celery_strategies.look.ask import Question
from celery_strategies.look.errors import NoSuchNameError, check_known
from celery_strategies.look.explain import explain
from celery_strategies.look.find import SEARCH_SECONDS, Search, Searched
from celery_strategies.look.reach import Reach, WorkerSeen
from celery_strategies.look.status import QueueSeen
from celery_strategies.simulation.errors import closest

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_TOP_ROWS, _TENANT_ROWS = 10, 20


@contextmanager
def _looking(ctx: click.Context) -> Iterator[Reach]:
    try:
        with broker(ctx) as (client, keys):
            yield Reach(client, keys)
    except NoSuchNameError as error:
        raise click.ClickException(str(error)) from None
    except (*reach.UNREACHABLE, OperationalError) as error:
        raise click.ClickException(f"cannot read from the broker: {error}") from None


def _queues(ctx: click.Context, eye: Reach, workers: Sequence[WorkerSeen]) -> list[str]:
    """Return the names of all queues that can be found."""
    conf = ctx.obj.app.conf
    known = list(ctx.obj.app.amqp.queues)
    own = [
        str(conf.event_exchange),
        f"{conf.control_exchange}.pidbox",
        f"reply.{conf.control_exchange}.pidbox",
    ]
    return reach.find_queues(eye, known, workers, own).names


def _print_json(data: Any) -> None:
    click.echo(status.dumps(data))


@strategies.command(name="status", cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@_JSON
@click.pass_context
def status_command(ctx: click.Context, /, queues: tuple[str, ...], as_json: bool) -> None:
    """Show how many jobs wait where in each queue, leases and stand-by, and the workers.

    QUEUES: only these. Works without any worker.
    """
    with _looking(ctx) as eye:
        workers = reach.find_workers(eye)
        names = _queues(ctx, eye, workers)
        for name in queues:
            check_known("queue", name, names)
        now = eye.now()
        found = status.read_queues(eye, queues or names, workers, now)
    if as_json:
        _print_json(
            {
                "at": now,
                "queues": [status.as_json(seen, now) for seen in found],
                "workers": [status.worker_json(worker) for worker in workers],
                "notes": eye.notes,
            }
        )
        return
    from celery_strategies.look import show

    console = console_of(ctx)
    show.status(console, found, workers, now)
    show.notes(console, eye.notes)


@strategies.command(name="tenants", cls=CeleryCommand)
@click.argument("queue")
@click.option("-k", "--key", "keys", multiple=True, metavar="KEY", help="Only these keys.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=_TENANT_ROWS,
    metavar="N",
    help=f"Keys that are printed (default: {_TENANT_ROWS}); the others are one line.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    default=0.0,
    metavar="N",
    help="Look twice, so far apart, and show what each key got meanwhile (default: 0: look once).",
)
@_JSON
@click.pass_context
def tenants_command(
    ctx: click.Context,
    /,
    queue: str,
    keys: tuple[str, ...],
    limit: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Show the keys of QUEUE: backlog, in flight, weight, cap, share due; with --seconds the share got."""
    with _looking(ctx) as eye:
        workers = reach.find_workers(eye)
        check_known("queue", queue, _queues(ctx, eye, workers))
        (seen,) = status.read_queues(eye, [queue], workers)
        earlier = None
        if seconds:
            earlier = tenants.survey(eye, seen)
            time.sleep(seconds)
            workers = reach.find_workers(eye)
            (seen,) = status.read_queues(eye, [queue], workers)
        found = tenants.survey(eye, seen)
        rows = tenants.tenants(found, workers, queue, earlier)
        if not found.complete:
            eye.note(
                f"{queue} has more keys than could be looked at: these are {len(rows):,} of them"
            )
    window = None if earlier is None else found.at - earlier.at
    if keys:
        for key in keys:
            check_key(queue, key, rows)
        rows = [row for row in rows if row.key in keys]
    if as_json:
        _print_json(
            {
                "queue": queue,
                "order": seen.order,
                "unsorted": sum(seen.inbox.values()) + sum(seen.returned.values()),
                "window": window,
                "complete": found.complete,
                "tenants": [tenants.tenants_json(row) for row in rows],
                "notes": eye.notes,
            }
        )
        return
    from celery_strategies.look import show

    console = console_of(ctx)
    show.tenants(console, seen, rows, limit, window)
    show.notes(console, eye.notes)


def check_key(queue: str, key: str, rows: Sequence[tenants.Tenant]) -> None:
    """End with an error if no row is that of *key*."""
    known = [row.key for row in rows if row.key]
    try:
        check_known("key", key, known)
    except NoSuchNameError as error:
        words = f"{error} (keys of {queue} with jobs)"
        raise click.ClickException(words) from None


@strategies.command(name="top", cls=CeleryCommand)
@click.argument("queues", nargs=-1)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    metavar="SECONDS",
    help="Between two pictures (default: 1).",
)
@click.option(
    "-n", "--count", type=click.IntRange(1), metavar="N", help="Pictures (default: until Ctrl-C)."
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=_TOP_ROWS,
    metavar="N",
    help=f"Lines of a table (default: {_TOP_ROWS}).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each picture.")
@click.pass_context
def top_command(
    ctx: click.Context,
    /,
    queues: tuple[str, ...],
    interval: float,
    count: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """Show a bar for each queue, and for each tenant of those that are sorted, again and again.

    QUEUES: only these. Where stdout is no terminal, pictures are printed one after the other.
    """
    with _looking(ctx) as eye:
        names = _queues(ctx, eye, reach.find_workers(eye))
        for name in queues:
            check_known("queue", name, names)
        frames = _frames(ctx, eye, queues, interval, count)
        if as_json:
            from celery_strategies.look.top import frame_json

            for found in frames:
                click.echo(json.dumps(frame_json(found), ensure_ascii=False))
            return
        _draw(ctx, frames, limit)


def _frames(
    ctx: click.Context, eye: Reach, queues: Sequence[str], interval: float, count: int | None
) -> Iterator[Any]:
    """Yield a look each *interval*; the first is over what was got since one just before."""
    from celery_strategies.look.top import look

    names, number = list(queues), 0
    earlier = None
    try:
        while count is None or number < count:
            begun = time.monotonic()
            if not queues and number % 10 == 0:
                # New ones come up.
                names = _queues(ctx, eye, reach.find_workers(eye))
            earlier = look(eye, names, earlier)
            yield earlier
            eye.notes.clear()
            number += 1
            if count is None or number < count:
                time.sleep(max(0.0, interval - (time.monotonic() - begun)))
    except KeyboardInterrupt:
        return


def _draw(ctx: click.Context, frames: Iterator[Any], limit: int) -> None:
    from rich.live import Live

    from celery_strategies.look import show

    console = console_of(ctx)
    if not console.is_terminal:
        for found in frames:
            console.print(show.frame(found, limit))
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for found in frames:
            live.update(show.frame(found, limit), refresh=True)


@strategies.command(name="explain", cls=CeleryCommand)
@click.argument("task_id")
@click.option("-q", "--queue", metavar="QUEUE", help="Search this queue only.")
@click.option("-k", "--key", metavar="KEY", help="Search the jobs of this key only; with --queue.")
@click.option(
    "--deep", is_flag=True, help="Search to the end, with half of Redis's time, however long."
)
@_JSON
@click.pass_context
def explain_command(
    ctx: click.Context,
    /,
    task_id: str,
    queue: str | None,
    key: str | None,
    deep: bool,
    as_json: bool,
) -> None:
    """Say where the task TASK_ID is, what is before it, why it does not run now, and about when it will.

    Searches for half a second, both ends of all lists first, and says what it did not search.
    """
    if key is not None and queue is None:
        raise click.UsageError("--key needs --queue: the same key may be in several")
    begun = time.monotonic()
    with _looking(ctx) as eye:
        workers = reach.find_workers(eye)
        question = Question(ctx.obj.app, task_id, 0)
        names = _queues(ctx, eye, workers)
        if queue is not None:
            check_known("queue", queue, names)
        seen = status.read_queues(eye, names, workers)
        searched = [one for one in seen if queue in (None, one.name)]
        if key is not None:
            _check_hint(eye, searched[0], key, workers)
        search = Search(
            eye,
            task_id,
            # Whatever finding the queues took is not there for the search.
            seconds=None if deep else max(0.1, SEARCH_SECONDS - (time.monotonic() - begun)),
            progress=_progress() if deep and sys.stderr.isatty() else lambda _: None,
        )
        found = explain(eye, search, searched, workers, others=seen, key=key)
        _ask(question, found)
    _finish(ctx, eye, found, searched, (queue, key, deep), as_json)


def _check_hint(eye: Reach, seen: QueueSeen, key: str, workers: Sequence[WorkerSeen]) -> None:
    looked = tenants.survey(eye, seen, weights=False)
    rows = tenants.tenants(looked, workers, seen.name)
    if looked.complete and not sum(seen.inbox.values()):
        # What is not sorted yet may have any key.
        check_key(seen.name, key, rows)


def _progress() -> Any:
    last = [time.monotonic()]

    def tell(done: Searched) -> None:
        if time.monotonic() - last[0] > 1:
            last[0] = time.monotonic()
            click.echo(f"{done.messages:,} of {done.total:,} messages searched", err=True)

    return tell


def _ask(question: Question, found: Answer) -> None:
    if found.state in ("in flight", "unknown", "not found"):
        # A worker that holds it must say so itself; one that does not may have it too, once more.
        found.running = question.answer()


def _finish(
    ctx: click.Context,
    eye: Reach,
    found: Answer,
    searched: Sequence[QueueSeen],
    hints: tuple[str | None, str | None, bool],
    as_json_: bool,
) -> None:
    missing = found.found is None and found.running is None
    if missing and found.near is None:
        found.near = _near(eye, found.task, searched)
    if as_json_:
        _print_json(as_json(found, eye.notes))
    elif missing:
        click.echo(f"Error: {_missing(found, hints)}", err=True)
        for words in eye.notes:
            click.echo(f"Note: {words}", err=True)
    else:
        from celery_strategies.look import show

        console = console_of(ctx)
        show.answer(console, found)
        show.notes(console, eye.notes)
    if missing:
        ctx.exit(1)


def _missing(found: Answer, hints: tuple[str | None, str | None, bool]) -> str:
    queue, key, deep = hints
    done = found.searched
    where = f"the jobs of {key} in {queue}" if key else f"queue {queue}" if queue else "all queues"
    close = f"; did you mean {found.near!r}?" if found.near else "."
    if found.state == "unknown":
        return (
            f"task {found.task} is unknown{close} Searched: {where} ({done.messages:,} messages, with "
            "those that workers hold), and the workers. It may have ended (celery result), or is not published yet."
        )
    left = "" if done.all_keys else ", and the jobs of some keys"
    more = "" if deep else "; --deep searches all, --queue and --key narrow it"
    return (
        f"task {found.task} was not found{close} Searched: {done.messages:,} of {done.total:,} "
        f"messages of {where}, the ends of each list first, in {done.seconds:.1f} s. Not searched: "
        f"the other {max(0, done.total - done.messages):,}{left}{more}."
    )


def _near(eye: Reach, task: str, searched: Sequence[QueueSeen]) -> str | None:
    """Return an id like this one among the newest messages."""
    lists = [eye.keys.inbox(seen.name, step) for seen in searched for step in seen.inbox]
    for seen in searched[:10]:
        for level in seen.sorted:
            base = eye.keys.base(seen.name)
            found = eye.one("ZRANGE", f"{base}index:{level}", 0, 19) or ()
            # What stands before the key is as long in all.
            lists += [f"{base}jobs:{level}:{reach.text(member[17:])}" for member in found]
    replies = eye.many(["LRANGE", name, 0, 4] for name in lists[:100])
    raws = [raw for reply in replies for raw in reply or ()]
    known = find.ids_in(raw[max(0, raw.find(b"{")) :] for raw in raws)
    return closest(task, known)
