"""Sorted jobs go back to Kombu's lists in the order in which they would run, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from celery_strategies.core.policy import Policy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.admin import queues_to_unsort, set_weight, unsort_queue
from celery_strategies.store.keys import Keys

from .sorted_scenarios import sorted_source
from .sorted_state import audit, look
from .tools import NOW, Caller, Worker, failing, job_of, jobs, message, push, tagged

FAIR = Policy("fair", False, "fair_key", "fair_weight")
GROUPS = Policy("age", True, "fair_key", "")
KEYS = Keys()


@pytest.fixture
def worker(caller: Caller, redis_db: redis.Redis) -> Worker:
    worker = Worker(caller, "w", sorted_source("q", None))
    worker.join()
    return worker


def publish(client: redis.Redis, names: str, step: int = 0, weight: float = 1.0) -> None:
    """Publish jobs by name; the key is the first letter, - stands for none."""
    for name in names.split():
        key = name[0].replace("-", "")
        push(client, KEYS.inbox("q", step), message(name, **tagged(FAIR, key, weight)))


def lying(client: redis.Redis, step: int = 0) -> str:
    """Return what lies in Kombu's list, the next to run first."""
    raws = reversed(client.lrange(KEYS.inbox("q", step), 0, -1))
    return " ".join(job_of(raw) for raw in raws)


def left_over(client: redis.Redis) -> list[str]:
    """Return which keys of the queue are left that hold or count messages."""
    base = KEYS.base("q")
    names = [name.decode().removeprefix(base) for name in client.scan_iter(f"{base}*")]
    return sorted(name for name in names if name not in {"caps", "weights"})


def test_the_fair_order_is_kept_levels_and_newcomers_too(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.adopt("q", FAIR)
    publish(redis_db, "a1 a2 a3 b1 b2 -1")
    publish(redis_db, "c1 c2 d1", step=4)
    set_weight(redis_db, KEYS, "q", "b", 2)
    worker.sort(worker.sources[0])
    publish(redis_db, "new-1 a4")
    assert unsort_queue(redis_db, KEYS, "q") == 9
    assert lying(redis_db) == "b1 a1 b2 -1 a2 a3 new-1 a4"
    assert lying(redis_db, 4) == "c1 d1 c2"
    assert left_over(redis_db) == []
    # What an operator set is there when the queue is sorted again.
    worker.adopt("q", FAIR)
    assert redis_db.hget(KEYS.policy("q"), "weights") == b"1"
    assert jobs(worker.take(3)) == ["b1", "a1", "b2"]


def test_given_back_ones_are_the_first_and_delayed_ones_the_last(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.adopt("q", FAIR)
    publish(redis_db, "a1 a2 b1 b2 b3")
    taken = {job_of(d.raw): d.tag for d in worker.take(4).deliveries}
    assert list(taken) == ["a1", "b1", "a2", "b2"]
    worker.restore(redis_db, taken["b1"], taken["a2"])
    for name, seconds in (("b2", 9), ("a1", 5)):
        worker.caller(worker.store.delay(taken[name], "q", NOW / 1e6 + seconds))
    push(redis_db, "q", message("later", eta="2999-01-01T00:00:00Z"))
    worker.sort(worker.sources[0])
    publish(redis_db, "new")
    assert unsort_queue(redis_db, KEYS, "q") == 6
    assert lying(redis_db) == "a2 b1 b3 new a1 b2 later"
    assert left_over(redis_db) == []


def test_caps_and_groups_hold_nothing_back(redis_db: redis.Redis, worker: Worker) -> None:
    worker.adopt("q", GROUPS)
    publish(redis_db, "a1 a2 b1 a3 b2")
    held = [delivery.tag for delivery in worker.take(5).deliveries]
    assert len(held) == 2
    assert unsort_queue(redis_db, KEYS, "q") == 3
    assert lying(redis_db) == "a2 a3 b2"
    # What is held is nobody's business here, and can come back.
    worker.restore(redis_db, held[1])
    assert unsort_queue(redis_db, KEYS, "q") == 1
    assert lying(redis_db) == "b1 a2 a3 b2"
    worker.caller(worker.store.settle(held[:1]))
    assert left_over(redis_db) == []


def test_held_jobs_come_back_to_their_keys_when_it_is_sorted_again(
    redis_db: redis.Redis, worker: Worker
) -> None:
    worker.adopt("q", GROUPS)
    publish(redis_db, "a1 a2 b1 b2")
    a1, b1 = (delivery.tag for delivery in worker.take(4).deliveries)
    unsort_queue(redis_db, KEYS, "q")
    # b1 comes back while nobody sorts, a1 when somebody does.
    worker.restore(redis_db, b1)
    worker.adopt("q", GROUPS)
    assert jobs(worker.take(1)) == ["b1"]
    worker.restore(redis_db, a1)
    assert jobs(worker.take(9)) == ["a1"]
    assert audit(redis_db, KEYS, "q") == []
    state = look(redis_db, KEYS, "q")
    assert state.full == {(0, "a"), (0, "b")}


def test_a_large_queue_takes_many_calls(redis_db: redis.Redis, worker: Worker) -> None:
    worker.adopt("q", FAIR)
    total = 10 * calls.TAKE_LIMIT + 7
    names = [f"{'abcd'[n % 4]}{n}" for n in range(total)]
    publish(redis_db, " ".join(names))
    worker.sort(worker.sources[0])
    redis_db.script_flush()
    assert unsort_queue(redis_db, KEYS, "q") == total
    # All weights are the same: in turn, which is how they came.
    assert lying(redis_db).split() == names
    assert left_over(redis_db) == []
    assert unsort_queue(redis_db, KEYS, "q") == 0


def test_a_queue_that_is_sorted_is_found(redis_db: redis.Redis, worker: Worker) -> None:
    worker.adopt("q", FAIR)
    publish(redis_db, "a1")
    worker.sort(worker.sources[0])
    odd = 'x*?[a]{b}:"\\ż %s'
    other = Worker(worker.caller, "x", sorted_source(odd))
    other.join()
    other.adopt(odd, FAIR)
    push(redis_db, odd, message("odd", queue=odd, fair_key="k:{*}"))
    other.sort(other.sources[0])
    assert queues_to_unsort(redis_db, KEYS) == sorted(["q", odd])
    assert unsort_queue(redis_db, KEYS, odd) == 1
    assert [job_of(raw) for raw in redis_db.lrange(odd, 0, -1)] == ["odd"]
    assert queues_to_unsort(redis_db, KEYS) == ["q"]


# -- interrupted --------------------------------------------------------------------------------


def seed(client: redis.Redis, worker: Worker) -> None:
    """Jobs of two levels, given back, of a full key, delayed; a part of them on their way already."""
    client.flushall()
    worker.sessions = 0
    worker.join()
    worker.adopt("q", FAIR, {"c": 1})
    publish(client, "a1 a2 a3 b1 b2 c1 c2 c3", weight=0.3)
    publish(client, "d1 d2 e1", step=3)
    taken = {job_of(d.raw): d.tag for d in worker.take(4).deliveries}
    worker.restore(client, taken["b1"])
    worker.caller(worker.store.delay(taken["a1"], "q", NOW / 1e6 + 5))
    publish(client, "new")


def first_times(names: str) -> list[str]:
    """Return the names, each only where it comes first."""
    return list(dict.fromkeys(names.split()))


STEPS: dict[str, Callable[[Worker], bytes]] = {
    "gather": lambda _: calls.evalsha(
        scripts.GATHER, [KEYS.scratch, KEYS.policy("q"), KEYS.unsorted("q")], 4
    ),
    "unsort": lambda _: calls.unsort(KEYS, "q", 3),
    "promote": lambda w: w.store.promote("q", 9, "all"),
}


def interruptions(client: redis.Redis, worker: Worker, step: str) -> Iterator[int]:
    """Go as far as *step*, and stop that at its 1st, 2nd, … call."""
    for at in range(1, 200):
        seed(client, worker)
        while step == "unsort" and worker.caller(STEPS["gather"](worker)) >= 0:
            pass
        try:
            client.execute_command(*failing(STEPS[step](worker), at))
        except redis.ResponseError as error:
            assert "injected" in str(error)  # noqa: PT017
        else:
            return
        yield at


@pytest.mark.parametrize("step", STEPS)
def test_after_any_interruption_it_goes_on_and_the_order_holds(
    redis_db: redis.Redis, worker: Worker, step: str
) -> None:
    seed(redis_db, worker)
    assert unsort_queue(redis_db, KEYS, "q") == 9
    orders = lying(redis_db), lying(redis_db, 3)
    assert orders == ("b1 a3 b2 c2 c3 new a1", "d1 e1 d2")
    stops = 0
    for _ in interruptions(redis_db, worker, step):
        stops += 1
        for _ in range(3):
            unsort_queue(redis_db, KEYS, "q")
        for level, order in ((0, orders[0]), (3, orders[1])):
            # Some may be there twice, the second time later than where they belong.
            assert first_times(lying(redis_db, level)) == order.split()
        # Two are held.
        assert left_over(redis_db) == ["running:a", "running:c"]
    assert stops > 2


def test_between_two_calls_every_job_is_served_to_our_workers(
    redis_db: redis.Redis, worker: Worker
) -> None:
    seed(redis_db, worker)
    worker.caller(STEPS["gather"](worker))
    worker.caller(STEPS["unsort"](worker))
    found: list[str] = []
    for _ in range(9):
        # Whoever asks for the rest, of the workers that go on meanwhile, is served.
        grant = worker.take(2, tags=[])
        found += jobs(grant)
        worker.adopt("q", FAIR, {"c": 1})
        worker.caller(STEPS["gather"](worker))
        worker.caller(STEPS["unsort"](worker))
    worker.adopt("q", FAIR)
    worker.caller(worker.store.promote("q", now=NOW + 10**7))
    found += jobs(worker.take(64))
    # c1 and a2 are held since before that.
    assert sorted(found) == "a1 a3 b1 b2 c2 c3 d1 d2 e1 new".split()
