"""Cases 24, 25 and 29: replies and processes that are lost in the middle of a call."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
import redis

from celery_strategies import Strategy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys
from celery_strategies.store.link import Link
from celery_strategies.store.store import Grant, SourceKeys, Store, TakePlan
from tests.conftest import ProxyFactory
from tests.faults.conftest import Publisher, Starter
from tests.faults.helpers import QUEUE, everywhere, nothing_left
from tests.support.apps import ended, started
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

KEYS = Keys()
SHA = {script.name: script.sha.encode() for script in scripts.ALL}
#: Whatever is known of the sources: a take of sorted ones is another script.
TAKES = {sha for name, sha in SHA.items() if name.startswith("take")}
SETTLES = {sha for name, sha in SHA.items() if name.startswith("settle")}


@pytest.fixture
def link(redis_server: RedisServer) -> Link:
    """A link to the shared server, scripts loaded."""
    link = Link(redis_server.client(protocol=3).connection_pool.get_connection(), lambda: None)
    link.call_all(calls.load_scripts())
    return link


def _plan(worker: str) -> TakePlan:
    return TakePlan(KEYS, worker, Strategy.PRIORITY, [SourceKeys(QUEUE, None, (0, 3, 6, 9))])


def _seed(publish_to: redis.Redis, labels: list[str]) -> None:
    """Write messages as a stock producer does."""
    for label in labels:
        body = f'"[[\\"{label}\\"], {{}}, {{}}]"'
        publish_to.lpush(
            QUEUE,
            f'{{"body": {body}, "content-encoding": "utf-8", "content-type": "application/json", '
            f'"headers": {{"task": "test.record", "id": "{label}"}}, "properties": {{"priority": 0, '
            f'"delivery_info": {{"exchange": "", "routing_key": "{QUEUE}"}}, "delivery_tag": "{label}"}}}}',
        )


# -- 24 ---------------------------------------------------------------------------------------------------------


def _settle_late(link: Link, client: redis.Redis, store: Store, tag: str, how: int) -> None:
    if how == 0:
        link.call(store.settle([tag]))
    elif how == 1:
        assert link.call(store.requeue(tag, QUEUE, 0)) == 0
    else:
        assert client.hget(KEYS.holder(store.worker), tag) is None


def test_case_24_a_late_settle_never_touches_the_next_holder(
    link: Link, redis_db: redis.Redis
) -> None:
    """Three consumers take, settle, requeue and restore; each tag is settled again, late, by its first holder."""
    chance = random.Random(24)
    labels = [str(number) for number in range(40)]
    _seed(redis_db, labels)
    stores = [Store(KEYS, f"w{number}-x") for number in range(3)]
    plans = [_plan(store.worker) for store in stores]
    held: list[dict[str, str]] = [{} for _ in stores]
    stale: list[list[str]] = [[] for _ in stores]
    done: Counter[str] = Counter()
    for store in stores:
        link.call(store.join("1", 60_000))
    for _ in range(1000):
        at = chance.randrange(3)
        store, mine = stores[at], held[at]
        action = chance.choice(["take", "settle", "requeue", "restore", "late"])
        if action == "take":
            grant = Grant.parse(link.call(plans[at].call("1", chance.randrange(1, 4))))
            for delivery in grant.deliveries:
                match = re.search(rb'"id": "(\d+)"', delivery.raw)
                assert match is not None
                mine[delivery.tag] = match[1].decode()
        elif action == "late" and stale[at]:
            _settle_late(link, redis_db, store, chance.choice(stale[at]), chance.randrange(3))
        elif mine:
            tag = chance.choice(list(mine))
            label = mine.pop(tag)
            stale[at].append(tag)
            if action == "requeue":
                assert link.call(store.requeue(tag, QUEUE, 0)) == 1
            elif action == "settle" and chance.random() < 0.05:
                assert link.call(store.settle([tag])) == []
                done[label] += 1
            else:
                place = redis_db.hget(KEYS.holder(store.worker), tag)
                assert link.call(store.restore([(tag, place)])) == 1
    lying = everywhere(redis_db)
    assert lying + done == Counter(labels)


@pytest.mark.slow
def test_case_24_three_workers_requeue_and_acknowledge(
    start: Starter, broker: RedisServer, publish: Publisher, records: redis.Redis
) -> None:
    for _ in range(3):
        start("threads", concurrency=2)
    for number in range(60):
        publish("reject", f"{number}", True)
    labels = sorted(map(str, range(60)))
    wait_until(lambda: sorted(ended(records)) == labels, 40, "each job ends once")
    with broker.client() as client:
        wait_until(lambda: nothing_left(client), 10, "nothing is left")
    assert sorted(started(records)) == sorted(labels * 2)


# -- 25 ---------------------------------------------------------------------------------------------------------


def _dying(script: scripts.Script, after: int) -> bytes:
    """Return the script's source with an error in place of its call number `after`."""
    source = script.source.decode()
    head = "local call, try = redis.call, redis.pcall"
    assert source.count(head) == 1
    counted = (
        "local made = 0 "
        "local function counted(of) return function(...) made = made + 1 "
        f"if made > {after} then error('dies at call {after + 1}') end return of(...) end end "
        "local call, try = counted(redis.call), counted(redis.pcall)"
    )
    return source.replace(head, counted).encode()


def _call(name: str, store: Store, tags: list[str], items: list[tuple[str, bytes]]) -> bytes:
    return {
        "take": lambda: _plan(store.worker).call("1", 1, tags=tags[:1]),
        "settle": lambda: store.settle(tags[:1]),
        "restore": lambda: store.restore(items),
        "requeue": lambda: store.requeue(tags[0], QUEUE, 0),
        "set_aside": lambda: store.set_aside(tags[0], QUEUE, "as asked"),
        "unsort": lambda: calls.unsort(KEYS, QUEUE),
    }[name]()


@pytest.mark.parametrize("name", ["take", "settle", "restore", "requeue", "set_aside", "unsort"])
def test_case_25_a_script_that_dies_at_any_call_loses_nothing(
    link: Link, redis_db: redis.Redis, name: str
) -> None:
    """Invariant 1: the new place is written before the old one is removed."""
    labels = ["a", "b", "c"]
    script = next(one for one in scripts.ALL if one.name == name)
    store = Store(KEYS, "w-x")
    for after in range(200):
        redis_db.flushall()
        _seed(redis_db, labels)
        link.call(store.join("1", 60_000))
        grant = Grant.parse(link.call(_plan("w-x").call("1", 2)))
        tags = [delivery.tag for delivery in grant.deliveries]
        items = [(tag, redis_db.hget(KEYS.holder("w-x"), tag)) for tag in tags]
        if name == "unsort":
            link.call(store.restore(items))
        packed = _call(name, store, tags, items)
        sha = link.call(calls.command(calls.pack("SCRIPT", "LOAD", _dying(script, after))))
        try:
            link.call(packed.replace(script.sha.encode(), sha))
        except redis.ResponseError as error:
            assert "dies at call" in str(error)  # noqa: PT017
        else:
            break
        settled = {"a"} if name in ("take", "settle") else set()
        assert set(labels) - settled <= set(everywhere(redis_db)), f"died at call {after + 1}"
        # The same again, whole: nothing is lost or wedged by the half that was done.
        link.call(packed)
        assert set(labels) - settled <= set(everywhere(redis_db)), f"again after call {after + 1}"
    else:
        pytest.fail("the script never came to its end")
    assert after > 1


# -- 29 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_case_29_the_reply_of_a_take_is_lost(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
    pool: str,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(pool, {"task_acks_late": True}, url=proxy.url(), concurrency=2)
    for number in range(30):
        if number % 10 == 5:
            # A reply with a message in it, not that of a take that found nothing.
            lost = proxy.discard_reply(
                lambda exchange: TAKES & set(exchange.request) and b'"task"' in exchange.reply
            )
            publish("record", f"{number}")
            lost.wait()
        else:
            publish("record", f"{number}")
    labels = sorted(map(str, range(30)))
    wait_until(lambda: sorted(ended(records)) == labels, 30, "each job runs once")
    with broker.client() as client:
        wait_until(lambda: nothing_left(client), 10, "nothing is left")
    assert sorted(started(records)) == labels
    assert worker.running


@pytest.mark.parametrize("lose", ["reply", "request"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_case_29_a_settle_is_lost(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
    pool: str,
    lose: str,
) -> None:
    proxy = proxy_factory(broker)
    worker = start(pool, {"task_acks_late": True}, url=proxy.url())
    order = proxy.discard_reply if lose == "reply" else proxy.discard_request
    for round_ in range(3):
        lost = order(_settles)
        publish("sleep_for", 0.2, f"{round_}")
        lost.wait()
        wait_until(lambda round_=round_: f"{round_}" in ended(records), 10, "the job ends")
        with broker.client() as client:
            wait_until(lambda: nothing_left(client), 15, "it is settled after the reconnect")
    assert started(records) == ["0", "1", "2"]
    assert worker.running


def _settles(exchange: Any) -> bool:
    """Whether this call settles a tag, on its own or along with a take."""
    request = exchange.request
    if SETTLES & set(request):
        return True
    return bool(
        TAKES & set(request) and re.fullmatch(rb"\S+-[0-9a-f]{12}:[\d.]+", request[-1]) is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", ["take", "settle"])
@pytest.mark.parametrize("lose", ["reply", "request"])
def test_case_25_the_worker_dies_at_a_call(
    start: Starter,
    broker: RedisServer,
    proxy_factory: ProxyFactory,
    publish: Publisher,
    records: redis.Redis,
    script: str,
    lose: str,
) -> None:
    """Killed before Redis saw the call, or after it was done and before the worker knew."""
    proxy = proxy_factory(broker)
    settings = {"task_acks_late": True, "broker_transport_options": {"visibility_timeout": 2}}
    worker = start("threads", settings, url=proxy.url())
    order = proxy.discard_reply if lose == "reply" else proxy.discard_request
    if script == "take":
        lost = order(
            lambda exchange: (
                TAKES & set(exchange.request) and (lose == "request" or b'"task"' in exchange.reply)
            )
        )
    else:
        lost = order(_settles)
    publish("sleep_for", 0.2, "one")
    lost.wait()
    worker.kill()
    with broker.client() as client:
        gone = set(ended(records))
        assert gone or everywhere(client), "it ran or lies somewhere"
        start("threads", settings)
        wait_until(lambda: "one" in ended(records), 15, "it ran")
        wait_until(lambda: nothing_left(client), 15, "nothing is left")
    assert len(started(records)) <= 2
