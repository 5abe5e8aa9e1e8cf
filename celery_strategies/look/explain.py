"""Own what is said of one task: where it is, what is before it, what keeps it from running now, and when it might.

The reasons stand in the order of decisions. What is said is decided by pure functions from what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

from celery_strategies.look.find import Found, Search, Searched, headers_of
from celery_strategies.look.reach import Reach, WorkerSeen, scored, text
from celery_strategies.look.shares import KeySeen, before, served_rate
from celery_strategies.look.status import QueueSeen, Reader, read_queues
from celery_strategies.look.tenants import Survey, survey
from celery_strategies.simulation.reasons import called
from celery_strategies.store import scripts
from celery_strategies.store.store import suffix_of

__all__ = ("ORDER", "STATES", "Answer", "Limit", "Running", "as_json", "explain", "reasons")

#: The order of decisions, and before it whether anybody reads at all.
ORDER = (
    *("readers", "pause", "lease", "consumer priority", "strategy", "level", "key", "caps"),
    *("oldest", "visible", "limit", "slots"),
)
#: Where a task can be, as the answer calls it.
STATES = {
    "inbox": "inbox",
    "sorted": "sorted",
    "front": "given back",
    "returned": "given back",
    "delayed": "delayed",
    "in_line": "in line",
    "unsorted": "inbox",
    "unacked": "in flight",
    "running": "in flight",
    "dead": "dead",
    "set_aside": "set aside",
}
#: Seconds between the two looks that tell how fast jobs are taken, and that a look at all keys of a level may take.
WINDOW, KEYS_SECONDS = 0.15, 0.25
#: Messages on the newer side of its old place among which a message is looked for again.
AGAIN = 512
#: Limits that have a line, at most, that are looked through for one task.
MOST_LIMITS = 1000
#: Names that a reason shows.
_NAMES = 3


class Reason(NamedTuple):
    """One step of the order of decisions that keeps a task from running now, and why."""

    step: str
    text: str


@dataclass(frozen=True)
class Limit:
    """The limit in whose line a task stands."""

    name: str
    to: int | None
    permits: int
    before: int


@dataclass(frozen=True)
class Running:
    """What a worker says of a task: its name, whether the job has begun, and when."""

    worker: str
    state: str
    since: float | None


@dataclass
class Answer:
    """Everything that is known of one task; *found* is None where its message is nowhere that was searched."""

    task: str
    searched: Searched
    found: Found | None = None
    near: str | None = None
    queue: QueueSeen | None = None
    now: float = 0.0
    running: Running | None = None
    worker: WorkerSeen | None = None
    #: Jobs before it: of its key, of its level with those, and of its queue with those. None: not known.
    of_key: int | None = None
    of_level: int | None = None
    of_queue: int | None = None
    key: KeySeen | None = None
    limit: Limit | None = None
    due: float | None = None
    #: Jobs of its queue that are taken in a second, and the seconds in which that was seen.
    rate: float | None = None
    window: float = 0.0
    reasons: list[Reason] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Where it is, in words; "unknown" only if everything was searched, else "not found"."""
        if self.found is not None:
            return STATES[self.found.what]
        if self.running is not None:
            return "in flight"
        return "unknown" if self.searched.everything else "not found"

    @property
    def seconds(self) -> float | None:
        """About how long it waits until it is taken, None if that cannot be told."""
        if self.due is not None:
            return max(0.0, self.due - self.now)
        if self.of_queue is None or not self.rate:
            return None
        return (self.of_queue + 1) / self.rate


def explain(
    reach: Reach,
    search: Search,
    queues: Sequence[QueueSeen],
    workers: Sequence[WorkerSeen],
    *,
    others: Sequence[QueueSeen] = (),
    key: str | None = None,
) -> Answer:
    """Search for a task among *queues*, those of *key* only where that is given, and read what is needed to explain it.

    *others* are all queues: what a worker takes first may be in any of them.
    """
    found = search.run(queues, key)
    answer = Answer(search.task, search.done, found, search.near, now=reach.now())
    if found is None:
        return answer
    by_id = {worker.id: worker for worker in workers}
    answer.worker = by_id.get(found.worker)
    # What decides is as of now, not of before the search.
    read = {name for worker in workers for name in worker.queues} | {found.queue}
    names = dict.fromkeys(seen.name for seen in (*others, *queues) if seen.name in read)
    fresh = {seen.name: seen for seen in read_queues(reach, names, workers, answer.now)}
    answer.queue = fresh[found.queue]
    if found.what == "delayed":
        _delay(reach, answer, found)
    elif found.what == "in_line":
        answer.limit = _limit(reach, found)
    elif found.what in ("inbox", "sorted", "front", "returned", "unsorted"):
        _position(reach, search, answer, fresh[found.queue], found)
    answer.reasons = reasons(answer, fresh)
    return answer


# -- reading ---------------------------------------------------------------------------------------


def _delay(reach: Reach, answer: Answer, found: Found) -> None:
    place = found.place
    at = scored(
        reach.one("ZRANGE", place.name, found.index, found.index, "WITHSCORES") if place else None
    )
    # The message may have moved since; its own score is the truth.
    if at and at[0][0].endswith(found.raw):
        answer.due = at[0][1] / 1000


def _limit(reach: Reach, found: Found) -> Limit | None:
    """Return the limit that a message in line waits for."""
    keys = reach.keys
    names = [text(name) for name in reach.one("ZRANGE", keys.lines, 0, MOST_LIMITS - 1) or ()]
    member = f"{found.number}{suffix_of(found.queue)}"
    scores = reach.many(["ZSCORE", keys.line(name), member] for name in names)
    for name, score in zip(names, scores, strict=True):
        if score is not None:
            rule, permits, ahead = reach.many(
                [
                    ["HGET", keys.limits, name],
                    ["ZCARD", keys.permits(name)],
                    ["ZCOUNT", keys.line(name), "-inf", f"({found.number}"],
                ]
            )
            to = text(rule or b"").partition(":")[0]
            return Limit(name, int(to) if to.isdigit() else None, int(permits), int(ahead))
    return None


def _position(reach: Reach, search: Search, answer: Answer, seen: QueueSeen, found: Found) -> None:
    begun, first = monotonic(), _ahead(found)
    looked = None
    if found.level is not None and seen.policy:
        looked = survey(reach, seen, levels=[found.level], seconds=KEYS_SECONDS)
    answer.of_key, answer.of_level, answer.of_queue, answer.key = position(found, seen, looked)
    if not seen.live_readers():
        # Stock workers may read it, and whoever looks would wait for nothing.
        return
    sleep(max(0.0, WINDOW - (monotonic() - begun)))
    answer.window = monotonic() - begun
    if seen.policy:
        answer.rate = _rate_by_tags(reach, answer, found, looked)
    elif (again := _again(reach, search, found)) is not None:
        answer.rate = max(0, first - again) / answer.window


def _ahead(found: Found) -> int:
    """Return how many messages of its list, or of its set, go before it."""
    if found.place is not None and found.place.kind == "z":
        return found.index
    return found.length - 1 - found.index


def _again(reach: Reach, search: Search, found: Found) -> int | None:
    """Return how many messages go before one that was found now; None if it is not near where it was."""
    place = found.place
    if place is None or place.kind != "l":
        return None
    # New ones come at the left, so it moves to the right.
    argv = [search.wanted, AGAIN, 1 << 20, "l", found.index, AGAIN]
    reply = reach.script(scripts.FIND, [place.name], *argv)  # type: ignore[list-item]
    return reply[2] - 1 - reply[1] if reply and reply[0] else None


def _rate_by_tags(
    reach: Reach, answer: Answer, found: Found, looked: Survey | None
) -> float | None:
    seen = answer.queue
    if looked is None or seen is None or found.level is None or not answer.window:
        return None
    v = reach.one("HGET", reach.keys.state(seen.name), f"v{found.level}")
    weights = sum(one.weight or 1.0 for one in looked.keys if one.tag is not None)
    number = served_rate(
        seen.policy["order"], looked.v.get(found.level, 0.0), float(v or 0), weights
    )
    return None if number is None else number / answer.window


# -- what it means: pure -------------------------------------------------------------------------


def position(
    found: Found, seen: QueueSeen, looked: Survey | None
) -> tuple[int | None, int | None, int | None, KeySeen | None]:
    """Return how many jobs go before it, of its key, level and queue, as far as that is known; and its key."""
    level = found.level or 0
    own = _ahead(found)
    if found.what in ("sorted", "front"):
        keys = looked.keys if looked else []
        mine = next((one for one in keys if one.key == found.key and one.level == level), None)
        of_key = own + (mine.back if mine and found.what == "sorted" else 0)
        higher = sum(n for other, n in seen.sorted.items() if other < level)
        rest = None
        if mine is not None and mine.tag is not None:
            rest = before(seen.policy.get("order", ""), mine, of_key, keys)
        of_level = None if rest is None else of_key + rest
        return of_key, of_level, None if of_level is None else of_level + higher, mine
    if found.what == "unsorted":
        return None, None, None, None
    back = sum(n for other, n in seen.returned.items() if other <= level)
    if found.what == "returned":
        higher = sum(n for other, n in seen.inbox.items() if other < level)
        return None, None, own + higher, None
    higher = sum(n for other, n in seen.inbox.items() if other < level)
    # What is sorted, or was given back, goes before what is not sorted yet.
    of_level = own + seen.returned.get(level, 0)
    return None, of_level, own + back + higher + sum(seen.sorted.values()), None


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
        ahead = _ahead(found)
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


# -- JSON --------------------------------------------------------------------------------------


def as_json(answer: Answer, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return an answer as what JSON can hold."""
    found, limit = answer.found, answer.limit
    headers = headers_of(found.raw) if found else {}
    running = answer.running
    held_by = running.worker if running else None
    if found is not None and found.worker and held_by is None:
        held_by = answer.worker.called if answer.worker else found.worker
    return {
        "task": answer.task,
        "state": answer.state,
        "name": headers.get("task"),
        "queue": found.queue if found else None,
        "level": found.level if found else None,
        "key": (found.key or None) if found else None,
        "deliveries": found.deliveries % 1000 if found else None,
        "worker": held_by,
        "worker_alive": answer.worker.alive if answer.worker else None,
        "running": running.state == "active" if running else None,
        "since": running.since if running else None,
        "due": answer.due,
        "limit": None
        if limit is None
        else {
            "name": limit.name,
            "to": limit.to,
            "permits": limit.permits,
            "before_in_line": limit.before,
        },
        "entry": (found.entry or None) if found else None,
        "reason": (found.why or None) if found else None,
        "before": {
            "of_key": answer.of_key,
            "of_level": answer.of_level,
            "of_queue": answer.of_queue,
        },
        "waits_because": [{"step": step, "text": words} for step, words in answer.reasons],
        "estimate": {
            "seconds": None if answer.seconds is None else round(answer.seconds, 2),
            "jobs_per_second": None if answer.rate is None else round(answer.rate, 2),
            "window": round(answer.window, 3),
        },
        "did_you_mean": answer.near,
        "searched": {
            "messages": answer.searched.messages,
            "of": answer.searched.total,
            "everything": answer.searched.everything,
            "seconds": round(answer.searched.seconds, 3),
        },
        "notes": list(notes),
    }
