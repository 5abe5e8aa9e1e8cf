"""Own the arithmetic of shares: what is due to a key, what it got, and how many jobs go before one. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ("KeySeen", "before", "due", "got", "served_rate")


@dataclass
class KeySeen:
    """A key of one level of a queue; *tag* is None where it is full, *weight* where it is not known."""

    key: str
    level: int
    tag: float | None
    jobs: int
    back: int
    in_flight: int
    weight: float | None
    cap: int | None

    @property
    def backlog(self) -> int:
        """How many jobs it has waiting on this level."""
        return self.jobs + self.back


def due(keys: Iterable[KeySeen]) -> dict[str, float]:
    """Return the share of the next jobs that each key should get, 0 to 1.

    Levels are strict: all goes to the highest one that has a key which may run. A weight that is not known counts as 1.
    """
    able = [seen for seen in keys if seen.tag is not None and seen.backlog]
    top = min((seen.level for seen in able), default=None)
    weights = {seen.key: seen.weight or 1.0 for seen in able if seen.level == top}
    total = sum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def got(
    earlier: Iterable[KeySeen], later: Iterable[KeySeen], v_earlier: Mapping[int, float]
) -> dict[str, float]:
    """Return how many jobs each key was given between two looks, as its finish tags say.

    A job moves its key's tag on by 1/weight. A key that came new entered at V + 1/weight; one that went had its backlog
    served, at least.
    """
    old = {(seen.level, seen.key): seen for seen in earlier}
    new = {(seen.level, seen.key): seen for seen in later}
    served: dict[str, float] = {}
    for place in {**old, **new}:
        level, key = place
        was, now = old.get(place), new.get(place)
        number = 0.0
        if now is None:
            number = float(was.backlog if was is not None else 0)
        elif now.tag is not None:
            weight = now.weight or 1.0
            start = was.tag if was is not None else v_earlier.get(level, 0.0) + 1 / weight
            if start is not None and now.tag >= start:
                number = (now.tag - start) * weight
        served[key] = served.get(key, 0.0) + round(number, 6)
    return served


def served_rate(order: str, v_before: float, v_after: float, weights: float) -> float | None:
    """Return how many jobs of a level were taken while V went on, None if V does not tell."""
    if order == "turn":
        return max(0.0, v_after - v_before)
    if order == "fair" and v_after >= v_before:
        return (v_after - v_before) * weights
    return None


def before(order: str, mine: KeySeen, ahead: int, others: Iterable[KeySeen]) -> int | None:
    """Return about how many jobs of other keys of its level go before a job with *ahead* of its own before it.

    None where the order does not say so: oldest first and batch.
    """
    rivals = [seen for seen in others if seen.key != mine.key and seen.tag is not None]
    if order == "turn":
        own = mine.tag or 0.0
        return sum(
            min(seen.backlog, ahead + (1 if seen.tag is not None and seen.tag < own else 0))
            for seen in rivals
        )
    if order != "fair" or mine.tag is None:
        return None
    target = mine.tag + ahead / (mine.weight or 1.0)
    total = 0
    for seen in rivals:
        gap = target - (seen.tag or 0.0)
        if gap >= 0:
            total += min(seen.backlog, math.floor(gap * (seen.weight or 1.0) + 1e-9) + 1)
    return total
