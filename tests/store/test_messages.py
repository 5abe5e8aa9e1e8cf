"""Which messages `take.lua` hands out, byte for byte, and which it sets aside."""

from __future__ import annotations

import json

import pytest
import redis
from kombu import Connection

from celery_strategies.store import store as calls

from .tools import (
    Caller,
    Worker,
    assert_ttls,
    held,
    job_of,
    jobs,
    keyspace,
    message,
    place,
    push,
    record,
    tag,
)

GOOD = message("good")
MEGABYTE = 1024 * 1024


def shaped(**changes: object) -> bytes:
    """Return a message with top-level parts replaced; None leaves one out."""
    payload = json.loads(message("odd"))
    payload.update(changes)
    return json.dumps({key: value for key, value in payload.items() if value is not None}).encode()


def with_properties(**changes: object) -> bytes:
    """Return a message with properties replaced; None leaves one out."""
    properties = {**json.loads(message("odd"))["properties"], **changes}
    return shaped(properties={key: value for key, value in properties.items() if value is not None})


def replaced(old: bytes, new: bytes) -> bytes:
    """Return a stock message with some bytes replaced."""
    raw = message("odd")
    assert raw.count(old) == 1
    return raw.replace(old, new)


@pytest.fixture
def worker(caller: Caller) -> Worker:
    """A worker in its first session."""
    worker = Worker(caller, "w", "q")
    worker.join()
    return worker


# -- bad ones ---------------------------------------------------------------------------------------------------

NOT_JSON = {
    "text": b"hello",
    "empty": b"",
    "white space": b" \r\n\t",
    "cut off": message("odd")[:-1],
    "cut off after the body": b'{"body": "x",',
    "trailing bytes": message("odd") + b"}",
    "two objects": message("odd") * 2,
    "invalid UTF-8": b"\xff\xfe\x00{",
    "pickle": b"\x80\x04\x95\x00",
    "NUL at the end": message("odd") + b"\0",
    "NUL and garbage at the end": message("odd") + b'\0,"",[',
    "NUL in the body": replaced(b"W1td", b"W1\0d"),
    "NUL in a header": replaced(b'"tasks.add"', b'"tasks\0add"'),
    "byte order mark": b"\xef\xbb\xbf" + message("odd"),
    "deep nesting": b"[" * 5000 + b"]" * 5000,
    "deep nesting in a header": replaced(b'"tasks.add"', b"[" * 2000 + b"]" * 2000),
    "unknown escape in a header": replaced(b'"tasks.add"', rb'"\q"'),
    "unknown escape in the body": replaced(b'"W1td', rb'"\qW1td'),
    "half a surrogate escape": replaced(b'"tasks.add"', rb'"\ud8"'),
    "single quotes": message("odd").replace(b'"', b"'"),
    "comma after the body": replaced(b'"content-encoding"', b', "content-encoding"'),
    "8 MB of noise": b"\xfe" * (8 * MEGABYTE),
}
NOT_AN_OBJECT = {
    "number": b"1",
    "big number": b"123456789012345678901234567890",
    "string": b'"text"',
    "null": b"null",
    "true": b"true",
}
HEADERS = {
    "array": b'["body"]',
    "empty array": b"[]",
    "empty object": b"{}",
    "only a body": b'{"body": "x"}',
    "body and a comma": b'{"body": "x"}',
    "missing headers": shaped(headers=None),
    "headers null": replaced(
        b'{"lang": "py", "task": "tasks.add", "id": "odd", "retries": 0}', b"null"
    ),
    "headers an array": shaped(headers=["x"]),
    "headers an empty array": shaped(headers=[]),
    "headers an empty array, spaced": shaped(headers=[]).replace(
        b'"headers": []', b'"headers"\n :\t[ ]'
    ),
    "headers a string": shaped(headers="x"),
    "headers a number": shaped(headers=1),
    "headers true": shaped(headers=True),
}
PROPERTIES = {
    "missing properties": shaped(properties=None),
    "properties an array": shaped(properties=[1]),
    "properties an empty array": shaped(properties=[]),
    "properties a string": shaped(properties="x"),
}
DELIVERY_INFO = {
    "missing delivery_info": with_properties(delivery_info=None),
    "delivery_info an array": with_properties(delivery_info=["x"]),
    "delivery_info an empty array": with_properties(delivery_info=[]),
    "delivery_info a string": with_properties(delivery_info="x"),
}
NO_TAG = {
    "missing delivery_tag": with_properties(delivery_tag=None),
    "delivery_tag an object": with_properties(delivery_tag={"x": 1}),
    "delivery_tag an array": with_properties(delivery_tag=[]),
    "delivery_tag true": with_properties(delivery_tag=True),
}
PRIORITY = {
    "priority beyond every number": replaced(b'"priority": 0', b'"priority": 1e999'),
    "priority minus infinity": replaced(b'"priority": 0', b'"priority": -Infinity'),
}
BAD = [
    pytest.param(raw, reason, id=name)
    for reason, group in (
        ("not JSON", NOT_JSON),
        ("not a JSON object", NOT_AN_OBJECT),
        ("headers are not an object", HEADERS),
        ("properties are not an object", PROPERTIES),
        ("delivery_info is not an object", DELIVERY_INFO),
        ("no delivery_tag", NO_TAG),
        ("priority is not finite", PRIORITY),
    )
    for name, raw in group.items()
]


@pytest.mark.parametrize(("raw", "reason"), BAD)
def test_a_bad_message_is_set_aside_and_the_next_taken(
    raw: bytes, reason: str, redis_db: redis.Redis, worker: Worker
) -> None:
    push(redis_db, worker.keys.inbox("q", 2), raw, GOOD)
    grant = worker.take(1)
    if len(raw) > calls.BYTE_LIMIT:
        assert grant.more
        assert not grant.deliveries
        first = grant
        grant = worker.take(1)
    else:
        first = grant
    assert jobs(grant) == ["good"]
    ((index, entry, why),) = first.set_aside
    assert (index, why) == (0, reason)
    assert redis_db.xrange("strategies:{q}:set_aside")[0][0] == entry.encode()
    assert keyspace(redis_db) == {
        "strategies:{q}:set_aside": [
            {b"reason": reason.encode(), b"list": b"2", b"worker": b"w", b"message": raw}
        ],
        "strategies:sequence": b"1",
        **held(worker, {tag(1): (GOOD, place(1, step=2))}),
    }
    assert_ttls(redis_db, {"strategies:holder:w": 60_000})


def test_a_bad_one_among_those_given_back_is_set_aside(
    redis_db: redis.Redis, worker: Worker
) -> None:
    redis_db.zadd("strategies:{q}:returned", {b"4:1:0:{bad": 4 * 2**47 + 1})
    push(redis_db, "q", GOOD)
    grant = worker.take(2)
    assert jobs(grant) == ["good"]
    space = keyspace(redis_db)
    assert [fields[b"message"] for fields in space["strategies:{q}:set_aside"]] == [b"{bad"]
    assert [fields[b"list"] for fields in space["strategies:{q}:set_aside"]] == [b"4"]
    assert "strategies:{q}:returned" not in space


def test_at_most_64_are_set_aside_in_one_call(redis_db: redis.Redis, worker: Worker) -> None:
    push(redis_db, "q", *(b"bad %d" % n for n in range(100)), GOOD)
    grant = worker.take(3)
    assert len(grant.set_aside) == 64
    assert not grant.deliveries
    assert grant.more
    grant = worker.take(3)
    assert len(grant.set_aside) == 36
    assert jobs(grant) == ["good"]
    assert not grant.more
    stream = keyspace(redis_db)["strategies:{q}:set_aside"]
    assert [fields[b"message"] for fields in stream] == [b"bad %d" % n for n in range(100)]


def test_bad_ones_do_not_move_the_turn(redis_db: redis.Redis, worker: Worker) -> None:
    worker.strategy = worker.strategy.ROUND_ROBIN
    worker.read("a", "b")
    push(redis_db, "a", b"bad", message("a1"), message("a2"))
    push(redis_db, "b", b"bad", message("b1"))
    grant = worker.take(3)
    assert jobs(grant) == ["a1", "b1", "a2"]
    assert [index for index, _, _ in grant.set_aside] == [0, 1]


# -- good ones, byte for byte -----------------------------------------------------------------------------------

EXACT = {
    "stock": message("x"),
    "empty lists and objects": message("x", a=[], b={}, c=[[], {}], d=[None]),
    "headers an empty object": shaped(headers={}),
    "delivery_info an empty object": with_properties(delivery_info={}),
    "big integers": replaced(b'"retries": 0', b'"retries": 123456789012345678901234567890'),
    "floats": replaced(b'"retries": 0', b'"retries": 0.10000000000000000001, "f": 1.0, "g": 1E+2'),
    "NaN as Python writes it": message("x", a=float("nan"), b=float("inf")),
    "unicode": json.dumps(
        json.loads(message("x", name="zażółć 🙂 日本")), ensure_ascii=False
    ).encode(),
    "unicode escapes": message("x", name="zażółć 🙂 日本 \u0000 \u2028"),
    "a lone surrogate": message("x", name="file-\udcff", other='\\"', last="\\"),
    "a lone surrogate after backslashes": message("x", name="\\\\\udcff\\", other='\\\\"\udc80"'),
    "odd white space": message("x").replace(b", ", b" \r\n\t,\n ").replace(b": ", b"\t:  "),
    "no white space": json.dumps(json.loads(message("x")), separators=(",", ":")).encode(),
    "white space around": b" \n " + message("x") + b"\r\n",
    "body not first": json.dumps(dict(reversed(json.loads(message("x")).items()))).encode(),
    "no body": shaped(body=None),
    "empty body": message("x", body=""),
    "body an object": shaped(body={"headers": {"a": []}, "n": 10**30}),
    "body null": b'{"body": null, ' + message("x").partition(b", ")[2],
    "escapes in the body": message("x", body='[["a\\n"], {"k": "\\u00e9"}, "\\\\"]\n\t"'),
    "the text headers in the body": message(
        "x", body='{"headers": [], "properties": null}, "headers": ['
    ),
    "the text headers in a header": message("x", argsrepr='{"headers": []}', other="'headers': ["),
    "a body that ends in a backslash": message("x", body="\\"),
    "8 MB": message("x", body="x" * (8 * MEGABYTE)),
    "8 MB with escapes": message("x", body='"\n' * (2 * MEGABYTE)),
    "1 MB in the headers": message("x", argsrepr="x" * MEGABYTE),
    "a number for a tag": with_properties(delivery_tag=17),
    "an empty tag": with_properties(delivery_tag=""),
    "a key twice": replaced(b'"retries": 0', b'"retries": 0, "retries": []'),
    "bytes that are not UTF-8, as Kombu lets pass": replaced(
        b'"tasks.add"', b'"tasks.\xff\xc3add"'
    ),
    "exchange and routing key of a topic": with_properties(
        delivery_info={"exchange": "topic", "routing_key": "a.b"}
    ),
    "the separator and quotes": message("x", name='\x06\x16 "quoted" %s %d }{ ]['),
}


@pytest.mark.parametrize("raw", EXACT.values(), ids=EXACT)
def test_a_message_keeps_every_byte(raw: bytes, redis_db: redis.Redis, worker: Worker) -> None:
    key = worker.keys.inbox("q", 1)
    push(redis_db, key, raw)
    (delivery,) = worker.take(1).deliveries
    assert delivery.raw == raw
    assert redis_db.hget("unacked", delivery.tag) == record(raw)

    worker.restore(redis_db, delivery.tag, started=True)
    (delivery,) = worker.take(1).deliveries
    assert delivery.raw == raw

    worker.restore(redis_db, delivery.tag)
    worker.caller(calls.unsort(worker.keys, "q"))
    assert redis_db.lrange(key, 0, -1) == [raw]

    (delivery,) = worker.take(1).deliveries
    worker.caller(worker.store.set_aside(delivery.tag, "q", "why"))
    assert keyspace(redis_db)["strategies:{q}:set_aside"][0][b"message"] == raw


@pytest.mark.parametrize("raw", EXACT.values(), ids=EXACT)
def test_a_requeued_message_keeps_every_byte_but_for_the_mark(
    raw: bytes, redis_db: redis.Redis, worker: Worker
) -> None:
    push(redis_db, "q", raw)
    held_tag = worker.take_one()
    assert worker.caller(worker.store.requeue(held_tag, "q", 0)) == 1
    (requeued,) = redis_db.lrange("q", 0, -1)
    before, after = (json.loads(text.decode(errors="replace")) for text in (raw, requeued))
    assert after["properties"]["delivery_info"].pop("redelivered") is True
    assert json.dumps(after) == json.dumps(before)
    mark = b'"redelivered": true'
    assert requeued.replace(mark + b", ", b"").replace(mark, b"") == raw


@pytest.mark.parametrize("raw", EXACT.values(), ids=EXACT)
def test_stock_kombu_can_restore_the_record(
    raw: bytes, redis_db: redis.Redis, worker: Worker, broker_url: str
) -> None:
    push(redis_db, "q", raw)
    held_tag = worker.take_one()
    with Connection(broker_url) as connection:
        connection.default_channel.qos.restore_by_tag(held_tag)
    restored = [*redis_db.lrange("q", 0, -1)]
    assert len(restored) == 1
    before, after = (json.loads(text.decode(errors="replace")) for text in (raw, restored[0]))
    assert after["headers"].pop("redelivered") is True
    assert after["properties"]["delivery_info"].pop("redelivered") is True
    assert json.dumps(after) == json.dumps(before)
    assert not redis_db.exists("unacked", "unacked_index")


def test_the_messages_here_are_what_stock_kombu_writes(
    redis_db: redis.Redis, broker_url: str
) -> None:
    with Connection(broker_url) as connection:
        connection.default_channel.queue_declare("q")
        connection.Producer().publish({"x": 1}, routing_key="q", exchange="", headers={"id": "a"})
    (raw,) = redis_db.lrange("q", 0, -1)
    ours = json.loads(message("a"))
    stock = json.loads(raw)
    assert list(stock) == list(ours)
    assert job_of(raw) == "a"
    assert stock["properties"].keys() <= ours["properties"].keys()
    assert {"delivery_info", "delivery_tag", "delivery_mode", "body_encoding"} <= stock[
        "properties"
    ].keys()


@pytest.mark.parametrize("inside", ["headers", "properties"])
def test_the_mark_of_a_requeue_goes_nowhere_but_into_the_messages_own_delivery_info(
    inside: str, redis_db: redis.Redis, worker: Worker
) -> None:
    payload = json.loads(message("x"))
    payload[inside] = {**payload[inside], "nested": {"delivery_info": {"mine": 1}}}
    if inside == "headers":
        # Another order than Kombu's: the last "delivery_info" is not the message's own.
        payload = {"properties": payload["properties"], "headers": payload["headers"], "body": "x"}
    raw = json.dumps(payload).encode()
    push(redis_db, "q", raw)
    worker.caller(worker.store.requeue(worker.take_one(), "q", 0))
    assert redis_db.lrange("q", 0, -1) == [raw]


def test_a_mark_that_is_there_already_is_kept(redis_db: redis.Redis, worker: Worker) -> None:
    raw = with_properties(delivery_info={"exchange": "", "routing_key": "q", "redelivered": True})
    push(redis_db, "q", raw)
    worker.caller(worker.store.requeue(worker.take_one(), "q", 0))
    assert redis_db.lrange("q", 0, -1) == [raw]
