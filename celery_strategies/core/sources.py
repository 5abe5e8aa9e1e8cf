"""Own the list of sources of one worker and its order.

Must not know lengths or jobs. The list outlives connections: what it remembers of a queue stays
for the life of the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .levels import check_levels

__all__ = ("Source", "SourceList")


@dataclass(frozen=True, slots=True)
class Source:
    """Describe how the scheduler sees one queue.

    ``rank`` orders the sources, lower first, and None goes last. ``bound`` is the position in bind
    order, which decides between equal ranks. ``levels`` is the number of priority levels (1 to
    10), or None for a queue without.
    """

    queue: str
    rank: int | None
    bound: int
    levels: int | None = None

    @property
    def place(self) -> tuple[bool, int, int]:
        """Return the key that puts sources in list order."""
        return (self.rank is None, self.rank or 0, self.bound)


class SourceList:
    """Keep the bound sources in list order: by rank, equal ranks by bind order."""

    def __init__(self, ranks: Mapping[str, int] | None = None) -> None:
        self._ranks = dict(ranks or {})
        # Every queue that was ever bound. A queue that comes back gets its old place back:
        # cancel_consumer and add_consumer, or a reconnect, must not reorder the list.
        self._known: dict[str, Source] = {}
        self._bound: set[str] = set()

    def bind(self, queue: str, levels: int | None = None) -> Source:
        """Put ``queue`` on the list and return its source.

        Binding again is harmless; ``levels`` then replaces the old number, and None keeps it.
        Raises ValueError if ``levels`` is not 1 to 10.
        """
        check_levels(levels)
        source = self._known.get(queue)
        if source is None:
            source = Source(queue, self._ranks.get(queue), len(self._known), levels)
        elif levels is not None:
            source = replace(source, levels=levels)
        self._known[queue] = source
        self._bound.add(queue)
        return source

    def unbind(self, queue: str) -> None:
        """Take ``queue`` off the list, if it is on it, and remember its rank and position."""
        self._bound.discard(queue)

    def ordered(self) -> tuple[Source, ...]:
        """Return the bound sources in list order."""
        bound = (source for queue, source in tuple(self._known.items()) if queue in self._bound)
        return tuple(sorted(bound, key=lambda source: source.place))

    def describe(self) -> str:
        """Return one line per source, in list order, for the banner and the log."""
        sources = self.ordered()
        width = max((len(source.queue) for source in sources), default=0)
        return "\n".join(
            f"{source.queue:<{width}}  "
            + ("rank unset" if source.rank is None else f"rank {source.rank}")
            + ("" if source.levels is None else f", {_count(source.levels, 'level')}")
            for source in sources
        )

    def __contains__(self, queue: object) -> bool:
        return queue in self._bound

    def __iter__(self) -> Iterator[Source]:
        return iter(self.ordered())

    def __len__(self) -> int:
        return len(self._bound)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
