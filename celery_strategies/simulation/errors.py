"""Own the error of a simulation that cannot be run as it is asked for, and the suggestions in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ("SimulationError", "check_known", "closest", "meant", "suggestion")


class SimulationError(ValueError):
    """Tell what is wrong with a backlog, a trace or an option, and what is wanted; one line."""


def closest(wrong: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, None if none is near."""
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wrong.lower(), folded, n=1)
    return folded[close[0]] if close else None


def meant(wrong: str, known: Iterable[str]) -> str:
    """Return what goes behind a name that does not exist: "; did you mean ...?", or nothing."""
    close = closest(wrong, known)
    return f"; did you mean {close!r}?" if close else ""


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """Return the same, or else what names there are."""
    names = list(dict.fromkeys(known))
    if close := meant(wrong, names):
        return close.removeprefix("; ")
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"known: {shown}" if names else "there is none"


def check_known(what: str, wrong: str, known: Iterable[str]) -> None:
    """Raise SimulationError, with a suggestion, if ``wrong`` is none of ``known``."""
    names = list(known)
    if wrong not in names:
        raise SimulationError(f"{what} {wrong!r} does not exist; {suggestion(wrong, names)}")
