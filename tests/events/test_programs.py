"""StrategyConsumerMixin: programs without Celery."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue
from kombu.mixins import ConsumerProducerMixin
from kombu.transport.redis import Transport as StockTransport

from celery_strategies import ImproperlyConfigured, NotOurTransport, StrategyConsumerMixin
from celery_strategies.core.strategies import Strategy
from celery_strategies.store.keys import Keys
from tests.conftest import ProxyFactory
from tests.events.program import Program
from tests.support.redis_server import RedisServer
from tests.support.waiting import stays, wait_until
from tests.support.workers import ROOT, clean_environment

KEYS = Keys()
Send = Callable[..., None]
Start = Callable[..., Program]


class Run:
    """A program in a thread."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.program.run()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error

    def end(self) -> None:
        self.program.stop()
        self.thread.join(20)
        assert not self.thread.is_alive(), "the program did not end"


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.end()


@pytest.fixture
def start(broker_url: str, redis_db: redis.Redis, runs: list[Run]) -> Start:
    """Start a program; it consumes when this returns."""

    def start(queues: Any, *, url: str = "", kind: type[Program] = Program, **more: Any) -> Program:
        options = more.pop("transport_options", None)
        connection = Connection(url or broker_url, transport_options=options)
        program = kind(connection, list(queues), **more)
        run = Run(program)
        runs.append(run)
        run.thread.start()
        wait_until(lambda: program.ready.is_set() or run.error, description="it consumes")
        return program

    return start


@pytest.fixture
def send(broker_url: str, redis_db: redis.Redis) -> Iterator[Send]:
    """Publish, as a stock process does."""
    with Connection(broker_url, transport=StockTransport) as connection:
        producer = connection.Producer()

        def send(queue: str, *labels: str, do: str = "ack", **options: Any) -> None:
            for label in labels:
                producer.publish({"label": label, "do": do}, routing_key=queue, **options)

        yield send


def seen(program: Program, *labels: str) -> list[str]:
    """Wait until it has seen all of *labels*."""
    wait_until(lambda: set(labels) <= set(program.seen), description=f"{labels} seen")
    return program.seen


def settled(db: redis.Redis) -> bool:
    return not db.hlen(KEYS.unacked)


BACKLOG = {"a": 3, "b": 1, "c": 2}
PROMISED = {
    "priority": "a1 a2 a3 b1 c1 c2",
    "round_robin": "a1 b1 c1 a2 c2 a3",
    "max_len": "a1 a2 c1 a3 b1 c2",
    "min_len": "b1 c1 c2 a1 a2 a3",
}


@pytest.mark.parametrize("prefetch", [1, 10])
@pytest.mark.parametrize("strategy", [*PROMISED, Strategy.ROUND_ROBIN])
def test_each_strategy_keeps_its_order(
    start: Start, send: Send, redis_db: redis.Redis, strategy: Any, prefetch: int
) -> None:
    for queue in reversed(BACKLOG):
        send(queue, *[f"{queue}{i}" for i in range(1, BACKLOG[queue] + 1)])
    program = start("abc", strategy=strategy, prefetch=prefetch)
    wait_until(lambda: len(program.seen) == 6)
    name = strategy.label if isinstance(strategy, Strategy) else strategy
    assert program.seen == PROMISED[name].split()
    wait_until(lambda: settled(redis_db), description="all are acknowledged")


def test_ranks_and_levels(start: Start, send: Send, broker_url: str) -> None:
    with Connection(broker_url, transport_options={"strategies_levels": 3}) as connection:
        producer = connection.Producer()
        for priority in (2, 1, 0):
            body = {"label": f"b{priority}"}
            producer.publish(body, routing_key="b", priority=priority)
    send("a", "a1")
    send("c", "c1")
    program = start("abc", ranks={"b": 1, "c": 2}, priority_levels=3)
    wait_until(lambda: len(program.seen) == 5)
    assert program.seen == "b0 b1 b2 c1 a1".split()


def test_it_holds_no_more_than_prefetch(start: Start, send: Send, redis_db: redis.Redis) -> None:
    send("a", *"12345", do="keep")
    program = start("a", prefetch=2)
    seen(program, "1", "2")
    stays(lambda: len(program.seen) == 2, 0.5, "two and no more")
    assert redis_db.hlen(KEYS.unacked) == 2
    assert redis_db.llen("a") == 3
    # An ack out of any thread makes room at once.
    began = time.monotonic()
    program.kept.pop("1").ack()
    assert seen(program, "3") == ["1", "2", "3"]
    assert time.monotonic() - began < 0.9
    program.kept.pop("2").reject()
    program.kept.pop("3").ack()
    assert seen(program, "5") == list("12345")


def test_reject_and_requeue(start: Start, send: Send, redis_db: redis.Redis) -> None:
    send("a", "r", do="reject")
    send("a", "q", do="requeue")
    send("a", "x")
    program = start("a", prefetch=1)
    wait_until(lambda: len(program.seen) == 4)
    assert program.seen == ["r", "q", "x", "q"]
    assert program.redelivered == {"r": False, "x": False, "q": True}
    wait_until(lambda: settled(redis_db) and not redis_db.exists("a"))


def test_consumers_without_acks(start: Start, send: Send, redis_db: redis.Redis) -> None:
    send("a", *"123", do="keep")
    program = start("a", prefetch=1, no_ack=True)
    seen(program, *"123")
    wait_until(lambda: settled(redis_db), description="nobody owes an acknowledgement")


def test_what_is_no_source_is_kombus(start: Start, send: Send, redis_db: redis.Redis) -> None:
    """Kombu reads it by BRPOP and records it in its own way, beyond the program's slots."""
    program = start(["a", "reply"], kombus=["reply"], prefetch=1)
    send("a", "1", do="keep")
    seen(program, "1")
    send("reply", "2", "3", do="keep")
    seen(program, "2", "3")
    records: Any = redis_db.hvals(KEYS.unacked)
    assert sorted(json.loads(record)[1:] for record in records) == [
        ["", "a"],
        ["", "reply"],
        ["", "reply"],
    ]
    for label in "123":
        program.kept[label].ack()
    wait_until(lambda: settled(redis_db))


def test_a_topic_queue_is_a_source(start: Start, broker_url: str) -> None:
    news = Exchange("news", type="topic")
    program = start([Queue("eu", news, routing_key="eu.#"), Queue("all", news, routing_key="*")])
    with Connection(broker_url) as connection:
        for key in ("eu", "eu.de", "us", "us.ny"):
            connection.Producer().publish({"label": key}, exchange=news, routing_key=key)
    seen(program, "eu", "eu.de", "us")
    stays(lambda: sorted(program.seen) == ["eu", "eu", "eu.de", "us"], 0.2)


# -- connections ---------------------------------------------------------------------------------


def test_what_is_held_outlives_a_connection(
    start: Start,
    send: Send,
    redis_db: redis.Redis,
    redis_server: RedisServer,
    proxy_factory: ProxyFactory,
) -> None:
    proxy = proxy_factory(redis_server)
    program = start("a", url=proxy.url(), prefetch=3)
    send("a", "1", "2", do="keep")
    seen(program, "1", "2")
    proxy.drop_all()
    wait_until(lambda: program.connections == 2, description="it is connected again")
    send("a", "3")
    seen(program, "3")
    program.kept["1"].ack()
    wait_until(lambda: redis_db.hlen(KEYS.unacked) == 1, description="1 is acknowledged")
    proxy.refuse()
    # With no connection at all.
    program.kept["2"].requeue()
    proxy.heal()
    wait_until(lambda: program.seen.count("2") == 2, description="2 came again")
    assert program.seen == ["1", "2", "3", "2"]
    program.kept["2"].ack()
    wait_until(lambda: settled(redis_db), description="2 is acknowledged")


def test_a_redis_that_restarts(start: Start, own_redis: RedisServer, runs: list[Run]) -> None:
    program = start("a", url=own_redis.url(), prefetch=2)
    with Connection(own_redis.url(), transport=StockTransport) as connection:
        connection.Producer().publish({"label": "1", "do": "keep"}, routing_key="a")
        seen(program, "1")
    own_redis.restart()
    with Connection(own_redis.url(), transport=StockTransport) as connection:
        connection.Producer().publish({"label": "2"}, routing_key="a")
        seen(program, "2")
    program.kept["1"].ack()
    with own_redis.client() as db:
        wait_until(lambda: settled(db), description="both are acknowledged")
    assert program.seen == ["1", "2"]


# -- the end -------------------------------------------------------------------------------------


def test_stopping_gives_back_what_is_not_settled(
    start: Start, send: Send, runs: list[Run], redis_db: redis.Redis
) -> None:
    program = start("a", prefetch=3)
    send("a", *"1234", do="keep")
    seen(program, *"123")
    program.kept["2"].ack()
    seen(program, "4")
    began = time.monotonic()
    runs[0].end()
    # `stop` wakes it.
    assert time.monotonic() - began < 3
    assert runs[0].error is None
    assert settled(redis_db)
    assert redis_db.zcard(KEYS.returned("a")) == 3
    assert not redis_db.keys(KEYS.holder("*"))
    again = start("a", prefetch=3)
    assert seen(again, *"134") == ["1", "3", "4"]
    assert all(again.redelivered.values())


def test_stopping_while_there_is_no_broker(
    start: Start, redis_server: RedisServer, proxy_factory: ProxyFactory, runs: list[Run]
) -> None:
    proxy = proxy_factory(redis_server)
    program = start("a", url=proxy.url(), on_connection_error=lambda *_: waiting.set())
    waiting = threading.Event()
    proxy.refuse()
    assert waiting.wait(20)
    began = time.monotonic()
    program.stop()
    runs[0].thread.join(20)
    # Kombu waits 2, 4, 6 ... seconds between attempts, and looks once a second.
    assert time.monotonic() - began < 3
    assert runs[0].error is None


def test_should_stop_is_enough(start: Start, send: Send, runs: list[Run]) -> None:
    program = start("a")
    program.should_stop = True
    runs[0].thread.join(5)
    assert not runs[0].thread.is_alive()


def test_it_may_run_again(start: Start, send: Send, runs: list[Run]) -> None:
    program = start("a")
    runs[0].end()
    program.should_stop = False
    run = Run(program)
    runs.append(run)
    run.thread.start()
    send("a", "1")
    assert seen(program, "1") == ["1"]


def test_an_error_of_the_callback_ends_it_and_nothing_is_lost(
    start: Start, send: Send, runs: list[Run], redis_db: redis.Redis
) -> None:
    send("a", "1", do="keep")
    send("a", "2", do="fail")
    send("a", "3")
    start("a", prefetch=3)
    runs[0].thread.join(20)
    assert repr(runs[0].error) == "RuntimeError('2')"
    assert settled(redis_db)
    assert redis_db.zcard(KEYS.returned("a")) == 3


def test_consuming_a_few_by_hand(broker_url: str, send: Send, redis_db: redis.Redis) -> None:
    """`consume(limit=...)` without `run`."""
    send("a", *"123", do="keep")
    program = Program(Connection(broker_url), ["a"], prefetch=2)
    for _ in program.consume(limit=20, timeout=5):
        if len(program.seen) == 2:
            break
    assert program.seen == ["1", "2"]
    wait_until(lambda: settled(redis_db), description="both are back")
    assert redis_db.zcard(KEYS.returned("a")) == 2


def test_a_body_that_cannot_be_decoded_is_set_aside(
    start: Start, send: Send, broker_url: str, redis_db: redis.Redis
) -> None:
    with Connection(broker_url, transport=StockTransport) as connection:
        connection.Producer().publish(
            b"{", routing_key="a", content_type="application/json", content_encoding="utf-8"
        )
        connection.Producer().publish({"label": "0"}, routing_key="a", serializer="pickle")
    send("a", "1")
    program = start("a", prefetch=1)
    assert seen(program, "1") == ["1"]
    wait_until(lambda: settled(redis_db))
    entries: Any = redis_db.xrange(KEYS.set_aside("a"))
    assert len(entries) == 2
    assert all(b"body cannot be decoded" in entry[b"reason"] for _, entry in entries)


class Process:
    """A program in a process of its own."""

    def __init__(self, url: str, **attributes: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.events.program", url, json.dumps(attributes)],
            env=clean_environment([ROOT]),
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Process:  # noqa: PYI034  # Self is new in Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def written(db: redis.Redis) -> list[str]:
    lines: Any = db.lrange("test:seen", 0, -1)
    return [line.decode() for line in lines]


def test_after_kill_9_another_program_gets_it(
    broker_url: str, send: Send, redis_db: redis.Redis
) -> None:
    send("a", "1", "2", do="keep")
    timeout = {"visibility_timeout": 2}
    with Process(broker_url, queues=["a"], prefetch=1, transport_options=timeout):
        wait_until(lambda: written(redis_db) == ["1"], description="the first has 1")
    with Process(broker_url, queues=["a"], prefetch=5, transport_options=timeout) as other:
        wait_until(lambda: written(redis_db)[1:] == ["2", "1"], description="the other has both")
        # It lives, so what it holds stays with it.
        stays(lambda: len(written(redis_db)) == 3, 3)
        other.process.terminate()
        assert other.process.wait(20) == 0
    assert settled(redis_db)
    assert redis_db.zcard(KEYS.returned("a")) == 2


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"strategy": "fastest"}, "Program: strategies_strategy = 'fastest': must be one of"),
        ({"strategy": 17}, "Program: strategies_strategy = 17"),
        ({"ranks": {"a": "1"}}, r"Program: strategies_ranks\['a'\] = '1'"),
        ({"ranks": 3}, "Program: strategies_ranks = 3"),
        ({"priority_levels": 11}, "Program: strategies_priority_levels = 11"),
        ({"polling_interval": 0}, "Program: strategies_polling_interval = 0"),
        ({"prefetch": 0}, "Program.prefetch = 0: must be an integer, 1 or more"),
        ({"prefetch": True}, "Program.prefetch = True"),
        ({"prefetch": "10"}, "Program.prefetch = '10'"),
    ],
)
def test_a_wrong_attribute_ends_it_at_once(attributes: dict[str, Any], said: str) -> None:
    program = Program(Connection("redis://127.0.0.1:1/0"), ["a"], **attributes)
    with pytest.raises(ImproperlyConfigured, match=said):
        program.run()


def test_another_broker_is_refused() -> None:
    with pytest.raises(NotOurTransport):
        Program(Connection("memory://"), ["a"]).run()


def test_a_server_that_is_too_old_is_refused(
    broker_url: str, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_strategies.store.checks.MINIMUM", (99, 0))
    with pytest.raises(ImproperlyConfigured):
        Program(Connection(broker_url), ["a"]).run()


def test_the_connection_that_was_given_stays_as_it_was(start: Start) -> None:
    program = start("a", priority_levels=3, transport_options={"visibility_timeout": 77})
    assert program.connection.transport_options == {"visibility_timeout": 77}


def test_with_kombus_other_mixin(start: Start, send: Send, redis_db: redis.Redis) -> None:
    class Both(Program, ConsumerProducerMixin):
        def handle(self, body: Any, message: Any) -> None:
            super().handle(body, message)
            self.producer.publish({"label": body["label"]}, routing_key="out")

    assert issubclass(Both, StrategyConsumerMixin)
    program = start("a", kind=Both)
    send("a", "1")
    seen(program, "1")
    wait_until(lambda: redis_db.llen("out") == 1, description="it has published")
