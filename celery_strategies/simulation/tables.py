"""Own what all printed tables have in common: readable at 80 columns and without colour."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ("console", "more", "table")


def console(*, color: bool) -> Console:
    """Return what prints: text as it is, whatever it contains."""
    return Console(highlight=False, markup=False, emoji=False, no_color=None if color else True)


def table(title: str | None = None) -> Table:
    """Return an empty table in plain characters."""
    return Table(
        title=title and f"\n{title}",
        title_justify="left",
        title_style="",
        box=box.ASCII2,
        show_edge=False,
        pad_edge=False,
    )


def more(console: Console, number: int, what: str, how: str = "--json has all") -> None:
    """Say that *number* further rows exist, if any."""
    if number > 0:
        console.print(f"... and {number:,} more {what}; {how}.")
