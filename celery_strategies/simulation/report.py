"""Own what is shown of a run: picks with their reasons, waits, several runs side by side, JSON.

Readable at 80 columns and without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from celery_strategies.simulation import tables
from celery_strategies.simulation.engine import Arrival, Pick, Result, Setup
from celery_strategies.simulation.reasons import called

__all__ = ("Waits", "as_json", "describe", "show_comparison", "show_run", "waits")

#: Most tenants that a table shows; JSON has all.
MOST_TENANTS = 20
#: Width of the columns with lengths, together, above which they are left out.
LENGTHS_WIDTH = 36


@dataclass(frozen=True)
class Waits:
    """How long the jobs of one queue, or of one key of it, waited, in seconds; None if none of them started."""

    queue: str
    #: None for all keys together.
    key: str | None
    jobs: int
    started: int
    median: float | None
    p95: float | None
    longest: float | None

    @property
    def never(self) -> int:
        """How many never started."""
        return self.jobs - self.started


def waits(result: Result) -> tuple[list[Waits], list[Waits]]:
    """Return the waits of each queue, in list order, and those of each key of a queue, if there are keys."""
    by_queue: dict[str, list[Arrival]] = {source.queue: [] for source in result.setup.sources}
    by_key: dict[tuple[str, str], list[Arrival]] = {}
    for job in result.jobs:
        by_queue.setdefault(job.queue, []).append(job)
        by_key.setdefault((job.queue, job.key), []).append(job)
    queues = [_waits(result, queue, None, jobs) for queue, jobs in by_queue.items()]
    if not any(key for _, key in by_key):
        return queues, []
    place = list(by_queue).index
    found = sorted(by_key.items(), key=lambda item: (place(item[0][0]), -len(item[1]), item[0][1]))
    return queues, [_waits(result, queue, key, jobs) for (queue, key), jobs in found]


def _waits(result: Result, queue: str, key: str | None, jobs: Sequence[Arrival]) -> Waits:
    found = sorted(wait for job in jobs if (wait := result.wait(job)) is not None)

    def rank(share: float) -> float | None:
        return found[max(0, math.ceil(share * len(found)) - 1)] if found else None

    return Waits(queue, key, len(jobs), len(found), rank(0.5), rank(0.95), rank(1))


def describe(setup: Setup) -> str:
    """Return in words how the worker decides."""
    names = ", ".join(_source(source.queue, source.rank) for source in setup.sources) or "no queue"
    words = [f"{setup.strategy.label} over {names}", f"{setup.slots} slot{'s'[: setup.slots != 1]}"]
    if setup.read_ahead:
        words.append(f"{setup.read_ahead} read ahead")
    words.append(_keys(setup))
    if setup.caps:
        words.append("caps " + ", ".join(f"{key}={cap}" for key, cap in setup.caps.items()))
    if setup.weights:
        words.append("weights " + ", ".join(f"{k}={w:g}" for k, w in setup.weights.items()))
    return "; ".join(words)


def _source(queue: str, rank: int | None) -> str:
    return queue if rank is None else f"{queue} (rank {rank})"


def _keys(setup: Setup) -> str:
    if setup.policy is None or (setup.policy.order == "age" and not setup.policy.single):
        return "no fair share"
    return setup.policy.in_words


# -- tables ------------------------------------------------------------------------------------


def show_run(console: Console, result: Result, limit: int) -> None:
    """Print how it was decided, up to ``limit`` picks, and the waits."""
    console.print(Text(describe(result.setup)))
    if not result.jobs:
        console.print("No jobs.")
        return
    if limit:
        _show_picks(console, result, limit)
    queues, tenants = waits(result)
    console.print(_table_of_waits(queues, tenant=False))
    if tenants:
        console.print(_table_of_waits(tenants[:MOST_TENANTS], tenant=True))
        tables.more(console, len(tenants) - MOST_TENANTS, "tenants", "--json has all")
    _show_never(console, result)


def _show_picks(console: Console, result: Result, limit: int) -> None:
    picks = result.picks[:limit]
    queues = [source.queue for source in result.setup.sources]
    lengths = len(queues) > 1 and sum(max(len(queue), 2) + 2 for queue in queues) <= LENGTHS_WIDTH
    columns: list[tuple[str, Callable[[Pick], str]]] = [("#", lambda pick: str(pick.number))]
    if any(pick.at for pick in picks):
        columns.append(("at", lambda pick: _seconds(pick.at)))
    if lengths:
        columns += [
            (queue, lambda pick, queue=queue: str(pick.lengths.get(queue, "")))  # type: ignore[misc]
            for queue in queues
        ]
    table = tables.table()
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    texts: list[tuple[str, Callable[[Pick], str]]] = [("takes from", lambda pick: pick.job.queue)]
    if any(pick.level for pick in picks):
        texts.append(("level", lambda pick: str(pick.level)))
    if any(pick.job.key for pick in picks):
        texts.append(("key", lambda pick: called(pick.job.key)))
    if any(pick.job.name for pick in picks):
        texts.append(("job", lambda pick: pick.job.name))
    for title, _ in texts:
        table.add_column(title, overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    for pick in picks:
        cells = [cell(pick) for _, cell in (*columns, *texts)]
        table.add_row(*map(Text, [*cells, why(pick)]))
    console.print(table)
    tables.more(console, len(result.picks) - limit, "picks", "--limit shows more")


def why(pick: Pick) -> str:
    """Return the reasons of a pick as one line; that the oldest job of a key goes, goes without saying."""
    said = [text for step, text in pick.reasons if step != "oldest"]
    return "; ".join(said)


def _table_of_waits(rows: Sequence[Waits], *, tenant: bool) -> Table:
    table = tables.table(
        "Waits per tenant, in seconds" if tenant else "Waits per queue, in seconds"
    )
    table.add_column("queue", overflow="fold")
    if tenant:
        table.add_column("key", overflow="fold")
    for title in ("jobs", "started", "median", "p95", "longest"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        names = [row.queue, *([called(row.key or "")] if tenant else [])]
        times = [_seconds(value) for value in (row.median, row.p95, row.longest)]
        table.add_row(*map(Text, names), str(row.jobs), str(row.started), *times)
    return table


def _show_never(console: Console, result: Result) -> None:
    never = len(result.jobs) - len(result.starts)
    if never:
        console.print(
            f"{never} jobs never start: what would have to end or resume first, does not."
        )


def show_comparison(console: Console, results: Mapping[str, Result], limit: int) -> None:
    """Print runs of the same jobs side by side: who goes when, and the waits."""
    for label, result in results.items():
        console.print(Text(f"{label}: {describe(result.setup)}"))
    first = next(iter(results.values()))
    if not first.jobs:
        console.print("No jobs.")
        return
    longest = max(len(result.picks) for result in results.values())
    if limit and longest:
        table = tables.table("Order")
        table.add_column("#", justify="right", no_wrap=True)
        for label in results:
            table.add_column(label, overflow="fold")
        for number in range(min(limit, longest)):
            cells = [_who(result, number) for result in results.values()]
            table.add_row(str(number + 1), *map(Text, cells))
        console.print(table)
        tables.more(console, longest - limit, "picks", "--limit shows more")
    pairs = {label: waits(result) for label, result in results.items()}
    console.print(_comparison({label: queues for label, (queues, _) in pairs.items()}, False))
    tenants = {label: found for label, (_, found) in pairs.items()}
    total = len(next(iter(tenants.values())))
    if total:
        shown = {label: found[:MOST_TENANTS] for label, found in tenants.items()}
        console.print(_comparison(shown, True))
        tables.more(console, total - MOST_TENANTS, "tenants", "--json has all")
    for label, result in results.items():
        if len(result.starts) < len(result.jobs):
            console.print(Text(f"{label}:"), end=" ")
            _show_never(console, result)


def _who(result: Result, number: int) -> str:
    if number >= len(result.picks):
        return ""
    pick = result.picks[number]
    key = f" {pick.job.key}" if pick.job.key else ""
    name = pick.job.queue if len(result.setup.sources) > 1 or not key else ""
    return f"{name}{key}".strip() + (f" p{pick.level}" if pick.level else "")


def _comparison(rows: Mapping[str, Sequence[Waits]], tenant: bool) -> Table:
    table = tables.table(
        "Waits per tenant, in seconds" if tenant else "Waits per queue, in seconds"
    )
    table.add_column("queue", overflow="fold")
    if tenant:
        table.add_column("key", overflow="fold")
    table.add_column("")
    for label in rows:
        table.add_column(label, justify="right", no_wrap=True)
    # The order of queues and of keys does not depend on the run.
    for group in zip(*rows.values(), strict=True):
        for title in ("median", "p95", "longest"):
            first = title == "median"
            names = [group[0].queue, *([called(group[0].key or "")] if tenant else [])]
            cells = [_seconds(getattr(row, title)) for row in group]
            table.add_row(*(Text(name if first else "") for name in names), title, *cells)
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value else "0"


# -- JSON --------------------------------------------------------------------------------------


def as_json(result: Result, limit: int | None = None) -> dict[str, Any]:
    """Return a run as what JSON can hold; ``limit`` is how many picks it has, None for all."""
    queues, tenants = waits(result)
    setup = result.setup
    return {
        "strategy": setup.strategy.label,
        "queues": [
            {"name": source.queue, "rank": source.rank, "levels": source.levels}
            for source in setup.sources
        ],
        "keys": None
        if setup.policy is None
        else {"order": setup.policy.order, "one_at_a_time": setup.policy.single},
        "slots": setup.slots,
        "jobs": len(result.jobs),
        "never_started": len(result.jobs) - len(result.starts),
        "picks": [_pick(result, pick) for pick in result.picks[:limit]],
        "waits": {
            "queues": [_row(row) for row in queues],
            "tenants": [_row(row) for row in tenants],
        },
    }


def _pick(result: Result, pick: Pick) -> dict[str, Any]:
    job = pick.job
    return {
        "pick": pick.number,
        "at": pick.at,
        "queue": job.queue,
        "level": pick.level,
        "key": job.key or None,
        "job": job.name or job.number,
        "waited": result.wait(job),
        "lengths": dict(pick.lengths),
        "why": [{"step": step, "text": text} for step, text in pick.reasons],
    }


def _row(row: Waits) -> dict[str, Any]:
    names = (
        {"queue": row.queue} if row.key is None else {"queue": row.queue, "key": row.key or None}
    )
    numbers = {"jobs": row.jobs, "started": row.started}
    return {**names, **numbers, "median": row.median, "p95": row.p95, "longest": row.longest}
