"""Own pytest-celery's nodes: a strategies worker and two Redis, on containers or processes.

`tests/smoke/conftest.py` imports all of this module's fixtures (`from tests.support.smoke import
*`). They replace pytest-celery's by name: `celery_broker`, `celery_backend` (Redis only, not one
test for each vendor), the worker's node and container classes, its command line and settings,
and, where no Docker engine answers, the containers themselves by local processes. Setup,
clusters and the app that both sides share are pytest-celery's own either way.

With Docker, Redis and worker are containers: the worker's installs this repository, mounted
read-only, before it starts.

A test says what it wants by `smoke_inner_pool`, `smoke_settings`, `smoke_args` and
`smoke_neighbours`, each with `pytest.mark.parametrize` or a fixture of its own.
`smoke_stock_worker` is a second worker node, of a stock pool.
"""

from __future__ import annotations

import functools
import gc
import signal
import types
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import docker
import docker.errors
import pytest
import redis
from celery import Celery
from pytest_celery import (
    DEFAULT_WORKER_CONTAINER_TIMEOUT,
    DEFAULT_WORKER_VOLUME,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBackend,
    RedisTestBroker,
)
from pytest_docker_tools import container, fxtr

import celery_strategies  # noqa: F401  # the test's own app publishes to levels
from tests.smoke import tasks
from tests.support.redis_server import RedisBinary, RedisServer
from tests.support.waiting import wait_until
from tests.support.workers import ROOT, Worker

KeepLog = Callable[[str, Callable[[], str]], None]

#: Pools that must patch their process before anything else, so that `-P` names them.
GREEN = ("gevent", "eventlet")
CONSUMER = "celery_strategies:StrategyConsumer"


@functools.lru_cache
def docker_answers() -> bool:
    """Return whether a Docker engine answers."""
    with warnings.catch_warnings():
        # Where none does, docker-py leaves the socket that it tried to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        answers = _ping_docker()
        gc.collect()
    return answers


def _ping_docker() -> bool:
    try:
        client = docker.from_env(timeout=2)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


class ProcessBehind:
    """What a Docker container object is to pytest-celery, with a local process behind it."""

    def __init__(self, name: str, process: RedisServer | Worker, wait: Callable[[], Any]) -> None:
        self.name = name
        self.id = uuid.uuid4().hex
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": "127.0.0.1", "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
        }
        self.process = process
        self._wait = wait

    @property
    def status(self) -> str:
        return "running" if self.process.running else "exited"

    def reload(self) -> None:
        """A process is always what it is now."""

    def logs(self) -> bytes:
        return self.process.log().encode()

    def kill(self, signal: str | int | None = None) -> None:
        number = _signal_number(signal or "SIGKILL")
        if isinstance(self.process, Worker) and number != _signal_number("SIGKILL"):
            self.process.signal(number)
        elif number == _signal_number("SIGTERM"):
            self.process.stop()
        else:
            self.process.kill()

    def restart(self, timeout: float = 10) -> None:
        """End it as `docker restart` does, SIGTERM before SIGKILL, and start it again."""
        if self.process.running:
            if isinstance(self.process, Worker):
                self.process.terminate()
                try:
                    self.process.wait_exit(timeout)
                except AssertionError:
                    self.process.kill()
            else:
                self.process.stop()
        self.process.start()
        self._wait()


def _signal_number(name: str | int) -> int:
    return signal.Signals[name].value if isinstance(name, str) else name


class ProcessRedisContainer(RedisContainer):
    """pytest-celery's Redis container, as a private redis-server process."""

    @property
    def _server(self) -> RedisServer:
        server: RedisServer = self._container.process
        return server

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        return self._server.url()

    @property
    def host_url(self) -> str:
        return self._server.url()


class StrategiesWorkerContainer(CeleryWorkerContainer):
    """pytest-celery's worker container, with the tasks of the smoke tests as well as its own."""

    @classmethod
    def tasks_modules(cls) -> set[types.ModuleType]:
        modules: set[types.ModuleType] = super().tasks_modules()
        return modules | {tasks}


class ProcessWorkerContainer(StrategiesWorkerContainer):
    """The same, as a worker process."""


class StrategiesWorker(CeleryTestWorker):
    """pytest-celery's worker node, and what a strategies worker says of itself."""

    def control(self, command: str, timeout: float = 10, **arguments: Any) -> Any:
        """Send it a remote control command and return its reply."""
        replies = self.app.control.broadcast(
            command,
            arguments=arguments,
            destination=[self.hostname()],
            reply=True,
            limit=1,
            timeout=timeout,
        )
        assert replies, f"{self.hostname()} did not answer {command}"
        return replies[0][self.hostname()]

    def reads(self) -> dict[str, Any]:
        """Return the reader's part of `inspect stats`: strategy, sources, slots, held."""
        info: dict[str, Any] = self.control("stats")["strategies"]
        return info


class StrategiesSetup(CeleryTestSetup):
    """pytest-celery's setup, and what the tasks of the smoke tests leave on its nodes."""

    worker: StrategiesWorker

    @functools.cached_property
    def records(self) -> redis.Redis:
        """A client of the backend node."""
        client: redis.Redis = self.backend.container.client
        return client

    @functools.cached_property
    def messages(self) -> redis.Redis:
        """A client of the broker node."""
        client: redis.Redis = self.broker.container.client
        return client

    def teardown(self) -> None:
        for name in ("records", "messages"):
            if name in self.__dict__:
                self.__dict__[name].close()
        super().teardown()

    def ran(self) -> list[str]:
        """Return the labels of the tasks that started, in order."""
        labels: Any = self.records.lrange(tasks.RAN, 0, -1)
        return list(labels)

    def wait_ran(self, *labels: str, timeout: float = 30) -> list[str]:
        """Wait until all of `labels` have started; return every start so far, in order."""
        wait_until(lambda: set(labels) <= set(self.ran()), timeout, f"{labels} ran")
        return self.ran()

    def wait_settled(self, timeout: float = 20) -> None:
        """Wait until the broker has no message left, waiting or unacknowledged."""
        queues = {"unacked", *self.queues()}

        def left() -> list[str]:
            # A priority list is named after its queue, with a separator of Kombu's.
            names: Any = self.messages.keys()
            return [name for name in names if name.partition("\x06\x16")[0] in queues]

        wait_until(lambda: not left(), timeout, "no message is left")

    def queues(self) -> list[str]:
        """Return the queues that the worker reads."""
        return [source["queue"] for source in self.worker.reads()["sources"]]

    def open(self, count: int = 1) -> None:
        """Let `count` held tasks end."""
        self.records.rpush(tasks.GATE, *["go"] * count)


@pytest.fixture
def smoke_inner_pool() -> str:
    """The pool that runs the tasks."""
    return "prefork"


@pytest.fixture
def smoke_pool(smoke_inner_pool: str) -> str:
    """The worker's `-P`."""
    return smoke_inner_pool if smoke_inner_pool in GREEN else "strategies"


@pytest.fixture
def smoke_settings() -> Mapping[str, Any]:
    """More Celery settings, for worker and test; they go through JSON."""
    return {}


@pytest.fixture
def smoke_args() -> tuple[str, ...]:
    """More arguments for the worker."""
    return ("-c", "2")


@pytest.fixture
def smoke_neighbours() -> bool:
    """Whether the worker looks for others when it starts, as it does by default; takes a second."""
    return False


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    """Our setup."""
    return StrategiesSetup


@pytest.fixture
def celery_broker(celery_redis_broker: RedisTestBroker) -> RedisTestBroker:
    """Redis, and no other broker."""
    return celery_redis_broker


@pytest.fixture
def celery_backend(celery_redis_backend: RedisTestBackend) -> RedisTestBackend:
    """Redis, and no other result backend."""
    return celery_redis_backend


@pytest.fixture
def celery_worker(celery_setup_worker: CeleryTestWorker) -> CeleryTestWorker:
    """Our worker; named, so that a test may parametrize the fixtures beneath it."""
    return celery_setup_worker


@pytest.fixture
def celery_setup_app(
    celery_setup_cls: type[CeleryTestSetup],
    celery_setup_config: dict[str, Any],
    celery_setup_name: str,
) -> Iterator[Celery]:
    """pytest-celery's app, closed after the test."""
    app = celery_setup_cls.create_setup_app(
        celery_setup_config=celery_setup_config, celery_setup_app_name=celery_setup_name
    )
    yield app
    app.close()


@pytest.fixture
def default_worker_app(
    default_worker_app: Celery,
    smoke_inner_pool: str,
    smoke_pool: str,
    smoke_settings: Mapping[str, Any],
) -> Celery:
    """The app of worker and test, with the settings of this test."""
    conf = default_worker_app.conf
    conf.broker_connection_retry_on_startup = True
    if smoke_pool == "strategies":
        conf.strategies_pool = smoke_inner_pool
    elif smoke_pool in GREEN:
        conf.worker_consumer = CONSUMER
    conf.update(smoke_settings)
    return default_worker_app


@pytest.fixture
def default_worker_cls() -> type[CeleryTestWorker]:
    """Our worker node."""
    return StrategiesWorker


@pytest.fixture
def default_worker_command(
    default_worker_container_cls: type[CeleryWorkerContainer],
    smoke_pool: str,
    smoke_args: tuple[str, ...],
    smoke_neighbours: bool,
) -> list[str]:
    """The command line of pytest-celery's worker, with our pool."""
    alone = () if smoke_neighbours else ("--without-gossip", "--without-mingle")
    command: list[str] = default_worker_container_cls.command("-P", smoke_pool, *smoke_args, *alone)
    return ["sh", "-c", _INSTALL, "sh", "python", "-m", *command] if docker_answers() else command


@pytest.fixture
def smoke_stock_command(default_worker_container_cls: type[CeleryWorkerContainer]) -> list[str]:
    """The command line of a worker with a stock pool."""
    command: list[str] = default_worker_container_cls.command("-P", "prefork", "-c", "2")
    command[command.index("-n") + 1] = "stock@%h"
    return command


@pytest.fixture
def smoke_stock_worker(
    smoke_stock_container: CeleryWorkerContainer, default_worker_app: Celery
) -> Iterator[CeleryTestWorker]:
    """A worker node with a stock pool, for the same app; `stock@...` is its name."""
    worker = CeleryTestWorker(container=smoke_stock_container, app=default_worker_app)
    yield worker
    worker.teardown()


# Not from the mount itself: building writes beside the sources. Green pools want their extras.
_INSTALL = """set -e
rm -rf /tmp/source
cp -r /celery-strategies /tmp/source
pip install -q --user '/tmp/source[gevent,eventlet]'
exec "$@"
"""

if docker_answers():

    @pytest.fixture
    def default_worker_container_cls() -> type[CeleryWorkerContainer]:
        """The class behind the worker node."""
        return StrategiesWorkerContainer

    @pytest.fixture
    def default_redis_broker_command(default_redis_broker_cls: type[RedisContainer]) -> list[str]:
        """A broker that keeps its data over a restart, as a private server does below."""
        command: list[str] = default_redis_broker_cls.command("--appendonly", "yes")
        return command

    def _worker_container(command: str) -> Any:
        return container(
            image="{celery_base_worker_image.id}",
            ports=fxtr("default_worker_ports"),
            environment=fxtr("default_worker_env"),
            network="{default_pytest_celery_network.name}",
            volumes={
                "{default_worker_volume.name}": DEFAULT_WORKER_VOLUME,
                **{
                    str(ROOT / name): {"bind": f"/celery-strategies/{name}", "mode": "ro"}
                    for name in ("setup.cfg", "pyproject.toml", "README.md", "celery_strategies")
                },
            },
            wrapper_class=StrategiesWorkerContainer,
            timeout=DEFAULT_WORKER_CONTAINER_TIMEOUT,
            command=fxtr(command),
        )

    default_worker_container = _worker_container("default_worker_command")
    smoke_stock_container = _worker_container("smoke_stock_command")

else:

    def _redis(
        binary: RedisBinary, keep_log: KeepLog, name: str, *, aof: bool = False
    ) -> Iterator[RedisContainer]:
        with RedisServer(binary, aof=aof) as server:
            keep_log(name, server.log)
            # It was started and answers; `start` waits for that each time.
            yield ProcessRedisContainer(ProcessBehind(name, server, bool))

    @pytest.fixture
    def default_redis_broker(
        redis_binary: RedisBinary, keep_log: KeepLog
    ) -> Iterator[RedisContainer]:
        """A redis-server process for the broker node."""
        yield from _redis(redis_binary, keep_log, "broker", aof=True)

    @pytest.fixture
    def default_redis_backend(
        redis_binary: RedisBinary, keep_log: KeepLog
    ) -> Iterator[RedisContainer]:
        """A redis-server process for the result backend node."""
        yield from _redis(redis_binary, keep_log, "backend")

    @pytest.fixture
    def default_worker_container_cls() -> type[CeleryWorkerContainer]:
        """The class behind a worker node."""
        return ProcessWorkerContainer

    def _worker(
        cls: type[CeleryWorkerContainer],
        command: list[str],
        env: Mapping[str, str],
        content: Mapping[str, bytes],
        keep_log: KeepLog,
    ) -> Iterator[CeleryWorkerContainer]:
        """Run a worker process, with the project which pytest-celery would put on a volume."""
        behind_id = uuid.uuid4().hex
        arguments = command[1:]
        at = arguments.index("-n") + 1
        # The node's name as pytest-celery works it out: the image would have this host name.
        hostname = arguments[at] = arguments[at].replace("%h", behind_id[:12])
        worker = Worker(
            env["CELERY_BROKER_URL"],
            name=hostname,
            command=arguments,
            project={file: text.decode() for file, text in content.items()},
            # Its PYTHONPATH is a path inside the image.
            env={k: v for k, v in env.items() if k != "PYTHONPATH"},
        )
        keep_log("worker", worker.log)
        behind = ProcessBehind(hostname, worker, worker.wait_ready)
        behind.id = behind_id
        with worker:
            worker.wait_ready()
            yield cls(behind)

    @pytest.fixture
    def default_worker_container(
        default_worker_container_cls: type[CeleryWorkerContainer],
        default_worker_command: list[str],
        default_worker_env: dict[str, str],
        default_worker_initial_content: dict[str, bytes],
        keep_log: KeepLog,
    ) -> Iterator[CeleryWorkerContainer]:
        """The strategies worker's process."""
        yield from _worker(
            default_worker_container_cls,
            default_worker_command,
            default_worker_env,
            default_worker_initial_content,
            keep_log,
        )

    @pytest.fixture
    def smoke_stock_container(
        default_worker_container_cls: type[CeleryWorkerContainer],
        smoke_stock_command: list[str],
        default_worker_env: dict[str, str],
        default_worker_initial_content: dict[str, bytes],
        keep_log: KeepLog,
    ) -> Iterator[CeleryWorkerContainer]:
        """The stock worker's process."""
        yield from _worker(
            default_worker_container_cls,
            smoke_stock_command,
            default_worker_env,
            default_worker_initial_content,
            keep_log,
        )


__all__ = [name for name in dir() if name.startswith(("celery_", "default_", "smoke_"))]
