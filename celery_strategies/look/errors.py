"""Own the errors of a look: what was named and does not exist, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

from celery_strategies.simulation.errors import suggestion

__all__ = ("NoSuchNameError", "check_known")


class NoSuchNameError(LookupError):
    """Tell that a name does not exist, with what was probably meant; one line."""


def check_known(what: str, wrong: str, known: Iterable[str]) -> None:
    """Raise NoSuchNameError if *wrong* is none of *known*."""
    names = list(known)
    if wrong not in names:
        raise NoSuchNameError(f"{what} {wrong!r} does not exist; {suggestion(wrong, names)}")
