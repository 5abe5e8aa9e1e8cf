"""`bury.lua`, and the keeper around it: what dead workers held goes back, and the living stay alive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import SourceKeys, Store
from celery_strategies.transport.keeper import Keeper
from tests.support.waiting import wait_until

from .tools import Caller, Worker, everywhere, message, push

FAIR = Policy("fair", False, "fair_key", "fair_weight")


def bury_all(caller: Caller, dead: str, beat: int = 5, calls: int = 200) -> int:
    """Bury *dead* as a keeper does; returns the number of calls."""
    store = Store(Keys(), "other")
    for number in range(1, calls + 1):
        _, left, _ = caller(store.bury(dead, beat))
        if not left:
            return number
    raise AssertionError(f"{left} entries are left after {calls} calls")


@pytest.mark.parametrize("held", [1, 64, 1500, 3000])
def test_a_holder_of_any_size_is_buried_in_steps(
    redis_db: redis.Redis, caller: Caller, held: int
) -> None:
    worker = Worker(caller, "gone", "q")
    worker.join()
    push(redis_db, "q", *(message(f"m{number}") for number in range(held)))
    taken = 0
    while taken < held:
        taken += len(worker.take(min(64, held - taken)).deliveries)
    redis_db.zadd(worker.keys.alive, {"gone": 5})
    before = sorted(everywhere(redis_db))
    assert bury_all(caller, "gone") <= held // 60 + 2
    assert redis_db.zcard(worker.keys.returned("q")) == held
    assert sorted(everywhere(redis_db)) == before
    assert not redis_db.exists(worker.keys.holder("gone"), "unacked")


def test_two_messages_of_one_number_are_two_messages(redis_db: redis.Redis, caller: Caller) -> None:
    worker = Worker(caller, "w", SourceKeys("q", None, tuple(range(10)), sorted=True))
    worker.join()
    worker.adopt("q", FAIR)
    for name in ("first", "second"):
        push(redis_db, "q", message(name, fair_key="a"))
        (delivery,) = worker.take(1).deliveries
        entry = worker.entry(delivery.tag, redis_db)
        assert worker.caller(worker.store.restore([(delivery.tag, entry)])) == 1
        # Somebody removed the counter, or Redis lost it: numbers begin anew.
        redis_db.delete(worker.keys.sequence)
        if name == "first":
            redis_db.rename("strategies:{q}:front:0:a", "kept")
            redis_db.delete("strategies:{q}:index:0", "strategies:{q}:state")
    redis_db.zunionstore("both", ["kept", "strategies:{q}:front:0:a"])
    raws = b"".join(redis_db.zrange("both", 0, -1))
    assert b'"first"' in raws
    assert b'"second"' in raws


@pytest.fixture
def keeper(redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """A running keeper of worker "alive", which buries after two seconds of silence."""
    options = {**redis_db.connection_pool.connection_kwargs, "protocol": 3}
    kind = redis_db.connection_pool.connection_class

    def connect() -> object:
        connection = kind(**options)
        connection.connect()
        return connection

    keeper = Keeper(
        Store(Keys(), "alive"),
        60_000,
        connect=connect,
        tags=tuple,
        lives=lambda: True,
        entry=lambda: {"queues": ["q"], "priority": 0},
        buried=lambda: None,
        stale_after=2.0,
    )
    keeper.start()
    yield keeper
    keeper.stop()


def beats_on(client: redis.Redis) -> bool:
    """Whether the keeper's worker beats, three times in a row."""
    seen = {client.zscore(Keys().alive, "alive")}

    def three() -> bool:
        seen.add(client.zscore(Keys().alive, "alive"))
        return len(seen - {None}) > 3

    wait_until(three, 15, "the keeper went on beating")
    return True


def test_a_dead_worker_that_cannot_be_buried_ends_nobodys_beats(
    redis_db: redis.Redis, caller: Caller, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(caller, "gone", "broken", "fine")
    worker.join()
    push(redis_db, "broken", message("b", queue="broken"))
    push(redis_db, "fine", message("f", queue="fine"))
    worker.take(2)
    redis_db.set(worker.keys.returned("broken"), "text")
    redis_db.zadd(worker.keys.alive, {"gone": 5})
    wait_until(
        lambda: redis_db.zcard(worker.keys.returned("fine")) == 1,
        15,
        "what can go back has gone back",
    )
    session = keeper._link
    assert beats_on(redis_db)
    assert keeper._link is session
    assert redis_db.hlen(worker.keys.holder("gone")) == 2
    redis_db.delete(worker.keys.returned("broken"))
    wait_until(
        lambda: redis_db.zcard(worker.keys.returned("broken")) == 1, 15, "the rest went back, too"
    )


@pytest.mark.parametrize("damage", ["name", "lease", "consumers"])
def test_a_keeper_outlives_what_others_leave_in_its_keys(
    redis_db: redis.Redis, keeper: Keeper, damage: str
) -> None:
    assert beats_on(redis_db)
    if damage == "name":
        redis_db.zadd(Keys().alive, {b"\xff\xfe": 5})
    elif damage == "lease":
        redis_db.sadd(Keys().leases("alive"), "strategies:{q}:")
        redis_db.set(Keys().lease("q"), "text")
    else:
        redis_db.set(Keys().consumers("q"), "text")
    assert beats_on(redis_db)
    assert keeper._running


@pytest.mark.parametrize("left", ["a watch", "a wake", "a second watcher", "keys of a wrong type"])
def test_a_dead_workers_watch_and_wake_are_handed_on(
    redis_db: redis.Redis, caller: Caller, left: str
) -> None:
    worker = Worker(caller, "gone", "q")
    worker.join()
    keys = worker.keys
    redis_db.zadd(keys.alive, {"gone": 5})
    redis_db.hset(keys.entry("gone"), "queues", '["q"]')
    redis_db.zadd(keys.parked("q"), {keys.wake("next"): 1})
    if left == "a wake":
        redis_db.set(keys.wake("gone"), "1")
    elif left == "keys of a wrong type":
        redis_db.set(keys.watchers("q"), "text")
        redis_db.set(keys.consumers("q"), "text")
    else:
        redis_db.zadd(keys.watchers("q"), {keys.wake("gone"): 1})
        if left == "a second watcher":
            redis_db.zadd(keys.watchers("q"), {keys.wake("another"): 1})
    bury_all(caller, "gone")
    woken = bool(redis_db.exists(keys.wake("next")))
    assert woken is (left in {"a watch", "a wake"})
    assert redis_db.zcard(keys.parked("q")) == (0 if woken else 1)
    assert not redis_db.exists(keys.wake("gone"), keys.entry("gone"))
    if left == "a second watcher":
        assert redis_db.zrange(keys.watchers("q"), 0, -1) == [keys.wake("another").encode()]
