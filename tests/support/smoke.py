"""Own pytest-celery's nodes on local processes, for machines where no Docker engine answers.

`tests/smoke/conftest.py` imports all of this module's fixtures (`from tests.support.smoke import
*`). They replace pytest-celery's by name: `celery_broker`, `celery_backend` (Redis only, not one
test for each vendor), and, without Docker, the containers beneath them and beneath the worker.
`celery_setup`, its clusters, node classes, app and tasks are pytest-celery's own either way.

With Docker, Redis and worker are containers: the worker's installs this repository, mounted
read-only, before it starts.
"""

from __future__ import annotations

import functools
import gc
import signal
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import docker
import docker.errors
import pytest
from pytest_celery import (
    DEFAULT_WORKER_CONTAINER_TIMEOUT,
    DEFAULT_WORKER_VOLUME,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBackend,
    RedisTestBroker,
)
from pytest_docker_tools import container, fxtr

from tests.support.redis_server import RedisBinary, RedisServer
from tests.support.workers import ROOT, Worker

KeepLog = Callable[[str, Callable[[], str]], None]


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


class ProcessWorkerContainer(CeleryWorkerContainer):
    """pytest-celery's worker container, as a worker process."""


@pytest.fixture
def smoke_pool() -> str:
    """The worker's `-P`."""
    return "strategies"


@pytest.fixture
def smoke_args() -> tuple[str, ...]:
    """More arguments for the worker."""
    return ("-c", "2")


@pytest.fixture
def celery_broker(celery_redis_broker: RedisTestBroker) -> RedisTestBroker:
    """Redis, and no other broker."""
    return celery_redis_broker


@pytest.fixture
def celery_backend(celery_redis_backend: RedisTestBackend) -> RedisTestBackend:
    """Redis, and no other result backend."""
    return celery_redis_backend


@pytest.fixture
def default_worker_command(
    default_worker_container_cls: type[CeleryWorkerContainer],
    smoke_pool: str,
    smoke_args: tuple[str, ...],
) -> list[str]:
    """The command line of pytest-celery's worker, with our pool."""
    command: list[str] = default_worker_container_cls.command("-P", smoke_pool, *smoke_args)
    if docker_answers():
        install = 'pip install -q --user /celery-strategies && exec "$@"'
        return ["sh", "-c", install, "sh", "python", "-m", *command]
    return command


if docker_answers():
    default_worker_container = container(
        image="{celery_base_worker_image.id}",
        ports=fxtr("default_worker_ports"),
        environment=fxtr("default_worker_env"),
        network="{default_pytest_celery_network.name}",
        volumes={
            "{default_worker_volume.name}": DEFAULT_WORKER_VOLUME,
            str(ROOT): {"bind": "/celery-strategies", "mode": "ro"},
        },
        wrapper_class=CeleryWorkerContainer,
        timeout=DEFAULT_WORKER_CONTAINER_TIMEOUT,
        command=fxtr("default_worker_command"),
    )
else:

    def _redis(binary: RedisBinary, keep_log: KeepLog, name: str) -> Iterator[RedisContainer]:
        with RedisServer(binary) as server:
            keep_log(name, server.log)
            # It was started and answers; `start` waits for that each time.
            yield ProcessRedisContainer(ProcessBehind(name, server, bool))

    @pytest.fixture
    def default_redis_broker(
        redis_binary: RedisBinary, keep_log: KeepLog
    ) -> Iterator[RedisContainer]:
        """A redis-server process for the broker node."""
        yield from _redis(redis_binary, keep_log, "broker")

    @pytest.fixture
    def default_redis_backend(
        redis_binary: RedisBinary, keep_log: KeepLog
    ) -> Iterator[RedisContainer]:
        """A redis-server process for the result backend node."""
        yield from _redis(redis_binary, keep_log, "backend")

    @pytest.fixture
    def default_worker_container_cls() -> type[CeleryWorkerContainer]:
        """The class behind the worker node."""
        return ProcessWorkerContainer

    @pytest.fixture
    def default_worker_container(
        default_worker_container_cls: type[CeleryWorkerContainer],
        default_worker_command: list[str],
        default_worker_env: dict[str, str],
        default_worker_initial_content: dict[str, bytes],
        keep_log: KeepLog,
    ) -> Iterator[CeleryWorkerContainer]:
        """A worker process that runs the project which pytest-celery would put on a volume."""
        behind_id = uuid.uuid4().hex
        arguments = default_worker_command[1:]
        at = arguments.index("-n") + 1
        # The node's name as pytest-celery works it out: the image would have this host name.
        hostname = arguments[at] = arguments[at].replace("%h", behind_id[:12])
        worker = Worker(
            default_worker_env["CELERY_BROKER_URL"],
            name=hostname,
            command=arguments,
            project={file: text.decode() for file, text in default_worker_initial_content.items()},
            # Its PYTHONPATH is a path inside the image.
            env={k: v for k, v in default_worker_env.items() if k != "PYTHONPATH"},
        )
        keep_log("worker", worker.log)
        behind = ProcessBehind(hostname, worker, worker.wait_ready)
        behind.id = behind_id
        with worker:
            worker.wait_ready()
            yield default_worker_container_cls(behind)


__all__ = [name for name in dir() if name.startswith(("celery_", "default_", "smoke_"))]
