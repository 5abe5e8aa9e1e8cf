"""Own the words for why a slot got this job, along the order of decisions.

Looks at a model before a pick, and says afterwards what decided. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from celery_strategies.core.interleave import Interleave
from celery_strategies.core.model import Model
from celery_strategies.core.strategies import Strategy

if TYPE_CHECKING:
    from celery_strategies.simulation.engine import Setup

__all__ = ("ORDER", "Seen", "Step", "Witness", "called")

#: The order of decisions; consumer priority never decides, since there is one worker.
ORDER = ("pause", "lease", "strategy", "level", "key", "caps", "oldest")

#: How many names a reason shows.
_NAMES = 3


class Step(NamedTuple):
    """One step of the order of decisions that had a say, and what it said."""

    step: str
    text: str


@dataclass(frozen=True)
class Seen:
    """What a pick finds: lengths in list order, and what decides between keys, by queue and level."""

    #: What a strategy sees of each queue.
    lengths: Mapping[str, int]
    #: Queues that have jobs and are paused, or whose one job runs, or whose keys are all full.
    paused: tuple[str, ...]
    leased: tuple[str, ...]
    full: tuple[str, ...]
    tags: Mapping[str, Mapping[int, Mapping[str, float]]]
    full_keys: Mapping[str, Mapping[int, Sequence[str]]]


def called(key: str) -> str:
    """Return a key as it is shown."""
    return key or "(no key)"


class Witness:
    """Watch the picks of one model."""

    def __init__(self, model: Model, setup: Setup) -> None:
        self.model = model
        self.setup = setup
        self.ranks = {source.queue: source.rank for source in setup.sources}
        self.has_levels = {source.queue for source in setup.sources if source.levels is not None}
        #: The queue that yielded last.
        self.last: str | None = None

    def look(self, skip: Collection[str], leased: Collection[str]) -> Seen:
        """Return what the next pick will find."""
        lengths = self.model.lengths()
        tags: dict[str, dict[int, Mapping[str, float]]] = {}
        full_keys: dict[str, dict[int, Sequence[str]]] = {}
        for queue in lengths:
            if (keys := self.model.keys(queue)) is not None and queue not in skip:
                tags[queue] = {level: keys.tags(level) for level in keys.levels}
                full_keys[queue] = {level: keys.full(level) for level in keys.levels}
        return Seen(
            lengths={queue: 0 if queue in skip else n for queue, n in lengths.items()},
            paused=tuple(q for q in skip if q not in leased and self._has_jobs(q, lengths)),
            leased=tuple(q for q in lengths if q in leased and self._has_jobs(q, lengths)),
            full=tuple(q for q in tags if not lengths[q] and any(full_keys[q].values())),
            tags=tags,
            full_keys=full_keys,
        )

    def _has_jobs(self, queue: str, lengths: Mapping[str, int]) -> bool:
        keys = self.model.keys(queue)
        return bool(lengths[queue] or (keys is not None and keys.waiting))

    def reasons(self, seen: Seen, queue: str, key: str, level: int) -> tuple[Step, ...]:
        """Return why a job of this queue, key and level was picked, in the order of decisions."""
        found = [Step("pause", f"{name} is paused") for name in sorted(seen.paused)]
        found += [Step("lease", f"{name}: its one job runs") for name in seen.leased]
        found += [Step("strategy", f"{name} has only full keys") for name in seen.full]
        found.append(Step("strategy", self._strategy(seen, queue)))
        keys = self.model.keys(queue)
        if queue in self.has_levels or level:
            found.append(Step("level", self._level(seen, queue, level)))
        if keys is None:
            found.append(Step("oldest", "its oldest job"))
            return tuple(found)
        found.append(Step("key", self._key(keys, seen.tags[queue][level], key)))
        full = seen.full_keys[queue].get(level, ())
        if full:
            counts = [
                f"{called(name)} ({keys.in_flight(name)} of {keys.cap(name)})" for name in full
            ]
            verb = "is full and is" if len(full) == 1 else "are full and are"
            found.append(Step("caps", f"{_some(counts)} {verb} passed over"))
        found.append(Step("oldest", f"the oldest job of {called(key)}"))
        return tuple(found)

    def _strategy(self, seen: Seen, queue: str) -> str:
        lengths = seen.lengths
        if len(lengths) == 1:
            return "the only queue"
        if [name for name, length in lengths.items() if length] == [queue]:
            return "the only queue with jobs"
        strategy = self.setup.strategy
        if strategy is Strategy.PRIORITY:
            return self._priority(seen, queue)
        if strategy is Strategy.ROUND_ROBIN:
            return self._round_robin(seen, queue)
        most = "the most" if strategy is Strategy.MAX_LEN else "the fewest"
        ties = [name for name, n in lengths.items() if n == lengths[queue] and name != queue]
        text = f"{queue} has {lengths[queue]}, {most}"
        return f"{text}; ties with {_some(ties)}, first in the list" if ties else text

    def _priority(self, seen: Seen, queue: str) -> str:
        names = list(seen.lengths)
        before = names[: names.index(queue)]
        rank = self.ranks[queue]
        place = "first in the list" if rank is None else f"rank {rank}, lowest"
        return f"{place} with jobs" + (f"; {_none(before)}" if before else "")

    def _round_robin(self, seen: Seen, queue: str) -> str:
        names = list(seen.lengths)
        if self.last is None:
            begin, text = 0, "first turn"
        else:
            begin, text = names.index(self.last) + 1, f"the turn after {self.last}"
        rest = [*names[begin:], *names[:begin]]
        passed = rest[: rest.index(queue)]
        return text + (f"; {_none(passed)}" if passed else "")

    def _level(self, seen: Seen, queue: str, level: int) -> str:
        full = [
            above for above, keys in seen.full_keys.get(queue, {}).items() if above < level and keys
        ]
        if not level:
            return "level 0, the highest"
        if full:
            return f"level {level}; level {_some(list(map(str, full)))} has only full keys"
        return (
            f"level {level}; {'level 0 is' if level == 1 else f'levels 0 to {level - 1} are'} empty"
        )

    def _key(self, keys: Interleave, tags: Mapping[str, float], key: str) -> str:
        others = [name for name in tags if name != key]
        name = called(key)
        if not others:
            return f"{name} is the only key that may run"
        if keys.order == "age":
            return f"{name}: its job is the oldest"
        if keys.order == "turn":
            return f"{name}'s turn"
        own = tags[key]
        if equal := [other for other in others if tags[other] == own]:
            return f"{name} at {own:.4g} as {_some(list(map(called, equal)))}, and its job is older"
        following = min(others, key=tags.__getitem__)
        return f"{name} at {own:.4g} before {called(following)} at {tags[following]:.4g}"


def _none(queues: Sequence[str]) -> str:
    return f"{_some(queues)} {'has' if len(queues) == 1 else 'have'} none"


def _some(names: Sequence[str]) -> str:
    """Return a list of names in words, cut short."""
    shown = list(names[:_NAMES])
    if len(names) > _NAMES:
        return f"{', '.join(shown)} and {len(names) - _NAMES} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
