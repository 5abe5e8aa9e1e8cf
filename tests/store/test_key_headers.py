"""The key and the weight of a message, whatever its producer wrote: sorting never stops at one, and never guesses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_strategies.core.policy import Policy
from celery_strategies.core.tags import KEY_BYTES, UNKEYED, heed

from .scenarios import BAD
from .sorted_scenarios import sorted_source
from .sorted_state import audit, look
from .tools import Caller, Worker, job_of, jobs, message, push

POLICY = Policy("fair", False, "fair_key", "fair_weight")
#: Beyond this, an integer in JSON has lost digits by the time that Lua sees it.
EXACT = 10**15


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    """A worker whose queue is sorted."""
    worker = Worker(caller, "w", sorted_source("q"))
    worker.join()
    worker.adopt("q", POLICY)
    return worker


def read(client: redis.Redis, worker: Worker, *raws: bytes) -> tuple[list[tuple[str, float]], int]:
    """Sort messages; returns key and weight of each, by job, and how many complaints there were."""
    base = worker.keys.base("q")
    client.delete("q", f"{base}index:0", f"{base}state", *client.keys(f"{base}jobs:*"))
    push(client, "q", *raws)
    notes = worker.sort(worker.sources[0])
    assert audit(client, worker.keys, "q") == []
    found = {}
    for (_, key), elements in look(client, worker.keys, "q").jobs.items():
        for element in elements:
            found[job_of(element.raw)] = (key, float(element.weight or 1))
    return [found[job_of(raw)] for raw in raws], len(notes)


def tagged(**headers: Any) -> bytes:
    return message("a", **headers)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("acme", "acme"),
        ("ż 🙂:{}\"'%s\\\n", "ż 🙂:{}\"'%s\\\n"),
        ("*", "*"),
        ("x" * KEY_BYTES, "x" * KEY_BYTES),
        (42, "42"),
        (-7, "-7"),
        (0, "0"),
        (EXACT - 1, str(EXACT - 1)),
        # What JSON does not tell apart from an integer.
        (42.0, "42"),
        (-0.0, "0"),
    ],
)
def test_a_key(redis_db: redis.Redis, worker: Worker, value: Any, key: str) -> None:
    assert read(redis_db, worker, tagged(fair_key=value)) == ([(key, 1.0)], 0)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x" * (KEY_BYTES + 1),
        "ż" * (KEY_BYTES // 2 + 1),
        "a\0b",
        1.5,
        EXACT,
        2**53 + 1,
        -(2**63),
        10**40,
        math.inf,
        math.nan,
        True,
        False,
        [],
        ["a"],
        {},
        {"a": 1},
    ],
)
def test_no_key(redis_db: redis.Redis, worker: Worker, value: Any) -> None:
    assert read(redis_db, worker, tagged(fair_key=value, fair_weight=3)) == ([("", 3.0)], 1)


def test_no_key_and_no_complaint(redis_db: redis.Redis, worker: Worker) -> None:
    assert read(redis_db, worker, tagged(fair_key=None)) == ([("", 1.0)], 0)
    assert read(redis_db, worker, tagged()) == ([("", 1.0)], 0)


@pytest.mark.parametrize(
    ("value", "weight", "complaints"),
    [
        (3, 3.0, 0),
        (0.1, 0.1, 0),
        (1 / 3, 1 / 3, 0),
        (1, 1.0, 0),
        (1.0, 1.0, 0),
        (None, 1.0, 0),
        (1e-6, 1e-6, 0),
        (1e6, 1e6, 0),
        (1e9, 1e6, 1),
        (1e-12, 1e-6, 1),
        (math.inf, 1e6, 1),
        (10**400, 1e6, 1),
        (5e-324, 1e-6, 1),
        ("3", 1.0, 1),
        ("", 1.0, 1),
        (True, 1.0, 1),
        (False, 1.0, 1),
        (0, 1.0, 1),
        (-0.0, 1.0, 1),
        (-1, 1.0, 1),
        (-math.inf, 1.0, 1),
        (math.nan, 1.0, 1),
        ([3], 1.0, 1),
        ({}, 1.0, 1),
    ],
)
def test_a_weight(
    redis_db: redis.Redis, worker: Worker, value: Any, weight: float, complaints: int
) -> None:
    found = read(redis_db, worker, tagged(fair_key="a", fair_weight=value))
    assert found == ([("a", weight)], complaints)


numbers = (
    st.integers(1 - EXACT, EXACT - 1)
    | st.integers(-9, 9)
    | st.floats()
    | st.floats(1e-7, 1e7)
    | st.integers(-(2**70), 2**70)
)
values = (
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=20)
    | st.text("aż🙂:{}\"'\\%\0", max_size=300)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)


def known(value: Any) -> Any:
    """Return the value as Lua sees it, where that is not what Python sees."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return None if is_int and abs(value) >= EXACT else value


@settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(found=st.lists(st.tuples(values, values), min_size=1, max_size=40))
def test_lua_heeds_headers_as_python_does(
    found: list[tuple[Any, Any]], redis_db: redis.Redis, worker: Worker
) -> None:
    raws = [
        message(f"{n}", fair_key=key, fair_weight=weight) for n, (key, weight) in enumerate(found)
    ]
    expected = [heed(known(key), weight) for key, weight in found]
    got, _ = read(redis_db, worker, *raws)
    assert got == [("" if key in (None, UNKEYED) else key, float(w)) for key, w in expected]


# -- shapes -------------------------------------------------------------------------------------


def shapes() -> dict[str, bytes]:
    """Return one message as producers of many kinds write it."""
    plain = json.loads(message("a", fair_key='ż"\\ x', fair_weight=2.5))
    backwards = dict(reversed(plain.items()))
    backwards["headers"] = dict(reversed(plain["headers"].items()))
    spaced = json.dumps(plain, indent=3, separators=(" ,", " : "))
    body_with_headers = json.dumps({**plain, "body": '"headers": {"fair_key": "no"}'})
    nested = {**plain, "headers": {**plain["headers"], "headers": {"fair_key": "no"}}}
    twice = json.dumps(plain).replace('"fair_key"', '"fair_key": "no", "fair_key"', 1)
    return {
        "as Kombu writes it": json.dumps(plain).encode(),
        "headers last": json.dumps(backwards).encode(),
        "spaces and lines": spaced.encode(),
        "tight": json.dumps(plain, separators=(",", ":")).encode(),
        "not escaped": json.dumps(plain, ensure_ascii=False).encode(),
        "headers in the body": body_with_headers.encode(),
        "headers in the headers": json.dumps(nested).encode(),
        "the key twice": twice.encode(),
    }


@pytest.mark.parametrize("shape", shapes())
def test_the_shape_of_a_message_does_not_matter(
    redis_db: redis.Redis, worker: Worker, shape: str
) -> None:
    raw = shapes()[shape]
    assert read(redis_db, worker, raw) == ([('ż"\\ x', 2.5)], 0)
    # And its bytes are what is delivered.
    assert [delivery.raw for delivery in worker.take(1).deliveries] == [raw]


def test_protocol_1_has_no_headers_and_no_key(redis_db: redis.Redis, worker: Worker) -> None:
    first = {**json.loads(message("a")), "headers": {}, "body": "e30="}
    raw = json.dumps(first).encode()
    push(redis_db, "q", raw)
    assert worker.sort(worker.sources[0]) == []
    (element,) = look(redis_db, worker.keys, "q").jobs[0, ""]
    assert element.raw == raw


def test_a_key_of_bytes_that_are_no_text_is_a_key(redis_db: redis.Redis, worker: Worker) -> None:
    raw = message("a", fair_key="XX").replace(b"XX", b"\xff\xfe")
    push(redis_db, "q", raw)
    (delivery,) = worker.take(1).deliveries
    assert delivery.raw == raw
    worker.restore(redis_db, delivery.tag)
    (delivery,) = worker.take(1).deliveries
    assert delivery.raw == raw
    worker.caller(worker.store.settle([delivery.tag]))
    assert not redis_db.exists(worker.keys.state("q"), "unacked")


def test_headers_of_other_names(redis_db: redis.Redis, worker: Worker) -> None:
    policy = Policy("fair", False, "_schema name", "x:\"w'")
    redis_db.delete(worker.keys.policy("q"))
    worker.adopt("q", policy)
    raw = message("a", **{"_schema name": "t1", "x:\"w'": 2, "fair_key": "no"})
    assert read(redis_db, worker, raw) == ([("t1", 2.0)], 0)


def test_groups_know_no_weights(redis_db: redis.Redis, worker: Worker) -> None:
    redis_db.delete(worker.keys.policy("q"))
    worker.adopt("q", Policy("age", True, "group_key", ""))
    raw = message("a", group_key="g", fair_weight="no weight", **{"": 3})
    assert read(redis_db, worker, raw) == ([("g", 1.0)], 0)


def test_complaints_are_bounded(redis_db: redis.Redis, worker: Worker) -> None:
    raws = [message(f"{n}", fair_key=["x" * 1000]) for n in range(100)]
    assert read(redis_db, worker, *raws) == ([("", 1.0)] * 100, 8)


# -- what cannot be read at all -----------------------------------------------------------------


@pytest.mark.parametrize("by_take", [True, False], ids=["a take sorts", "a sorter sorts"])
def test_bad_messages_are_set_aside_and_the_rest_is_sorted(
    redis_db: redis.Redis, worker: Worker, by_take: bool
) -> None:
    bad = [BAD, b"", b"[]", b"\0", message("x").replace(b'"headers": {', b'"headers": [', 1)]
    good = [message(f"good-{n}", fair_key="ab"[n % 2]) for n in range(6)]
    push(redis_db, "q", bad[0], bad[1], good[0], *bad[2:4], *good[1:], bad[4])
    if not by_take:
        worker.sort(worker.sources[0])
    grant = worker.take(64)
    assert jobs(grant) == [f"good-{n}" for n in range(6)]
    aside = [fields[b"message"] for _, fields in redis_db.xrange(worker.keys.set_aside("q"))]
    assert aside == bad
    assert len(grant.set_aside) == (len(bad) if by_take else 0)
    assert audit(redis_db, worker.keys, "q") == []


def test_nothing_but_bad_messages_ends(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", *[BAD] * 1000)
    calls = 0
    while (grant := worker.take(8)).set_aside or grant.more:
        calls += 1
    assert calls <= 1000
    assert redis_db.xlen(worker.keys.set_aside("q")) == 1000
    assert not redis_db.exists("q")
