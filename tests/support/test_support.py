"""The support code does what the other tests trust it to do (against stock Celery)."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import ProxyFactory, RedisFactory, WorkerFactory
from tests.support import redis_server as servers
from tests.support.apps import ended, make_app, read_events, started
from tests.support.ports import HOST
from tests.support.proxy import Frames, Proxy, RespError, command
from tests.support.redis_server import RedisServer, SentinelCluster
from tests.support.waiting import stays, wait_until
from tests.support.workers import celery, clean_environment, job, publish


class TestWaiting:
    def test_returns_what_the_condition_returned(self) -> None:
        values = iter([0, None, "now"])
        assert wait_until(lambda: next(values)) == "now"

    def test_names_description_and_last_value(self) -> None:
        with pytest.raises(AssertionError, match=r"the moon is full \(last was 0\)"):
            wait_until(lambda: 0, 0.05, "the moon is full")

    def test_swallows_only_what_it_was_told(self) -> None:
        empty: dict[str, str] = {}
        with pytest.raises(AssertionError, match="raised KeyError"):
            wait_until(empty.popitem, 0.05, swallow=KeyError)
        with pytest.raises(KeyError):
            wait_until(empty.popitem, 0.05)

    def test_stays_notices_one_false_value(self) -> None:
        values = iter([True, True, False])
        with pytest.raises(AssertionError, match="quiet"):
            stays(lambda: next(values), 5, "quiet")


class TestServer:
    def test_the_chosen_version_runs(self, redis_db: redis.Redis) -> None:
        version = str(redis_db.info("server")["redis_version"])
        wanted = os.environ.get("REDIS_VERSION")
        assert wanted is None or version.startswith(f"{wanted}.")

    def test_no_such_version_says_how_to_get_one(self) -> None:
        with pytest.raises(servers.RedisNotFoundError, match=r"0\.1 found.*apt-get install"):
            servers.find("0.1")

    def test_is_emptied_between_tests(self, redis_db: redis.Redis) -> None:
        assert redis_db.dbsize() == 0
        redis_db.set("left", "over")

    # The same again: with either order, one of the two comes second.
    test_is_emptied_between_tests_too = test_is_emptied_between_tests

    @pytest.mark.parametrize("kill", [False, True])
    def test_restart_keeps_port_and_data(self, own_redis: RedisServer, kill: bool) -> None:
        port, pid = own_redis.port, own_redis.pid
        with own_redis.client() as client:
            client.set("kept", "yes")
        own_redis.restart(kill=kill)
        assert own_redis.port == port
        assert own_redis.pid != pid
        with own_redis.client() as client:
            assert client.get("kept") == b"yes"

    def test_a_stopped_server_refuses_and_leaves_nothing(self, redis_factory: RedisFactory) -> None:
        server = redis_factory()
        server.stop()
        assert not server.running
        with server.client() as client, pytest.raises(redis.ConnectionError):
            client.ping()
        server.close()
        assert not server.folder.exists()

    def test_a_paused_server_is_silent_and_goes_on(self, redis_factory: RedisFactory) -> None:
        server = redis_factory()
        with server.client(socket_timeout=0.2) as client:
            server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            server.resume()
            assert client.ping()

    def test_unix_socket(self, redis_factory: RedisFactory) -> None:
        server = redis_factory(transport="unix")
        with server.client(db=2) as client:
            client.set("a", 1)
        with make_app(server.url(2), stock=True) as app, app.connection_for_read() as connection:
            channel: Any = connection.default_channel
            assert channel.client.get("a") == b"1"

    @pytest.mark.tls
    def test_tls(self, redis_factory: RedisFactory) -> None:
        server = redis_factory(transport="tls")
        with server.client() as client:
            client.set("a", 1)
        with make_app(server.url(), stock=True) as app, app.connection_for_read() as connection:
            channel: Any = connection.default_channel
            assert channel.client.get("a") == b"1"

    def test_acl(self, redis_factory: RedisFactory) -> None:
        server = redis_factory(
            acl=["user default off", "user me on >s3c:ret ~mine* &* +@all"],
            username="me",
            password="s3c:ret",
        )
        with server.client() as client:
            client.set("mine", 1)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("yours", 1)
        with redis.Redis.from_url(server.url()) as client:
            assert client.get("mine") == b"1"

    def test_more_directives(self, redis_factory: RedisFactory) -> None:
        with redis_factory(config={"maxmemory": "4mb"}).client() as client:
            assert client.config_get("maxmemory") == {"maxmemory": "4194304"}

    def test_a_wrong_directive_fails_with_the_log(self, redis_factory: RedisFactory) -> None:
        with pytest.raises(AssertionError, match="no-such-thing"):
            redis_factory(config={"no-such-thing": "1"})


@pytest.mark.slow
class TestSentinel:
    @pytest.mark.parametrize("kill_master", [False, True])
    def test_failover(self, sentinel: SentinelCluster, kill_master: bool) -> None:
        old = sentinel.master
        with sentinel.client() as client:
            client.set("kept", "yes")
            client.wait(1, 5000)
        new = sentinel.failover(kill_master=kill_master)
        assert new is not old
        assert sentinel.master is new
        with new.client() as client:
            assert client.get("kept") == b"yes"
            client.set("writable", 1)
        if not kill_master:
            with old.client() as client, pytest.raises(redis.exceptions.ReadOnlyError):
                client.set("writable", 1)


class TestFrames:
    WHOLE = (
        b"+OK\r\n$3\r\na\r\n\r\n*2\r\n:1\r\n*-1\r\n%1\r\n+k\r\n~1\r\n#t\r\n$-1\r\n_\r\n"
        b">2\r\n+invalidate\r\n*1\r\n$1\r\nq\r\n|1\r\n+ttl\r\n:1\r\n:7\r\n*0\r\n,1.5\r\n=5\r\ntxt:a\r\n"
    )

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
    def test_values_stay_whole_however_they_arrive(self, size: int) -> None:
        frames, got = Frames(), []
        for start in range(0, len(self.WHOLE), size):
            got += frames.feed(self.WHOLE[start : start + size])
        assert b"".join(got) == self.WHOLE
        assert frames.rest == b""
        assert len(got) == 11

    def test_anything_else_is_refused(self) -> None:
        with pytest.raises(RespError):
            Frames().feed(b"GET / HTTP/1.1\r\n")


class TestProxy:
    @staticmethod
    def client(proxy: Proxy, **options: Any) -> redis.Redis:
        settings: dict[str, Any] = {"socket_timeout": 2, "retry": Retry(NoBackoff(), 0)} | options
        return redis.Redis(host=HOST, port=proxy.port, **settings)

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_discards_a_reply_after_the_server_acted(
        self, proxy: Proxy, redis_db: redis.Redis, protocol: int
    ) -> None:
        with self.client(proxy, protocol=protocol) as client:
            assert client.incr("n") == 1
            lost = proxy.discard_reply(command("INCRBY"))
            assert client.ping()
            with pytest.raises(redis.ConnectionError):
                client.incr("n")
            (exchange,) = lost.wait()
            assert exchange.request == (b"INCRBY", b"n", b"1")
            assert exchange.reply == b":2\r\n"
            assert redis_db.get("n") == b"2"
            assert client.incr("n") == 3

    def test_discards_inside_a_pipeline_and_delivers_what_came_before(
        self, proxy: Proxy, redis_db: redis.Redis
    ) -> None:
        with self.client(proxy) as client:
            client.ping()
            lost = proxy.discard_reply(command("SET", containing=b"b"))
            pipe = client.pipeline(transaction=False).set("a", 1).set("b", 1).set("c", 1)
            with pytest.raises(redis.ConnectionError):
                pipe.execute()
            assert lost.done
            wait_until(lambda: redis_db.exists("a", "b", "c") == 3)

    def test_discards_a_request_before_the_server_sees_it(
        self, proxy: Proxy, redis_db: redis.Redis
    ) -> None:
        with self.client(proxy) as client:
            client.ping()
            lost = proxy.discard_request(command("INCRBY"))
            with pytest.raises(redis.ConnectionError):
                client.incr("n")
            assert lost.wait()[0].command == "INCRBY"
            assert redis_db.get("n") is None
            assert client.incr("n") == 1

    def test_drops_everyone(self, proxy: Proxy) -> None:
        with self.client(proxy) as client:
            client.ping()
            assert proxy.drop_all() == 1
            wait_until(lambda: proxy.connections == 0)
            assert wait_until(client.ping, swallow=redis.ConnectionError)

    def test_refuses_and_accepts_on_the_same_port(self, proxy: Proxy) -> None:
        port = proxy.port
        with self.client(proxy) as client:
            client.ping()
            proxy.refuse()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port), 1)
            proxy.accept()
            assert client.ping()

    def test_black_hole_swallows_and_heals(self, proxy: Proxy, redis_db: redis.Redis) -> None:
        with self.client(proxy, socket_timeout=0.3) as client:
            client.ping()
            proxy.black_hole()
            with pytest.raises(redis.TimeoutError):
                client.incr("n")
            assert redis_db.get("n") is None
            proxy.heal()
            assert client.incr("n") == 1

    def test_delay(self, proxy: Proxy) -> None:
        with self.client(proxy) as client:
            client.ping()
            proxy.delay(0.1)
            begin = time.monotonic()
            client.ping()
            assert time.monotonic() - begin >= 0.2

    def test_a_dead_server_is_a_lost_connection(
        self, own_redis: RedisServer, proxy_factory: ProxyFactory
    ) -> None:
        proxy = proxy_factory(own_redis)
        with self.client(proxy) as client:
            client.ping()
            own_redis.kill()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            own_redis.start()
            assert client.ping()


class TestWorker:
    def test_the_environment_is_clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CELERY_BROKER_URL", "redis://elsewhere")
        assert not [name for name in clean_environment() if name.startswith(("CELERY_", "PYTEST_"))]

    def test_runs_a_task_and_ends_warmly(
        self, worker_factory: WorkerFactory, broker_url: str, redis_db: redis.Redis
    ) -> None:
        worker = worker_factory(pool="solo", stock=True, queues=["alerts"])
        ids = publish(broker_url, [job("record", "a", queue="alerts")])
        wait_until(lambda: ended(redis_db) == ["a"])
        start, end = read_events(redis_db)
        assert [start.task, end.task] == ids * 2
        assert start.worker == worker.hostname
        assert start.queue == "alerts"
        assert start.at <= end.at
        assert worker.stop() == 0
        assert "Warm shutdown" in worker.log()
        assert not worker.running

    def test_ready_at_a_quiet_log_level(self, worker_factory: WorkerFactory) -> None:
        worker = worker_factory(pool="solo", stock=True, loglevel="ERROR")
        assert worker.ping(5)

    def test_kill_takes_the_children_along(
        self, worker_factory: WorkerFactory, broker_url: str, redis_db: redis.Redis
    ) -> None:
        worker = worker_factory(pool="prefork", stock=True)
        publish(broker_url, [job("sleep_for", 60, "long")])
        wait_until(lambda: started(redis_db) == ["long"])
        children = worker.children()
        assert read_events(redis_db)[0].pid in children
        worker.kill()
        assert worker.wait_exit() == -9
        wait_until(lambda: not any(_alive(pid) for pid in children), description="no children")

    def test_a_project_of_its_own(
        self, worker_factory: WorkerFactory, broker_url: str, redis_db: redis.Redis
    ) -> None:
        source = (
            "import celery\n"
            f"app = celery.Celery('proj', broker={broker_url!r})\n"
            "@app.task(name='mine')\n"
            "def mine():\n"
            "    with app.connection_for_write() as c: c.default_channel.client.set('ran', 1)\n"
        )
        worker_factory(pool="solo", app="proj", project={"proj.py": source})
        publish(broker_url, [job("proj.mine") | {"task": "mine"}])
        wait_until(lambda: redis_db.get("ran") == b"1")

    def test_one_that_does_not_start_shows_its_log(self, worker_factory: WorkerFactory) -> None:
        with pytest.raises(AssertionError, match="no_such_project"):
            worker_factory(app="no_such_project")

    def test_inspect_from_another_process(
        self, worker_factory: WorkerFactory, broker_url: str
    ) -> None:
        worker = worker_factory(pool="solo", stock=True)
        said = celery("inspect", "ping", "-d", worker.hostname, broker_url=broker_url, stock=True)
        assert "pong" in said.stdout

    @pytest.mark.tls
    def test_over_tls(self, worker_factory: WorkerFactory, redis_factory: RedisFactory) -> None:
        server = redis_factory(transport="tls")
        worker_factory(server.url(), pool="solo", stock=True)
        publish(server.url(), [job("record", "a")])
        with server.client() as client:
            wait_until(lambda: ended(client) == ["a"])


class TestTasks:
    def test_each_does_what_its_name_says(
        self, worker_factory: WorkerFactory, broker_url: str, redis_db: redis.Redis
    ) -> None:
        worker_factory(pool="prefork", stock=True)
        publish(
            broker_url,
            [
                job("noop"),
                job("add", 1, 2),
                job("echo", "echo"),
                job("fail", "fail"),
                job("retry_once", "retry"),
                job("reject", "reject"),
                job("reject", "requeue", kwargs={"requeue": True}),
                job("big", "x" * 100_000, "big"),
                job("kill_self", "kill"),
                job("record", "record"),
            ],
        )
        done = {"echo", "retry", "requeue", "big", "kill", "record"}
        wait_until(lambda: done <= set(ended(redis_db)), 30, "all ended that should")
        assert sorted(ended(redis_db)) == sorted(done)
        begun = started(redis_db)
        assert {label: begun.count(label) for label in set(begun)} == {
            "echo": 1, "fail": 1, "retry": 2, "reject": 1, "requeue": 2, "big": 1, "kill": 2,
            "record": 1,
        }  # fmt: skip


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path("/proc", str(pid), "status").read_text()
    except OSError:
        return False
