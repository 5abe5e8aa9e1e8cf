"""A lease and its holder's jobs when processes, connections and Redis itself stop for a while."""

from __future__ import annotations

import signal

import pytest
import redis

from tests.leases.lab import (
    QUEUE,
    QUICK,
    STALE,
    LeaseLab,
    broken_order,
    no_burial,
    numbers,
    repeated,
)
from tests.support.redis_server import RedisServer
from tests.support.waiting import stays, wait_until


def for_seconds(seconds: float) -> None:
    """Let a chosen stretch of time pass, where the pause itself is what is tested."""
    stays(lambda: True, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_leader_that_froze_starts_nothing_new(lab: LeaseLab, pool: str) -> None:
    one, two = lab.fleet(2, pool, settings=QUICK)
    lab.send("hold_number", "a", "gate-a", queue=QUEUE)
    lab.wait_started("a")
    frozen = lab.wait_leader()
    other, before = two if frozen is one else one, lab.term()
    lab.fill(QUEUE, ["b", "c"], "number")
    frozen.pause()
    wait_until(lambda: lab.started() == ["a", "a"], 20, "its job runs again, first")
    assert lab.leader() is other
    frozen.resume()
    lab.open(2, "gate-a")
    lab.wait_ended("a", "b", "c")
    wait_until(lambda: lab.ended().count("a") == 2, description="the frozen one's job ends too")
    assert lab.ran_by("b", "c") == {other.hostname}
    assert broken_order(lab.events(), ["a", "b", "c"]) == []
    # What the outside sees: the frozen one's job has the lower term.
    assert [term for _, term in lab.terms()] == [before, *[lab.term()] * 3]
    assert lab.term() > before
    frozen.wait_log("Connection to broker lost")
    other.stop()
    lab.fill(QUEUE, ["d"], "number")
    lab.wait_ended("d")
    assert lab.ran_by("d") == {frozen.hostname}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, STALE + 1.5])
def test_a_pause_of_redis_moves_no_lease_and_buries_nobody(
    own_lab: LeaseLab, own_server: RedisServer, seconds: float
) -> None:
    lab = own_lab
    workers = lab.fleet(3, settings=QUICK)
    lab.fill(QUEUE, ["a", "b"], "hold_number")
    lab.wait_started("a")
    leader, term = lab.wait_leader(), lab.term()
    own_server.pause()
    for_seconds(seconds)
    own_server.resume()
    stays(lambda: lab.started() == ["a"], STALE + 2, "a runs on, once")
    assert (lab.leader(), lab.term()) == (leader, term)
    lab.open(2)
    lab.wait_ended("a", "b")
    assert lab.started() == ["a", "b"]
    assert lab.term() == term
    no_burial(*workers)


@pytest.mark.slow
def test_a_restart_of_redis_keeps_the_order_and_buries_nobody(
    own_lab: LeaseLab, own_server: RedisServer
) -> None:
    lab = own_lab
    workers = lab.fleet(3, settings=QUICK, concurrency=2)
    lab.send("hold_number", "00000", queue=QUEUE)
    lab.wait_started("00000")
    labels = numbers(20)
    lab.fill(QUEUE, labels[1:], "number")
    own_server.restart(kill=True)
    stays(lambda: lab.started() == labels[:1], STALE + 2, "the job runs on, once")
    lab.open()
    lab.wait_ended(*labels)
    assert broken_order(lab.events(), labels) == []
    assert repeated(lab.events()) == []
    no_burial(*workers)


@pytest.mark.slow
def test_a_redis_that_lost_its_data_is_led_anew_under_higher_terms(
    own_lab: LeaseLab, own_server: RedisServer
) -> None:
    lab = own_lab
    own_server.config["appendonly"] = "no"
    own_server.aof = False
    own_server.restart()
    own_server.folder.joinpath("appendonly.aof").unlink(missing_ok=True)
    lab.fleet(2)
    lab.fill(QUEUE, ["a"], "number")
    lab.wait_ended("a")
    before = lab.term()
    own_server.restart(kill=True)
    assert not lab.term() or lab.term() > before
    lab.fill(QUEUE, ["b", "c"], "number")
    lab.wait_ended("b", "c")
    assert lab.started() == ["a", "b", "c"]
    assert lab.term() > before


def clients(db: redis.Redis, kind: str) -> list[str]:
    """Return the ids of the keepers' or the readers' connections."""
    mark = {"keeper": lambda c: int(c["sub"]) > 0 and c["cmd"] in ("evalsha", "pexpire")}
    mark["reader"] = lambda c: "t" in c["flags"]
    return [client["id"] for client in db.client_list() if mark[kind](client)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keeper", "reader"])
def test_connections_that_are_cut_again_and_again_bury_nobody(lab: LeaseLab, kind: str) -> None:
    workers = lab.fleet(2, settings=QUICK)
    lab.fill(QUEUE, ["a", "b"], "hold_number")
    lab.wait_started("a")
    leader, term = lab.wait_leader(), lab.term()
    for _ in range(8):
        found = wait_until(lambda: len(c := clients(lab.db, kind)) == 2 and c, 10, "both there")
        for client in found:
            lab.db.client_kill_filter(_id=client)
        gone = set(found)
        wait_until(lambda: not gone & set(clients(lab.db, kind)), 10, "both gone")  # noqa: B023
        for_seconds(0.3)
    stays(lambda: lab.started() == ["a"], STALE, "a runs on, once")
    assert (lab.leader(), lab.term()) == (leader, term)
    no_burial(*workers)
    lab.open(2)
    lab.wait_ended("a", "b")
    assert lab.started() == ["a", "b"]


@pytest.mark.slow
def test_a_worker_whose_loop_hangs_is_replaced(lab: LeaseLab) -> None:
    """The keeper alone must not keep a lease: without a turn of the loop it stops beating."""
    env = {"TEST_LOOP_STALE_AFTER": "2"}
    one, two = lab.fleet(2, "prefork", settings=QUICK, env=env)
    lab.fill(QUEUE, ["a"], "number")
    lab.wait_ended("a")
    hung = lab.wait_leader()
    hung.signal(signal.SIGUSR2)
    lab.fill(QUEUE, ["b"], "number")
    lab.wait_ended("b", timeout=20)
    assert lab.leader() is (two if hung is one else one)
    assert hung.running
