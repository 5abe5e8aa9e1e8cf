"""Messages that are not due yet: which those are, in which order they come back, and how much one call does."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_strategies.core.policy import Policy

from .sorted_scenarios import sorted_source
from .tools import NOW, SECONDS, Caller, Worker, job_of, jobs, message, push

POLICY = Policy("fair", False, "fair_key", "fair_weight")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NOW_MS = NOW // 1000


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker whose queue is sorted."""
    worker = Worker(caller, "w", sorted_source("q"))
    worker.join()
    worker.adopt("q", POLICY)
    return worker


def delayed(client: redis.Redis, worker: Worker) -> list[tuple[str, int]]:
    """Return the jobs that wait and when they are due, in milliseconds."""
    members = client.zrange(worker.keys.delayed("q"), 0, -1, withscores=True)
    return [(job_of(member.split(b":", 2)[2]), int(score)) for member, score in members]


# -- which --------------------------------------------------------------------------------------

digits = st.text("0123456789", min_size=1, max_size=9)
offsets = st.just("Z") | st.tuples(
    st.sampled_from("+-"), st.integers(0, 23), st.sampled_from(["", ":"]), st.integers(0, 59)
).map(lambda parts: f"{parts[0]}{parts[1]:02}{parts[2]}{parts[3]:02}")
day = datetime.fromisoformat
moments = st.datetimes(day("0001-01-02"), day("9999-12-30")) | st.datetimes(
    day("2023-11-13"), day("2023-11-16")
)
leap_days = (
    st.integers(1, 2499)
    .map(lambda n: n * 4)
    .filter(lambda year: year % 100 != 0 or year % 400 == 0)
    .map(lambda year: day(f"{year:04}-02-29T23:59:59"))
)
times = st.tuples(moments | leap_days, st.sampled_from("T "), st.none() | digits, offsets)


def spelled(time: tuple[datetime, str, str | None, str]) -> str:
    """Return the time as ISO 8601 has it."""
    moment, between, fraction, offset = time
    clock = moment.strftime("%H:%M:%S")
    date = f"{moment.year:04}-{moment.month:02}-{moment.day:02}"
    return f"{date}{between}{clock}{f'.{fraction}' if fraction else ''}{offset}"


def meant(time: tuple[datetime, str, str | None, str]) -> int:
    """Return the millisecond at which the time has come."""
    moment, _, fraction, offset = time
    shift = timedelta(0)
    if offset != "Z":
        minutes = int(offset[1:3]) * 60 + int(offset[-2:])
        shift = timedelta(minutes=minutes if offset[0] == "+" else -minutes)
    passed = moment.replace(microsecond=0, tzinfo=timezone.utc) - EPOCH - shift
    exact = Fraction(passed // timedelta(seconds=1) * 1000)
    return ceil(exact + Fraction(int(fraction or 0) * 1000, 10 ** len(fraction or "")))


def sorted_etas(client: redis.Redis, worker: Worker, etas: list[Any]) -> list[int | None]:
    """Sort a message with each of *etas*; returns when each is due, None for those that may run now."""
    client.delete("q", worker.keys.delayed("q"))
    push(client, "q", *(message(f"{n}", eta=eta) for n, eta in enumerate(etas)))
    worker.sort(worker.sources[0])
    due = dict(delayed(client, worker))
    visible = client.llen(f"{worker.keys.base('q')}jobs:0:")
    client.delete(f"{worker.keys.base('q')}jobs:0:")
    assert visible + len(due) == len(etas)
    return [due.get(f"{n}") for n in range(len(etas))]


hypothesis_settings = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@hypothesis_settings
@given(found=st.lists(times, min_size=1, max_size=60))
def test_a_time_in_the_future_is_read_to_the_millisecond_and_never_too_early(
    found: list[Any], redis_db: redis.Redis, worker: Worker
) -> None:
    expected = [due if due > NOW_MS else None for due in map(meant, found)]
    assert sorted_etas(redis_db, worker, [spelled(time) for time in found]) == expected


_STRICT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(\.\d+)?(Z|[+-](\d\d):?(\d\d))", re.ASCII
)


def is_time(text: str) -> bool:
    """Whether *text* is a time with an offset as Celery and others write it."""
    match = _STRICT.fullmatch(text)
    if match is None:
        return False
    *parts, _, _, hours, minutes = match.groups()
    try:
        datetime(*map(int, parts))  # type: ignore[arg-type]  # noqa: DTZ001
    except ValueError:
        return False
    return int(hours or 0) < 24 and int(minutes or 0) < 60


def damaged(text: str, at: int, put: str) -> str:
    """Return the text with one character replaced, removed or added."""
    at %= len(text)
    return text[:at] + put + text[at + 1 :]


garbage = (
    st.text(max_size=40)
    | st.builds(damaged, times.map(spelled), st.integers(0, 40), st.text("0129:+-TZ .x\0", max_size=2))
    | times.map(lambda time: spelled((*time[:3], "")))
    | st.sampled_from(
        [
            "2999-02-29T00:00:00Z", "2999-13-01T00:00:00Z", "2999-00-01T00:00:00Z", "2999-01-00T00:00:00Z",
            "2999-04-31T00:00:00Z", "2900-02-29T00:00:00Z", "2999-01-01T24:00:00Z", "2999-01-01T00:60:00Z",
            "2999-01-01T00:00:60Z", "2999-01-01T00:00:00+24:00", "2999-01-01T00:00:00+00:60", "0000-01-01T00:00:00Z",
            "2999-01-01T00:00:00.Z", "2999-01-01T00:00:00z", "2999-01-01", "tomorrow", "", "9" * 400,
            " 2999-01-01T00:00:00Z", "2999-01-01T00:00:00Z ", "2999-01-01T00:00:00Z\0", "٢٩٩٩-01-01T00:00:00Z",
        ]
    )
)  # fmt: skip


@hypothesis_settings
@given(found=st.lists(garbage.filter(lambda text: not is_time(text)), min_size=1, max_size=60))
def test_what_is_no_time_with_an_offset_delays_nothing(
    found: list[str], redis_db: redis.Redis, worker: Worker
) -> None:
    assert sorted_etas(redis_db, worker, found) == [None] * len(found)


def test_nor_does_what_is_no_text(redis_db: redis.Redis, worker: Worker) -> None:
    found: list[Any] = [None, 0, 1e300, True, [], {}, ["2999-01-01T00:00:00Z"], {"eta": 1}]
    assert sorted_etas(redis_db, worker, found) == [None] * len(found)


def test_a_message_that_is_due_now_runs_now(redis_db: redis.Redis, worker: Worker) -> None:
    at = EPOCH + timedelta(milliseconds=NOW_MS)
    etas = [(at + timedelta(microseconds=us)).isoformat() for us in (-1000, 0, 1, 1000)]
    assert sorted_etas(redis_db, worker, etas) == [None, None, NOW_MS + 1, NOW_MS + 1]


# -- and back -----------------------------------------------------------------------------------


def wait(client: redis.Redis, worker: Worker, *waits: tuple[str, float, int]) -> None:
    """Publish jobs, take them, and have each wait for some seconds; list *step* is theirs."""
    for name, _, step in waits:
        push(client, worker.keys.inbox("q", step), message(name))
    tags = {job_of(delivery.raw): delivery.tag for delivery in worker.take(64).deliveries}
    for name, seconds, _ in waits:
        packed = worker.store.delay(tags[name], "q", SECONDS + seconds)
        assert worker.caller(packed) == 1


def promote(worker: Worker, seconds: float, count: int = 300) -> int:
    """Promote what is due some seconds from now."""
    return int(worker.caller(worker.store.promote("q", count, int(NOW + seconds * 1e6))))


def test_they_come_back_when_due_in_the_order_of_their_times(
    redis_db: redis.Redis, worker: Worker
) -> None:
    wait(redis_db, worker, ("c", 3, 0), ("a", 1, 0), ("b", 1, 0), ("d", 2.5, 1))
    assert delayed(redis_db, worker) == [
        ("a", NOW_MS + 1000), ("b", NOW_MS + 1000), ("d", NOW_MS + 2500), ("c", NOW_MS + 3000)
    ]  # fmt: skip
    assert worker.caller(worker.store.due(["q", "r"], NOW)) == [1000, -1]
    assert promote(worker, 0.999) == 0
    push(redis_db, "q", message("visible"))
    assert worker.caller(worker.store.due(["q"], NOW + 1_000_000)) == [0]
    assert promote(worker, 1) == 2
    assert worker.caller(worker.store.due(["q"], NOW + 1_000_000)) == [1500]
    assert promote(worker, 3) == 2
    assert worker.caller(worker.store.due(["q"], NOW)) == [-1]
    # Behind what was visible before, on the level that they had.
    assert jobs(worker.take(9)) == ["visible", "a", "b", "c", "d"]


def test_a_message_of_a_sorted_queue_waits_apart_from_its_key(
    redis_db: redis.Redis, worker: Worker
) -> None:
    eta = (EPOCH + timedelta(milliseconds=NOW_MS + 5000)).isoformat()
    push(redis_db, "q", message("later", fair_key="a", eta=eta), message("now", fair_key="a"))
    assert jobs(worker.take(9)) == ["now"]
    assert delayed(redis_db, worker) == [("later", NOW_MS + 5000)]
    assert promote(worker, 5) == 1
    worker.now = NOW + 5_000_000
    assert jobs(worker.take(9)) == ["later"]


def test_a_message_given_back_delayed_is_held_no_more(
    redis_db: redis.Redis, worker: Worker
) -> None:
    wait(redis_db, worker, ("a", 1, 0))
    assert redis_db.hgetall(worker.keys.holder("w")) == {b"": b"1"}
    assert not redis_db.exists("unacked", "unacked_index")
    assert worker.caller(worker.store.delay("w:1.1", "q", SECONDS)) == 0
    assert delayed(redis_db, worker) == [("a", NOW_MS + 1000)]


def test_rate_limited_ones_can_be_called_back_and_the_others_cannot(
    redis_db: redis.Redis, worker: Worker
) -> None:
    push(redis_db, "q", message("slow"), message("eta"))
    slow, eta = (delivery.tag for delivery in worker.take(2).deliveries)
    worker.caller(worker.store.delay(slow, "q", SECONDS + 60, limited=True))
    worker.caller(worker.store.delay(eta, "q", SECONDS + 30))
    cursor = b"0"
    while (cursor := worker.caller(worker.store.release("q", cursor))) != b"0":
        pass
    assert promote(worker, 0) == 1
    assert jobs(worker.take(9)) == ["slow"]
    assert delayed(redis_db, worker) == [("eta", NOW_MS + 30_000)]


def test_one_call_moves_no_more_than_asked_for(redis_db: redis.Redis, worker: Worker) -> None:
    wait(redis_db, worker, *((f"{n}", n, 0) for n in range(30)))
    assert promote(worker, 60, 7) == 7
    assert promote(worker, 60) == 23
    assert [job_of(raw) for raw in reversed(redis_db.lrange("q", 0, -1))] == [
        f"{n}" for n in range(30)
    ]


def test_one_call_moves_only_so_many_bytes(redis_db: redis.Redis, worker: Worker) -> None:
    members = {f"{n:016}:0:".encode() + message(f"{n}", body="x" * 1_000_000): 1 for n in range(9)}
    redis_db.zadd(worker.keys.delayed("q"), members)
    assert [promote(worker, 0) for _ in range(10)] == [1] * 9 + [0]
    small = {f"{n:016}:0:".encode() + message(f"{n}", body="x" * 3000): 1 for n in range(300)}
    redis_db.zadd(worker.keys.delayed("q"), small)
    moved = promote(worker, 0)
    assert 262_144 / 3500 - 8 <= moved <= 262_144 / 3000 + 8


def test_a_list_that_cannot_be_written_keeps_only_its_own(
    redis_db: redis.Redis, worker: Worker
) -> None:
    wait(redis_db, worker, ("stuck", 1, 1), ("a", 2, 0), ("also-stuck", 3, 1), ("b", 4, 0))
    redis_db.set(worker.keys.inbox("q", 1), "text")
    assert promote(worker, 9) == 2
    assert [job_of(raw) for raw in redis_db.lrange("q", 0, -1)] == ["b", "a"]
    for _ in range(3):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            promote(worker, 9)
    assert [name for name, _ in delayed(redis_db, worker)] == ["stuck", "also-stuck"]
    redis_db.delete(worker.keys.inbox("q", 1))
    assert promote(worker, 9) == 2
    assert jobs(worker.take(9)) == ["a", "b", "stuck", "also-stuck"]


def test_what_is_none_of_ours_goes_where_it_is_set_aside(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.zadd(worker.keys.delayed("q"), {"nothing of ours": 0})
    assert promote(worker, 0) == 1
    assert worker.take(9).set_aside
    ((_, fields),) = redis_db.xrange(worker.keys.set_aside("q"))
    assert fields[b"message"] == b"nothing of ours"


def test_a_delayed_set_of_a_wrong_type_says_that_there_is_none(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.set(worker.keys.delayed("q"), "text")
    assert worker.caller(worker.store.due(["q", "r"], NOW)) == [-1, -1]
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        promote(worker, 0)


def test_the_time_of_a_message_survives_json(redis_db: redis.Redis, worker: Worker) -> None:
    # Another language may escape what it likes.
    raw = message("a", eta="2999-01-01T00:00:00Z").replace(b"2999-01", b"2\\u0039\\u0039\\u0039-01")
    assert json.loads(raw)["headers"]["eta"].startswith("2999")
    push(redis_db, "q", raw)
    worker.sort(worker.sources[0])
    assert [name for name, _ in delayed(redis_db, worker)] == ["a"]
