"""Own the rule that says which source gives the next job.

Must not know how a source is stored, nor keep any state: lengths and the turn are arguments.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ("Strategy", "choose", "turn_after", "turn_from")


class Strategy(enum.IntEnum):
    """Name the four strategies. The default is PRIORITY, which is not zero."""

    ROUND_ROBIN = 0
    MAX_LEN = 1
    MIN_LEN = 2
    PRIORITY = 3

    @property
    def label(self) -> str:
        """Return the name as settings, logs and documentation spell it, such as ``max_len``."""
        return self.name.lower()

    @classmethod
    def labels(cls) -> tuple[str, ...]:
        """Return all labels, the default first."""
        return tuple(strategy.label for strategy in sorted(cls, key=lambda s: s != cls.PRIORITY))

    @classmethod
    def parse(cls, value: Strategy | str | int | None) -> Strategy:
        """Return the strategy that a user's value means; ``None`` means the default.

        A name may be in any case, with ``-``, a space or nothing for the underscore (``MaxLen``).
        Raises ValueError, listing the allowed names, for anything else; a bool is no strategy.
        """
        if value is None:
            return cls.PRIORITY
        if isinstance(value, str):
            name = value.lower().replace("-", "_").replace(" ", "_")
            for strategy in cls:
                if name in (strategy.label, strategy.label.replace("_", "")):
                    return strategy
        # type() and not isinstance(): True is an int, and no strategy.
        elif type(value) in (int, cls):
            for strategy in cls:
                if value == strategy.value:
                    return strategy
        raise ValueError(f"{value!r} is not a strategy: use one of {', '.join(cls.labels())}")


def choose(strategy: Strategy, lengths: Sequence[int], turn: int = 0) -> int | None:
    """Return the index of the source that gives the next job, or None if all are empty.

    ``lengths`` counts the waiting jobs of each source, in list order. ``turn`` is the index that
    round robin starts looking at; a turn past the end wraps. The other strategies ignore it.
    """
    waiting = [index for index, length in enumerate(lengths) if length > 0]
    if not waiting:
        return None
    if strategy is Strategy.ROUND_ROBIN:
        start = turn % len(lengths)
        return next((index for index in waiting if index >= start), waiting[0])
    # min() and max() return the first of equals, which is the tie rule.
    if strategy is Strategy.MAX_LEN:
        return max(waiting, key=lengths.__getitem__)
    if strategy is Strategy.MIN_LEN:
        return min(waiting, key=lengths.__getitem__)
    return waiting[0]


def turn_after(index: int, count: int) -> int:
    """Return the turn that follows when source ``index`` of ``count`` has yielded a job."""
    return (index + 1) % count if count > 0 else 0


def turn_from(last: str | None, order: Sequence[str], before: Sequence[str] = ()) -> int:
    """Return the turn in the list ``order`` when ``last`` was the queue that yielded last.

    A turn is remembered as a name, because an index means another source once the list changes.
    If ``last`` has left the list, the turn belongs to the first queue that followed it in
    ``before`` (the list it was in) and is still there. With nothing to go by it is 0.
    """
    if last is None:
        return 0
    if last in order:
        return turn_after(order.index(last), len(order))
    if last in before:
        start = before.index(last)
        for queue in (*before[start + 1 :], *before[:start]):
            if queue in order:
                return order.index(queue)
    return 0
