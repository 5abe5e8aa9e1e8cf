"""Case 34: whatever Redis refuses, at whatever call: back off, say it once, go on, lose nothing."""

from __future__ import annotations

import contextlib
import logging
import select
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions
from celery import Celery

from celery_strategies import Strategy
from celery_strategies.store import link as link_module
from celery_strategies.store.store import command, pack
from celery_strategies.transport import connector as connector_module
from celery_strategies.transport import patience
from celery_strategies.transport.reader import Reader
from tests.conftest import RedisFactory
from tests.faults.conftest import Publisher, Starter
from tests.faults.helpers import QUEUE, everywhere, moment, nothing_left, send
from tests.support.apps import ended, make_app, started
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

# -- at each call, in one process -------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], Exception]] = {
    "MISCONF": lambda: redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
    "LOADING": lambda: redis.BusyLoadingError("LOADING Redis is loading the dataset in memory"),
    "OOM": lambda: redis.exceptions.OutOfMemoryError("OOM command not allowed"),
    "NOAUTH": lambda: redis.AuthenticationError("NOAUTH Authentication required."),
    "NOPERM": lambda: redis.exceptions.NoPermissionError("NOPERM this user has no permissions"),
    "NOSCRIPT": lambda: redis.exceptions.NoScriptError("NOSCRIPT No matching script."),
    "READONLY": lambda: redis.ReadOnlyError(
        "READONLY You can't write against a read only replica."
    ),
    "UNBLOCKED": lambda: redis.ResponseError("UNBLOCKED client unblocked via CLIENT UNBLOCK"),
    "BUSY": lambda: redis.ResponseError("BUSY Redis is busy running a script."),
    "lost before": lambda: redis.ConnectionError("lost before the server saw it"),
    "lost after": lambda: redis.ConnectionError("lost after the server did it"),
    "timeout": lambda: redis.TimeoutError("Timeout reading from socket"),
}


class Saboteur:
    """Makes the calls numbered from `at` fail, `count` of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.count = 1
        self.kind = ""

    def struck(self) -> bool:
        """Count one call and say whether it fails."""
        self.calls += 1
        return self.at is not None and self.at < self.calls <= self.at + self.count

    def link(self) -> type[link_module.Link]:
        """Return a `Link` whose calls are this one's to spoil."""
        saboteur = self

        class SabotagedLink(link_module.Link):
            def send(self, packed: bytes, *handlers: Any) -> None:
                if not saboteur.struck():
                    super().send(packed, *handlers)
                    return
                kind = saboteur.kind
                error = ERRORS[kind]()
                if kind in ("lost before", "lost after", "timeout"):
                    if kind != "lost before":
                        super().send(packed, *[lambda _: None] * len(handlers))
                        for _ in handlers:
                            super().read_one()
                    self.close()
                    raise error
                # The server says no: PINGs stand for the calls, so that the order of replies holds.
                super().send(
                    _PING * len(handlers), *[lambda _, h=handler: h(error) for handler in handlers]
                )

        return SabotagedLink


_PING = command(pack("PING"))


class Loop:
    """The least that owns a reader: turns, and a new connection when one is lost."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.slots = 2
        self.reader = Reader(
            "loop@test",
            strategy=Strategy.PRIORITY,
            capacity=lambda: self.slots - len(self.reader.held),
            polling_interval=0.05,
        )
        self.seen: list[str] = []
        self.done: list[str] = []
        self.unsettled: list[Any] = []
        self.connection: Any = None
        self.reconnects = 0

    def message(self, message: Any) -> None:
        self.seen.append(message.headers["id"])
        self.unsettled.append(message)

    def work(self) -> None:
        """Settle what was delivered, each in another way by its name."""
        while self.unsettled:
            message = self.unsettled.pop(0)
            name, times = message.headers["argsrepr"], self.seen.count(message.headers["id"])
            tag = message.delivery_tag
            if "requeue" in name and times == 1:
                message.requeue()
            elif "back" in name and times == 1:
                self.reader.settler.give_back([tag])
            elif "aside" in name:
                self.reader.settler.set_aside(tag, "as asked")
            else:
                message.ack()
                self.done.append(message.headers["id"])

    def connect(self) -> None:
        self.connection = self.app.connection_for_read()
        channel = self.connection.default_channel
        self.reader.attach(channel)
        channel.basic_consume(QUEUE, False, self.message, "tag")

    def turn(self) -> None:
        try:
            if self.connection is None:
                self.connect()
            self.reader.on_tick()
            fds = [self.reader.waker.fileno(), self.reader.fileno()]
            ready, _, _ = select.select([fd for fd in fds if fd is not None], [], [], 0.02)
            if self.reader.waker.fileno() in ready:
                self.reader.waker.drain()
            if self.reader.fileno() in ready:
                self.reader.on_readable()
            self.work()
        except (redis.RedisError, OSError):
            # A worker whose boot or reconnect fails tries again.
            self.reconnects += 1
            self.disconnect()

    def disconnect(self) -> None:
        self.reader.detach()
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                connection.close()


JOBS = ("plain 1", "requeue", "back", "aside", "plain 2")


def _scenario(app: Celery, client: redis.Redis, saboteur: Saboteur) -> Loop:
    """Run five jobs through a reader, each settled in another way."""
    loop = Loop(app)
    saboteur.calls = 0
    loop.turn()
    ids = {name: app.send_task("test.record", [name], argsrepr=name).id for name in JOBS}

    def over() -> bool:
        loop.turn()
        return set(loop.done) >= {ids[n] for n in JOBS if n != "aside"} and nothing_waits(client)

    def nothing_waits(client: redis.Redis) -> bool:
        lying = everywhere(client)
        return set(lying) <= {"aside"} and not client.zcard("unacked_index")

    try:
        wait_until(over, 20, "all jobs are settled", interval=0)
    finally:
        loop.reader.shutdown()
        loop.disconnect()
    counts = Counter(loop.seen)
    assert everywhere(client) == Counter({"aside": 1})
    assert counts[ids["requeue"]] == 2
    assert counts[ids["back"]] == 2
    assert counts[ids["plain 1"]] == counts[ids["plain 2"]] == counts[ids["aside"]] == 1
    assert not loop.reader.held
    return loop


@pytest.fixture
def saboteur(monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    saboteur = Saboteur()
    monkeypatch.setattr(connector_module, "Link", saboteur.link())
    # The pauses are the same for every kind; their length is not what is tested here.
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.02)
    return saboteur


@pytest.fixture
def app(broker_url: str) -> Iterator[Celery]:
    with make_app(broker_url) as app:
        yield app


@pytest.mark.parametrize("kind", ERRORS)
def test_case_34_at_each_call_of_the_reader(
    app: Celery,
    redis_db: redis.Redis,
    saboteur: Saboteur,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    _scenario(app, redis_db, saboteur)
    total, saboteur.kind = saboteur.calls, kind
    assert total > 10
    for at in range(total):
        redis_db.flushall()
        caplog.clear()
        saboteur.at = at
        try:
            _scenario(app, redis_db, saboteur)
        except AssertionError as error:
            raise AssertionError(f"call {at + 1} of {total}: {error}\n{caplog.text}") from None


@pytest.mark.parametrize("kind", ["MISCONF", "OOM", "NOPERM", "BUSY"])
def test_case_34_is_said_once_however_long_it_lasts(
    app: Celery,
    redis_db: redis.Redis,
    saboteur: Saboteur,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    loop = Loop(app)
    loop.turn()
    wait_until(lambda: loop.turn() or not loop.reader._hungry, description="it is idle")
    saboteur.kind, saboteur.at, saboteur.count, saboteur.calls = kind, 0, 10_000, 0
    app.send_task("test.record", ["one"], argsrepr="one")
    wait_until(
        lambda: loop.turn() or saboteur.calls >= 20,
        description="it was refused 20 times",
        interval=0,
    )
    said = [record for record in caplog.records if kind in record.getMessage()]
    assert len(said) == 1, caplog.text
    saboteur.at = None
    wait_until(
        lambda: loop.turn() or nothing_left(redis_db), description="the job is done", interval=0
    )
    assert "accepts calls again" in caplog.text
    loop.reader.shutdown()
    loop.disconnect()


# -- real refusals, real workers --------------------------------------------------------------------------------


class Outage:
    """One way to have a server refuse, and to end it."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.client = server.client()

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class ScriptFlush(Outage):
    def begin(self) -> None:
        self.client.script_flush()

    def end(self) -> None:
        self.client.script_flush()


class Readonly(Outage):
    def begin(self) -> None:
        self.client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))

    def end(self) -> None:
        self.client.execute_command("REPLICAOF", "NO", "ONE")


class Misconf(Outage):
    """The folder for snapshots is gone."""

    def begin(self) -> None:
        shutil.rmtree(self.folder(self.server))
        self.client.config_set("save", "3600 1")
        self.client.execute_command("BGSAVE")
        wait_until(lambda: self.client.info("persistence")["rdb_last_bgsave_status"] == "err")

    def end(self) -> None:
        self.client.config_set("stop-writes-on-bgsave-error", "no")

    @staticmethod
    def folder(server: RedisServer) -> Path:
        return Path(server.config["dir"])


class NoPermission(Outage):
    def begin(self) -> None:
        self.client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-@write")

    def end(self) -> None:
        self.client.execute_command("ACL", "SETUSER", "default", "+@all")


class NoAuth(Outage):
    """A password is set and every connection cut."""

    def begin(self) -> None:
        self.client.config_set("requirepass", "secret")
        self.client.execute_command("AUTH", "secret")
        mine = self.client.client_id()
        for entry in self.client.client_list():
            if int(entry["id"]) != mine:
                self.client.execute_command("CLIENT", "KILL", "ID", entry["id"])

    def end(self) -> None:
        self.client.config_set("requirepass", "")


class OutOfMemory(Outage):
    def begin(self) -> None:
        self.client.config_set("maxmemory", "1")

    def end(self) -> None:
        self.client.config_set("maxmemory", "0")


class Busy(Outage):
    """A script that does not end."""

    def begin(self) -> None:
        self.client.config_set("lua-time-limit", "100")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        wait_until(self.busy, description="Redis is busy")

    def run(self) -> None:
        with self.server.client(socket_timeout=60) as client, contextlib.suppress(redis.RedisError):
            client.eval("while true do end", 0)

    def busy(self) -> bool:
        try:
            self.client.ping()
        except redis.RedisError as error:
            return "BUSY" in str(error)
        return False

    def end(self) -> None:
        self.client.execute_command("SCRIPT", "KILL")
        self.thread.join(10)


class ClientPause(Outage):
    def begin(self) -> None:
        self.client.execute_command("CLIENT", "PAUSE", "3500")

    def end(self) -> None:
        """It ends by itself: while it lasts, Redis would not even read an UNPAUSE."""


class Stopped(Outage):
    """The whole process stands still."""

    def begin(self) -> None:
        self.server.pause()

    def end(self) -> None:
        self.server.resume()


class Loading(Outage):
    """A restart with a data set that takes seconds to read."""

    def begin(self) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for number in range(40_000):
                pipe.set(f"ballast:{number}", number)
            pipe.execute()
        self.server.config["key-load-delay"] = "50"
        self.server.stop()
        self.thread = threading.Thread(target=self.server.start, daemon=True)
        self.thread.start()
        wait_until(self.loading, description="Redis is loading")

    def loading(self) -> bool:
        with self.server.client() as client:
            try:
                client.get("ballast:1")
            except redis.BusyLoadingError:
                return True
            except redis.RedisError:
                return False
            raise AssertionError("too fast to see it loading")

    def end(self) -> None:
        self.thread.join(20)


OUTAGES = {
    "NOSCRIPT": ScriptFlush,
    "READONLY": Readonly,
    "MISCONF": Misconf,
    "NOPERM": NoPermission,
    "NOAUTH": NoAuth,
    "OOM": OutOfMemory,
    "BUSY": Busy,
    "LOADING": Loading,
    "CLIENT PAUSE": ClientPause,
    "SIGSTOP": Stopped,
}


@pytest.fixture
def fragile(redis_factory: RedisFactory, tmp_path: Path) -> RedisServer:
    """A server with a data folder of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    return redis_factory(aof=True, config={"dir": str(folder)})


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTAGES)
@pytest.mark.parametrize("pool", ["threads"])
def test_case_34_outages_of_a_real_server(
    fragile: RedisServer, start: Starter, records: redis.Redis, name: str, pool: str
) -> None:
    """Jobs run while it begins, settle in the middle of it, wait over it, and come after it."""
    labels = [f"{number}" for number in range(8)]
    if name == "MISCONF":
        with fragile.client() as client:
            # A failing snapshot is what it is about; the append-only file would fail too.
            client.config_set("appendonly", "no")
    worker = start(pool, {"task_acks_late": True}, url=fragile.url(), concurrency=2)
    outage = OUTAGES[name](fragile)
    with make_app(fragile.url(), stock=True) as app:
        for label in labels:
            send(app, "sleep_for", 0.5, label)
    wait_until(lambda: len(started(records)) >= 2, description="two jobs run")
    outage.begin()
    wait_until(lambda: len(ended(records)) >= 2, 10, "the two end during the outage")
    moment(2)
    outage.end()
    with fragile.client() as client:
        wait_until(lambda: sorted(ended(records)) == labels, 30, "all jobs end")
        wait_until(lambda: nothing_left(client), 15, "nothing is left")
    assert sorted(started(records)) == labels, "each ran once"
    said = [line for line in worker.log().splitlines() if "Redis refused" in line]
    assert len(said) <= 3, "said once for each thing that was refused"
    with make_app(fragile.url(), stock=True) as app:
        send(app, "record", "after")
    wait_until(lambda: "after" in ended(records), 8, "the next job runs")
    assert worker.running


@pytest.mark.slow
@pytest.mark.parametrize("name", ["READONLY", "MISCONF", "NOPERM", "OOM"])
def test_case_34_a_reconnect_into_an_outage(
    fragile: RedisServer, start: Starter, records: redis.Redis, name: str
) -> None:
    """The worker must connect anew while Redis refuses: it tries until it may."""
    if name == "MISCONF":
        with fragile.client() as client:
            client.config_set("appendonly", "no")
    worker = start("threads", {"task_acks_late": True}, url=fragile.url())
    outage = OUTAGES[name](fragile)
    with make_app(fragile.url(), stock=True) as app:
        send(app, "sleep_for", 1, "one")
        send(app, "record", "two")
    wait_until(lambda: started(records) == ["one"], description="the job runs")
    with fragile.client() as client:
        mine = client.client_id()
        others = [entry["id"] for entry in client.client_list() if int(entry["id"]) != mine]
    outage.begin()
    with fragile.client() as client:
        for one in others:
            with contextlib.suppress(redis.ResponseError):
                client.execute_command("CLIENT", "KILL", "ID", one)
    moment(4)
    assert worker.running, worker.log()
    outage.client = fragile.client()
    outage.end()
    with fragile.client() as client:
        wait_until(lambda: {"one", "two"} <= set(ended(records)), 30, "all jobs end")
        wait_until(lambda: nothing_left(client), 15, "nothing is left")
    assert Counter(started(records)) == Counter(["one", "two"])
    assert len(worker.log().splitlines()) < 400, "the log is not flooded"


def test_case_34_a_full_redis_is_drained(
    broker: RedisServer, start: Starter, publish: Publisher, records: redis.Redis
) -> None:
    """Invariant 2: with memory full, what only frees memory in the end still works."""
    labels = [f"{number}" for number in range(20)]
    for label in labels:
        publish("record", label)
    start("threads", {"task_acks_late": True})
    wait_until(lambda: len(started(records)) >= 1, description="a job runs")
    with broker.client() as client:
        client.config_set("maxmemory", "1")
        wait_until(lambda: sorted(ended(records), key=int) == labels, 15, "all run")
        wait_until(lambda: nothing_left(client), 10, "nothing is left")


def test_case_34_a_busy_worker_renews_what_it_holds_after_script_flush(
    broker: RedisServer, start: Starter, publish: Publisher, records: redis.Redis
) -> None:
    """It sends nothing else meanwhile that would have the scripts loaded again."""
    settings = {"task_acks_late": True, "broker_transport_options": {"visibility_timeout": 2}}
    start("threads", settings)
    publish("sleep_for", 4, "long")
    wait_until(lambda: started(records) == ["long"], description="the job runs")
    with broker.client() as client:
        client.script_flush()
        ((tag, before),) = client.zrange("unacked_index", 0, -1, withscores=True)
        wait_until(lambda: (client.zscore("unacked_index", tag) or 0) > before, 3, "renewed")
        wait_until(lambda: nothing_left(client), 10, "it is acknowledged")
    assert started(records) == ["long"]
