"""Own what keeps a task from running now, in words, in the order of decisions. Pure: from what was read."""

from __future__ import annotations

from collections.abc import Sequence

from celery_strategies.look.answer import STATES, Answer, Limit, Reason
from celery_strategies.look.find import Found
from celery_strategies.look.shares import KeySeen
from celery_strategies.look.status import QueueSeen, Reader
from celery_strategies.simulation.reasons import called

__all__ = ("ORDER", "reasons")

#: The order of decisions, and before it whether anybody reads at all.
ORDER = (
    *("readers", "pause", "lease", "consumer priority", "strategy", "level", "key", "caps"),
    *("oldest", "visible", "limit", "slots"),
)
#: Names that a reason shows.
_NAMES = 3


def reasons(answer: Answer, queues: dict[str, QueueSeen]) -> list[Reason]:
    """Return every step of the order of decisions that keeps the task from running now."""
    found, seen = answer.found, answer.queue
    if found is None or seen is None or STATES[found.what] in ("in flight", "dead", "set aside"):
        return []
    said: list[tuple[str, str | None]] = [("readers", _readers(seen))]
    said.append(("pause", f"{seen.name} is paused: {seen.paused}" if seen.paused else None))
    said.append(("lease", _lease(seen)))
    said.append(("consumer priority", _priority(seen)))
    if found.what == "delayed":
        said.append(("visible", _not_due(answer, found)))
    elif found.what == "in_line":
        said.append(("limit", _in_line(answer.limit)))
    elif found.what == "unsorted":
        said.append(("visible", "it is on its way back to Kombu's lists (unsort)"))
    else:
        said.append(("strategy", _strategy(seen, queues)))
        said.append(("level", _level(found, seen)))
        said += _keys(answer, found, seen)
        said.append(("slots", _slots(seen)))
    return [Reason(step, words) for step, words in said if words]


def _readers(seen: QueueSeen) -> str | None:
    if seen.live_readers():
        return None
    silent = [reader.worker for reader in seen.readers]
    if silent:
        names = _some([f"{worker.called} ({worker.age:.0f} s)" for worker in silent])
        return f"no live strategies worker reads {seen.name}; silent: {names}"
    return f"no strategies worker reads {seen.name} (stock workers are not seen from here)"


def _lease(seen: QueueSeen) -> str | None:
    lease = seen.lease
    if lease is None or lease.worker is None:
        return None
    leader = next((r.worker for r in seen.readers if r.worker.id == lease.worker), None)
    name = leader.called if leader else lease.worker
    if lease.tag:
        return (
            f"{name} has the lease (term {lease.term}), and the queue's one job is in flight there"
        )
    if leader is not None and leader.alive:
        return None
    return f"{name} has the lease (term {lease.term}), and shows no signs of life"


def _priority(seen: QueueSeen) -> str | None:
    live = seen.live_readers()
    above = [reader for reader in live if not reader.stands_by]
    if len(above) == len(live):
        return None
    names = _some([f"{reader.worker.called} ({reader.priority})" for reader in above])
    down = _some([f"{r.worker.called} ({r.priority})" for r in live if r.stands_by])
    return f"only {names} takes at full speed; {down} stands by"


def _strategy(seen: QueueSeen, queues: dict[str, QueueSeen]) -> str | None:
    """Say which other queue each reader takes from now; nothing if one of them takes from this."""
    said = []
    for reader in seen.live_readers():
        if reader.stands_by:
            continue
        words = _first(reader, seen, queues)
        if words is None:
            return None
        said.append(f"{reader.worker.called} ({reader.worker.strategy}): {words}")
    return _some(said) if said else None


def _first(reader: Reader, seen: QueueSeen, queues: dict[str, QueueSeen]) -> str | None:
    names = reader.worker.queues
    ready = {name: queues[name].ready if name in queues else 0 for name in names}
    mine = ready.get(seen.name, 0)
    place = names.index(seen.name) if seen.name in names else len(names)
    others = {name: number for name, number in ready.items() if number and name != seen.name}
    if reader.worker.strategy == "priority":
        first = {name: number for name, number in others.items() if names.index(name) < place}
        verb = "goes first"
    elif reader.worker.strategy == "max_len":
        first = {
            name: number
            for name, number in others.items()
            if (-number, names.index(name)) < (-mine, place)
        }
        verb = "is longer"
    elif reader.worker.strategy == "min_len":
        first = {
            name: number
            for name, number in others.items()
            if (number, names.index(name)) < (mine, place)
        }
        verb = "is shorter"
    else:
        # Every queue has its turn.
        return None
    if not first:
        return None
    named = [f"{name} ({number:,} jobs) {verb}" for name, number in first.items()]
    return _some(named)


def _level(found: Found, seen: QueueSeen) -> str | None:
    level = found.level or 0
    above: dict[int, int] = {}
    for counts in (seen.sorted, seen.returned, {} if seen.policy else seen.inbox):
        for other, number in counts.items():
            if other < level:
                above[other] = above.get(other, 0) + number
    if not above:
        return None
    named = [f"level {other} has {number:,}" for other, number in sorted(above.items())]
    return f"{_some(named)}, and it is on level {level}"


def _keys(answer: Answer, found: Found, seen: QueueSeen) -> list[tuple[str, str | None]]:
    """Return what its key, caps and its place among its key have to do with it."""
    said: list[tuple[str, str | None]] = []
    key, name = answer.key, called(found.key or "")
    if found.what == "inbox":
        ahead = answer.of_level or 0
        if seen.policy:
            number = sum(seen.sorted.values())
            said.append(("key", _unsorted(number, seen)))
        said.append(("oldest", f"{ahead:,} messages of its level are before it" if ahead else None))
        return said
    if found.what == "returned":
        ahead = found.ahead
        said.append(("oldest", f"{ahead:,} messages were given back before it" if ahead else None))
        return said
    order = seen.policy.get("order", "")
    if key is not None and key.tag is not None and answer.of_level is not None:
        others = answer.of_level - (answer.of_key or 0)
        if others:
            said.append(("key", f"about {others:,} jobs of other keys have their turn before it"))
    elif order in ("age", "batch") and key is not None and key.tag is not None:
        words = "oldest job" if order == "age" else "shares start anew in each take"
        said.append(("key", f"its key takes its turn by the order of the queue ({words})"))
    if key is not None and key.tag is None:
        said.append(("caps", _full(key, name, seen)))
    if answer.of_key:
        said.append(("oldest", f"{answer.of_key:,} jobs of {name} are before it"))
    return said


def _unsorted(number: int, seen: QueueSeen) -> str:
    sorter = f"; {seen.sorter} sorts" if seen.sorter else ""
    words = f", behind {number:,} jobs that are" if number else ""
    return f"it is not sorted yet{words}{sorter}"


def _full(key: KeySeen, name: str, seen: QueueSeen) -> str:
    if seen.policy.get("single") == "1":
        return f"{name} runs one at a time, and one is in flight"
    return f"{name} is full: {key.in_flight} in flight, and its cap is {key.cap}"


def _in_line(limit: Limit | None) -> str:
    if limit is None:
        return "it waits for a permit of a limit whose line is not there any more"
    to = f" of {limit.to}" if limit.to is not None else ""
    words = f"limit {limit.name}: {limit.permits}{to} permits are taken"
    return f"{words}, and {limit.before:,} jobs are before it in the line"


def _not_due(answer: Answer, found: Found) -> str:
    what = "it waits for its rate limit" if found.mark == "r" else "its ETA has not come"
    if answer.due is None:
        return what
    left = answer.due - answer.now
    return f"{what}: due in {left:,.1f} s" if left > 0 else f"{what}, until now"


def _slots(seen: QueueSeen) -> str | None:
    workers = [reader.worker for reader in seen.live_readers()]
    if not workers or any(w.slots is None or len(w.held) < w.slots for w in workers):
        return None
    return f"all slots of {_some([worker.called for worker in workers])} are taken"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return "; ".join(names[:_NAMES]) + (f"; and {more} more" if more > 0 else "")
