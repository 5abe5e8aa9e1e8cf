"""What a dead worker held runs elsewhere within seconds, in its place; what lives is left alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata

import pytest
import redis

from celery_strategies.store.keys import Keys
from celery_strategies.store.store import Store
from tests.conftest import RedisFactory, WorkerFactory
from tests.leases.lab import PROJECT, QUICK, STALE, LeaseLab, no_burial, numbers, repeated
from tests.store.tools import Caller
from tests.support.redis_server import RedisServer
from tests.support.waiting import stays, wait_until
from tests.support.workers import ROOT, celery
from tests.worker.lab import label_of

SHORT = {**QUICK, "broker_transport_options": {"visibility_timeout": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_killed_workers_job_runs_elsewhere_within_seconds(lab: LeaseLab, pool: str) -> None:
    watcher = lab.worker("threads", queues="b")
    worker = lab.worker(pool, queues="a")
    lab.send("hold_late", "job", queue="a")
    lab.wait_started("job")
    other = lab.worker("threads", queues="a")
    lab.acquainted(worker, other, watcher)
    worker.kill()
    began = time.monotonic()
    wait_until(lambda: lab.started().count("job") == 2, 15, "it runs again")
    # Some 1 s on a machine with nothing else to do; the slow rule would take 10.
    assert time.monotonic() - began < 5
    lab.open()
    lab.wait_ended("job")
    assert lab.ran_by("job") == {worker.hostname, other.hostname}


@pytest.mark.slow
def test_what_was_held_comes_back_in_its_place(lab: LeaseLab) -> None:
    settings = {"strategies_fair_share": True, "strategies_priority_levels": 2}
    lab.app.conf.update(settings)

    def send(label: str, level: int) -> None:
        headers = {"fair_key": label[0]}
        task = "hold_late" if label in ("a1", "b1", "c1") else "record"
        lab.send(task, label, queue="q", priority=level, headers=headers)

    one = lab.worker(queues="q", settings=settings, concurrency=3)
    for label in ("a1", "b1", "c1"):
        send(label, 1)
    lab.wait_started("a1", "b1", "c1")
    two = lab.worker(queues="q", settings=settings)
    lab.send("hold", "busy", "gate-busy", queue="q")
    lab.wait_started("busy")
    lab.acquainted(one, two)
    for label in ("a2", "b2", "c2"):
        send(label, 1)
    send("d1", 0)
    one.kill()
    two.wait_log("is dead: 3 messages that it held went back")
    keys = {(label, key) for _, _, key, raw in lab.sorted_jobs("q") for label in [label_of(raw)]}
    assert {("a1", "a"), ("b1", "b"), ("c1", "c")} <= keys
    before = len(lab.started())
    lab.open(3)
    lab.open(1, "gate-busy")
    lab.wait_ended("a2", "b2", "c2", "d1")
    assert lab.started()[before:] == ["d1", "a1", "b1", "c1", "a2", "b2", "c2"]


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_living_workers_long_job_runs_once(lab: LeaseLab, pool: str) -> None:
    workers = [lab.worker(name, queues="a", settings=SHORT) for name in (pool, "threads")]
    lab.acquainted(*workers)
    for number in range(2):
        lab.send("hold_late", f"long{number}", queue="a")
    lab.wait_started("long0", "long1")
    stays(lambda: len(lab.started()) == 2, 7, "twice the visibility timeout, and more")
    lab.open(2)
    lab.wait_ended("long0", "long1")
    lab.wait_settled()
    assert repeated(lab.events()) == []
    no_burial(*workers)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_green_worker_whose_job_never_yields_is_not_buried(lab: LeaseLab, pool: str) -> None:
    green = lab.worker(pool, queues="a", settings=SHORT)
    lab.send("busy", "long", 6, queue="a")
    lab.wait_started("long")
    watcher = lab.worker("threads", queues="a", settings=SHORT)
    lab.wait_ended("long")
    lab.wait_settled()
    assert repeated(lab.events()) == []
    no_burial(green, watcher)


@pytest.mark.slow
def test_a_lone_worker_that_is_restarted_picks_up_its_own_job(lab: LeaseLab) -> None:
    worker = lab.worker(queues="a", settings=QUICK)
    lab.send("hold_late", "own", queue="a")
    lab.wait_started("own")
    worker.kill()
    worker.start().wait_ready()
    wait_until(lambda: lab.started() == ["own", "own"], STALE + 6, "it runs again")
    lab.open()
    lab.wait_ended("own")
    lab.wait_settled()


@pytest.mark.slow
def test_a_poison_is_set_aside_and_can_be_queued_again(lab: LeaseLab) -> None:
    settings = {**QUICK, "strategies_max_deliveries": 2, "strategies_priority_levels": 3}
    settings["strategies_fair_share"] = True
    watcher = lab.worker(queues="b", settings=settings)
    lab.app.conf.update(settings)
    headers = {"fair_key": "acme"}
    lab.send("end_worker", "poison", 2, queue="a", priority=2, headers=headers)
    lab.send("record", "behind", queue="a", priority=2, headers=headers)
    for number in (1, 2):
        # Not waiting until it is ready: it may be dead before.
        worker = lab.worker(queues="a", settings=settings, wait=False)
        worker.wait_exit(30)
        watcher.wait_log(lambda log: log.count("is dead: 1 messages") == number)  # noqa: B023
    worker = lab.worker(queues="a", settings=settings)
    lab.wait_ended("behind")
    assert lab.started() == ["poison", "poison", "behind"]

    def dead(*arguments: str) -> str:
        command = ("strategies", "dead", *arguments)
        return celery(*command, broker_url=lab.url, app=PROJECT, settings=settings).stdout

    (line,) = dead("list").splitlines()
    queue, entry, task, _, *rest = line.split("  ")
    assert (queue, task) == ("a", "test.end_worker")
    assert rest == ["level 2", "key 'acme'", "2 workers died while they held it"]
    assert dead("requeue", "a", entry) == f"a: {entry} requeued\n"
    lab.wait_ended("poison")
    # No more a poison: it ran with its level and its key.
    assert lab.started()[-1] == "poison"
    assert worker.running


@pytest.mark.slow
def test_children_do_not_outlive_their_parents_session(lab: LeaseLab) -> None:
    watcher = lab.worker(queues="b")
    worker = lab.worker("prefork", queues="a")
    lab.send("hold_late", "child", queue="a")
    lab.wait_started("child")
    lab.acquainted(worker, watcher)
    children = worker.children()
    worker.signal(signal.SIGKILL)
    began = time.monotonic()
    lab.wait_dead(worker, 8)
    assert time.monotonic() - began < 5
    # The child went on with its job meanwhile.
    assert any(os.path.exists(f"/proc/{child}") for child in children)  # noqa: PTH110
    lab.open()


@pytest.mark.slow
def test_without_a_subscription_a_death_takes_longer_to_see(
    redis_factory: RedisFactory, redis_server: RedisServer, worker_factory: WorkerFactory
) -> None:
    # Of all channels only Celery's own.
    server = redis_factory(acl=["user default on nopass ~* resetchannels &/* +@all"])
    with server.client() as db, redis_server.client() as records:
        lab = LeaseLab(server.url(), db, worker_factory, records=records)
        lab.record_url = redis_server.url()
        workers = lab.fleet(2, queues="a", settings=QUICK)
        for worker in workers:
            worker.wait_log("if this worker dies, its jobs come back after 2 s, not at once")
        lab.send("hold_late", "job", queue="a")
        lab.wait_started("job")
        stays(lambda: lab.started() == ["job"], STALE + 2, "nobody takes a living worker for dead")
        (name,) = lab.ran_by("job")
        holder = lab.names[name]
        began = time.monotonic()
        holder.kill()
        wait_until(lambda: lab.started() == ["job", "job"], 15, "it runs again")
        assert time.monotonic() - began > STALE
        lab.open()
        lab.wait_ended("job")
        lab.close()


PROGRAM = """
import sys, time
from kombu import Connection, Consumer, Queue
from celery_strategies import StrategyConsumerMixin
import redis

class Program(StrategyConsumerMixin):
    prefetch = 1
    def __init__(self, url):
        self.connection = Connection(url)
        self.db = redis.Redis.from_url(url)
    def get_consumers(self, consumer, channel):
        return [consumer([Queue("a")], callbacks=[self.work])]
    def work(self, body, message):
        self.db.rpush("test:program", "start")
        time.sleep(6)
        message.ack()
        self.db.rpush("test:program", "end")

Program(sys.argv[1]).run()
"""


@pytest.mark.slow
def test_a_program_in_a_long_callback_is_not_buried(lab: LeaseLab) -> None:
    watcher = lab.worker(queues="b", settings=SHORT)
    command = [sys.executable, "-c", PROGRAM, lab.url]
    program = subprocess.Popen(command, cwd=ROOT)
    try:
        lab.send("record", "job", queue="a")
        wait_until(lambda: lab.db.lrange("test:program", 0, -1) == [b"start", b"end"], 20, "done")
        lab.wait_settled()
        no_burial(watcher)
    finally:
        program.kill()
        program.wait()


# -- what it costs --------------------------------------------------------------------------------------------


def scripts(db: redis.Redis) -> int:
    return int(db.info("commandstats")["cmdstat_evalsha"]["calls"])


@pytest.mark.slow
def test_an_idle_keeper_makes_few_calls(lab: LeaseLab) -> None:
    worker = lab.worker()
    lab.wait_leader()
    lab.acquainted(worker)
    before, began = scripts(lab.db), time.monotonic()
    stays(lambda: True, 4)
    rate = (scripts(lab.db) - before) / (time.monotonic() - began)
    # Two beats, and now and then a look and a renewal of the reader's.
    assert rate <= 3


def test_a_beat_over_many_workers_is_cheap(
    redis_server: RedisServer, redis_db: redis.Redis
) -> None:
    keys, count = Keys(), 50
    with redis_server.client() as client:
        sessions = client.pubsub()
        names = [f"fake{number}@host-{number:012d}" for number in range(count)]
        sessions.subscribe(*map(keys.session, names))
        for _ in names:
            sessions.get_message(timeout=5)
        seconds, _ = redis_db.time()
        redis_db.zadd(keys.alive, dict.fromkeys(names, (seconds + 60) * 1000))
        caller = Caller(redis_db)
        store = Store(keys, "w")
        packed = store.beat([], 1500, 60_000, 60_000)
        caller(packed)
        redis_db.config_resetstat()
        for _ in numbers(200):
            _now, _has_entry, _outranked, *found = caller(packed)
            assert found == []
        stats = redis_db.info("commandstats")
        assert stats["cmdstat_evalsha"]["usec_per_call"] < 1000
        sessions.unsubscribe()
        sessions.get_message(timeout=5)
        # Only those that said they have one are told by it.
        redis_db.hset(keys.entry(names[0]), "session", 1)
        wait_until(lambda: caller(packed)[3:] != [], description="its session is gone")
        assert list(caller(packed)[3::3]) == [names[0].encode()]
        caller.close()
        sessions.close()


def test_the_registry_says_who_reads_what(lab: LeaseLab) -> None:
    worker = lab.worker(queues=("b", "a"), concurrency=3, args=["--consumer-priority", "7"])

    def entry() -> dict[str, str]:
        (name,) = lab.db.zrange(lab.keys.alive, 0, -1)
        found = lab.db.hgetall(lab.keys.entry(name.decode()))
        return {field.decode(): value.decode() for field, value in found.items()}

    wait_until(lambda: entry().get("queues") == '["b", "a"]', 20, "it says what it reads")
    found = entry()
    assert found["name"] == worker.hostname
    assert found["pid"] == str(worker.pid)
    assert found["host"] == socket.gethostname()
    assert found["version"] == metadata.version("celery-strategies")
    chosen = {name: found[name] for name in ("strategy", "priority", "slots", "session")}
    assert chosen == {"strategy": "priority", "priority": "7", "slots": "3", "session": "1"}
