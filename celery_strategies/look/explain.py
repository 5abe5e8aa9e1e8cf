"""Own how one task is explained: what is read of its place, how far its turn is, and how fast its queue goes."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep

from celery_strategies.look.answer import Answer, Limit
from celery_strategies.look.find import Found, Search
from celery_strategies.look.reach import Reach, WorkerSeen, scored, text
from celery_strategies.look.reasons import reasons
from celery_strategies.look.shares import KeySeen, before, served_rate
from celery_strategies.look.status import QueueSeen, read_queues
from celery_strategies.look.tenants import Survey, survey
from celery_strategies.store import scripts
from celery_strategies.store.store import suffix_of

__all__ = ("explain", "position")

#: Seconds between the two looks that tell how fast jobs are taken, and that a look at all keys of a level may take.
WINDOW, KEYS_SECONDS = 0.15, 0.25
#: Messages on the newer side of its old place among which a message is looked for again.
AGAIN = 512
#: Limits that have a line, at most, that are looked through for one task.
MOST_LIMITS = 1000


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
    begun, first = monotonic(), found.ahead
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


def position(
    found: Found, seen: QueueSeen, looked: Survey | None
) -> tuple[int | None, int | None, int | None, KeySeen | None]:
    """Return how many jobs go before it, of its key, level and queue, as far as that is known; and its key."""
    level = found.level or 0
    own = found.ahead
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
