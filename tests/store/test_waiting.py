"""`watch.lua`, `unwatch.lua` and the hand-over in `take.lua`: few watch, the rest park, none is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from .tools import NOW, STALE, Caller, Worker, assert_ttls, jobs, keyspace, message, push

WATCHERS = 2
MILLIS = NOW // 1000
NAMES = ("a", "b", "c", "d", "e")


class Fleet:
    """Idle workers of the queues q and r, registered one after the other."""

    def __init__(self, caller: Caller, client: redis.Redis, queues: Sequence[str] = ("q",)) -> None:
        self.caller = caller
        self.client = client
        self.queues = list(queues)
        self.workers = {name: Worker(caller, name, *queues) for name in NAMES}
        for worker in self.workers.values():
            worker.join()

    def watch(self, name: str, *, later: int = 0) -> list[int]:
        """Register, *later* milliseconds after the start; returns 1 (watch) or 0 (parked) for each queue."""
        packed = self.workers[name].store.watch(
            self.queues, watchers=WATCHERS, stale=STALE, now=NOW + 1000 * later
        )
        return list(self.caller(packed))

    def unwatch(self, name: str) -> int:
        """Leave the idle ones."""
        return int(self.caller(self.workers[name].store.unwatch(self.queues)))

    def idle(self, queue: str = "q") -> tuple[set[str], set[str]]:
        """Return who watches and who is parked."""
        names = []
        for kind in ("watchers", "parked"):
            members = self.client.zrange(f"strategies:{{{queue}}}:{kind}", 0, -1)
            names.append({member.decode().rpartition(":")[2] for member in members})
        return names[0], names[1]

    def woken(self) -> set[str]:
        """Return whose wake key is set."""
        return {name for name in NAMES if self.client.exists(f"strategies:wake:{name}")}


@pytest.fixture
def fleet(caller: Caller, redis_db: redis.Redis) -> Fleet:
    """All five idle on q: a and b watch, c, d and e are parked, in this order."""
    fleet = Fleet(caller, redis_db)
    for later, name in enumerate(NAMES):
        fleet.watch(name, later=later)
    return fleet


@pytest.fixture
def two(caller: Caller, redis_db: redis.Redis) -> Fleet:
    """All five idle on q and r."""
    fleet = Fleet(caller, redis_db, ("q", "r"))
    for later, name in enumerate(NAMES):
        fleet.watch(name, later=later)
    return fleet


# -- watch ------------------------------------------------------------------------------------------------------


def test_two_watch_and_the_rest_park(redis_db: redis.Redis, fleet: Fleet) -> None:
    space = keyspace(redis_db)
    assert {key: value for key, value in space.items() if "{q}" in key} == {
        "strategies:{q}:watchers": {b"strategies:wake:a": MILLIS, b"strategies:wake:b": MILLIS + 1},
        "strategies:{q}:parked": {
            b"strategies:wake:c": MILLIS + 2,
            b"strategies:wake:d": MILLIS + 3,
            b"strategies:wake:e": MILLIS + 4,
        },
    }
    holders = {f"strategies:holder:{name}": 60_000 for name in NAMES}
    assert_ttls(
        redis_db, {"strategies:{q}:watchers": STALE, "strategies:{q}:parked": STALE, **holders}
    )


def test_watching_again_keeps_the_role_and_renews_it(redis_db: redis.Redis, fleet: Fleet) -> None:
    redis_db.pexpire("strategies:{q}:watchers", 1000)
    redis_db.pexpire("strategies:{q}:parked", 1000)
    assert fleet.watch("a", later=9) == [1]
    assert fleet.watch("d", later=9) == [0]
    assert fleet.idle() == ({"a", "b"}, {"c", "d", "e"})
    assert redis_db.zscore("strategies:{q}:watchers", "strategies:wake:a") == MILLIS + 9
    assert redis_db.zscore("strategies:{q}:parked", "strategies:wake:d") == MILLIS + 9
    assert {
        redis_db.pttl(f"strategies:{{q}}:{kind}") > 1000 for kind in ("watchers", "parked")
    } == {True}


def test_a_parked_one_takes_a_free_place_at_its_next_look(fleet: Fleet) -> None:
    fleet.client.zrem("strategies:{q}:watchers", "strategies:wake:a")
    assert fleet.watch("e", later=9) == [1]
    assert fleet.idle() == ({"b", "e"}, {"c", "d"})


def test_the_roles_are_per_source(two: Fleet) -> None:
    two.client.delete("strategies:{r}:watchers")
    assert two.watch("d", later=9) == [0, 1]
    assert two.idle("q") == ({"a", "b"}, {"c", "d", "e"})
    assert two.idle("r") == ({"d"}, {"c", "e"})


def test_those_not_seen_for_long_are_forgotten(fleet: Fleet) -> None:
    fleet.watch("b", later=10)
    fleet.watch("e", later=10)
    assert fleet.watch("d", later=STALE) == [1]
    assert fleet.idle() == ({"b", "d"}, {"c", "e"})
    assert fleet.watch("c", later=STALE + 5) == [0]
    assert fleet.idle() == ({"b", "d"}, {"c", "e"})
    assert fleet.watch("a", later=STALE + 9) == [0]
    assert fleet.idle() == ({"b", "d"}, {"a", "c", "e"})


def test_on_the_servers_clock(fleet: Fleet) -> None:
    fleet.client.delete("strategies:{q}:watchers", "strategies:{q}:parked")
    seconds, micros = fleet.client.time()
    fleet.caller(fleet.workers["a"].store.watch(["q"], watchers=1, stale=STALE))
    assert (
        fleet.client.zscore("strategies:{q}:watchers", "strategies:wake:a")
        >= seconds * 1000 + micros // 1000 - 1
    )


# -- unwatch ----------------------------------------------------------------------------------------------------


def test_one_of_two_watchers_leaves_quietly(fleet: Fleet) -> None:
    assert fleet.unwatch("a") == 0
    assert fleet.idle() == ({"b"}, {"c", "d", "e"})
    assert fleet.woken() == set()


def test_the_last_watcher_wakes_one_in_its_place(fleet: Fleet) -> None:
    fleet.unwatch("a")
    assert fleet.unwatch("b") == 1
    assert fleet.idle() == (set(), {"c", "d"})
    assert fleet.woken() == {"e"}
    assert 0 < fleet.client.pttl("strategies:wake:e") <= 30_000


def test_a_parked_one_leaves_quietly(fleet: Fleet) -> None:
    assert fleet.unwatch("c") == 0
    assert fleet.unwatch("c") == 0
    assert fleet.idle() == ({"a", "b"}, {"d", "e"})
    assert fleet.woken() == set()


def test_a_woken_one_hands_its_wake_on(fleet: Fleet) -> None:
    fleet.client.set("strategies:wake:c", "1")
    assert fleet.unwatch("c") == 1
    assert fleet.woken() == {"e"}
    assert fleet.idle() == ({"a", "b"}, {"d"})


def test_the_wake_is_never_handed_to_oneself(fleet: Fleet) -> None:
    fleet.client.zrem("strategies:{q}:parked", "strategies:wake:c", "strategies:wake:d")
    fleet.client.set("strategies:wake:e", "1")
    assert fleet.unwatch("e") == 0
    assert fleet.woken() == set()


def test_unwatch_of_nothing(redis_db: redis.Redis, caller: Caller) -> None:
    assert caller(Worker(caller, "a").store.unwatch([])) == 0
    assert caller(Worker(caller, "a").store.unwatch(["q"])) == 0
    assert keyspace(redis_db) == {}


# -- take -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backlog", "expected"), [(1, set()), (2, {"e"}), (3, {"e", "d"}), (9, {"e", "d"})]
)
def test_a_take_wakes_as_many_as_there_is_work_left_for_at_most_two(
    fleet: Fleet, backlog: int, expected: set[str]
) -> None:
    push(fleet.client, "q", *(message(f"{n}") for n in range(backlog)))
    assert jobs(fleet.workers["b"].take(1, idle=True)) == ["0"]
    assert fleet.woken() == expected
    watching, parked = fleet.idle()
    assert watching == {"a"}
    assert parked == {"c", "d", "e"} - expected


def test_a_busy_worker_wakes_too(fleet: Fleet) -> None:
    fleet.unwatch("e")
    push(fleet.client, "q", message("1"), message("2"))
    fleet.workers["e"].take(1)
    assert fleet.woken() == {"d"}
    assert fleet.idle() == ({"a", "b"}, {"c"})


def test_work_left_after_a_take_that_is_not_full_is_none(fleet: Fleet) -> None:
    push(fleet.client, "q", message("1"), message("2"))
    fleet.workers["a"].take(5, idle=True)
    assert fleet.woken() == set()
    assert fleet.idle() == ({"a", "b"}, {"c", "d", "e"})


def test_a_full_watcher_that_was_the_last_wakes_one_parked(fleet: Fleet) -> None:
    fleet.unwatch("b")
    push(fleet.client, "q", message("1"))
    fleet.workers["a"].take(1, idle=True)
    assert fleet.woken() == {"e"}
    assert fleet.idle() == (set(), {"c", "d"})


def test_a_full_watcher_leaves_all_its_sources(two: Fleet) -> None:
    two.unwatch("b")
    push(two.client, "r", message("1"))
    two.workers["a"].take(1, idle=True)
    assert two.idle("q") == (set(), {"c", "d"})
    assert two.idle("r") == (set(), {"c", "d"})
    assert two.woken() == {"e"}


def test_a_parked_worker_that_took_does_not_wake_itself(fleet: Fleet) -> None:
    # e looks now and then, finds more than it can run, and must leave the wake to d and c.
    push(fleet.client, "q", *(message(f"{n}") for n in range(5)))
    fleet.workers["e"].take(1, idle=True)
    assert fleet.woken() == {"c", "d"}
    assert fleet.idle() == ({"a", "b"}, set())


@pytest.mark.parametrize("idle", [True, False])
def test_a_woken_and_full_worker_hands_on_for_every_source_with_backlog(
    two: Fleet, idle: bool
) -> None:
    two.client.set("strategies:wake:c", "1")
    push(two.client, "q", message("1"))
    push(two.client, "r", message("2"))
    assert jobs(two.workers["c"].take(1, idle=idle)) == ["1"]
    assert two.woken() == {"e"}
    assert two.idle("q")[1] == {"d", "e"} | (set() if idle else {"c"})
    assert two.idle("r")[1] == {"d"} | (set() if idle else {"c"})


def test_without_a_wake_it_answers_only_for_what_it_took(two: Fleet) -> None:
    push(two.client, "q", message("1"))
    push(two.client, "r", message("2"))
    two.workers["c"].take(1)
    assert two.woken() == set()


def test_the_byte_limit_does_not_swallow_a_wake(two: Fleet) -> None:
    two.client.set("strategies:wake:c", "1")
    push(two.client, "q", message("1", body="x" * 2_000_000))
    push(two.client, "r", message("2"))
    grant = two.workers["c"].take(4, idle=True)
    assert (jobs(grant), grant.more) == (["1"], True)
    assert two.woken() == {"e"}


def test_a_wake_is_consumed_by_the_next_take(fleet: Fleet) -> None:
    fleet.client.set("strategies:wake:c", "1")
    fleet.workers["c"].take(1, idle=True)
    assert fleet.woken() == set()
    assert fleet.idle() == ({"a", "b"}, {"c", "d", "e"})


def test_the_last_backlog_runs_dry_over_a_chain_of_wakes(fleet: Fleet) -> None:
    push(fleet.client, "q", *(message(f"{n}") for n in range(5)))
    served = []
    ready = ["a"]
    while ready:
        name = ready.pop(0)
        served += jobs(fleet.workers[name].take(1, idle=True))
        ready += sorted(fleet.woken() - set(ready))
    # a took one and woke d and e; d woke c; b, who watches, is told by the push itself.
    assert served == ["0", "1", "2", "3"]
    assert fleet.idle() == ({"b"}, set())
    assert jobs(fleet.workers["b"].take(1, idle=True)) == ["4"]
    assert fleet.idle() == (set(), set())
