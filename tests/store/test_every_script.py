"""What holds of every script: prefix, permissions, a flushed script cache, full memory, a failure at every call."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import redis

from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys

from . import sorted_state
from .scenarios import SCENARIOS, Scenario, queue_of, worker_for
from .sorted_scenarios import LATER, POLICY, SORTED_SCENARIOS, names_in
from .tools import (
    NOW,
    Caller,
    Worker,
    everywhere,
    fails_at_every_call,
    in_line_message,
    jobs,
    keyspace,
    message,
    push,
    source,
)

PREFIX = "p:"
ALL = [*SCENARIOS, *SORTED_SCENARIOS]
each_script = pytest.mark.parametrize("scenario", ALL, ids=str)


def test_there_is_a_scenario_for_every_script() -> None:
    assert {scenario.name for scenario in ALL} == {script.name for script in scripts.ALL}


@each_script
def test_it_is_loaded_again_after_a_script_flush(
    scenario: Scenario, redis_db: redis.Redis, caller: Caller
) -> None:
    worker = worker_for(caller)
    scenario.seed(redis_db, worker)
    redis_db.script_flush()
    packed = scenario.call(redis_db, worker)
    before = keyspace(redis_db)
    with pytest.raises(redis.exceptions.NoScriptError):
        caller.link.call(packed)
    assert keyspace(redis_db) == before
    caller(packed)
    assert (keyspace(redis_db) != before) is scenario.writes


@each_script
def test_every_key_has_the_prefix(
    scenario: Scenario, redis_db: redis.Redis, caller: Caller
) -> None:
    worker = worker_for(caller, keys=Keys(prefix=PREFIX))
    scenario.seed(redis_db, worker)
    caller(scenario.call(redis_db, worker))
    assert all(key.startswith(PREFIX) for key in keyspace(redis_db))


#: Where a script calls a command.
_CALL = r"(?<!function )\b(?:call|try|soft)\("


def _commands_of_scripts() -> set[str]:
    """Return the names of the Redis commands that the scripts call."""
    text = b"".join(script.source for script in scripts.ALL).decode()
    names = re.findall(rf"{_CALL}(?:\w+(?: == \w+|\.\w+ == '\w+') and '(\w+)' or )?'(\w+)'", text)
    return {name.lower() for pair in names for name in pair if name}


@pytest.fixture
def limited(redis_factory: Any) -> tuple[redis.Redis, redis.Redis]:
    """Clients of one server: a user who may do all, and one limited to our prefix and commands."""
    commands = " ".join(f"+{name}" for name in sorted(_commands_of_scripts()))
    connection = "+evalsha +script|load +client|tracking +client|caching +hello +select +ping"
    server = redis_factory(
        acl=[
            "user default on nopass ~* &* +@all",
            f"user limited on >secret resetchannels ~{PREFIX}* &{PREFIX}* -@all {connection} {commands}",
        ]
    )
    return server.client(), server.client(username="limited", password="secret")


@each_script
def test_a_user_limited_to_the_prefix_may_call_it(
    scenario: Scenario, limited: tuple[redis.Redis, redis.Redis]
) -> None:
    admin, client = limited
    seeding, calling = Caller(admin), Caller(client)
    worker = worker_for(seeding, keys=Keys(prefix=PREFIX))
    scenario.seed(admin, worker)
    before = keyspace(admin)
    calling(scenario.call(admin, worker))
    assert (keyspace(admin) != before) is scenario.writes
    seeding.close()
    calling.close()
    admin.close()
    client.close()


@pytest.fixture
def full(redis_factory: Any) -> Any:
    """A client whose server's memory can be declared full."""
    with redis_factory(config={"maxmemory-policy": "noeviction"}).client() as client:
        yield client


#: What only an operator or a beginning asks for, and sorting ahead of need, may be refused when memory is full.
REFUSABLE = {"adopt", "gather", "sort", "steer", "unsort"}
DRAINING = [scenario for scenario in ALL if scenario.name not in REFUSABLE]


@pytest.mark.parametrize("scenario", DRAINING, ids=str)
def test_it_works_when_memory_is_full(scenario: Scenario, full: redis.Redis) -> None:
    caller = Caller(full)
    worker = worker_for(caller)
    scenario.seed(full, worker)
    expected = _unmarked(everywhere(full))
    packed = scenario.call(full, worker)
    before = keyspace(full)
    full.config_set("maxmemory", "1")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        full.lpush("q", b"more")
    caller(packed)
    assert (keyspace(full) != before) is scenario.writes
    if scenario.moves:
        assert _unmarked(everywhere(full)) == expected
    caller.close()


def test_a_full_redis_can_be_drained_by_a_whole_life_of_a_worker(full: redis.Redis) -> None:
    caller = Caller(full)
    worker = Worker(caller, "w", "q")
    push(full, "q", *(message(f"job-{n}") for n in range(70)))
    worker.join()
    full.config_set("maxmemory", "1")
    done: list[str] = []
    tags: list[str] = []
    while len(done) < 70:
        grant = worker.take(8, tags=tags)
        assert not grant.lost
        done += jobs(grant)
        tags = [delivery.tag for delivery in grant.deliveries]
        assert tags
    caller(worker.store.settle(tags))
    caller(worker.store.leave())
    assert done == [f"job-{n}" for n in range(70)]
    assert keyspace(full) == {"strategies:sequence": b"70"}
    caller.close()


MOVING = [scenario for scenario in ALL if scenario.moves and scenario.writes]


@pytest.mark.parametrize("scenario", MOVING, ids=str)
def test_a_failure_at_any_call_loses_nothing(
    scenario: Scenario, redis_db: redis.Redis, caller: Caller
) -> None:
    worker = worker_for(caller)

    def seed() -> None:
        worker.sessions = 0
        scenario.seed(redis_db, worker)

    seed()
    expected = _unmarked(everywhere(redis_db))
    failures = 0
    for _ in fails_at_every_call(redis_db, seed, lambda: scenario.call(redis_db, worker)):
        failures += 1
        assert _unmarked(everywhere(redis_db)) >= expected
        _the_next_session_finds(names_in(list(expected)), redis_db, caller, worker)
    assert failures >= 2


def _the_next_session_finds(
    names: set[str], client: redis.Redis, caller: Caller, worker: Worker
) -> None:
    """Reconcile as a reader whose reply was lost, then take and settle everything: no job may be missing."""
    queue, worker.now = queue_of(worker), LATER
    entries = worker.join()
    if entries:
        caller(worker.store.restore(list(entries.items())))
    for holder in client.keys(worker.keys.holder("[^w]*")):
        # The others are dead, as their beats say.
        other = holder.decode().removeprefix(worker.keys.holder(""))
        client.zadd(worker.keys.alive, {other: 5})
        caller(worker.store.bury(other, 5))
    while caller(calls.unsort(worker.keys, queue)) or caller(
        worker.store.promote(queue, now=LATER)
    ):
        pass
    if worker.sources[0].sorted:
        # As a reader does whose take says that the policy is gone.
        worker.adopt(queue, POLICY)
    found: set[str] = set()
    tags: list[str] = []
    looks = 0
    while looks < 2:
        grant = worker.take(64, tags=tags)
        if grant.unknown:
            # As the reader does: without a policy its jobs would be taken in another order.
            worker.adopt(queue, POLICY)
            continue
        found |= set(jobs(grant))
        tags = [delivery.tag for delivery in grant.deliveries]
        if not (tags or grant.more):
            # A lease of somebody else is up after a while.
            looks, worker.now = looks + 1, worker.now + 10**7
    for stream in (worker.keys.set_aside(queue), worker.keys.dead(queue)):
        found |= names_in([fields[b"message"] for _, fields in client.xrange(stream)])
    found |= names_in(
        [in_line_message(entry) for entry in client.zrange(worker.keys.in_line(queue), 0, -1)]
    )
    assert found >= names
    # Nor does anything say that there are more.
    left = sorted_state.look(client, worker.keys, queue)
    empty = sorted_state.Sorted(policy=left.policy, caps=left.caps)
    assert left == empty
    worker.now = NOW


def _unmarked(raws: list[bytes]) -> Counter[bytes]:
    return Counter(raw.replace(b'"redelivered": true, ', b"") for raw in raws)


def test_the_commands_of_the_scripts_are_all_known_here() -> None:
    # A guard for the ACL test above: its pattern must see what the scripts call.
    text = b"".join(script.source for script in scripts.ALL).decode()
    assert len(re.findall(_CALL, text)) == len(
        re.findall(rf"{_CALL}(?:'|\w+[\w. ='']* and ')", text)
    )
    assert {"zcard", "llen", "xadd", "zpopmax", "hset", "del"} <= _commands_of_scripts()


def test_wrong_types_of_the_shared_keys_stop_a_take_before_it_writes(
    redis_db: redis.Redis, caller: Caller
) -> None:
    for key in ("unacked", "unacked_index", "strategies:sequence"):
        redis_db.flushall()
        worker = Worker(caller, "w", source("q"))
        worker.join()
        push(redis_db, "q", message("a"))
        redis_db.sadd(key, "x")
        before = keyspace(redis_db)
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            worker.take(1)
        assert keyspace(redis_db) == before
