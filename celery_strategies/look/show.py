"""Own what a look prints: tables and bars, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from celery_strategies.look.answer import Answer
from celery_strategies.look.find import headers_of
from celery_strategies.look.reach import WorkerSeen
from celery_strategies.look.status import QueueSeen, places
from celery_strategies.look.tenants import Tenant, other
from celery_strategies.look.top import Frame
from celery_strategies.simulation import tables
from celery_strategies.simulation.reasons import called

__all__ = ("answer", "bar", "frame", "notes", "status", "tenants")

#: Queues, workers and tenants that a table shows; JSON has all.
MOST_ROWS = 50
#: Width of a bar.
BAR = 24
_PLACES = {
    "inbox": "inbox",
    "sorted": "sorted",
    "full": "full",
    "given_back": "back",
    "delayed": "delayed",
    "in_line": "in line",
    "unsorting": "unsort",
    "set_aside": "aside",
    "dead": "dead",
}


def _number(value: float) -> str:
    """Return a count in at most five characters, so that a table of them fits."""
    if value < 10_000:
        return f"{value:.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 999.5 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0e}"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:,.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.0f}%" if value == 0 or value >= 0.1 else f"{100 * value:.2g}%"


def notes(console: Console, texts: Iterable[str]) -> None:
    """Print what the reader should know of the answer."""
    for words in texts:
        console.print(Text(f"Note: {words}"))


# -- status ------------------------------------------------------------------------------------


def status(
    console: Console, queues: Sequence[QueueSeen], workers: Sequence[WorkerSeen], now: float
) -> None:
    """Print queues, what is special about them, and workers."""
    if not queues:
        console.print("No queues.")
    else:
        console.print(_depths(queues[:MOST_ROWS]))
        tables.more(console, len(queues) - MOST_ROWS, "queues")
        for seen in queues[:MOST_ROWS]:
            for words in _about(seen, now):
                console.print(Text(f"{seen.name}: {words}"))
    if not workers:
        console.print("\nNo strategies workers.")
        return
    console.print(_workers(workers[:MOST_ROWS]))
    tables.more(console, len(workers) - MOST_ROWS, "workers")


def _depths(queues: Sequence[QueueSeen]) -> Table:
    counts = [places(seen) for seen in queues]
    # A place with nothing anywhere says nothing.
    shown = [name for name in _PLACES if name == "inbox" or any(count[name] for count in counts)]
    table = tables.table()
    table.add_column("queue", overflow="fold", min_width=8)
    table.add_column("level", justify="right")
    for name in shown:
        table.add_column(_PLACES[name], justify="right", no_wrap=True)
    table.add_column("in flight", justify="right")
    for seen, count in zip(queues, counts, strict=True):
        levels = sorted({*seen.inbox, *seen.sorted, *seen.returned})
        cells = [_number(count[name]) for name in shown]
        only = str(levels[0]) if len(levels) == 1 else "all" if levels else ""
        table.add_row(Text(seen.name), only, *cells, _number(seen.in_flight))
        for level in levels if len(levels) > 1 else ():
            by_level = {
                "inbox": seen.inbox.get(level, 0),
                "sorted": seen.sorted.get(level, 0),
                "given_back": seen.returned.get(level, 0),
            }
            cells = [_number(by_level[name]) if name in by_level else "" for name in shown]
            table.add_row("", str(level), *cells, "")
    return table


def _about(seen: QueueSeen, now: float) -> list[str]:
    said = []
    if seen.paused:
        said.append(f"paused: {seen.paused}")
    if seen.order:
        words = [seen.order, f"key in {seen.policy.get('key')}"]
        if seen.policy.get("caps") == "1":
            words.append("caps")
        if seen.full_keys:
            words.append(f"{seen.full_keys:,} keys full")
        if seen.sorter:
            words.append(f"sorted by {seen.sorter}")
        said.append(", ".join(words))
    if seen.due_in is not None:
        said.append(f"next delayed job due in {_seconds(seen.due_in)}")
    if seen.lease is not None:
        said.append(_lease(seen, now))
    down = [r for r in seen.live_readers() if r.stands_by]
    if down:
        names = ", ".join(f"{reader.worker.called} ({reader.priority})" for reader in down)
        said.append(f"stand by: {names}")
    if not seen.live_readers():
        said.append("no live strategies worker reads it")
    return said


def _lease(seen: QueueSeen, now: float) -> str:
    lease = seen.lease
    if lease is None or lease.worker is None:
        return f"single active, nobody has the lease (last term {lease.term if lease else 0})"
    name = next((r.worker.called for r in seen.readers if r.worker.id == lease.worker), None)
    left = "" if lease.until is None else f", for {_seconds(max(0.0, lease.until - now))}"
    job = ", its one job in flight" if lease.tag else ""
    return f"single active, led by {name or lease.worker} (term {lease.term}{left}){job}"


def _workers(workers: Sequence[WorkerSeen]) -> Table:
    table = tables.table("Workers")
    table.add_column("worker", overflow="fold")
    table.add_column("beat", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    table.add_column("prio", justify="right")
    table.add_column("slots", justify="right")
    table.add_column("held", justify="right")
    table.add_column("queues", overflow="fold")
    for worker in workers:
        beat = _seconds(worker.age) if worker.alive else f"SILENT {_seconds(worker.age)}"
        slots = "" if worker.slots is None else str(worker.slots)
        table.add_row(
            Text(worker.called),
            beat,
            worker.strategy,
            str(worker.priority),
            slots,
            str(len(worker.held)),
            Text(", ".join(worker.queues)),
        )
    return table


# -- tenants -----------------------------------------------------------------------------------


def tenants(
    console: Console, seen: QueueSeen, rows: Sequence[Tenant], limit: int, window: float | None
) -> None:
    """Print the keys of a queue, the largest backlogs first, and what the others are together."""
    words = f"{seen.name}: {seen.order or 'not sorted by key'}; {len(rows):,} keys"
    unsorted = sum(seen.inbox.values()) + sum(seen.returned.values())
    if unsorted:
        words += f"; {unsorted:,} messages are not sorted, and their keys not known"
    console.print(Text(words))
    if window is not None:
        console.print(f"Got: in {window:.1f} s, as the finish tags say.")
    if not rows:
        return
    table = tables.table()
    table.add_column("key", overflow="fold")
    for title in ("backlog", "in flight", "weight", "cap", "due", "got", "jobs")[
        : 7 if window is not None else 5
    ]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows[:limit]:
        table.add_row(Text(called(row.key)), *_cells(row, window))
    rest = rows[limit:]
    if rest:
        table.add_row(f"({len(rest):,} others)", *_cells(other(rest), window))
    console.print(table)


def _cells(row: Tenant, window: float | None) -> list[str]:
    cap = "" if row.cap is None else str(row.cap) + (" full" if row.full else "")
    weight = "" if row.weight is None else f"{row.weight:.4g}"
    cells = [_number(row.backlog), _number(row.in_flight), weight, cap, _percent(row.due)]
    if window is not None:
        cells += [_percent(row.share), "" if row.got is None else _number(row.got)]
    return cells


# -- explain -----------------------------------------------------------------------------------


def answer(console: Console, found: Answer) -> None:
    """Print where a task is, what is before it, why it waits, and when it might run."""
    console.print(Text(f"{found.task}: {_state(found)}"), soft_wrap=True)
    message = found.found
    if message is not None:
        name = headers_of(message.raw).get("task")
        where = [f"queue {message.queue}"]
        if message.level is not None:
            where.append(f"level {message.level}")
        if message.key:
            where.append(f"key {message.key}")
        if name:
            where.insert(0, f"task {name}")
        if message.deliveries % 1000:
            where.append(f"taken {message.deliveries % 1000} times before")
        console.print(Text("  " + ", ".join(where)))
    _before(console, found)
    if found.reasons:
        console.print("\nIt does not run now because")
        width = max(len(step) for step, _ in found.reasons)
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(min_width=width + 2, no_wrap=True)
        table.add_column(overflow="fold")
        for step, words in found.reasons:
            table.add_row(f"  {step}", Text(words))
        console.print(table)
    elif found.state in ("inbox", "sorted", "given back"):
        console.print("\nNothing keeps it: the next free slot takes it.")
    _estimate(console, found)


def _state(found: Answer) -> str:
    message, running = found.found, found.running
    if message is None and running is None:
        return found.state
    if found.state == "in flight" or message is None:
        return _in_flight(found)
    if found.state == "delayed":
        left = "" if found.due is None else f", due in {_seconds(max(0.0, found.due - found.now))}"
        return f"delayed{left}"
    if found.state == "in line":
        return f"in line for limit {found.limit.name}" if found.limit else "in line for a limit"
    if found.state in ("dead", "set aside"):
        worker = f" at {message.worker}" if message.worker else ""
        return f"{found.state}, entry {message.entry}{worker}: {message.why}"
    return found.state


def _in_flight(found: Answer) -> str:
    message, running = found.found, found.running
    if running is not None:
        since = (
            ""
            if not running.since
            else f" since {_seconds(max(0.0, found.now - float(running.since)))}"
        )
        doing = "runs" if running.state == "active" else "waits for its process"
        early = "" if message else ", acknowledged when it started"
        return f"in flight at {running.worker}: {doing}{since}{early}"
    if found.worker is not None:
        if not found.worker.alive:
            age = _seconds(found.worker.age)
            return f"in flight at {found.worker.called}, which is silent for {age}"
        return f"in flight at {found.worker.called}; it does not say since when"
    if message is not None and message.worker:
        return f"held by {message.worker}, which is gone; it comes back"
    return "held by a stock worker, or by one that is gone"


def _before(console: Console, found: Answer) -> None:
    about = "about " if found.of_key is not None and found.of_level != found.of_key else ""
    parts = []
    if found.of_key is not None:
        parts.append(f"{found.of_key:,} of its key")
    if found.of_level is not None:
        parts.append(f"{about}{found.of_level:,} of its level")
    if found.of_queue is not None:
        parts.append(f"{about}{found.of_queue:,} of its queue")
    if parts:
        console.print(f"  before it: {', '.join(parts)}")


def _estimate(console: Console, found: Answer) -> None:
    if found.due is not None or found.of_queue is None:
        return
    if found.seconds is not None:
        console.print(
            f"\nTaken in about {_seconds(found.seconds)}, at {found.rate:,.3g} jobs/s as seen in the last "
            f"{found.window:.1f} s."
        )
    elif found.window and found.rate is not None:
        console.print(
            f"\nNothing was taken from its queue in the {found.window:.1f} s of this look: no estimate."
        )


# -- top ---------------------------------------------------------------------------------------


def bar(value: float, whole: float, width: int = BAR) -> str:
    """Return a bar of characters that need no colour."""
    filled = round(width * min(1.0, value / whole)) if whole > 0 else 0
    return "#" * max(filled, 1 if value > 0 else 0) + "." * (width - max(filled, int(value > 0)))


def frame(found: Frame, limit: int) -> RenderableType:
    """Return one picture of `top`."""
    parts: list[RenderableType] = [Text(_head(found))]
    sources = tables.table("Queues")
    sources.add_column("queue", overflow="fold", min_width=8)
    sources.add_column("backlog")
    for title in ("waiting", "in flight", "taken/s"):
        sources.add_column(title, justify="right", no_wrap=True)
    most = max((seen.waiting for seen in found.queues), default=0)
    for seen in found.queues[:limit]:
        rate = found.rates.get(seen.name)
        sources.add_row(
            Text(seen.name),
            bar(seen.waiting, most),
            _number(seen.waiting),
            _number(seen.in_flight),
            "" if rate is None else f"{rate:,.0f}",
        )
    parts.append(sources)
    for name, rows in found.tenants.items():
        if rows:
            parts.append(_tenant_bars(name, rows, limit))
    parts += [Text(f"Note: {words}") for words in found.notes]
    return Group(*parts)


def _head(found: Frame) -> str:
    alive = sum(worker.alive for worker in found.workers)
    slots = sum(worker.slots or 0 for worker in found.workers if worker.alive)
    held = sum(len(worker.held) for worker in found.workers)
    words = f"{alive} workers, {slots} slots, {held} held"
    silent = len(found.workers) - alive
    return words + (f", {silent} silent" if silent else "")


def _tenant_bars(queue: str, rows: Sequence[Tenant], limit: int) -> Table:
    table = tables.table(f"Tenants of {queue}")
    table.add_column("key", overflow="fold", min_width=8)
    table.add_column("backlog")
    for title in ("waiting", "in flight", "due", "got"):
        table.add_column(title, justify="right", no_wrap=True)
    most = max(row.backlog for row in rows)
    for row in rows[:limit]:
        table.add_row(Text(called(row.key)), bar(row.backlog, most), *_bar_cells(row))
    if rest := rows[limit:]:
        table.add_row(f"({len(rest):,} others)", "", *_bar_cells(other(rest)))
    return table


def _bar_cells(row: Tenant) -> list[str]:
    flight = _number(row.in_flight) + (f" of {row.cap}" if row.cap is not None else "")
    return [_number(row.backlog), flight, _percent(row.due), _percent(row.share)]
