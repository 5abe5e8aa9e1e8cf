"""Own what a worker's settings mean for the keys of a queue: which goes next, and how many run.

A policy belongs to a queue, not to a worker: the state that it orders is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ("Order", "Policy", "order_in_words")

#: How the next key is picked: by finish tag, by finish tag from zero in each take, by the oldest
#: message, or in turn.
Order = Literal["fair", "batch", "age", "turn"]


@dataclass(frozen=True)
class Policy:
    """Say how the keys of a queue are served.

    ``single`` is True if one message per key runs at a time. ``weight_header`` is "" where weights
    mean nothing.
    """

    order: Order
    single: bool
    key_header: str
    weight_header: str

    @property
    def in_words(self) -> str:
        """How the keys are served, for people."""
        return order_in_words(self.order, self.single)


_WORDS = {
    ("fair", False): "fair share",
    ("batch", False): "fair share, batch",
    ("age", False): "oldest first",
    ("age", True): "groups, fifo",
    ("turn", True): "groups, round robin",
}


def order_in_words(order: str, single: bool) -> str:
    """Return how keys are served, for people; an order that a newer version wrote as it stands."""
    return _WORDS.get((order, single), order)
