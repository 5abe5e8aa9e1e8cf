"""Own the mapping between priorities, levels and the lists that a queue has in Redis.

Kombu keeps one list per priority step of a queue. A step is 0 to 9, and 0 goes first. Must not
spell keys: the lists are numbers in here.
"""

from __future__ import annotations

__all__ = (
    "LISTS",
    "check_levels",
    "clamp_priority",
    "level_of_list",
    "levels_for_max_priority",
    "list_for",
)

#: Lists that one queue can have: Kombu clamps a priority to 0..9.
LISTS = 10


def check_levels(levels: int | None) -> int | None:
    """Return ``levels`` if it is None (no levels) or an integer from 1 to 10.

    Raises ValueError otherwise.
    """
    if levels is None:
        return None
    if not _is_int(levels) or not 1 <= levels <= LISTS:
        raise ValueError(f"levels must be None or an integer from 1 to {LISTS}, not {levels!r}")
    return levels


def level_of_list(index: int, levels: int | None) -> int:
    """Return the level that the jobs of list ``index`` have in a source with ``levels`` levels.

    A list beyond the last level belongs to the last level, so that no job lies unread. Without
    levels each list stands for itself: they are read in numeric order, as Kombu does.
    Raises ValueError for an index outside 0..9.
    """
    if not 0 <= index < LISTS:
        raise ValueError(f"a list index is 0 to {LISTS - 1}, not {index!r}")
    return index if levels is None else min(index, levels - 1)


def clamp_priority(priority: object, levels: int = LISTS) -> int | None:
    """Return ``priority`` as a level 0 to ``levels`` - 1, or None if it says nothing.

    As in Kombu, what ``int()`` accepts is a priority (``"3"`` is 3) and is clamped to the range;
    None and what ``int()`` refuses are no priority.
    """
    try:
        value: int = int(priority)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0, min(value, levels - 1))


def list_for(priority: object, levels: int, default: int) -> int:
    """Return the list that a job with ``priority`` is published to in a source with levels.

    ``default`` is the level of a job without a usable priority. Kombu falls back to 0 there, which
    is the highest: nothing may jump the queue by being unreadable.
    Raises ValueError if ``default`` is not one of the levels.
    """
    if not 0 <= default < levels:
        raise ValueError(f"the default level must be 0 to {levels - 1}, not {default!r}")
    level = clamp_priority(priority, levels)
    return default if level is None else level


def levels_for_max_priority(max_priority: int) -> int:
    """Return the number of levels that the queue argument ``x-max-priority`` asks for.

    N stands for the priorities 0..N, so for N + 1 levels; 10 at most, as Kombu has no more lists.
    Raises ValueError unless it is an integer, 0 or more.
    """
    if not _is_int(max_priority) or max_priority < 0:
        raise ValueError(f"x-max-priority must be an integer, 0 or more, not {max_priority!r}")
    return min(max_priority + 1, LISTS)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
