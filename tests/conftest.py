"""Own the fixtures that every test may use: private servers, workers, a proxy.

REDIS_VERSION (`6.2`, `7.0`, ...) picks the redis-server for the whole run; unset, it is the first
one found. FAIR_SHARE=1 switches fair share on in every worker, so that the tests of plain sources also
run on sorted ones. pytest-celery's own fixtures want Docker; `tests.support.smoke` replaces them where
they are used, and here its plugin is only loaded, never asked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import pytest
import redis

from tests.store.tools import Caller
from tests.support import redis_server as servers
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisBinary, RedisServer, SentinelCluster
from tests.support.workers import Worker

_LOGS = pytest.StashKey[list[tuple[str, Callable[[], str]]]]()
_LOG_TAIL = 20_000


def pytest_report_header() -> list[str]:
    """Name the servers that this run uses."""
    try:
        binary = servers.find(os.environ.get("REDIS_VERSION", "any"))
    except servers.RedisNotFoundError as error:
        return [f"redis: {error}"]
    with_tls = servers.find_with_tls(binary)
    if with_tls == binary:
        return [f"redis: {binary}"]
    return [f"redis: {binary}", f"with TLS: {with_tls or 'none, so its tests are left out'}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of TLS where no redis-server has it; the header says so."""
    if servers.find_with_tls() is None:
        items[:] = [item for item in items if item.get_closest_marker("tls") is None]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of a failed test's servers and workers."""
    report = yield
    if report.failed:
        for name, read in item.stash.get(_LOGS, []):
            with contextlib.suppress(OSError):
                report.sections.append((f"log of {name}", read()[-_LOG_TAIL:]))
    return report


@pytest.fixture
def keep_log(request: pytest.FixtureRequest) -> Callable[[str, Callable[[], str]], None]:
    """Register a log that is shown if the test fails."""
    logs = request.node.stash.setdefault(_LOGS, [])
    return lambda name, read: logs.append((name, read))


@pytest.fixture(scope="session")
def redis_binary() -> RedisBinary:
    """The redis-server program of this run."""
    return servers.find(os.environ.get("REDIS_VERSION", "any"))


@pytest.fixture(scope="session")
def _shared_server(redis_binary: RedisBinary) -> Iterator[RedisServer]:
    with RedisServer(redis_binary) as server:
        yield server


@pytest.fixture
def redis_server(
    _shared_server: RedisServer, keep_log: Callable[[str, Callable[[], str]], None]
) -> RedisServer:
    """The run's shared server: alive and empty. Don't stop it; `own_redis` is for that."""
    _shared_server.resume()
    if not _shared_server.running:
        _shared_server.start()
    begin = len(_shared_server.log())
    keep_log("redis-server", lambda: _shared_server.log()[begin:])
    with _shared_server.client() as client:
        client.flushall()
        client.script_flush()
        client.config_resetstat()
    return _shared_server


@pytest.fixture
def redis_db(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client (bytes) of the shared server, emptied for this test."""
    with redis_server.client() as client:
        yield client


@pytest.fixture
def caller(redis_db: redis.Redis) -> Iterator[Caller]:
    """Calls over a connection like the reader's, on the emptied shared server."""
    caller = Caller(redis_db)
    yield caller
    caller.close()


@pytest.fixture
def broker_url(redis_server: RedisServer) -> str:
    """The shared server's URL, emptied for this test."""
    return redis_server.url()


class RedisFactory(Protocol):
    """Start a private server: the arguments of `RedisServer` after the binary."""

    def __call__(self, **options: Any) -> RedisServer: ...


@pytest.fixture
def redis_factory(
    redis_binary: RedisBinary, keep_log: Callable[[str, Callable[[], str]], None]
) -> Iterator[RedisFactory]:
    """Start servers of this test's own, with options.

    With `transport="tls"` it is another redis-server if this run's was built without; such a test
    has the marker `tls`.
    """
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> RedisServer:
            binary = redis_binary
            if options.get("transport") == "tls":
                binary = servers.find_with_tls(redis_binary) or redis_binary
            server = stack.enter_context(RedisServer(binary, **options))
            keep_log(f"redis-server on {server.port or server.socket}", server.log)
            return server

        yield start


@pytest.fixture
def own_redis(redis_factory: RedisFactory) -> RedisServer:
    """A server of this test's own that it may stop, kill and restart (append-only file on)."""
    return redis_factory(aof=True)


@pytest.fixture
def sentinel(
    redis_binary: RedisBinary, keep_log: Callable[[str, Callable[[], str]], None]
) -> Iterator[SentinelCluster]:
    """A master, a replica and a sentinel of this test's own."""
    with SentinelCluster(redis_binary) as cluster:
        for server in cluster.servers:
            keep_log(f"redis-server on {server.port}", server.log)
        if cluster.sentinel is not None:
            keep_log("sentinel", cluster.sentinel.log)
        yield cluster


class WorkerFactory(Protocol):
    """Start a worker: the arguments of `Worker`, and `wait=False` not to wait until it is ready."""

    def __call__(
        self, broker_url: str | None = None, *, wait: bool = True, **options: Any
    ) -> Worker: ...


@pytest.fixture
def worker_factory(
    request: pytest.FixtureRequest, keep_log: Callable[[str, Callable[[], str]], None]
) -> Iterator[WorkerFactory]:
    """Start real worker processes, on the shared server unless a URL is given."""
    with contextlib.ExitStack() as stack:

        def start(broker_url: str | None = None, *, wait: bool = True, **options: Any) -> Worker:
            url = broker_url or request.getfixturevalue("broker_url")
            worker = Worker(url, **options)
            stack.callback(worker.close)
            keep_log(f"worker {worker.hostname}", worker.log)
            worker.start()
            return worker.wait_ready() if wait else worker

        yield start


class ProxyFactory(Protocol):
    """Put a proxy in front of a server."""

    def __call__(self, server: RedisServer) -> Proxy: ...


@pytest.fixture
def proxy_factory() -> Iterator[ProxyFactory]:
    """Put proxies in front of servers of this test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(Proxy(server.port))


@pytest.fixture
def proxy(redis_server: RedisServer, proxy_factory: ProxyFactory) -> Proxy:
    """A proxy in front of the shared server."""
    return proxy_factory(redis_server)
