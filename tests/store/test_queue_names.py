"""A queue may be called anything: what goes in comes back to exactly that queue (case 26)."""

from __future__ import annotations

import json

import pytest
import redis
from kombu import Connection

from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys

from .tools import NOW, STALE, Caller, Worker, job_of, jobs, keyspace, message, push

NAMES = [
    "plain",
    "with space",
    " leading and trailing ",
    "zażółć-🙂-日本",
    "{tag}",
    "a{b}c",
    "}{",
    "{",
    "colon:in:it",
    ":returned",
    "1:2:3:",
    'double"quote',
    "single'quote",
    "percent%s%d%%",
    "back\\slash\\n",
    "new\nline\ttab",
    "\x06\x16",
    "q\x06\x161",
    ',"",["x"]',
    '"]',
    "*?[a-z]",
    "unacked-not",
    "x" * 500,
]
PREFIXES = ["", "p:", "{p}", 'odd"%s ']


@pytest.fixture(params=NAMES, ids=lambda text: repr(text)[:30])
def queue(request: pytest.FixtureRequest) -> str:
    """A name."""
    return str(request.param)


@pytest.fixture(params=PREFIXES, ids=lambda text: repr(text)[:30])
def keys(request: pytest.FixtureRequest) -> Keys:
    """Key names under a prefix."""
    return Keys(prefix=request.param)


@pytest.fixture
def worker(caller: Caller, keys: Keys, queue: str, redis_db: redis.Redis) -> Worker:
    """A worker with two messages of the queue in hand, of lists 0 and 3, beside a queue of a similar name."""
    worker = Worker(caller, "host@wörker:1", queue, keys=keys)
    worker.join()
    push(redis_db, keys.inbox(queue, 0), message("zero", queue=queue))
    push(redis_db, keys.inbox(queue, 3), message("three", queue=queue))
    push(redis_db, keys.inbox(queue + "-other", 0), message("other"))
    return worker


def waiting(client: redis.Redis, worker: Worker, queue: str) -> dict[int, list[str]]:
    """Return the jobs in the queue's own lists, by step."""
    found = {}
    for step, key in enumerate(worker.keys.inboxes(queue)):
        raws = client.lrange(key, 0, -1)
        if raws:
            found[step] = [job_of(raw) for raw in raws]
    return found


def test_every_way_out_and_back(redis_db: redis.Redis, worker: Worker, queue: str) -> None:
    grant = worker.take(5)
    assert jobs(grant) == ["zero", "three"]
    zero, three = (delivery.tag for delivery in grant.deliveries)
    assert calls.worker_of(zero) == worker.name
    assert calls.Place.parse(worker.entry(three, redis_db)) == calls.Place(3, 2, 0, queue)

    assert worker.restore(redis_db, zero, three) == 2
    assert redis_db.zcard(worker.keys.returned(queue)) == 2
    assert worker.caller(calls.unsort(worker.keys, queue)) == 2
    assert waiting(redis_db, worker, queue) == {0: ["zero"], 3: ["three"]}

    zero, three = (delivery.tag for delivery in worker.take(5).deliveries)
    assert worker.caller(worker.store.requeue(three, queue, 3)) == 1
    assert waiting(redis_db, worker, queue) == {3: ["three"]}

    assert worker.caller(worker.store.set_aside(zero, queue, "why"))
    assert [job_of(x[b"message"]) for x in keyspace(redis_db)[worker.keys.set_aside(queue)]] == [
        "zero"
    ]

    (three,) = (delivery.tag for delivery in worker.take(5).deliveries)
    assert worker.caller(worker.store.settle([three])) == []
    assert worker.caller(worker.store.watch([queue], watchers=1, stale=STALE, now=NOW)) == [1]
    assert worker.caller(worker.store.unwatch([queue])) == 0
    assert keyspace(redis_db).keys() == {
        worker.keys.sequence,
        worker.keys.holder(worker.name),
        worker.keys.set_aside(queue),
        worker.keys.inbox(queue + "-other", 0),
    }


def test_stock_kombu_restores_to_exactly_that_queue(
    redis_db: redis.Redis, worker: Worker, queue: str, broker_url: str
) -> None:
    tags = [delivery.tag for delivery in worker.take(5).deliveries]
    options = {"global_keyprefix": worker.keys.prefix}
    with Connection(broker_url, transport_options=options) as connection:
        for tag in tags:
            connection.default_channel.qos.restore_by_tag(tag)
    # Stock Kombu goes by the message's own priority, which is 0 here for both.
    assert waiting(redis_db, worker, queue) == {0: ["zero", "three"]}
    (raw, _) = redis_db.lrange(worker.keys.inbox(queue, 0), 0, -1)
    payload = json.loads(raw)
    assert payload["properties"]["delivery_info"] == {
        "exchange": "",
        "routing_key": queue,
        "redelivered": True,
    }
    assert not redis_db.exists(worker.keys.unacked, worker.keys.unacked_index)
    assert redis_db.llen(worker.keys.inbox(queue + "-other", 0)) == 1


def test_stock_kombu_publishes_where_we_read(
    redis_db: redis.Redis, worker: Worker, queue: str, broker_url: str
) -> None:
    worker.take(5)
    options = {"global_keyprefix": worker.keys.prefix, "priority_steps": list(range(10))}
    with Connection(broker_url, transport_options=options) as connection:
        for priority in (9, 0, 4):
            connection.Producer().publish(
                {},
                routing_key=queue,
                exchange="",
                priority=priority,
                headers={"id": f"p{priority}"},
            )
    assert jobs(worker.take(5)) == ["p0", "p4", "p9"]


def test_names_are_never_confused_with_each_other(caller: Caller, redis_db: redis.Redis) -> None:
    worker = Worker(caller, "w", *NAMES)
    worker.join()
    # A list of one queue can be the inbox of another: "q<sep>1" is Kombu's own ambiguity, hence list 0 only.
    for name in NAMES:
        push(redis_db, worker.keys.inbox(name, 0), message(name, queue=name))
    grant = worker.take(64)
    assert jobs(grant) == NAMES
    assert [delivery.source for delivery in grant.deliveries] == list(range(len(NAMES)))
    worker.restore(redis_db, *(delivery.tag for delivery in grant.deliveries))
    assert jobs(worker.take(64)) == NAMES
