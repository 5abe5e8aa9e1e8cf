"""What others do to keys of sorted queues: overwrite, remove, evict. It costs that queue; what is left is found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import store as calls
from celery_strategies.store.admin import (
    purge_sorted,
    queues_to_unsort,
    set_cap,
    set_weight,
    unsort_queue,
)
from celery_strategies.store.store import Grant

from .scenarios import BAD
from .sorted_scenarios import sorted_source
from .sorted_state import audit, look
from .tools import Caller, Worker, everywhere, job_of, message, push, source

POLICY = Policy("fair", False, "fair_key", "fair_weight")
CAPS = {"a": 2}
#: More calls than any of this may take.
MANY = 60


@dataclass
class Life:
    """A worker that reads a sorted queue, a plain one and another sorted one, in this order of priority."""

    client: redis.Redis
    worker: Worker
    done: Counter[str] = field(default_factory=Counter)
    broken: set[int] = field(default_factory=set)
    tags: list[str] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    """The jobs of the sorted queue that nobody has taken yet."""

    def adopt(self) -> None:
        for queue in ("q", "s"):
            assert self.worker.adopt(queue, POLICY, CAPS).agreed

    def publish(
        self, queue: str, keys: str, name: str = "", step: int = 0, **headers: float
    ) -> None:
        """Publish a job for each letter of *keys*, - for none."""
        for number, key in enumerate(keys):
            tag = {} if key == "-" else {"fair_key": key}
            raw = message(f"{queue}{name}{step}{key}{number}", queue=queue, **tag, **headers)
            push(self.client, self.worker.keys.inbox(queue, step), raw)

    def note(self, grant: Grant) -> None:
        assert not grant.lost
        self.done.update(job_of(delivery.raw) for delivery in grant.deliveries)
        self.broken |= {index for index, _ in grant.broken}
        self.tags = [delivery.tag for delivery in grant.deliveries]

    def work(self, n: int = 4) -> None:
        """Take and settle until nothing comes any more, as a reader does."""
        for _ in range(MANY):
            grant = self.worker.take(n, tags=self.tags)
            self.note(grant)
            if not (grant.deliveries or grant.more):
                return
        raise AssertionError("no end of it")

    def aside(self) -> int:
        key = self.worker.keys.set_aside("q")
        return int(self.client.xlen(key)) if self.client.type(key) == b"stream" else 0


@pytest.fixture
def life(caller: Caller, redis_db: redis.Redis) -> Life:
    """Jobs of all kinds wait: of a full key, given back, of two levels, new, and on other queues."""
    worker = Worker(caller, "w", sorted_source("q"), source("r"), sorted_source("s"))
    worker.join()
    life = Life(redis_db, worker)
    life.adopt()
    life.publish("q", "aaabb--", fair_weight=0.3)
    life.publish("q", "cc", step=1)
    worker.sort(worker.sources[0])
    first = [delivery.tag for delivery in worker.take(4).deliveries]
    held = {worker.entry(tag, redis_db).split(b":")[5][:1]: tag for tag in first}
    worker.restore(redis_db, held[b"b"])
    life.tags = [tag for tag in first if tag != held[b"b"]]
    life.publish("q", "ad-", name="new", fair_weight=0.7)
    life.publish("r", "---")
    life.publish("s", "xyx")
    state = look(redis_db, worker.keys, "q")
    assert (0, "a") in state.full
    assert (0, "b") in state.fronts
    assert state.tags
    assert audit(redis_db, worker.keys, "q") == []
    held = {job_of(raw[1:].rpartition(b',"",')[0]) for raw in redis_db.hvals("unacked")}
    life.waiting = {job_of(raw) for raw in everywhere(redis_db)} - held - OTHERS
    return life


OTHERS = {"r0-0", "r0-1", "r0-2", "s0x0", "s0y1", "s0x2"}

#: Name of the key after the queue's base: which jobs cannot be had while it is of a wrong type, whether that is
#: said, and which are gone for good.
WRONG = {
    "policy": ("q.*", True, ""),
    "state": ("q.*", True, ""),
    "caps": ("q.*", True, ""),
    "full": ("q.*", True, ""),
    "index:0": ("q(new)?0.*", True, ""),
    "index:1": ("q1.*", True, ""),
    "tags:0": ("", False, ""),
    "weights": ("", False, ""),
    "old:0": ("", False, ""),
    "ready": ("", False, ""),
    "sorter": ("", False, ""),
    "unsorted": ("", False, ""),
    "jobs:0:b": ("q0b4", True, "q0b4"),
    "front:0:b": ("q0b3", True, "q0b3"),
    "running:a": ("q(new)?0a.", True, ""),
    # New jobs cannot be sorted while it cannot be told where they would wait.
    "delayed": ("qnew.*", True, ""),
    "set_aside": ("", False, ""),
    "returned": ("", True, ""),
    "jobs:0:d": ("qnew0d1", True, ""),
}


def without(jobs: set[str], pattern: str) -> set[str]:
    """Return the jobs whose name is not like that."""
    return {job for job in jobs if not re.fullmatch(pattern, job)}


@contextmanager
def refusable() -> Iterator[None]:
    """Do what may end with Redis's word on the type of a key."""
    try:
        yield
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise


def plant(client: redis.Redis, name: str) -> None:
    """Put something else under a key."""
    client.delete(name)
    if name.endswith((":ready", ":sorter")):
        client.rpush(name, "x")
    else:
        client.set(name, "text")


@pytest.mark.parametrize("name", WRONG)
def test_a_key_of_a_wrong_type_costs_what_depends_on_it(life: Life, name: str) -> None:
    missing, told, gone = WRONG[name]
    key = f"{life.worker.keys.base('q')}{name}"
    plant(life.client, key)
    for _ in range(3):
        # Again and again: what cannot be had is not doubled, and does not stop the others.
        life.work()
        assert {job for job in life.done if job[0] in "rs"} == OTHERS
        assert {job for job in life.done if job[0] == "q"} == without(life.waiting, missing)
        assert max(life.done.values()) == 1
        assert life.aside() == (name == "jobs:0:d")
    assert (0 in life.broken) is told
    assert 2 not in life.broken
    # Nothing of what was settled is held by anybody.
    assert not life.client.exists("unacked", "unacked_index")
    assert life.client.hlen(life.worker.keys.holder("w")) == 1

    life.client.delete(key)
    life.adopt()
    life.work()
    unsort_queue(life.client, life.worker.keys, "q")
    life.adopt()
    life.work()
    aside = {"qnew0d1"} if name == "jobs:0:d" else set()
    assert {job for job in life.done if job[0] == "q"} == without(life.waiting, gone) - aside
    assert max(life.done.values()) == 1
    assert audit(life.client, life.worker.keys, "q") == []


@pytest.mark.parametrize("name", WRONG)
def test_an_operator_is_told_or_served(life: Life, name: str) -> None:
    """Whatever is asked for ends, and after the repair nothing is lost."""
    client, keys = life.client, life.worker.keys
    key = f"{keys.base('q')}{name}"
    plant(client, key)
    actions = (
        lambda: set_weight(client, keys, "q", "b", 3),
        lambda: set_weight(client, keys, "q", "b", None),
        lambda: set_cap(client, keys, "q", "a", 9),
        lambda: set_cap(client, keys, "q", "*", 1),
        lambda: set_cap(client, keys, "q", "*", None),
        lambda: set_cap(client, keys, "q", "a", None),
        lambda: unsort_queue(client, keys, "q"),
        lambda: queues_to_unsort(client, keys),
        lambda: life.worker.caller(life.worker.store.promote("q")),
        lambda: life.worker.caller(life.worker.store.due(["q"])),
        lambda: life.worker.caller(life.worker.store.release("q")),
    )
    for action in actions:
        with refusable():
            action()
    client.delete(key)
    life.adopt()
    unsort_queue(client, keys, "q")
    life.adopt()
    life.work()
    gone = WRONG[name][2]
    aside = {"qnew0d1"} if life.aside() else set()
    assert {job for job in life.done if job[0] == "q"} == without(life.waiting, gone) - aside
    assert max(life.done.values()) == 1


@pytest.mark.parametrize("name", WRONG)
def test_what_is_held_goes_back_somewhere(life: Life, name: str) -> None:
    client, keys = life.client, life.worker.keys
    taken = life.worker.take(2, tags=life.tags)
    held = [job_of(delivery.raw) for delivery in taken.deliveries]
    assert len(held) == 2
    plant(client, f"{keys.base('q')}{name}")
    items = [
        (delivery.tag, life.worker.entry(delivery.tag, client)) for delivery in taken.deliveries
    ]
    for item in items:
        with refusable():
            life.worker.caller(life.worker.store.restore([item]))
    client.delete(f"{keys.base('q')}{name}")
    places = Counter(job_of(raw) for raw in everywhere(client))
    assert [places[job] for job in held] == [1, 1]
    life.tags = []
    life.adopt()
    for tag, entry in items:
        life.worker.caller(life.worker.store.restore([(tag, entry)]))
    unsort_queue(client, keys, "q")
    life.adopt()
    life.work()
    assert {*held} <= life.done.keys() | ({"qnew0d1"} if life.aside() else set())


# -- removed, or evicted ------------------------------------------------------------------------

#: What is found again by itself, by what comes next, or by unsorting; and what is gone.
REMOVED = {
    "policy": "",
    "state": "",
    "tags:0": "",
    "ready": "",
    "caps": "",
    "running:a": "",
    # New jobs of its key bring the old ones back, and here there are some.
    "full": "",
    "index:0": "q0b.",
    "jobs:0:b": "q0b4",
    "front:0:b": "q0b3",
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_key_that_was_removed_costs_no_more_than_was_in_it(life: Life, name: str) -> None:
    client, keys = life.client, life.worker.keys
    assert client.delete(f"{keys.base('q')}{name}") == 1
    life.adopt()
    hidden = REMOVED[name]
    for _ in range(2):
        life.work()
        assert {job for job in life.done if job[0] in "rs"} == OTHERS
        assert {job for job in life.done if job[0] == "q"} == without(life.waiting, hidden)
    unsort_queue(client, keys, "q")
    life.adopt()
    life.work()
    gone = hidden if name.startswith(("jobs", "front")) else ""
    assert {job for job in life.done if job[0] == "q"} == without(life.waiting, gone)
    assert max(life.done.values()) == 1
    life.client.delete(f"{keys.base('q')}caps")
    assert audit(client, keys, "q") == []


def test_all_that_counts_is_gone_and_every_job_is_found(life: Life) -> None:
    """Only the lists are left."""
    client, keys = life.client, life.worker.keys
    for key in client.keys(f"{keys.base('q')}*"):
        if b"jobs:" not in key and b"front:" not in key:
            client.delete(key)
    unsort_queue(client, keys, "q")
    life.adopt()
    life.work()
    assert {job for job in life.done if job[0] == "q"} == life.waiting
    assert max(life.done.values()) == 1


def test_a_removed_state_keeps_newcomers_from_going_before_all(
    caller: Caller, redis_db: redis.Redis
) -> None:
    worker = Worker(caller, "w", sorted_source("q"))
    worker.join()
    life = Life(redis_db, worker)
    worker.adopt("q", POLICY)
    life.publish("q", "a" * 60)
    for _ in range(30):
        life.note(worker.take(1, tags=life.tags))
    redis_db.delete(worker.keys.state("q"))
    life.publish("q", "b" * 20)
    order = ""
    for _ in range(20):
        grant = worker.take(1, tags=life.tags)
        life.note(grant)
        order += job_of(grant.deliveries[0].raw)[2]
    for count in range(1, 21):
        assert abs(order[:count].count("a") - order[:count].count("b")) <= 2


def test_an_element_that_is_none_of_ours_keeps_only_its_key(life: Life) -> None:
    client, keys = life.client, life.worker.keys
    client.rpush(f"{keys.base('q')}jobs:0:", "no sequence")
    life.work()
    assert 0 in life.broken
    assert {job for job in life.done if job[0] == "q"} == without(life.waiting, "q(new)?0-.")
    life.work()
    unsort_queue(client, keys, "q")
    life.adopt()
    life.work()
    assert {job for job in life.done if job[0] == "q"} == life.waiting
    assert life.aside() == 1


def test_a_returned_member_that_is_none_of_ours_is_set_aside(life: Life) -> None:
    client, keys = life.client, life.worker.keys
    client.zadd(keys.returned("q"), {"no place": 1})
    life.work()
    assert {job for job in life.done if job[0] == "q"} == life.waiting
    assert life.aside() == 1


def test_a_purge_ends_whatever_is_there(life: Life) -> None:
    client, keys = life.client, life.worker.keys
    plant(client, f"{keys.base('q')}jobs:0:b")
    client.rpush(f"{keys.base('q')}jobs:0:", "no sequence")
    assert purge_sorted(client, keys, "q") >= 5
    life.work()
    assert {job for job in life.done if job[0] == "q"} == {"qnew0a0", "qnew0d1", "qnew0-2"}
    assert audit(client, keys, "q") == []


def test_a_settle_that_names_a_job_of_a_ruined_queue_is_made(life: Life) -> None:
    plant(life.client, f"{life.worker.keys.base('q')}policy")
    packed = life.worker.store.settle([*life.tags, *(calls.STILL_RUNS + tag for tag in ["w:1.9k"])])
    assert life.worker.caller(packed) == [b"w:1.9k"]
    assert life.client.hlen(life.worker.keys.holder("w")) == 1


def test_where_nothing_can_be_set_aside_the_list_behind_a_bad_message_waits(life: Life) -> None:
    client, keys = life.client, life.worker.keys
    client.rpush(keys.inbox("q", 0), BAD)
    life.publish("q", "z", name="new", step=1)
    plant(client, keys.set_aside("q"))
    for _ in range(3):
        life.work()
    assert 0 in life.broken
    assert {job for job in life.done if job[0] == "q"} == without(life.waiting, "qnew0.*") | {
        "qnew1z0"
    }
    client.delete(keys.set_aside("q"))
    life.work()
    assert {job for job in life.done if job[0] == "q"} == life.waiting | {"qnew1z0"}
    assert life.aside() == 1


def test_without_the_counter_of_deliveries_nothing_is_done_again_and_again(life: Life) -> None:
    client, keys = life.client, life.worker.keys
    client.rpush(keys.inbox("q", 0), BAD)
    client.set(keys.sequence, "text")
    life.worker.caller(life.worker.store.settle(life.tags))
    before = everywhere(client)
    for _ in range(3):
        with pytest.raises(redis.ResponseError, match="not an integer"):
            life.worker.take(9)
        with pytest.raises(redis.ResponseError, match="not an integer"):
            life.worker.sort(life.worker.sources[0])
    assert sorted(everywhere(client)) == sorted(before)
    assert life.aside() == 0
